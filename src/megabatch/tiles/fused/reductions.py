"""Sums over rows and columns: within a tile by warp shuffles, then over tiles by a second small kernel.

Within a tile. Tensor cores leave a row of a product with four threads of a warp, which hold two neighbouring columns of every
eight, and a column with eight threads, which hold two rows of every sixteen. A warp has 16 neighbouring rows and, if M > 16 *
WARPS, as many of every 16 * WARPS. An all-reduce costs a shuffle for each doubling of the threads that share a sum. Here each
thread gives away half of its sums for half of its partner's, again and again, until it alone holds its sums: a third of the
shuffles, and almost nothing is left to exchange between warps. Only the speed depends on which thread holds what; the results do
not.

Over tiles. Each tile writes its partial sums, and `merge_kernel` adds them in a fixed order, so that runs are bit-equal. Partial
sums come as pairs of channels (pair, 2, tile, row) of one of four kinds. Legend: ../contract.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Pairs, Ranking
from .launch import Panel, cdiv, run_kernel
from .tile import LN_2, LOG2_E, exp_offset, load_vector

# Reductions over a row or a column. A product is that of 1 + a, where `a` is given and returned.
SUM, MAX, PRODUCT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# Kinds of pairs of channels: (max, encoded sum) of exponentials, see `encode_shifted_sum`; (max, count); (sum, count); two sums.
EXPONENTIALS, RANKING, COUNTED, SUMS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)

MERGED_ROWS, MERGED_TILES = 16, 128


@triton.jit
def reduce_rows(values, OP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, ADJACENT: tl.constexpr = 2):
    """Reduce rows to two parts each, (M // 16, 8, 2, 2). Parts of several pieces of a tile may be added; `finish_rows` combines
    them.

    ADJACENT: how many neighbouring columns a thread holds. One shuffle is done here, because the compiler would postpone what
    threads can do alone, and keep the values of all pieces in registers for it.
    """
    values = reduce_axis(reduce_axis(tl.reshape(values, (M // 16, 2, 8, N // (4 * ADJACENT), 4, ADJACENT)), 5, OP), 3, OP)
    upper, lower = tl.split(tl.permute(tl.reshape(values, (M // 16, 2, 8, 2, 2)), (0, 2, 3, 4, 1)))
    return _exchange(upper, lower, 2, OP)


@triton.jit
def finish_rows(values, OP: tl.constexpr, M: tl.constexpr, WARPS: tl.constexpr):
    """Combine the parts of rows. The result is in the order of `row_order`."""
    parts: tl.constexpr = WARPS if M > 16 * WARPS else M // 16
    again: tl.constexpr = M // 16 // parts
    if again == 2:
        upper, lower = tl.split(tl.permute(tl.reshape(values, (2, parts, 8, 2, 2)), (1, 2, 3, 4, 0)))
        values = tl.permute(_exchange(upper, lower, 3, OP), (0, 3, 2, 1))
    else:
        values = tl.permute(tl.reshape(reduce_axis(values, 3, OP), (again, parts, 8, 2)), (1, 0, 3, 2))
    return tl.reshape(values, (parts, again * 16))


@triton.jit
def row_order(M: tl.constexpr, WARPS: tl.constexpr):
    """Return the rows of a tile in the order in which warps hold them, so that writing them exchanges nothing between warps."""
    parts: tl.constexpr = WARPS if M > 16 * WARPS else M // 16
    within = tl.arange(0, M // parts)
    return tl.arange(0, parts)[:, None] * 16 + (within // 16 * (parts * 16) + within % 16)[None, :]


@triton.jit
def reduce_columns(values, OP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr):
    """Reduce columns to as many parts as warps share one, (parts, N); `finish_columns` combines them."""
    parts: tl.constexpr = WARPS if M > 16 * WARPS else M // 16
    values = reduce_axis(reduce_axis(tl.reshape(values, (M // 16 // parts, parts, 2, 8, N)), 2, OP), 0, OP)
    left, right = tl.split(tl.permute(tl.reshape(values, (parts, 2, 4, 2, N // 2)), (0, 1, 2, 4, 3)))
    values = tl.reshape(_exchange(left, right, 1, OP), (parts * 2, 2, 2, 2, N // 4))
    left, right = tl.split(tl.permute(values, (0, 1, 2, 4, 3)))
    left, right = tl.split(tl.reshape(_exchange(left, right, 1, OP), (parts * 4, 2, N // 8, 2)))
    return tl.reshape(tl.permute(_exchange(left, right, 1, OP), (0, 2, 1)), (parts, N))


@triton.jit
def finish_columns(values, OP: tl.constexpr):
    """Combine the parts of columns from all warps. Warps wait for each other here, so call it once per tile."""
    if values.shape[0] > 1:
        # `split` wants pairs in one thread, so all parts of a column go through shared memory at once.
        values = tl.reshape(values, (values.shape[0] // 2, 2, values.shape[1]))
        first, second = tl.split(tl.permute(values, (0, 2, 1)))
        combined = finish_columns(combine(first, second, OP), OP)
    else:
        combined = tl.reshape(values, (values.shape[1],))
    return combined


@triton.jit
def is_below(values, threshold):
    """Return 1 where a value is below the threshold, else 0: the sign bit of the difference takes fewer instructions than `<`."""
    return ((values - threshold).to(tl.uint32, bitcast=True) >> 31).to(tl.int32)


@triton.jit
def _exchange(first, second, AXIS: tl.constexpr, OP: tl.constexpr):
    """Reduce an axis of two: the result of `first` is at place 0, that of `second` at place 1. Each place gives half away."""
    place = tl.full(first.shape, 0, tl.int32)
    place += tl.reshape(tl.arange(0, 2), [1] * AXIS + [2] + [1] * (len(first.shape) - AXIS - 1))
    own, given = tl.where(place == 0, first, second), tl.where(place == 0, second, first)
    return combine(own, swap(given, AXIS), OP)


@triton.jit
def swap(values, AXIS: tl.constexpr):
    """Swap the two places along an axis by an xor-reduction, which compiles to one shuffle."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ tl.expand_dims(tl.xor_sum(bits, AXIS), AXIS)).to(values.dtype, bitcast=True)


@triton.jit
def reduce_axis(values, AXIS: tl.constexpr, OP: tl.constexpr):
    if OP == MAX:
        reduced = tl.max(values, AXIS)
    elif OP == PRODUCT:
        reduced = tl.reduce(values, AXIS, product)
    else:
        reduced = tl.sum(values, AXIS)
    return reduced


@triton.jit
def combine(a, b, OP: tl.constexpr):
    if OP == MAX:
        combined = tl.maximum(a, b)
    elif OP == PRODUCT:
        combined = product(a, b)
    else:
        combined = a + b
    return combined


@triton.jit
def product(a, b):
    """Return (1 + a)(1 + b) - 1."""
    return a + b + a * b


@triton.jit
def thresholds(positive, first, length, WIDTH: tl.constexpr):
    """Return the similarities of positives that negatives are compared with, or anything if there are none. Load them early."""
    values = first
    if positive is not None:
        values = load_vector(positive, first, length, WIDTH)
    return values


@triton.jit
def thresholds_of_piece(positive, first, length, WIDTH: tl.constexpr):
    """Return the same for the columns of a piece. Each thread needs several: two per load, unless the panel ends here."""
    values = first
    if positive is not None:
        inside = first + WIDTH <= length
        values = tl.load(positive + first + tl.arange(0, WIDTH), mask=inside, other=0.0)
        if not inside:
            values = load_vector(positive, first, length, WIDTH)
    return values


@triton.jit
def put(parts, channel, tile, tiles, i, length, values):
    """Write the partial sums of a tile for rows i into a channel."""
    tl.store(parts + (channel * tiles + tile).to(tl.int64) * length + i, values, mask=i < length)


@triton.jit
def put_pair(parts, channel, tile, tiles, i, length, first, second):
    """Write the partial sums of a tile for rows i into two neighbouring channels."""
    put(parts, channel, tile, tiles, i, length, first)
    put(parts, channel + 1, tile, tiles, i, length, second)


@triton.jit
def get(parts, channel, tile, tiles, i, length):
    """Return the partial sums of a tile for rows i."""
    return tl.load(parts + (channel * tiles + tile).to(tl.int64) * length + i, mask=i < length, other=0.0)


@triton.jit
def encode_shifted_sum(total):
    """Encode a sum of exp(s - max), to be stored beside its max.

    The fast launch stores plain sums of exp(s - offset) and leaves the channel of the max unwritten, which saves a store per row,
    column and tile. The sign, which no sum of exponentials needs, tells the two apart; a flag would be as much memory traffic as
    the max.
    """
    return -total


@triton.jit
def decode_sums(encoded, peaks, offset):
    """Return (max, sum of exp(s - max)) of encoded sums, with the offset as max of a plain sum and -inf of an empty one.

    peaks: where the max is.
    """
    peak = tl.where(encoded > 0, offset, float("-inf"))
    peak = tl.where(encoded < 0, tl.load(peaks, mask=encoded < 0, other=0.0), peak)
    return peak, tl.abs(encoded)


@triton.jit(do_not_specialize=["row_tiles", "row_length", "row_stride", "column_tiles", "column_length", "column_stride"])
def merge_kernel(
    row_parts, row_sums, row_counts, row_tiles, row_length, row_stride,
    column_parts, column_sums, column_counts, column_tiles, column_length, column_stride, scale,
    ROW_PAIRS: tl.constexpr, ROW_KINDS: tl.constexpr, ROW_FIRST: tl.constexpr,
    COLUMN_PAIRS: tl.constexpr, COLUMN_KINDS: tl.constexpr, COLUMN_FIRST: tl.constexpr, T: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Merge the partial sums of all tiles into sums (pair, 2, row) and counts (pair, row), and with their contents if not FIRST.

    scale: gives the offset of plain sums (tile.exp_offset); None if they have none. KINDS: the kind of each pair, two bits each.
    Counts of a pair go to `counts`, everything else to `sums`. One launch serves rows and columns.
    """
    blocks = tl.cdiv(row_length, R)
    offset = 0.0
    if scale is not None:
        offset = exp_offset(tl.load(scale))
    if tl.program_id(0) < blocks:
        i = tl.program_id(0) * R + tl.arange(0, R)
        for pair in tl.static_range(ROW_PAIRS):
            _merge_pair(
                row_parts, row_sums, row_counts, i, row_tiles, row_length, row_stride, offset,
                pair, (ROW_KINDS >> (2 * pair)) % 4, ROW_FIRST, T, R,
            )  # fmt: skip
    elif column_parts is not None:
        i = (tl.program_id(0) - blocks) * R + tl.arange(0, R)
        for pair in tl.static_range(COLUMN_PAIRS):
            _merge_pair(
                column_parts, column_sums, column_counts, i, column_tiles, column_length, column_stride, offset,
                pair, (COLUMN_KINDS >> (2 * pair)) % 4, COLUMN_FIRST, T, R,
            )  # fmt: skip


@triton.jit
def _merge_pair(
    parts, sums, counts, i, tiles, length, stride, offset, pair: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    inside = i < length
    t = tl.arange(0, T)
    LOWEST: tl.constexpr = float("-inf") if KIND < 2 else 0.0
    HAS_COUNT: tl.constexpr = (KIND == 1) | (KIND == 2)
    first, second = sums + 2 * pair * stride + i, sums + (2 * pair + 1) * stride + i
    if HAS_COUNT:
        second = counts + pair * stride + i
    a = tl.full((R,), LOWEST, tl.float32)
    b = tl.zeros((R,), tl.int64 if HAS_COUNT else tl.float32)
    if not FIRST:
        a = tl.load(first, mask=inside, other=0.0)
        b = tl.load(second, mask=inside, other=0)
    for start in range(0, tiles, T):
        place = parts + (2 * pair * tiles + start + t).to(tl.int64)[:, None] * length + i[None, :]
        mask = (start + t < tiles)[:, None] & inside[None, :]
        part_b = tl.load(place + tiles.to(tl.int64) * length, mask=mask, other=0.0)
        if KIND == 0:
            part_a, part_b = decode_sums(part_b, place, offset)
            peak = tl.maximum(a, tl.max(part_a, 0))
            anchor = tl.where(peak == float("-inf"), 0.0, peak)
            b = b * tl.exp2((a - anchor) * LOG2_E) + tl.sum(part_b * tl.exp2((part_a - anchor[None, :]) * LOG2_E), 0)
            a = peak
        else:
            part_a = tl.load(place, mask=mask, other=LOWEST)
            if KIND == 1:
                a = tl.maximum(a, tl.max(part_a, 0))
            else:
                a += tl.sum(part_a, 0)
            b += tl.sum(part_b, 0).to(b.dtype)
    if KIND == 0:
        # Move the peak to the log-sum-exp, as far as fp32 can represent it there, and the total to about one.
        log_sum_exp = tl.where(b > 0, a + tl.log2(b) * LN_2, a)
        anchor = tl.where(log_sum_exp == float("-inf"), 0.0, log_sum_exp)
        b *= tl.exp2((a - anchor) * LOG2_E)
        a = log_sum_exp
    tl.store(first, a, mask=inside)
    tl.store(second, b, mask=inside)


class Sums:
    """The sums of all tiles for each row of t: values (pair, 2, row) and counts (pair, row; None if no pair has any), merged over
    panels in a fixed order."""

    def __init__(self, t: Tensor, kinds: Sequence[int]) -> None:
        """kinds: of the pairs of channels."""
        self.kinds = kinds
        self.length = t.shape[0]
        self.values = t.new_empty(len(kinds), 2, self.length, dtype=torch.float32)
        has_counts = any(kind in (RANKING.value, COUNTED.value) for kind in kinds)
        self.counts = t.new_empty(len(kinds), self.length, dtype=torch.int64) if has_counts else None
        self.code = sum(kind << 2 * place for place, kind in enumerate(kinds))

    def bytes_per_cell(self, tile: int) -> float:
        """Return the workspace per cell of a panel, of which `tile` in a row share one partial sum."""
        return 8 * len(self.kinds) / tile

    def new_parts(self, tiles: int, length: int) -> Tensor:
        """Allocate the partial sums of a panel."""
        return self.values.new_empty(len(self.kinds), 2, tiles, length)

    def merge_args(self, parts: Tensor, where: slice) -> tuple[Any, ...]:
        """Return the arguments of `merge_kernel` for one side."""
        tiles, length = parts.shape[2:]
        values, counts = self.values, self.counts
        if length < self.length:
            values, counts = values[:, :, where], None if counts is None else counts[:, where]
        return parts, values, counts, tiles, length, self.length


def merge_parts(
    p: Panel,
    row_sums: Sums,
    row_parts: Tensor,
    column_sums: Sums | None,
    column_parts: Tensor | None,
    scale: Tensor | None = None,
) -> None:
    """Merge the partial sums of a panel's tiles into the sums of its rows and columns, which its first panel initialises.

    scale: gives the offset of exponentials (tile.exp_offset); None if they have none.
    """
    column_args: Sequence[Any] = (None, None, None, 0, 0, 0)
    constants = {"COLUMN_PAIRS": 0, "COLUMN_KINDS": 0, "COLUMN_FIRST": True}
    programs = cdiv(row_parts.shape[3], MERGED_ROWS)
    if column_sums is not None and column_parts is not None:
        column_args = column_sums.merge_args(column_parts, p.c)
        constants = {
            "COLUMN_PAIRS": len(column_sums.kinds),
            "COLUMN_KINDS": column_sums.code,
            "COLUMN_FIRST": p.r.start == 0,
        }
        programs += cdiv(column_parts.shape[3], MERGED_ROWS)
    if programs:
        run_kernel(
            merge_kernel,
            (programs,),
            *row_sums.merge_args(row_parts, p.r),
            *column_args,
            scale,
            ROW_PAIRS=len(row_sums.kinds),
            ROW_KINDS=row_sums.code,
            ROW_FIRST=p.c.start == 0,
            **constants,
            T=MERGED_TILES,
            R=MERGED_ROWS,
        )


def merge_empty(x_MD: Tensor, y_ND: Tensor, row_sums: Sums, column_sums: Sums | None) -> None:
    """Initialise the sums if one of the blocks is empty, so that there was no panel."""
    if x_MD.shape[0] and y_ND.shape[0]:
        return
    p = Panel(slice(0, x_MD.shape[0]), slice(0, y_ND.shape[0]))
    merge_parts(
        p, row_sums, row_sums.new_parts(0, p.rows), column_sums, column_sums.new_parts(0, p.columns) if column_sums else None
    )


def ranking(sums: Sums | None, place: int, pairs: Pairs) -> Ranking | None:
    """Return the ranking that a pair of channels holds, if there is one."""
    if sums is None or not pairs.ranked:
        return None
    assert sums.counts is not None
    return Ranking(sums.counts[place], sums.values[place, 0])
