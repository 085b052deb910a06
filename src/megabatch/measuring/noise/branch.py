"""The critical batch tried directly: one checkpoint, trained a little further at several batches on the same samples.

After Merrill et al., "Critical Batch Size Revisited" (arXiv 2505.23971): noise is a proxy for the critical batch, this is not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean, variance
from typing import NamedTuple

import torch

from ...optimizers import closest, rate_factor
from ...training.evaluate import held_out_loss
from ...training.loop import Training, seed_of
from ...training.noise.estimator import STUDENT
from ...training.objective import Classification
from ...training.schedules import Step
from ...training.signals import EmptyBatch, Stopped

# Updates that the largest batch takes; smaller ones take more of them on the same samples.
UPDATES = 8
REPEATS = 3
# Of held-out loss that a batch may lose.
TOLERANCE = 0.01


def branch(
    training: Training,
    checkpoint: Path,
    batches: Sequence[int],
    *,
    updates: int = UPDATES,
    repeats: int = REPEATS,
    tolerance: float = TOLERANCE,
) -> list[Branch]:
    """The run's own batch and the others, each trained from the checkpoint and compared by held-out loss.

    The rate is the one that the run has there, times what the optimizer's rule says for the batch, and does not fall meanwhile.
    Each repeat takes other samples. `training` ends in an arbitrary state.
    """
    check(training, batches, updates, repeats, tolerance)
    if isinstance(training.parts.objective, Classification):
        training.parts.objective.stop_measuring_noise()
    training.load(checkpoint)
    here = training.schedule[training.number]
    sizes = sorted({here.pairs, *batches})
    samples = updates * max(sizes)
    losses: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(repeats):
        for size in sizes:
            training.load(checkpoint)
            rate = here.rate * rate_factor(closest(training.run.optimizer.name).lr_rule, size / here.pairs)
            begin = here.first + repeat * samples
            steps = [Step(begin + first, min(size, samples - first), rate) for first in range(0, samples, size)]
            losses[size].append(_trained(training, steps, here.pairs))
    return judge(losses, tolerance)


def check(training: Training, batches: Sequence[int], updates: int, repeats: int, tolerance: float) -> None:
    """Raises ValueError where branches could not be compared."""
    if updates < 1 or repeats < 1:
        raise ValueError(f"updates is {updates} and repeats is {repeats}: must be at least 1; usual are {UPDATES} and {REPEATS}")
    if not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}: held-out loss that may be lost, from 0 up; {TOLERANCE} is usual")
    if not batches or min(batches) < 1:
        raise ValueError(f"branch is {list(batches)}: must name batches of at least 1, for example twice and four times the run's")
    if not sum(training.parts.held_out.lengths):
        raise ValueError("data.held_out is empty: branches are compared by held-out loss; hold something out (data.held_out=0.1)")


def _trained(training: Training, steps: Sequence[Step], pairs: int) -> float:
    """Held-out loss after the steps; infinite if they diverge."""
    training.parts.model.train()
    with closing(training.parts.shuffled().batches((step.first, step.pairs) for step in steps)) as batches:
        for number, step in enumerate(steps):
            torch.manual_seed(seed_of(training.run.seed, training.number + number, training.ranks.rank))
            try:
                training.step(step, next(batches))
            except EmptyBatch:
                continue
            except Stopped:
                training.optimizer.zero_grad()
                return math.inf
    loss = held_out_loss(training.parts, pairs)
    return loss if math.isfinite(loss) else math.inf


class Branch(NamedTuple):
    """A batch that was branched to. loss: held out, the mean over repeats; difference: to the smallest batch's; noise: half of the
    95 % interval of that difference; fine: whether it loses no more than tolerance and noise allow."""

    batch: int
    loss: float
    difference: float
    noise: float
    fine: bool


def judge(losses: Mapping[int, Sequence[float]], tolerance: float) -> list[Branch]:
    """Every batch beside the smallest, by the losses of repeats that shared their samples; one that diverged has an infinite one.

    >>> [branch.fine for branch in judge({64: [2.0, 2.1], 128: [2.0, 2.1], 256: [2.5, 2.6]}, tolerance=0.01)]
    [True, True, False]
    """
    smallest = min(losses)
    if not all(map(math.isfinite, losses[smallest])):
        raise ValueError(
            f"the branch at batch {smallest:,}, the smallest, diverged: there is nothing to compare with; lower the rate"
        )
    differences = {
        batch: [loss - first for loss, first in zip(repeats, losses[smallest], strict=True)] for batch, repeats in losses.items()
    }
    noise = _noise([each for batch, each in differences.items() if batch != smallest and all(map(math.isfinite, each))])
    found = []
    for batch, each in sorted(differences.items()):
        mean, error = fmean(each), 0.0 if batch == smallest else noise
        found.append(Branch(batch, fmean(losses[batch]), mean, error, mean <= tolerance + error))
    return found


def largest(branches: Sequence[Branch]) -> int:
    """The largest batch that loses nothing, as do all smaller ones that were tried.

    >>> largest([Branch(64, 2.0, 0.0, 0.0, True), Branch(128, 2.1, 0.1, 0.0, False), Branch(256, 2.0, 0.0, 0.0, True)])
    64
    """
    fine = [branch.batch for place, branch in enumerate(branches) if all(each.fine for each in branches[: place + 1])]
    return fine[-1]


def _noise(differences: Sequence[Sequence[float]]) -> float:
    """Half of the interval of a mean difference, by the spread of repeats, taken to be the same at every batch."""
    repeats = min(map(len, differences), default=0)
    if repeats < 2:
        return 0.0
    freedom = sum(len(each) - 1 for each in differences)
    return STUDENT[min(freedom, len(STUDENT)) - 1] * math.sqrt(fmean(map(variance, differences)) / repeats)
