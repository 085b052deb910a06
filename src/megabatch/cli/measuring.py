"""The verbs that choose a batch by running: `fit`, `profile`, `noise` and `sweep`. Each writes what `plan --measured` reads."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import measured
from .words import SETTINGS_HELP, settings_of


def add(verbs: Any) -> None:
    fit = _verb(verbs, "fit", _fit, "the largest chunk that runs")
    fit.add_argument("--budget", help="memory that may be taken, 8GiB; on a GPU by default what it has")
    fit.add_argument("--margin", type=float, default=0.05, help="share of the memory that stays free (0.05)")
    fit.add_argument("--cap", type=int, help="no size above this is tried")
    fit.add_argument("--start", type=int, help="where to start; by default where the prediction says")

    profile = _verb(verbs, "profile", _profile, "time and memory of a step against the batch or the chunk")
    profile.add_argument("--batches", type=_numbers, help="sizes of the batch: 64,256,1024")
    profile.add_argument("--chunks", type=_numbers, help="sizes of the chunk, at the run's batch")
    profile.add_argument("--steps", type=int, default=5, help="timed steps at each size (5)")
    profile.add_argument("--critical", type=float, help="the critical batch, where it is known")

    noise = _verb(verbs, "noise", _noise, "the gradient noise while training, and the batch it allows")
    noise.add_argument("--steps", type=int, help="steps to train; by default all, or half of them where branches follow")
    noise.add_argument("--window", type=int, help="steps that an estimate looks back on")
    noise.add_argument("--branch", type=_numbers, help="batches to branch to afterwards, to see which lose nothing: 128,512")
    noise.add_argument("--updates", type=int, default=8, help="updates of the largest batch on a branch (8)")
    noise.add_argument("--repeats", type=int, default=3, help="times that each branch is taken, on other samples (3)")
    noise.add_argument("--tolerance", type=float, default=0.01, help="held-out loss that may be lost (0.01)")
    noise.add_argument("--checkpoint", type=Path, help="a checkpoint of this run to begin with")

    sweep = _verb(verbs, "sweep", _sweep, "train at several batches, each with its own rate: which one is worth it")
    sweep.add_argument("--batches", type=_numbers, required=True, help="64,256,1024")
    sweep.add_argument("--rates", type=_factors, default=(0.5, 1.0, 2.0), help="factors around the scaling rule (0.5,1,2)")
    sweep.add_argument("--seeds", type=int, default=3, help="seeds of the best rate of each batch (3)")
    sweep.add_argument("--same", choices=("samples", "updates", "time"), default="samples", help="what all runs have equal")
    sweep.add_argument("--seconds", type=float, help="the time that each run takes, with --same time")
    sweep.add_argument("--decays", type=_factors, default=(1.0,), help="factors of the weight decay, tried at the best rate (1)")
    sweep.add_argument("--extend", type=int, default=2, help="further rates where the best lies at the edge (2)")
    sweep.add_argument("--jobs", type=int, default=1, help="runs at a time")
    sweep.add_argument("--devices", type=lambda text: text.split(","), help="devices that share the runs: cuda:0,cuda:1")


def _verb(verbs: Any, name: str, run: Callable[..., None], words: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=words, description=run.__doc__)
    parser.add_argument("settings", nargs="*", metavar="run.toml | key=value", help=SETTINGS_HELP)
    parser.add_argument("--out", type=Path, default=Path("runs") / name, help=f"folder of what is written (runs/{name})")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)
    return parser


def _fit(arguments: argparse.Namespace) -> None:
    """The largest chunk that runs: real steps at growing sizes, from the predicted one on."""
    from ..measuring.fit import fit, show
    from ..planning.hardware import parse_bytes

    options = {name: getattr(arguments, name) for name in ("margin", "cap", "start", "out")}
    budget = None if arguments.budget is None else parse_bytes(arguments.budget)
    _say(fit(settings_of(arguments.settings), budget=budget, **options), show, arguments)


def _profile(arguments: argparse.Namespace) -> None:
    """Samples a second, seconds a step and peak memory at several sizes, beside what was predicted."""
    from ..measuring.profile import profile, show

    options = {name: getattr(arguments, name) for name in ("batches", "chunks", "steps", "critical", "out")}
    _say(profile(settings_of(arguments.settings), **options), show, arguments)


def _noise(arguments: argparse.Namespace) -> None:
    """How noisy the gradient is, from what training computes anyway, and the critical batch that follows from it."""
    from ..measuring.noise import noise, show

    options = {
        name: getattr(arguments, name) for name in ("steps", "branch", "updates", "repeats", "tolerance", "checkpoint", "out")
    }
    window = {} if arguments.window is None else {"window": arguments.window}
    _say(noise(settings_of(arguments.settings), **options, **window), show, arguments)


def _sweep(arguments: argparse.Namespace) -> None:
    """Trains at several batches, each at its own learning rate, and says in words which one is worth it. Given again, the command
    goes on where it was stopped."""
    from ..measuring.sweep import show, sweep

    names = ("batches", "rates", "seeds", "same", "seconds", "decays", "extend", "jobs", "devices", "out")
    options = {name: getattr(arguments, name) for name in names}
    _say(sweep(settings_of(arguments.settings), **options), show, arguments)


def _say(found: measured.Measured, show: Callable[[measured.Measured], None], arguments: argparse.Namespace) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    if arguments.json:
        print(measured.as_json(found))
        return
    show(found)
    print(f"written: {arguments.out / 'measured.json'}, for `megabatch plan --measured`")


def _numbers(text: str) -> list[int]:
    """Sizes from "64,256,1024"."""
    try:
        return [int(part) for part in text.replace("_", "").split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers with commas between them, as 64,256,1024") from None


def _factors(text: str) -> tuple[float, ...]:
    """Factors from "0.5,1,2"."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers with commas between them, as 0.5,1,2") from None
