"""The result of planning: the batch with its reasons, the strategy that reaches it, its cost, and the run that implements it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import config
from ..costs.strategy import Strategy
from ..evidence import Confidence
from ..vocabulary import identity, negatives_per_query

# The key of a run's file that holds a number of the plan.
KEYS = {
    "batch": "batch.size",
    "chunk": "batch.chunk",
    "keep": "batch.keep",
    "learning rate": "optimizer.lr",
    "β2": "optimizer.betas",
    "weight decay": "optimizer.weight_decay",
    "EMA": "optimizer.ema",
    "warm-up": "schedule.warmup",
    "samples seen": "schedule.samples",
    "label smoothing": "loss.label_smoothing",
    "width": "loss.dim",
    "precision": "compute.precision",
    "sharding": "compute.sharding",
    "checkpointing": "x.checkpointing",
    "workers": "data.workers",
    "peak memory": "planned.peak_bytes",
    "seconds per step": "planned.seconds_per_step",
}

# Source of the samples seen, if they follow from hours or money.
BUDGET_GIVEN = "the budget given"


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


class PublishedRun(NamedTuple):
    """A published training beside the plan. batch: samples of one step. warmup: steps. None: its source does not say.

    optimizer: its family, if that is not the plan's. length: tokens of a language model's sequences.
    """

    name: str
    batch: int | None
    seen: int | None
    lr: float | None
    warmup: int | None
    source: str
    optimizer: str | None = None
    length: int = 1024


class CurvePoint(NamedTuple):
    """Peak memory and time of a step at one batch size."""

    batch: int
    peak_bytes: int
    seconds_per_step: float


@dataclass(frozen=True)
class Plan:
    """A plan. `run` is the configuration for `megabatch train`, or None if it cannot train so (language models, LoRA adapters).

    warnings: why the plan, or the question, is a bad idea. pairs: whether samples are compared with each other.
    negatives: mined hard negatives per query. data, seen: samples, and how many training sees. price: of one GPU per hour.
    others: the nearest published trainings. edits: what the plan changed in the run that it was given.
    text_length: tokens of a text, where texts alone are trained on. open_clip: whether OpenCLIP trains such models.
    views: whether a sample is compared in two views of itself. lm: whether samples are sequences of a language model.
    lora: rank of LoRA adapters, which alone are trained.
    usual: the interval of batches in which published and measured trainings of this kind lie; None if the batch was given.
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
    pairs: bool = True
    negatives: int = 0
    data: int = 0
    seen: int = 0
    price: float | None = None
    warnings: tuple[str, ...] = ()
    others: tuple[PublishedRun, ...] = ()
    edits: tuple[str, ...] = ()
    usual: tuple[int, int] | None = None
    device_type: str = "cuda"
    text_length: int | None = None
    open_clip: bool = True
    views: bool = False
    lm: bool = False
    lora: int | None = None

    @property
    def batch(self) -> int:
        return self.strategy.batch

    @property
    def hours(self) -> float:
        """Hours of the whole run."""
        return self.alternatives[0].hours

    def negatives_of(self, batch: int) -> int:
        """Return the items that each query of a batch is compared with beside its own, over all GPUs."""
        return negatives_per_query(batch, self.negatives, self.views) if self.pairs else 0

    @property
    def negatives_per_query(self) -> int:
        """Those of this plan's batch."""
        return self.negatives_of(self.batch)

    @property
    def identity(self) -> str:
        """The batch in the words of other trainers."""
        strategy = self.strategy
        kind: dict[str, bool] = {"pairs": self.pairs, "views": self.views, "open_clip": self.open_clip}
        return identity(self.batch, strategy.ranks, strategy.chunk, **kind, negatives=self.negatives)

    @property
    def comments(self) -> dict[str, str]:
        """The reason of each planned value, by its key in a run's file."""
        reasons = {
            KEYS[number.name]: f"{number.why}. Confidence: {number.confidence}." for number in self.numbers if number.name in KEYS
        }
        if self.run is not None and self.run.schedule.epochs is not None:
            reasons["schedule.epochs"] = reasons.pop("schedule.samples", "")
        top = f"Planned by megabatch for {self.machine}: {self.identity}"
        missing = [] if self.run is None else list(config.unfilled(self.run))
        if missing:
            top += f" To fill in before training: {', '.join(missing)}."
        return {"": top, **reasons}

    def number(self, name: str) -> Number:
        """Return the number of that name."""
        return next(number for number in self.numbers if number.name == name)

    def as_table(self) -> dict[str, Any]:
        """Return the plan as nested dicts and lists of plain values."""
        table = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        table["run"] = None if self.run is None else config.as_table(self.run)
        table["strategy"] = dataclasses.asdict(self.strategy)
        for name in ("numbers", "alternatives", "others"):
            table[name] = [row._asdict() for row in table[name]]
        return {**table, "identity": self.identity, "negatives_per_query": self.negatives_per_query}

    def as_json(self) -> str:
        return json.dumps(self.as_table(), indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `as_json` wrote, equal to the original."""
        table = json.loads(text)
        for name in ("identity", "negatives_per_query"):
            del table[name]
        table["run"] = None if table["run"] is None else config.build(table["run"])
        table["strategy"] = Strategy(**table["strategy"])
        table["numbers"] = tuple(Number(**row) for row in table["numbers"])
        table["alternatives"] = tuple(Alternative(**row) for row in table["alternatives"])
        table["others"] = tuple(PublishedRun(**row) for row in table["others"])
        table |= {name: tuple(table[name]) for name in ("notes", "changes", "warnings", "edits")}
        table["usual"] = None if table["usual"] is None else (table["usual"][0], table["usual"][1])
        table["curve"] = tuple(CurvePoint(*point) for point in table["curve"])
        return cls(**table)
