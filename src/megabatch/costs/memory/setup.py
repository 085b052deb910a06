"""What is asked of a prediction, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from ... import objectives, optimizers

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setup:
    """How a step is taken.

    optimizer: a name of `optimizers.STATES`, or a torch Optimizer class, called with the parameters and lr. fused: its fused
        kernel; None is what torch takes on CUDA by itself: lists of tensors (foreach), with a copy of the parameters' size.
    precision: of autocast, as CUDA does it; "fp32" is none. checkpointing: the model's own switch is turned on.
    ranks, sharding: "ddp" adds buckets for the gradients, "fsdp2" shards weights, gradients and optimizer state over the ranks.
    chunk: rows that go through at once, of the rows of a shard; None is all. keep: chunks whose graphs are kept (contrastive).
    objective: "clip" and "siglip" take two towers and encode in chunks; "supervised" takes one model and a loss that is a mean, so
        that chunks are accumulated.
    workspace: working memory of the contrastive loss in bytes; None is what the loss takes by itself on the device.
    ema: whether a moving average of the weights is kept.
    inputs_on_device: whether all of the shard's inputs lie on the device while chunks go through; None is no.
    device: "cuda", or "cpu" for what torch's CPU kernels take. capability: of the CUDA device, major and minor.
    """

    optimizer: str | type[torch.optim.Optimizer] = optimizers.DEFAULT
    fused: bool | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    checkpointing: bool = False
    ranks: int = 1
    sharding: Literal["ddp", "fsdp2"] = "ddp"
    chunk: int | None = None
    keep: int = 0
    objective: objectives.CostName = "supervised"
    workspace: int | None = None
    ema: bool = False
    inputs_on_device: bool | None = None
    device: Literal["cuda", "cpu"] = "cuda"
    capability: tuple[int, int] = (9, 0)

    def __post_init__(self) -> None:
        known = [
            ("precision", self.precision, tuple(PRECISIONS)),
            ("sharding", self.sharding, ("ddp", "fsdp2")),
            ("objective", self.objective, tuple(objectives.BY_COST_NAME)),
            ("device", self.device, ("cuda", "cpu")),
        ]
        for name, value, values in known:
            if value not in values:
                raise ValueError(f"{name} is {value!r}: must be one of {', '.join(map(repr, values))}")
        _check_optimizer(self.optimizer)
        for name, number, low in (
            ("ranks", self.ranks, 1),
            ("chunk", self.chunk, 1),
            ("keep", self.keep, 0),
            ("workspace", self.workspace, 1),
        ):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < low):
                raise ValueError(f"{name} is {number!r}: must be a whole number from {low} up")

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast, or None."""
        return PRECISIONS[self.precision]

    @property
    def contrastive(self) -> bool:
        return objectives.is_contrastive(self.objective)

    @property
    def sharded(self) -> bool:
        return self.sharding == "fsdp2" and self.ranks > 1


class Prediction(NamedTuple):
    """What a step takes.

    peak_bytes: the most that tensors take at one moment (what max_memory_allocated shows).
    reserved_bytes: what the caching allocator asks of the device for it.
    parts: what the peak is made of; they add up to it. "rests" are ends of blocks that the allocator does not split off.
    moment: when the peak stands. phases: the peak of each phase.
    assumptions: what was taken for granted, a sentence each.
    """

    peak_bytes: int
    reserved_bytes: int
    parts: dict[str, int]
    moment: str
    phases: dict[str, int]
    assumptions: tuple[str, ...]


def check_rows(rows: object) -> int:
    """The rows, if they are a positive number of them."""
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise ValueError(f"rows is {rows!r}: must be a positive whole number, the rows of this rank's shard")
    return rows


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return
    if optimizer not in optimizers.STATES:
        raise ValueError(
            f"optimizer is {optimizer!r}: must be one of {', '.join(optimizers.STATES)}, or a class of torch.optim.Optimizer"
        )
