"""Predict memory for any number of rows, or for any strategy, from a few traced steps.

Within each phase of a step, memory is linear in the rows, and the peak is the highest of these lines: backward's where activations
dominate, the optimizer step's where they do not. A line through the peaks themselves would mix the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..strategy import Strategy
from .contrastive import ComposedStep, ContrastiveStep
from .predict import peaks_and_reserved, predict_memory, prediction_from, summarize, trace_step, whole_step
from .setup import Prediction, Setup, check_rows
from .step import Inputs, Loss
from .trace import PhasePeak

# Rows of the two traces: enough for activations to outweigh rounding, and no slower to trace than one row.
NEAR, FAR = 32, 64
# Rows of the two traced chunks: enough for activations to dominate, where memory is linear.
SMALL_CHUNK, LARGE_CHUNK = 32, 64

MemoryPredictor = Callable[[Strategy], Prediction]


@dataclass(frozen=True)
class TracedRows:
    """What was traced at a number of rows."""

    rows: int
    peaks: dict[str, PhasePeak]
    prediction: Prediction


class MemoryCurve:
    """Memory as a function of the rows, `peak(rows)`, without further traces. `memory_curve` makes it."""

    def __init__(self, near: TracedRows, far: TracedRows) -> None:
        self._near, self._far = near, far

    def peak(self, rows: int, keep: int | None = None) -> Prediction:
        """Return the prediction for a step over this many rows of this rank."""
        check_rows(rows)
        if keep is not None:
            raise ValueError(f"keep is {keep!r}: only a contrastive step in chunks keeps chunks; leave it out")
        peaks = {phase: self._phase_peak(phase, rows) for phase in self._far.peaks if phase in self._near.peaks}
        highest = max(peak.bytes for peak in peaks.values())
        near, far = self._near.prediction, self._far.prediction
        # If another phase dominates than in the traces, the allocator's overhead is taken in proportion.
        overhead = max(near.reserved_bytes / near.peak_bytes, far.reserved_bytes / far.peak_bytes)
        reserved = max(highest, min(round(highest * overhead), self._interpolate(near.reserved_bytes, far.reserved_bytes, rows)))
        return prediction_from(peaks, reserved, far.assumptions)

    def _phase_peak(self, phase: str, rows: int) -> PhasePeak:
        near, far = self._near.peaks[phase], self._far.peaks[phase]
        names = dict.fromkeys([*near.parts, *far.parts])
        parts = {part: self._interpolate(near.parts.get(part, 0), far.parts.get(part, 0), rows) for part in names}
        return PhasePeak(sum(parts.values()), {part: size for part, size in parts.items() if size}, far.moment)

    def _interpolate(self, near: int, far: int, rows: int) -> int:
        return max(0, round(near + (far - near) * (rows - self._near.rows) / (self._far.rows - self._near.rows)))


class ChunkedMemoryCurve(MemoryCurve):
    """The curve of a contrastive step in chunks: one chunk of each tower was traced, each answer is composed from it."""

    def __init__(self, step: ContrastiveStep) -> None:
        self._step = step

    def peak(self, rows: int, keep: int | None = None) -> Prediction:
        """Return the prediction for this many pairs of this rank. keep: replaces the number of kept chunks of the setup."""
        check_rows(rows)
        kept = self._step.setup.keep if keep is None else replace(self._step.setup, keep=keep).keep
        return summarize(self._step, ComposedStep(self._step, rows, dict.fromkeys(self._step.modules, kept)))

    def at_chunk(self, chunk: int) -> ChunkedMemoryCurve:
        """Return the curve of the same step in chunks of another size."""
        return ChunkedMemoryCurve(self._step.at_chunk(chunk))


class AccumulatedMemoryCurve(MemoryCurve):
    """The curve of a supervised step in chunks: constant from the second chunk on."""

    def __init__(self, one_chunk: MemoryCurve, chunk: int, more_chunks: Prediction) -> None:
        self._one_chunk, self._chunk, self._more_chunks = one_chunk, chunk, more_chunks

    def peak(self, rows: int, keep: int | None = None) -> Prediction:
        """Return the prediction for this many rows of this rank."""
        return self._one_chunk.peak(rows, keep) if check_rows(rows) <= self._chunk or keep is not None else self._more_chunks


def memory_curve(
    build: Callable[[], Any],
    inputs: Inputs | Sequence[Inputs],
    setup: Setup | None = None,
    *,
    loss: Loss | None = None,
    rows: tuple[int, int] = (NEAR, FAR),
) -> MemoryCurve:
    """Return the memory of a step as a function of its rows, from two traces at `rows`; with chunks, from the trace of one chunk.

    Arguments as in `predict_memory`. A contrastive step over fewer rows than a chunk is predicted as a whole chunk.
    """
    setup = setup or Setup()
    if setup.contrastive and setup.chunk is not None:
        step = trace_step(build, inputs, setup.chunk, setup, loss)
        assert isinstance(step, ContrastiveStep)
        return ChunkedMemoryCurve(step)
    if setup.chunk is not None:
        if setup.inputs_on_device:
            raise ValueError(
                "inputs_on_device is True with a chunk: memory is not linear; call predict_memory for each number of rows"
            )
        more_chunks = predict_memory(build, inputs, 2 * setup.chunk, setup, loss=loss)
        one_chunk = memory_curve(build, inputs, replace(setup, chunk=None), loss=loss, rows=rows)
        return AccumulatedMemoryCurve(one_chunk, setup.chunk, more_chunks)
    near, far = (_trace_rows(build, inputs, count, setup, loss) for count in rows)
    if not 1 <= near.rows < far.rows:
        raise ValueError(f"rows is {rows!r}: must be two different numbers of rows, the smaller first")
    return MemoryCurve(near, far)


def _trace_rows(build: Callable[[], Any], inputs: Any, rows: int, setup: Setup, loss: Loss | None) -> TracedRows:
    step = trace_step(build, inputs, check_rows(rows), setup, loss)
    whole = whole_step(step, rows)
    return TracedRows(rows, peaks_and_reserved(step, whole)[0], summarize(step, whole))


class PhaseMemory(NamedTuple):
    """Bytes within one phase of a step: a constant, and slopes in the rows of a chunk, of the shard and of kept chunks."""

    constant: float
    chunk: float
    shard: float
    kept: float

    def at(self, strategy: Strategy) -> float:
        # The last chunk's graph exists anyway when backward begins: the first kept chunk is free.
        kept = 0 if strategy.accumulate else max(0, min(strategy.keep, strategy.chunks) - 1) * strategy.chunk
        return self.constant + self.chunk * strategy.chunk + self.shard * strategy.shard + self.kept * kept


class PeakMemory:
    """Bytes that a strategy reserves on the device. Four steps are traced per precision, checkpointing, sharding and ranks.

    Every phase of a step has its own slopes: where the optimizer's step dominates at few rows, it says nothing about backward at
    many rows.
    """

    def __init__(self, predict: MemoryPredictor) -> None:
        self.predict = predict
        self._phases: dict[Strategy, list[PhaseMemory]] = {}
        self._factors: dict[Strategy, float] = {}

    def __call__(self, strategy: Strategy) -> int:
        key = _without_sizes(strategy)
        if key not in self._phases:
            self._phases[key], self._factors[key] = self._trace(key)
        return round(self._factors[key] * max(phase.at(strategy) for phase in self._phases[key]))

    def correct(self, strategy: Strategy, reserved_bytes: int) -> bool:
        """Raise the estimates of this kind of strategy to what was traced for one; return whether they were below it."""
        below = self(strategy) < reserved_bytes
        if below:
            self._factors[_without_sizes(strategy)] *= 1.001 * reserved_bytes / self(strategy)
        return below

    def _trace(self, key: Strategy) -> tuple[list[PhaseMemory], float]:
        def traced(chunk: int, shard: int, keep: int = 0) -> Prediction:
            return self.predict(replace(key, chunk=chunk, shard=shard, keep=keep))

        # Two chunks per shard: with one, nothing is held while another chunk is computed.
        small, large = traced(SMALL_CHUNK, 2 * SMALL_CHUNK), traced(LARGE_CHUNK, 2 * LARGE_CHUNK)
        longer = traced(SMALL_CHUNK, 3 * SMALL_CHUNK)
        kept = longer if key.accumulate else traced(SMALL_CHUNK, 3 * SMALL_CHUNK, 2)
        steps = (small, large, longer, kept)
        shared = [phase for phase in small.phases if all(phase in step.phases for step in steps)]
        phases = [_fit_phase(*(step.phases[phase] for step in steps)) for phase in shared]
        # The allocator reserves memory in large segments: slopes are those of tensors, and its overhead is a factor on top.
        return phases, max(step.reserved_bytes / step.peak_bytes for step in steps)


def _fit_phase(small: int, large: int, longer: int, kept: int) -> PhaseMemory:
    """Fit constant and slopes to the bytes of one phase in four traced steps, see `PeakMemory._trace`."""
    shard = max(0.0, (longer - small) / SMALL_CHUNK)
    chunk = max(0.0, (large - small) / (LARGE_CHUNK - SMALL_CHUNK) - 2 * shard)
    constant = small - chunk * SMALL_CHUNK - shard * 2 * SMALL_CHUNK
    return PhaseMemory(constant, chunk, shard, max(0.0, (kept - longer) / SMALL_CHUNK))


def _without_sizes(strategy: Strategy) -> Strategy:
    return replace(strategy.on_fewest_ranks, shard=1, chunk=1, keep=0)
