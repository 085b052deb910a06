"""The fast launch of ../stats.py on Hopper, where exponentials are all that is summed up and nothing is kept."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..stats import LARGEST_SUM, LEAST_SUM
from ..sums import LOG2_E
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
def stats_kernel(
    x, y, scale, row_parts, column_parts, trouble, matches, ids_M, ids_N, rows, columns, shift,
    HOME: gl.constexpr, WIDTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """Writes the sums of each tile for its rows and, if there is room for them, for its columns."""
    rings = open_rings(x, y, M, N, K, X_SLOTS, Y_SLOTS)
    panel = (matches, ids_M, ids_N, rows, columns, shift)
    parts = (row_parts, column_parts, trouble)
    gl.warp_specialize(
        [
            (_sum_up, (rings, scale, parts, panel, gl.constexpr(0), HOME, WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS)),
            (_sum_up, (rings, scale, parts, panel, gl.constexpr(1), HOME, WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS)),
            (load_rows, (x, rings, rows, columns, gl.constexpr(0), WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, BEHIND)),
            (load_rows, (x, rings, rows, columns, gl.constexpr(1), WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, BEHIND)),
            (load_columns, (y, rings, rows, columns, WIDTH, M, N, K, GROUP, Y_SLOTS)),
        ],
        WARPS,
        REGISTERS,
    )


@gluon.jit
def _sum_up(
    rings, scale, parts, panel, WHO: gl.constexpr, HOME: gl.constexpr, WIDTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    K: gl.constexpr, GROUP: gl.constexpr, X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr,
):  # fmt: skip
    row_parts, column_parts, trouble = parts
    _, _, _, rows, columns, _ = panel
    layout: gl.constexpr = layout_of_tile(M, N)
    # In powers of two.
    factor = gl.load(scale) * LOG2_E
    within = gl.arange(0, M, gl.SliceLayout(1, layout))
    z = gl.zeros((M, N), gl.float32, layout)
    for n in range(pairs_of_tiles(rows, columns, M, N)):
        row, column = pair_at(n, rows, columns, M, N, GROUP)
        row += WHO * M
        z = similarities(z, n, rings, WHO, WIDTH, K, X_SLOTS, Y_SLOTS)
        power = gl.exp2(z * factor)
        if is_special(panel, row, column, HOME, M, N, N):
            power = gl.where(negatives(panel, row, column, HOME, M, N, layout), power, 0.0)
        total = gl.sum(power, 1)
        _put(row_parts, trouble, column // N, gl.cdiv(columns, N), row + within, within, rows, total)
        if column_parts is not None:
            total = _of_columns(power, M, N)
            across = gl.arange(0, N, total.type.layout)
            if row < rows:
                _put(column_parts, trouble, row // M, gl.cdiv(rows, M), column + across, across, columns, total)
        # The next product takes its place, so that z itself is not kept until then.
        z = power


@gluon.jit
def _of_columns(power, M: gl.constexpr, N: gl.constexpr):
    """Sums of columns: what a thread can add up alone, then eight threads, then four warps."""
    alone = gl.sum(gl.sum(gl.reshape(power, (M // 64, 4, 2, 8, N)), 2), 0)
    left, right = gl.split(gl.permute(gl.reshape(alone, (4, 2, 4, 2, N // 2)), (0, 1, 2, 4, 3)))
    left, right = gl.split(gl.permute(gl.reshape(_shared(left, right), (8, 2, 2, 2, N // 4)), (0, 1, 2, 4, 3)))
    left, right = gl.split(gl.permute(gl.reshape(_shared(left, right), (16, 2, 1, 2, N // 8)), (0, 1, 2, 4, 3)))
    return gl.sum(gl.reshape(_shared(left, right), (4, N)), 0)


@gluon.jit
def _shared(first, second):
    """Along the second axis, of two: of `first` in its first place, of `second` in its second."""
    place = gl.arange(0, 2)[None, :, None, None]
    kept, given = gl.where(place == 0, first, second), gl.where(place == 0, second, first)
    bits = given.to(gl.int32, bitcast=True)
    return kept + (bits ^ gl.expand_dims(gl.xor_sum(bits, 1), 1)).to(gl.float32, bitcast=True)


@gluon.jit
def _put(parts, trouble, tile, tiles, i, within, length, total):
    """Writes a tile's sums for rows (columns) i, and a mark where they have lost something."""
    inside = i < length
    gl.store(parts + (tiles + tile).to(gl.int64) * length + i, total, mask=inside)
    gl.store(trouble + within, 1, mask=inside & ((total < LEAST_SUM) | (total > LARGEST_SUM)))
