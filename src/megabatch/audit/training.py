"""One training as the rules see it: facts, each of them known or None."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..objectives import AuditName, is_contrastive
from ..optimizers import FAMILIES, FamilyName, FamilySpec

Moment = Literal["step", "micro-batch"]


@dataclass(frozen=True)
class Training:
    """Facts of a training; None is unknown, and a rule that needs an unknown fact says nothing.

    objective: "clip" and "siglip" compare samples with each other; "supervised" and "lm" are means over samples or tokens.
    batch: samples of one optimizer step over all ranks; where it is not said it follows from micro × accumulation × ranks.
    micro: samples of one forward on one rank; chunk: rows through an encoder at once, where that is less.
    accumulates: what accumulation adds up in a contrastive run: "plain" the losses of micro-batches, "features" (OpenCLIP) losses
        of the whole batch.
    gather: negatives of a contrastive run over several ranks. "exact": of all ranks, with the loss's gradient; "matrix": the
        same, the whole matrix on each rank; "whole": as that, with gradients of a rank's own rows alone; "no-gradient": a rank's
        rows against features without gradient; "none": a rank's own.
    base_lr, base_batch: a learning rate that is known to be good, and its batch.
    warmup: steps, or below 1 a fraction of the run. steps, epochs, samples: how long; data: samples of an epoch; unique: different
        ones among them.
    half_weights: the weights themselves are in half precision, without a copy in fp32.
    ema_at, clip_at, schedule_at: whether average, clipping and schedule act once an optimizer step or once a micro-batch.
    ragged: samples differ in their number of tokens; token_mean: whether the loss divides by the tokens of the batch ("total"),
        of a rank, or of a micro-batch.
    duplicates: what pairs with equal captions are to each other. max_scale: where the logit scale is clamped; inf: nowhere.
    rate_follows: the learning rate follows a batch that grows during the run.
    batch_from_memory: the batch is the largest that fits.
    """

    objective: AuditName | None = None
    batch: int | None = None
    micro: int | None = None
    chunk: int | None = None
    ranks: int | None = None
    accumulation: int | None = None
    accumulates: Literal["plain", "features"] | None = None
    gather: Literal["exact", "matrix", "whole", "no-gradient", "none"] | None = None
    optimizer: FamilyName | None = None
    lr: float | None = None
    base_lr: float | None = None
    base_batch: int | None = None
    warmup: float | None = None
    beta2: float | None = None
    weight_decay: float | None = None
    decays_gains: bool | None = None
    clip_norm: float | None = None
    clip_at: Moment | None = None
    schedule_at: Moment | None = None
    ema: float | None = None
    ema_at: Moment | None = None
    steps: int | None = None
    epochs: float | None = None
    samples: int | None = None
    data: int | None = None
    unique: int | None = None
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    loss_scaling: bool | None = None
    half_weights: bool | None = None
    batchnorm: bool | None = None
    sync_batchnorm: bool | None = None
    ragged: bool | None = None
    token_mean: Literal["total", "rank", "micro-batch"] | None = None
    finetuning: bool | None = None
    duplicates: Literal["mask", "positive", "negative"] | None = None
    max_scale: float | None = None
    rate_follows: bool | None = None
    batch_from_memory: bool | None = None
    held_out: bool | None = None

    def __post_init__(self) -> None:
        for name, hint in _hints().items():
            _check(name, hint, getattr(self, name))

    @property
    def contrastive(self) -> bool:
        """Known to compare samples with each other."""
        return is_contrastive(self.objective)

    @property
    def family(self) -> FamilySpec | None:
        """The family of the optimizer, where it is known."""
        return None if self.optimizer is None else FAMILIES[self.optimizer]

    @property
    def follows_gradient_scale(self) -> bool:
        """Known that a gradient which is too large by a constant factor makes the update too large."""
        return self.family is not None and self.family.follows_gradient_scale

    @property
    def product(self) -> int | None:
        """micro × accumulation × ranks."""
        if self.micro is None or self.accumulation is None or self.ranks is None:
            return None
        return self.micro * self.accumulation * self.ranks

    @property
    def size(self) -> int | None:
        """The effective batch: what one optimizer step learns from."""
        return self.batch if self.batch is not None else self.product

    @property
    def shard(self) -> int | None:
        """Rows of the batch that one rank holds."""
        return None if self.size is None or self.ranks is None else -(-self.size // self.ranks)

    @property
    def rows(self) -> int | None:
        """Rows that one forward of an encoder sees."""
        whole = self.micro if self.micro is not None else self.shard
        return min((n for n in (self.chunk, whole) if n is not None), default=None)

    @property
    def seen(self) -> int | None:
        """Samples of the whole run."""
        if self.samples is not None:
            return self.samples
        if self.epochs is not None and self.data is not None:
            return round(self.epochs * self.data)
        return None if self.steps is None or self.size is None else self.steps * self.size

    @property
    def updates(self) -> int | None:
        """Optimizer steps of the whole run."""
        if self.steps is not None:
            return self.steps
        return None if self.seen is None or self.size is None else -(-self.seen // self.size)

    @property
    def warmup_steps(self) -> int | None:
        if self.warmup is None or self.warmup == 0 or self.warmup >= 1:
            return None if self.warmup is None else round(self.warmup)
        return None if self.updates is None else round(self.warmup * self.updates)

    def changed(self, changes: Mapping[str, Any]) -> Training:
        """The training with other facts. A new batch is reached by another micro-batch, where there is one."""
        changes = dict(changes)
        if "batch" in changes and "micro" not in changes and self.micro and self.accumulation and self.ranks:
            changes["micro"] = changes["batch"] // (self.accumulation * self.ranks)
        return dataclasses.replace(self, **changes)


def with_known(training: Training, known: Mapping[str, Any]) -> Training:
    """The training with facts that its file does not tell; a name that is no fact raises."""
    names = [entry.name for entry in dataclasses.fields(Training)]
    for name in known:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            guess = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
            raise ValueError(f"{name!r} is no fact of a training: {guess}")
    return dataclasses.replace(training, **{name: value for name, value in known.items() if value is not None})


# Of these, zero is a value; of all other numbers it is nonsense.
FROM_ZERO = ("warmup", "beta2", "weight_decay", "clip_norm")
# Numbers beyond these are mistakes, and rules that multiply and divide them would overflow.
SMALLEST, LARGEST = 1e-30, 1e15


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(Training)


def _check(name: str, hint: Any, value: Any) -> None:
    if value is None:
        return
    (kind,) = [choice for choice in typing.get_args(hint) if choice is not types.NoneType]
    choices = typing.get_args(kind)
    if choices:
        if value not in choices:
            raise ValueError(f"{name} is {value!r}: must be one of {', '.join(repr(c) for c in choices)}")
        return
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}: must be true or false")
        return
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int) or value != value:
        raise ValueError(f"{name} is {value!r}: must be {'an integer' if kind is int else 'a number'}")
    if value < 0 or (value == 0 and name not in FROM_ZERO):
        raise ValueError(f"{name} is {value!r}: must be above 0")
    # A scale without limit is a fact of its own.
    if (value > LARGEST and not (name == "max_scale" and value == math.inf)) or 0 < value < SMALLEST:
        raise ValueError(f"{name} is {value!r:.40}: must be between {SMALLEST:g} and {LARGEST:g}")
    if name in ("beta2", "ema") and value >= 1:
        raise ValueError(f"{name} is {value!r}: must be below 1")
