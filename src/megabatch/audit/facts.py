"""The facts of one training that the rules look at, and the facts that follow from them. An unknown fact is None."""

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

from ..evidence import FEWEST_UPDATES, USUAL_WARMUP, round_rate
from ..objectives import DEFAULT, SIGMOID, AuditName, is_contrastive
from ..optimizers import FAMILIES, FamilyName, FamilySpec, rate_factor
from ..recipes import Kind, Start, TrainingTask, advise_rate, advise_warmup, plausible_rates
from .tools import TOOLS, ToolName

Moment = Literal["step", "micro-batch"]

# Zero is allowed for these numbers, and for no others.
FROM_ZERO = ("warmup", "warmup_share", "beta2", "weight_decay", "clip_norm", "zero_stage")
# Numbers outside these bounds are mistakes, and arithmetic on them would overflow.
SMALLEST, LARGEST = 1e-30, 1e15
# A fix proposes no contrastive batch below this, because a longer run is better then. Our choice, not from a paper.
SMALLEST_BATCH = 64
# A rank of LoRA, which the rules for rates need and files of some tools do not state.
USUAL_RANK = 16


@dataclass(frozen=True)
class TrainingFacts:
    """Facts of a training. None means unknown; a rule that needs an unknown fact reports nothing.

    objective: "clip" and "siglip" compare samples with each other; "supervised" and "lm" are means over samples or tokens.
    batch: samples of one optimizer step over all ranks. If it is unknown, it follows from micro × accumulation × ranks.
    micro: samples of one forward pass on one rank. chunk: rows that pass an encoder at once, if fewer.
    accumulates: what accumulation sums up in a contrastive run: "plain" sums the losses of micro-batches, "features" (OpenCLIP) the
        losses of the whole batch.
    gather: negatives of a contrastive run on several ranks. "exact": of all ranks, with the gradient of the loss. "matrix": the
        same, with the whole matrix on each rank. "whole": like "matrix", with gradients of the rank's own rows only. "no-gradient":
        the rank's rows against features without gradient. "none": the rank's own rows only.
    base_lr, base_batch: a learning rate that is known to be good, and its batch.
    warmup: steps, or, below 1, a fraction of the run. steps, epochs, samples: the length of the run. data: samples of an epoch.
    unique: different samples among them.
    half_weights: whether the weights are in half precision without a copy in fp32.
    ema_at, clip_at, schedule_at: whether average, clipping and schedule act once per optimizer step or once per micro-batch.
    ragged: whether samples differ in their number of tokens. token_mean: whether the loss divides by the tokens of the batch
        ("total"), of a rank, or of a micro-batch.
    duplicates: how pairs with equal captions are treated. max_scale: upper bound of the logit scale; inf if there is none.
    rate_follows: whether the learning rate follows a batch that grows during the run.
    batch_from_memory: whether the batch is the largest that fits.
    tool: whose file it is, which decides what a fix can ask for. parameters: of the model. length: tokens of a language model's
        sample. adapter: whether only an adapter (LoRA) is trained. quantized: whether the weights are in 8 or 4 bits.
    locked: whether a pretrained tower is trained against that does not learn.
    negatives: mined hard negatives of each query.
    warmup_share: the share of the run that the file gives to warm-up, if it states a share and that is not below 1.
    schedule_lr: the rate up to which the schedule warms up, if the file states it apart from the optimizer's.
    two_precisions: whether fp16 and bf16 are both on. zero_stage, offloads_parameters: of DeepSpeed.
    checkpointing, use_cache: recomputed activations, and the cache of keys and values.
    eval_every: steps between two evaluations.
    split_batches: whether the stated batch of a device is shared by all ranks. data_parallel: whether one process drives several
        GPUs. visible: GPUs that a launched process sees.
    scale: the fixed factor of the similarities, 1 / temperature. temperature_ignored: whether a stated temperature has no effect.
    cached_gradient_sum: whether cached gradients belong to the sum of a loss that is reported as a mean.
    scale_outside_ddp: whether a learnable scale is not among the parameters that DDP synchronizes.
    reduce_function: whether a function that reduces the batch is given to a decorator.
    disagreement: a sentence about two settings of the file that contradict each other.
    random_tower: whether a tower without weights is locked. unfilled: the keys that a plan left to the user to fill in.
    """

    tool: ToolName | None = None
    parameters: int | None = None
    length: int | None = None
    adapter: bool | None = None
    locked: bool | None = None
    quantized: bool | None = None
    negatives: int | None = None
    warmup_share: float | None = None
    schedule_lr: float | None = None
    two_precisions: bool | None = None
    zero_stage: int | None = None
    offloads_parameters: bool | None = None
    checkpointing: bool | None = None
    use_cache: bool | None = None
    eval_every: int | None = None
    split_batches: bool | None = None
    data_parallel: bool | None = None
    visible: int | None = None
    scale: float | None = None
    temperature_ignored: bool | None = None
    cached_gradient_sum: bool | None = None
    scale_outside_ddp: bool | None = None
    reduce_function: bool | None = None
    disagreement: str | None = None
    random_tower: bool | None = None
    unfilled: str | None = None

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
        """Whether the objective is known and compares samples with each other."""
        return is_contrastive(self.objective)

    @property
    def family(self) -> FamilySpec | None:
        """The family of the optimizer, if it is known."""
        return None if self.optimizer is None else FAMILIES[self.optimizer]

    @property
    def follows_gradient_scale(self) -> bool:
        """Whether the optimizer is known, and a gradient that is too large by a constant factor makes its update too large."""
        return self.family is not None and self.family.follows_gradient_scale

    @property
    def product(self) -> int | None:
        """micro × accumulation × ranks; with split batches the ranks share a micro-batch."""
        if self.micro is None or self.accumulation is None or (self.ranks is None and not self.split_batches):
            return None
        return self.micro * self.accumulation * (1 if self.split_batches else self.ranks or 1)

    @property
    def size(self) -> int | None:
        """The effective batch: the samples of one optimizer step."""
        return self.batch if self.batch is not None else self.product

    @property
    def shard(self) -> int | None:
        """Rows of the batch that one rank holds."""
        return None if self.size is None or self.ranks is None else -(-self.size // self.ranks)

    @property
    def rows(self) -> int | None:
        """Rows that one forward pass of an encoder sees."""
        whole = self.micro if self.micro is not None else self.shard
        return min((n for n in (self.chunk, whole) if n is not None), default=None)

    @property
    def seen(self) -> int | None:
        """Samples that the whole run sees."""
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

    def tasks(self) -> list[TrainingTask]:
        """Return what may be trained, for the rules that plans use too: one task if kind and start are known, else several."""
        kinds: dict[str | None, list[Kind]] = {"supervised": ["classifier"], "lm": ["lm"], None: ["classifier", "embedder", "lm"]}
        embeds = self.tool is not None and TOOLS[self.tool].trains_embedders
        kind = kinds.get(self.objective) or ["embedder" if embeds else "image-text"]
        starts: list[Start] = ["pretrained"] if self.finetuning or self.adapter else ["scratch"]
        if self.locked:
            starts = ["locked"] if self.finetuning is None else ["locked", *starts]
        elif self.finetuning is None and not self.adapter:
            starts = ["scratch", "pretrained", "locked"]
        loss = SIGMOID if self.objective == SIGMOID else DEFAULT
        return [
            TrainingTask(
                each,
                start,
                data=self.data,
                seen=self.seen,
                params=self.parameters,
                loss=loss,
                optimizer=self.optimizer or "adam",
                negatives=self.negatives or 0,
                lora=USUAL_RANK if self.adapter and start != "scratch" else None,
                length=self.length or TrainingTask.length,
            )
            for each in kind
            for start in starts
        ]

    def rates(self, batch: int | None = None) -> tuple[float, float]:
        """Return the lowest and the highest rate that is plausible for what may be trained, at this or another batch."""
        intervals = [plausible_rates(task, batch or self.size) for task in self.tasks()]
        return min(low for low, _ in intervals), max(high for _, high in intervals)

    @property
    def wanted_warmup(self) -> int:
        """Steps of warm-up, by the rule that plans use; the usual number if the length of the run is unknown."""
        # A run of a number of steps has no samples if its batch is unknown; its warm-up follows from the steps.
        task, size = self.tasks()[-1 if self.objective is None else 0], self.size or 1
        seen = None if self.updates is None else max(1, self.updates * size)
        return round(advise_warmup(dataclasses.replace(task, seen=seen, data=None), size).value)

    @property
    def affordable_batch(self) -> int | None:
        """The largest power of two that leaves enough updates in the run; None if that is too small to learn from."""
        limit = 0 if self.seen is None else self.seen // FEWEST_UPDATES
        return power_of_two(limit) if limit >= SMALLEST_BATCH else None

    def changed(self, changes: Mapping[str, Any]) -> TrainingFacts:
        """Return the facts with changes. If there is a micro-batch, a new batch changes it."""
        changes = dict(changes)
        if "batch" in changes and "micro" not in changes and self.micro and self.accumulation and self.ranks:
            changes["micro"] = changes["batch"] // (self.accumulation * self.ranks)
        return dataclasses.replace(self, **changes)

    def at_batch(self, batch: int) -> dict[str, Any]:
        """Return the facts that change at another batch: the batch itself, the learning rate, the chunk and the warm-up."""
        parts = (self.ranks or 1) * (self.accumulation or 1)
        batch = max(1, batch // parts) * parts
        changes: dict[str, Any] = {"batch": batch}
        rate = self._rate_at(batch)
        if rate is not None and rate != self.lr:
            changes["lr"] = rate
        if self.chunk is not None and self.ranks is not None and self.chunk > -(-batch // self.ranks):
            changes["chunk"] = -(-batch // self.ranks)
        after = self.changed(changes)
        steps = after.warmup_steps
        wanted = after.wanted_warmup
        # The warm-up stays if it is neither half of the run nor a small part of what is usual.
        shortest, longest = min(wanted, USUAL_WARMUP) / 10, math.inf if after.updates is None else after.updates / 2
        if self.warmup and steps is not None and after.updates is not None and not shortest <= steps <= longest:
            changes["warmup"] = wanted
        return changes

    def _rate_at(self, batch: int) -> float | None:
        """Return the rate at another batch: scaled from a rate that is known to be good; else the present one if it is plausible
        there, and the rate that a plan would choose if not."""
        if self.lr is None or self.optimizer is None:
            return None
        if self.base_lr is not None and self.base_batch is not None:
            return round_rate(scaled_rate(self.base_lr, self.base_batch, batch, self.optimizer))
        low, high = self.rates(batch)
        return self.lr if low <= self.lr <= high else advise_rate(self.tasks()[0], batch).value


def scaled_rate(lr: float, batch: int, other: int, optimizer: FamilyName) -> float:
    """Return the learning rate at another batch, by the rule of the optimizer's family."""
    return lr * rate_factor(FAMILIES[optimizer].lr_rule, other / batch)


def power_of_two(limit: int) -> int:
    """Return the largest power of two up to a limit."""
    return 1 << (max(1, limit).bit_length() - 1)


def with_facts(training: TrainingFacts, facts: Mapping[str, Any]) -> TrainingFacts:
    """Return the training with facts that its file does not state. Raises ValueError for a name that is no fact."""
    names = [entry.name for entry in dataclasses.fields(TrainingFacts)]
    for name in facts:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            guess = f"did you mean {near[0]!r}?" if near else f"the facts are {', '.join(names)}"
            raise ValueError(f"{name!r} is not a fact of a training: {guess}")
    return dataclasses.replace(training, **{name: value for name, value in facts.items() if value is not None})


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(TrainingFacts)


def _check(name: str, hint: Any, value: Any) -> None:
    if value is None:
        return
    (kind,) = [choice for choice in typing.get_args(hint) if choice is not types.NoneType]
    choices = typing.get_args(kind)
    if choices:
        if value not in choices:
            raise ValueError(f"{name} is {value!r}: must be one of {', '.join(repr(c) for c in choices)}")
        return
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{name} is {value!r}: must be a text")
        return
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}: must be true or false")
        return
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int) or value != value:
        raise ValueError(f"{name} is {value!r}: must be {'an integer' if kind is int else 'a number'}")
    if value < 0 or (value == 0 and name not in FROM_ZERO):
        raise ValueError(f"{name} is {value!r}: must be above 0")
    # An unlimited scale is a valid fact.
    if (value > LARGEST and not (name == "max_scale" and value == math.inf)) or 0 < value < SMALLEST:
        raise ValueError(f"{name} is {value!r:.40}: must be between {SMALLEST:g} and {LARGEST:g}")
    if name in ("beta2", "ema") and value >= 1:
        raise ValueError(f"{name} is {value!r}: must be below 1")
