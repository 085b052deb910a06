"""Complete a trace in which only some of a model's equal blocks ran: the others allocate and free what their neighbours do.

Of a run of N equal blocks four were traced, 0, 1, 2 and 3, with 1 and 2 in the middle of others. What block 1 allocated, and when
it was freed, is repeated for the N - 4 blocks between 1 and 2. Whether that is right shows in the trace itself: relative to their
own positions, blocks 1 and 2 must have done the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from ...towers.repeats import KEPT, TEMPLATE, BlockRun
from ..blocks import Block
from .trace import Allocation, Event, Trace


class UnequalBlocksError(Exception):
    """Blocks of the same structure did different things: the model has to be traced whole."""


class Origin(NamedTuple):
    """Where an allocation was made: the block, which of its segments, and the position among the segment's allocations."""

    block: Block
    segment: int
    number: int


class Segment(NamedTuple):
    """Consecutive events of one block, or outside of all blocks (None)."""

    block: Block | None
    events: list[Event]


def complete(trace: Trace, lists: list[list[Event]], runs: list[BlockRun]) -> list[list[Event]]:
    """Return the lists of events with those of the blocks that did not run; new allocations are appended to the trace.

    Raises UnequalBlocksError.
    """
    for number, run in enumerate(runs):
        lists = _Completion(trace, [list(_segments(events, number)) for events in lists], number, run).lists()
    return lists


def _segments(events: list[Event], run: int) -> Iterator[Segment]:
    """Split events wherever the block of this run changes; blocks of other runs count as outside."""
    current: list[Event] = []
    block: Block | None = None
    for event in events:
        of_event = event.block if event.block is not None and event.block.run == run else None
        if of_event != block and current:
            yield Segment(block, current)
            current = []
        block = of_event
        current.append(event)
    if current:
        yield Segment(block, current)


