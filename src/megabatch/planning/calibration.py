"""What was measured, as arithmetic: seconds and bytes of a way to reach a batch, from measured ones nearby."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .. import config
from ..costs.strategy import Strategy
from ..measurements import Fit, Noise, Sweep
from ..objectives import OBJECTIVES
from .evidence import Confidence


class Step(NamedTuple):
    """Steps that were taken one way, on the device of the plan or (`factor`) on another one, where they took so many times the
    seconds that had been predicted there. said: where and when."""

    strategy: Strategy
    seconds: float
    memory: int | None
    factor: float | None
    said: str


@dataclass(frozen=True)
class Known:
    """All that was measured.

    ran: the way of the largest chunk that fit found on the plan's device. steps: of profiles; timed: chunks that were compared with
    each other on the plan's device. same_data: whether the sweep saw the data of the plan. said: where and when, by kind.
    """

    fit: Fit | None = None
    ran: Strategy | None = None
    steps: tuple[Step, ...] = ()
    noise: Noise | None = None
    sweep: Sweep | None = None
    same_data: bool = False
    timed: tuple[int, ...] = ()
    said: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def allows(self, strategy: Strategy) -> bool:
        """Whether such a way may be tried: where fit has found what runs, nothing beyond it, and nothing of another kind."""
        return self.ran is None or (strategy.chunk <= self.ran.chunk and _kind(strategy) == _kind(self.ran))

    def has_run(self, strategy: Strategy) -> bool:
        """Whether fit has seen this much run."""
        # The last chunk's graph is there anyway when backward begins: to keep one takes nothing.
        return self.ran is not None and self.allows(strategy) and strategy.shard <= self.ran.shard and strategy.keep <= 1

    def nearest(self, strategy: Strategy) -> Step | None:
        """The measured step that is most like this one, by ratios of the rows of a rank and of a chunk."""
        kin = [step for step in self.steps if _kind(step.strategy) == _kind(strategy)]
        return min(kin or self.steps, key=lambda step: _distance(step.strategy, strategy), default=None)

    def confidence(self, strategy: Strategy) -> Confidence | None:
        """How far the measured steps carry for a way; None where there are none."""
        step = self.nearest(strategy)
        if step is None:
            return None
        return "low" if step.factor is not None else "measured" if step.strategy == strategy else "medium"

    def seconds(self, strategy: Strategy, predict: Callable[[Strategy], float]) -> float:
        """Seconds of a step: those measured, or the predicted ones times what was measured of the prediction nearby."""
        step = self.nearest(strategy)
        if step is None:
            return predict(strategy)
        if step.strategy == strategy and step.factor is None:
            return step.seconds
        return predict(strategy) * (step.seconds / predict(step.strategy) if step.factor is None else step.factor)

    def memory(self, strategy: Strategy, predict: Callable[[Strategy], int]) -> int:
        """Bytes of a step, likewise."""
        step = self.nearest(strategy)
        if step is None or step.memory is None:
            return predict(strategy)
        return round(step.memory if step.strategy == strategy else predict(strategy) * step.memory / predict(step.strategy))


def strategy_of(run: config.Run, ranks: int, batch: int, chunk: int, keep: int) -> Strategy:
    """The way in which a run takes a step at such a batch and chunk."""
    shard = -(-batch // ranks)
    checkpointing, accumulate = run.x.checkpointing, not OBJECTIVES[run.loss.objective].contrastive
    strategy = Strategy(ranks, shard, min(chunk, shard), 0, checkpointing, run.compute.precision, run.compute.sharding, accumulate)
    return replace(strategy, keep=0 if accumulate else min(keep, strategy.chunks))


def _kind(strategy: Strategy) -> Strategy:
    return replace(strategy, ranks=1, shard=1, chunk=1, keep=0)


def _distance(a: Strategy, b: Strategy) -> tuple[float, float]:
    rows = abs(math.log(a.shard / b.shard)) + abs(math.log(a.chunk / b.chunk))
    return rows + abs(math.log(a.ranks / b.ranks)), abs(a.keep - b.keep)
