"""The noise of a run's gradient while it trains: `megabatch noise`."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from ... import config, packages
from ...environment import device_name
from ...files import write_text
from ...measurements import Measured, Noise, write
from ...training.build import assemble
from ...training.checkpoint.folder import place
from ...training.distributed import ranks
from ...training.loop import Training
from ...training.noise.collect import WINDOW
from ...training.noise.estimator import LEAST, Moments, estimate
from ...training.objective import Classification
from ...training.run_folder import claimed_by_ranks
from ...training.run_logger import RunLogger
from ...training.signals import StopSign
from . import branch as branching
from .branch import TOLERANCE, Branch, largest
from .page import page
from .pictures import branch_picture, course_picture
from .probes import Probes

# Points of the course that are kept, at most.
POINTS = 200


def noise(
    run: config.Run,
    *,
    steps: int | None = None,
    window: int = WINDOW,
    branch: Sequence[int] | None = None,
    updates: int = branching.UPDATES,
    repeats: int = branching.REPEATS,
    tolerance: float = TOLERANCE,
    checkpoint: Path | None = None,
    out: Path,
    trust_code: bool = False,
) -> Measured:
    """The critical batch that the noise of the run's gradient implies, after `steps` steps and on the way there.

    steps: how many the run trains; None: all that it has, or half of them where branches follow.
    window: steps that each estimate looks back on.
    branch: batches to branch to afterwards, beside the run's own, to see which of them lose nothing: no more than `tolerance` of
        held-out loss, after `updates` of the largest batch and as many samples at the others, `repeats` times.
    checkpoint: of this run or a like one, to begin with.
    out: the folder for measured.json, noise.png, report.html, log.jsonl and the last checkpoint; branches.json and branches.png.
    trust_code: whether code that the run names (`config.callables`) may be imported and called.
    """
    config.require_trust(run, trust_code)
    if checkpoint is not None and checkpoint.resolve().is_relative_to(out.resolve()):
        raise ValueError(
            f"checkpoint is {str(checkpoint)!r}, inside out: the next one that is saved would replace it; choose another out"
        )
    run = replace(
        run,
        out=str(out),
        checkpoint=config.Checkpoint(every=None, keep=1),
        evaluate=replace(run.evaluate, every=None, large=()),
        watch=replace(run.watch, report=False),
    )
    packages.require(packages.FIGURES)
    with ranks(run.compute) as here, claimed_by_ranks(out, "noise", here.first):
        training = Training(assemble(run, here), out)
        if checkpoint is not None:
            training.load(checkpoint)
        last = _last(training, steps, branches=branch is not None)
        if branch is not None:
            branching.check(training, branch, updates, repeats, tolerance)
        found = _measured(training, window, last)
        branches: list[Branch] = []
        if branch is not None:
            begin = place(out / "checkpoints", last)
            branches = branching.branch(training, begin, branch, updates=updates, repeats=repeats, tolerance=tolerance)
            found = replace(found, branch=largest(branches))
        today = date.today().isoformat()
        result = Measured(found, config.as_table(run), device_name(here.device), str(torch.__version__), today)
        if here.first:
            _write(result, branches, out)
    return result


class NoiseHistory:
    """A callback of a run: the estimate after each step that was measured."""

    def __init__(self, training: Training, steps: deque[Moments]) -> None:
        self.training = training
        self.points: list[dict[str, float]] = []
        self._steps = steps
        self._newest: Moments | None = None

    def __call__(self, logger: RunLogger) -> None:
        if len(self._steps) < LEAST or self._steps[-1] is self._newest:
            return
        self._newest = self._steps[-1]
        found = estimate(list(self._steps))
        self.points.append({"step": self.training.number, "critical": found.critical, "low": found.low, "high": found.high})


def _last(training: Training, steps: int | None, *, branches: bool) -> int:
    """The step that the measurement ends after."""
    left = len(training.schedule) - training.number
    wanted = steps if steps is not None else left // 2 if branches else left
    if not LEAST <= wanted <= left - branches:
        why = ", and branches need the rate of one more" if branches else ""
        raise ValueError(
            f"steps is {wanted}: at least {LEAST} are needed, and the run has {left} left{why}; choose between, or train longer"
        )
    return training.number + wanted


def _measured(training: Training, window: int, last: int) -> Noise:
    """Trains up to step `last`, and what that showed."""
    ends = training.schedule[last - 1]
    if training.ranks.first:
        training.folder.mkdir(parents=True, exist_ok=True)
        (training.folder / "log.jsonl").unlink(missing_ok=True)
    training.ranks.wait()
    with _collecting(training, min(window, last - training.number), last) as steps:
        course = NoiseHistory(training, steps)
        training.callbacks.append(course)
        samples, silent = ends.first + ends.pairs, not training.ranks.first
        with RunLogger(training.run, training.folder, samples, training.seen, silent=silent) as watch, StopSign() as sign:
            training.run_steps(watch, sign, last)
    if not course.points:
        raise ValueError(
            f"only {len(steps)} steps could be measured, and {LEAST} are needed: a batch needs two rows or more, and gradients"
            " must not overflow; measure more steps"
        )
    at = course.points[-1]
    coupled = not isinstance(training.parts.objective, Classification)
    stride = -(-len(course.points) // POINTS)
    return Noise(at["critical"], at["low"], at["high"], ends.pairs, coupled, tuple(course.points[::-stride][::-1]))


@contextmanager
def _collecting(training: Training, window: int, last: int) -> Iterator[deque[Moments]]:
    """What the steps of the run tell, as they are taken: from their micro-batches or, where these tell nothing, from probes."""
    objective = training.parts.objective
    if isinstance(objective, Classification) and training.run.compute.sharding == "ddp":
        yield (objective.noise or objective.measure_noise(window)).steps
        return
    with Probes(training, window, last) as probes:
        training.callbacks.append(probes)
        yield probes.steps


def _write(result: Measured, branches: Sequence[Branch], out: Path) -> None:
    write(result, out / "measured.json")
    course_picture(result, out / "noise.png")
    if branches:
        rows = [each._asdict() for each in branches]
        write_text(out / "branches.json", json.dumps(rows, indent=1) + "\n")
        branch_picture(branches, out / "branches.png")
    write_text(out / "report.html", page(result, branches))