class _Completion:
    def __init__(self, trace: Trace, lists: list[list[Segment]], number: int, run: BlockRun) -> None:
        self.trace, self.segments, self.number, self.run = trace, lists, number, run
        self.extra = run.count - KEPT
        self.origins: dict[int, Origin] = {}
        # The allocations of blocks that did not run, by segment, number, and position among the blocks left out.
        self.copies: dict[tuple[int, int, int], int] = {}
        # Those of blocks that ran, by segment, number, and position of the block.
        self.at: dict[tuple[int, int, int], int] = {}
        self._find_origins()
        self._template = Segment(None, [])
        self._check()

    def lists(self) -> list[list[Event]]:
        return [list(self._completed(segments)) for segments in self.segments]

    def _find_origins(self) -> None:
        for block, ordinal, segment in self._numbered():
            allocated = [event.allocation for event in segment.events if event.is_allocation]
            for position, index in enumerate(allocated):
                self.origins[index] = Origin(block, ordinal, position)
                self.at[ordinal, position, block.position] = index

    def _numbered(self) -> Iterator[tuple[Block, int, Segment]]:
        """Yield the segments of blocks, each with its number among those of the same block."""
        seen: dict[Block, int] = {}
        for segments in self.segments:
            for segment in segments:
                if segment.block is not None:
                    ordinal = seen.get(segment.block, 0)
                    seen[segment.block] = ordinal + 1
                    yield segment.block, ordinal, segment

    def _check(self) -> None:
        """Raise unless blocks follow each other without gaps, up or down, and the inner two do the same."""
        for segments in self.segments:
            positions = [None if segment.block is None else segment.block.position for segment in segments]
            passes = [group for group in _split(positions) if group]
            if any(group not in ([*range(KEPT)], [*reversed(range(KEPT))]) for group in passes):
                raise UnequalBlocksError(f"blocks were computed in the order {positions}")
        patterns: dict[Block, list[Any]] = {}
        for block, _, segment in self._numbered():
            patterns.setdefault(block, []).append(self._pattern(segment.events, block))
        first, second = (patterns.get(Block(self.number, TEMPLATE + step)) for step in (0, 1))
        if first is None or first != second:
            raise UnequalBlocksError("the inner blocks of a run allocate or free differently")
        for block, _, segment in self._numbered():
            origins = [self.origins.get(event.allocation) for event in segment.events]
            if any(origin is not None and abs(origin.block.position - block.position) > 1 for origin in origins):
                raise UnequalBlocksError("a block frees what one that is not its neighbour allocated")

    def _pattern(self, events: list[Event], block: Block) -> list[Any]:
        """Return the events relative to their block: which allocation each concerns, seen from there, and its size.

        Adjacent frees have no order: autocast frees its copies of weights in any.
        """
        pattern: list[Any] = []
        for is_allocation, group in groupby(events, key=lambda event: event.is_allocation):
            seen = [self._seen_from(event, block) for event in group]
            pattern += seen if is_allocation else sorted(seen, key=repr)
        return pattern

    def _seen_from(self, event: Event, block: Block) -> Any:
        origin = self.origins.get(event.allocation)
        allocation = self.trace.allocations[event.allocation]
        where = event.allocation if origin is None else (origin.block.position - block.position, *origin[1:])
        return event.is_allocation, where, allocation.bytes, allocation.part, event.phase

    def _completed(self, segments: list[Segment]) -> Iterator[Event]:
        inner = (TEMPLATE, TEMPLATE + 1)
        previous: Block | None = None
        for segment in segments:
            if segment.block is None:
                yield from self._outside(segment)
            else:
                positions = None if previous is None else (previous.position, segment.block.position)
                # The blocks that did not run stand between 1 and 2, in the order of the pass.
                if positions == inner:
                    for place in range(self.extra):
                        yield from self._copied(self._template, place)
                elif positions == inner[::-1]:
                    # Downwards block 1 is not known yet when its copies' turn comes.
                    for place in reversed(range(self.extra)):
                        yield from self._copied(segment, place)
                yield from (self._moved(event, segment.block) for event in segment.events)
                self._template = segment
            previous = segment.block

    def _copied(self, template: Segment, place: int) -> Iterator[Event]:
        """Yield the template's events for the block at this place, seen from there."""
        for event in template.events:
            origin = self.origins.get(event.allocation)
            if origin is None:
                raise UnequalBlocksError("a block frees what was allocated outside of its run")
            index = self._allocation(origin, place, origin.block.position - TEMPLATE)
            yield Event(index, event.is_allocation, event.phase, event.moment, event.block)

    def _allocation(self, origin: Origin, place: int, step: int) -> int:
        """Return the allocation that a copy at `place` means, where the template means one of a block `step` further."""
        wanted = place + step
        _, segment, number = origin
        if 0 <= wanted < self.extra:
            index = self.copies.get((segment, number, wanted))
            if index is None:
                like = self.trace.allocations[self.at[segment, number, TEMPLATE]]
                self.trace.allocations.append(Allocation(like.bytes, like.part, like.remainder))
                self.copies[segment, number, wanted] = index = len(self.trace.allocations) - 1
            return index
        # Beyond the copies lie block 1 and what is before it, or block 2 and what follows it.
        position = TEMPLATE + 1 + wanted if wanted < 0 else TEMPLATE + 1 + wanted - self.extra
        index = self.at.get((segment, number, position))
        if index is None:
            raise UnequalBlocksError("the first or the last block of a run allocates differently")
        return index

    def _moved(self, event: Event, block: Block) -> Event:
        """Return an event of a traced block: its neighbours on the other side of the gap are copies now."""
        origin = self.origins.get(event.allocation)
        if origin is None or not self.extra:
            return event
        step = origin.block.position - block.position
        if block.position > TEMPLATE >= origin.block.position:
            place = self.extra + block.position - (TEMPLATE + 1) + step
        elif block.position <= TEMPLATE < origin.block.position:
            place = block.position - TEMPLATE - 1 + step
        else:
            return event
        return event._replace(allocation=self._allocation(origin, place, 0))

    def _outside(self, segment: Segment) -> Iterator[Event]:
        """Yield the events outside of blocks; what they free of the template, they free of its copies too."""
        for event in segment.events:
            yield event
            origin = self.origins.get(event.allocation)
            if origin is not None and origin.block.position == TEMPLATE:
                for place in range(self.extra):
                    yield event._replace(allocation=self._allocation(origin, place, 0))


def _split(positions: list[int | None]) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    for position in positions:
        if position is None:
            groups.append([])
        else:
            groups[-1].append(position)
    return groups
