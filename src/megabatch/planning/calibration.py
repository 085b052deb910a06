"""What was measured, as arithmetic: seconds and bytes of a way to reach a batch, from measured ones nearby."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .. import config
from ..costs.strategy import How
from ..measurements import Fit, Noise, Sweep
from ..objectives import OBJECTIVES
from .evidence import Confidence


class Step(NamedTuple):
    """Steps that were taken one way, on the device of the plan or (`factor`) on another one, where they took so many times the
    seconds that had been predicted there. said: where and when."""

    how: How
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
    ran: How | None = None
    steps: tuple[Step, ...] = ()
    noise: Noise | None = None
    sweep: Sweep | None = None
    same_data: bool = False
    timed: tuple[int, ...] = ()
    said: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def allows(self, how: How) -> bool:
        """Whether such a way may be tried: where fit has found what runs, nothing beyond it, and nothing of another kind."""
        return self.ran is None or (how.chunk <= self.ran.chunk and _kind(how) == _kind(self.ran))

    def has_run(self, how: How) -> bool:
        """Whether fit has seen this much run."""
        # The last chunk's graph is there anyway when backward begins: to keep one takes nothing.
        return self.ran is not None and self.allows(how) and how.shard <= self.ran.shard and how.keep <= 1

    def nearest(self, how: How) -> Step | None:
        """The measured step that is most like this one, by ratios of the rows of a rank and of a chunk."""
        kin = [step for step in self.steps if _kind(step.how) == _kind(how)]
        return min(kin or self.steps, key=lambda step: _distance(step.how, how), default=None)

    def confidence(self, how: How) -> Confidence | None:
        """How far the measured steps carry for a way; None where there are none."""
        step = self.nearest(how)
        if step is None:
            return None
        return "low" if step.factor is not None else "measured" if step.how == how else "medium"

    def seconds(self, how: How, predict: Callable[[How], float]) -> float:
        """Seconds of a step: those measured, or the predicted ones times what was measured of the prediction nearby."""
        step = self.nearest(how)
        if step is None:
            return predict(how)
        if step.how == how and step.factor is None:
            return step.seconds
        return predict(how) * (step.seconds / predict(step.how) if step.factor is None else step.factor)

    def memory(self, how: How, predict: Callable[[How], int]) -> int:
        """Bytes of a step, likewise."""
        step = self.nearest(how)
        if step is None or step.memory is None:
            return predict(how)
        return round(step.memory if step.how == how else predict(how) * step.memory / predict(step.how))


def how_of(run: config.Run, ranks: int, batch: int, chunk: int, keep: int) -> How:
    """The way in which a run takes a step at such a batch and chunk."""
    shard = -(-batch // ranks)
    checkpointing, accumulate = run.x.checkpointing, not OBJECTIVES[run.loss.objective].contrastive
    how = How(ranks, shard, min(chunk, shard), 0, checkpointing, run.compute.precision, run.compute.sharding, accumulate)
    return replace(how, keep=0 if accumulate else min(keep, how.chunks))


def _kind(how: How) -> How:
    return replace(how, ranks=1, shard=1, chunk=1, keep=0)


def _distance(a: How, b: How) -> tuple[float, float]:
    rows = abs(math.log(a.shard / b.shard)) + abs(math.log(a.chunk / b.chunk))
    return rows + abs(math.log(a.ranks / b.ranks)), abs(a.keep - b.keep)
