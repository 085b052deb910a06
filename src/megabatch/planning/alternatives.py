"""What else could be done: other batches, chunks and machines beside the plan, and what would change the plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ..costs.counting import Pass
from ..costs.operations import FUSED_CLASSES
from ..costs.time import step_time
from .choose_batch import advised, task_of
from .estimator import Estimator
from .plan import Alternative, CurvePoint
from .problem import Problem
from .search import Estimate, best_chunk, chunk_sizes

# The share of a step below which a change is not named.
WORTH_A_SENTENCE = 0.03


def alternatives(problem: Problem, estimator: Estimator, chosen: Estimate) -> Iterator[Alternative]:
    """Yield the plan, half and twice its batch, half its chunk, more GPUs, and the largest batch that fits without chunks."""
    strategy, machine = chosen.strategy, problem.machine
    yield _alternative(problem, estimator, "the plan", chosen)
    for name, size in (("half the batch", strategy.batch // 2), ("twice the batch", strategy.batch * 2)):
        other = estimator.fastest_or_none(size - size % machine.gpus)
        # A single pair has no negatives.
        if other is not None and not (problem.request.pairs and size < 2):
            yield _alternative(problem, estimator, name, other)
    if strategy.chunk > 1:
        half = replace(strategy, chunk=strategy.chunk // 2, keep=0)
        yield _alternative(problem, estimator, "half the chunk, nothing kept", estimator.estimate(half))
    for name, gpus in (("one GPU more", machine.gpus + 1), ("twice the GPUs", 2 * machine.gpus)):
        size = round(strategy.batch / gpus) * gpus
        other = estimator.fastest_or_none(size, machine.with_gpus(gpus))
        if other is not None:
            yield _alternative(problem, estimator, name, other)
    if problem.request.pairs:
        unchunked = largest_without_chunks(problem, estimator)
        if unchunked is not None and unchunked.strategy.batch < strategy.batch:
            yield _alternative(problem, estimator, "what fits without chunks", unchunked)


def largest_without_chunks(problem: Problem, estimator: Estimator) -> Estimate | None:
    """Return the largest batch whose shards, powers of two, fit in one chunk: the batch if memory decided it."""
    plain = replace(estimator.fastest(problem.machine.gpus).strategy, checkpointing=False, sharding="ddp")
    largest = None
    for power in range(20):
        shard = 2**power
        whole = replace(plain, shard=shard, chunk=shard, keep=1)
        if estimator.memory(whole) > problem.limit or whole.batch > problem.budget.data:
            break
        largest = estimator.estimate(whole)
    return largest


def changes(problem: Problem, estimator: Estimator, chosen: Estimate) -> Iterator[str]:
    """Yield sentences on what would change the plan, each with numbers."""
    request, seen, strategy = problem.request, problem.budget.seen, chosen.strategy
    task = task_of(problem, estimator.parameters)
    if problem.given is None and task.pairs:
        for factor in (4, 1 / 4):
            other = advised(replace(task, seen=max(1, round(seen * factor))), request.priority)
            if other.batch != strategy.batch:
                yield f"With {round(seen * factor):,} samples seen: a batch of {other.batch:,} ({other.updates:,} updates)."
        if task.kind == "image-text" and task.start == "scratch":
            other = advised(replace(task, start="locked"), request.priority)
            yield f"With a locked, pretrained image tower (LiT): a batch of {other.batch:,}, because it needs fewer updates."
        if not task.negatives and task.start == "pretrained":
            other = advised(replace(task, negatives=7), request.priority)
            yield f"With 7 mined hard negatives per query: a batch of {other.batch:,} queries."
    if any(size < strategy.chunk for size in chunk_sizes(strategy.shard)):
        smaller = best_chunk(strategy, estimator.memory, estimator.seconds, problem.limit // 2, estimator.sizes)
        if smaller is None:
            yield "With half the memory: nothing fits, not even one row."
        else:
            slower = smaller.seconds / chosen.seconds
            yield f"With half the memory: the same batch in chunks of {smaller.strategy.chunk:,}, in {slower:.2f} times the time."
    yield from _faster_kernels(problem, estimator, chosen)
    yield from _faster_reading(problem, estimator, chosen)
    yield from _faster_exchange(problem, estimator, chosen)
    if not request.pairs and estimator.calibration.noise is None:
        yield "With a measured critical batch (critical=…): the batch grows with nearly its square root."


def _faster_kernels(problem: Problem, estimator: Estimator, chosen: Estimate) -> Iterator[str]:
    """Yield what torch.compile and the memory format of convolutions would bring, where it is worth a sentence."""
    base, task, machine = problem.base, estimator.task, problem.machine
    now = step_time(task, chosen.strategy, machine).seconds
    if not base.compute.compile:
        unfused = tuple(work._replace(forward=_unfused(work.forward), backward=_unfused(work.backward)) for work in task.towers)
        share = 1 - step_time(replace(task, towers=unfused), chosen.strategy, machine).seconds / now
        if share > WORTH_A_SENTENCE:
            yield (
                f"With compute.compile: at most {1 / (1 - share):.2f} times as fast, because the operations that torch.compile"
                f" fuses take {share:.0%} of the step. Measure it with `megabatch profile`."
            )
    classes = {call.op_class for work in task.towers for call in work.forward.calls}
    sharded = chosen.strategy.sharding != "ddp"
    if "convolution" in classes and machine.device.type == "cuda" and not base.compute.channels_last and not sharded:
        other = estimator.count(replace(base, compute=replace(base.compute, channels_last=True)))
        gain = now / step_time(other, chosen.strategy, machine).seconds
        if gain > 1 + WORTH_A_SENTENCE:
            yield f"With compute.channels_last: {gain:.2f} times as fast, because convolutions need no copies of their images."


def _faster_reading(problem: Problem, estimator: Estimator, chosen: Estimate) -> Iterator[str]:
    """Yield what decoding JPEGs on the device would bring, where the step waits for workers that decode them."""
    data, task, machine = problem.base.data, estimator.task, problem.machine
    if data.decode == "device" or machine.device.type != "cuda":
        return
    rate = estimator.reading(replace(problem.base, data=replace(data, decode="device")))
    other = replace(task, reading_s=rate.seconds, decoding_s=rate.decoding)
    gain = step_time(task, chosen.strategy, machine).seconds / step_time(other, chosen.strategy, machine).seconds
    if rate.decoding and gain > 1 + WORTH_A_SENTENCE:
        yield f'With data.decode="device", if the images are JPEGs: {gain:.2f} times as fast, because the step waits for workers.'


def _faster_exchange(problem: Problem, estimator: Estimator, chosen: Estimate) -> Iterator[str]:
    """Yield what averaging gradients in bf16 would bring, where a run may do so."""
    strategy = chosen.strategy
    if problem.request.objective == "lm" or (strategy.accumulate and strategy.sharding != "ddp"):
        return
    other = replace(strategy, gradient_exchange="bf16")
    gain = step_time(estimator.task, strategy, problem.machine).seconds / step_time(estimator.task, other, problem.machine).seconds
    if gain > 1 + WORTH_A_SENTENCE:
        yield (
            f'With compute.gradient_exchange="bf16": {gain:.2f} times as fast by the time model, because half as many bytes of'
            " gradients are sent; they are rounded to bf16."
        )


def _unfused(costs: Pass) -> Pass:
    """Return the operations of a pass that torch.compile does not fuse."""
    return Pass(tuple(call for call in costs.calls if call.op_class not in FUSED_CLASSES))


def curve(problem: Problem, estimator: Estimator, chosen: Estimate) -> Iterator[CurvePoint]:
    """Yield peak and seconds from an eighth to eight times the batch, each at its own fastest strategy."""
    for power in range(-3, 4):
        size = round(chosen.strategy.batch * 2.0**power)
        size -= size % problem.machine.gpus
        other = chosen if size == chosen.strategy.batch else estimator.fastest_or_none(size)
        if other is not None:
            yield CurvePoint(other.strategy.batch, other.peak, other.seconds)


def _alternative(problem: Problem, estimator: Estimator, name: str, estimate: Estimate) -> Alternative:
    strategy = estimate.strategy
    seconds = estimator.seconds(strategy)
    updates = math.ceil(problem.budget.seen / strategy.batch)
    hours = updates * seconds / 3600
    cost = hours * strategy.ranks * (problem.request.price or 1.0)
    return Alternative(
        name, strategy.batch, strategy.ranks, strategy.chunk, strategy.keep, estimate.peak, seconds, updates, hours, cost
    )
