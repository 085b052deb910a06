"""How to reach a batch: the fastest way whose predicted memory fits. Pure: numbers of a memory and a time model in, a way out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..costs.strategy import Precision, Sharding, Strategy

Bytes = Callable[[Strategy], int]
Seconds = Callable[[Strategy], float]
# What a way must save of another's time to be worth its machinery: sharded weights, recomputation inside the encoders.
SIMPLER = 1.05


class Found(NamedTuple):
    """A way, the memory that it is predicted to take of the device, and the seconds of a step."""

    strategy: Strategy
    peak: int
    seconds: float


class Sizes(NamedTuple):
    """Chunks to try, for the rows of a shard; whether the fastest of those that fit is taken, or by rule the largest."""

    of: Callable[[int], list[int]]
    fastest: bool = False


def search(ways: Sequence[Strategy], memory: Bytes, seconds: Seconds, limit: int, sizes: Sizes | None = None) -> Found:
    """The fastest of the ways at their best chunk, each with as many kept chunks as fit; a ValueError where none fits.

    ways: they differ in precision, checkpointing, sharding; their chunk is the shard. limit: bytes. sizes: None is `chunk_sizes`.
    """
    if limit <= 0:
        raise ValueError(f"limit is {limit:,} bytes: must be above 0")
    found: Found | None = None
    # A way cannot be faster than with all of its shard in one chunk that is kept: slower ones need not be asked for their memory.
    hopes = {way: seconds(dataclasses.replace(way, chunk=way.shard, keep=1)) for way in ways}
    for way in sorted(ways, key=lambda way: hopes[way] * _worth(way)):
        if found is None or hopes[way] * _worth(way) < found.seconds * _worth(found.strategy):
            better = best_chunk(way, memory, seconds, limit, sizes)
            if better is not None and (found is None or better.seconds * _worth(way) < found.seconds * _worth(found.strategy)):
                found = better
    if found is None:
        smallest = min(memory(dataclasses.replace(way, chunk=1, keep=0)) for way in ways)
        raise ValueError(
            f"memory is {limit / 2**30:.1f} GiB that may be used: the model takes {smallest / 2**30:.1f} GiB at the smallest chunk;"
            " take a larger device, more of them (weights are then sharded), or a smaller model"
        )
    return found


def _worth(way: Strategy) -> float:
    """What a second of the way counts."""
    return SIMPLER ** ((way.sharding == "fsdp2") + way.checkpointing)


def best_chunk(way: Strategy, memory: Bytes, seconds: Seconds, limit: int, sizes: Sizes | None = None) -> Found | None:
    """The way at the largest chunk that fits, then at the most kept chunks that fit; None where not even one row does.

    Larger chunks cost less time and more memory, so that of those that fit the largest is the fastest; where times were measured,
    which need not follow that rule, each of them is asked.
    """
    sizes = sizes or Sizes(chunk_sizes)
    ways = [dataclasses.replace(way, chunk=size, keep=0) for size in sizes.of(way.shard)]
    fitting = [way for way in ways if memory(way) <= limit]
    if not fitting:
        return None
    candidates = fitting if sizes.fastest else [max(fitting, key=lambda way: way.chunk)]
    found = [_filled(way, memory, seconds, limit) for way in candidates]
    return min(found, key=lambda each: (each.seconds, -each.strategy.chunk))


def _filled(way: Strategy, memory: Bytes, seconds: Seconds, limit: int) -> Found:
    """The way with as many kept chunks as fit."""
    if not way.accumulate:
        way = dataclasses.replace(way, keep=_most_kept(way, memory, limit))
    return Found(way, memory(way), seconds(way))


def chunk_sizes(shard: int) -> list[int]:
    """Powers of two up to the shard, and the shard.

    >>> chunk_sizes(6)
    [1, 2, 4, 6]
    """
    sizes = [2**power for power in range(shard.bit_length()) if 2**power < shard]
    return [*sizes, shard]


def _most_kept(way: Strategy, memory: Bytes, limit: int) -> int:
    """The most chunks that can be kept, by bisection: memory grows with them."""
    low, high = 0, way.chunks
    while low < high:
        middle = (low + high + 1) // 2
        if memory(dataclasses.replace(way, keep=middle)) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def all_ways(
    batch: int,
    ranks: int,
    *,
    precisions: Sequence[Precision],
    accumulate: bool = False,
    checkpointing: Sequence[bool] = (False, True),
    shardings: Sequence[Sharding] = ("ddp", "fsdp2"),
) -> list[Strategy]:
    """The ways worth trying: every combination of precision, checkpointing and, over several ranks, sharding."""
    if ranks < 1:
        raise ValueError(f"gpus is {ranks}: must be at least 1; a CPU counts as one")
    if batch % ranks:
        raise ValueError(
            f"batch is {batch:,} and gpus is {ranks}: the batch must be a multiple of them, so that all hold the same rows"
        )
    shardings = shardings if ranks > 1 else ("ddp",)
    shard = batch // ranks
    return [
        Strategy(ranks, shard, shard, 0, again, precision, sharding, accumulate)
        for precision in precisions
        for again in checkpointing
        for sharding in shardings
    ]
