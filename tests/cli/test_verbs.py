"""The verbs train, evaluate, embed and search from end to end, as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import PATIENCE_S, Command
from PIL import Image

from megabatch import cli

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220), "white": (250, 250, 250), "black": (5, 5, 5)}
SMALL = [
    "x.name=cnn",
    "x.options.size=16",
    "y.name=text",
    "loss.dim=16",
    "batch.size=40",
    "batch.chunk=20",
    "schedule.steps=30",
    "optimizer.lr=3e-3",
    "data.held_out=0.3",
    "data.label=colour",
    "evaluate.large=[]",
    "compute.device=cpu",
    "compute.threads=1",
]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def started_afresh(*arguments, launcher=(sys.executable,)):
    """Run the command in a new interpreter, as a shell does, and return what it printed; fail with its standard error."""
    command = [*launcher, "-m", "megabatch", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ | {"COLUMNS": "160"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture
def megabatch(tmp_path_factory):
    """Return a function that runs a command, which must exit with `status`."""

    def run(*arguments, status=0, cwd=None):
        command = Command(tmp_path_factory.mktemp("printed"), *arguments, cwd=cwd)
        assert command.wait() == status, command.stderr[-3000:]
        return command

    return run


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Create a table of images with two coloured halves and their captions, which contain a script."""
    folder = tmp_path_factory.mktemp("images")
    lines = ["filepath,caption,colour"]
    for left, a in COLOURS.items():
        for right, b in COLOURS.items():
            for shade in range(3):
                image = Image.new("RGB", (20, 20), tuple(max(0, c - 9 * shade) for c in a))
                image.paste(tuple(max(0, c - 9 * shade) for c in b), (10, 0, 20, 20))
                image.save(folder / f"{left}-{right}-{shade}.png")
                lines.append(f"{left}-{right}-{shade}.png,{left} beside {right} <script>alert({shade})</script>,{left}")
    (folder / "broken.png").write_bytes(b"no image")
    lines.append("broken.png,nothing to see,red")
    (folder / "pairs.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def run(images):
    """A trained run."""
    out = images / "run"
    done = started_afresh("train", f"data.source={images / 'pairs.csv'}", f"out={out}", *SMALL)
    assert "held-out recall among" in done.stdout and "report.html" in done.stdout
    return out


@pytest.mark.slow
def test_train_writes_a_report_that_executes_nothing(run):
    page = (run / "report.html").read_text("utf-8")
    assert "&lt;script&gt;alert" in page and "<script" not in page
    assert "broken.png" in (run / "log.jsonl").read_text() or "broken.png" not in page


def test_train_learns_from_images(run):
    result = json.loads((run / "result.json").read_text())
    assert result["evaluation"]["x_to_y"]["1"] > 2 * result["chance"]["1"]


@pytest.mark.slow
def test_evaluate_repeats_the_result_of_the_run(megabatch, run):
    found = json.loads(megabatch("evaluate", run, "--json").stdout)
    expected = json.loads((run / "result.json").read_text())["evaluation"]
    assert found == expected
    shown = megabatch("evaluate", run, "--classes").stdout
    assert "recall@10" in shown and "zero-shot accuracy, top 5: 100.0%" in shown


@pytest.mark.slow
def test_embed_writes_one_row_for_each_image_and_line(megabatch, run, images, tmp_path):
    from safetensors import safe_open

    texts = tmp_path / "texts.txt"
    texts.write_text("red beside blue\n\nblue beside red\n")
    megabatch("embed", run, images / "red-blue-0.png", texts, "--out", tmp_path / "e.safetensors")
    with safe_open(tmp_path / "e.safetensors", "pt") as file:
        embeddings, keys = file.get_tensor("embeddings"), json.loads(file.metadata()["keys"])
    assert keys == [str(images / "red-blue-0.png"), "red beside blue", "blue beside red"]
    assert embeddings.shape == (3, 16) and float((embeddings.norm(dim=1) - 1).abs().max()) < 1e-5


@pytest.mark.slow
def test_search_finds_and_draws(megabatch, run, images):
    done = megabatch("search", run, "red beside red", "-k", "3")
    assert done.stdout.count("beside") == 3 and (run / "search.png").stat().st_size > 1000
    assert megabatch("search", run, images / "red-red-0.png", "-k", "2").stdout.count("beside") == 2


@pytest.mark.slow
def test_the_same_command_goes_on_and_fresh_starts_over(megabatch, run, images):
    before = (run / "log.jsonl").read_text().count('"event": "step"')
    command = ["train", f"data.source={images / 'pairs.csv'}", f"out={run}", *SMALL]
    megabatch(*command)
    assert (run / "log.jsonl").read_text().count('"event": "step"') == before == 30
    megabatch(*command, "optimizer.lr=1e-3", status=2)
    megabatch(*command, "--fresh")


@pytest.mark.slow
def test_no_one_is_the_last_to_let_go_of_the_group():
    """If the garbage collector freed the group, it could wait for the group's thread while that waits for the interpreter."""
    script = """
import sys, torch.distributed as dist
from megabatch import config
from megabatch.training.distributed import ranks
with ranks(config.Compute(device="cpu")) as here:
    group = here.group
del here
assert not dist.is_initialized()
# This name, the argument of the call, and the one that stays.
print(sys.getrefcount(group))
"""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ | alone
    )
    assert done.returncode == 0 and int(done.stdout) >= 3, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
