"""The verbs `fit`, `profile`, `noise` and `sweep`: choose a batch by running. Each writes a file that `plan --measured` reads."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import config, measurements, objectives, vocabulary
from ..files import check_folder
from ..reporting.report import Report
from ..reporting.terminal import print_report
from .arguments import SETTINGS_HELP, add_trust, settings_of


def add(verbs: Any) -> None:
    fit = _verb(verbs, "fit", _fit, "Find the largest chunk that fits into memory.")
    fit.add_argument(
        "--budget", metavar="SIZE", help="Memory that may be used, as 8GiB; by default all of a GPU's, or half of the host's."
    )
    fit.add_argument("--margin", type=float, default=0.05, help="Fraction of that memory to leave free (default 0.05).")
    fit.add_argument("--cap", type=int, metavar="N", help="Largest chunk to try, in rows; by default the rows of a rank.")
    fit.add_argument("--start", type=int, metavar="N", help="First chunk to try, in rows; by default the one predicted to fit.")

    profile = _verb(verbs, "profile", _profile, "Measure time and memory of a step at several batches or chunks.")
    profile.add_argument(
        "--batches",
        type=_numbers,
        metavar="N,N,…",
        help="Batch sizes to measure, as 64,256,1024; by default from an eighth to four times the run's.",
    )
    profile.add_argument(
        "--chunks", type=_numbers, metavar="N,N,…", help="Chunk sizes to measure at the run's batch size; excludes --batches."
    )
    profile.add_argument("--steps", type=int, default=5, metavar="N", help="Number of timed steps at each size (default 5).")
    profile.add_argument(
        "--critical",
        type=float,
        metavar="N",
        help="Critical batch size in samples, if it is known; adds the batch size that reaches a target soonest.",
    )

    noise = _verb(verbs, "noise", _noise, "Measure the gradient noise and the batch size that it allows.")
    noise.add_argument(
        "--steps", type=int, metavar="N", help="Number of steps to train; by default all, or half of them with --branch."
    )
    noise.add_argument("--window", type=int, metavar="N", help="Number of steps that each estimate averages over (default 50).")
    noise.add_argument(
        "--branch",
        type=_numbers,
        metavar="N,N,…",
        help="Batch sizes to train at from the last step on, as 128,512, to find the largest that loses nothing.",
    )
    noise.add_argument(
        "--updates",
        type=int,
        default=8,
        metavar="N",
        help="Number of updates at the largest batch of --branch; the others see as many samples (default 8).",
    )
    noise.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="Number of times that each branch is trained, on other samples (default 3).",
    )
    noise.add_argument(
        "--tolerance", type=float, default=0.01, help="Held-out loss that a batch size of --branch may lose (default 0.01)."
    )
    noise.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="Checkpoint of this run to start from; by default the run starts from its first step.",
    )

    sweep = _verb(verbs, "sweep", _sweep, "Train at several batch sizes, each at its best rate, and compare.")
    sweep.add_argument("--batches", type=_numbers, required=True, metavar="N,N,…", help="Batch sizes to train at, as 64,256,1024.")
    sweep.add_argument(
        "--rates",
        type=_factors,
        default=(0.5, 1.0, 2.0),
        metavar="F,F,…",
        help="Learning rates to try, as factors of the rate that the scaling rule gives (default 0.5,1,2).",
    )
    sweep.add_argument(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="Number of seeds to train with at the best rate of each batch size (default 3).",
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
        help="Weight decays to try at the best rate, as factors of the run's own (default 1).",
    )
    sweep.add_argument(
        "--extend",
        type=int,
        default=2,
        metavar="N",
        help="Number of further rates to try if the best is the lowest or highest so far (default 2).",
    )
    sweep.add_argument("--jobs", type=int, default=1, metavar="N", help="Number of parallel runs on each device (default 1).")
    sweep.add_argument(
        "--devices",
        type=lambda text: text.split(","),
        metavar="DEVICE,…",
        help="Devices that share the runs, as cuda:0,cuda:1; by default the run's own.",
    )


def _verb(verbs: Any, name: str, run: Callable[..., None], summary: str) -> argparse.ArgumentParser:
    """Add a verb with the arguments that all four have."""
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=summary, description=run.__doc__)
    parser.add_argument("settings", nargs="*", metavar="run.toml | key=value", help=SETTINGS_HELP)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs") / name,
        metavar="FOLDER",
        help=f"Folder to write results to (default runs/{name}).",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON instead of tables.")
    add_trust(parser)
    parser.set_defaults(run=run)
    return parser


def _fit(arguments: argparse.Namespace) -> None:
    """Find the largest chunk that fits into memory, by trying real steps of the run at several sizes around the predicted one."""
    check_folder(arguments.out, "--out")
    from ..costs.hardware import parse_bytes
    from ..measuring.fit import fit, fit_report

    options = {name: getattr(arguments, name) for name in ("margin", "cap", "start", "out", "trust_code")}
    budget = None if arguments.budget is None else parse_bytes(arguments.budget)
    run = settings_of(arguments.settings)
    found = fit(run, budget=budget, **options)
    _print_result(found, fit_report, arguments)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if not arguments.json and os.environ.get("RANK", "0") == "0" and isinstance(found.found, measurements.Fit):
        loss = objectives.OBJECTIVES[run.loss.objective]
        kind = {"pairs": loss.contrastive, "views": loss.views}
        print(vocabulary.identity(config.with_ranks(run, ranks).batch.size, ranks, found.found.chunk, **kind))


def _profile(arguments: argparse.Namespace) -> None:
    """Measure samples per second, seconds per step and peak memory at several sizes, and compare them with predictions."""
    check_folder(arguments.out, "--out")
    from ..measuring.profile import profile, profile_report

    options = {name: getattr(arguments, name) for name in ("batches", "chunks", "steps", "critical", "out", "trust_code")}
    _print_result(profile(settings_of(arguments.settings), **options), profile_report, arguments)


def _noise(arguments: argparse.Namespace) -> None:
    """Train the run for some steps, measure how noisy its gradient is, and derive the critical batch size."""
    check_folder(arguments.out, "--out")
    from ..measuring.noise import noise, noise_report

    options = {
        name: getattr(arguments, name)
        for name in ("steps", "branch", "updates", "repeats", "tolerance", "checkpoint", "out", "trust_code")
    }
    window = {} if arguments.window is None else {"window": arguments.window}
    _print_result(noise(settings_of(arguments.settings), **options, **window), noise_report, arguments)


def _sweep(arguments: argparse.Namespace) -> None:
    """Train at several batch sizes, each at its best learning rate, and recommend one of them. The same command resumes a sweep
    that was stopped."""
    check_folder(arguments.out, "--out")
    from ..measuring.sweep import sweep, sweep_report

    names = ("batches", "rates", "seeds", "same", "seconds", "decays", "extend", "jobs", "devices", "out", "trust_code")
    options = {name: getattr(arguments, name) for name in names}
    _print_result(sweep(settings_of(arguments.settings), **options), sweep_report, arguments)


def _print_result(
    found: measurements.Measured, report: Callable[[measurements.Measured], Report], arguments: argparse.Namespace
) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    if arguments.json:
        print(measurements.as_json(found))
        return
    print_report(report(found))
    print(f"Written to {arguments.out / 'measured.json'}, for `megabatch plan --measured`.")


def _numbers(text: str) -> list[int]:
    """Return the sizes of "64,256,1024"."""
    try:
        return [int(part) for part in text.replace("_", "").split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers separated by commas, as 64,256,1024") from None


def _factors(text: str) -> tuple[float, ...]:
    """Return the factors of "0.5,1,2"."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers separated by commas, as 0.5,1,2") from None
