"""Rules about several trainings that are compared with each other: whether the comparison is fair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..evidence import round_rate
from ..optimizers import DEFAULT, OPTIMIZERS
from ..recipes import advise_rate
from .documents import Reading
from .facts import TrainingFacts, scaled_rate
from .rule import Finding, Severity


class ComparisonRule(NamedTuple):
    """A rule about several trainings; the fields are those of `Rule`."""

    code: str
    severities: tuple[Severity, ...]
    title: str
    because: str
    source: str
    remedy: str


SAME_RATE = ComparisonRule(
    code="same-settings-across-batches",
    severities=("warning",),
    title="The same learning rate at different batches",
    because="A comparison of batches at one rate is not fair: the rate is tuned for one batch and not for the others.",
    source="1811.03600; measured on 199k docstring–code pairs: batch 256 gives 28.2 untuned and 32.9 tuned against 34.2 at 4,096, a"
    " large-batch win that is mostly tuning",
    remedy="Tune the rate at each batch, or at least scale it by the rule.",
)
UNEQUAL_SAMPLES = ComparisonRule(
    code="unequal-samples",
    severities=("warning",),
    title="Runs of different length",
    because="At equal steps the larger batch sees more data, and wins because of that. Compare batches at equal samples.",
    source="1811.03600, 1705.08741",
    remedy="Give all runs the same `samples` or `epochs`.",
)
COMPARISON_RULES = (SAME_RATE, UNEQUAL_SAMPLES)
# Runs whose samples differ by more than this factor have different lengths.
MOST_UNEQUAL = 1.1


def audit_together(readings: Sequence[Reading]) -> list[Finding]:
    """Return findings about a comparison of trainings that differ in their batch. `audit` checks each training by itself.

    readings: at least two results of `read_any`.
    """
    if len(readings) < 2:
        raise ValueError(f"got {len(readings)} trainings to compare: give at least two")
    sized = [reading for reading in readings if reading.training.size is not None]
    if len({reading.training.size for reading in sized}) < 2:
        return []
    ordered = sorted(sized, key=lambda reading: reading.training.size or 0)
    return [*_same_rate(ordered), *_unequal_samples(ordered)]


def _same_rate(readings: Sequence[Reading]) -> Iterator[Finding]:
    """Yield a finding for each run with the rate of a run at a smaller batch."""
    for place, reading in enumerate(readings):
        training = reading.training
        for smaller in readings[:place]:
            base = smaller.training
            if base.lr is None or training.lr != base.lr or training.size == base.size or training.optimizer != base.optimizer:
                continue
            assert base.size is not None and training.size is not None
            growth = _growth(training, base.size, training.size)
            if growth == 1:
                continue
            wanted = round_rate(base.lr * growth)
            text = f"The rate is {training.lr:g} at {training.size:,}, as in {smaller.document.name} at {base.size:,}."
            why = f"{text} {SAME_RATE.because}"
            after = reading.document.edited({"lr": wanted}, training) if training.optimizer else None
            diff = None if after is None else reading.document.diff(after)
            where = f"{reading.document.name}: {reading.document.where('lr')}"
            yield Finding(SAME_RATE.code, "warning", where, why, diff or SAME_RATE.remedy, SAME_RATE.source)
            break


def _growth(training: TrainingFacts, batch: int, other: int) -> float:
    """Return how the rate changes from one batch to another, by the rule for plans if what is trained is known."""
    tasks = training.tasks()
    if len(tasks) == 1:
        return advise_rate(tasks[0], other).value / advise_rate(tasks[0], batch).value
    family = training.optimizer or OPTIMIZERS[DEFAULT].family.name
    return scaled_rate(1.0, batch, other, family)


def _unequal_samples(readings: Sequence[Reading]) -> Iterator[Finding]:
    seen = {reading.document.name: reading.training.seen for reading in readings}
    lengths = [length for length in seen.values() if length is not None]
    if lengths and max(lengths) > MOST_UNEQUAL * min(lengths):
        numbers = ", ".join(f"{name} {length:,}" for name, length in seen.items() if length is not None)
        why = f"The runs see different numbers of samples: {numbers}. {UNEQUAL_SAMPLES.because}"
        yield Finding(UNEQUAL_SAMPLES.code, "warning", "samples", why, UNEQUAL_SAMPLES.remedy, UNEQUAL_SAMPLES.source)
