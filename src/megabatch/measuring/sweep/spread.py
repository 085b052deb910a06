"""Means and what can be said about their differences: Welch's t-interval, without a library for statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

CONFIDENCE = 0.95
# Intervals of Simpson's rule: the integrand is smooth and bounded, and few seeds give few degrees of freedom.
INTERVALS = 100


class Difference(NamedTuple):
    """By how much a mean is above another one, and half of the interval around it; None where no spread is known."""

    mean: float
    half: float | None

    @property
    def known(self) -> bool:
        """Whether it is larger than chance explains."""
        return self.half is not None and abs(self.mean) > self.half


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation of a sample; None of a single value, whose spread is not known."""
    return stdev(values) if len(values) > 1 else None


def difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """The mean of a less that of b, with Welch's interval: nothing is assumed about their spreads.

    >>> mean, half = difference([3.0, 4.0, 5.0], [1.0, 2.0, 3.0])
    >>> mean, round(half, 3)  # 2.776 · √(1/3 + 1/3)
    (2.0, 2.267)
    """
    mean, spread_a, spread_b = fmean(a) - fmean(b), deviation(a), deviation(b)
    if spread_a is None or spread_b is None:
        return Difference(mean, None)
    square_a, square_b = spread_a**2 / len(a), spread_b**2 / len(b)
    if not square_a + square_b:
        return Difference(mean, 0.0)
    freedom = (square_a + square_b) ** 2 / (square_a**2 / (len(a) - 1) + square_b**2 / (len(b) - 1))
    return Difference(mean, t_quantile(freedom) * math.sqrt(square_a + square_b))


def t_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """How many standard errors around zero hold this share of Student's t distribution.

    >>> round(t_quantile(1), 3), round(t_quantile(4), 3)
    (12.706, 2.776)
    """
    # With t = √ν · tan(angle) the density becomes a power of the cosine, on a finite stretch.
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(45):
        middle = (low + high) / 2
        if 2 * scale * _cosine_power(middle, freedom - 1) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def _cosine_power(end: float, power: float) -> float:
    """The integral of cos(angle) ** power from 0 to `end`, by Simpson's rule."""
    step = end / INTERVALS
    inner = sum((4 if place % 2 else 2) * math.cos(place * step) ** power for place in range(1, INTERVALS))
    return step / 3 * (1.0 + inner + math.cos(end) ** power)
