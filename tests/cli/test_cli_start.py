"""The command line before a verb runs: what it imports, which arguments it accepts, and its errors."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import PATIENCE_S

from megabatch import cli, config
from megabatch.cli.arguments import settings_of

RUN = "[batch]\nsize = 64\n[schedule]\nsteps = 1\n"
# CPU seconds of a start without torch; importing torch takes two to four.
LIGHT = 1.0

IMPORTED = """
import sys, time
sys.argv = ["megabatch", *sys.argv[1:]]
from megabatch.__main__ import main
try:
    main()
except SystemExit as exit_:
    print("status", exit_.code)
print("torch" in sys.modules, "rich" in sys.modules, time.process_time())
"""


def started(*arguments: str, program: str | None = IMPORTED, **options) -> subprocess.CompletedProcess[str]:
    command = ["-c", program] if program is not None else ["-m", "megabatch"]
    return subprocess.run([sys.executable, *command, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, **options)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["sweep", "--help"],
        ["plan", "--gpus", "many"],
        ["trian"],
        ["train", "--frehs"],
        ["train", "--show"],
    ],
    ids=" ".join,
)
def test_what_needs_no_torch_does_not_import_it(arguments):
    done = started(*arguments)
    torch, rich, seconds = done.stdout.splitlines()[-1].split()
    assert (torch, rich) == ("False", "False"), done.stderr
    assert float(seconds) < LIGHT


@pytest.mark.slow
def test_a_compiled_function_may_use_a_name_for_the_first_time():
    program = """
import torch, megabatch
def step(x, y):
    return megabatch.clip_loss(x, y, 2.0)
