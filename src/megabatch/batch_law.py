"""The law of contrastive batches that `python -m benchmarks.study law` fits to its trainings, and the file that holds it.

At a fixed number of samples seen, a batch loses (batch / largest)^steepness of a tolerance in recall, and

    log2 largest = a + alpha log2(seen / 1M) + beta log2(pairs / 100k)

Without the file there is no law, and the rules of `recipes` are those of published trainings alone.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

LAW_FILE = Path(__file__).with_name("batch_law.json")
MILLION, HUNDRED_THOUSAND = 1e6, 1e5
# Half of a 90 % interval of a normal distribution, in standard deviations.
NINETY_PERCENT = 1.645


class Law(NamedTuple):
    """The fitted law. aim: log2 of the batch that lost least over all fitted curves, over the largest."""

    a: float
    alpha: float
    beta: float
    steepness: float
    aim: float

    def largest(self, seen: float, pairs: float) -> float:
        """Return the largest batch that loses no more than the tolerance."""
        return float(2 ** (self.a + self.alpha * math.log2(seen / MILLION) + self.beta * math.log2(pairs / HUNDRED_THOUSAND)))

    def planned(self, seen: float, pairs: float) -> float:
        """Return the batch to train with: large enough for its negatives, and small enough for its number of updates."""
        return self.largest(seen, pairs) * 2.0**self.aim


class WarmUpLaw(NamedTuple):
    """The best share of warm-up: at a batch of 1,024, its exponent in the batch, and the least and the most that were tried."""

    share: float
    exponent: float
    least: float
    most: float

    def at(self, batch: float) -> float:
        """Return the best share at a batch."""
        return min(max(self.share * (batch / 1024) ** self.exponent, self.least), self.most)


class NoiseRelation(NamedTuple):
    """How the largest batch of a source differs from the law with the critical batch by gradient noise, measured at one batch.

    log2(largest / law) = slope · log2(critical / center). low, high: the least and the most critical batch of the sources.
    """

    slope: float
    center: float
    low: float
    high: float


@dataclass(frozen=True)
class MeasuredLaw:
    """The law with what it was measured on.

    covariance: of a, alpha and beta. deviation: standard deviation of log2 of a curve's largest batch around the law.
    towers: the law was measured with MLPs; with towers of convolutions and attention the largest batch is this part of it.
    towers_deviation: standard deviation of log2 of that part over the trainings that it was measured with.
    samples, pairs, batches: the least and the most of the trainings. repeats: how often they see a pair at most.
    held_back: the share of all curves, also those that the law is not fitted to, on which the batch planned by the law of the other
        sources loses no more than the tolerance.
    rate_exponent: of the batch in the best rate. noise: by the batch at which noise was measured; only where it tells something.
    """

    law: Law
    covariance: tuple[tuple[float, ...], ...]
    deviation: float
    towers: float
    towers_deviation: float
    samples: tuple[float, float]
    pairs: tuple[float, float]
    batches: tuple[float, float]
    repeats: float
    held_back: float
    rate_exponent: float | None
    warm_up: WarmUpLaw | None
    noise: Mapping[int, NoiseRelation]
    rows: int
    sources: tuple[str, ...]
    date: str

    @property
    def source(self) -> str:
        return f"megabatch's study of {self.rows:,} trainings on {len(self.sources)} sources, {self.date}"

    def largest(self, seen: float, pairs: float) -> float:
        """Return the largest batch that loses no more than the tolerance, with towers as people train them."""
        return self.towers * self.law.largest(seen, pairs)

    def planned(self, seen: float, pairs: float) -> float:
        """Return the batch to train such towers with."""
        return self.towers * self.law.planned(seen, pairs)

    def interval(self, seen: float, pairs: float) -> tuple[float, float]:
        """Return the 90 % interval of `largest` for a new source: by the errors of the law and the spread of sources and towers."""
        place = (1.0, math.log2(seen / MILLION), math.log2(pairs / HUNDRED_THOUSAND))
        variance = sum(p * q * c for p, row in zip(place, self.covariance, strict=True) for q, c in zip(place, row, strict=True))
        factor = 2 ** (NINETY_PERCENT * math.sqrt(max(0.0, variance) + self.deviation**2 + self.towers_deviation**2))
        largest = self.largest(seen, pairs)
        return largest / factor, largest * factor

    def beyond(self, seen: float, pairs: float) -> float:
        """Return the factor by which the samples, the pairs or how often a pair is seen lie outside the measured range.

        The largest of the three; 1 within the range.
        """
        places = ((seen, self.samples), (pairs, self.pairs), (seen / pairs, (0.0, self.repeats)))
        return max(max(1.0, value / high, low / value) for value, (low, high) in places)

    def moved_by_noise(self, critical: float, batch: float) -> float:
        """Return the factor on the largest batch if the critical batch was measured at a batch; 1 if noise tells nothing."""
        if not self.noise or not 0 < critical < math.inf:
            return 1.0
        relation = self.noise[min(self.noise, key=lambda size: abs(math.log2(size / batch)))]
        return float((min(max(critical, relation.low), relation.high) / relation.center) ** relation.slope)


def load() -> MeasuredLaw | None:
    """Return the law of the package's file, or None if there is none."""
    return _read(LAW_FILE)


def to_json(measured: MeasuredLaw) -> str:
    """Return a law as its file holds it."""
    fields = {name: getattr(measured, name) for name in measured.__dataclass_fields__}
    fields |= {
        "law": measured.law._asdict(),
        "warm_up": None if measured.warm_up is None else measured.warm_up._asdict(),
        "noise": {str(batch): relation._asdict() for batch, relation in measured.noise.items()},
    }
    return json.dumps(fields, indent=1) + "\n"


@functools.cache
def _read(file: Path) -> MeasuredLaw | None:
    if not file.exists():
        return None
    fields: dict[str, Any] = json.loads(file.read_text())
    fields |= {name: tuple(fields[name]) for name in ("samples", "pairs", "batches", "sources")}
    fields |= {
        "law": Law(**fields["law"]),
        "covariance": tuple(map(tuple, fields["covariance"])),
        "warm_up": None if fields["warm_up"] is None else WarmUpLaw(**fields["warm_up"]),
        "noise": {int(batch): NoiseRelation(**relation) for batch, relation in fields["noise"].items()},
    }
    return MeasuredLaw(**fields)
