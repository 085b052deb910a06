"""Which pairs of a tile count: the masks that the kernels share. Legend and meaning: ../../contract.py, Pairs.

Most tiles need none: they lie inside the panel, off the diagonal, and no id occurs on both of their sides. Whether a tile is one of
the others is one uniform branch.

A `panel` is the tuple (matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns, shift): marks of tiles with equal
ids, the ids as pairs of 32-bit halves, what similarities are compared with, the panel's size, and by how many columns the positives
of its rows are ahead of them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "columns", "across"])
def match_kernel(ids_M, ids_N, matches, rows, columns, across, M: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr):
    """Marks the tiles in which the low halves of some two ids are equal: seldom others than those with equal ids.

    A program looks at TILES tiles side by side, a thread at some of their columns: no thread waits for another.
    """
    row, column = tl.program_id(1) * M, tl.program_id(0) * TILES * N
    j = column + tl.arange(0, TILES * N)
    low_N = tl.load(ids_N + 2 * j.to(tl.int64), mask=j < columns, other=0)
    differ = tl.full((TILES * N,), -1, tl.int32).to(tl.uint32, bitcast=True)
    here_M = ids_M + 2 * row.to(tl.int64)
    for i in range(0, tl.minimum(M, rows - row)):
        low = tl.load(here_M + 2 * i)
        differ = tl.minimum(differ, (low_N ^ low).to(tl.uint32, bitcast=True))
    differ = tl.where(j < columns, differ, 1)
    equal = tl.min(tl.reshape(differ, (TILES, N)), 1) == 0
    t = tl.program_id(0) * TILES + tl.arange(0, TILES)
    tl.store(matches + tl.program_id(1) * across + t, equal.to(tl.int8), mask=t < across)


@triton.jit
def is_special(panel, row, column, IS_LOCAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Whether some pair of the tile does not count as a negative: it is beyond the edge, a positive, or may have equal ids."""
    matches, _, _, _, _, _, rows, columns, shift = panel
    special = (row + M > rows) | (column + N > columns)
    if IS_LOCAL:
        special = special | ((row + shift < column + N) & (column < row + shift + M))
    if matches is not None:
        special = special | (tl.load(matches + (row // M) * tl.cdiv(columns, N) + column // N) != 0)
    return special


@triton.jit
def others(panel, row, column, IS_LOCAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The pairs inside the panel that are not positives."""
    _, _, _, _, _, _, rows, columns, shift = panel
    i, j = row + tl.arange(0, M), column + tl.arange(0, N)
    found = (i < rows)[:, None] & (j < columns)[None, :]
    if IS_LOCAL:
        found = found & ((i + shift)[:, None] != j[None, :])
    return found


@triton.jit
def negatives(panel, row, column, IS_LOCAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The pairs inside the panel that are neither positives nor equal in id."""
    _, ids_M, _, _, _, _, _, _, _ = panel
    found = others(panel, row, column, IS_LOCAL, M, N)
    if ids_M is not None:
        found = found & ~_equal_ids(panel, row, column, M, N)
    return found


@triton.jit
def further_positives(panel, row, column, IS_LOCAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The pairs with equal ids that are not the positive itself."""
    return others(panel, row, column, IS_LOCAL, M, N) & _equal_ids(panel, row, column, M, N)


@triton.jit
def rivals(z, special, panel, row, column, IS_LOCAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The similarities of negatives, -inf elsewhere."""
    # A product that goes untouched through a branch is waited for in every step of its loop. To add zero is to touch it.
    found = z + 0.0
    if special:
        found = tl.where(negatives(panel, row, column, IS_LOCAL, M, N), found, float("-inf"))
    return found


@triton.jit
def _equal_ids(panel, row, column, M: tl.constexpr, N: tl.constexpr):
    _, ids_M, ids_N, _, _, _, rows, columns, _ = panel
    i, j = row + tl.arange(0, M), column + tl.arange(0, N)
    equal = tl.full((M, N), True, tl.int1)
    for half in tl.static_range(2):
        half_M = tl.load(ids_M + 2 * i.to(tl.int64) + half, mask=i < rows, other=0)
        half_N = tl.load(ids_N + 2 * j.to(tl.int64) + half, mask=j < columns, other=0)
        equal = equal & (half_M[:, None] == half_N[None, :])
    return equal
