"""Predict the seconds of one training step: counted work divided by the rates of a machine.

Nothing is measured here; the rates and the efficiency that kernels reach are stated in `devices`. The host launches operations
while the device computes earlier ones, so each pass through a tower takes the longer of the two times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from .. import objectives, optimizers
from .counting import Pass, Work
from .devices import Basis, Device
from .hardware import Machine
from .strategy import Strategy

# Bytes per embedding element that a rank sends per hop of the ring, in fp32: a block in forward, a block and its gradient in
# backward.
RING_BYTES = 3 * 4
# Bytes per trainable parameter to add a chunk's gradients to those of earlier chunks.
ACCUMULATION_BYTES = 12
HOP_S = 20e-6
# Host time of an operation without autograd's recording, relative to one with it.
UNRECORDED = 0.6
PARAMETER_BYTES = 4
BF16_BYTES = 2
# Bytes per trainable parameter that DDP's hook moves to cast a gradient to bf16, divide it by the ranks, and cast the sum back.
COMPRESSION_BYTES = 16
# Measured over predicted seconds of nine steps in ten. Fitted: held-out models on an H200. Data sheet: published throughput, see
# benchmarks/results/time-published.jsonl. Measured rates know the device and not its kernels; assumed ones know neither.
SPREADS: dict[Basis, tuple[float, float]] = {
    "fitted": (0.83, 1.25),
    "measured": (0.75, 1.5),
    "data sheet": (0.5, 1.7),
    "assumed": (0.3, 3.5),
}


@dataclass(frozen=True)
class StepWork:
    """What every step computes: the towers, the loss over embeddings of width `dim` with its options, the optimizer.

    fused: whether the optimizer's update is one fused kernel.
    reading_s: seconds that one process needs to read and prepare a sample. workers: processes of each rank that read while the
    device computes; 0: the training process itself reads, between steps. decoding_s: seconds of a thread of the training process
    that launches the decoding of a sample's images on the device.
    """

    towers: tuple[Work, ...]
    loss: objectives.CostName = objectives.DEFAULT
    dim: int = 512
    optimizer: str = optimizers.DEFAULT
    fused: bool = False
    loss_options: objectives.LossOptions = objectives.PLAIN_LOSS
    reading_s: float = 0.0
    workers: int = 0
    decoding_s: float = 0.0

    @property
    def trainable(self) -> int:
        return sum(work.trainable for work in self.towers)


class StepTime(NamedTuple):
    """Seconds of a step, and its parts, which add up to it."""

    seconds: float
    parts: dict[str, float]


def step_time(task: StepWork, strategy: Strategy, machine: Machine) -> StepTime:
    """Return the seconds of one optimizer step; all ranks of the machine take the same time."""
    machine = machine.with_gpus(strategy.ranks)
    forward = sum(_first_forward(work, strategy, machine) for work in task.towers)
    backward = sum(seconds_of(work.backward, strategy, machine) for work in task.towers) + _accumulation(task, strategy, machine)
    recomputation = sum(_repeated_forwards(work, strategy) * seconds_of(work.forward, strategy, machine) for work in task.towers)
    parts = {
        "forward": forward,
        "backward": backward,
        "recomputation": recomputation,
        "inputs": _inputs(task, strategy, machine),
        "loss": _loss(task, strategy, machine),
        "ring": _ring(task, strategy, machine),
        "gradients' exchange": _gradient_exchange(task, strategy, machine, (forward + backward) / strategy.chunks),
        "optimizer": _optimizer(task, strategy, machine),
        "once a step": machine.device.efficiency.step_s,
    }
    parts["waiting for data"] = _waiting(task, strategy, sum(parts.values()))
    return StepTime(sum(parts.values()), {name: seconds for name, seconds in parts.items() if seconds > 0})


def rescale(step: StepTime, seconds: float) -> StepTime:
    """Return the step with this total, its parts in proportion."""
    if seconds == step.seconds:
        return step
    return StepTime(seconds, {name: part * seconds / step.seconds for name, part in step.parts.items()})


def interval(seconds: float, device: Device) -> tuple[float, float]:
    """Return the range in which nine of ten steps with this prediction lie, by what the device's rates rest on."""
    low, high = SPREADS[device.basis]
    return low * seconds, high * seconds


def seconds_of(costs: Pass, strategy: Strategy, machine: Machine, host_factor: float = 1.0) -> float:
    """Return the seconds of one pass over all chunks of a shard: the device's or the host's, whichever is longer.

    A CPU is device and host at once: both times are added. host_factor scales the host's time per operation.
    """
    device, rows, chunks = machine.device, strategy.shard, strategy.chunks
    # Utilization and implicit operations are known for CUDA kernels only.
    calls = [call._replace(utilization=1.0) for call in costs.calls if not call.implicit] if device.type == "cpu" else costs.calls
    device_s = 0.0
    for call in calls:
        memory_s = (rows * call.bytes + chunks * call.fixed) / device.bytes_per_second(call.op_class)
        compute_s = rows * call.flops / device.flops_per_second(strategy.precision, call.op_class) if call.flops else 0.0
        device_s += call.times * max(memory_s, compute_s) / call.utilization
    host_s = chunks * costs.operations * host_factor * device.efficiency.host_s
    return device_s + host_s if device.type == "cpu" else max(device_s, host_s)


