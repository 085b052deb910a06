"""CUDA's caching allocator, played through: how much it asks of the device for a sequence of blocks.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings, on one stream: blocks up to 1 MiB come out of
segments of 2 MiB; those below 10 MiB out of segments of 20 MiB; larger ones have a segment of their own, rounded up to 2 MiB. A
request takes the smallest free block that holds it and leaves the rest if that is worth it; neighbours that are free become one.
"""

from __future__ import annotations

from bisect import bisect_left, insort

SMALL, SEGMENT, MEDIUM, MEDIUM_SEGMENT = 2**20, 2 * 2**20, 10 * 2**20, 20 * 2**20


class Piece:
    """A part of a segment, between its neighbours."""

    __slots__ = ("after", "before", "free", "place", "size")

    def __init__(self, place: int, size: int) -> None:
        self.place, self.size = place, size
        self.free = True
        self.before: Piece | None = None
        self.after: Piece | None = None

    def __lt__(self, other: Piece) -> bool:
        return (self.size, self.place) < (other.size, other.place)


class CachingAllocator:
    """Two pools, small and large; `reserved` is what both have asked of the device, which nothing is given back to."""

    def __init__(self) -> None:
        self.reserved = 0
        self._pools: dict[bool, list[Piece]] = {True: [], False: []}
        self._next_place = 0

    def take(self, size: int) -> Piece:
        """A piece of at least `size` bytes, a multiple of 512."""
        small = size <= SMALL
        pool = self._pools[small]
        where = bisect_left(pool, Piece(-1, size))
        piece = pool.pop(where) if where < len(pool) else self._segment(size)
        rest = piece.size - size
        if rest >= 512 if small else rest > SMALL:
            left = Piece(piece.place + size, rest)
            left.before, left.after = piece, piece.after
            if left.after is not None:
                left.after.before = left
            piece.after, piece.size = left, size
            insort(pool, left)
        piece.free = False
        return piece

    def give(self, piece: Piece, size: int) -> None:
        """Gives back a piece that was taken for `size` bytes."""
        pool = self._pools[size <= SMALL]
        for neighbour in (piece.before, piece.after):
            if neighbour is not None and neighbour.free:
                del pool[bisect_left(pool, neighbour)]
                piece = _joined(*sorted((piece, neighbour), key=lambda p: p.place))
        piece.free = True
        insort(pool, piece)

    def _segment(self, size: int) -> Piece:
        length = SEGMENT if size <= SMALL else MEDIUM_SEGMENT if size < MEDIUM else -(-size // SEGMENT) * SEGMENT
        self.reserved += length
        piece = Piece(self._next_place, length)
        # Segments are not neighbours.
        self._next_place += length + SEGMENT
        return piece


def _joined(first: Piece, second: Piece) -> Piece:
    first.size += second.size
    first.after = second.after
    if first.after is not None:
        first.after.before = first
    return first
