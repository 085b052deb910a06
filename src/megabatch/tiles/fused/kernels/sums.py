"""Sums over tiles: each tile writes its part, and a second small kernel adds the parts up in a fixed order, so runs are bit-equal.

Parts come in pairs of channels, (pair, 2, tile, row), of one of four kinds.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# A sum of exponentials as they are, after an unwritten peak; or with a peak taken out, and then the sum has a minus.
EXPONENTIALS = tl.constexpr(0)
RANKING = tl.constexpr(1)  # a maximum, and a number
COUNTED = tl.constexpr(2)  # a sum, and a number
SUMS = tl.constexpr(3)  # two sums


@triton.jit
def put(parts, channel, tile, tiles, i, length, values):
    """Writes a tile's values for rows i."""
    tl.store(parts + (channel * tiles + tile).to(tl.int64) * length + i, values, mask=i < length)


@triton.jit
def put_pair(parts, channel, tile, tiles, i, length, first, second):
    """Writes a tile's values for rows i into two neighbouring channels."""
    put(parts, channel, tile, tiles, i, length, first)
    put(parts, channel + 1, tile, tiles, i, length, second)


@triton.jit
def get(parts, channel, tile, tiles, i, length):
    """A tile's values for rows i, as they were put."""
    return tl.load(parts + (channel * tiles + tile).to(tl.int64) * length + i, mask=i < length, other=0.0)


@triton.jit
def vector(values, first, length, WIDTH: tl.constexpr):
    """The values from the first on, zero beyond their end."""
    i = first + tl.arange(0, WIDTH)
    return tl.load(values + i, mask=i < length, other=0.0)


@triton.jit
def bars(positive, first, length, WIDTH: tl.constexpr):
    """The similarities that rivals are compared with, where there are any: loaded long before they are needed."""
    found = first
    if positive is not None:
        found = vector(positive, first, length, WIDTH)
    return found


@triton.jit
def bars_of_piece(positive, first, length, WIDTH: tl.constexpr):
    """The same for the columns of a piece, which every thread needs several of: two in a load, unless the panel ends here."""
    found = first
    if positive is not None:
        inside = first + WIDTH <= length
        found = tl.load(positive + first + tl.arange(0, WIDTH), mask=inside, other=0.0)
        if not inside:
            found = vector(positive, first, length, WIDTH)
    return found


@triton.jit(do_not_specialize=["tiles", "length", "stride", "other_tiles", "other_length", "other_stride"])
def merge_kernel(
    parts, sums, numbers, tiles, length, stride, other_parts, other_sums, other_numbers, other_tiles, other_length, other_stride,
    PAIRS: tl.constexpr, KINDS: tl.constexpr, FIRST: tl.constexpr,
    OTHER_PAIRS: tl.constexpr, OTHER_KINDS: tl.constexpr, OTHER_FIRST: tl.constexpr, T: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Merges the parts of all tiles into `sums` (pair, 2, row) and `numbers` (pair, row), and with what they hold if not FIRST.

    KINDS: the kind of each pair, two bits each. A pair's number is kept in `numbers`, everything else in `sums`. What is said of
    the others, if there are any, is the same for columns: one launch for both.
    """
    blocks = tl.cdiv(length, R)
    if tl.program_id(0) < blocks:
        i = tl.program_id(0) * R + tl.arange(0, R)
        for pair in tl.static_range(PAIRS):
            _merge_pair(parts, sums, numbers, i, tiles, length, stride, pair, (KINDS >> (2 * pair)) % 4, FIRST, T, R)
    elif other_parts is not None:
        i = (tl.program_id(0) - blocks) * R + tl.arange(0, R)
        for pair in tl.static_range(OTHER_PAIRS):
            _merge_pair(
                other_parts, other_sums, other_numbers, i, other_tiles, other_length, other_stride,
                pair, (OTHER_KINDS >> (2 * pair)) % 4, OTHER_FIRST, T, R,
            )  # fmt: skip


@triton.jit
def _merge_pair(
    parts, sums, numbers, i, tiles, length, stride, pair: tl.constexpr, KIND: tl.constexpr, FIRST: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    inside = i < length
    t = tl.arange(0, T)
    LOWEST: tl.constexpr = float("-inf") if KIND < 2 else 0.0
    HAS_NUMBER: tl.constexpr = (KIND == 1) | (KIND == 2)
    first, second = sums + 2 * pair * stride + i, sums + (2 * pair + 1) * stride + i
    if HAS_NUMBER:
        second = numbers + pair * stride + i
    a = tl.full((R,), LOWEST, tl.float32)
    b = tl.zeros((R,), tl.int64 if HAS_NUMBER else tl.float32)
    if not FIRST:
        a = tl.load(first, mask=inside, other=0.0)
        b = tl.load(second, mask=inside, other=0)
    for start in range(0, tiles, T):
        here = parts + (2 * pair * tiles + start + t).to(tl.int64)[:, None] * length + i[None, :]
        mask = (start + t < tiles)[:, None] & inside[None, :]
        part_b = tl.load(here + tiles.to(tl.int64) * length, mask=mask, other=0.0)
        if KIND == 0:
            # A total with a minus has a peak of its own; others are sums of exponentials as they are.
            part_a = tl.where(part_b > 0, 0.0, float("-inf"))
            part_a = tl.where(part_b < 0, tl.load(here, mask=part_b < 0, other=0.0), part_a)
            part_b = tl.abs(part_b)
            peak = tl.maximum(a, tl.max(part_a, 0))
            anchor = tl.where(peak == float("-inf"), 0.0, peak)
            b = b * tl.exp2((a - anchor) * LOG2_E) + tl.sum(part_b * tl.exp2((part_a - anchor[None, :]) * LOG2_E), 0)
            a = peak
        else:
            part_a = tl.load(here, mask=mask, other=LOWEST)
            if KIND == 1:
                a = tl.maximum(a, tl.max(part_a, 0))
            else:
                a += tl.sum(part_a, 0)
            b += tl.sum(part_b, 0).to(b.dtype)
    if KIND == 0:
        # The peak moves to the log-sum-exp, as far as fp32 can hold it there, and the total to about one.
        lifted = tl.where(b > 0, a + tl.log2(b) * LN_2, a)
        anchor = tl.where(lifted == float("-inf"), 0.0, lifted)
        b *= tl.exp2((a - anchor) * LOG2_E)
        a = lifted
    tl.store(first, a, mask=inside)
    tl.store(second, b, mask=inside)


@triton.jit
def log1p(a):
    """log(1 + a) for a >= 0, exact also where a is small: what rounding 1 + a changes, the quotient takes back."""
    whole = 1.0 + a
    return tl.where(whole == 1.0, a, tl.log2(whole) * LN_2 * (a / (whole - 1.0)))