def _first_forward(work: Work, strategy: Strategy, machine: Machine) -> float:
    """The forward whose embeddings the loss reads; autograd records nothing for chunks that are not kept."""
    return seconds_of(work.forward, strategy, machine, 1 - (1 - UNRECORDED) * _recomputed_share(work, strategy))


def _recomputed_share(work: Work, strategy: Strategy) -> float:
    """The share of chunks whose forward runs a second time, for their backward."""
    if not work.backward.calls or strategy.accumulate:
        return 0.0
    return 1 - min(strategy.keep, strategy.chunks) / strategy.chunks


def _repeated_forwards(work: Work, strategy: Strategy) -> float:
    """The number of additional forwards: of chunks that are not kept, and of the blocks of a checkpointed encoder."""
    return _recomputed_share(work, strategy) + (1 if strategy.checkpointing and work.backward.calls else 0)


def _inputs(task: StepWork, strategy: Strategy, machine: Machine) -> float:
    """The copy of inputs to the device, each time a chunk is computed."""
    if machine.device.type == "cpu":
        return 0.0
    copied = sum((1 + _recomputed_share(work, strategy)) * strategy.shard * work.inputs for work in task.towers)
    return copied / machine.device.host_copy


def _waiting(task: StepWork, strategy: Strategy, computing_s: float) -> float:
    """The time by which reading a step's samples takes longer than computing it; all of it without worker processes."""
    if not task.workers:
        return strategy.shard * (task.reading_s + task.decoding_s)
    return max(0.0, strategy.shard * max(task.reading_s / task.workers, task.decoding_s) - computing_s)


def _accumulation(task: StepWork, strategy: Strategy, machine: Machine) -> float:
    """The addition of each chunk's gradients to those of the chunks before it."""
    return (strategy.chunks - 1) * ACCUMULATION_BYTES * task.trainable / machine.device.bytes_per_second("elementwise")


def _loss(task: StepWork, strategy: Strategy, machine: Machine) -> float:
    objective = objectives.BY_COST_NAME[task.loss]
    flops = objective.flops_of(strategy.shard, strategy.batch, task.dim, task.loss_options)
    return flops / machine.device.flops_per_second("fp32")


def _ring(task: StepWork, strategy: Strategy, machine: Machine) -> float:
    """The time that the loss waits for blocks; a block is sent while the one before it is computed."""
    hops = strategy.ranks - 1
    options = task.loss_options
    if not objectives.is_contrastive(task.loss) or not hops or not options.in_batch:
        return 0.0
    # Where a side is compared with itself, x travels too.
    sides = 1 + options.negatives + (objectives.BY_COST_NAME[task.loss].same_sides(options.directions) > 0)
    sending = hops * RING_BYTES * strategy.shard * sides * sum(options.dims or (task.dim,)) / machine.link
    return ring_wait(sending, _loss(task, strategy, machine), hops)


def ring_wait(sending_s: float, computing_s: float, hops: int) -> float:
    """Return the seconds by which a ring that sends while it computes takes longer than its computation."""
    return max(0.0, sending_s - computing_s) + 2 * hops * HOP_S


def _gradient_exchange(task: StepWork, strategy: Strategy, machine: Machine, chunk_s: float) -> float:
    """The communication of gradients, and with FSDP2 of weights, between ranks.

    DDP exchanges gradients once, after the step: a step that can be retried when memory runs out gives up the overlap. FSDP2
    gathers weights twice per chunk, overlapped with the chunk's computation, copies them, and reduce-scatters the gradients once.
    Hybrid sharding does so inside each computer, and then adds up every rank's shard across the computers. In bf16 half the bytes
    of gradients are sent; DDP casts its buckets for that, FSDP2 copies gradients anyway.
    """
    if strategy.ranks == 1:
        return 0.0
    in_bf16 = strategy.gradient_exchange == "bf16"
    gradients = (BF16_BYTES if in_bf16 else PARAMETER_BYTES) * task.trainable
    if strategy.sharding == "ddp":
        casts = COMPRESSION_BYTES * task.trainable / machine.device.bytes_per_second("elementwise") if in_bf16 else 0.0
        return 2 * (_ring_pass(gradients, machine) + _latency(machine)) + casts
    inside = machine.with_gpus(strategy.owners)
    weights = PARAMETER_BYTES * sum(work.parameters for work in task.towers)
    gather, copy = _ring_pass(weights, inside), 2 * weights / machine.device.bytes_per_second("elementwise")
    seconds = strategy.chunks * (max(0.0, 2 * gather - chunk_s) + 2 * copy + 4 * _latency(inside)) + _ring_pass(gradients, inside)
    if strategy.owners < strategy.ranks:
        copies = -(-strategy.ranks // strategy.owners)
        seconds += 2 * (copies - 1) / copies * gradients / strategy.owners / machine.link + 2 * _latency(machine)
    return seconds


def _ring_pass(size: float, machine: Machine) -> float:
    """The seconds to gather or to reduce-scatter so many bytes over the devices of a machine."""
    return (machine.gpus - 1) / machine.gpus * size / machine.link


def _latency(machine: Machine) -> float:
    return math.ceil(math.log2(machine.gpus)) * HOP_S


def _optimizer(task: StepWork, strategy: Strategy, machine: Machine) -> float:
    size = task.trainable / strategy.owners * optimizers.update_bytes(task.optimizer, fused=task.fused)
    return size / machine.device.bytes_per_second("elementwise")
