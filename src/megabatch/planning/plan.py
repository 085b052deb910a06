"""A plan: which batch, why, how it is reached, what it costs, and the run that does it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from .. import config
from ..costs.strategy import Strategy
from .alternatives import Alternative
from .evidence import Number


@dataclass(frozen=True)
class Plan:
    """The answer. `run` is what `megabatch train` runs, None where it cannot (language models).

    numbers: each with why, source and confidence. alternatives: what else could be done, with memory, time, updates and cost.
    notes: what to know; changes: what would change the answer. memory, time: what peak and step are made of. curve: peak and
    seconds of a step against the batch, the way being chosen anew at each.
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
    curve: tuple[tuple[int, int, float], ...]

    @property
    def batch(self) -> int:
        return self.strategy.batch

    def number(self, name: str) -> Number:
        """The number of that name."""
        return next(number for number in self.numbers if number.name == name)

    def as_table(self) -> dict[str, Any]:
        """Nested dicts and lists of plain values."""
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
        """The plan that `as_json` wrote, equal to it."""
        table = json.loads(text)
        table["run"] = None if table["run"] is None else config.build(table["run"])
        table["strategy"] = Strategy(**table["strategy"])
        table["numbers"] = tuple(Number(**row) for row in table["numbers"])
        table["alternatives"] = tuple(Alternative(**row) for row in table["alternatives"])
        table |= {name: tuple(table[name]) for name in ("notes", "changes")}
        table["curve"] = tuple((size, peak, seconds) for size, peak, seconds in table["curve"])
        return cls(**table)
