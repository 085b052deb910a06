"""Search for the fastest strategy that reaches a batch within a memory limit.

Pure functions: they take a memory model and a time model as callables and return a strategy with its estimates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..costs.strategy import GradientExchange, Precision, Sharding, Strategy

Bytes = Callable[[Strategy], int]
Seconds = Callable[[Strategy], float]
# Sharded weights and activation checkpointing must each save this factor of time to be worth their complexity.
SIMPLER = 1.05


class Estimate(NamedTuple):
    """A strategy with the bytes that it takes of each device and the seconds of one step."""

    strategy: Strategy
    peak: int
    seconds: float


class ChunkSizes(NamedTuple):
    """The chunk sizes to try for a shard of so many rows.

    compare: whether all sizes that fit are compared by time. Otherwise the largest that fits is taken.
    """

    sizes_for: Callable[[int], list[int]]
    compare: bool = False


def search(
    candidates: Sequence[Strategy], memory: Bytes, seconds: Seconds, limit: int, sizes: ChunkSizes | None = None
) -> Estimate:
    """Return the fastest candidate at its best chunk, with as many kept chunks as fit. Raises ValueError if none fits.

    candidates: strategies that differ in precision, checkpointing and sharding, with the whole shard as chunk. limit: bytes.
    sizes: None means `chunk_sizes`.
    """
    if limit <= 0:
        raise ValueError(f"limit is {limit:,} bytes: must be above 0")
    best: Estimate | None = None
    # No strategy is faster than with its whole shard in one kept chunk: the memory of slower candidates need not be computed.
    bounds = {candidate: seconds(dataclasses.replace(candidate, chunk=candidate.shard, keep=1)) for candidate in candidates}
    for candidate in sorted(candidates, key=lambda candidate: bounds[candidate] * _handicap(candidate)):
        if best is None or bounds[candidate] * _handicap(candidate) < best.seconds * _handicap(best.strategy):
            better = best_chunk(candidate, memory, seconds, limit, sizes)
            if better is not None and (
                best is None or better.seconds * _handicap(candidate) < best.seconds * _handicap(best.strategy)
            ):
                best = better
    if best is None:
        smallest = min(memory(dataclasses.replace(candidate, chunk=1, keep=0)) for candidate in candidates)
        raise NothingFitsError(limit, smallest, sharded=any(candidate.sharding != "ddp" for candidate in candidates))
    return best


class NothingFitsError(ValueError):
    """A model takes more memory than may be used.

    sharded: whether sharding its weights was tried. lora: whether only adapters are trained. memory: of the whole device.
    """

    def __init__(self, limit: int, smallest: int, *, sharded: bool, lora: bool = False, memory: int = 0) -> None:
        self.limit, self.smallest, self.sharded = limit, smallest, sharded
        less = "shorter texts, or weights in 4 bits (QLoRA), which `plan` does not cover" if lora else "LoRA"
        remedy = (
            f", even with sharded weights; take more or larger devices, {less}, or a smaller model, or split its layers too by"
            " tensor parallelism (torch.distributed.tensor.parallel), which `plan` does not cover"
            if sharded
            else f"; take a larger device, more devices (the weights are then sharded), {less}, or a smaller model"
        )
        if smallest < 0.95 * memory:
            remedy += f"; or allow more than {limit / memory:.0%} of the device's memory (--share {smallest / memory + 0.02:.2f})"
        super().__init__(
            f"{limit / 2**30:.1f} GiB of memory may be used, but the model takes at least {smallest / 2**30:.1f} GiB{remedy}"
        )


def _handicap(strategy: Strategy) -> float:
    """Return the factor by which the time of a strategy counts, so that a simpler one wins if it is nearly as fast."""
    return SIMPLER ** ((strategy.sharding != "ddp") + strategy.checkpointing)


def best_chunk(strategy: Strategy, memory: Bytes, seconds: Seconds, limit: int, sizes: ChunkSizes | None = None) -> Estimate | None:
    """Return the strategy at its largest chunk that fits, with the most kept chunks that fit; None if not even one row fits.

    Larger chunks take less time and more memory, so the largest that fits is the fastest. Measured times need not follow that rule,
    so with `sizes.compare` all chunks that fit are compared.
    """
    sizes = sizes or ChunkSizes(chunk_sizes)
    candidates = [dataclasses.replace(strategy, chunk=size, keep=0) for size in sizes.sizes_for(strategy.shard)]
    fitting = [candidate for candidate in candidates if memory(candidate) <= limit]
    if not fitting:
        return None
    compared = fitting if sizes.compare else [max(fitting, key=lambda candidate: candidate.chunk)]
    estimates = [_with_kept_chunks(candidate, memory, seconds, limit) for candidate in compared]
    return min(estimates, key=lambda estimate: (estimate.seconds, -estimate.strategy.chunk))


def _with_kept_chunks(strategy: Strategy, memory: Bytes, seconds: Seconds, limit: int) -> Estimate:
    """Return the strategy with as many kept chunks as fit."""
    if not strategy.accumulate:
        strategy = dataclasses.replace(strategy, keep=_most_kept(strategy, memory, limit))
    return Estimate(strategy, memory(strategy), seconds(strategy))


def chunk_sizes(shard: int) -> list[int]:
    """Return the powers of two below the shard, and the shard.

    >>> chunk_sizes(6)
    [1, 2, 4, 6]
    """
    sizes = [2**power for power in range(shard.bit_length()) if 2**power < shard]
    return [*sizes, shard]


def _most_kept(strategy: Strategy, memory: Bytes, limit: int) -> int:
    """Return the largest number of kept chunks that fits, by bisection: memory grows with it."""
    low, high = 0, strategy.chunks
    while low < high:
        middle = (low + high + 1) // 2
        if memory(dataclasses.replace(strategy, keep=middle)) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def candidate_strategies(
    batch: int,
    ranks: int,
    *,
    precisions: Sequence[Precision],
    accumulate: bool = False,
    checkpointing: Sequence[bool] = (False, True),
    shardings: Sequence[Sharding] = ("ddp", "fsdp2"),
    node: int = 8,
    gradient_exchange: GradientExchange | None = None,
) -> list[Strategy]:
    """Return every combination of precision, checkpointing and, with several ranks, sharding."""
    if ranks < 1:
        raise ValueError(f"gpus is {ranks}: must be at least 1; a CPU counts as one")
    if batch % ranks:
        raise ValueError(
            f"batch is {batch:,} and gpus is {ranks}: the batch must be a multiple of the GPUs, so that all hold equal shards; take"
            f" {max(1, batch // ranks) * ranks:,} or {(batch // ranks + 1) * ranks:,}"
        )
    shardings = shardings if ranks > 1 else ("ddp",)
    shard = batch // ranks
    # FSDP2 would accumulate in bf16 too.
    exchange = {sharding: gradient_exchange for sharding in shardings if sharding == "ddp" or not accumulate}
    return [
        Strategy(ranks, shard, shard, 0, recompute, precision, sharding, accumulate, node, exchange.get(sharding))
        for precision in precisions
        for recompute in checkpointing
        for sharding in shardings
    ]
