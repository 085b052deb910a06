"""The curve of a profile: its rows, and the sizes that stand out in it. Pure arithmetic; nothing here runs a step.

`best`, `enough`, `knee` and `soonest` take (size, value) points, the smallest size first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ...evidence import steps_factor
from ...measurements import Profile
from ...reporting.limits import limit_sentence
from ..predictions import StepPrediction
from .quantities import Timed, TimedSample, values

Points = Sequence[tuple[int, float]]
# A rate within this fraction of the best one is as good.
NEAR = 0.05
# How far a curve must rise above the straight line between its ends, as a fraction of its height, to have a knee.
BEND = 0.1


class Size(NamedTuple):
    batch: int
    chunk: int


def point(size: Size, timed: Timed | None, ranks: int, predicted: StepPrediction | None) -> Mapping[str, Any]:
    """Return a row of the curve; `timed` None means that the size ran out of memory."""
    row: dict[str, Any] = {"batch": size.batch, "chunk": size.chunk, "ranks": ranks}
    if timed is None:
        return {**row, "out_of_memory": True}
    return row | values(TimedSample(size.batch, timed, predicted))


def judge(
    points: Sequence[Mapping[str, Any]],
    against: Literal["batch", "chunk"],
    critical: float | None,
    reading: float | None,
    notes: Sequence[str] = (),
    *,
    workers: int = 0,
) -> Profile:
    """Return the profile of a curve: its best size, the smallest that is as good, its knee, and the batch that finishes soonest.

    critical: the critical batch, if it is known. reading: samples per second that the loader reads with `workers` processes.
    """
    ran = [row for row in points if "seconds" in row]
    rates = [(row[against], row["pairs_per_s"]) for row in ran]
    soonest_batch = None
    if critical is not None and against == "batch":
        soonest_batch = soonest([(row["batch"], row["seconds"]) for row in ran], critical)
    if reading is not None:
        fastest = max(ran, key=lambda row: row["pairs_per_s"])
        notes = (*notes, *_limit_notes(reading, fastest, workers))
    return Profile(
        points=tuple(points),
        best=best(rates),
        enough=enough(rates),
        knee=knee(rates),
        against=against,
        soonest=soonest_batch,
        critical=critical,
        reading_per_s=reading,
        notes=tuple(notes),
    )


def best(rates: Points) -> int:
    """Return the size with the highest rate; of equal rates the smallest size.

    >>> best([(64, 100.0), (128, 150.0), (256, 149.0)])
    128
    """
    return max(rates, key=lambda point: (point[1], -point[0]))[0]


def enough(rates: Points, near: float = NEAR) -> int:
    """Return the smallest size whose rate is within the fraction `near` of the best one.

    >>> enough([(64, 100.0), (128, 150.0), (256, 157.0)])
    128
    """
    highest = max(rate for _, rate in rates)
    return next(size for size, rate in rates if rate >= (1 - near) * highest)


def knee(rates: Points) -> int | None:
    """Return the size from which on the rate hardly grows; None if the curve has no bend or too few points.

    That is where the rate is highest above the straight line from the first point to the best one, over the logarithm of the size.

    >>> knee([(64, 100.0), (128, 190.0), (256, 199.0), (512, 200.0)])
    128
    """
    last = best(rates)
    rising = [point for point in rates if point[0] <= last]
    (first, low), (_, high) = rising[0], rising[-1]
    if len(rising) < 3:
        return None

    def height_above_line(point: tuple[int, float]) -> float:
        along = math.log(point[0] / first) / math.log(last / first)
        return (point[1] - low) / (high - low) - along

    bend = max(rising[1:-1], key=height_above_line)
    return bend[0] if height_above_line(bend) >= BEND else None


def soonest(seconds: Points, critical: float) -> int:
    """Return the batch B that reaches a target first: the smallest steps(B) · time(B), with steps in proportion to 1 + critical/B.

    >>> soonest([(64, 0.1), (128, 0.12), (256, 0.25)], critical=64)
    128
    """
    return min(seconds, key=lambda point: (steps_factor(point[0], critical) * point[1], point[0]))[0]


def _limit_notes(reading: float, fastest: Mapping[str, Any], workers: int) -> Iterable[str]:
    """Yield what limits the fastest size: reading, the host or the device."""
    rate, idle = fastest["pairs_per_s"], fastest.get("device_idle")
    if reading >= rate and (limit := limit_sentence(0.0, idle)) is not None:
        yield f"At batch {fastest['batch']:,} and chunk {fastest['chunk']:,}: {limit}"
    if reading < rate:
        remedy = f"more than {workers} workers" if workers else "workers that read ahead"
        yield (
            f"Reading is the bottleneck: the loader reads {reading:,.0f} samples/s, and training could use {rate:,.0f};"
            f" use {remedy} (data.workers), smaller files, or a faster disk"
        )
    elif not workers:
        both = 1 / (1 / reading + 1 / rate)
        yield (f"Without workers a step waits for its batch: {both:,.0f} samples/s, reading included; data.workers=1 reads ahead")
