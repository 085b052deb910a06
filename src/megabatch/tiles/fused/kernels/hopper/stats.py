"""The fast launch of ../stats.py on Hopper, for pairs that all count alike: nothing is kept or ranked, none dropped."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..stats import LARGEST_SUM, LEAST_SUM
from ..sums import LOG2_E, put
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
from .warp_reduce import of_columns


@gluon.jit(do_not_specialize=["rows", "columns", "shift"])
def stats_kernel(
    x, y, scale, row_parts, column_parts, needs_fallback, matches, ids_M, ids_N, rows, columns, shift,
    IS_LOCAL: gl.constexpr, SMOOTHED: gl.constexpr, WIDTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    GROUP: gl.constexpr, X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """Writes the sums of each tile for its rows and, if there is room for them, for its columns."""
    rings = open_rings(x, y, M, N, K, X_SLOTS, Y_SLOTS)
    panel = (matches, ids_M, ids_N, rows, columns, shift)
    parts = (row_parts, column_parts, needs_fallback)
    gl.warp_specialize(
        [
            (_sum_up, (rings, scale, parts, panel, gl.constexpr(0), IS_LOCAL, SMOOTHED, WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS)),
            (_sum_up, (rings, scale, parts, panel, gl.constexpr(1), IS_LOCAL, SMOOTHED, WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS)),
            (load_rows, (x, rings, rows, columns, gl.constexpr(0), WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, BEHIND)),
            (load_rows, (x, rings, rows, columns, gl.constexpr(1), WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, BEHIND)),
            (load_columns, (y, rings, rows, columns, WIDTH, M, N, K, GROUP, Y_SLOTS)),
        ],
        WARPS,
        REGISTERS,
    )


@gluon.jit
def _sum_up(
    rings, scale, parts, panel, WHO: gl.constexpr, IS_LOCAL: gl.constexpr, SMOOTHED: gl.constexpr, WIDTH: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr,
):  # fmt: skip
    _, column_parts, needs_fallback = parts
    _, _, _, rows, columns, _ = panel
    layout: gl.constexpr = layout_of_tile(M, N)
    # In powers of two.
    factor = gl.load(scale) * LOG2_E
    z = gl.zeros((M, N), gl.float32, layout)
    for n in range(pairs_of_tiles(rows, columns, M, N)):
        row, column = pair_at(n, rows, columns, M, N, GROUP)
        row += WHO * M
        z = similarities(z, n, rings, WHO, WIDTH, K, X_SLOTS, Y_SLOTS)
        special = is_special(panel, row, column, IS_LOCAL, M, N, N)
        if SMOOTHED:
            _put_counted(z, special, parts, panel, row, column, IS_LOCAL, M, N, layout)
        power = gl.exp2(z * factor)
        if special:
            power = gl.where(negatives(panel, row, column, IS_LOCAL, M, N, layout), power, 0.0)
        total = gl.sum(power, 1)
        _put_rows(parts, panel, 1, row, column, total, M, N)
        _mark(needs_fallback, row, rows, total, M)
        if column_parts is not None:
            total = of_columns(power, M, N)
            _put_columns(parts, panel, 1, row, column, total, M, N)
            if row < rows:
                _mark(needs_fallback, column, columns, total, N)
        # The next product takes its place, so that z itself is not kept until then.
        z = power


@gluon.jit
def _put_counted(
    z, special, parts, panel, row, column, IS_LOCAL: gl.constexpr, M: gl.constexpr, N: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Puts the sums of similarities that count, and their numbers."""
    _, column_parts, _ = parts
    total, number = gl.sum(z, 1), gl.full((M,), N, gl.int32, gl.SliceLayout(1, layout))
    if special:
        # Summed up again: the similarities themselves would be kept twice from here on.
        found = negatives(panel, row, column, IS_LOCAL, M, N, layout)
        total, number = gl.sum(gl.where(found, z, 0.0), 1), gl.sum(found.to(gl.int32), 1)
    _put_rows(parts, panel, 2, row, column, total, M, N)
    _put_rows(parts, panel, 3, row, column, number.to(gl.float32), M, N)
    if column_parts is not None:
        total = of_columns(z, M, N)
        number = gl.full((N,), M, gl.int32, total.type.layout)
        if special:
            found = negatives(panel, row, column, IS_LOCAL, M, N, layout)
            total, number = of_columns(gl.where(found, z, 0.0), M, N), of_columns(found.to(gl.int32), M, N)
        _put_columns(parts, panel, 2, row, column, total, M, N)
        _put_columns(parts, panel, 3, row, column, number.to(gl.float32), M, N)


@gluon.jit
def _put_rows(parts, panel, CHANNEL: gl.constexpr, row, column, values, M: gl.constexpr, N: gl.constexpr):
    row_parts, _, _ = parts
    _, _, _, rows, columns, _ = panel
    i = row + gl.arange(0, M, values.type.layout)
    put(row_parts, CHANNEL, column // N, gl.cdiv(columns, N), i, rows, values)


@gluon.jit
def _put_columns(parts, panel, CHANNEL: gl.constexpr, row, column, values, M: gl.constexpr, N: gl.constexpr):
    _, column_parts, _ = parts
    _, _, _, rows, columns, _ = panel
    j, tiles = column + gl.arange(0, N, values.type.layout), gl.cdiv(rows, M)
    # The second tile of a pair may lie below the panel.
    gl.store(column_parts + (CHANNEL * tiles + row // M).to(gl.int64) * columns + j, values, mask=(j < columns) & (row < rows))


@gluon.jit
def _mark(needs_fallback, first, length, total, SIZE: gl.constexpr):
    """Leaves marks where sums have lost something."""
    within = gl.arange(0, SIZE, total.type.layout)
    gl.store(needs_fallback + within, 1, mask=(first + within < length) & ((total < LEAST_SUM) | (total > LARGEST_SUM)))
