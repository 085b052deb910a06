"""What a plan is asked for: the model, the data, the machine and the priorities. Everything is checked before any computation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .. import config, objectives, optimizers
from ..costs.rates import Rates
from ..measurements import Measured
from ..towers import find_library, full_name, size_options

Objective = Literal["contrastive", "supervised", "lm", "finetune"]
Start = Literal["scratch", "pretrained", "locked"]

# Larger than any dataset; arithmetic on larger numbers would overflow.
MOST = 1e15
COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
OBJECTIVES = ("contrastive", "supervised", "lm", "finetune")
# Training pairs of the embedded default, images of characters, after a tenth is held out.
GLYPHS = 42_276
# The text tower for an image tower from a library that has none.
TEXTS = config.Tower("text", {"width": 512, "depth": 8, "heads": 8, "length": 256})
# The name of a tower that is shared with side x, and what a plan writes where only the user knows the data.
SHARED = "x"
SOURCE = f"{config.FILL_IN}: the training data, as data/{{0000..0099}}.tar, pairs.parquet or pairs.csv"
NEGATIVES = f"{config.FILL_IN}: the column of the hard negatives, or several, as negative_1;negative_2"
LABEL = f"{config.FILL_IN}: the column or key of the class"


@dataclass(frozen=True)
class Request:
    """The arguments of `plan`.

    objective: "contrastive", "supervised", "lm" or "finetune". loss: "clip" or "siglip", for pairs.
    model: names of towers, such as "open_clip:ViT-L-14", "timm:NAME + text" or "vit + text"; "package.module:function" for a
        language model; a whole Run, whose towers and data are used; None for the embedded default.
    data: number of samples (of tokens for a language model), as 10_000_000 or "10M". unique: different samples among them.
    seen, epochs: samples that training sees; give one of the two. start: "scratch", "pretrained" or "locked" (the image tower);
        a tower that `train` itself builds with pretrained weights, as transformers:NAME, is "pretrained" instead of "scratch".
    gpu, gpus, memory, rates: as in `hardware.find_machine`. share: fraction of the memory that may be used.
    price: of one GPU per hour. batch: if it is already decided. critical: the measured critical batch.
    base_lr: (rate, batch) to scale from. ema: (decay, batch) to scale from.
    measured: files of fit, profile, noise and sweep, or what these returned. Measurements replace predictions; `batch`, `critical`
        and `base_lr` take precedence over them.
    length: tokens of a sequence; by default fewer if the model reads fewer. classes: of a classifier. source, out: as in the
        configuration of a run.
    negatives: mined hard negatives per query. per_gpu: the batch on each GPU, instead of `batch`.
    hours, budget: what training may take, in hours or in money at `price`; the samples seen follow unless `seen` or `epochs` says.
    text_length, image_size: tokens of a text and pixels of an image's side, where the model allows others than its own.
    lora: rank of LoRA adapters, which alone are trained; `train` has none, so that the plan has no run.
    checkpointing: whether blocks are recomputed in backward; None: if faster.
    nodes, interconnect: machines that the GPUs are spread over evenly, and the network between them.
    """

    model: str | config.Run | None = None
    objective: Objective = "contrastive"
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
    negatives: int = 0
    hours: float | None = None
    budget: float | None = None
    per_gpu: int | None = None
    text_length: int | None = None
    image_size: int | None = None
    lora: int | None = None
    checkpointing: bool | None = None
    nodes: int | None = None
    interconnect: str | None = None

    def __post_init__(self) -> None:
        choices = [
            ("objective", self.objective, OBJECTIVES),
            ("loss", self.loss, objectives.PAIR_LOSSES),
            ("start", self.start, ("scratch", "pretrained", "locked")),
            ("priority", self.priority, ("accuracy", "speed")),
            ("optimizer", self.optimizer, tuple(optimizers.OPTIMIZERS)),
        ]
        for name, value, allowed in choices:
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}: must be one of {', '.join(allowed)}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}: the fraction of the memory that may be used must be above 0 and at most 1")
        if self.seen is not None and self.epochs is not None:
            raise ValueError(f"seen is {self.seen} and epochs is {self.epochs}: give one of the two")
        for name in ("epochs", "price", "critical", "gpus", "hours", "budget", "per_gpu", "nodes", "lora"):
            number = getattr(self, name)
            if number is not None and not 0 < number <= MOST:
                raise ValueError(f"{name} is {str(number)[:40]}: must be above 0 and at most {MOST:g}")
        for name, least, most in (("text_length", 1, 2**20), ("image_size", 8, 2**14), ("negatives", 0, 2**16)):
            number = getattr(self, name)
            if number is not None and not least <= number <= most:
                raise ValueError(f"{name} is {str(number)[:40]}: must be from {least:,} to {most:,}")
        if self.budget is not None and self.price is None:
            raise ValueError(f"budget is {self.budget:g} without a price: give the price of one GPU per hour, as in price=2")
        if self.per_gpu is not None and self.batch is not None:
            raise ValueError(f"batch is {self.batch} and per_gpu is {self.per_gpu}: give one of the two; batch = GPUs × per_gpu")
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
        return self.objective == "contrastive" or (self.objective == "finetune" and self._has_two_towers)

    @property
    def trainable(self) -> bool:
        """Whether `megabatch train` can run the plan: it trains no language models, and all weights instead of adapters."""
        return self.objective != "lm" and self.lora is None

    @property
    def _has_two_towers(self) -> bool:
        """Whether the model embeds both sides of a pair: two towers, or one text encoder for queries and documents."""
        if not isinstance(self.model, str) or "+" in self.model:
            return True
        library = find_library(full_name(self.model))
        return library.both_sides or (library.takes_model and library.partner == SHARED)


def parse_count(value: int | str | None, name: str) -> int | None:
    """Parse a number of samples: 10_000_000, "10M", "1.5B".

    >>> parse_count("10M", "data"), parse_count("32k", "batch")
    (10000000, 32000)
    """
    if value is None:
        return None
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([kKMBGT]?)\s*", str(value).replace(",", "").replace("_", ""))
    if match is None:
        raise ValueError(f"{name} is {value!r}: must be a number of samples, as 10000000 or 10M")
    number = float(match[1]) * COUNTS[match[2].upper()]
    if not number <= MOST:
        raise ValueError(f"{name} is {str(value)[:40]!r}: must be at most {MOST:g}")
    # Not round(number) < 1: a text of 400 digits after a minus is -inf, which cannot be rounded.
    if number <= 0.5:
        raise ValueError(f"{name} is {str(value)[:40]!r}: must be at least 1")
    return round(number)


def parse_base(value: tuple[float, int] | str | None) -> tuple[float, int] | None:
    """Parse a learning rate and the batch at which it is right, "1e-3@256".

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
        raise ValueError(f"base_lr is {value!r}: must be rate@batch, as in 1e-3@256") from None


