"""`megabatch noise`: the gradient noise of a run while it trains, and the critical batch that it implies."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from ... import config, packages, trust
from ...environment import device_name
from ...files import write_text
from ...measurements import Measured, Noise, write
from ...reporting.html import write_report
from ...training import distributed
from ...training.build import assemble
from ...training.checkpoint.folder import place
from ...training.loop import Training
from ...training.noise.collect import WINDOW
from ...training.noise.estimator import LEAST, Moments, estimate
from ...training.objective import Classification
from ...training.run_folder import claimed_by_ranks
from ...training.run_logger import RunLogger
from ...training.signals import StopSign
from . import branch as branching
from .branch import REPEATS, TOLERANCE, UPDATES, Branch, BranchOptions, largest
from .probes import Probes
from .report import noise_report

# The most estimates over training that are stored.
POINTS = 200


def noise(
    run: config.Run,
    *,
    steps: int | None = None,
    window: int = WINDOW,
    branch: Sequence[int] | None = None,
    updates: int = UPDATES,
    repeats: int = REPEATS,
    tolerance: float = TOLERANCE,
    checkpoint: Path | None = None,
    out: Path,
    trust_code: bool = False,
) -> Measured:
    """Train the run for `steps` steps and return the critical batch that its gradient noise implies, also during training.

    steps: None means all steps of the run, or half of them if branches follow. window: steps that each estimate averages over.
    branch: batches to branch to afterwards, besides the run's own: the result is the largest that loses no more than `tolerance` of
        held-out loss, after `updates` of the largest batch and as many samples at the others, `repeats` times.
    checkpoint: where to start, a checkpoint of this run or of one with the same model.
    out: the folder for measured.json, noise.png, report.html, log.jsonl and the last checkpoint; branches.json and branches.png.
    trust_code: whether code that the run names (`trust.callables`) may be imported and called.
    """
    config.require_filled(run)
    trust.require_trust(run, trust_code)
    if checkpoint is not None and checkpoint.resolve().is_relative_to(out.resolve()):
        raise ValueError(
            f"checkpoint is {str(checkpoint)!r}, inside out, where the next checkpoint would replace it; choose another out"
        )
    run = replace(
        run,
        out=str(out),
        checkpoint=config.Checkpoint(every=None, keep=1),
        evaluate=replace(run.evaluate, every=None, large=()),
        watch=replace(run.watch, report=False),
    )
    packages.require(packages.HTML)
    with distributed.ranks(run.compute) as ranks, claimed_by_ranks(out, "noise", ranks.first):
        run = config.with_ranks(run, ranks.size)
        training = Training(assemble(run, ranks), out)
        if checkpoint is not None:
            training.load(checkpoint)
        last = _last_step(training, steps, branches=branch is not None)
        options = None
        if branch is not None:
            options = BranchOptions(tuple(branch), updates, repeats, tolerance)
            branching.check(training)
        found = _measured(training, window, last)
        branches: list[Branch] = []
        if options is not None:
            branches = branching.branch(training, place(out / "checkpoints", last), options)
            found = replace(found, branch=largest(branches))
        today = date.today().isoformat()
        result = Measured(found, config.as_table(run), device_name(ranks.device), str(torch.__version__), today)
        if ranks.first:
            _write(result, branches, out)
    return result


class NoiseHistory:
    """A callback of a run that estimates the noise after every step that was measured."""

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


def _last_step(training: Training, steps: int | None, *, branches: bool) -> int:
    """Return the number of the step after which the measurement ends."""
    left = len(training.schedule) - training.number
    wanted = steps if steps is not None else left // 2 if branches else left
    if not LEAST <= wanted <= left - branches:
        reason = ", one of which branches need for its learning rate" if branches else ""
        raise ValueError(
            f"steps is {wanted}: must be at least {LEAST}, and the run has {left} left{reason}; choose a number in between, or a"
            " longer run"
        )
    return training.number + wanted


def _measured(training: Training, window: int, last: int) -> Noise:
    """Train up to step `last` and return the noise."""
    end = training.schedule[last - 1]
    if training.ranks.first:
        training.folder.mkdir(parents=True, exist_ok=True)
        (training.folder / "log.jsonl").unlink(missing_ok=True)
    training.ranks.wait()
    with _collecting(training, min(window, last - training.number), last) as steps:
        history = NoiseHistory(training, steps)
        training.callbacks.append(history)
        samples, silent = end.first + end.pairs, not training.ranks.first
        with RunLogger(training.run, training.folder, samples, training.seen, silent=silent) as logger, StopSign() as sign:
            training.run_steps(logger, sign, last)
    if not history.points:
        raise ValueError(
            f"only {len(steps)} steps could be measured, and {LEAST} are needed: a batch needs at least two rows, and gradients"
            " must not overflow; measure more steps"
        )
    newest = history.points[-1]
    coupled = not isinstance(training.parts.objective, Classification)
    stride = -(-len(history.points) // POINTS)
    points = tuple(history.points[::-stride][::-1])
    return Noise(newest["critical"], newest["low"], newest["high"], end.pairs, coupled, points)


@contextmanager
def _collecting(training: Training, window: int, last: int) -> Iterator[deque[Moments]]:
    """Provide the moments of the run's gradients as they come: from its micro-batches, or from probes where samples are coupled."""
    objective = training.parts.objective
    if isinstance(objective, Classification) and training.run.compute.sharding == "ddp":
        yield (objective.noise or objective.measure_noise(window)).steps
        return
    with Probes(training, window, last) as probes:
        training.callbacks.append(probes)
        yield probes.steps


def _write(result: Measured, branches: Sequence[Branch], out: Path) -> None:
    write(result, out / "measured.json")
    if branches:
        rows = [each._asdict() for each in branches]
        write_text(out / "branches.json", json.dumps(rows, indent=1) + "\n")
    write_report(noise_report(result, branches), out)
