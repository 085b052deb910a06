"""Seconds of one step, from what it computes and moves and what a machine is able to.

Everything is a sum of counted costs over stated rates (`devices.Shares`); nothing is measured here. The host's time is added to
the device's, as if they did not overlap: that is how steps of CLIP ViT-L/14 on an H200 behaved, at chunks of 64 to 256 rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .counting import Work
from .hardware import Machine
from .how import How

# Backward against forward: two products for each of the forward's, and about as much of the rest.
BACKWARD = 2.0
# FLOP of the loss for each pair of rows and dimension: forward and backward, each similarity computed once in each.
LOSS_FLOPS = {"clip": 8.0, "siglip": 6.0, "mean": 0.0}
# Embeddings reach the loss in fp32: bytes that a rank sends on at a hop of the ring, forward a block, backward block and gradient.
RING_BYTES = 3 * 4
# Traffic of the optimizer for each parameter that learns: gradient, weight and state read and written, clipping; an estimate.
OPTIMIZER_BYTES = {"adamw": 60.0, "sgd": 36.0}
HOP_S = 20e-6
PARAMETER_BYTES = 4


@dataclass(frozen=True)
class Task:
    """What every step does: the towers' forwards, the loss over embeddings of `dim`, the optimizer."""

    towers: tuple[Work, ...]
    loss: Literal["clip", "siglip", "mean"] = "clip"
    dim: int = 512
    optimizer: str = "adamw"

    @property
    def learning(self) -> int:
        return sum(work.learning for work in self.towers)


class StepTime(NamedTuple):
    """Seconds, and what they are made of."""

    seconds: float
    parts: dict[str, float]


def step_time(task: Task, how: How, machine: Machine) -> StepTime:
    """The seconds of one optimizer step on every rank of the machine."""
    machine = machine.of(how.ranks)
    forward = sum(passes(work, how.shard, how.chunks, how, machine) for work in task.towers)
    backward = sum(BACKWARD * passes(w, how.shard, how.chunks, how, machine) for w in task.towers if _learns(w))
    parts = {
        "forward": forward,
        "backward": backward,
        "recomputation": _recomputation(task.towers, how, machine),
        "loss": _loss(task, how, machine),
        "ring": _ring(task, how, machine),
        "gradients' exchange": _exchange(task, how, machine, (forward + backward) / how.chunks),
        "optimizer": _optimizer(task, how, machine),
        "once a step": machine.device.shares.step_s,
    }
    return StepTime(sum(parts.values()), {name: seconds for name, seconds in parts.items() if seconds > 0})


def scaled(step: StepTime, seconds: float) -> StepTime:
    """The step with other seconds in all, its parts in proportion."""
    if seconds == step.seconds:
        return step
    return StepTime(seconds, {name: part * seconds / step.seconds for name, part in step.parts.items()})


def passes(work: Work, rows: int, times: int, how: How, machine: Machine) -> float:
    """Seconds of forwards over so many rows in all, in so many calls."""
    device = machine.device
    moved = rows * work.bytes + times * work.pass_bytes
    products = rows * work.flops / device.rate(how.precision)
    return products + moved / (device.bandwidth * device.shares.bandwidth) + times * work.operations * device.shares.host_s


def _learns(work: Work) -> bool:
    """A projection behind a locked encoder costs next to nothing on the way back."""
    return work.learning > work.parameters / 10


def _recomputation(towers: Sequence[Work], how: How, machine: Machine) -> float:
    """Forwards that are done again: of chunks that are not kept, and of blocks inside a checkpointed encoder."""
    kept = how.chunks if how.accumulate else min(how.keep, how.chunks)
    again = how.chunks - kept
    seconds = 0.0
    for work in towers:
        if not _learns(work):
            continue
        share = again / how.chunks + (1 if how.checkpointing else 0)
        seconds += share * passes(work, how.shard, how.chunks, how, machine)
    return seconds


def _loss(task: Task, how: How, machine: Machine) -> float:
    flops = LOSS_FLOPS[task.loss] * how.shard * how.batch * task.dim
    return flops / machine.device.rate("fp32")


def _ring(task: Task, how: How, machine: Machine) -> float:
    """What the loss waits for blocks: they travel while the ones before them are computed with."""
    hops = how.ranks - 1
    if task.loss == "mean" or not hops:
        return 0.0
    travel = hops * RING_BYTES * how.shard * task.dim / machine.link
    return max(0.0, travel - _loss(task, how, machine)) + 2 * hops * HOP_S


def _exchange(task: Task, how: How, machine: Machine, chunk_s: float) -> float:
    """Gradients, and with FSDP2 weights, between ranks.

    With DDP, gradients are exchanged once, after the step (a step that can be repeated when memory runs out gives up the overlap).
    FSDP2 gathers weights twice for every chunk, behind the chunk's own work, copies them, and scatters the gradients once.
    """
    if how.ranks == 1:
        return 0.0
    share = (how.ranks - 1) / how.ranks
    once = share * PARAMETER_BYTES * task.learning / machine.link
    latency = 2 * math.ceil(math.log2(how.ranks)) * HOP_S
    if how.sharding == "ddp":
        return 2 * once + latency
    weights = PARAMETER_BYTES * sum(work.parameters for work in task.towers)
    gather, copy = share * weights / machine.link, 2 * weights / (machine.device.bandwidth * machine.device.shares.bandwidth)
    return how.chunks * (max(0.0, 2 * gather - chunk_s) + 2 * copy + 2 * latency) + once


def _optimizer(task: Task, how: How, machine: Machine) -> float:
    device = machine.device
    owned = task.learning / (how.ranks if how.sharding == "fsdp2" else 1)
    return owned * OPTIMIZER_BYTES.get(task.optimizer, 60.0) / (device.bandwidth * device.shares.bandwidth)
