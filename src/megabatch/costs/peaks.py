"""Memory of any way to reach a batch, from a few traced steps: lines in the chunk, the shard and the kept chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

from .strategy import Strategy

# Rows of the two chunks that are traced: large enough for activations to rule, where the line is one.
SMALL, LARGE = 32, 64


class Predicted(Protocol):
    """What is known of a step's memory: `memory.Prediction` is one."""

    @property
    def peak_bytes(self) -> int: ...

    @property
    def reserved_bytes(self) -> int: ...

    @property
    def parts(self) -> dict[str, int]: ...

    @property
    def moment(self) -> str: ...

    @property
    def phases(self) -> dict[str, int]: ...


Predict = Callable[[Strategy], Predicted]


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


class Peaks:
    """Bytes that a way takes of the device; each kind of way (precision, checkpointing, sharding, ranks) is traced once.

    Every phase of a step has its line: where the optimizer's step rules at few rows, that says nothing of backward at many.
    """

    def __init__(self, predict: Predict) -> None:
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
        def traced(chunk: int, shard: int, keep: int = 0) -> Predicted:
            return self.predict(dataclasses.replace(kind, chunk=chunk, shard=shard, keep=keep))

        # Two chunks to a shard: with one, nothing would have to be held while another is computed.
        small, large, longer = traced(SMALL, 2 * SMALL), traced(LARGE, 2 * LARGE), traced(SMALL, 3 * SMALL)
        kept = longer if kind.accumulate else traced(SMALL, 3 * SMALL, 2)
        steps = (small, large, longer, kept)
        lines = [_line(*(step.phases[phase] for step in steps)) for phase in small.phases if all(phase in s.phases for s in steps)]
        # The allocator takes memory in large pieces: slopes are those of what tensors take, and its reserve comes on top of all.
        return lines, max(step.reserved_bytes / step.peak_bytes for step in steps)


def _line(small: int, large: int, longer: int, kept: int) -> Line:
    """Through one phase of four traced steps, see `Peaks._trace`."""
    shard = max(0.0, (longer - small) / SMALL)
    chunk = max(0.0, (large - small) / (LARGE - SMALL) - 2 * shard)
    return Line(small - chunk * SMALL - shard * 2 * SMALL, chunk, shard, max(0.0, (kept - longer) / SMALL))


def _kind(strategy: Strategy) -> Strategy:
    # With DDP, what a rank holds does not depend on how many others there are.
    ranks = strategy.ranks if strategy.sharding == "fsdp2" else min(strategy.ranks, 2)
    return dataclasses.replace(strategy, ranks=ranks, shard=1, chunk=1, keep=0)
