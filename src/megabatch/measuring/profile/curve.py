"""What a curve of rates against sizes says: the best size, the smallest that is enough, the knee, the one that is done soonest.

Pure arithmetic over (size, value) points, smallest size first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...evidence import steps_factor

Points = Sequence[tuple[int, float]]
# A rate that misses the best one by less is as good.
NEAR = 0.05
# What a curve must rise above its chord, as a share of its height, to be bent.
BEND = 0.1


def best(rates: Points) -> int:
    """The size of the highest rate; of equal ones the smallest.

    >>> best([(64, 100.0), (128, 150.0), (256, 149.0)])
    128
    """
    return max(rates, key=lambda point: (point[1], -point[0]))[0]


def enough(rates: Points, near: float = NEAR) -> int:
    """The smallest size whose rate misses the best one by no more than `near` of it.

    >>> enough([(64, 100.0), (128, 150.0), (256, 157.0)])
    128
    """
    highest = max(rate for _, rate in rates)
    return next(size for size, rate in rates if rate >= (1 - near) * highest)


def knee(rates: Points) -> int | None:
    """The size where the rate stops growing with the size: where it lies highest above the straight line from the first point to
    the best one, sizes being taken by their ratios. None where there is no bend, or too few points to see one.

    >>> knee([(64, 100.0), (128, 190.0), (256, 199.0), (512, 200.0)])
    128
    """
    last = best(rates)
    rising = [point for point in rates if point[0] <= last]
    (first, low), (_, high) = rising[0], rising[-1]
    if len(rising) < 3:
        return None

    def above(point: tuple[int, float]) -> float:
        along = math.log(point[0] / first) / math.log(last / first)
        return (point[1] - low) / (high - low) - along

    found = max(rising[1:-1], key=above)
    return found[0] if above(found) >= BEND else None


def soonest(seconds: Points, critical: float) -> int:
    """The batch that reaches a target first: steps(B) · time(B), steps being in proportion to 1 + critical/B.

    >>> soonest([(64, 0.1), (128, 0.12), (256, 0.25)], critical=64)
    128
    """
    return min(seconds, key=lambda point: (steps_factor(point[0], critical) * point[1], point[0]))[0]
