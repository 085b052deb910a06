"""The input and the result of a memory prediction: `Setup` and `Prediction`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from ... import objectives, optimizers

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setup:
    """How a training step is run.

    optimizer: a name of `optimizers.STATES`, or a torch Optimizer class, called with the parameters and lr.
    fused: whether its fused kernel is used. None or False: torch's default on CUDA, lists of tensors (foreach), with temporaries of
        the parameters' size.
    precision: "bf16" and "fp16" run under autocast, with CUDA's lists of operations; "fp32" without.
    checkpointing: turn on the model's own switch for activation checkpointing.
    ranks, sharding: "ddp" adds buckets for the gradients, "fsdp2" shards weights, gradients and optimizer state over the ranks.
    gradient_exchange: "bf16" averages gradients in bf16: DDP copies its buckets for that, FSDP2 sends half as many bytes.
    chunk: rows of the shard that go through the model at once; None: all.
    keep: chunks per tower whose graphs are kept for backward instead of recomputed (contrastive objectives).
    objective: contrastive ones, such as "clip", take two towers, which encode in chunks; "supervised" takes one model and a loss
        that is a mean over samples, so that gradients of chunks are accumulated.
    loss_options: of a contrastive loss.
    workspace: working memory of the contrastive loss in bytes; None: the loss's default for the device.
    ema: whether a moving average of the weights is kept.
    inputs_on_device: whether the inputs of the whole shard are on the device while chunks are computed; None: no.
    device: "cuda", or "cpu" for PyTorch's CPU kernels. capability: compute capability of the CUDA device. device_memory: its memory
        in bytes, on which the loss's default workspace depends; None: one of at most 16 GiB.
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
    device_memory: int | None = None
    loss_options: objectives.LossOptions = objectives.PLAIN_LOSS
    gradient_exchange: Literal["bf16"] | None = None

    def __post_init__(self) -> None:
        choices = [
            ("precision", self.precision, tuple(PRECISIONS)),
            ("sharding", self.sharding, ("ddp", "fsdp2")),
            ("objective", self.objective, tuple(objectives.BY_COST_NAME)),
            ("device", self.device, ("cuda", "cpu")),
            ("gradient_exchange", self.gradient_exchange, ("bf16", None)),
        ]
        for name, value, values in choices:
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
        """The dtype of autocast; None without autocast."""
        return PRECISIONS[self.precision]

    @property
    def contrastive(self) -> bool:
        return objectives.is_contrastive(self.objective)

    @property
    def sharded(self) -> bool:
        return self.sharding == "fsdp2" and self.ranks > 1


class Prediction(NamedTuple):
    """The predicted memory of one training step.

    peak_bytes: the most that tensors occupy at one moment, as torch.cuda.max_memory_allocated reports it.
    reserved_bytes: what the caching allocator reserves on the device for it, as torch.cuda.max_memory_reserved reports it.
    parts: bytes at the peak by what they are for ("weights", "activations", ...); they add up to peak_bytes. "rests" are remainders
        of blocks that the allocator does not split off.
    moment: when the peak occurs, such as "backward of blocks.2".
    phases: the peak of each phase ("forward", "loss", "backward", "optimizer step").
    assumptions: what the prediction rests on, one sentence each.
    """

    peak_bytes: int
    reserved_bytes: int
    parts: dict[str, int]
    moment: str
    phases: dict[str, int]
    assumptions: tuple[str, ...]


def check_rows(rows: object) -> int:
    """Return the rows; a ValueError if they are not a positive whole number."""
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
