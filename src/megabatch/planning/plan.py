"""The result of planning: the batch with its reasons, the strategy that reaches it, its cost, and the run that implements it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import config
from ..costs.strategy import Strategy
from ..evidence import Confidence


class Number(NamedTuple):
    """One number of a plan with its reason. `value` is for programs, `shown` for people."""

    name: str
    value: float | int | str | None
    shown: str
    why: str
    source: str
    confidence: Confidence


class Alternative(NamedTuple):
    """Another batch, chunk or machine beside the plan's.

    hours: of the whole run. cost: in GPU-hours, or in money if a price was given.
    """

    name: str
    batch: int
    gpus: int
    chunk: int
    keep: int
    peak_bytes: int
    seconds_per_step: float
    updates: int
    hours: float
    cost: float


class CurvePoint(NamedTuple):
    """Peak memory and time of a step at one batch size."""

    batch: int
    peak_bytes: int
    seconds_per_step: float


@dataclass(frozen=True)
class Plan:
    """A plan. `run` is the configuration for `megabatch train`, or None if it cannot train this model (language models).

    numbers: every number with its reason, source and confidence. alternatives: other choices with memory, time, updates and cost.
    notes: what to know before the run. changes: what would change the plan. memory, time: the parts of the peak and of a step.
    curve: peak and seconds of a step against the batch; each point has its own best strategy.
    """

    run: config.Run | None
    strategy: Strategy
    machine: str
    device_bytes: int
    limit_bytes: int
    seconds_per_step: float
    peak_bytes: int
    moment: str
    memory: dict[str, int]
    time: dict[str, float]
    numbers: tuple[Number, ...]
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...]
    changes: tuple[str, ...]
    curve: tuple[CurvePoint, ...]

    @property
    def batch(self) -> int:
        return self.strategy.batch

    def number(self, name: str) -> Number:
        """Return the number of that name."""
        return next(number for number in self.numbers if number.name == name)

    def as_table(self) -> dict[str, Any]:
        """Return the plan as nested dicts and lists of plain values."""
        table = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        table["run"] = None if self.run is None else config.as_table(self.run)
        table["strategy"] = dataclasses.asdict(self.strategy)
        for name in ("numbers", "alternatives"):
            table[name] = [row._asdict() for row in table[name]]
        return table

    def as_json(self) -> str:
        return json.dumps(self.as_table(), indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `as_json` wrote, equal to the original."""
        table = json.loads(text)
        table["run"] = None if table["run"] is None else config.build(table["run"])
        table["strategy"] = Strategy(**table["strategy"])
        table["numbers"] = tuple(Number(**row) for row in table["numbers"])
        table["alternatives"] = tuple(Alternative(**row) for row in table["alternatives"])
        table |= {name: tuple(table[name]) for name in ("notes", "changes")}
        table["curve"] = tuple(CurvePoint(*point) for point in table["curve"])
        return cls(**table)
