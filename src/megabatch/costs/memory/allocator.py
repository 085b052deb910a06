"""A model of CUDA's caching allocator: how much memory it reserves on the device for a sequence of allocations.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings, on one stream: blocks up to 1 MiB come from
segments of 2 MiB; blocks below 10 MiB from segments of 20 MiB; a larger block has a segment of its own, rounded up to 2 MiB. A
request takes the smallest free block that is large enough, and the remainder is split off if it is large enough; adjacent free
blocks are merged.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

from .trace import Allocation, Event, Trace

SMALL, SMALL_SEGMENT, MEDIUM, MEDIUM_SEGMENT = 2**20, 2 * 2**20, 10 * 2**20, 20 * 2**20


class SegmentBlock:
    """A part of a segment, linked to its neighbours."""

    __slots__ = ("address", "free", "next", "previous", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size
        self.free = True
        self.previous: SegmentBlock | None = None
        self.next: SegmentBlock | None = None


class CachingAllocator:
    """Two pools of blocks, small and large. `reserved` is what both requested from the device; nothing is returned to it."""

    def __init__(self) -> None:
        self.reserved = 0
        # The sizes and addresses of the free blocks in order, and the blocks.
        self._pools: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._free: dict[tuple[int, int], SegmentBlock] = {}
        self._next_address = 0

    def allocate(self, size: int) -> SegmentBlock:
        """Return a block of at least `size` bytes, a multiple of 512."""
        small = size <= SMALL
        pool = self._pools[small]
        index = bisect_left(pool, (size, -1))
        block = self._free.pop(pool.pop(index)) if index < len(pool) else self._new_segment(size)
        remainder = block.size - size
        if remainder >= 512 if small else remainder > SMALL:
            split = SegmentBlock(block.address + size, remainder)
            split.previous, split.next = block, block.next
            if split.next is not None:
                split.next.previous = split
            block.next, block.size = split, size
            self._insert(pool, split)
        block.free = False
        return block

    def release(self, block: SegmentBlock, size: int) -> None:
        """Free a block that was allocated for `size` bytes."""
        pool = self._pools[size <= SMALL]
        previous, following = block.previous, block.next
        if previous is not None and previous.free:
            self._take(pool, previous)
            block = _merge(previous, block)
        if following is not None and following.free:
            self._take(pool, following)
            block = _merge(block, following)
        block.free = True
        self._insert(pool, block)

    def _insert(self, pool: list[tuple[int, int]], block: SegmentBlock) -> None:
        key = block.size, block.address
        insort(pool, key)
        self._free[key] = block

    def _take(self, pool: list[tuple[int, int]], block: SegmentBlock) -> None:
        key = block.size, block.address
        del pool[bisect_left(pool, key)], self._free[key]

    def _new_segment(self, size: int) -> SegmentBlock:
        length = SMALL_SEGMENT if size <= SMALL else MEDIUM_SEGMENT if size < MEDIUM else -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        self.reserved += length
        block = SegmentBlock(self._next_address, length)
        # Segments are not adjacent.
        self._next_address += length + SMALL_SEGMENT
        return block


def _merge(first: SegmentBlock, second: SegmentBlock) -> SegmentBlock:
    first.size += second.size
    first.next = second.next
    if first.next is not None:
        first.next.previous = first
    return first


class StepEvents(NamedTuple):
    """The trace of a step in four parts, as the allocator meets them.

    persistent: weights, workspaces and whatever else exists before the optimizer's state. state: the optimizer's state, which the
    first step creates. body: forward and backward. update: the optimizer's step and the end of the gradients.
    """

    persistent: Iterable[Event]
    state: Iterable[Event]
    body: Iterable[Event]
    update: Iterable[Event]


def replay(trace: Trace, events: StepEvents) -> tuple[Trace, int]:
    """Return the trace with the sizes that the allocator hands out in a second step, and the bytes that it has then reserved.

    The first step creates the optimizer's state. A block may be larger than the request: the allocator does not split off a
    remainder of up to 1 MiB, and counts it as allocated.
    """
    allocator = CachingAllocator()
    blocks: dict[int, SegmentBlock] = {}
    allocations = list(trace.allocations)
    body, update = list(events.body), list(events.update)
    for index, is_allocation, *_ in [*events.persistent, *body, *events.state, *update, *body, *update]:
        requested = trace.allocations[index]
        size = requested.bytes
        if size == 0:
            continue
        # What the first step leaves behind is freed when the second step allocates it again.
        if index in blocks:
            allocator.release(blocks.pop(index), size)
        if is_allocation:
            block = blocks[index] = allocator.allocate(size)
            remainder = block.size - size
            if allocations[index].remainder != remainder:
                allocations[index] = Allocation(size, requested.part, remainder)
    return Trace(allocations, trace.events), allocator.reserved
