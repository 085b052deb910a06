"""The kernel of the sigmoid loss: values and gradient from one pass. Legend: ../../contract.py; what a panel is: pairs.py.

With u = exp(logit), a pair costs log(1 + u) and has the slope u / (1 + u). The factors 1 + u of up to 64 pairs are multiplied
before one logarithm is taken, as log1p of what the product exceeds one by, which loses no digit of small costs. Where something
overflows, no finite value comes out and a mark is left in `trouble`. A careful launch follows always: without a mark it ends at
once, with one it computes those tiles in another way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pairs import further_positives, is_special, negatives, others, rivals
from .product import halves, put_block, side_by_side, similarities, tile_at
from .sums import bars, counts_of_columns, get, log1p, of_columns, of_rows, put_pair, unpacked

LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST_VALUE = tl.constexpr(2.0**100)
FACTORS = tl.constexpr(64)


@triton.jit(do_not_specialize=["rows", "columns", "shift", "stride"])
def sigmoid_kernel(
    x, y, scale, bias, gradient, weights_M, row_parts, column_parts, trouble, matches, ids_M, ids_N, positive_M, positive_N, margin,
    rows, columns, shift, stride,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, RANKED: tl.constexpr, CAREFUL: tl.constexpr,
    WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr,
    WARPS: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Writes values and slopes of each tile for its rows and, if there is room, the gradient in the logits.

    CAREFUL: only where a value is not finite.
    """
    factor, offset = tl.load(scale), tl.load(bias)
    if not CAREFUL:
        # In powers of two, but for the careful way, whose logits are too large for another rounding.
        factor, offset = factor * LOG2_E, offset * LOG2_E
    logit = (factor, offset)
    panel = (matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns, shift)
    outputs = (gradient, stride, weights_M, row_parts, column_parts, trouble)
    tiles = tl.cdiv(rows, M) * tl.cdiv(columns, N)
    if CAREFUL:
        tiles = tl.where(tl.load(trouble) == 0, 0, tiles)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=not CAREFUL):
        row, column = tile_at(t, rows, columns, M, N, GROUP)
        wanted = True
        if CAREFUL:
            value = get(row_parts, 0, column // N, tl.cdiv(columns, N), row + tl.arange(0, M), rows)
            wanted = tl.max(_overflowed(value).to(tl.int32), 0) > 0
        if wanted:
            z = similarities(x, y, row, column, rows, columns, WIDTH, M, N, K, DESCRIBED, PRECISION)
            special = is_special(panel, row, column, HOME, M, N)
            _put_sums(
                z, special, logit, outputs, panel, row, column,
                HOME, SEVERAL, RANKED, CAREFUL, M, N, PIECES, WARPS, DESCRIBED, ROUND_TO_TF32,
            )  # fmt: skip


@triton.jit
def _put_sums(
    z, special, logit, outputs, panel, row, column,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, RANKED: tl.constexpr, CAREFUL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PIECES: tl.constexpr, WARPS: tl.constexpr, DESCRIBED: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Puts the sums of a tile's rows, having collected those of its pieces."""
    _, _, _, row_parts, _, trouble = outputs
    _, _, _, positive_M, _, _, rows, columns, _ = panel
    i, across = row + tl.arange(0, M), tl.cdiv(columns, N)
    bar_M = bars(positive_M, i, rows)
    value, slope, hardest, ahead = _sums(
        z, special, bar_M, logit, outputs, panel, row, column,
        HOME, SEVERAL, RANKED, CAREFUL, M, N, PIECES, WARPS, DESCRIBED, ROUND_TO_TF32,
    )  # fmt: skip
    put_pair(row_parts, 0, column // N, across, i, rows, value, tl.sum(slope, 1))
    if not CAREFUL:
        tl.store(trouble + tl.zeros((M,), tl.int32), 1, mask=_overflowed(value))
    if RANKED:
        put_pair(row_parts, 2, column // N, across, i, rows, tl.max(hardest, 1), tl.sum(ahead, 1).to(tl.float32))


@triton.jit
def _sums(
    z, special, bar_M, logit, outputs, panel, row, column,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, RANKED: tl.constexpr, CAREFUL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PIECES: tl.constexpr, WARPS: tl.constexpr, DESCRIBED: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Values, slopes and rankings of rows; what is not wanted repeats the slopes. Rankings of columns are put, of two pieces at
    once: for less, warps wait too often, and more takes registers."""
    if PIECES > 1:
        left, right = halves(z, M, N)
        middle = column + N // 2
        if PIECES > 2:
            a = _sums(
                left, special, bar_M, logit, outputs, panel, row, column,
                HOME, SEVERAL, RANKED, CAREFUL, M, N // 2, PIECES // 2, WARPS, DESCRIBED, ROUND_TO_TF32,
            )  # fmt: skip
            b = _sums(
                right, special, bar_M, logit, outputs, panel, row, middle,
                HOME, SEVERAL, RANKED, CAREFUL, M, N // 2, PIECES // 2, WARPS, DESCRIBED, ROUND_TO_TF32,
            )  # fmt: skip
        else:
            a = _sums_of_piece(
                left, special, bar_M, logit, outputs, panel, row, column,
                HOME, SEVERAL, RANKED, CAREFUL, M, N // 2, WARPS, DESCRIBED, ROUND_TO_TF32,
            )  # fmt: skip
            b = _sums_of_piece(
                right, special, bar_M, logit, outputs, panel, row, middle,
                HOME, SEVERAL, RANKED, CAREFUL, M, N // 2, WARPS, DESCRIBED, ROUND_TO_TF32,
            )  # fmt: skip
            if RANKED:
                _put_columns(side_by_side(a[4], b[4]), side_by_side(a[5], b[5]), outputs, panel, row, column, M, N, PIECES)
        sums = a[0] + b[0], a[1] + b[1], tl.maximum(a[2], b[2]), a[3] + b[3]
    else:
        a = _sums_of_piece(
            z, special, bar_M, logit, outputs, panel, row, column,
            HOME, SEVERAL, RANKED, CAREFUL, M, N, WARPS, DESCRIBED, ROUND_TO_TF32,
        )  # fmt: skip
        if RANKED:
            _put_columns(a[4], a[5], outputs, panel, row, column, M, N, PIECES)
        sums = a[0], a[1], a[2], a[3]
    return sums


@triton.jit
def _put_columns(hardest, ahead, outputs, panel, row, column, M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr):
    _, _, _, _, column_parts, _ = outputs
    _, _, _, _, _, _, rows, columns, _ = panel
    ahead = unpacked(tl.sum(ahead, 0), M, N, PIECES).to(tl.float32)
    put_pair(column_parts, 0, row // M, tl.cdiv(rows, M), column + tl.arange(0, N), columns, tl.max(hardest, 0), ahead)


@triton.jit
def _sums_of_piece(
    z, special, bar_M, logit, outputs, panel, row, column,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, RANKED: tl.constexpr, CAREFUL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WARPS: tl.constexpr, DESCRIBED: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """`logit` is the factor and the offset that make a logit of a similarity."""
    factor, offset = logit
    gradient, stride, weights_M, _, _, _ = outputs
    _, _, _, _, positive_N, _, rows, columns, _ = panel
    i, j = row + tl.arange(0, M), column + tl.arange(0, N)
    bar_N = bars(positive_N, j, columns)
    logits = z * factor + offset
    if special:
        if SEVERAL:
            # A further positive costs what a negative of the opposite logit would.
            logits = tl.where(further_positives(panel, row, column, HOME, M, N), -logits, logits)
            counted = others(panel, row, column, HOME, M, N)
        else:
            counted = negatives(panel, row, column, HOME, M, N)
        logits = tl.where(counted, logits, float("-inf"))
    if CAREFUL:
        u = tl.exp2(-tl.abs(logits) * LOG2_E)
        g = tl.where(logits > 0, 1.0, u) / (1.0 + u)
        value = tl.sum(tl.maximum(logits, 0.0), 1) + tl.sum(log1p(_product(u, M, N)), 1)
    else:
        u = tl.exp2(logits)
        # The square of a reciprocal root takes fewer instructions than a division.
        root = tl.rsqrt(1.0 + u)
        g = u * root * root
        value = tl.sum(log1p(_product(u, M, N)), 1)
    if SEVERAL:
        if special:
            g = tl.where(further_positives(panel, row, column, HOME, M, N), -g, g)
    slope = of_rows(g, False, M, N)
    if gradient is not None:
        if weights_M is not None:
            g *= tl.load(weights_M + i, mask=i < rows, other=0.0)[:, None]
        put_block((gradient, stride), g, row, column, rows, columns, M, N, DESCRIBED, ROUND_TO_TF32)
    hardest, ahead, column_hardest, column_ahead = slope, slope, slope, slope
    if RANKED:
        found = rivals(z, special, panel, row, column, HOME, M, N)
        hardest, ahead = of_rows(found, True, M, N), of_rows((found >= bar_M[:, None]).to(tl.int32), False, M, N)
        column_hardest = of_columns(found, True, M, N, WARPS)
        column_ahead = counts_of_columns((found >= bar_N[None, :]).to(tl.int32), M, N, WARPS)
    return value, slope, hardest, ahead, column_hardest, column_ahead


@triton.jit
def _overflowed(value):
    # Not "larger than": what overflowed may have become no number at all.
    return (value < LARGEST_VALUE) == 0


@triton.jit
def _product(u, M: tl.constexpr, N: tl.constexpr):
    """What the products of up to FACTORS neighbouring 1 + u exceed one by."""
    neighbours: tl.constexpr = FACTORS if N > FACTORS else N
    return tl.reduce(tl.reshape(u, (M, N // neighbours, neighbours)), 2, _product_of_two)


@triton.jit
def _product_of_two(a, b):
    return a + b + a * b
