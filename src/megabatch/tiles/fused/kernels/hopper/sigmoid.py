"""The fast launch of ../sigmoid.py on Hopper, for bf16, with a gradient and pairs that all are negatives: none is ranked."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..logits import mark
from ..sigmoid import overflowed
from ..sums import LOG2_E, log1p, put_pair
from ..warp_reduce import PRODUCT, TOTAL, product
from .epilogue import open_places, put_quarter, quarters, wait_for_quarters
from .pipeline import (
    REGISTERS,
    WARPS,
    is_special,
    layout_of_tile,
    load_columns,
    load_rows,
    negatives,
    open_rings,
    pair_at,
    pairs_of_tiles,
    similarities,
)
from .warp_reduce import of_rows, row_order, rows_together


@gluon.jit(do_not_specialize=["rows", "columns", "shift"])
def sigmoid_kernel(
    x, y, scale, bias, gradient, weights_M, row_parts, needs_fallback, matches, ids_M, ids_N, rows, columns, shift,
    IS_LOCAL: gl.constexpr, WIDTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr, BEHIND: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """Writes values and slopes of each tile for its rows, and the gradient in the logits."""
    rings = open_rings(x, y, M, N, K, X_SLOTS, Y_SLOTS)
    places = open_places(gradient, M, N, PLACES)
    panel = (matches, ids_M, ids_N, rows, columns, shift)
    outputs = (gradient, places, weights_M, row_parts, needs_fallback)
    gl.warp_specialize(
        [
            (
                _weigh,
                (rings, scale, bias, outputs, panel, gl.constexpr(0), IS_LOCAL, WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, PLACES),
            ),
            (
                _weigh,
                (rings, scale, bias, outputs, panel, gl.constexpr(1), IS_LOCAL, WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, PLACES),
            ),
            (load_rows, (x, rings, rows, columns, gl.constexpr(0), WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, BEHIND)),
            (load_rows, (x, rings, rows, columns, gl.constexpr(1), WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, BEHIND)),
            (load_columns, (y, rings, rows, columns, WIDTH, M, N, K, GROUP, Y_SLOTS)),
        ],
        WARPS,
        REGISTERS,
    )


@gluon.jit
def _weigh(
    rings, scale, bias, outputs, panel, WHO: gl.constexpr, IS_LOCAL: gl.constexpr, WIDTH: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr,
    PLACES: gl.constexpr,
):  # fmt: skip
    _, _, _, row_parts, needs_fallback = outputs
    _, _, _, rows, columns, _ = panel
    layout: gl.constexpr = layout_of_tile(M, N)
    # In powers of two.
    factor, offset = gl.load(scale) * LOG2_E, gl.load(bias) * LOG2_E
    for n in range(pairs_of_tiles(rows, columns, M, N)):
        row, column = pair_at(n, rows, columns, M, N, GROUP)
        row += WHO * M
        # What the product takes the place of: the one before it would be kept until here.
        z = gl.zeros((M, N), gl.float32, layout)
        logits = similarities(z, n, rings, WHO, WIDTH, K, X_SLOTS, Y_SLOTS) * factor + offset
        # Once for the tile: between halves, a branch would keep exponentials and what is made of them apart.
        if is_special(panel, row, column, IS_LOCAL, M, N, N):
            logits = gl.where(negatives(panel, row, column, IS_LOCAL, M, N, layout), logits, float("-inf"))
        a, b, c, d = quarters(logits, M, N)
        left, slope = _put_half(a, b, outputs, row, column, rows, WHO, 0, M, N, PLACES)
        right, more = _put_half(c, d, outputs, row, column, rows, WHO, 2, M, N, PLACES)
        # One logarithm for half a row.
        value = log1p(rows_together(left, PRODUCT, M)) + log1p(rows_together(right, PRODUCT, M))
        within = row_order(M)
        slope = rows_together(slope + more, TOTAL, M)
        put_pair(row_parts, 0, column // N, gl.cdiv(columns, N), row + within, rows, value, slope)
        mark(needs_fallback, within, overflowed(value))
    wait_for_quarters()


@gluon.jit
def _put_half(
    a, b, outputs, row, column, rows,
    WHO: gl.constexpr, QUARTER: gl.constexpr, M: gl.constexpr, N: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """Puts the gradient of two quarters of a tile, of which QUARTER is the first, given their logits.

    Returns products and slopes of their rows, in parts.
    """
    gradient, places, weights_M, _, _ = outputs
    WIDE: gl.constexpr = N // 4
    layout: gl.constexpr = layout_of_tile(M, WIDE)
    a, b = gl.exp2(a), gl.exp2(b)
    a_times, b_times = a + a * b, b + a * b
    inverse, four = _inverses(a_times + b, M, WIDE, layout)
    a, b = a_times * inverse, b_times * inverse
    products, slopes = of_rows(four, PRODUCT, M, WIDE // 2, 1), of_rows(a + b, TOTAL, M, WIDE, 2)
    if weights_M is not None:
        i = row + gl.arange(0, M, gl.SliceLayout(1, layout))
        weights = gl.load(weights_M + i, mask=i < rows, other=0.0)[:, None]
        a, b = a * weights, b * weights
    put_quarter(a, gradient, places, row, column + QUARTER * WIDE, WHO, QUARTER, PLACES)
    put_quarter(b, gradient, places, row, column + (QUARTER + 1) * WIDE, WHO, QUARTER + 1, PLACES)
    return products, slopes


@gluon.jit
def _inverses(both, M: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """Of products of two, given as what they exceed one by: their inverses, and the same of four.

    One reciprocal serves the four, as in ../sigmoid.py two.
    """
    left, right = gl.split(gl.reshape(both, (M, N // 2, 2)))
    four = product(left, right)
    root = gl.rsqrt(1.0 + four)
    square = root * root
    inverse = gl.reshape(gl.join(square * (1.0 + right), square * (1.0 + left)), (M, N))
    return gl.convert_layout(inverse, layout, assert_trivial=True), four
