"""The verbs that choose a batch by running: `fit`, `profile`, `noise` and `sweep`. Each writes what `plan --measured` reads."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import measurements
from ..files import check_folder
from ..reporting.report import Report
from ..reporting.terminal import print_report
from .common_args import SETTINGS_HELP, add_trust, settings_of


def add(verbs: Any) -> None:
    fit = _verb(verbs, "fit", _fit, "Find the largest chunk that runs in the memory there is.")
    fit.add_argument(
        "--budget", metavar="SIZE", help="Memory that may be used, as 8GiB; by default all of a GPU, half of a host's."
    )
    fit.add_argument("--margin", type=float, default=0.05, help="Fraction of that memory that stays free (default 0.05).")
    fit.add_argument("--cap", type=int, metavar="N", help="Largest chunk to try, in rows; by default the rows of a rank.")
    fit.add_argument("--start", type=int, metavar="N", help="First chunk to try, in rows; by default the one predicted to fit.")

    profile = _verb(verbs, "profile", _profile, "Measure time and memory of a step against the batch or the chunk.")
    profile.add_argument(
        "--batches",
        type=_numbers,
        metavar="N,N,…",
        help="Batch sizes to measure, as 64,256,1024; by default an eighth to four times the run's.",
    )
    profile.add_argument(
        "--chunks", type=_numbers, metavar="N,N,…", help="Chunk sizes to measure instead, at the run's batch size."
    )
    profile.add_argument("--steps", type=int, default=5, metavar="N", help="Number of timed steps at each size (default 5).")
    profile.add_argument("--critical", type=float, metavar="N", help="Critical batch size, in samples, where it is known.")

    noise = _verb(verbs, "noise", _noise, "Measure the gradient noise while training, and the batch size that it allows.")
    noise.add_argument(
        "--steps", type=int, metavar="N", help="Number of steps to train; by default all, or half of them where branches follow."
    )
    noise.add_argument("--window", type=int, metavar="N", help="Number of steps that each estimate looks back on (default 50).")
    noise.add_argument(
        "--branch",
        type=_numbers,
        metavar="N,N,…",
        help="Batch sizes to branch to afterwards, as 128,512, to see which of them lose nothing.",
    )
    noise.add_argument(
        "--updates", type=int, default=8, metavar="N", help="Number of updates of the largest batch on a branch (default 8)."
    )
    noise.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="Number of times each branch is taken, on other samples (default 3)."
    )
    noise.add_argument("--tolerance", type=float, default=0.01, help="Held-out loss that a branch may lose (default 0.01).")
    noise.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="Checkpoint of this run to start from; by default its first step."
    )

    sweep = _verb(verbs, "sweep", _sweep, "Train at several batch sizes, each at its own learning rate, and compare them.")
    sweep.add_argument("--batches", type=_numbers, required=True, metavar="N,N,…", help="Batch sizes to train at, as 64,256,1024.")
    sweep.add_argument(
        "--rates",
        type=_factors,
        default=(0.5, 1.0, 2.0),
        metavar="F,F,…",
        help="Learning rates to try, as factors of what the scaling rule gives (default 0.5,1,2).",
    )
    sweep.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="Number of seeds at the best rate of each batch size (default 3)."
    )
    sweep.add_argument(
        "--same",
        choices=("samples", "updates", "time"),
        default="samples",
        help="What all runs have in common: samples seen (default), optimizer updates, or training time.",
    )
    sweep.add_argument("--seconds", type=float, help="Training time of each run in seconds; needs --same time.")
    sweep.add_argument(
        "--decays",
        type=_factors,
        default=(1.0,),
        metavar="F,F,…",
        help="Weight decays to try at the best rate, as factors of the run's (default 1).",
    )
    sweep.add_argument(
        "--extend",
        type=int,
        default=2,
        metavar="N",
        help="Number of further rates to try where the best lies at the edge (default 2).",
    )
    sweep.add_argument("--jobs", type=int, default=1, metavar="N", help="Number of runs at a time on each device (default 1).")
    sweep.add_argument(
        "--devices",
        type=lambda text: text.split(","),
        metavar="DEVICE,…",
        help="Devices that share the runs, as cuda:0,cuda:1; by default the run's own.",
    )


def _verb(verbs: Any, name: str, run: Callable[..., None], words: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=words, description=run.__doc__)
    parser.add_argument("settings", nargs="*", metavar="run.toml | key=value", help=SETTINGS_HELP)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs") / name,
        metavar="FOLDER",
        help=f"Folder that results are written to (default runs/{name}).",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON instead of tables.")
    add_trust(parser)
    parser.set_defaults(run=run)
    return parser


def _fit(arguments: argparse.Namespace) -> None:
    """Find the largest chunk that runs: real steps of the run are tried at several sizes, from the predicted one on."""
    check_folder(arguments.out, "--out")
    from ..costs.hardware import parse_bytes
    from ..measuring.fit import fit, fit_report

    options = {name: getattr(arguments, name) for name in ("margin", "cap", "start", "out", "trust_code")}
    budget = None if arguments.budget is None else parse_bytes(arguments.budget)
    _say(fit(settings_of(arguments.settings), budget=budget, **options), fit_report, arguments)


def _profile(arguments: argparse.Namespace) -> None:
    """Measure samples per second, seconds per step and peak memory at several sizes, beside what was predicted."""
    check_folder(arguments.out, "--out")
    from ..measuring.profile import profile, profile_report

    options = {name: getattr(arguments, name) for name in ("batches", "chunks", "steps", "critical", "out", "trust_code")}
    _say(profile(settings_of(arguments.settings), **options), profile_report, arguments)


def _noise(arguments: argparse.Namespace) -> None:
    """Measure how noisy the gradient is, from what training computes anyway, and derive the critical batch size from it."""
    check_folder(arguments.out, "--out")
    from ..measuring.noise import noise, noise_report

    options = {
        name: getattr(arguments, name)
        for name in ("steps", "branch", "updates", "repeats", "tolerance", "checkpoint", "out", "trust_code")
    }
    window = {} if arguments.window is None else {"window": arguments.window}
    _say(noise(settings_of(arguments.settings), **options, **window), noise_report, arguments)


def _sweep(arguments: argparse.Namespace) -> None:
    """Train at several batch sizes, each at its own learning rate, and say in words which one is worth it. The same command resumes
    where it was stopped."""
    check_folder(arguments.out, "--out")
    from ..measuring.sweep import sweep, sweep_report

    names = ("batches", "rates", "seeds", "same", "seconds", "decays", "extend", "jobs", "devices", "out", "trust_code")
    options = {name: getattr(arguments, name) for name in names}
    _say(sweep(settings_of(arguments.settings), **options), sweep_report, arguments)


def _say(found: measurements.Measured, report: Callable[[measurements.Measured], Report], arguments: argparse.Namespace) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    if arguments.json:
        print(measurements.as_json(found))
        return
    print_report(report(found))
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
