"""What threads exchange for the rows and columns of a tile, as in ../exchange.py, in Gluon and for groups of four warps."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..warp_reduce import TOTAL, both, reduced, swapped


@gluon.jit
def of_columns(values, M: gl.constexpr, N: gl.constexpr):
    """Sums of columns: what a thread can add up alone, then eight threads, then four warps."""
    alone = gl.sum(gl.sum(gl.reshape(values, (M // 64, 4, 2, 8, N)), 2), 0)
    left, right = gl.split(gl.permute(gl.reshape(alone, (4, 2, 4, 2, N // 2)), (0, 1, 2, 4, 3)))
    left, right = gl.split(gl.permute(gl.reshape(_shared(left, right, 1, TOTAL), (8, 2, 2, 2, N // 4)), (0, 1, 2, 4, 3)))
    left, right = gl.split(gl.permute(gl.reshape(_shared(left, right, 1, TOTAL), (16, 2, 1, 2, N // 8)), (0, 1, 2, 4, 3)))
    return gl.sum(gl.reshape(_shared(left, right, 1, TOTAL), (4, N)), 0)


@gluon.jit
def of_rows(values, OF: gl.constexpr, M: gl.constexpr, N: gl.constexpr, BESIDE: gl.constexpr):
    """Of rows, in two parts each, (M // 16, 8, 2, 2): other pieces of a tile add to them, and `rows_together` makes them whole.

    BESIDE: how many neighbouring columns a thread holds.
    """
    values = gl.reshape(values, (M // 16, 2, 8, N // (4 * BESIDE), 4, BESIDE))
    alone = gl.reshape(reduced(reduced(values, 5, OF), 3, OF), (M // 16, 2, 8, 2, 2))
    upper, lower = gl.split(gl.permute(alone, (0, 2, 3, 4, 1)))
    return _shared(upper, lower, 2, OF)


@gluon.jit
def rows_together(values, OF: gl.constexpr, M: gl.constexpr):
    """Of rows, from their parts, as `row_order` has them."""
    if M == 128:
        upper, lower = gl.split(gl.permute(gl.reshape(values, (2, 4, 8, 2, 2)), (1, 2, 3, 4, 0)))
        found = _shared(upper, lower, 3, OF)
    else:
        found = gl.expand_dims(reduced(values, 3, OF), 3)
    return found


@gluon.jit
def row_order(M: gl.constexpr):
    """The places of rows in a tile, (4, 8, 2, M // 64), so that none goes from warp to warp."""
    warp, within = gl.arange(0, 4)[:, None, None, None], gl.arange(0, 8)[None, :, None, None]
    return warp * 16 + within + gl.arange(0, 2)[None, None, :, None] * 8 + gl.arange(0, M // 64)[None, None, None, :] * 64


@gluon.jit
def _shared(first, second, AXIS: gl.constexpr, OF: gl.constexpr):
    """Along an axis of two: of `first` in its first place, of `second` in its second."""
    place = gl.reshape(gl.arange(0, 2), [1] * AXIS + [2] + [1] * (3 - AXIS))
    kept, given = gl.where(place == 0, first, second), gl.where(place == 0, second, first)
    return both(kept, swapped(given, AXIS), OF)
