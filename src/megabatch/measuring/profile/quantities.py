"""The quantities of a profile. One record adds a quantity to the measurement's file, to the tables and to the figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...reporting.format import bytes_text, count_text, seconds_text
from ...reporting.report import Column, Format, whole
from ..predictions import StepPrediction


class Timed(NamedTuple):
    """Steps that were timed at one size.

    seconds: of each step, on the slowest rank. peak_bytes: of tensors; reserved_bytes: what the allocator has reserved of the
    device for them, None on a CPU. Both are None on a device that does not report its memory. keep: chunks that were not
    recomputed in backward.
    """

    seconds: tuple[float, ...]
    peak_bytes: int | None
    reserved_bytes: int | None
    keep: int


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


QUANTITIES = (
    Quantity("keep", "keep", whole, lambda sample: sample.timed.keep),
    Quantity(
        "pairs_per_s",
        "samples/s",
        count_text,
        lambda sample: sample.batch / median_and_spread(sample.timed.seconds)[0],
        chart="samples per second",
        predicted="predicted_pairs_per_s",
    ),
    Quantity("seconds", "one step", seconds_text, lambda sample: median_and_spread(sample.timed.seconds)[0]),
    Quantity("spread", "±", seconds_text, lambda sample: median_and_spread(sample.timed.seconds)[1]),
    Quantity("predicted_seconds", "predicted", seconds_text, lambda sample: sample.predicted and sample.predicted.seconds),
    Quantity(
        "peak_bytes",
        "peak",
        bytes_text,
        lambda sample: sample.timed.peak_bytes,
        replaced_by="reserved_bytes",
        chart="peak memory of tensors",
        predicted="predicted_bytes",
    ),
    Quantity(
        "predicted_bytes",
        "predicted",
        bytes_text,
        lambda sample: sample.predicted and sample.predicted.peak_bytes,
        replaced_by="reserved_bytes",
    ),
    Quantity(
        "reserved_bytes",
        "reserved",
        bytes_text,
        lambda sample: sample.timed.reserved_bytes,
        chart="memory reserved on the device",
        predicted="predicted_reserved",
    ),
    Quantity(
        "predicted_reserved",
        "predicted",
        bytes_text,
        lambda sample: sample.predicted and sample.timed.reserved_bytes and sample.predicted.reserved_bytes,
    ),
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
