"""The sigmoid loss: values and gradient from one pass; the kernel and the launcher. Legend: ../contract.py; tiles: tile.py.

With u = exp(logit), a pair has the loss log(1 + u) and the derivative u / (1 + u). The factors 1 + u of up to 64 pairs are
multiplied before one logarithm is taken, as log1p of (product - 1), which loses no digit of small losses. Where something
overflows, the value is not finite and the tile sets a mark in `needs_fallback`. A safe launch always follows: without a mark it
ends at once, with one it computes those tiles again from exp(-|logit|).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..contract import ComputeOptions, NeedsGrad, Pairs, SigmoidPass
from .architectures import architecture_of
from .gradient_panels import GradientProducts
from .launch import Launch, is_multi_positive, on_device_of_input, part, run_kernel, without_saved_exp
from .reductions import (
    MAX,
    PRODUCT,
    RANKING,
    SUM,
    SUMS,
    Sums,
    finish_columns,
    finish_rows,
    get,
    is_below,
    merge_empty,
    merge_parts,
    put_pair,
    ranking,
    reduce_columns,
    reduce_rows,
    row_order,
    thresholds,
    thresholds_of_piece,
)
from .tile import (
    LOG2_E,
    PairArgs,
    Target,
    any_fallback,
    concat_columns,
    further_positives,
    halves,
    load_vector,
    log1p,
    mark_fallback,
    negative_similarities,
    negatives,
    others,
    similarities,
    store_block,
    tile_at,
    tile_needs_mask,
)

LARGEST_VALUE = tl.constexpr(2.0**100)
# How many factors 1 + u are multiplied before a logarithm is taken.
FACTORS = tl.constexpr(64)


class LogitArgs(NamedTuple):
    """The factor and the offset that turn a similarity into a logit."""

    factor: Any
    offset: Any


class Outputs(NamedTuple):
    """Where a kernel writes the gradient and the sums of its tiles, and the weights that the gradient is multiplied with."""

    target: Any
    weights_M: Any
    row_parts: Any
    column_parts: Any
    needs_fallback: Any


class TileValues(NamedTuple):
    """Sums of a tile: value and derivative in the bias of rows, rankings of rows and columns; without rankings they repeat `slope`,
    because JIT functions cannot return None."""

    value: Any
    slope: Any
    hardest: Any
    below: Any
    column_hardest: Any
    column_below: Any


@triton.jit(do_not_specialize=["rows", "columns", "shift", "stride"])
def sigmoid_kernel(
    x, y, scale, bias, gradient, weights_M, row_parts, column_parts, needs_fallback, matches, ids_M, ids_N, positive_M, positive_N,
    margin, rows, columns, shift, stride,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, RANKED: tl.constexpr, SAFE: tl.constexpr,
    WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr,
    WARPS: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Write values and slopes of each tile for its rows and, if `gradient` is given, the gradient in the logits.

    SAFE: compute only the tiles with a value that is not finite.
    """
    factor, offset = tl.load(scale), tl.load(bias)
    if not SAFE:
        # Logits in base 2, except in the safe launch, whose logits are too large for another rounding.
        factor, offset = factor * LOG2_E, offset * LOG2_E
    logit = LogitArgs(factor, offset)
    pairs = PairArgs(matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns, shift)
    outputs = Outputs(Target(gradient, stride), weights_M, row_parts, column_parts, needs_fallback)
    tiles = tl.cdiv(rows, M) * tl.cdiv(columns, N)
    if SAFE:
        tiles = tl.where(any_fallback(needs_fallback, M), tiles, 0)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=not SAFE):
        row, column = tile_at(t, rows, columns, M, N, GROUP)
        compute_tile = True
        if SAFE:
            value = get(row_parts, 0, column // N, tl.cdiv(columns, N), row + tl.arange(0, M), rows)
            compute_tile = tl.max(overflowed(value).to(tl.int32), 0) > 0
        if compute_tile:
            z = similarities(x, y, row, column, rows, columns, WIDTH, M, N, K, DESCRIPTORS, PRECISION)
            needs_mask = tile_needs_mask(pairs, row, column, IS_LOCAL, M, N)
            _put_tile(
                z, needs_mask, logit, outputs, pairs, row, column,
                IS_LOCAL, MULTI_POSITIVE, RANKED, SAFE, M, N, PIECES, WARPS, DESCRIPTORS, ROUND_TO_TF32,
            )  # fmt: skip


@triton.jit
def _put_tile(
    z, needs_mask, logit, outputs, pairs, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, RANKED: tl.constexpr, SAFE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, PIECES: tl.constexpr, WARPS: tl.constexpr, DESCRIPTORS: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Write the sums of a tile, and its gradient piece by piece."""
    across, down = tl.cdiv(pairs.columns, N), tl.cdiv(pairs.rows, M)
    threshold_M = thresholds(pairs.positive_M, row, pairs.rows, M)
    values = _tile_values(
        z, needs_mask, threshold_M, logit, outputs, pairs, row, column,
        IS_LOCAL, MULTI_POSITIVE, RANKED, SAFE, M, N, PIECES, WARPS, DESCRIPTORS, ROUND_TO_TF32,
    )  # fmt: skip
    order = row_order(M, WARPS)
    i = row + order
    slope = finish_rows(values.slope, SUM, M, WARPS)
    put_pair(outputs.row_parts, 0, column // N, across, i, pairs.rows, values.value, slope)
    if not SAFE:
        mark_fallback(outputs.needs_fallback, order, overflowed(values.value))
    if RANKED:
        hardest, ahead = finish_rows(values.hardest, MAX, M, WARPS), N - finish_rows(values.below, SUM, M, WARPS)
        put_pair(outputs.row_parts, 2, column // N, across, i, pairs.rows, hardest, ahead.to(tl.float32))
        hardest, ahead = finish_columns(values.column_hardest, MAX), M - finish_columns(values.column_below, SUM)
        j = column + tl.arange(0, N)
        put_pair(outputs.column_parts, 0, row // M, down, j, pairs.columns, hardest, ahead.to(tl.float32))


@triton.jit
def _tile_values(
    z, needs_mask, threshold_M, logit, outputs, pairs, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, RANKED: tl.constexpr, SAFE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, PIECES: tl.constexpr, WARPS: tl.constexpr, DESCRIPTORS: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    if PIECES > 1:
        left, right = halves(z, M, N)
        a = _tile_values(
            left, needs_mask, threshold_M, logit, outputs, pairs, row, column,
            IS_LOCAL, MULTI_POSITIVE, RANKED, SAFE, M, N // 2, PIECES // 2, WARPS, DESCRIPTORS, ROUND_TO_TF32,
        )  # fmt: skip
        b = _tile_values(
            right, needs_mask, threshold_M, logit, outputs, pairs, row, column + N // 2,
            IS_LOCAL, MULTI_POSITIVE, RANKED, SAFE, M, N // 2, PIECES // 2, WARPS, DESCRIPTORS, ROUND_TO_TF32,
        )  # fmt: skip
        column_hardest, column_below = a.column_hardest, a.column_below
        if RANKED:
            column_hardest = concat_columns(a.column_hardest, b.column_hardest)
            column_below = concat_columns(a.column_below, b.column_below)
        hardest = tl.maximum(a.hardest, b.hardest)
        values = TileValues(a.value + b.value, a.slope + b.slope, hardest, a.below + b.below, column_hardest, column_below)
    else:
        values = _piece_values(
            z, needs_mask, threshold_M, logit, outputs, pairs, row, column,
            IS_LOCAL, MULTI_POSITIVE, RANKED, SAFE, M, N, WARPS, DESCRIPTORS, ROUND_TO_TF32,
        )  # fmt: skip
    return values


@triton.jit
def _piece_values(
    z, needs_mask, threshold_M, logit, outputs, pairs, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, RANKED: tl.constexpr, SAFE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, WARPS: tl.constexpr, DESCRIPTORS: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    threshold_N = thresholds_of_piece(pairs.positive_N, column, pairs.columns, N)
    if RANKED:
        z_negative = negative_similarities(z, needs_mask, pairs, row, column, IS_LOCAL, M, N)
    if RANKED and not MULTI_POSITIVE:
        # The pairs that count are the negatives. A negative scale turns the others into +inf, and the safe launch takes over.
        logits = z_negative * logit.factor + logit.offset
    else:
        logits = z * logit.factor + logit.offset
        if needs_mask:
            if MULTI_POSITIVE:
                # A further positive costs what a negative with the opposite logit would.
                logits = tl.where(further_positives(pairs, row, column, IS_LOCAL, M, N), -logits, logits)
                counted = others(pairs, row, column, IS_LOCAL, M, N)
            else:
                counted = negatives(pairs, row, column, IS_LOCAL, M, N)
            logits = tl.where(counted, logits, float("-inf"))
    if SAFE:
        u = tl.exp2(-tl.abs(logits) * LOG2_E)
        g = tl.where(logits > 0, 1.0, u) / (1.0 + u)
        value = finish_rows(reduce_rows(tl.maximum(logits, 0.0), SUM, M, N), SUM, M, WARPS) + _log1p_sums(u, M, N, WARPS, 1)
    else:
        u = tl.exp2(logits)
        g, products = _slopes(u, M, N)
        value = _log1p_sums(products, M, N // 2, WARPS, 2)
    if MULTI_POSITIVE:
        if needs_mask:
            g = tl.where(further_positives(pairs, row, column, IS_LOCAL, M, N), -g, g)
    slope = reduce_rows(g, SUM, M, N)
    if outputs.target.matrix is not None:
        if outputs.weights_M is not None:
            g *= load_vector(outputs.weights_M, row, pairs.rows, M)[:, None]
        store_block(outputs.target, g, row, column, pairs.rows, pairs.columns, M, N, DESCRIPTORS, ROUND_TO_TF32)
    hardest, below, column_hardest, column_below = slope, slope, slope, slope
    if RANKED:
        hardest = reduce_rows(z_negative, MAX, M, N)
        below = reduce_rows(is_below(z_negative, threshold_M[:, None]), SUM, M, N)
        column_hardest = reduce_columns(z_negative, MAX, M, N, WARPS)
        column_below = reduce_columns(is_below(z_negative, threshold_N[None, :]), SUM, M, N, WARPS)
    return TileValues(value, slope, hardest, below, column_hardest, column_below)


@triton.jit
def overflowed(value):
    # Not `value >= LARGEST_VALUE`: an overflow may have become NaN.
    return (value < LARGEST_VALUE) == 0


@triton.jit
def _slopes(u, M: tl.constexpr, N: tl.constexpr):
    """Return the slopes u / (1 + u), and (1 + a)(1 + b) - 1 of neighbouring u, with which one reciprocal serves two slopes.

    The square of a reciprocal square root takes fewer instructions than a division.
    """
    a, b = tl.split(tl.reshape(u, (M, N // 2, 2)))
    a_times, b_times = a + a * b, b + a * b
    products = a_times + b
    root = tl.rsqrt(1.0 + products)
    square = root * root
    return tl.reshape(tl.join(a_times * square, b_times * square), (M, N)), products


@triton.jit
def _log1p_sums(u, M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr, EACH: tl.constexpr):
    """Return Σ log(1 + u) of rows with one logarithm for up to FACTORS of them; each 1 + u may be that of EACH neighbours."""
    if N * EACH > FACTORS:
        left, right = halves(u, M, N)
        total = _log1p_sums(left, M, N // 2, WARPS, EACH) + _log1p_sums(right, M, N // 2, WARPS, EACH)
    else:
        total = log1p(finish_rows(reduce_rows(u, PRODUCT, M, N, 2 // EACH), PRODUCT, M, WARPS))
    return total


@on_device_of_input
def sigmoid_sums(
    x_MD: Tensor,
    y_ND: Tensor,
    scale: Tensor,
    bias: Tensor,
    pairs: Pairs,
    weights_M: Tensor | None,
    *,
    needs_grad: NeedsGrad | None,
    compute: ComputeOptions,
) -> SigmoidPass:
    """Return values of the others and, if asked for, their slopes and gradients from the same pass."""
    compute = without_saved_exp(compute)
    launch = Launch(architecture_of(x_MD.device), "sigmoid", x_MD, y_ND, compute, 4 if pairs.ranked else 1)
    needs_fallback = launch.new_marks()
    products = GradientProducts(x_MD, y_ND, needs_grad, compute) if needs_grad else None
    row_sums = Sums(x_MD, [SUMS.value] + [RANKING.value] * pairs.ranked)
    column_sums = Sums(y_ND, [RANKING.value]) if pairs.ranked else None
    bytes_per_cell = row_sums.bytes_per_cell(launch.blocks.n) + (column_sums.bytes_per_cell(launch.blocks.m) if column_sums else 0)
    # Beside a panel of the gradient, the partial sums are negligible.
    for p in launch.panels(products.bytes_per_cell if products else bytes_per_cell):
        down, across = launch.tile_counts(p)
        row_parts = row_sums.new_parts(across, p.rows)
        column_parts = column_sums.new_parts(down, p.columns) if column_sums else None
        panel = products.panel(p) if products else None
        target, stride = (None, 0) if panel is None else (launch.target(panel), panel.stride(0))
        outputs = target, part(weights_M, p.r), row_parts, column_parts, needs_fallback
        arguments = *launch.operands(p), scale, bias, *outputs, *launch.pair_args(pairs, p), stride
        for safe in (False, True):
            run_kernel(
                sigmoid_kernel, launch.grid(p),
                *arguments, IS_LOCAL=pairs.is_local, MULTI_POSITIVE=is_multi_positive(pairs), RANKED=pairs.ranked and not safe,
                SAFE=safe, ROUND_TO_TF32=products is not None and products.rounds_to_tf32, WARPS=launch.blocks.warps,
                **launch.constants,
            )  # fmt: skip
        merge_parts(p, row_sums, row_parts, column_sums, column_parts)
        if products is not None and panel is not None:
            products.add(panel, p)
    merge_empty(x_MD, y_ND, row_sums, column_sums)
    slope_M = gx_MD = gy_ND = None
    if products is not None:
        slope_M, gx_MD, gy_ND = row_sums.values[0, 1], products.gx_MD, products.gy_ND
    rankings = ranking(row_sums, 1, pairs), ranking(column_sums, 0, pairs)
    return SigmoidPass(row_sums.values[0, 0], slope_M, gx_MD, gy_ND, *rankings)
