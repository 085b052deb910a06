"""A whole curve for the price of two traces.

Within each phase of a step memory is a line in the rows, and the peak is the highest of these lines: that of backward where
activations rule, that of the optimizer's step where they do not. A line through the peaks themselves would mix the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..strategy import Strategy
from .composition import Composition
from .contrastive import Contrastive
from .predict import of_peaks, peaks_and_reserve, predict_memory, summary, trace_step
from .setup import Prediction, Setup, check_rows
from .step import Inputs, Loss, Supervised
from .trace import Peak

# Rows of the two traces: enough for activations to outweigh what is rounded up, and no dearer than one row.
NEAR, FAR = 32, 64
# Rows of the two chunks that are traced: large enough for activations to rule, where the line is one.
SMALL_CHUNK, LARGE_CHUNK = 32, 64

MemoryPredictor = Callable[[Strategy], Prediction]


@dataclass(frozen=True)
class Sample:
    """A trace at a number of rows."""

    rows: int
    peaks: dict[str, Peak]
    prediction: Prediction


class MemoryCurve:
    """`peak(rows)` for any number of rows, at once. `memory_curve` makes it."""

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


class ChunkedModel(MemoryCurve):
    """The curve of a contrastive step in chunks: one chunk of each tower was traced, and each answer is put together from it."""

    def __init__(self, step: Contrastive) -> None:
        self._step = step

    def peak(self, rows: int, keep: int | None = None) -> Prediction:
        """The prediction for so many pairs of this rank, with another number of kept chunks if that is given."""
        check_rows(rows)
        kept = self._step.setup.keep if keep is None else replace(self._step.setup, keep=keep).keep
        return summary(self._step, Composition(self._step, rows, dict.fromkeys(self._step.modules, kept)))


class AccumulatedModel(MemoryCurve):
    """The curve of a supervised step in chunks: flat from the second chunk on."""

    def __init__(self, below: MemoryCurve, chunk: int, beyond: Prediction) -> None:
        self._below, self._chunk, self._beyond = below, chunk, beyond

    def peak(self, rows: int, keep: int | None = None) -> Prediction:
        """The prediction for so many rows of this rank."""
        return self._below.peak(rows, keep) if check_rows(rows) <= self._chunk or keep is not None else self._beyond


def memory_curve(
    build: Callable[[], Any],
    inputs: Inputs | Sequence[Inputs],
    setup: Setup | None = None,
    *,
    loss: Loss | None = None,
    rows: tuple[int, int] = (NEAR, FAR),
) -> MemoryCurve:
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
        return AccumulatedModel(memory_curve(build, inputs, replace(setup, chunk=None), loss=loss, rows=rows), setup.chunk, beyond)
    near, far = (_sample(build, inputs, count, setup, loss) for count in rows)
    if not 1 <= near.rows < far.rows:
        raise ValueError(f"rows is {rows!r}: a line needs two different numbers of rows, the smaller first")
    return MemoryCurve(near, far)


def _sample(build: Callable[[], Any], inputs: Any, rows: int, setup: Setup, loss: Loss | None) -> Sample:
    step = trace_step(build, inputs, check_rows(rows), setup, loss)
    ran = step if isinstance(step, Supervised) else Composition(step, rows, dict.fromkeys(step.modules, setup.keep))
    return Sample(rows, peaks_and_reserve(step, ran)[0], summary(step, ran))


class Line(NamedTuple):
    """Bytes within one phase of a step: a constant, and slopes in the rows of a chunk, of the shard and of kept chunks."""

    constant: float
    chunk: float
    shard: float
    kept: float

    def at(self, strategy: Strategy) -> float:
        # The last chunk's graph exists anyway while backward begins: the first one that is kept is free.
        kept = 0 if strategy.accumulate else max(0, min(strategy.keep, strategy.chunks) - 1) * strategy.chunk
        return self.constant + self.chunk * strategy.chunk + self.shard * strategy.shard + self.kept * kept


class PeakMemory:
    """Bytes that a way takes of the device; each kind of way (precision, checkpointing, sharding, ranks) is traced once.

    Every phase of a step has its line: where the optimizer's step rules at few rows, that says nothing of backward at many.
    """

    def __init__(self, predict: MemoryPredictor) -> None:
        self.predict = predict
        self._lines: dict[Strategy, list[Line]] = {}
        self._factors: dict[Strategy, float] = {}

    def __call__(self, strategy: Strategy) -> int:
        kind = _kind(strategy)
        if kind not in self._lines:
            self._lines[kind], self._factors[kind] = self._trace(kind)
        return round(self._factors[kind] * max(line.at(strategy) for line in self._lines[kind]))

    def correct(self, strategy: Strategy, reserved_bytes: int) -> bool:
        """Raises the lines of a kind so far that they do not lie below what was traced for a way; returns whether they did."""
        below = self(strategy) < reserved_bytes
        if below:
            self._factors[_kind(strategy)] *= 1.001 * reserved_bytes / self(strategy)
        return below

    def _trace(self, kind: Strategy) -> tuple[list[Line], float]:
        def traced(chunk: int, shard: int, keep: int = 0) -> Prediction:
            return self.predict(replace(kind, chunk=chunk, shard=shard, keep=keep))

        # Two chunks to a shard: with one, nothing would have to be held while another is computed.
        small, large, longer = (
            traced(SMALL_CHUNK, 2 * SMALL_CHUNK),
            traced(LARGE_CHUNK, 2 * LARGE_CHUNK),
            traced(SMALL_CHUNK, 3 * SMALL_CHUNK),
        )
        kept = longer if kind.accumulate else traced(SMALL_CHUNK, 3 * SMALL_CHUNK, 2)
        steps = (small, large, longer, kept)
        lines = [_line(*(step.phases[phase] for step in steps)) for phase in small.phases if all(phase in s.phases for s in steps)]
        # The allocator takes memory in large pieces: slopes are those of what tensors take, and its reserve comes on top of all.
        return lines, max(step.reserved_bytes / step.peak_bytes for step in steps)


def _line(small: int, large: int, longer: int, kept: int) -> Line:
    """Through one phase of four traced steps, see `PeakMemory._trace`."""
    shard = max(0.0, (longer - small) / SMALL_CHUNK)
    chunk = max(0.0, (large - small) / (LARGE_CHUNK - SMALL_CHUNK) - 2 * shard)
    return Line(small - chunk * SMALL_CHUNK - shard * 2 * SMALL_CHUNK, chunk, shard, max(0.0, (kept - longer) / SMALL_CHUNK))


def _kind(strategy: Strategy) -> Strategy:
    # With DDP, what a rank holds does not depend on how many others there are.
    ranks = strategy.ranks if strategy.sharding == "fsdp2" else min(strategy.ranks, 2)
    return replace(strategy, ranks=ranks, shard=1, chunk=1, keep=0)