x, y = torch.randn(2, 4, 8)
assert torch.compile(step, backend="eager")(x, y) == step(x, y)
"""
    done = started(program=program)
    assert done.returncode == 0, done.stderr[-2000:]


def options_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str | None]]:
    """Yield every argument of a parser and of its verbs with its help, and the verbs with their descriptions."""
    yield parser.prog, parser.description
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from ((f"{parser.prog} {verb.dest}", verb.help) for verb in action._choices_actions)
            for verb in action.choices.values():
                yield from options_of(verb)
        else:
            yield f"{parser.prog} {'/'.join(action.option_strings) or action.dest}", action.help


def test_every_verb_and_every_option_is_explained_in_a_sentence():
    helps = dict(options_of(cli.build_parser()))
    assert len(helps) > 90 and "megabatch plan --price" in helps
    wrong = [name for name, text in helps.items() if not text or not text[0].isupper() or text.rstrip()[-1] not in ".…"]
    short = [name for name, text in helps.items() if text and len(text.split()) < 3]
    assert not wrong and not short


def test_help_of_every_verb_can_be_printed(capsys):
    verbs = next(action for action in cli.build_parser()._actions if isinstance(action, argparse._SubParsersAction)).choices
    for verb in verbs:
        with pytest.raises(SystemExit) as exit_:
            cli.main([verb, "--help"])
        assert exit_.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: megabatch {verb}")


@pytest.mark.parametrize(
    "arguments",
    [
        "train {file} --show batch.size=32 seed=3",
        "train --show {file} batch.size=32 seed=3",
        "train batch.size=32 {file} --show seed=3",
        "train batch.size=32 --show seed=3 {file}",
        "train seed=3 --show -- {file} batch.size=32",
    ],
)
def test_the_order_of_arguments_does_not_matter(arguments, tmp_path, capsys):
    file = tmp_path / "lr=3" / "run.toml"
    file.parent.mkdir()
    file.write_text(RUN)
    assert cli.main([part.format(file=file) for part in arguments.split()]) == 0
    (tmp_path / "shown.toml").write_text(capsys.readouterr().out)
    assert config.read(tmp_path / "shown.toml") == config.read(file, ["batch.size=32", "seed=3"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fit", "a.toml", "--cap", "4", "batch.size=8"], {"settings": ["a.toml", "batch.size=8"], "cap": 4}),
        (["profile", "--steps", "2", "a=1", "--json", "b=2"], {"settings": ["a=1", "b=2"], "steps": 2, "json": True}),
        (["noise", "a=1", "--branch", "8,16", "b=2"], {"settings": ["a=1", "b=2"], "branch": [8, 16]}),
        (["sweep", "a=1", "--batches", "8,16", "b=2"], {"settings": ["a=1", "b=2"], "batches": [8, 16]}),
        (["audit", "a", "--json", "b", "--data", "1M", "c"], {"files": ["a", "b", "c"], "data": "1M"}),
        (["embed", "RUN", "--side", "x", "a", "--out", "e", "b"], {"folder": "RUN", "files": ["a", "b"], "side": "x"}),
        (["embed", "--out", "e", "RUN", "a", "b"], {"folder": "RUN", "files": ["a", "b"]}),
        (["search", "RUN", "-k", "3", "a query"], {"folder": "RUN", "query": "a query", "k": 3}),
        (["search", "--side", "y", "RUN", "--", "-a"], {"folder": "RUN", "query": "-a", "side": "y"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_verb_takes_its_arguments_in_any_order(arguments, expected):
    parser = cli.build_parser()
    found = vars(parser.parse_args(arguments))
    assert {name: found[name] for name in expected} == expected
    # The parser keeps nothing of the first command line.
    assert vars(parser.parse_args(arguments)) == found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--frehs"], "'--frehs'; did you mean --fresh?"),
        (["plan", "--pirce=3"], "'--pirce'; did you mean --price?"),
        (["trian"], "did you mean train?"),
        (["plan", "--priority", "sped"], "must be one of accuracy, speed; did you mean speed?"),
        (["search", "RUN", "a", "b"], "unexpected argument 'b'"),
        (["plan", "--gpus", "many"], "--gpus"),
        (["audit"], "FILE"),
        (["train", "--fre"], "'--fre'; did you mean --fresh?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_in_the_arguments_is_one_line_that_helps(arguments, words, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["a.toml", "b.toml"], "'a.toml' and 'b.toml' are given"),
        (["rum.toml"], "did you mean run.toml?"),
        (["batch.size"], "batch.size=…"),
        (["elsewhere/run.toml"], "there is no such file"),
        (["batch.sice=3"], "batch"),
    ],
)
def test_a_missing_file_is_named_with_a_remedy(settings, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    with pytest.raises(ValueError) as error:
        settings_of(settings)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "completions"),
    [("megabatch tr", ["train"]), ("megabatch plan --pri", ["--price", "--priority"]), ("megabatch embed --side ", ["x", "y"])],
)
def test_a_shell_completes_verbs_options_and_choices(line, completions, tmp_path):
    pytest.importorskip("argcomplete")
    out = tmp_path / "completions"
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(out),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    done = started(program=None, env={**os.environ, **asked})
    assert done.returncode == 0, done.stderr
    assert out.read_text().split() == completions


TARGETS = {
    "a directory": ("folder{suffix}", "this is a directory"),
    "a place that nobody can write to": ("/proc/out{suffix}", "no file can be written there"),
    "a file instead of a folder": ("run.toml/out{suffix}", "Not a directory"),
}


@pytest.mark.parametrize("where", TARGETS)
@pytest.mark.parametrize(
    ("command", "suffix"),
    [
        (["embed", "RUN", "a.txt", "--out"], ".safetensors"),
        (["search", "RUN", "a", "--out"], ".png"),
        (["plan", "--out"], ".toml"),
        (["plan", "--html"], ".html"),
        (["env", "--measure", "--out"], ".json"),
    ],
    ids=" ".join,
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(command, suffix, where, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / f"folder{suffix}").mkdir()
    _refuse_to_work(monkeypatch)
    target, words = TARGETS[where]
    began = sorted(tmp_path.rglob("*"))
    assert cli.main([*command, target.format(suffix=suffix)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert sorted(tmp_path.rglob("*")) == began


@pytest.mark.parametrize("command", [["embed", "RUN", "a.txt"], ["search", "RUN", "a"]], ids=" ".join)
def test_a_missing_folder_is_refused_before_the_work(command, tmp_path, monkeypatch, capsys):
    """`plan` and `env` create the folder of their file; these verbs do not."""
    monkeypatch.chdir(tmp_path)
    _refuse_to_work(monkeypatch)
    assert cli.main([*command, "--out", "nowhere/out.png"]) == 2
    assert "there is no directory 'nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["fit"], ["profile"], ["noise"], ["sweep", "--batches", "8"]], ids=" ".join)
def test_a_file_in_the_place_of_a_folder_is_refused_before_the_work(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").write_text("mine")
    _refuse_to_work(monkeypatch)
    for out in ("out", "out/deeper", "/proc/out"):
        assert cli.main([*verb, "--out", out]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"--out is {out!r}: not a directory that can be written to" in line
    assert (tmp_path / "out").read_text() == "mine"


def _refuse_to_work(monkeypatch):
    def work(*arguments, **options):
        pytest.fail("the work has begun")

    # `embed` checks the run's folder before the work.
    monkeypatch.setattr("megabatch.training.inference._stored", lambda folder, trust_code: None)
    for place in (
        "megabatch.training.inference.assemble",
        "megabatch.planning.planner.plan",
        "megabatch.measuring.rates.measure_here",
        *(f"megabatch.measuring.{verb}.{verb}" for verb in ("fit", "profile", "noise", "sweep")),
    ):
        monkeypatch.setattr(place, work)


def test_a_plan_whose_name_says_no_format_is_refused_before_the_work(monkeypatch, capsys):
    _refuse_to_work(monkeypatch)
    assert cli.main(["plan", "--out", "plan.txt"]) == 2
    assert ".toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "unbuffered", "status"),
    # 141 is the status of a program that SIGPIPE ended, as in a shell.
    [("--help", "", 141), ("train --show", "", 141), ("train --show", "1", 141), ("train nowhere.toml", "", 2)],
)
def test_a_closed_pipe_ends_the_command_quietly(arguments, unbuffered, status):
    """In the last case both streams are the pipe: nobody reads the error, but the status stays."""
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open(writer, "wb") as closed:
        told = closed if status == 2 else subprocess.PIPE
        command = [sys.executable, "-m", "megabatch", *arguments.split()]
        done = subprocess.run(command, stdout=closed, stderr=told, timeout=PATIENCE_S, env=env)
    assert (done.returncode, done.stderr or b"") == (status, b"")


def test_a_full_disk_behind_standard_output_is_one_sentence():
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "megabatch", "train", "--show"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "No space left" in done.stderr
