"""JIT functions for one tile that the kernels share: its product, its masks, how it is stored. Legend: ../contract.py.

A panel is the rectangle of the similarity matrix that one launch computes; rows and columns are counted from its corner. A tile is
a rectangle of M rows and N columns of a panel; K is the number of embedding entries per step of its product. `row` and `column` are
the first row and column of a tile, i and j vectors of rows and columns.

Kernels are persistent: a fixed number of programs, each of which walks over its tiles in one flattened loop, so that the loads of
the next tile start during the epilogue of this one.

Most tiles need no mask: they lie inside the panel, off the diagonal, and no id occurs on both of their sides. Whether a tile needs
one is a uniform branch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Fast launches compute exp(s - offset). The offset depends on the scale alone: with scales up to 100, a temperature of 0.01, no
# logit of unit vectors exceeds it by more than this. Larger scales have the same offset, because rows without similar documents
# would lose their sums.
HIGHEST_LOGIT = tl.constexpr(56.0)
LARGEST_OFFSET = tl.constexpr(44.0)
# Peaks, which no logit of their row exceeds, have to be in this range above the offset. An exponential that underflows is then
# below e^-27 of its row.
LOWEST_PEAK = tl.constexpr(-60.0)
HIGHEST_PEAK = tl.constexpr(64.0)
# A sum of exp(s - offset) over a tile in this range has lost nothing that counts: what underflowed is below 2^-126 per term, and
# 2^27 terms do not overflow.
SMALLEST_SUM = tl.constexpr(2.0**-90)
LARGEST_SUM = tl.constexpr(2.0**100)


class PairArgs(NamedTuple):
    """Which pairs of a panel count. The fields that options do not need are None.

    matches: for each tile, whether an id may occur on both of its sides.
    ids_M, ids_N: each id as two int32, low half first.
    positive_M, positive_N, margin: the positives' similarities and what negatives may exceed them by.
    rows, columns: the size of the panel.
    shift: the positive of row i is in column i + shift.
    """

    matches: Any
    ids_M: Any
    ids_N: Any
    positive_M: Any
    positive_N: Any
    margin: Any
    rows: Any
    columns: Any
    shift: Any


class Target(NamedTuple):
    """A matrix of the size of the panel that tiles are written to: a descriptor or a pointer, and its stride."""

    matrix: Any
    stride: Any


class ToLogits(NamedTuple):
    """How similarities become logits, in base 2 except in safe launches: z * factor - offset."""

    factor: Any
    offset: Any


class Logits(NamedTuple):
    """The logits of a tile for the sums of its rows and for those of its columns; -inf where a pair does not count."""

    rows: Any
    columns: Any


@triton.jit
def tile_at(t, rows, columns, M: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr):
    """Return first row and first column of tile t. GROUP rows of tiles are walked together, so that their x stays in L2."""
    tiles_across = tl.cdiv(columns, N)
    first = t // (GROUP * tiles_across) * GROUP
    height = tl.minimum(tl.cdiv(rows, M) - first, GROUP)
    within = t % (GROUP * tiles_across)
    return (first + within % height) * M, within // height * N


@triton.jit
def similarities(
    x, y, row, column, rows, columns, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return z_MN of the tile, accumulated in fp32."""
    z = tl.zeros((M, N), tl.float32)
    for k in range(0, tl.cdiv(WIDTH, K)):
        a = load_block(x, row, k * K, rows, WIDTH, M, K, DESCRIPTORS)
        b = load_block(y, column, k * K, columns, WIDTH, N, K, DESCRIPTORS)
        z = tl.dot(a, b.T, z, input_precision=PRECISION)
    return z


