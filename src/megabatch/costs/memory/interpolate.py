"""A whole curve for the price of two traces.

Within each phase of a step memory is a line in the rows, and the peak is the highest of these lines: that of backward where
activations rule, that of the optimizer's step where they do not. A line through the peaks themselves would mix the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .composition import Composition
from .contrastive import Contrastive
from .predict import of_peaks, peaks_and_reserve, predict_memory, summary, trace_step
from .setup import Prediction, Setup, check_rows
from .step import Inputs, Loss, Supervised
from .trace import Peak

# Rows of the two traces: enough for activations to outweigh what is rounded up, and no dearer than one row.
NEAR, FAR = 32, 64


@dataclass(frozen=True)
class Sample:
    """A trace at a number of rows."""

    rows: int
    peaks: dict[str, Peak]
    prediction: Prediction


class MemoryModel:
    """`peak(rows)` for any number of rows, at once. `memory_line` makes it."""

    def __init__(self, near: Sample, far: Sample) -> None:
        self._near, self._far = near, far

    def peak(self, rows: int, keep: int | None = None) -> Prediction:
        """The prediction for a step over so many rows of this rank."""
        check_rows(rows)
        if keep is not None:
            raise ValueError(f"keep is {keep!r}: only a contrastive step in chunks keeps any; leave it out")
        peaks = {phase: self._on_line(phase, rows) for phase in self._far.peaks if phase in self._near.peaks}
        highest = max(peak.bytes for peak in peaks.values())
        near, far = self._near.prediction, self._far.prediction
        # Where another phase rules than in the traces, what the allocator loses is in proportion.
        lost = max(near.reserved_bytes / near.peak_bytes, far.reserved_bytes / far.peak_bytes)
        reserved = max(highest, min(round(highest * lost), self._between(near.reserved_bytes, far.reserved_bytes, rows)))
        return of_peaks(peaks, reserved, far.assumptions)

    def _on_line(self, phase: str, rows: int) -> Peak:
        near, far = self._near.peaks[phase], self._far.peaks[phase]
        kinds = dict.fromkeys([*near.parts, *far.parts])
        parts = {kind: self._between(near.parts.get(kind, 0), far.parts.get(kind, 0), rows) for kind in kinds}
        return Peak(sum(parts.values()), {kind: size for kind, size in parts.items() if size}, far.moment)

    def _between(self, near: int, far: int, rows: int) -> int:
        return max(0, round(near + (far - near) * (rows - self._near.rows) / (self._far.rows - self._near.rows)))


class ChunkedModel(MemoryModel):
    """The curve of a contrastive step in chunks: one chunk of each tower was traced, and each answer is put together from it."""

    def __init__(self, step: Contrastive) -> None:
        self._step = step

    def peak(self, rows: int, keep: int | None = None) -> Prediction:
        """The prediction for so many pairs of this rank, with another number of kept chunks if that is given."""
        check_rows(rows)
        kept = self._step.setup.keep if keep is None else replace(self._step.setup, keep=keep).keep
        return summary(self._step, Composition(self._step, rows, dict.fromkeys(self._step.modules, kept)))


class AccumulatedModel(MemoryModel):
    """The curve of a supervised step in chunks: flat from the second chunk on."""

    def __init__(self, below: MemoryModel, chunk: int, beyond: Prediction) -> None:
        self._below, self._chunk, self._beyond = below, chunk, beyond

    def peak(self, rows: int, keep: int | None = None) -> Prediction:
        """The prediction for so many rows of this rank."""
        return self._below.peak(rows, keep) if check_rows(rows) <= self._chunk or keep is not None else self._beyond


def memory_line(
    build: Callable[[], Any],
    inputs: Inputs | Sequence[Inputs],
    setup: Setup | None = None,
    *,
    loss: Loss | None = None,
    rows: tuple[int, int] = (NEAR, FAR),
) -> MemoryModel:
    """The memory of a step as a function of its rows, from two traces, at `rows`; in chunks, from one of a chunk.

    Arguments as of `predict_memory`. A contrastive step over fewer rows than a chunk is given what a whole chunk takes.
    """
    setup = setup or Setup()
    if setup.contrastive and setup.chunk is not None:
        step = trace_step(build, inputs, setup.chunk, setup, loss)
        assert isinstance(step, Contrastive)
        return ChunkedModel(step)
    if setup.chunk is not None:
        if setup.inputs_on_device:
            raise ValueError("inputs_on_device is True with a chunk: that is no line; call predict_memory for each number of rows")
        beyond = predict_memory(build, inputs, 2 * setup.chunk, setup, loss=loss)
        return AccumulatedModel(memory_line(build, inputs, replace(setup, chunk=None), loss=loss, rows=rows), setup.chunk, beyond)
    near, far = (_sample(build, inputs, count, setup, loss) for count in rows)
    if not 1 <= near.rows < far.rows:
        raise ValueError(f"rows is {rows!r}: a line needs two different numbers of rows, the smaller first")
    return MemoryModel(near, far)


def _sample(build: Callable[[], Any], inputs: Any, rows: int, setup: Setup, loss: Loss | None) -> Sample:
    step = trace_step(build, inputs, check_rows(rows), setup, loss)
    ran = step if isinstance(step, Supervised) else Composition(step, rows, dict.fromkeys(step.modules, setup.keep))
    return Sample(rows, peaks_and_reserve(step, ran)[0], summary(step, ran))
