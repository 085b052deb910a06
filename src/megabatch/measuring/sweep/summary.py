"""Each batch of a sweep at its best rate: quality, spread and cost over seeds, the Pareto front, and Welch's intervals.

Student's t is computed here, so no library for statistics is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

from .cases import FAILED, Case, ChosenRate, Edge, Space, chosen_rate
from .outcome import RunOutcome

CONFIDENCE = 0.95
# Intervals of Simpson's rule: the integrand is smooth and bounded, and few seeds give few degrees of freedom.
INTERVALS = 100


@dataclass(frozen=True)
class Summary:
    """What a batch reaches at the rate that was chosen for it.

    qualities, times: of each seed that finished; failed: how many did not. pairs: held-out pairs that quality is reported on;
    apart: whether rates were chosen on other pairs. tried: the number of rates. edge, extended: see `ChosenRate`. processes: how
    many runs shared the machine. lost: batches of the sweep without any result.
    """

    batch: int
    lr: float
    weight_decay: float
    qualities: tuple[float, ...]
    times: tuple[float, ...]
    pairs_per_s: float
    steps: int
    samples: int
    gap: float | None = None
    pairs: int = 0
    apart: bool = True
    failed: int = 0
    tried: int = 1
    edge: Edge | None = None
    extended: int = 0
    processes: int = 1
    lost: tuple[int, ...] = ()

    @property
    def mean(self) -> float:
        return fmean(self.qualities)

    @property
    def spread(self) -> float | None:
        return deviation(self.qualities)

    @property
    def seconds(self) -> float:
        return fmean(self.times)

    def as_row(self) -> dict[str, Any]:
        """Return the row of the measurement's file."""
        first = {"batch": self.batch, "lr": self.lr, "mean": self.mean, "spread": self.spread, "seconds": self.seconds}
        return first | {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def from_row(row: Mapping[str, Any]) -> Summary:
    """Return the summary of a row that `as_row` made."""
    fields: dict[str, Any] = {key: value for key, value in row.items() if key not in ("mean", "spread", "seconds")}
    fields |= {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
    return Summary(**fields)


def scores(outcomes: Mapping[Case, RunOutcome]) -> dict[Case, float]:
    """Return the quality by which rates are chosen, FAILED for runs without one."""
    return {case: FAILED if outcome.choosing is None else outcome.choosing for case, outcome in outcomes.items()}


def summaries(space: Space, outcomes: Mapping[Case, RunOutcome], processes: int) -> list[Summary]:
    """Return the summary of each batch at its best rate, smallest batch first. Each lists the batches without a result."""
    known = scores(outcomes)
    chosen = {batch: chosen_rate(space, known, batch) for batch in sorted(space.middles)}
    lost = [batch for batch, best in chosen.items() if best is None]
    return [_summary(batch, best, outcomes, processes, lost) for batch, best in chosen.items() if best is not None]


def pareto(summaries: Iterable[Summary]) -> list[Summary]:
    """Return the batches that no other batch beats in both seconds and quality, the fastest first."""
    front: list[Summary] = []
    for each in sorted(summaries, key=lambda s: (s.seconds, -s.mean)):
        if not front or each.mean > front[-1].mean:
            front.append(each)
    return front


class Difference(NamedTuple):
    """The difference of two means, and half of the interval around it; None if a spread is unknown."""

    mean: float
    half: float | None

    @property
    def known(self) -> bool:
        """Whether the difference is larger than chance explains."""
        return self.half is not None and abs(self.mean) > self.half


def difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Return the mean of a less the mean of b, with Welch's interval, which does not assume equal spreads.

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


def deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation; None for a single value."""
    return stdev(values) if len(values) > 1 else None


def t_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """Return how many standard errors around zero contain this fraction of Student's t distribution.

    >>> round(t_quantile(1), 3), round(t_quantile(4), 3)
    (12.706, 2.776)
    """
    # With t = √ν · tan(angle) the density becomes a power of the cosine, on a finite interval.
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(45):
        middle = (low + high) / 2
        if 2 * scale * _cosine_power_integral(middle, freedom - 1) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def _cosine_power_integral(end: float, power: float) -> float:
    """Return the integral of cos(angle) ** power from 0 to `end`, by Simpson's rule."""
    step = end / INTERVALS
    inner = sum((4 if place % 2 else 2) * math.cos(place * step) ** power for place in range(1, INTERVALS))
    return step / 3 * (1.0 + inner + math.cos(end) ** power)


def _summary(batch: int, chosen: ChosenRate, outcomes: Mapping[Case, RunOutcome], processes: int, lost: Sequence[int]) -> Summary:
    """Summarize a batch over the seeds at its chosen rate. The first seed finished, or the rate would not have been chosen."""
    runs = [outcome for case, outcome in outcomes.items() if case[:3] == (batch, chosen.lr, chosen.weight_decay)]
    ended = [outcome for outcome in runs if outcome.quality is not None]
    gaps = [outcome.gap for outcome in ended if outcome.gap is not None]
    return Summary(
        batch,
        chosen.lr,
        chosen.weight_decay,
        qualities=tuple(outcome.quality for outcome in ended if outcome.quality is not None),
        times=tuple(outcome.seconds for outcome in ended),
        pairs_per_s=fmean(outcome.pairs_per_s for outcome in ended),
        steps=ended[0].steps,
        samples=ended[0].samples,
        gap=fmean(gaps) if gaps else None,
        pairs=ended[0].pairs,
        apart=all(outcome.apart for outcome in ended),
        failed=len(runs) - len(ended),
        tried=len({case.lr for case in outcomes if case.batch == batch}),
        edge=chosen.edge,
        extended=chosen.extended,
        processes=processes,
        lost=tuple(lost),
    )
