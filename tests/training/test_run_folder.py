"""The folder of a run: files of the user are never deleted or replaced, and files of a run are known by name."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from PIL import Image
from small_runs import PAIRS, assert_equal, final, log_of, run_of, write_pairs
from world import fresh_processes

from megabatch import cli, config
from megabatch.files import partial_of, replacing, write_text
from megabatch.measuring.fit import fit
from megabatch.measuring.noise import noise
from megabatch.measuring.profile import profile
from megabatch.measuring.sweep import sweep
from megabatch.training import checkpoint, inference, run_folder
from megabatch.training.loop import train

# Small built-in towers.
SMALL = ["x.name=text", 'x.options={"width": 8, "buckets": 64}', "y.name=x", "schedule.steps=2", "compute.threads=1"]


@pytest.fixture
def pairs(tmp_path):
    (tmp_path / "data").mkdir()
    return write_pairs(tmp_path / "data" / "pairs.jsonl", PAIRS)


@pytest.fixture
def trained(pairs, tmp_path):
    """The configuration of a finished run."""
    run = run_of(pairs, tmp_path / "run", *SMALL)
    train(run)
    return run


def tree(folder):
    """Return everything below a folder: the content of files, the targets of links."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


def told(run, **options):
    """Return the error with which a training is refused."""
    with pytest.raises(ValueError) as caught:
        train(run, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("out", [".", "settings", "settings/..", "link", "only", "data", "hidden"])
def test_a_folder_that_no_run_made_stays_as_it_was(pairs, tmp_path, monkeypatch, out, fresh):
    """Even if it has a run.toml of the same run."""
    monkeypatch.chdir(tmp_path)
    for folder in ("settings", "only", "hidden"):
        Path(folder).mkdir()
        (Path(folder) / ("run.toml" if folder != "hidden" else ".secret")).write_text("# my remarks\n")
    Path("settings", "notes.txt").write_text("mine")
    Path("link").symlink_to("settings")
    text = "# Why these settings: see notes.txt\n" + config.as_toml(run_of(pairs, out, *SMALL))
    Path("settings", "run.toml").write_text(text)
    before = tree(tmp_path)
    assert cli.main(["train", "settings/run.toml", *(["--fresh"] if fresh else [])]) == 2
    assert "is not one of megabatch" in told(run_of(pairs, out, *SMALL), fresh=fresh)
    assert tree(tmp_path) == before


def test_out_that_is_a_file_is_refused(pairs, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "it is a file" in told(run_of(pairs, tmp_path / "file", *SMALL), fresh=True)
    assert (tmp_path / "file").read_text() == "mine"


def test_fresh_starts_over_in_a_folder_that_holds_what_runs_wrote(trained):
    out = Path(trained.out)
    first = final(out)
    (out / "nonfinite-step-7.json").write_text("{}")
    partial_of(out / "report.html").write_text("of a process that was killed")
    other = config.build(config.as_table(trained), ["optimizer.lr=0.02"])
    train(other, fresh=True)
    assert {line["step"] for line in log_of(out, "step")} == {1, 2} and len(log_of(out, "step")) == 2
    assert config.read(out / "run.toml") == other and run_folder.foreign(out) == []
    assert not (out / "nonfinite-step-7.json").exists() and not partial_of(out / "report.html").exists()
    assert any(not (tensor == first[name]).all() for name, tensor in final(out).items())


FOREIGN = {
    "a file": "notes.txt",
    "a file of nearly a run's name": "result.json.bak",
    "a copy of a checkpoint": "checkpoints/best/rank-00000.safetensors",
    "a file beside checkpoints": "checkpoints/README",
    "a file inside a checkpoint": "checkpoints/step-00000002/notes.txt",
    "an image beside those of the contact sheet": "contact/mine.png",
    "a folder of a file's name": "result.json/mine.txt",
    "a folder of a temporary file's name": ".run.toml.partial/mine.txt",
}


@pytest.mark.parametrize("name", FOREIGN.values(), ids=FOREIGN)
def test_fresh_refuses_a_folder_that_holds_anything_else_before_it_deletes(trained, name):
    path = Path(trained.out, name)
    if name.startswith("result.json/"):
        path.parent.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    before = tree(trained.out)
    sentence = told(trained, fresh=True)
    assert name.partition("/mine.txt")[0].partition("/rank")[0] in sentence and "move that elsewhere" in sentence
    assert {n: v for n, v in tree(trained.out).items() if n != run_folder.MARK} == {
        n: v for n, v in before.items() if n != run_folder.MARK
    }


def test_fresh_follows_no_link(trained, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "step-00000009").mkdir()
    (tmp_path / "elsewhere" / "step-00000009" / "checkpoint.json").write_text("mine")
    for name in ("wandb", "tensorboard", "contact"):
        Path(trained.out, name).symlink_to(tmp_path / "elsewhere")
    assert "contact" in told(trained, fresh=True) and len(tree(tmp_path / "elsewhere")) == 2
    # A run never creates links, but other programs do in their own folders.
    for name in ("wandb", "tensorboard", "contact"):
        Path(trained.out, name).unlink()
    Path(trained.out, "wandb").mkdir()
    Path(trained.out, "wandb", "latest-run").symlink_to(tmp_path / "elsewhere")
    train(trained, fresh=True)
    assert not Path(trained.out, "wandb").exists() and len(tree(tmp_path / "elsewhere")) == 2


class Killed(BaseException):
    """Like SIGKILL: no code of the package catches it."""


def test_fresh_cut_short_at_any_moment_leaves_a_folder_that_fresh_can_clear(trained, tmp_path, monkeypatch):
    out = Path(trained.out)
    (out / "contact").mkdir()
    (out / "contact" / "1-x.png").write_bytes(b"")
    left = 0

    def counted(real):
        def call(*args, **options):
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return real(*args, **options)

        return call

    for name in ("unlink", "rmdir", "replace", "remove"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    for moment in range(1, 1000):
        left = 0
        copy = tmp_path / "copies" / str(moment)
        for name, content in tree(out).items():
            if content is None:
                (copy / name).mkdir(parents=True)
            else:
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                (copy / name).write_bytes(content)
        left = moment
        try:
            run_folder.clear(copy)
            break
        except Killed:
            left = 0
        assert (copy / run_folder.MARK).exists() and run_folder.foreign(copy) == []
        for path in checkpoint.available(copy / "checkpoints"):
            assert {p.name for p in path.iterdir()} == {"checkpoint.json", "rank-00000.safetensors"}
        run_folder.clear(copy)
        assert tree(copy).keys() == {run_folder.MARK, "run.toml"}
    assert moment > 9 and tree(copy).keys() == {run_folder.MARK, "run.toml"}


def test_fresh_keeps_what_the_run_is_to_read(trained, pairs):
    weights = Path(trained.out, "checkpoints", "step-00000002", "rank-00000.safetensors")
    from_before = config.build(config.as_table(trained), [f"x.weights={weights}"])
    assert "x.weights is" in told(from_before, fresh=True) and weights.exists()


def test_a_folder_of_images_does_not_get_the_runs_own(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (8, 8)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"number {number}")
    before = tree(folder)
    run = config.build({"out": str(folder / "runs" / "a"), "data": {"source": str(folder)}}, ["schedule.steps=1"])
    for fresh in (False, True):
        assert "inside the folder that data.source names" in told(run, fresh=fresh)
    assert tree(folder) == before


def test_resuming_leaves_files_of_others_alone(trained):
    out = Path(trained.out)
    for name in ("notes.txt", "checkpoints/mine.txt", "contact.txt"):
        (out / name).write_text("mine")
    (out / "result.json").unlink()
    for name in ("step-best.partial", "step-00000002-copy.old"):
        (out / "checkpoints" / name).mkdir()
    train(config.build(config.as_table(trained), ["checkpoint.keep=1"]))
    checkpoint.save(out / "checkpoints", 3, {"w": torch.zeros(1)}, {}, keep=1)
    assert (out / "result.json").exists() and len(list((out / "checkpoints").iterdir())) == 4
    assert all((out / name).read_text() == "mine" for name in ("notes.txt", "checkpoints/mine.txt", "contact.txt"))


def test_the_runs_own_file_keeps_its_comments_and_layout_while_it_says_the_same(trained, capsys):
    path = Path(trained.out, "run.toml")
    text = "# why: see the notes\n" + path.read_text().replace("seed = 0", "seed = 0  # always")
    path.write_text(text)
    inode = path.stat().st_ino
    assert cli.main(["train", str(path)]) == 0 and path.read_text() == text
    assert cli.main(["train", str(path), "--fresh"]) == 0 and path.read_text() == text
    # A key that may change on resume was changed in the file itself, which still describes the run.
    text = text.replace("chunk = 8", "chunk = 5  # memory")
    path.write_text(text)
    assert cli.main(["train", str(path)]) == 0 and path.read_text() == text and path.stat().st_ino == inode


def test_an_edited_file_that_no_longer_says_what_the_run_does_is_kept_beside(trained, capsys):
    path = Path(trained.out, "run.toml")
    for number, chunk in enumerate((5, 6), start=1):
        edited = f"# my remark {number}\n" + path.read_text()
        path.write_text(edited)
        assert cli.main(["train", str(path), f"batch.chunk={chunk}"]) == 0
        assert config.read(path).batch.chunk == chunk and "#" not in path.read_text()
        assert path.with_name(f"run.toml.{number}").read_text() == edited
    # The file that the run itself wrote was not edited.
    assert cli.main(["train", str(path), "batch.chunk=7"]) == 0 and config.read(path).batch.chunk == 7
    assert not path.with_name("run.toml.3").exists()
    # --fresh keeps the comments of the user.
    assert cli.main(["train", str(path), "--fresh"]) == 0 and path.with_name("run.toml.2").exists()


def test_a_torn_line_of_the_log_ends_with_the_kill(trained):
    log = Path(trained.out, "log.jsonl")
    whole = log.read_bytes()
    for torn in (b'{"event": "st', b'{"event": "note", "text": "\xc3', b"x" * 200_000, b"\0" * 9):
        log.write_bytes(whole + torn)
        train(trained)
        lines = log.read_bytes()
        assert lines.startswith(whole) and lines.endswith(b"}\n") and len(lines) > len(whole)
        assert all(json.loads(line)["event"] for line in lines.splitlines())
    log.write_bytes(b'{"event": "st')
    train(trained)
    assert all(json.loads(line)["event"] for line in log.read_bytes().splitlines())


def test_a_run_of_a_version_without_the_mark_is_adopted_by_creating_it(trained):
    mark = Path(trained.out, run_folder.MARK)
    mark.unlink()
    before = tree(trained.out)
    for fresh in (False, True):
        assert f"create the file {str(mark)!r}" in told(trained, fresh=fresh)
    assert tree(trained.out) == before
    mark.touch()
    train(trained)
    assert json.loads(mark.read_text())["verb"] == "train"


def test_a_folder_in_another_format_is_refused(trained):
    mark = Path(trained.out, run_folder.MARK)
    mark.write_text('{"format": 2, "megabatch": "9.0"}')
    before = tree(trained.out)
    for fresh in (False, True):
        assert "megabatch 9.0 wrote it in format 2" in told(trained, fresh=fresh)
    assert tree(trained.out) == before


def test_two_processes_do_not_write_to_one_folder(trained, monkeypatch, capsys):
    monkeypatch.setattr(run_folder, "WAIT", 0.3)
    with run_folder.claimed(trained.out, "train"):
        before = tree(trained.out)
        for fresh in (False, True):
            assert f"process {os.getpid()} on" in told(trained, fresh=fresh)
        assert tree(trained.out) == before
    assert capsys.readouterr().err.count("waiting up to") == 2
    train(trained, fresh=True)


def test_a_file_system_without_locks_is_told(trained, monkeypatch):
    def unknown(descriptor):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(run_folder, "_try_lock", unknown)
    with pytest.warns(UserWarning, match="has no locks"):
        train(trained)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_a_forked_process_does_not_hold_the_folder(trained, monkeypatch):
    """Like the workers of a data loader, which live for seconds after their parent is killed."""
    # The child closes the file first, which takes a moment.
    monkeypatch.setattr(run_folder, "WAIT", 3.0)
    with run_folder.claimed(trained.out, "train"):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with run_folder.claimed(trained.out, "train"):
            pass
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


VERBS = {
    "fit": lambda run, out: fit(run, out=out),
    "profile": lambda run, out: profile(run, out=out),
    "noise": lambda run, out: noise(run, out=out),
    "sweep": lambda run, out: sweep(run, batches=[8], rates=(1,), seeds=1, out=out),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_measurement_leaves_runs_and_files_of_others_alone(trained, tmp_path, verb):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "log.jsonl").write_text("mine")
    for out, words in ((tmp_path / "mine", "is not one of megabatch"), (Path(trained.out), "is one of `megabatch train`")):
        before = tree(out)
        with pytest.raises(ValueError, match=words):
            VERBS[verb](trained, out)
        assert tree(out) == before
    with run_folder.claimed(tmp_path / "other", verb):
        pass
    other = config.build(config.as_table(trained), [f"out={tmp_path / 'other'}"])
    assert f"is one of `megabatch {verb}`" in told(other, fresh=True)


def test_noise_keeps_the_checkpoint_that_it_begins_with(trained):
    path = checkpoint.newest(Path(trained.out) / "checkpoints")
    with pytest.raises(ValueError, match="inside out"):
        noise(trained, checkpoint=path, out=Path(trained.out))


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--out"],
        ["plan", "--html"],
        ["env", "--measure", "--out"],
        ["embed", "nowhere", "words.txt", "--out"],
        ["search", "nowhere", "words", "--out"],
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-1]}",
)
def test_a_file_that_exists_is_replaced_only_where_that_is_said(tmp_path, capsys, arguments):
    mine = tmp_path / "run.toml"
    mine.write_text("# mine\n")
    assert cli.main([*arguments, str(mine)]) == 2
    printed = capsys.readouterr()
    assert "--overwrite" in printed.err and len(printed.err.splitlines()) == 1
    assert mine.read_text() == "# mine\n" and [path.name for path in tmp_path.iterdir()] == ["run.toml"]
    assert cli.main([*arguments, str(tmp_path)]) == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_overwrite_replaces(tmp_path, capsys, monkeypatch):
    found = [inference.Answer(0.5, "red", Image.new("RGB", (8, 8)), "a.png")]
    monkeypatch.setattr(inference, "search", lambda *arguments, **options: found)
    mine = tmp_path / "mine.png"
    mine.write_text("mine")
    assert cli.main(["search", "run", "red", "--overwrite", "--out", str(mine)]) == 0
    with Image.open(mine) as sheet:
        assert sheet.width > 100


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no such files here")
def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    """A process with permission to replace /dev/null must not do so."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "text")
        assert os.read(reader, 9) == b"text" and pipe.is_fifo()
    finally:
        os.close(reader)
    with pytest.raises(OSError), replacing(tmp_path) as temporary:
        temporary.write_text("a file in place of a folder")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def _write_everything(images, out, notes):
    """A process in which runs write everything they can, and which records every name they touch below `out`."""
    touched = []

    def note(event, args):
        writes = event == "open" and isinstance(args[0], (str, bytes, os.PathLike)) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.mkdir"):
            name = os.fsdecode(args[1] if event == "os.rename" else args[0])
            if name.startswith(f"{out}/"):
                touched.append((name.removeprefix(f"{out}/"), event != "open" and (event == "os.mkdir" or os.path.isdir(args[0]))))

    class Stub:
        def log(self, numbers, step):
            pass

        def finish(self):
            pass

    module = types.ModuleType("wandb")
    module.init = lambda dir, **options: [write_text(_made(Path(dir, "wandb", "run-1")) / "config.yaml", ""), Stub()][1]
    sys.modules["wandb"] = module
    sys.addaudithook(note)
    options = ["x.name=cnn", "x.options.size=16", "y.name=text", "y.options.buckets=64", "loss.dim=8", "schedule.steps=3"]
    options += ["batch.size=8", "batch.chunk=8", "checkpoint.every=1", "checkpoint.keep=1", "evaluate.every=2", "data.held_out=0.3"]
    options += ["watch.tensorboard=true", "watch.wandb=project", "watch.bar=false", "compute.device=cpu", "compute.threads=1"]
    run = config.build({"out": str(out), "data": {"source": str(images)}}, options)
    train(run)
    assert cli.main(["embed", str(out), str(images / "0.png")]) == 0
    assert cli.main(["search", str(out), "number 1"]) == 0
    from megabatch.training.loop import Training

    Training.step = lambda self, *args: self._stop_at_nonfinite(float("nan"), 0.0, args[1])
    assert cli.main(["train", str(out / "run.toml"), "schedule.steps=4", "--fresh"]) == 1
    notes.write_text(json.dumps(touched))


def _made(folder):
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.slow
def test_every_file_that_a_run_writes_is_known_by_name(tmp_path):
    """Temporary files and folders too: leftovers of a killed process must not make --fresh refuse."""
    images, out, notes = tmp_path / "images", tmp_path / "run", tmp_path / "touched.json"
    images.mkdir()
    for number in range(24):
        Image.new("RGB", (8, 8), (10 * number, 0, 255)).save(images / f"{number}.png")
        (images / f"{number}.txt").write_text(f"number {number}")
    process = fresh_processes().Process(target=_write_everything, args=(images, out, notes))
    process.start()
    process.join(240)
    assert process.exitcode == 0
    touched = json.loads(notes.read_text())
    names = {name for name, _ in touched}
    for sample in (".run.toml.partial", "contact.png", "log.jsonl", "nonfinite-step-1.json", "checkpoints/step-00000001.partial"):
        assert sample in names
    assert any(name.startswith("contact/.") for name in names) and any(name.startswith("tensorboard/events") for name in names)
    for name, folder in touched:
        (tmp_path / "mirror" / name).parent.mkdir(parents=True, exist_ok=True)
        _made(tmp_path / "mirror" / name) if folder else (tmp_path / "mirror" / name).touch()
    assert run_folder.foreign(tmp_path / "mirror") == [] and run_folder.foreign(out) == []
    run_folder.clear(out)
    assert tree(out).keys() == {run_folder.MARK, "run.toml"}


def test_embeddings_appear_whole_or_not_at_all(trained, tmp_path, monkeypatch):
    import safetensors.torch

    texts, out = tmp_path / "texts.txt", tmp_path / "e.safetensors"
    texts.write_text("red\nblue\n")
    out.write_bytes(b"before")

    def torn(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", torn)
    with pytest.raises(OSError, match="No space left"):
        inference.embed(trained.out, [texts], out)
    assert out.read_bytes() == b"before" and not partial_of(out).exists()
    monkeypatch.undo()
    assert inference.embed(trained.out, [texts], out) == 2 and len(out.read_bytes()) > 40


def test_a_stopped_run_goes_on_by_its_own_file(trained, pairs, tmp_path):
    """With the mark, a lock and all other files."""
    longer = run_of(pairs, tmp_path / "parts", *SMALL, "checkpoint.every=1")
    train(longer)
    last = checkpoint.newest(tmp_path / "parts" / "checkpoints")
    for path in last.iterdir():
        path.unlink()
    last.rmdir()
    assert cli.main(["train", str(tmp_path / "parts" / "run.toml")]) == 0
    assert_equal(final(tmp_path / "parts"), final(trained.out))