def asked_by_run(run: config.Run, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run's own file asks for, where the arguments of `plan` do not: optimizer, loss, precision and length."""
    own: dict[str, Any] = {}
    asked = {name: value for name, value in asked.items() if value is not None}
    if run.optimizer.name in optimizers.OPTIMIZERS:
        own["optimizer"] = run.optimizer.name
    if run.loss.objective in objectives.PAIR_LOSSES:
        own["loss"] = run.loss.objective
    else:
        own["objective"] = "supervised"
    if run.compute.precision != config.DEFAULTS.compute.precision:
        own["precision"] = run.compute.precision
    if not {"seen", "epochs", "hours", "budget"} & asked.keys():
        if run.schedule.epochs is not None:
            own["epochs"] = run.schedule.epochs
        elif run.schedule.samples is not None:
            own["seen"] = run.schedule.samples
        elif run.schedule.steps is not None:
            own["seen"] = run.schedule.steps * run.batch.size
    return {**own, **asked}


def base_run(request: Request) -> config.Run:
    """Return a run with the requested towers and data. The plan decides everything else in it."""
    if isinstance(request.model, config.Run):
        return request.model
    if request.model is None:
        return config.build(config.EMBEDDED)
    first, _, second = (full_name(part) for part in request.model.partition("+"))
    library = find_library(first)
    dim = request.dim or library.own_dim(first.partition(":")[2]) or library.plan_dim
    partner = SHARED if request.pairs and objectives.OBJECTIVES[request.loss].views else library.partner
    second = second or (first if library.both_sides else partner) or ""
    trained = request.start != "scratch"
    sizes = (request.text_length, request.image_size)
    x = config.Tower(first, size_options(first, "x", *sizes), _weights(first, trained), locked=request.start == "locked")
    # A locked image tower learns together with a fresh text tower (LiT).
    y = TEXTS
    if second:
        y = config.Tower(second, size_options(second, "y", *sizes), _weights(second, request.start == "pretrained"))
    objective = request.loss if request.pairs else objectives.MEAN
    run = config.build({"schedule": {"steps": 1}})
    data = replace(run.data, source=request.source or SOURCE, held_out=0.01)
    if request.negatives and request.pairs:
        data = replace(data, negatives=NEGATIVES)
    if objective == objectives.MEAN:
        y = config.DEFAULTS.y
        data = replace(data, label=LABEL)
    return replace(run, out=request.out or "runs/plan", data=data, x=x, y=y, loss=replace(run.loss, objective=objective, dim=dim))


def _weights(name: str, trained: bool) -> str | None:
    """Return what a plan writes as the weights of a tower that starts from pretrained ones: a value to fill in, or nothing."""
    if not trained or name == SHARED or find_library(name).holds_weights(name.partition(":")[2]):
        return None
    return f"{config.FILL_IN}: file with the pretrained weights of {name}, as .safetensors or .pt"


class Budget(NamedTuple):
    """Number of samples, different ones among them, and samples that training sees; for a language model, sequences."""

    data: int
    unique: int
    seen: int


def sample_budget(
    request: Request, base: config.Run, count: Callable[[config.Run], int], usual_epochs: Callable[[int], float]
) -> Budget:
    """Return the samples of a request, those of the data that its run names, or those of the embedded default.

    count: returns the training samples of a run's source; it may raise ValueError. usual_epochs: of so many samples, if the request
    says neither epochs nor samples seen.
    """
    data = parse_count(request.data, "data")
    if data is None:
        data = GLYPHS if base.data.source == config.DEFAULTS.data.source else _counted(base, count)
    seen = parse_count(request.seen, "seen")
    if seen is None:
        epochs = request.epochs
        if epochs is None and request.model is None and base.schedule.samples is not None:
            seen = base.schedule.samples
        else:
            seen = round(data * (epochs or usual_epochs(data)))
            if not 1 <= seen <= config.INT64:
                raise ValueError(
                    f"epochs is {epochs}: with {data:,} samples, training would see fewer than 1 or more than 2^63 samples"
                )
    unique = parse_count(request.unique, "unique") or data
    if request.objective == "lm":
        data, unique, seen = (max(1, count // request.length) for count in (data, unique, seen))
    return Budget(data, min(unique, data), seen)


def _counted(base: config.Run, count: Callable[[config.Run], int]) -> int:
    if base.data.source.startswith(config.FILL_IN):
        raise ValueError("data is not given: give the number of samples, as in data=10M, or the data itself (source=…)")
    try:
        return count(base)
    except ValueError as error:
        raise ValueError(f"data is not given, and {error}; give the number of samples, as in data=10M") from error


def check_budget(seen: int, data: int) -> None:
    """Raise ValueError if there is nothing to train on."""
    if data < 2:
        raise ValueError(f"data is {data}: must be at least 2 samples")
    if seen < 1:
        raise ValueError(f"seen is {seen}: training must see at least 1 sample; give seen=… or epochs=…")


def check_ranks(ranks: int, data: int) -> None:
    """Raise ValueError if the data cannot give each GPU a sample of a batch."""
    if ranks > data:
        raise ValueError(
            f"gpus is {ranks:,} and data is {data:,}: each GPU holds at least one sample of a batch, and a batch cannot hold more"
            f" samples than there are; take at most {data:,} GPUs"
        )


def check_batch(batch: int, data: int) -> None:
    """Raise ValueError if the data cannot fill one batch."""
    if batch < 1:
        raise ValueError(f"batch is {batch}: must be at least 1")
    if batch > data:
        raise ValueError(
            f"batch is {batch:,} and data is {data:,}: a batch cannot hold more samples than there are; lower the batch"
        )
