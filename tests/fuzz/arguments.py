"""Targets that are command lines: every verb with its options, parsed and checked, with fakes for the work that follows.

The options come from the parser itself, so that new ones are covered. Fakes replace what comes after the last check: building
models, taking steps, starting processes.
"""

from __future__ import annotations

import argparse
import random
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from small_works import Stated, small_work
from torch import nn

from megabatch import cli, config, environment
from megabatch.costs.rates import Rates
from megabatch.measuring import rates as measuring_rates
from megabatch.measuring.fit import fit_run
from megabatch.measuring.noise import noise_run
from megabatch.measuring.profile import profile_run
from megabatch.measuring.sweep import sweep_runs
from megabatch.planning import estimator
from megabatch.planning import report as plan_report
from megabatch.planning.workload import Workload
from megabatch.training import inference, loop
from megabatch.training.schedules import Step

from .files import RATES, _tars
from .harness import Reached, Target
from .mutations import mutated
from .settings import COMMANDS, DEEPSPEED, KEYS, _overrides, run_table
from .values import as_json, as_toml, scalar, text

FILE, TRAINED = "run.toml", "trained"
WORDS = (
    *(
        "run.toml",
        "trained",
        "pairs.jsonl",
        "train.sh",
        "deepspeed.json",
        "facts.toml",
        "missing.toml",
        "texts.txt",
        "rates.json",
        ".",
    ),
    *(
        "measured.json",
        "out",
        "out/a.json",
        "out.html",
        "a.png",
        "vit + text",
        "ViT-L/14",
        "open_clip:ViT-B-32",
        "timm:resnet50",
        "a:b",
    ),
    *("10M", "1.5B", "8xA100-80GB", "H100", "cpu", "80GiB", "1e-3@256", "64,256", "0.5,1,2", "cuda:0,cuda:1", "8", "0.05", "1e-3"),
)


@cache
def verbs() -> dict[str, list[argparse.Action]]:
    """Return the verbs of the command line and the arguments of each."""
    build = getattr(cli, "build_parser", None) or cli._parser
    (subparsers,) = [action for action in build()._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: parser._actions for name, parser in subparsers.choices.items()}


def _value(action: argparse.Action, rng: random.Random) -> str:
    kind = rng.random()
    if action.choices and kind < 0.8:
        return str(rng.choice(list(action.choices)))
    if kind < 0.5:
        return rng.choice(WORDS)
    if kind < 0.75 and action.type in (int, float):
        return str(rng.choice((1, 2, 8, 64, 0.5, 1000)))
    if kind < 0.9:
        return str(scalar(rng))
    return mutated(rng.choice(WORDS).encode(), rng).decode("utf-8", "surrogateescape")[:5000]


def _option(action: argparse.Action, rng: random.Random) -> list[str]:
    name = rng.choice(action.option_strings)
    if action.nargs == 0:
        return [name]
    value = _value(action, rng)
    return [f"{name}={value}"] if rng.random() < 0.3 else [name, value]


def _positional(action: argparse.Action, rng: random.Random) -> list[str]:
    sensible = {"settings": [FILE], "folder": [TRAINED], "files": ["texts.txt"], "query": ["a text"], "model": [FILE]}
    found = sensible.get(action.dest, []) if rng.random() < 0.7 else [_value(action, rng)]
    if action.dest == "settings":
        found = found + (_overrides(rng) if rng.random() < 0.5 else [])
    return found


def _command_line(rng: random.Random) -> list[str]:
    name = rng.choice(list(verbs())) if rng.random() < 0.97 else text(rng)
    parts = []
    for action in verbs().get(name, []):
        # --help ends a command before anything else is checked.
        if isinstance(action, argparse._HelpAction):
            continue
        if not action.option_strings:
            parts.append(_positional(action, rng))
        elif action.required or rng.random() < 0.2:
            parts.append(_option(action, rng))
    if rng.random() < 0.1:
        parts.append(
            [rng.choice(("--", "-", "--help", "-h", "--version", "--trust-code", "--unknown", "-k", text(rng), rng.choice(KEYS)))]
        )
    if rng.random() < 0.5:
        rng.shuffle(parts)
    return [name, *(word for part in parts for word in part)]


def _case(rng: random.Random) -> tuple[list[str], bytes]:
    """A command line, and the configuration file that it may name."""
    table = run_table(rng) if rng.random() < 0.2 else {"schedule": {"samples": 1000}, "batch": {"size": 64}}
    return _command_line(rng), as_toml(table, rng)


