"""The fast launch of ../gradient.py on Hopper, for bf16 and pairs that all count alike: without further positives, none dropped."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..sums import LOG2_E
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


@gluon.jit(do_not_specialize=["rows", "columns", "shift"])
def gradient_kernel(
    x, y, scale, gradient, row_gain, row_counted, column_gain, column_counted, row_step, column_step, limit, large, matches,
    ids_M, ids_N, rows, columns, shift,
    IS_LOCAL: gl.constexpr, WIDTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr, BEHIND: gl.constexpr, PLACES: gl.constexpr, MARKED: gl.constexpr,
):  # fmt: skip
    """Writes the gradient in the logits, zero for pairs that do not count and for positives. Gains come lifted.

    x and y of eight bits, in steps: says in `large`, for every tile and row, whether some gradient is above the limit.
    """
    rings = open_rings(x, y, M, N, K, X_SLOTS, Y_SLOTS)
    places = open_places(gradient, M, N, PLACES)
    panel = (matches, ids_M, ids_N, rows, columns, shift)
    softmax = (row_gain, row_counted, column_gain, column_counted)
    eight = (row_step, column_step, limit, large)
    gl.warp_specialize(
        [
            (_weigh, (rings, scale, gradient, places, softmax, eight, panel, gl.constexpr(0), IS_LOCAL, WIDTH, M, N, K, GROUP,
                      X_SLOTS, Y_SLOTS, PLACES, MARKED)),
            (_weigh, (rings, scale, gradient, places, softmax, eight, panel, gl.constexpr(1), IS_LOCAL, WIDTH, M, N, K, GROUP,
                      X_SLOTS, Y_SLOTS, PLACES, MARKED)),
            (load_rows, (x, rings, rows, columns, gl.constexpr(0), WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, BEHIND)),
            (load_rows, (x, rings, rows, columns, gl.constexpr(1), WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, BEHIND)),
            (load_columns, (y, rings, rows, columns, WIDTH, M, N, K, GROUP, Y_SLOTS)),
        ],
        WARPS,
        REGISTERS,
    )  # fmt: skip


@gluon.jit
def _weigh(
    rings, scale, gradient, places, softmax, eight, panel, WHO: gl.constexpr, IS_LOCAL: gl.constexpr, WIDTH: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr,
    PLACES: gl.constexpr, MARKED: gl.constexpr,
):  # fmt: skip
    row_gain, row_counted, column_gain, column_counted = softmax
    row_step, column_step, limit, large = eight
    _, _, _, rows, columns, _ = panel
    QUARTER: gl.constexpr = N // 4
    layout: gl.constexpr = layout_of_tile(M, QUARTER)
    down, across = gl.arange(0, M, gl.SliceLayout(1, layout)), gl.arange(0, QUARTER, gl.SliceLayout(0, layout))
    # In powers of two.
    factor = gl.load(scale) * LOG2_E
    z = gl.zeros((M, N), gl.float32, layout_of_tile(M, N))
    for n in range(pairs_of_tiles(rows, columns, M, N)):
        row, column = pair_at(n, rows, columns, M, N, GROUP)
        row += WHO * M
        i = row + down
        # Asked for before the product, gains are there after it. They are given for whole pairs of tiles, beyond the panel's edges.
        gains_M, gains_N = gl.load(row_gain + i), row_gain
        if column_gain is not None:
            gains_N = _in_quarters(column_gain, column + across, QUARTER)
        if row_step is None:
            z = similarities(z, n, rings, WHO, WIDTH, K, X_SLOTS, Y_SLOTS)
            parts = quarters(z, M, N)
        else:
            factors_M, steps_N = factor * gl.load(row_step + i), _in_quarters(column_step, column + across, QUARTER)
            # In the place of the product before, that would have to stay as it is, beside what is made of it.
            nothing = gl.zeros((M, N), gl.int32, layout_of_tile(M, N, 8))
            parts = quarters(similarities(nothing, n, rings, WHO, WIDTH, K, X_SLOTS, Y_SLOTS), M, N)
        special = is_special(panel, row, column, IS_LOCAL, M, N, MARKED)
        for q in gl.static_range(4):
            first = column + q * QUARTER
            gains = gains_M[:, None]
            if column_gain is not None:
                gains = gains + gains_N[q][None, :]
            if row_step is None:
                g = gl.exp2(parts[q] * factor) * gains
            else:
                g = gl.exp2(parts[q].to(gl.float32) * (factors_M[:, None] * steps_N[q][None, :])) * gains
            if row_counted is not None:
                g -= _vector(row_counted, i, rows)[:, None]
                if column_counted is not None:
                    g -= _vector(column_counted, first + across, columns)[None, :]
            if special:
                g = gl.where(negatives(panel, row, first, IS_LOCAL, M, QUARTER, layout), g, 0.0)
            if row_step is not None:
                if q == 0:
                    most = _folded(g, M, QUARTER)
                else:
                    most = gl.maximum(most, _folded(g, M, QUARTER))
            put_quarter(g, gradient, places, row, first, WHO, q, PLACES)
        if row_step is not None:
            place = (column // N).to(gl.int64) * rows + i
            most_M = gl.convert_layout(gl.max(most, 1), gl.SliceLayout(1, layout), assert_trivial=True)
            gl.store(large + place, (most_M > gl.load(limit)).to(gl.int8), mask=i < rows)
    wait_for_quarters()


@gluon.jit
def _in_quarters(values, i, QUARTER: gl.constexpr):
    """What there is for the columns of a tile's quarters; i: of the first."""
    here = values + i
    return gl.load(here), gl.load(here + QUARTER), gl.load(here + 2 * QUARTER), gl.load(here + 3 * QUARTER)


@gluon.jit
def _folded(values, M: gl.constexpr, N: gl.constexpr):
    """The larger of both halves, again and again, as far as a thread holds both."""
    if N > 8:
        left, right = gl.split(gl.permute(gl.reshape(values, (M, 2, N // 2)), (0, 2, 1)))
        folded = _folded(gl.maximum(left, right), M, N // 2)
    else:
        folded = values
    return folded


@gluon.jit
def _vector(values, i, length):
    return gl.load(values + i, mask=i < length, other=0.0)
