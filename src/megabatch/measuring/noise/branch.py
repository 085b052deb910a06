"""The critical batch measured directly: train from one checkpoint at several batches on the same samples, and compare.

After Merrill et al., "Critical Batch Size Revisited" (arXiv 2505.23971). The gradient noise is only a proxy for the critical batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
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

# Updates at the largest batch; smaller batches take more updates on the same samples.
UPDATES = 8
REPEATS = 3
# Held-out loss that a batch may lose.
TOLERANCE = 0.01


@dataclass(frozen=True)
class BranchOptions:
    """What is branched to, and how it is compared.

    batches: besides the run's own. updates: of the largest batch; the others train on as many samples. repeats: each on other
    samples. tolerance: held-out loss that a batch may lose and still be fine.
    """

    batches: tuple[int, ...]
    updates: int = UPDATES
    repeats: int = REPEATS
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        if self.updates < 1 or self.repeats < 1:
            raise ValueError(
                f"updates is {self.updates} and repeats is {self.repeats}: both must be at least 1; the defaults are {UPDATES} and"
                f" {REPEATS}"
            )
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance is {self.tolerance}: must be a held-out loss, 0 or more; the default is {TOLERANCE}")
        if not self.batches or min(self.batches) < 1:
            raise ValueError(
                f"branch is {list(self.batches)}: must list batches of at least 1, for example twice and four times the run's"
            )


class Branch(NamedTuple):
    """A batch that was branched to.

    loss: held-out loss, the mean over repeats. difference: to the loss of the smallest batch. noise: half of the 95 % interval of
    that difference. fine: whether the batch loses no more than tolerance and noise allow.
    """

    batch: int
    loss: float
    difference: float
    noise: float
    fine: bool


def branch(training: Training, checkpoint: Path, options: BranchOptions) -> list[Branch]:
    """Train the run's own batch and the others from the checkpoint, and compare them by held-out loss.

    The learning rate is the run's at the checkpoint, scaled to the batch by the optimizer's rule, and constant. `training` ends in
    an arbitrary state.
    """
    check(training)
    if isinstance(training.parts.objective, Classification):
        training.parts.objective.stop_measuring_noise()
    training.load(checkpoint)
    first_step = training.schedule[training.number]
    sizes = sorted({first_step.pairs, *options.batches})
    samples = options.updates * max(sizes)
    losses: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(options.repeats):
        for size in sizes:
            training.load(checkpoint)
            rate = first_step.rate * rate_factor(closest(training.run.optimizer.name).lr_rule, size / first_step.pairs)
            begin = first_step.first + repeat * samples
            steps = [Step(begin + first, min(size, samples - first), rate) for first in range(0, samples, size)]
            losses[size].append(_loss_after(training, steps, first_step.pairs))
    return judge(losses, options.tolerance)


def check(training: Training) -> None:
    """Raise ValueError if the run's branches could not be compared."""
    if not sum(training.parts.held_out.lengths):
        raise ValueError("data.held_out is empty: branches are compared by held-out loss; hold data out, as data.held_out=0.1")


def judge(losses: Mapping[int, Sequence[float]], tolerance: float) -> list[Branch]:
    """Compare each batch with the smallest one, from the losses of repeats on the same samples. A diverged repeat is infinite.

    >>> [branch.fine for branch in judge({64: [2.0, 2.1], 128: [2.0, 2.1], 256: [2.5, 2.6]}, tolerance=0.01)]
    [True, True, False]
    """
    smallest = min(losses)
    if not all(map(math.isfinite, losses[smallest])):
        raise ValueError(
            f"the branch at batch {smallest:,}, the smallest, diverged, so there is nothing to compare with; lower the rate"
        )
    differences = {
        batch: [loss - first for loss, first in zip(repeats, losses[smallest], strict=True)] for batch, repeats in losses.items()
    }
    noise = _noise([each for batch, each in differences.items() if batch != smallest and all(map(math.isfinite, each))])
    branches = []
    for batch, each in sorted(differences.items()):
        mean, error = fmean(each), 0.0 if batch == smallest else noise
        branches.append(Branch(batch, fmean(losses[batch]), mean, error, mean <= tolerance + error))
    return branches


def largest(branches: Sequence[Branch]) -> int:
    """Return the largest batch that is fine and below which every batch is fine too.

    >>> largest([Branch(64, 2.0, 0.0, 0.0, True), Branch(128, 2.1, 0.1, 0.0, False), Branch(256, 2.0, 0.0, 0.0, True)])
    64
    """
    fine = [branch.batch for place, branch in enumerate(branches) if all(each.fine for each in branches[: place + 1])]
    return fine[-1]


def _noise(differences: Sequence[Sequence[float]]) -> float:
    """Return half of the 95 % interval of a mean difference, assuming that repeats spread equally at every batch."""
    repeats = min(map(len, differences), default=0)
    if repeats < 2:
        return 0.0
    freedom = sum(len(each) - 1 for each in differences)
    return STUDENT[min(freedom, len(STUDENT)) - 1] * math.sqrt(fmean(map(variance, differences)) / repeats)


def _loss_after(training: Training, steps: Sequence[Step], pairs: int) -> float:
    """Take the steps and return the held-out loss in batches of `pairs`; infinity if they diverge."""
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