def test_torchrun_trains_on_two_ranks_and_starts_them_again_when_one_dies(images, tmp_path):
    out = tmp_path / "run"
    settings = [f"data.source={images / 'pairs.csv'}", f"out={out}", *SMALL, "checkpoint.every=5", "watch.report=false"]
    command = [*TORCHRUN, "--max-restarts=1", "-m", "megabatch", "train", *settings]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = time.monotonic() + PATIENCE_S
    while not (out / "checkpoints" / "step-00000005").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    told, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, told[-3000:]
    result = json.loads((out / "result.json").read_text())
    assert result["steps"] == 30 and result["samples"] == 30 * 40
    # The run is finished: started again, only one rank prints the result.
    assert started_afresh("train", *settings, launcher=TORCHRUN).stdout.count("held-out recall") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_a_checkpoint(images, tmp_path, number):
    out = tmp_path / "run"
    settings = [f"data.source={images / 'pairs.csv'}", f"out={out}", *SMALL, "schedule.steps=100000", "checkpoint.every=none"]
    command = Command(tmp_path / "printed", "train", *settings)
    end = time.monotonic() + PATIENCE_S
    while not (out / "log.jsonl").exists() or '"step"' not in (out / "log.jsonl").read_text():
        assert command.process.is_alive() and time.monotonic() < end, command.stderr
        time.sleep(0.05)
    os.kill(command.process.pid, number)
    assert command.wait() == 128 + number, command.stderr
    assert "the same command resumes" in command.stderr
    assert len(list((out / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "nowhere.toml"], "there is no such file"),
        (["train", "data.source=nowhere.csv", "schedule.steps=1"], "nowhere.csv"),
        (["train", "batch.size=0"], "batch.size is 0"),
        (["train", "x.name=resnet"], "resnet"),
        (["evaluate", "nowhere"], "is not the folder of a run"),
        (["search", "nowhere", "text"], "is not the folder of a run"),
        (["embed", "nowhere", "a.png"], "is not the folder of a run"),
    ],
)
def test_what_cannot_be_met_is_one_sentence(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.slow
def test_the_embedded_default_trains_on_glyphs_and_finds_them(megabatch, tmp_path):
    settings = ["schedule.steps=4", "batch.size=256", "evaluate.limit=300", "evaluate.large=[600]", f"out={tmp_path / 'run'}"]
    done = megabatch("train", *settings, "compute.device=cpu")
    assert "one step at 600 pairs, chunk 256" in done.stderr
    assert megabatch("search", tmp_path / "run", "greek small letter alpha", "-k", "4").stdout.count(",") >= 4


def test_show_prints_a_file_that_train_reads(tmp_path, capsys):
    assert cli.main(["train", "batch.size=512", "--show"]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "run.toml").write_text(shown)
    assert cli.main(["train", str(tmp_path / "run.toml"), "--show"]) == 0
    assert capsys.readouterr().out == shown
