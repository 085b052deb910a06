"""Sums and maxima of a tile's rows and columns: what threads do alone, and what they exchange.

Matrix units leave a row of a product with four threads of a warp, which hold two neighbouring columns of every eight, and a column
with eight threads, which hold two rows of every sixteen; a warp has 16 neighbouring rows, and `again` as many of every 16 * WARPS.
To let all of them know a sum costs an exchange for each doubling of the threads that share it. Here threads give away half of their
sums for half of their partner's, again and again, until each is alone with what it holds: a third of the exchanges, and next to
nothing is left to go from warp to warp.

Only the speed depends on who holds what. The functions say no more than which rows and columns go together.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What is made of a row or a column. A product is that of 1 + a, given and found as what it exceeds one by.
TOTAL, LARGEST, PRODUCT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def of_rows(values, OF: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BESIDE: tl.constexpr = 2):
    """Of rows, in two parts each, (M // 16, 8, 2, 2): other pieces of a tile add to them, and `rows_together` makes them whole.

    BESIDE: how many neighbouring columns a thread holds. One exchange is made here already: what threads can do alone, the compiler
    would put off, and keep the values of all pieces for it.
    """
    values = reduced(reduced(tl.reshape(values, (M // 16, 2, 8, N // (4 * BESIDE), 4, BESIDE)), 5, OF), 3, OF)
    upper, lower = tl.split(tl.permute(tl.reshape(values, (M // 16, 2, 8, 2, 2)), (0, 2, 3, 4, 1)))
    return _shared(upper, lower, 2, OF)


@triton.jit
def rows_together(values, OF: tl.constexpr, M: tl.constexpr, WARPS: tl.constexpr):
    """Of rows, from their parts, as `row_order` has them."""
    parts: tl.constexpr = WARPS if M > 16 * WARPS else M // 16
    again: tl.constexpr = M // 16 // parts
    if again == 2:
        upper, lower = tl.split(tl.permute(tl.reshape(values, (2, parts, 8, 2, 2)), (1, 2, 3, 4, 0)))
        values = tl.permute(_shared(upper, lower, 3, OF), (0, 3, 2, 1))
    else:
        values = tl.permute(tl.reshape(reduced(values, 3, OF), (again, parts, 8, 2)), (1, 0, 3, 2))
    return tl.reshape(values, (parts, again * 16))


@triton.jit
def row_order(M: tl.constexpr, WARPS: tl.constexpr):
    """The places of rows in a tile, those of each warp side by side: to be written so, nothing goes from warp to warp."""
    parts: tl.constexpr = WARPS if M > 16 * WARPS else M // 16
    within = tl.arange(0, M // parts)
    return tl.arange(0, parts)[:, None] * 16 + (within // 16 * (parts * 16) + within % 16)[None, :]


@triton.jit
def of_columns(values, OF: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr):
    """Of columns, in as many parts as warps share one, (parts, N): `columns_together` makes them whole."""
    parts: tl.constexpr = WARPS if M > 16 * WARPS else M // 16
    values = reduced(reduced(tl.reshape(values, (M // 16 // parts, parts, 2, 8, N)), 2, OF), 0, OF)
    left, right = tl.split(tl.permute(tl.reshape(values, (parts, 2, 4, 2, N // 2)), (0, 1, 2, 4, 3)))
    values = tl.reshape(_shared(left, right, 1, OF), (parts * 2, 2, 2, 2, N // 4))
    left, right = tl.split(tl.permute(values, (0, 1, 2, 4, 3)))
    left, right = tl.split(tl.reshape(_shared(left, right, 1, OF), (parts * 4, 2, N // 8, 2)))
    return tl.reshape(tl.permute(_shared(left, right, 1, OF), (0, 2, 1)), (parts, N))


@triton.jit
def columns_together(values, OF: tl.constexpr):
    """Of columns, from the parts of all warps, which wait for each other here: once for a tile is best."""
    if values.shape[0] > 1:
        # To be split, a tensor has its pairs in one thread: all of a column's parts go there at once.
        values = tl.reshape(values, (values.shape[0] // 2, 2, values.shape[1]))
        first, second = tl.split(tl.permute(values, (0, 2, 1)))
        found = columns_together(both(first, second, OF), OF)
    else:
        found = tl.reshape(values, (values.shape[1],))
    return found


@triton.jit
def behind(found, bar):
    """One where `found` is below the bar, else zero: the sign of their difference, in fewer instructions than a comparison."""
    return ((found - bar).to(tl.uint32, bitcast=True) >> 31).to(tl.int32)


@triton.jit
def _shared(first, second, AXIS: tl.constexpr, OF: tl.constexpr):
    """Along an axis of two: of `first` in its first place, of `second` in its second. Each place gives away half of what it has."""
    place = tl.full(first.shape, 0, tl.int32)
    place += tl.reshape(tl.arange(0, 2), [1] * AXIS + [2] + [1] * (len(first.shape) - AXIS - 1))
    kept, given = tl.where(place == 0, first, second), tl.where(place == 0, second, first)
    return both(kept, swapped(given, AXIS), OF)


@triton.jit
def swapped(values, AXIS: tl.constexpr):
    """The values of the other place along an axis of two: what the exclusive or of both and one's own leaves. One exchange."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ tl.expand_dims(tl.xor_sum(bits, AXIS), AXIS)).to(values.dtype, bitcast=True)


@triton.jit
def reduced(values, AXIS: tl.constexpr, OF: tl.constexpr):
    if OF == LARGEST:
        found = tl.max(values, AXIS)
    elif OF == PRODUCT:
        found = tl.reduce(values, AXIS, product)
    else:
        found = tl.sum(values, AXIS)
    return found


@triton.jit
def both(a, b, OF: tl.constexpr):
    if OF == LARGEST:
        found = tl.maximum(a, b)
    elif OF == PRODUCT:
        found = product(a, b)
    else:
        found = a + b
    return found


@triton.jit
def product(a, b):
    """Of what two factors exceed one by: by what their product does."""
    return a + b + a * b
