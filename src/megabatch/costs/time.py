"""Seconds of one step, from what it computes and moves and what a machine is able to.

Everything is a sum of counted costs over stated rates (`devices.Shares`); nothing is measured here. The host calls operations while
the device computes earlier ones: of each pass of a tower, the slower of both counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from .. import objectives, optimizers
from .counting import Pass, Work
from .hardware import Machine
from .strategy import Strategy

# Embeddings reach the loss in fp32: bytes that a rank sends on at a hop of the ring, forward a block, backward block and gradient.
RING_BYTES = 3 * 4
# Of a chunk's gradients, added to those of the chunks before it.
ADDED_BYTES = 12
HOP_S = 20e-6
# The host's time for an operation that autograd does not record, against one that it does.
UNRECORDED = 0.6
PARAMETER_BYTES = 4


@dataclass(frozen=True)
class StepWork:
    """What every step does: the towers' forwards, the loss over embeddings of `dim`, the optimizer."""

    towers: tuple[Work, ...]
    loss: objectives.CostName = objectives.DEFAULT
    dim: int = 512
    optimizer: str = optimizers.DEFAULT

    @property
    def trainable(self) -> int:
        return sum(work.trainable for work in self.towers)


class StepTime(NamedTuple):
    """Seconds, and what they are made of."""

    seconds: float
    parts: dict[str, float]


def step_time(task: StepWork, strategy: Strategy, machine: Machine) -> StepTime:
    """The seconds of one optimizer step on every rank of the machine."""
    machine = machine.with_gpus(strategy.ranks)
    forward = sum(_first_forward(work, strategy, machine) for work in task.towers)
    backward = sum(seconds_of(work.backward, strategy, machine) for work in task.towers) + _adding(task, strategy, machine)
    again = sum(_forwards_again(work, strategy) * seconds_of(work.forward, strategy, machine) for work in task.towers)
    parts = {
        "forward": forward,
        "backward": backward,
        "recomputation": again,
        "inputs": _inputs(task, strategy, machine),
        "loss": _loss(task, strategy, machine),
        "ring": _ring(task, strategy, machine),
        "gradients' exchange": _exchange(task, strategy, machine, (forward + backward) / strategy.chunks),
        "optimizer": _optimizer(task, strategy, machine),
        "once a step": machine.device.efficiency.step_s,
    }
    return StepTime(sum(parts.values()), {name: seconds for name, seconds in parts.items() if seconds > 0})


def rescale(step: StepTime, seconds: float) -> StepTime:
    """The step with other seconds in all, its parts in proportion."""
    if seconds == step.seconds:
        return step
    return StepTime(seconds, {name: part * seconds / step.seconds for name, part in step.parts.items()})


def seconds_of(costs: Pass, strategy: Strategy, machine: Machine, host: float = 1.0) -> float:
    """Seconds of all chunks of a shard in one direction: of the device, or of the host where that is slower. A CPU does both.

    host: a factor on what it takes for an operation.
    """
    device, rows, times = machine.device, strategy.shard, strategy.chunks
    # What kernels leave empty and what they call of their own is known of those on CUDA.
    calls = [call._replace(filling=1.0) for call in costs.calls if not call.hidden] if device.type == "cpu" else costs.calls
    computing = 0.0
    for call in calls:
        moving = (rows * call.bytes + times * call.fixed) / device.bytes_per_second(call.kind)
        multiplying = rows * call.flops / device.flops_per_second(strategy.precision, call.kind) if call.flops else 0.0
        computing += call.times * max(moving, multiplying) / call.filling
    calling = times * costs.operations * host * device.efficiency.host_s
    return computing + calling if device.type == "cpu" else max(computing, calling)


def _first_forward(work: Work, strategy: Strategy, machine: Machine) -> float:
    """The forward whose embeddings the loss takes; of chunks that are not kept, nothing is recorded for a backward."""
    return seconds_of(work.forward, strategy, machine, 1 - (1 - UNRECORDED) * _not_kept(work, strategy))


def _not_kept(work: Work, strategy: Strategy) -> float:
    """The share of chunks that are computed a second time, for their backward."""
    if not work.backward.calls or strategy.accumulate:
        return 0.0
    return 1 - min(strategy.keep, strategy.chunks) / strategy.chunks


def _forwards_again(work: Work, strategy: Strategy) -> float:
    """Forwards that are done again: of chunks that are not kept, and of blocks inside a checkpointed encoder."""
    return _not_kept(work, strategy) + (1 if strategy.checkpointing and work.backward.calls else 0)


def _inputs(task: StepWork, strategy: Strategy, machine: Machine) -> float:
    """Their way to the device, whenever a chunk is computed."""
    if machine.device.type == "cpu":
        return 0.0
    return sum((1 + _not_kept(work, strategy)) * strategy.shard * work.inputs for work in task.towers) / machine.device.copy


def _adding(task: StepWork, strategy: Strategy, machine: Machine) -> float:
    """Gradients of one chunk after the other come together."""
    return (strategy.chunks - 1) * ADDED_BYTES * task.trainable / machine.device.bytes_per_second("elementwise")


def _loss(task: StepWork, strategy: Strategy, machine: Machine) -> float:
    flops = objectives.BY_COST_NAME[task.loss].flops * strategy.shard * strategy.batch * task.dim
    return flops / machine.device.flops_per_second("fp32")


def _ring(task: StepWork, strategy: Strategy, machine: Machine) -> float:
    """What the loss waits for blocks: they travel while the ones before them are computed with."""
    hops = strategy.ranks - 1
    if not objectives.is_contrastive(task.loss) or not hops:
        return 0.0
    travel = hops * RING_BYTES * strategy.shard * task.dim / machine.link
    return max(0.0, travel - _loss(task, strategy, machine)) + 2 * hops * HOP_S


def _exchange(task: StepWork, strategy: Strategy, machine: Machine, chunk_s: float) -> float:
    """Gradients, and with FSDP2 weights, between ranks.

    With DDP, gradients are exchanged once, after the step (a step that can be repeated when memory runs out gives up the overlap).
    FSDP2 gathers weights twice for every chunk, behind the chunk's own work, copies them, and scatters the gradients once.
    """
    if strategy.ranks == 1:
        return 0.0
    share = (strategy.ranks - 1) / strategy.ranks
    once = share * PARAMETER_BYTES * task.trainable / machine.link
    latency = 2 * math.ceil(math.log2(strategy.ranks)) * HOP_S
    if strategy.sharding == "ddp":
        return 2 * once + latency
    weights = PARAMETER_BYTES * sum(work.parameters for work in task.towers)
    gather, copy = share * weights / machine.link, 2 * weights / machine.device.bytes_per_second("elementwise")
    return strategy.chunks * (max(0.0, 2 * gather - chunk_s) + 2 * copy + 2 * latency) + once


def _optimizer(task: StepWork, strategy: Strategy, machine: Machine) -> float:
    device = machine.device
    owned = task.trainable / (strategy.ranks if strategy.sharding == "fsdp2" else 1)
    return owned * optimizers.update_bytes(task.optimizer) / device.bytes_per_second("elementwise")
