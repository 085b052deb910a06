"""The quantities of a profile. One record adds a quantity to the measurement's file, to the tables and to the figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...reporting.format import Format, bytes_text, percent_text, seconds_text, whole
from ...reporting.report import Column
from ..predictions import StepPrediction

RESERVED = "reserved_bytes"
# Computed from predicted_seconds for the chart; not in the file.
PREDICTED_RATE = "predicted_pairs_per_s"


class Timed(NamedTuple):
    """Steps that were timed at one size.

    seconds: of each step, on the slowest rank. peak_bytes: of tensors; reserved_bytes: what the allocator has reserved of the
    device for them, None on a CPU. Both are None on a device that does not report its memory. keep: chunks that were not
    recomputed in backward. idle: the share of the time in which the device had nothing to do; None if unknown.
    """

    seconds: tuple[float, ...]
    peak_bytes: int | None
    reserved_bytes: int | None
    keep: int
    idle: float | None = None


class TimedSample(NamedTuple):
    """Steps at one size, and the prediction for them, if there is one."""

    batch: int
    timed: Timed
    predicted: StepPrediction | None


class Quantity(NamedTuple):
    """key: in the file. name: heading of its column, and of its chart. value: None where the device does not report it.

    replaced_by: the quantity that is shown instead on a terminal, where there is one. chart: title of its chart, if it has one;
    predicted: key of the prediction, drawn dashed.
    """

    key: str
    name: str
    format: Format
    value: Callable[[TimedSample], float | None]
    replaced_by: str = ""
    chart: str = ""
    predicted: str = ""


def _seconds(sample: TimedSample) -> float:
    return median_and_spread(sample.timed.seconds)[0]


def _predicted_reserved(sample: TimedSample) -> int | None:
    if sample.predicted is None or sample.timed.reserved_bytes is None:
        return None
    return sample.predicted.reserved_bytes


# The order is that of the columns.
QUANTITIES = (
    Quantity("keep", "keep", whole, lambda s: s.timed.keep),
    Quantity(
        "pairs_per_s", "samples/s", whole, lambda s: s.batch / _seconds(s), chart="samples per second", predicted=PREDICTED_RATE
    ),
    Quantity("seconds", "one step", seconds_text, _seconds),
    Quantity("spread", "±", seconds_text, lambda s: median_and_spread(s.timed.seconds)[1]),
    Quantity("device_idle", "idle", percent_text, lambda s: s.timed.idle),
    Quantity("predicted_seconds", "predicted", seconds_text, lambda s: s.predicted and s.predicted.seconds),
    Quantity("peak_bytes", "peak", bytes_text, lambda s: s.timed.peak_bytes, RESERVED, "peak memory of tensors", "predicted_bytes"),
    Quantity("predicted_bytes", "predicted", bytes_text, lambda s: s.predicted and s.predicted.peak_bytes, RESERVED),
    Quantity(
        RESERVED, "reserved", bytes_text, lambda s: s.timed.reserved_bytes, chart="reserved memory", predicted="predicted_reserved"
    ),
    Quantity("predicted_reserved", "predicted", bytes_text, _predicted_reserved),
)


def values(sample: TimedSample) -> dict[str, float]:
    """Return every quantity that is known of a sample, by its key."""
    measured = {quantity.key: quantity.value(sample) for quantity in QUANTITIES}
    return {key: value for key, value in measured.items() if value is not None}


def columns(points: tuple[Mapping[str, Any], ...]) -> list[Column]:
    """Return the columns of a table of sizes."""
    known = {key for point in points for key in point}
    sizes = [Column("batch", "batch", whole), Column("chunk", "chunk", whole)]
    return sizes + [Column(each.key, each.name, each.format, detail=each.replaced_by in known) for each in QUANTITIES]


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and half of the interquartile range.

    >>> median_and_spread([5.0, 1.0, 2.0, 3.0, 4.0])
    (3.0, 1.0)
    """
    ordered = sorted(values)

    def quantile(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return quantile(0.5), (quantile(0.75) - quantile(0.25)) / 2