@triton.jit
def load_block(source, row, k, rows, WIDTH: tl.constexpr, M: tl.constexpr, K: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """Return a block of embeddings, zero beyond their edges, by tensor descriptor or, on devices without TMA, by pointers."""
    if DESCRIPTORS:
        block = source.load([row, k])
    else:
        i = row + tl.arange(0, M)
        j = k + tl.arange(0, K)
        inside = (i < rows)[:, None]
        if WIDTH % K != 0:
            inside = inside & (j < WIDTH)[None, :]
        block = tl.load(source + i.to(tl.int64)[:, None] * WIDTH + j[None, :], mask=inside, other=0.0)
    return block


@triton.jit
def halves(z, M: tl.constexpr, N: tl.constexpr):
    """Return the left and right half of a tile. Processed in sequence, they reuse each other's registers and shared memory."""
    return tl.split(tl.permute(tl.reshape(z, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def concat_columns(left, right):
    """Return (parts, columns) of the left and of the right half of a tile as one."""
    joined = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(joined, (left.shape[0], 2 * left.shape[1]))


@triton.jit
def store_block(
    target, values, row, column, rows, columns, M: tl.constexpr, N: tl.constexpr, DESCRIPTORS: tl.constexpr,
    ROUND_TO_TF32: tl.constexpr
):  # fmt: skip
    """Write a tile to its target, in the target's dtype."""
    if ROUND_TO_TF32:
        values = round_to_tf32(values)
    if DESCRIPTORS:
        target.matrix.store([row, column], values.to(target.matrix.dtype))
    else:
        i = row + tl.arange(0, M)
        j = column + tl.arange(0, N)
        inside = (i < rows)[:, None] & (j < columns)[None, :]
        place = target.matrix + i.to(tl.int64)[:, None] * target.stride + j[None, :]
        tl.store(place, values.to(target.matrix.dtype.element_ty), mask=inside)


@triton.jit
def round_to_tf32(values):
    """Round to the nearest tf32 number: tensor cores would truncate towards zero. NaN stays NaN."""
    rounded = ((values.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(values == values, rounded, values)


@triton.jit
def load_vector(values, first, length, WIDTH: tl.constexpr):
    """Return the values from `first` on, zero beyond their end."""
    i = first + tl.arange(0, WIDTH)
    return tl.load(values + i, mask=i < length, other=0.0)


@triton.jit
def log1p(a):
    """Return log(1 + a) for a >= 0, accurate for small a too: the quotient corrects the rounding of 1 + a."""
    whole = 1.0 + a
    return tl.where(whole == 1.0, a, tl.log2(whole) * LN_2 * (a / (whole - 1.0)))


@triton.jit
def tile_needs_mask(pairs, row, column, IS_LOCAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return whether some pair of the tile may not be a negative: it is beyond the edge, a positive, or may have equal ids."""
    needs_mask = (row + M > pairs.rows) | (column + N > pairs.columns)
    if IS_LOCAL:
        needs_mask = needs_mask | ((row + pairs.shift < column + N) & (column < row + pairs.shift + M))
    if pairs.matches is not None:
        tile = (row // M) * tl.cdiv(pairs.columns, N) + column // N
        needs_mask = needs_mask | (tl.load(pairs.matches + tile) != 0)
    return needs_mask


@triton.jit
def others(pairs, row, column, IS_LOCAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return the mask of the pairs inside the panel that are not the positives themselves."""
    i, j = row + tl.arange(0, M), column + tl.arange(0, N)
    mask = (i < pairs.rows)[:, None] & (j < pairs.columns)[None, :]
    if IS_LOCAL:
        mask = mask & ((i + pairs.shift)[:, None] != j[None, :])
    return mask


@triton.jit
def negatives(pairs, row, column, IS_LOCAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return the mask of the pairs inside the panel that are neither positives nor equal in id."""
    mask = others(pairs, row, column, IS_LOCAL, M, N)
    if pairs.ids_M is not None:
        mask = mask & ~_equal_ids(pairs, row, column, M, N)
    return mask


@triton.jit
def further_positives(pairs, row, column, IS_LOCAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return the mask of the pairs with equal ids that are not the positive itself."""
    return others(pairs, row, column, IS_LOCAL, M, N) & _equal_ids(pairs, row, column, M, N)


@triton.jit
def negative_similarities(z, needs_mask, pairs, row, column, IS_LOCAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return the similarities of negatives, -inf elsewhere."""
    # If an accumulator passes a branch unchanged, the compiler waits for the product in every step of its loop. Adding zero avoids
    # it.
    z_negative = z + 0.0
    if needs_mask:
        z_negative = tl.where(negatives(pairs, row, column, IS_LOCAL, M, N), z_negative, float("-inf"))
    return z_negative


@triton.jit
def masked_logits(
    to_logits, z, needs_mask, pairs, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return the logits as rows and as columns count them."""
    logits = z * to_logits.factor - to_logits.offset
    column_logits = logits
    if DROP:
        droppable = tl.full((M, N), True, tl.int1)
        if MULTI_POSITIVE:
            droppable = negatives(pairs, row, column, IS_LOCAL, M, N)
        limit = load_vector(pairs.positive_M, row, pairs.rows, M) + pairs.margin
        logits = tl.where(droppable & (z > limit[:, None]), float("-inf"), logits)
        if pairs.positive_N is not None:
            limit = load_vector(pairs.positive_N, column, pairs.columns, N) + pairs.margin
            column_logits = tl.where(droppable & (z > limit[None, :]), float("-inf"), column_logits)
    if needs_mask:
        if MULTI_POSITIVE:
            counted = others(pairs, row, column, IS_LOCAL, M, N)
        else:
            counted = negatives(pairs, row, column, IS_LOCAL, M, N)
        logits = tl.where(counted, logits, float("-inf"))
        if DROP:
            column_logits = tl.where(counted, column_logits, float("-inf"))
    if not DROP:
        column_logits = logits
    return Logits(logits, column_logits)


@triton.jit
def _equal_ids(pairs, row, column, M: tl.constexpr, N: tl.constexpr):
    i, j = row + tl.arange(0, M), column + tl.arange(0, N)
    equal = tl.full((M, N), True, tl.int1)
    for half in tl.static_range(2):
        half_M = tl.load(pairs.ids_M + 2 * i.to(tl.int64) + half, mask=i < pairs.rows, other=0)
        half_N = tl.load(pairs.ids_N + 2 * j.to(tl.int64) + half, mask=j < pairs.columns, other=0)
        equal = equal & (half_M[:, None] == half_N[None, :])
    return equal


@triton.jit
def mark_fallback(needs_fallback, place, where):
    """Set marks at places of a tile. All tiles share the same places, and all write the same value."""
    tl.store(needs_fallback + place, 1, mask=where)


@triton.jit
def any_fallback(needs_fallback, LENGTH: tl.constexpr):
    """Return whether some tile has set a mark."""
    return tl.max(tl.load(needs_fallback + tl.arange(0, LENGTH)), 0) != 0


@triton.jit
def exp_offset(scale):
    """Return what fast launches subtract from logits."""
    return tl.minimum(tl.maximum(tl.abs(scale) - HIGHEST_LOGIT, 0.0), LARGEST_OFFSET)


@triton.jit
def exp_peak_out_of_range(peak, offset):
    """Return whether exp(s - offset) of logits below such a peak may overflow, or underflow where it counts."""
    return (peak - offset < LOWEST_PEAK) | (peak - offset > HIGHEST_PEAK)


@triton.jit
def unshifted_gain(gain, peak, offset):
    """Return the factor for exp(s - offset) that `gain` is for exp(s - peak)."""
    return gain * tl.exp2((offset - peak) * LOG2_E)


@triton.jit
def exp_sum_out_of_range(total):
    """Return which sums of exp(s - offset) are so large that a term overflowed, or so small that one may have underflowed."""
    return (total < SMALLEST_SUM) | (total > LARGEST_SUM)