def _write_files(content: bytes, folder: Path) -> None:
    """Write the files that a command line may name."""
    (folder / FILE).write_bytes(content)
    (folder / TRAINED / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / TRAINED / FILE).write_bytes(content)
    (folder / "texts.txt").write_text("a text\n")
    (folder / "train.sh").write_text(COMMANDS[0])


def _written_now_and_then(folder: Path) -> None:
    (folder / "deepspeed.json").write_bytes(as_json(DEEPSPEED, random.Random(0)))
    (folder / "facts.toml").write_text("[training]\nobjective = 'clip'\nbatch = 64\n")
    (folder / "rates.json").write_bytes(as_json(RATES, random.Random(0)))
    (folder / "pairs.tar").write_bytes(_tars()[0])


def _run(case: tuple[list[str], bytes], folder: Path) -> None:
    arguments, content = case
    _replace_work()
    _write_files(content, folder)
    if any(word.endswith((".json", "facts.toml", ".tar")) for word in arguments):
        _written_now_and_then(folder)
    before = list(sys.path)
    try:
        status = cli.main(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 99
    finally:
        sys.path[:] = before
    assert status in (0, 1, 2), f"exit status {status}"


@cache
def _replace_work() -> None:
    """Replace everything that computes by fakes; once per process."""

    def reached(*_: Any, **__: Any) -> Any:
        raise Reached

    source = SimpleNamespace(lengths=[1000])
    towers = SimpleNamespace(kind="text"), SimpleNamespace(kind="text")
    for module, name, instead in (
        (loop, "assemble", reached),
        (inference, "assemble", reached),
        (fit_run, "FitBench", _FitBench),
        (fit_run, "PredictedPeaks", _PredictedPeaks),
        (profile_run, "ProfileBench", _ProfileBench),
        (noise_run, "assemble", lambda run, ranks: run),
        (noise_run, "Training", _Training),
        (noise_run, "_measured", reached),
        (sweep_runs._Sweep, "outcomes", reached),
        (sweep_runs, "build_towers", lambda run: towers),
        (sweep_runs, "open_data", lambda run, x, y: (source, source)),
        (estimator, "Tools", _tools(estimator.Tools)),
        (environment, "describe", lambda: {"devices": [{"name": "cpu"}]}),
        (environment, "as_text", lambda report: ""),
        (measuring_rates, "measure_here", lambda: _RATES),
        (measuring_rates, "quick_rates", lambda: None),
    ):
        if not hasattr(module, name):
            raise AttributeError(f"{module} has no {name}: name here what now separates checks from work")
        setattr(module, name, instead)
    # Pages with figures take long, and nothing in them comes from arguments alone.
    plan_report.write = lambda plan, path: path  # type: ignore[assignment]


class _FitBench:
    rows = 64

    def __init__(self, run: config.Run, here: Any, folder: Path) -> None:
        self.ranks, self.largest = here, Step(0, 64, 1.0)
        self.state = [nn.Linear(1, 1)]

    def step(self, chunk: int) -> None:
        raise Reached


class _PredictedPeaks:
    def __init__(self, run: config.Run, bench: Any) -> None:
        pass

    def start(self, cap: int, limit: Any) -> None:
        return None


class _ProfileBench:
    length = 1000

    def __init__(self, run: config.Run, here: Any, folder: Path) -> None:
        pass

    def reading_per_s(self) -> float:
        return 1.0

    def measure(self, size: Any, steps: int) -> Any:
        raise Reached


class _Training:
    number = 0

    def __init__(self, run: config.Run, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.schedule = [Step(64 * number, 64, 1.0) for number in range(100)]
        self.parts = SimpleNamespace(held_out=SimpleNamespace(lengths=[10]), objective=None)

    def load(self, path: Path) -> None:
        if not path.is_dir():
            raise ValueError(f"{path}: there is no such checkpoint")


_RATES = Rates(**{key: value for key, value in RATES.items() if key != "measured"})  # type: ignore[arg-type]
_WORK = small_work(1e9, 1e6, 1e6, 100, 10**7)


def _tools(made: Any) -> Any:
    """Fakes for a plan, which build and trace nothing."""

    def workload(question: Any, run: config.Run, precision: Any, machine: Any) -> Workload:
        return Workload((_WORK, _WORK) if question.pairs else (_WORK,), (), ())

    def predict(question: Any, run: config.Run, work: Any, machine: Any) -> Any:
        def predicted(strategy: Any) -> Stated:
            peak = 10**8 + strategy.chunk * 10**5 + strategy.shard * run.loss.dim * 24
            return Stated(peak, peak, {"state": 10**8}, "backward", {"backward": peak})

        return predicted

    return lambda: made(workload, predict)


TARGETS = (Target("arguments", _case, _run, 5, ()),)
