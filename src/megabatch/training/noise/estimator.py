"""The critical batch from the noise of gradients: arithmetic on squared norms.

A sample's gradient is G plus noise of covariance Σ, so the mean over n samples has a squared norm of |G|² + tr(Σ)/n in expectation.
Two different n give unbiased estimates of both, and B = tr(Σ)/|G|² is the batch at which noise and gradient have equal norms: the
critical batch (McCandlish et al., arXiv 1812.06162, appendix A.1). A ratio of unbiased estimates is biased, so it is taken once,
of the means over many steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

# At most this many groups of consecutive steps, whose means are assumed to be independent.
GROUPS = 16
# Student's t at 97.5 % for 1, 2, … degrees of freedom: one less than there are groups.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
# With fewer steps than this the interval is unbounded.
LEAST = 4


class Micro(NamedTuple):
    """A micro-batch: the squared norm of its mean gradient, its rows, and its share in the gradient of the whole batch."""

    square: float
    rows: float
    share: float


class Moments(NamedTuple):
    """Estimates of one step: tr(Σ), the variance of a sample's gradient, and |G|². Each may be negative by chance."""

    trace: float
    signal: float


class NoiseEstimate(NamedTuple):
    """The critical batch with its 95 % interval, the tr(Σ) and |G|² it follows from, and the number of steps."""

    critical: float
    low: float
    high: float
    trace: float
    signal: float
    steps: int


def moments(micros: Sequence[Micro], square: float) -> Moments:
    """Return unbiased estimates of tr(Σ) and |G|². square: the squared norm of Σ share·gradient, the gradient of the whole batch.

    Sizes and shares may differ: with shares a and sizes n, Σ a|gᵢ|² is |G|² + tr(Σ)·Σ a/n in expectation, the square of the whole
    |G|² + tr(Σ)·Σ a²/n. With shares proportional to sizes, as in a mean over samples, these factors are k/N and 1/N.

    >>> moments([Micro(5.0, 2, 0.5), Micro(3.0, 2, 0.5)], 3.0)
    Moments(trace=4.0, signal=2.0)
    """
    if len(micros) < 2:
        raise ValueError(f"{len(micros)} micro-batches: at least 2 are needed to measure the noise between them; use smaller ones")
    total = math.fsum(micro.share for micro in micros)
    if not math.isclose(total, 1, rel_tol=1e-6) or min(micro.rows for micro in micros) <= 0:
        raise ValueError(f"shares add up to {total:g} and rows are at least {min(m.rows for m in micros)}: must be 1 and above 0")
    parts = math.fsum(micro.share * micro.square for micro in micros)
    noise_of_parts = math.fsum(micro.share / micro.rows for micro in micros)
    noise_of_whole = math.fsum(micro.share**2 / micro.rows for micro in micros)
    between = noise_of_parts - noise_of_whole
    return Moments(
        trace=(parts - square) / between,
        signal=(noise_of_parts * square - noise_of_whole * parts) / between,
    )


def estimate(steps: Sequence[Moments]) -> NoiseEstimate:
    """Return the critical batch from the moments of consecutive steps, with Fieller's interval over groups of dependent steps.

    Where |G|² does not differ significantly from 0, the upper end is inf; with too few steps the interval is 0 to inf.
    """
    if not steps:
        raise ValueError("no step has been measured yet: each needs at least two micro-batches, by accumulation or over ranks")
    trace, signal = _mean([step.trace for step in steps]), _mean([step.signal for step in steps])
    low, high = _interval(steps, trace, signal)
    critical = max(0.0, trace) / signal if signal > 0 else math.inf
    return NoiseEstimate(critical, low, high, trace, signal, len(steps))


def sentence(critical: float, low: float, high: float) -> str:
    """Return a critical batch and its interval as a phrase.

    >>> sentence(1000.0, 700.0, 1500.0)
    'critical batch 1,000 (95 % interval 700 to 1,500)'
    """
    if math.isfinite(high):
        return f"critical batch {number(critical)} (95 % interval {number(low)} to {number(high)})"
    if low <= 0:
        return "critical batch unknown: the gradient cannot be told from its noise; measure more steps"
    about = f", about {number(critical)}" if math.isfinite(critical) else ""
    return f"critical batch above {number(low)}{about}, without an upper end: the gradient cannot be told from its noise"


def number(batch: float) -> str:
    """Return a batch to three digits.

    >>> number(1234.5), number(3.14159), number(math.inf)
    ('1,230', '3.14', 'no end')
    """
    if not math.isfinite(batch):
        return "no end"
    return f"{float(f'{batch:.3g}'):,.10g}"


def _interval(steps: Sequence[Moments], trace: float, signal: float) -> tuple[float, float]:
    """Return the interval of ratios r with (trace − r·signal)² ≤ t²·Var(trace − r·signal), a quadratic inequality in r."""
    groups = _groups(steps)
    if len(groups) < LEAST:
        return 0.0, math.inf
    t = STUDENT[len(groups) - 2]
    deviations = [
        (len(group) * (_mean([s.trace for s in group]) - trace), len(group) * (_mean([s.signal for s in group]) - signal))
        for group in groups
    ]
    # t² times the covariance of the two means, from groups that may differ in length.
    factor = t**2 * len(groups) / (len(groups) - 1) / len(steps) ** 2
    tt = factor * math.fsum(a * a for a, _ in deviations)
    ts = factor * math.fsum(a * b for a, b in deviations)
    ss = factor * math.fsum(b * b for _, b in deviations)
    square, middle, constant = signal**2 - ss, trace * signal - ts, trace**2 - tt
    reach = middle + math.sqrt(max(0.0, middle**2 - square * constant))
    low = max(0.0, constant / reach) if reach > 0 else 0.0
    # Where |G|² is within its own error of 0, or negative, the interval has no upper end.
    return low, reach / square if square > 0 and signal > 0 else math.inf


def _groups(steps: Sequence[Moments]) -> list[Sequence[Moments]]:
    """Return groups of consecutive steps of nearly equal length: their means are almost independent, single steps are not."""
    count = min(GROUPS, len(steps))
    ends = [len(steps) * place // count for place in range(count + 1)]
    return [steps[a:b] for a, b in itertools.pairwise(ends)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
