"""The kernel of the sigmoid loss: values and gradient from one pass. Legend: ../../contract.py; what a panel is: pairs.py.

With u = exp(logit), a pair costs log(1 + u) and has the slope u / (1 + u). The factors 1 + u of up to 64 pairs are multiplied
before one logarithm is taken, as log1p of what the product exceeds one by, which loses no digit of small costs. Where something
finite value comes out and a mark is left in `trouble`. A careful launch follows always: without a mark it ends at once, with one it
computes those tiles in another way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pairs import further_positives, is_special, negatives, others, rivals
from .product import halves, put_block, similarities, tile_at
from .sums import get, is_ahead, larger_and_sum, log1p, put_pair

LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST_VALUE = tl.constexpr(2.0**100)
FACTORS = tl.constexpr(64)


@triton.jit(do_not_specialize=["rows", "columns", "shift", "stride"])
def sigmoid_kernel(
    x, y, scale, bias, gradient, weights_M, row_parts, column_parts, trouble, matches, ids_M, ids_N, positive_M, positive_N, margin,
    rows, columns, shift, stride,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, RANKED: tl.constexpr, CAREFUL: tl.constexpr,
    WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr,
    DESCRIBED: tl.constexpr, PRECISION: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Writes values and slopes of each tile, or piece of one, for its rows and, if there is room, the gradient in the logits.

    CAREFUL: only where a value is not finite.
    """
    factor, offset = tl.load(scale), tl.load(bias)
    if not CAREFUL:
        # In powers of two, but for the careful way, whose logits are too large for another rounding.
        factor, offset = factor * LOG2_E, offset * LOG2_E
    logit = (factor, offset)
    across = PIECES * tl.cdiv(columns, N)
    panel = (matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns, shift, across)
    outputs = (gradient, stride, weights_M, row_parts, column_parts, trouble)
    tiles = tl.cdiv(rows, M) * tl.cdiv(columns, N)
    if CAREFUL:
        tiles = tl.where(tl.load(trouble) == 0, 0, tiles)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=not CAREFUL):
        row, column = tile_at(t, rows, columns, M, N, GROUP)
        wanted = True
        if CAREFUL:
            overflowed_M = tl.zeros((M,), tl.int1)
            for piece in tl.static_range(PIECES):
                value = get(row_parts, 0, column // (N // PIECES) + piece, across, row + tl.arange(0, M), rows)
                overflowed_M = overflowed_M | _overflowed(value)
            wanted = tl.max(overflowed_M.to(tl.int32), 0) > 0
        if wanted:
            z = similarities(x, y, row, column, rows, columns, WIDTH, M, N, K, DESCRIBED, PRECISION)
            if PIECES == 1:
                _put_values(z, logit, outputs, panel, row, column, HOME, SEVERAL, RANKED, CAREFUL, M, N, DESCRIBED, ROUND_TO_TF32)
            else:
                left, right = halves(z, M, N)
                _put_values_of_half(
                    left, logit, outputs, panel, row, column,
                    HOME, SEVERAL, RANKED, CAREFUL, M, N // 2, PIECES, DESCRIBED, ROUND_TO_TF32,
                )  # fmt: skip
                _put_values_of_half(
                    right, logit, outputs, panel, row, column + N // 2,
                    HOME, SEVERAL, RANKED, CAREFUL, M, N // 2, PIECES, DESCRIBED, ROUND_TO_TF32,
                )  # fmt: skip


@triton.jit
def _put_values_of_half(
    z, logit, outputs, panel, row, column,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, RANKED: tl.constexpr, CAREFUL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PIECES: tl.constexpr, DESCRIBED: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    if PIECES == 2:
        _put_values(z, logit, outputs, panel, row, column, HOME, SEVERAL, RANKED, CAREFUL, M, N, DESCRIBED, ROUND_TO_TF32)
    else:
        left, right = halves(z, M, N)
        middle = column + N // 2
        _put_values(left, logit, outputs, panel, row, column, HOME, SEVERAL, RANKED, CAREFUL, M, N // 2, DESCRIBED, ROUND_TO_TF32)
        _put_values(right, logit, outputs, panel, row, middle, HOME, SEVERAL, RANKED, CAREFUL, M, N // 2, DESCRIBED, ROUND_TO_TF32)


@triton.jit
def _put_values(
    z, logit, outputs, panel, row, column,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, RANKED: tl.constexpr, CAREFUL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DESCRIBED: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """`logit` is the factor and the offset that make a logit of a similarity."""
    factor, offset = logit
    gradient, stride, weights_M, row_parts, column_parts, trouble = outputs
    _, _, _, positive_M, positive_N, _, rows, columns, _, across = panel
    i, j = row + tl.arange(0, M), column + tl.arange(0, N)
    special = is_special(panel, row, column, HOME, M, N)
    if RANKED and not CAREFUL:
        found = rivals(z, special, panel, row, column, HOME, M, N)
        hardest, ahead = tl.reduce((found, is_ahead(found, positive_M, i, rows, 1)), 1, larger_and_sum)
        put_pair(row_parts, 2, column // N, across, i, rows, hardest, ahead)
        hardest, ahead = tl.reduce((found, is_ahead(found, positive_N, j, columns, 0)), 0, larger_and_sum)
        put_pair(column_parts, 0, row // M, tl.cdiv(rows, M), j, columns, hardest, ahead)

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
        tl.store(trouble + tl.zeros((M,), tl.int32), 1, mask=_overflowed(value))
    if SEVERAL:
        if special:
            g = tl.where(further_positives(panel, row, column, HOME, M, N), -g, g)
    put_pair(row_parts, 0, column // N, across, i, rows, value, tl.sum(g, 1))
    if gradient is not None:
        if weights_M is not None:
            g *= tl.load(weights_M + i, mask=i < rows, other=0.0)[:, None]
        put_block((gradient, stride), g, row, column, rows, columns, M, N, DESCRIBED, ROUND_TO_TF32)


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
