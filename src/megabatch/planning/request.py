"""What a plan is asked: the model, the data, the machine, and what matters. All of it is checked before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from .. import config, objectives, optimizers
from ..costs.rates import Rates
from ..measurements import Measured
from ..towers import find_library, full_name
from .batch import Start

# More samples than anybody has; arithmetic on larger numbers would overflow.
MOST = 1e15
COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
OBJECTIVES = ("contrastive", "supervised", "lm", "finetune")
# Training pairs of the embedded default, pictures of characters: what it has when a tenth is held out.
GLYPHS = 42_276
# A tower for texts beside a picture tower of a library that has none.
TEXTS = config.Tower("text", {"width": 512, "depth": 8, "heads": 8, "length": 256})


@dataclass(frozen=True)
class Request:
    """objective: "contrastive", "supervised", "lm", "finetune"; loss: "clip" or "siglip", of pairs.

    model: names of towers, "open_clip:ViT-L-14", "timm:NAME + text", "vit + text"; "package.module:function" for a language model;
        a whole Run, whose towers and data are taken; None is the embedded default.
    data: samples there are (tokens, for a language model), as 10_000_000 or "10M"; unique: different ones among them.
    seen, epochs: samples that training sees, one of the two. start: "scratch", "pretrained" or "locked" (the picture tower).
    gpu, gpus, memory, rates: as in `hardware.find_machine`; share: of the memory that may be used. price: of a GPU for an hour.
    batch: where it is decided already. critical: the critical batch, measured. base_lr: (rate, batch) to scale from. ema: likewise.
    measured: files of fit, profile, noise and sweep, or what those returned: what they found stands in the place of predictions;
        batch, critical and base_lr go before them.
    length, classes: tokens of a sequence; classes of a classifier. source, out: as in a run's file.
    """

    model: str | config.Run | None = None
    objective: Literal["contrastive", "supervised", "lm", "finetune"] = "contrastive"
    loss: objectives.PairLoss = objectives.DEFAULT
    data: int | str | None = None
    unique: int | str | None = None
    seen: int | str | None = None
    epochs: float | None = None
    start: Start = "scratch"
    gpu: str | None = None
    gpus: int | None = None
    memory: str | int | None = None
    share: float = 0.8
    price: float | None = None
    batch: int | str | None = None
    critical: int | None = None
    priority: Literal["accuracy", "speed"] = "accuracy"
    base_lr: tuple[float, int] | str | None = None
    ema: tuple[float, int] | None = None
    optimizer: optimizers.OptimizerName = optimizers.DEFAULT
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    dim: int | None = None
    length: int = 1024
    classes: int = 1000
    source: str | None = None
    out: str | None = None
    measured: Sequence[str | Path | Measured] = ()
    rates: str | Path | Rates | None = None

    def __post_init__(self) -> None:
        choices = [
            ("objective", self.objective, OBJECTIVES),
            ("loss", self.loss, objectives.PAIR_LOSSES),
            ("start", self.start, ("scratch", "pretrained", "locked")),
            ("priority", self.priority, ("accuracy", "speed")),
            ("optimizer", self.optimizer, tuple(optimizers.OPTIMIZERS)),
        ]
        for name, value, known in choices:
            if value not in known:
                raise ValueError(f"{name} is {value!r}: must be one of {', '.join(known)}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}: the part of the memory that may be used lies above 0, up to 1")
        if self.seen is not None and self.epochs is not None:
            raise ValueError(f"seen is {self.seen} and epochs is {self.epochs}: give one of the two")
        numbers = [("epochs", self.epochs), ("price", self.price), ("critical", self.critical), ("gpus", self.gpus)]
        for name, number in numbers:
            if number is not None and not 0 < number <= MOST:
                raise ValueError(f"{name} is {str(number)[:40]}: must be above 0, and at most {MOST:g}")
        if isinstance(self.measured, (str, Path)):
            raise ValueError(
                f"measured is {str(self.measured)!r}: must be a list of files, as in measured=[{str(self.measured)!r}]"
            )

    @property
    def pairs(self) -> bool:
        """Whether samples are compared with each other, so that negatives come from the batch."""
        run = self.model if isinstance(self.model, config.Run) else None
        if run is not None and not objectives.OBJECTIVES[run.loss.objective].contrastive:
            return False
        return self.objective == "contrastive" or (self.objective == "finetune" and self._two_sided)

    @property
    def _two_sided(self) -> bool:
        return not isinstance(self.model, str) or "+" in self.model or find_library(full_name(self.model)).both_sides


def parse_count(value: int | str | None, name: str) -> int | None:
    """A number of samples: 10_000_000, "10M", "1.5B".

    >>> parse_count("10M", "data"), parse_count("32k", "batch")
    (10000000, 32000)
    """
    if value is None:
        return None
    found = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([kKMBGT]?)\s*", str(value).replace(",", "").replace("_", ""))
    if found is None:
        raise ValueError(f"{name} is {value!r}: must be a number of samples, as 10000000 or 10M")
    number = float(found[1]) * COUNTS[found[2].upper()]
    if not number <= MOST:
        raise ValueError(f"{name} is {str(value)[:40]!r}: must be at most {MOST:g}")
    # Not round(number) < 1: a text of 400 digits after a minus is -inf, which cannot be rounded.
    if number <= 0.5:
        raise ValueError(f"{name} is {str(value)[:40]!r}: must be at least 1")
    return round(number)


def parse_base(value: tuple[float, int] | str | None) -> tuple[float, int] | None:
    """A learning rate and the batch it is right at, "1e-3@256".

    >>> parse_base("1e-3@256")
    (0.001, 256)
    """
    if value is None or isinstance(value, tuple):
        return value
    rate, at, batch = value.partition("@")
    try:
        if not at or not 1e-30 <= float(rate) <= 1e15:
            raise ValueError
        return float(rate), parse_count(batch, "base_lr") or 0
    except ValueError:
        raise ValueError(f"base_lr is {value!r}: must read rate@batch, as in 1e-3@256") from None


def towers_of(question: Request) -> config.Run:
    """The run whose towers are asked about; everything else in it is still to be decided."""
    if isinstance(question.model, config.Run):
        return question.model
    if question.model is None:
        return config.build(config.EMBEDDED)
    first, _, second = (full_name(part) for part in question.model.partition("+"))
    library = find_library(first)
    dim = question.dim or library.plan_dim
    x = config.Tower(first, locked=question.start == "locked")
    second = second or (first if library.both_sides else library.partner) or ""
    y = config.Tower(second) if second else TEXTS
    objective = question.loss if question.pairs else objectives.MEAN
    run = config.build({"schedule": {"steps": 1}})
    data = replace(run.data, source=question.source or "data/train-*.tar", held_out=0.01)
    return replace(run, out=question.out or "runs/plan", data=data, x=x, y=y, loss=replace(run.loss, objective=objective, dim=dim))


class Budget(NamedTuple):
    """Samples there are, different ones among them, and samples that training sees; sequences, for a language model."""

    data: int
    unique: int
    seen: int


def budget(question: Request, base: config.Run) -> Budget:
    """The samples of a question: given, or the embedded default's."""
    data = parse_count(question.data, "data")
    if data is None:
        if base.data.source != "glyphs":
            raise ValueError("data is not given: say how many samples there are, as in data=10M")
        data = GLYPHS
    seen = parse_count(question.seen, "seen")
    if seen is None:
        epochs = question.epochs
        if epochs is None and question.model is None and base.schedule.samples is not None:
            seen = base.schedule.samples
        else:
            # Where nothing is said: 30 epochs, as CLIPs on tens of millions of pairs are trained; 3 to fine-tune; 1 for text.
            usual = {"finetune": 3.0, "lm": 1.0, "supervised": 90.0}.get(question.objective, 30.0)
            seen = round(data * (epochs or usual))
            if not 1 <= seen <= config.INT64:
                raise ValueError(f"epochs is {epochs}: of {data:,} samples, that is less than one, or more than 64 bits count")
    unique = parse_count(question.unique, "unique") or data
    if question.objective == "lm":
        data, unique, seen = (max(1, count // question.length) for count in (data, unique, seen))
    return Budget(data, min(unique, data), seen)
