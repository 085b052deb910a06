"""Several trainings that are compared with each other: whether the comparison is fair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..optimizers import DEFAULT, OPTIMIZERS
from .arithmetic import rounded, scaled_rate
from .documents import Reading
from .rule import Finding

SAME, UNEQUAL = "same-settings-across-batches", "unequal-samples"
# Codes, severities, titles, reasons, sources and remedies, for the page of rules.
ABOUT = (
    (
        SAME,
        ("warning",),
        "The same learning rate at different batches",
        "A comparison of batches at one rate compares the rate's luck: one batch is tuned, the others are not.",
        "1811.03600; measured on 199k docstring–code pairs: batch 256 gives 28.2 untuned and 32.9 tuned against 34.2 at 4,096, a"
        " large-batch win that is mostly tuning",
        "Tune the rate at each batch; scaling by the rule is the least.",
    ),
    (
        UNEQUAL,
        ("warning",),
        "Runs of different length",
        "At equal steps the larger batch sees more data, and wins for that; batches are compared at equal samples.",
        "1811.03600, 1705.08741",
        "The same `samples` or `epochs` for all.",
    ),
)


def audit_together(readings: Sequence[Reading]) -> list[Finding]:
    """Findings about a comparison: trainings that differ in their batch. What is wrong with each by itself, `audit` says.

    readings: of `read_any`, at least two.
    """
    if len(readings) < 2:
        raise ValueError(f"{len(readings)} trainings to compare: give at least two")
    known = [reading for reading in readings if reading.training.size is not None]
    sizes = {reading.training.size for reading in known}
    if len(sizes) < 2:
        return []
    ordered = sorted(known, key=lambda reading: reading.training.size or 0)
    return [*_same_rate(ordered), *_unequal(ordered)]


def _same_rate(readings: Sequence[Reading]) -> Iterator[Finding]:
    """One finding for each run whose rate is that of a run at another batch: all but the one at the smallest."""
    _, _, _, because, source, remedy = ABOUT[0]
    for place, reading in enumerate(readings):
        training = reading.training
        for first in readings[:place]:
            base = first.training
            if base.lr is None or training.lr != base.lr or training.size == base.size or training.optimizer != base.optimizer:
                continue
            assert base.size is not None and training.size is not None
            wanted = rounded(scaled_rate(base.lr, base.size, training.size, training.optimizer or OPTIMIZERS[DEFAULT].family.name))
            why = f"lr {training.lr:g} at {training.size:,} as in {first.document.name} at {base.size:,}. {because} [{source}]"
            fix = reading.document.diff({"lr": wanted}, training) if training.optimizer else None
            yield Finding(SAME, "warning", f"{reading.document.name}: {reading.document.where('lr')}", why, fix or remedy)
            break


def _unequal(readings: Sequence[Reading]) -> Iterator[Finding]:
    seen = {reading.document.name: reading.training.seen for reading in readings}
    lengths = [length for length in seen.values() if length is not None]
    if lengths and max(lengths) > 1.1 * min(lengths):
        _, _, _, because, source, remedy = ABOUT[1]
        numbers = ", ".join(f"{name} {length:,}" for name, length in seen.items() if length is not None)
        yield Finding(UNEQUAL, "warning", "samples", f"samples seen: {numbers}. {because} [{source}]", remedy)
