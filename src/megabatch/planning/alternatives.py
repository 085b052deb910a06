"""What else could be done: other batches, chunks and machines beside the answer, and what would change it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from . import batch as batches
from .search import Found, best_chunk, chunk_sizes

if TYPE_CHECKING:
    from .planner import Planner


class Alternative(NamedTuple):
    """One way beside the plan's. hours: of the whole run; cost: GPU-hours, or money where a price was given."""

    name: str
    batch: int
    gpus: int
    chunk: int
    keep: int
    peak_bytes: int
    seconds_per_step: float
    updates: int
    hours: float
    cost: float


def alternatives(planner: Planner, chosen: Found) -> Iterator[Alternative]:
    """The plan itself, half and double the batch, half the chunk, one GPU more and twice as many, and what fits without chunks."""
    strategy, gpus = chosen.strategy, planner.machine.gpus
    yield _row(planner, "the plan", chosen)
    for name, size in (("half the batch", strategy.batch // 2), ("twice the batch", strategy.batch * 2)):
        size -= size % gpus
        found = planner.try_to_reach(size)
        if found is not None:
            yield _row(planner, name, found)
    if strategy.chunk > 1:
        half = dataclasses.replace(strategy, chunk=strategy.chunk // 2, keep=0)
        yield _row(planner, "half the chunk, nothing kept", Found(half, planner.memory(half), planner.step(half).seconds))
    for name, more in (("one GPU more", gpus + 1), ("twice the GPUs", 2 * gpus)):
        size = round(strategy.batch / more) * more
        found = planner.try_to_reach(size, planner.machine.with_gpus(more))
        if found is not None:
            yield _row(planner, name, found)
    if planner.question.pairs and (trap := whole_shard(planner)) is not None and trap.strategy.batch < strategy.batch:
        yield _row(planner, "what fits without chunks", trap)


def whole_shard(planner: Planner) -> Found | None:
    """The largest batch whose shards go through at once, a power of two on each GPU: the answer of those who let memory decide."""
    way = dataclasses.replace(planner.reach(planner.machine.gpus).strategy, checkpointing=False, sharding="ddp")
    best = None
    for power in range(20):
        shard = 2**power
        whole = dataclasses.replace(way, shard=shard, chunk=shard, keep=1)
        if planner.memory(whole) > planner.limit or whole.batch > planner.budget.data:
            break
        best = Found(whole, planner.memory(whole), planner.step(whole).seconds)
    return best


def changes(planner: Planner, chosen: Found) -> Iterator[str]:
    """Sentences on what would change the answer, each with the numbers."""
    question, (data, _, seen) = planner.question, planner.budget
    if planner.given is None and question.pairs and question.objective == "contrastive":
        loss = planner.task.loss
        for times in (4, 1 / 4):
            other = batches.contrastive(max(1, round(seen * times)), data, loss, question.start)
            if other.batch != chosen.strategy.batch:
                yield f"{round(seen * times):,} samples seen: a batch of {other.batch:,} ({other.updates:,} updates)"
        if question.start == "scratch":
            other = batches.contrastive(seen, data, loss, "locked")
            yield f"a locked, pretrained image tower (LiT): a batch of {other.batch:,}, for it needs fewer updates"
    smaller = [size for size in chunk_sizes(chosen.strategy.shard) if size < chosen.strategy.chunk]
    if smaller:
        less = best_chunk(
            chosen.strategy, planner.memory, lambda strategy: planner.step(strategy).seconds, planner.limit // 2, planner.sizes
        )
        if less is None:
            yield "half the memory would not do: not even one row fits"
        else:
            slower = less.seconds / chosen.seconds
            yield f"half the memory: the same batch, in chunks of {less.strategy.chunk:,}, {slower:.2f} times the time"
    if not question.pairs and planner.known.noise is None:
        yield "a measured critical batch (critical=…): the batch follows its square root, nearly"


def curve(planner: Planner, chosen: Found) -> Iterator[tuple[int, int, float]]:
    """(batch, peak, seconds) from an eighth to eight times the batch, the way chosen anew at each."""
    for power in range(-3, 4):
        size = round(chosen.strategy.batch * 2.0**power)
        size -= size % planner.machine.gpus
        found = chosen if size == chosen.strategy.batch else planner.try_to_reach(size)
        if found is not None:
            yield found.strategy.batch, found.peak, found.seconds


def _row(planner: Planner, name: str, found: Found) -> Alternative:
    strategy = found.strategy
    seconds = planner.step(strategy).seconds
    updates = math.ceil(planner.budget.seen / strategy.batch)
    hours = updates * seconds / 3600
    cost = hours * strategy.ranks * (planner.question.price or 1.0)
    return Alternative(
        name, strategy.batch, strategy.ranks, strategy.chunk, strategy.keep, found.peak, seconds, updates, hours, cost
    )
