"""Which batches lose nothing: arithmetic on the losses that branches of one run end with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance
from typing import NamedTuple

from ...training.noise.estimator import STUDENT

# Of held-out loss that a batch may lose.
TOLERANCE = 0.01


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
