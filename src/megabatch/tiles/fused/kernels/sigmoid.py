"""The kernel of the sigmoid loss: values and gradient from one pass. Legend: ../../contract.py; what a panel is: pairs.py.

With u = exp(logit), a pair costs log(1 + u) and has the slope u / (1 + u). The factors 1 + u of up to 64 pairs are multiplied
before one logarithm is taken, as log1p of what the product exceeds one by, which loses no digit of small costs. Where something
overflows, no finite value comes out and a mark is left in `needs_fallback`. A careful launch follows always: without a mark it ends at
once, with one it computes those tiles in another way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .logits import mark, marked
from .pairs import further_positives, is_special, negatives, others, rivals
from .product import halves, put_block, side_by_side, similarities, tile_at
from .sums import LOG2_E, bars, bars_of_piece, get, log1p, put_pair, vector
from .warp_reduce import LARGEST, PRODUCT, TOTAL, behind, columns_together, of_columns, of_rows, row_order, rows_together

LARGEST_VALUE = tl.constexpr(2.0**100)
FACTORS = tl.constexpr(64)


@triton.jit(do_not_specialize=["rows", "columns", "shift", "stride"])
def sigmoid_kernel(
    x, y, scale, bias, gradient, weights_M, row_parts, column_parts, needs_fallback, matches, ids_M, ids_N, positive_M, positive_N, margin,
    rows, columns, shift, stride,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, RANKED: tl.constexpr, CAREFUL: tl.constexpr,
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
    outputs = (gradient, stride, weights_M, row_parts, column_parts, needs_fallback)
    tiles = tl.cdiv(rows, M) * tl.cdiv(columns, N)
    if CAREFUL:
        tiles = tl.where(marked(needs_fallback, M), tiles, 0)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=not CAREFUL):
        row, column = tile_at(t, rows, columns, M, N, GROUP)
        needs_grad = True
        if CAREFUL:
            value = get(row_parts, 0, column // N, tl.cdiv(columns, N), row + tl.arange(0, M), rows)
            needs_grad = tl.max(overflowed(value).to(tl.int32), 0) > 0
        if needs_grad:
            z = similarities(x, y, row, column, rows, columns, WIDTH, M, N, K, DESCRIBED, PRECISION)
            special = is_special(panel, row, column, IS_LOCAL, M, N)
            _put_sums(
                z, special, logit, outputs, panel, row, column,
                IS_LOCAL, MULTI_POSITIVE, RANKED, CAREFUL, M, N, PIECES, WARPS, DESCRIBED, ROUND_TO_TF32,
            )  # fmt: skip


@triton.jit
def _put_sums(
    z, special, logit, outputs, panel, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, RANKED: tl.constexpr, CAREFUL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PIECES: tl.constexpr, WARPS: tl.constexpr, DESCRIBED: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Puts the sums of a tile's rows, having collected those of its pieces."""
    _, _, _, row_parts, column_parts, needs_fallback = outputs
    _, _, _, positive_M, _, _, rows, columns, _ = panel
    across, down = tl.cdiv(columns, N), tl.cdiv(rows, M)
    bar_M = bars(positive_M, row, rows, M)
    value, slope, hardest, behind_M, hardest_N, behind_N = _sums(
        z, special, bar_M, logit, outputs, panel, row, column,
        IS_LOCAL, MULTI_POSITIVE, RANKED, CAREFUL, M, N, PIECES, WARPS, DESCRIBED, ROUND_TO_TF32,
    )  # fmt: skip
    order = row_order(M, WARPS)
    i = row + order
    put_pair(row_parts, 0, column // N, across, i, rows, value, rows_together(slope, TOTAL, M, WARPS))
    if not CAREFUL:
        mark(needs_fallback, order, overflowed(value))
    if RANKED:
        hardest, ahead = rows_together(hardest, LARGEST, M, WARPS), N - rows_together(behind_M, TOTAL, M, WARPS)
        put_pair(row_parts, 2, column // N, across, i, rows, hardest, ahead.to(tl.float32))
        hardest, ahead = columns_together(hardest_N, LARGEST), M - columns_together(behind_N, TOTAL)
        put_pair(column_parts, 0, row // M, down, column + tl.arange(0, N), columns, hardest, ahead.to(tl.float32))


@triton.jit
def _sums(
    z, special, bar_M, logit, outputs, panel, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, RANKED: tl.constexpr, CAREFUL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PIECES: tl.constexpr, WARPS: tl.constexpr, DESCRIBED: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Values, slopes and rankings of rows, and rankings of columns; what is not wanted repeats the slopes."""
    if PIECES > 1:
        left, right = halves(z, M, N)
        a = _sums(
            left, special, bar_M, logit, outputs, panel, row, column,
            IS_LOCAL, MULTI_POSITIVE, RANKED, CAREFUL, M, N // 2, PIECES // 2, WARPS, DESCRIBED, ROUND_TO_TF32,
        )  # fmt: skip
        b = _sums(
            right, special, bar_M, logit, outputs, panel, row, column + N // 2,
            IS_LOCAL, MULTI_POSITIVE, RANKED, CAREFUL, M, N // 2, PIECES // 2, WARPS, DESCRIBED, ROUND_TO_TF32,
        )  # fmt: skip
        hardest_N, behind_N = a[4], a[5]
        if RANKED:
            hardest_N, behind_N = side_by_side(a[4], b[4]), side_by_side(a[5], b[5])
        sums = a[0] + b[0], a[1] + b[1], tl.maximum(a[2], b[2]), a[3] + b[3], hardest_N, behind_N
    else:
        sums = _sums_of_piece(
            z, special, bar_M, logit, outputs, panel, row, column,
            IS_LOCAL, MULTI_POSITIVE, RANKED, CAREFUL, M, N, WARPS, DESCRIBED, ROUND_TO_TF32,
        )  # fmt: skip
    return sums


@triton.jit
def _sums_of_piece(
    z, special, bar_M, logit, outputs, panel, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, RANKED: tl.constexpr, CAREFUL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WARPS: tl.constexpr, DESCRIBED: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """`logit` is the factor and the offset that make a logit of a similarity."""
    factor, offset = logit
    gradient, stride, weights_M, _, _, _ = outputs
    _, _, _, _, positive_N, _, rows, columns, _ = panel
    bar_N = bars_of_piece(positive_N, column, columns, N)
    if RANKED:
        found = rivals(z, special, panel, row, column, IS_LOCAL, M, N)
    if RANKED and not MULTI_POSITIVE:
        # The pairs that count are the rivals. A negative scale makes the others +inf, and the careful launch takes over.
        logits = found * factor + offset
    else:
        logits = z * factor + offset
        if special:
            if MULTI_POSITIVE:
                # A further positive costs what a negative of the opposite logit would.
                logits = tl.where(further_positives(panel, row, column, IS_LOCAL, M, N), -logits, logits)
                counted = others(panel, row, column, IS_LOCAL, M, N)
            else:
                counted = negatives(panel, row, column, IS_LOCAL, M, N)
            logits = tl.where(counted, logits, float("-inf"))
    if CAREFUL:
        u = tl.exp2(-tl.abs(logits) * LOG2_E)
        g = tl.where(logits > 0, 1.0, u) / (1.0 + u)
        value = rows_together(of_rows(tl.maximum(logits, 0.0), TOTAL, M, N), TOTAL, M, WARPS) + _costs(u, M, N, WARPS, 1)
    else:
        u = tl.exp2(logits)
        g, both = _slopes(u, M, N)
        value = _costs(both, M, N // 2, WARPS, 2)
    if MULTI_POSITIVE:
        if special:
            g = tl.where(further_positives(panel, row, column, IS_LOCAL, M, N), -g, g)
    slope = of_rows(g, TOTAL, M, N)
    if gradient is not None:
        if weights_M is not None:
            g *= vector(weights_M, row, rows, M)[:, None]
        put_block((gradient, stride), g, row, column, rows, columns, M, N, DESCRIBED, ROUND_TO_TF32)
    hardest, behind_M, hardest_N, behind_N = slope, slope, slope, slope
    if RANKED:
        hardest, behind_M = of_rows(found, LARGEST, M, N), of_rows(behind(found, bar_M[:, None]), TOTAL, M, N)
        hardest_N = of_columns(found, LARGEST, M, N, WARPS)
        behind_N = of_columns(behind(found, bar_N[None, :]), TOTAL, M, N, WARPS)
    return value, slope, hardest, behind_M, hardest_N, behind_N


@triton.jit
def overflowed(value):
    # Not "larger than": what overflowed may have become no number at all.
    return (value < LARGEST_VALUE) == 0


@triton.jit
def _slopes(u, M: tl.constexpr, N: tl.constexpr):
    """The slopes u / (1 + u), and what the products of neighbouring 1 + u exceed one by: with these, one reciprocal serves two.

    The square of a reciprocal root takes fewer instructions than a division.
    """
    a, b = tl.split(tl.reshape(u, (M, N // 2, 2)))
    a_times, b_times = a + a * b, b + a * b
    both = a_times + b
    root = tl.rsqrt(1.0 + both)
    square = root * root
    return tl.reshape(tl.join(a_times * square, b_times * square), (M, N)), both


@triton.jit
def _costs(u, M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr, EACH: tl.constexpr):
    """The sums of log(1 + u) of rows, with one logarithm for up to FACTORS of them; each 1 + u may be that of two neighbours."""
    if N * EACH > FACTORS:
        left, right = halves(u, M, N)
        found = _costs(left, M, N // 2, WARPS, EACH) + _costs(right, M, N // 2, WARPS, EACH)
    else:
        found = log1p(rows_together(of_rows(u, PRODUCT, M, N, 2 // EACH), PRODUCT, M, WARPS))
    return found
