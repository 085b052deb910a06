"""Matryoshka over the softmax loss with one product for all widths: the kernels and their launchers. Legend: ../contract.py.

Widths d_1 < ... < d_J. The accumulator of a tile holds z_j, the product of the first d_j entries, after d_j / K steps; the logits
of width j are s_j = scale · z_j · rx_j · ry_j, with the reciprocal norms rx_j of rows and ry_j of columns. So the embeddings are
not normalised in memory, and all widths cost the products of the widest.

Forward: an epilogue for each width adds up exp(s_j) for rows and columns. |s_j| ≤ |scale|, so a constant offset keeps exp(s_j) in
range; tiles where it does not are computed again with maxima (why there are a fast and a safe launch: softmax_forward.py).

Backward: with p_j the gradient in s_j, the gradient in z_j is q_j = scale · p_j · rx_j · ry_j, and x[:, k] has the gradient
Σ_j q_j @ y[:, k] over all widths j that contain column k. Neighbouring widths form groups. In a group, the panel of width j is the
sum of q_j and of those of the wider widths, and multiplies only the columns that width j adds to the group; the panel of the first
width multiplies all columns of that width. One group of all widths has the fewest operations: those of one width. But a tile is
kept for each width of a group but its last, so narrow widths are groups of their own: their products are bound by the bandwidth of
reading the panel, and a few more columns cost nothing. The narrowest have no panels: a kernel that holds the sums of its rows in
registers computes their gradient. Norms have gradients too: -x · rx_j² · Σ_n p_j s_j, sums over rows and columns that the same
epilogue collects.

All gradients are multiplied with log2(e) until the last kernel, because kernels have logits in base 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import NORM_EPS, ComputeOptions, NeedsGrad, Softmax, Stats
from .architectures import architecture_of
from .gradient_panels import ROW_ALIGNMENT, GradientProducts, panel_dtype
from .launch import Launch, Panel, PartialSums, cdiv, on_device_of_input, without_saved_exp
from .per_row import normalise
from .reductions import (
    EXPONENTIALS,
    SUM,
    SUMS,
    Sums,
    encode_shifted_sum,
    finish_columns,
    finish_rows,
    get,
    merge_parts,
    put,
    put_pair,
    reduce_columns,
    reduce_rows,
    row_order,
)
from .softmax_forward import CACHED_BYTES, max_and_sum
from .tile import (
    HIGHEST_PEAK,
    LOG2_E,
    LOWEST_PEAK,
    PairArgs,
    Target,
    any_fallback,
    concat_columns,
    exp_sum_out_of_range,
    halves,
    load_block,
    mark_fallback,
    negatives,
    store_block,
    tile_at,
    tile_needs_mask,
)
from .tuned_configs import Blocks, blocks_for

# Every width is a multiple of this, the smallest step of a product.
SMALLEST_STEP = 16
# Vectors of each width start at multiples of so many values, and have at least as many zeros behind their end as a tile has rows.
VECTOR_ALIGNMENT, PADDING = tl.constexpr(16), 256
# Products of a panel with fewer columns wait for the panel to be read from memory.
BANDWIDTH_BOUND_COLUMNS = 128
# Rows and columns of the kernels over embeddings.
ROWS = 16

# The fastest on an H200 of those that `python -m benchmarks.matryoshka --device cuda --tune` compares.
STATS_BLOCKS = Blocks(128, 128, 64, 4, 3, programs=2, group=8, pieces=4)
GRADIENT_BLOCKS = Blocks(64, 128, 64, 4, 4, programs=2, group=16, pieces=4)
NARROW_BLOCKS = Blocks(64, 64, 64, 4, 3)
# How many tiles a program of `gradient` keeps in registers.
MAX_KEPT_TILES = 2
# Widths up to this one, but not the widest, get their gradient without panels: writing and reading them takes longer than computing
# similarities twice.
LARGEST_NARROW_WIDTH = 128
# What the panels of backward take of the workspace at most: on an H200 more makes a step at most 3 % faster.
PANELS_WORKSPACE = 2**30


class PrefixNorms(NamedTuple):
    """Of every width: reciprocal norms of rows (J, M) and columns (J, N), cosines of the positives (J, M), and the squares of
    reciprocal norms, which are zero where a norm counts as NORM_EPS, because it then has no gradient."""

    rx_JM: Tensor
    ry_JN: Tensor
    positive_JM: Tensor
    rx2_JM: Tensor
    ry2_JN: Tensor

    def of_widths(self, widths: slice) -> PrefixNorms:
        return PrefixNorms(*(v[widths] for v in self))

    def exchanged(self) -> PrefixNorms:
        """Return those of columns as those of rows, and the reverse."""
        return PrefixNorms(self.ry_JN, self.rx_JM, self.positive_JM, self.ry2_JN, self.rx2_JM)


class PrefixState(NamedTuple):
    """What backward needs from forward. dpos_JM: the gradient in the logits of the positives; share: the factor of the mean."""

    dims: tuple[int, ...]
    norms: PrefixNorms
    rows: Softmax
    columns: Softmax | None
    dpos_JM: Tensor
    share: float


class PrefixGradients(NamedTuple):
    dx: Tensor | None
    dy: Tensor | None
    dscale: Tensor


class NormArgs(NamedTuple):
    """Reciprocal norms of a panel, and the strides between widths, which all vectors of rows (of columns) have, in units of
    VECTOR_ALIGNMENT, by which the compiler knows that it may read two values at once."""

    rx: Any
    ry: Any
    row_stride: Any
    column_stride: Any


class PrefixSoftmax(NamedTuple):
    """The softmax of rows and columns of all widths. In the fast launch peaks are None; gains are factors of exp(s - offset)."""

    row_gain: Any
    row_peak: Any
    column_gain: Any
    column_peak: Any

    def part(self, p: Panel) -> PrefixSoftmax:
        """Return that of a panel."""
        return PrefixSoftmax(*(None if v is None else v[:, where] for v, where in zip(self, (p.r, p.r, p.c, p.c), strict=True)))

    def of_widths(self, widths: slice) -> PrefixSoftmax:
        return PrefixSoftmax(*(None if v is None else v[widths] for v in self))

    def exchanged(self) -> PrefixSoftmax:
        """Return that of columns as that of rows, and the reverse."""
        return PrefixSoftmax(*self[2:], *self[:2])


class GradientArgs(NamedTuple):
    """What the kernels of backward read of some widths, beside the embeddings.

    fast, safe: the softmax for either launch. needs_fallback: whether some peak is out of range, so that the safe launch runs.
    """

    dims: tuple[int, ...]
    scale: Tensor
    norms: PrefixNorms
    fast: PrefixSoftmax
    safe: PrefixSoftmax
    needs_fallback: Tensor

    def of_widths(self, widths: slice) -> GradientArgs:
        return self._replace(
            dims=self.dims[widths],
            norms=self.norms.of_widths(widths),
            fast=self.fast.of_widths(widths),
            safe=self.safe.of_widths(widths),
        )

    def exchanged(self) -> GradientArgs:
        """Return those of columns as those of rows, and the reverse."""
        return self._replace(norms=self.norms.exchanged(), fast=self.fast.exchanged(), safe=self.safe.exchanged())


class TotalsOfTile(NamedTuple):
    rows: Any
    columns: Any


class GradientOfTile(NamedTuple):
    """Sums of p · s of rows and columns, and the tiles that are kept for wider widths."""

    rows: Any
    columns: Any
    kept: Any


def fits(dims: tuple[int, ...], x_MD: Tensor, y_ND: Tensor) -> bool:
    """Return whether the kernels can compute these widths: whole steps of the product, and pairs to sum over."""
    whole_steps = all(d % SMALLEST_STEP == 0 for d in dims)
    return architecture_of(x_MD.device).prefixes and whole_steps and len(x_MD) > 0 and len(y_ND) > 1


@triton.jit
def _offset(factor):
    """Return what to subtract from logits in base 2, so that exponentials of logits up to |factor| do not overflow."""
    return tl.maximum(tl.abs(factor) - HIGHEST_PEAK * LOG2_E, 0.0)


@triton.jit
def _of_width(values, width, stride, first, LENGTH: tl.constexpr):
    """Return the values of a width from `first` on. They are padded, so that no thread compares places with their end."""
    return tl.load(values + width * stride * VECTOR_ALIGNMENT + first + tl.arange(0, LENGTH))


@triton.jit
def _factor(scale):
    """Return the factor for logits in base 2. Zero, by which nothing can be divided, becomes a number too small to matter."""
    factor = tl.load(scale) * LOG2_E
    return tl.where(factor == 0, 1e-30, factor)


@triton.jit(do_not_specialize=["rows", "columns"])
def norms_kernel(
    x, y, squares_M, squares_N, products, rows, columns,
    DIMS: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write |x|², |y|² and x·y of each row and its positive, for each width (J, row)."""
    i = tl.program_id(0) * R + tl.arange(0, R)
    square_M, square_N, product = tl.zeros((R, K), tl.float32), tl.zeros((R, K), tl.float32), tl.zeros((R, K), tl.float32)
    for j in tl.static_range(len(DIMS)):
        for k in range(DIMS[j - 1] // K if j > 0 else 0, DIMS[j] // K):
            at = i.to(tl.int64)[:, None] * WIDTH + k * K + tl.arange(0, K)[None, :]
            x_RK = tl.load(x + at, mask=(i < rows)[:, None], other=0.0).to(tl.float32)
            y_RK = tl.load(y + at, mask=(i < columns)[:, None], other=0.0).to(tl.float32)
            square_M += x_RK * x_RK
            square_N += y_RK * y_RK
            product += x_RK * y_RK
        tl.store(squares_M + j * rows + i, tl.sum(square_M, 1), mask=i < rows)
        tl.store(squares_N + j * columns + i, tl.sum(square_N, 1), mask=i < columns)
        tl.store(products + j * rows + i, tl.sum(product, 1), mask=i < rows)


@triton.jit(do_not_specialize=["rows", "columns", "shift", "row_stride", "column_stride"])
def prefix_stats_kernel(
    x, y, scale, rx, ry, row_stride, column_stride, row_parts, column_parts, needs_fallback, rows, columns, shift,
    DIMS: tl.constexpr, SAFE: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr, PIECES: tl.constexpr, WARPS: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the sums of each tile and width for its rows and, if column_parts is given, for its columns.

    SAFE: compute only the tiles whose sums are out of range, with maxima.
    """
    pairs = PairArgs(None, None, None, None, None, 0.0, rows, columns, shift)
    norms = NormArgs(rx, ry, row_stride, column_stride)
    sums = PartialSums(row_parts, column_parts, needs_fallback)
    factor = _factor(scale)
    last: tl.constexpr = len(DIMS) - 1
    tiles = tl.cdiv(rows, M) * tl.cdiv(columns, N)
    if SAFE:
        tiles = tl.where(any_fallback(needs_fallback, M if M > N else N), tiles, 0)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=not SAFE):
        row, column = tile_at(t, rows, columns, M, N, GROUP)
        compute_tile = True
        if SAFE:
            compute_tile = _is_out_of_range(sums, pairs, row, column, DIMS, M, N)
        if compute_tile:
            needs_mask = tile_needs_mask(pairs, row, column, True, M, N)
            z = tl.zeros((M, N), tl.float32)
            for k in range(0, DIMS[last] // K):
                a = load_block(x, row, k * K, rows, WIDTH, M, K, DESCRIPTORS)
                b = load_block(y, column, k * K, columns, WIDTH, N, K, DESCRIPTORS)
                z = tl.dot(a, b.T, z, input_precision=PRECISION)
                # The widths but the last share the code of one epilogue.
                width = last
                for j in tl.static_range(last):
                    width = tl.where((k + 1) * K == DIMS[j], j, width)
                if width < last:
                    _put_sums(z, width, needs_mask, factor, norms, sums, pairs, row, column, SAFE, M, N, PIECES, WARPS)
            _put_sums(z, last, needs_mask, factor, norms, sums, pairs, row, column, SAFE, M, N, PIECES, WARPS)


@triton.jit
def _put_sums(
    z, width, needs_mask, factor, norms, sums, pairs, row, column,
    SAFE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Write the sums of one width of a tile."""
    across, down = tl.cdiv(pairs.columns, N), tl.cdiv(pairs.rows, M)
    row_factor = _of_width(norms.rx, width, norms.row_stride, row, M) * factor
    if SAFE:
        column_factor = _of_width(norms.ry, width, norms.column_stride, column, N)
        logits = (z * (row_factor[:, None] * column_factor[None, :]) - _offset(factor)) / LOG2_E
        if needs_mask:
            logits = tl.where(negatives(pairs, row, column, True, M, N), logits, float("-inf"))
        peak, total = max_and_sum(logits, 1)
        i = row + tl.arange(0, M)
        put_pair(sums.row_parts, 2 * width, column // N, across, i, pairs.rows, peak, encode_shifted_sum(total))
        if sums.column_parts is not None:
            peak, total = max_and_sum(logits, 0)
            j = column + tl.arange(0, N)
            put_pair(sums.column_parts, 2 * width, row // M, down, j, pairs.columns, peak, encode_shifted_sum(total))
    else:
        totals = _exp_sums(z, width, needs_mask, row_factor, _offset(factor), norms, sums, pairs, row, column, M, N, PIECES, WARPS)
        if sums.column_parts is not None:
            total, j = finish_columns(totals.columns, SUM), column + tl.arange(0, N)
            put(sums.column_parts, 2 * width + 1, row // M, down, j, pairs.columns, total)
            mark_fallback(sums.needs_fallback, tl.arange(0, N), exp_sum_out_of_range(total) & (j < pairs.columns))
        total, order = finish_rows(totals.rows, SUM, M, WARPS), row_order(M, WARPS)
        put(sums.row_parts, 2 * width + 1, column // N, across, row + order, pairs.rows, total)
        mark_fallback(sums.needs_fallback, order, exp_sum_out_of_range(total) & (row + order < pairs.rows))


@triton.jit
def _exp_sums(
    z, width, needs_mask, row_factor, offset, norms, sums, pairs, row, column,
    M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Return Σ exp(s - offset) of rows and columns, in parts (reductions.py), piece by piece."""
    if PIECES > 1:
        left, right = halves(z, M, N)
        middle = column + N // 2
        a = _exp_sums(left, width, needs_mask, row_factor, offset, norms, sums, pairs, row, column, M, N // 2, PIECES // 2, WARPS)
        b = _exp_sums(right, width, needs_mask, row_factor, offset, norms, sums, pairs, row, middle, M, N // 2, PIECES // 2, WARPS)
        totals = TotalsOfTile(a.rows + b.rows, concat_columns(a.columns, b.columns))
    else:
        column_factor = _of_width(norms.ry, width, norms.column_stride, column, N)
        power = tl.exp2(z * (row_factor[:, None] * column_factor[None, :]) - offset)
        if needs_mask:
            power = tl.where(negatives(pairs, row, column, True, M, N), power, 0.0)
        column_total = tl.zeros((1, N), tl.float32)
        if sums.column_parts is not None:
            column_total = reduce_columns(power, SUM, M, N, WARPS)
        totals = TotalsOfTile(reduce_rows(power, SUM, M, N), column_total)
    return totals


@triton.jit
def _is_out_of_range(sums, pairs, row, column, DIMS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return whether some sum that the fast launch wrote for a tile is out of range."""
    i, j = row + tl.arange(0, M), column + tl.arange(0, N)
    out_of_range = False
    for width in tl.static_range(len(DIMS)):
        total = get(sums.row_parts, 2 * width + 1, column // N, tl.cdiv(pairs.columns, N), i, pairs.rows)
        out_of_range = out_of_range | (tl.max((exp_sum_out_of_range(total) & (i < pairs.rows)).to(tl.int32), 0) > 0)
        if sums.column_parts is not None:
            total = get(sums.column_parts, 2 * width + 1, row // M, tl.cdiv(pairs.rows, M), j, pairs.columns)
            out_of_range = out_of_range | (tl.max((exp_sum_out_of_range(total) & (j < pairs.columns)).to(tl.int32), 0) > 0)
    return out_of_range


@triton.jit(do_not_specialize=["rows", "columns", "shift", "row_stride", "column_stride", "stride", "panel_rows"])
def prefix_gradient_kernel(
    x, y, scale, rx, ry, row_stride, column_stride, row_gain, row_peak, column_gain, column_peak, panels, row_parts, column_parts,
    needs_fallback, rows, columns, shift, stride, panel_rows,
    DIMS: tl.constexpr, GROUP_ENDS: tl.constexpr, KEPT: tl.constexpr, SAFE: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr, WARPS: tl.constexpr, DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Write a panel for each width, `panel_rows` below each other, and the sums of p_j s_j of each tile for its rows and columns.

    GROUP_ENDS: the last width of the group of each. KEPT: how many tiles the largest group keeps. SAFE: compute only the tiles with
    a peak out of the range in which exp(s) may be used without subtracting it.
    """
    pairs = PairArgs(None, None, None, None, None, 0.0, rows, columns, shift)
    norms = NormArgs(rx, ry, row_stride, column_stride)
    softmax = PrefixSoftmax(row_gain, row_peak, column_gain, column_peak)
    sums = PartialSums(row_parts, column_parts, needs_fallback)
    target = Target(panels, stride)
    factor = _factor(scale)
    last: tl.constexpr = len(DIMS) - 1
    tiles = tl.cdiv(rows, M) * tl.cdiv(columns, N)
    if SAFE:
        tiles = tl.where(tl.load(needs_fallback) != 0, tiles, 0)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=not SAFE):
        row, column = tile_at(t, rows, columns, M, N, GROUP)
        compute_tile = True
        if SAFE:
            compute_tile = _has_peak_out_of_range(softmax, norms, pairs, factor, row, column, DIMS, M, N)
        if compute_tile:
            needs_mask = tile_needs_mask(pairs, row, column, True, M, N)
            z = tl.zeros((M, N), tl.float32)
            kept = ()
            no_tile = tl.zeros((M, N // PIECES), panels.dtype if DESCRIPTORS else panels.dtype.element_ty)
            for _ in tl.static_range(KEPT * PIECES):
                kept += (no_tile,)  # type: ignore[assignment]
            for k in range(0, DIMS[last] // K):
                a = load_block(x, row, k * K, rows, WIDTH, M, K, DESCRIPTORS)
                b = load_block(y, column, k * K, columns, WIDTH, N, K, DESCRIPTORS)
                z = tl.dot(a, b.T, z, input_precision=PRECISION)
                for j in tl.static_range(last):
                    if (k + 1) * K == DIMS[j]:
                        kept = _put_gradient(
                            z, j, kept, needs_mask, factor, softmax, norms, sums, target, pairs, row, column, panel_rows,
                            GROUP_ENDS, SAFE, M, N, PIECES, WARPS, DESCRIPTORS, ROUND_TO_TF32,
                        )  # fmt: skip
            _put_gradient(
                z, last, kept, needs_mask, factor, softmax, norms, sums, target, pairs, row, column, panel_rows,
                GROUP_ENDS, SAFE, M, N, PIECES, WARPS, DESCRIPTORS, ROUND_TO_TF32,
            )  # fmt: skip


@triton.jit
def _put_gradient(
    z, width: tl.constexpr, kept, needs_mask, factor, softmax, norms, sums, target, pairs, row, column, panel_rows,
    GROUP_ENDS: tl.constexpr, SAFE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr, WARPS: tl.constexpr,
    DESCRIPTORS: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Write the sums of p · s of one width of a tile and, if it ends its group, the tiles of the group; return the kept tiles."""
    row_factor = _of_width(norms.rx, width, norms.row_stride, row, M) * factor
    result = _piece_gradient(
        z, width, 0, kept, needs_mask, row_factor, _offset(factor), softmax, norms, sums, target, pairs, row, column, panel_rows,
        GROUP_ENDS, SAFE, M, N, PIECES, PIECES, WARPS, DESCRIPTORS, ROUND_TO_TF32,
    )  # fmt: skip
    total, across, down = finish_rows(result.rows, SUM, M, WARPS), tl.cdiv(pairs.columns, N), tl.cdiv(pairs.rows, M)
    put(sums.row_parts, width, column // N, across, row + row_order(M, WARPS), pairs.rows, total)
    if sums.column_parts is not None:
        total = finish_columns(result.columns, SUM)
        put(sums.column_parts, width, row // M, down, column + tl.arange(0, N), pairs.columns, total)
    return result.kept


@triton.jit
def _piece_gradient(
    z, width: tl.constexpr, piece: tl.constexpr, kept, needs_mask, row_factor, offset, softmax, norms, sums, target, pairs, row,
    column, panel_rows,
    GROUP_ENDS: tl.constexpr, SAFE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr, OF: tl.constexpr,
    WARPS: tl.constexpr, DESCRIPTORS: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Keep or write the gradient in z of one width, piece by piece, and return the sums of p · s, in parts (reductions.py).

    piece: the first piece of z, of OF pieces of the tile. PIECES: how many pieces z has.
    """
    if PIECES > 1:
        left, right = halves(z, M, N)
        a = _piece_gradient(
            left, width, piece, kept, needs_mask, row_factor, offset, softmax, norms, sums, target, pairs, row, column, panel_rows,
            GROUP_ENDS, SAFE, M, N // 2, PIECES // 2, OF, WARPS, DESCRIPTORS, ROUND_TO_TF32,
        )  # fmt: skip
        b = _piece_gradient(
            right, width, piece + PIECES // 2, a.kept, needs_mask, row_factor, offset, softmax, norms, sums, target, pairs, row,
            column + N // 2, panel_rows, GROUP_ENDS, SAFE, M, N // 2, PIECES // 2, OF, WARPS, DESCRIPTORS, ROUND_TO_TF32,
        )  # fmt: skip
        result = GradientOfTile(a.rows + b.rows, concat_columns(a.columns, b.columns), b.kept)
    else:
        q = _gradient(z, width, needs_mask, row_factor, offset, softmax, norms, pairs, row, column, SAFE, M, N)
        ps = q * z
        column_total = tl.zeros((1, N), tl.float32)
        if sums.column_parts is not None:
            column_total = reduce_columns(ps, SUM, M, N, WARPS)
        row_total = reduce_rows(ps, SUM, M, N)
        if GROUP_ENDS[width] == width:
            for back in tl.static_range(width + 1):
                if GROUP_ENDS[width - back] == width:
                    if back > 0:
                        q += kept[_place(GROUP_ENDS, width - back) * OF + piece].to(tl.float32)
                    first = (width - back) * panel_rows
                    rows, columns = first + pairs.rows, pairs.columns
                    store_block(target, q, first + row, column, rows, columns, M, N, DESCRIPTORS, ROUND_TO_TF32)
        else:
            kept = _replaced(kept, _place(GROUP_ENDS, width) * OF + piece, q)
        result = GradientOfTile(row_total, column_total, kept)
    return result


@triton.jit
def _gradient(
    z, width: tl.constexpr, needs_mask, row_factor, offset, softmax, norms, pairs, row, column,
    SAFE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return the gradient in z of one width."""
    stride_M, stride_N = norms.row_stride, norms.column_stride
    both = row_factor[:, None] * _of_width(norms.ry, width, stride_N, column, N)[None, :]
    gains, p = tl.zeros((M, 1), tl.float32), tl.zeros((M, N), tl.float32)
    if softmax.row_gain is not None:
        gains = _of_width(softmax.row_gain, width, stride_M, row, M)[:, None]
    if SAFE:
        if softmax.row_gain is not None:
            p = tl.exp2(z * both - _of_width(softmax.row_peak, width, stride_M, row, M)[:, None] * LOG2_E) * gains
        if softmax.column_gain is not None:
            peaks_N = _of_width(softmax.column_peak, width, stride_N, column, N)[None, :]
            p += tl.exp2(z * both - peaks_N * LOG2_E) * _of_width(softmax.column_gain, width, stride_N, column, N)[None, :]
    else:
        if softmax.column_gain is not None:
            gains = gains + _of_width(softmax.column_gain, width, stride_N, column, N)[None, :]
        p = tl.exp2(z * both - offset) * gains
    if needs_mask:
        p = tl.where(negatives(pairs, row, column, True, M, N), p, 0.0)
    return p * both


@triton.constexpr_function
def _place(group_ends: tuple[int, ...], width: int) -> int:
    """Return the place of a width in its group, which is where its tile is kept."""
    return width - group_ends.index(group_ends[width])


@triton.jit
def _replaced(tiles, place: tl.constexpr, tile):
    """Return the tiles with another one at a place."""
    result = ()
    for i in tl.static_range(len(tiles)):
        if i == place:
            result += (tile.to(tiles[i].dtype),)  # type: ignore[assignment]
        else:
            result += (tiles[i],)  # type: ignore[assignment]
    return result


@triton.jit(do_not_specialize=["rows", "columns", "shift", "row_stride", "column_stride"])
def narrow_gradient_kernel(
    x, y, scale, rx, ry, row_stride, column_stride, row_gain, row_peak, column_gain, column_peak, gradient, totals, needs_fallback,
    rows, columns, shift,
    DIMS: tl.constexpr, SAFE: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the product of the gradients in z of narrow widths with y, (M, DIMS[-1]), and the sums of p_j s_j of rows (J, M).

    A program has the sums of M rows in registers and goes over all columns, so that no panel is written. With x and y exchanged, it
    computes the gradient of y.
    """
    pairs = PairArgs(None, None, None, None, None, 0.0, rows, columns, shift)
    norms = NormArgs(rx, ry, row_stride, column_stride)
    softmax = PrefixSoftmax(row_gain, row_peak, column_gain, column_peak)
    factor = _factor(scale)
    offset = _offset(factor)
    row = tl.program_id(0) * M
    last: tl.constexpr = len(DIMS) - 1
    steps: tl.constexpr = DIMS[last] // K
    compute = True
    if SAFE:
        compute = tl.load(needs_fallback) != 0
    if compute:
        x_blocks, sums, row_factors, row_totals = (), (), (), ()
        for k in tl.static_range(steps):
            x_blocks += (load_block(x, row, k * K, rows, WIDTH, M, K, DESCRIPTORS),)  # type: ignore[assignment]
            sums += (tl.zeros((M, K), tl.float32),)  # type: ignore[assignment]
        for j in tl.static_range(len(DIMS)):
            row_factors += (_of_width(rx, j, row_stride, row, M) * factor,)  # type: ignore[assignment]
            row_totals += (tl.zeros((M,), tl.float32),)  # type: ignore[assignment]
        for column in tl.range(0, columns, N):
            needs_mask = tile_needs_mask(pairs, row, column, True, M, N)
            y_blocks, qs, new_totals, new_sums = (), (), (), ()
            z = tl.zeros((M, N), tl.float32)
            for k in tl.static_range(steps):
                y_blocks += (load_block(y, column, k * K, columns, WIDTH, N, K, DESCRIPTORS),)  # type: ignore[assignment]
                z = tl.dot(x_blocks[k], y_blocks[k].T, z, input_precision=PRECISION)
                if _width_ending_at(DIMS, (k + 1) * K) is not None:
                    q = _gradient(
                        z, len(qs), needs_mask, row_factors[len(qs)], offset, softmax, norms, pairs, row, column, SAFE, M, N
                    )
                    new_totals += (row_totals[len(qs)] + tl.sum(q * z, 1),)  # type: ignore[assignment]
                    qs += (q,)  # type: ignore[assignment]
            row_totals = new_totals
            q = tl.zeros((M, N), tl.float32)
            for back in tl.static_range(1, steps + 1):
                if _width_ending_at(DIMS, (steps - back + 1) * K) is not None:
                    q += qs[_width_ending_at(DIMS, (steps - back + 1) * K)]
                block = tl.dot(q.to(x.dtype), y_blocks[steps - back], sums[steps - back], input_precision=PRECISION)
                new_sums = (block,) + new_sums  # type: ignore[assignment]  # noqa: RUF005
            sums = new_sums
        i = row + tl.arange(0, M)
        for k in tl.static_range(steps):
            place = gradient + i.to(tl.int64)[:, None] * DIMS[last] + k * K + tl.arange(0, K)[None, :]
            tl.store(place, sums[k], mask=(i < rows)[:, None])
        for j in tl.static_range(len(DIMS)):
            tl.store(totals + j * rows.to(tl.int64) + i, row_totals[j], mask=i < rows)


@triton.constexpr_function
def _width_ending_at(dims: tuple[int, ...], end: int) -> int | None:
    """Return which width ends there, if one does."""
    return dims.index(end) if end in dims else None


@triton.jit
def _has_peak_out_of_range(
    softmax, norms, pairs, factor, row, column, DIMS: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    lowest = LOWEST_PEAK + _offset(factor) / LOG2_E
    i, j = row + tl.arange(0, M), column + tl.arange(0, N)
    out_of_range = False
    for width in tl.static_range(len(DIMS)):
        peaks = _of_width(softmax.row_peak, width, norms.row_stride, row, M)
        out_of_range = out_of_range | (tl.max(((peaks < lowest) & (i < pairs.rows)).to(tl.int32), 0) > 0)
        if softmax.column_peak is not None:
            peaks = _of_width(softmax.column_peak, width, norms.column_stride, column, N)
            out_of_range = out_of_range | (tl.max(((peaks < lowest) & (j < pairs.columns)).to(tl.int32), 0) > 0)
    return out_of_range


@triton.jit(do_not_specialize=["rows", "positive_rows"])
def finish_kernel(
    gradient, embeddings, partners, dpos, along, factor, finished, rows, positive_rows,
    DIMS: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write factor · (gradient + Σ_j dpos_j · partners - Σ_j along_j · embeddings) over the widths j that contain a column."""
    i = tl.program_id(0) * R + tl.arange(0, R)
    inside = (i < rows)[:, None]
    by = tl.load(factor)
    columns: tl.constexpr = DIMS[len(DIMS) - 1]
    dpos_R, along_R = tl.zeros((R,), tl.float32), tl.zeros((R,), tl.float32)
    for j in tl.static_range(len(DIMS) - 1, -1, -1):
        dpos_R += tl.load(dpos + j * positive_rows + i, mask=i < positive_rows, other=0.0)
        along_R += tl.load(along + j * rows + i, mask=i < rows, other=0.0)
        for k in range(DIMS[j - 1] // K if j > 0 else 0, DIMS[j] // K):
            column = k * K + tl.arange(0, K)[None, :]
            at = i.to(tl.int64)[:, None] * WIDTH + column
            g = tl.load(gradient + i.to(tl.int64)[:, None] * columns + column, mask=inside, other=0.0)
            g += dpos_R[:, None] * tl.load(partners + at, mask=(i < positive_rows)[:, None], other=0.0).to(tl.float32)
            g -= along_R[:, None] * tl.load(embeddings + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(finished + at, (g * by).to(finished.dtype.element_ty), mask=inside)


def _step(dims: Sequence[int], largest: int) -> int:
    """Return the largest step of a product at whose multiples all widths end."""
    return math.gcd(largest, *dims)


def _launch(kernel: str, x_MD: Tensor, y_ND: Tensor, dims: Sequence[int], compute: ComputeOptions) -> Launch:
    blocks = {"stats": STATS_BLOCKS, "gradient": GRADIENT_BLOCKS, "narrow": NARROW_BLOCKS}[kernel]
    if x_MD.device.type == "cpu":
        blocks = blocks_for(kernel, x_MD.device, x_MD.dtype, compute.precision, x_MD.shape[1])
    elif kernel == "gradient" and panel_dtype(x_MD) == torch.float32:
        # A stage less makes space in shared memory for a larger piece of the gradient.
        blocks = blocks._replace(stages=blocks.stages - 1)
    blocks = blocks._replace(k=_step(dims, blocks.k))
    return Launch(architecture_of(x_MD.device), kernel, x_MD, y_ND, compute, blocks=blocks)


def prefix_norms(x_MD: Tensor, y_ND: Tensor, dims: tuple[int, ...]) -> PrefixNorms:
    """Return norms and cosines of positives of every prefix."""
    (rows, width), columns = x_MD.shape, y_ND.shape[0]
    squares_JM, products_JM = x_MD.new_empty(2, len(dims), rows, dtype=torch.float32)
    squares_JN = x_MD.new_empty(len(dims), columns, dtype=torch.float32)
    norms_kernel[(cdiv(max(rows, columns), ROWS),)](
        x_MD, y_ND, squares_JM, squares_JN, products_JM, rows, columns, DIMS=dims, WIDTH=width, R=ROWS, K=_step(dims, 64)
    )
    (rx_JM, rx2_JM), (ry_JN, ry2_JN) = (_reciprocals(squares) for squares in (squares_JM, squares_JN))
    return PrefixNorms(rx_JM, ry_JN, products_JM.mul_(rx_JM).mul_(ry_JN[:, :rows]), rx2_JM, ry2_JN)


def _reciprocals(squares: Tensor) -> tuple[Tensor, Tensor]:
    """Return the reciprocal norms, and their squares where a norm has a gradient."""
    norms = squares.sqrt()
    reciprocal = norms.clamp_min(NORM_EPS).reciprocal()
    return _padded(reciprocal), reciprocal.square().masked_fill_(norms < NORM_EPS, 0)


def _padded(vectors: Tensor) -> Tensor:
    """Return the vectors of all widths in the form that kernels read."""
    length = vectors.shape[1]
    return torch.nn.functional.pad(vectors, (0, PADDING + -length % VECTOR_ALIGNMENT.value))[:, :length]


@on_device_of_input
def prefix_loss(
    x_MD: Tensor,
    y_ND: Tensor,
    scale: Tensor,
    dims: tuple[int, ...],
    weights: tuple[float, ...],
    *,
    symmetric: bool,
    compute: ComputeOptions,
) -> tuple[Tensor, PrefixState]:
    """Return the weighted sum over widths of the softmax loss of normalised prefixes, and what backward needs."""
    rows = x_MD.shape[0]
    norms = prefix_norms(x_MD, y_ND, dims)
    row_stats, column_stats = _prefix_stats(x_MD, y_ND, scale, dims, norms, symmetric, without_saved_exp(compute))
    weights_JM = torch.cat([x_MD.new_full((rows,), weight, dtype=torch.float32) for weight in weights])
    normalised = normalise(row_stats, column_stats, norms.positive_JM.view(-1), scale, weights_JM, 0.0)
    share = 1 / (rows * (2 if symmetric else 1))
    shape = len(dims), rows
    softmax = [None if side is None else Softmax(side.peak.view(shape), side.gain.view(shape)) for side in normalised[2:]]
    assert softmax[0] is not None
    state = PrefixState(dims, norms, softmax[0], softmax[1], normalised.dpos_M.view(shape), share)
    return normalised.loss_M.sum() * share, state


def _prefix_stats(
    x_MD: Tensor,
    y_ND: Tensor,
    scale: Tensor,
    dims: tuple[int, ...],
    norms: PrefixNorms,
    symmetric: bool,
    compute: ComputeOptions,
) -> tuple[Stats, Stats | None]:
    """Return the stats of rows and, if symmetric, of columns: the widths behind each other (J · M)."""
    launch = _launch("stats", x_MD, y_ND, dims, compute)
    kinds = [EXPONENTIALS.value] * len(dims)
    row_sums, column_sums = Sums(x_MD, kinds), Sums(y_ND, kinds) if symmetric else None
    needs_fallback = launch.new_marks()
    bytes_per_cell = row_sums.bytes_per_cell(launch.blocks.n) + (column_sums.bytes_per_cell(launch.blocks.m) if column_sums else 0)
    for p in launch.panels(bytes_per_cell, CACHED_BYTES // (x_MD.shape[1] * x_MD.element_size())):
        down, across = launch.tile_counts(p)
        row_parts = row_sums.new_parts(across, p.rows)
        column_parts = column_sums.new_parts(down, p.columns) if column_sums else None
        for safe in (False, True):
            prefix_stats_kernel[launch.grid(p)](
                *launch.operands(p), scale, *_norm_args(norms, p), row_parts, column_parts, needs_fallback, p.rows, p.columns,
                p.r.start - p.c.start, DIMS=dims, SAFE=safe, WARPS=launch.blocks.warps, **launch.constants,
            )  # fmt: skip
        merge_parts(p, row_sums, row_parts, column_sums, column_parts)
        del row_parts, column_parts
    # Kernels have subtracted the offset from logits.
    offset = _offset_of(scale)
    rows, columns = (
        None if sums is None else Stats((sums.values[:, 0] + offset).view(-1), sums.values[:, 1].reshape(-1))
        for sums in (row_sums, column_sums)
    )
    assert rows is not None
    return rows, columns


def _norm_args(norms: PrefixNorms, p: Panel) -> NormArgs:
    rx_JM, ry_JN = norms.rx_JM[:, p.r], norms.ry_JN[:, p.c]
    return NormArgs(rx_JM, ry_JN, rx_JM.stride(0) // VECTOR_ALIGNMENT.value, ry_JN.stride(0) // VECTOR_ALIGNMENT.value)


def _offset_of(scale: Tensor) -> Tensor:
    """Return the offset of kernels (`_offset`), in base e."""
    return (scale.abs() - HIGHEST_PEAK.value).clamp_min(0)


def group_ends(dims: Sequence[int], max_kept: int) -> tuple[int, ...]:
    """Return the last width of the group of each: as few groups as the number of tiles that may be kept allows.

    The narrowest widths are the ones to be left out of the group of the widest, and they are grouped by the same rule.

    >>> group_ends((64, 128, 256, 512, 768), max_kept=3)
    (0, 4, 4, 4, 4)
    >>> group_ends((64, 128, 256, 512, 768), max_kept=1)
    (0, 2, 2, 4, 4)
    """
    ends: list[int] = []
    last = len(dims) - 1
    while last >= 0:
        size = min(max_kept, last) + 1
        if last - size + 1 == 0 and size > 1 and dims[1] <= BANDWIDTH_BOUND_COLUMNS:
            # Alone, the narrowest width takes no longer.
            size -= 1
        ends[:0] = [last] * size
        last -= size
    return tuple(ends)


class PanelProduct(NamedTuple):
    """The columns that the panel of a width multiplies, and whether its product is the first of these columns."""

    width: int
    columns: slice
    is_first: bool


def panel_products(dims: Sequence[int], ends: Sequence[int]) -> list[PanelProduct]:
    """Return the products of all panels. The last group, which has all columns, is first.

    >>> [(each.width, each.columns.start, each.columns.stop) for each in panel_products((64, 128, 256), (0, 2, 2))]
    [(1, 0, 128), (2, 128, 256), (0, 0, 64)]
    """
    products = []
    for j, end in enumerate(ends):
        starts_group = j == 0 or ends[j - 1] != end
        products.append(PanelProduct(j, slice(0 if starts_group else dims[j - 1], dims[j]), end == len(dims) - 1))
    return sorted(products, key=lambda product: not product.is_first)


@on_device_of_input
def prefix_grads(
    x_MD: Tensor,
    y_ND: Tensor,
    scale: Tensor,
    state: PrefixState,
    g: Tensor,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    needs_grad: NeedsGrad,
    compute: ComputeOptions,
) -> PrefixGradients:
    """Return the gradients of x, y and the scale, None if not needed, for the gradient g of the loss. dtypes: of dx and dy."""
    dims, norms, rows = state.dims, state.norms, x_MD.shape[0]
    compute = compute._replace(workspace=min(compute.workspace, PANELS_WORKSPACE))
    products, row_sums, column_sums = _products(x_MD, y_ND, scale, state, needs_grad, compute)
    # All sums have the factor log2(e), by which exp2 is exp; a scale of zero is replaced as in kernels.
    factor = scale * LOG2_E.value
    factor = factor.masked_fill(factor == 0, 1e-30)
    dpos_JM, ps_pos_JM = state.dpos_JM, state.dpos_JM * norms.positive_JM * factor
    ps_JM = row_sums + ps_pos_JM
    g = g * state.share
    dscale = ps_JM.sum() / factor * g
    by = g / LOG2_E.value
    dpos_JM = dpos_JM * norms.rx_JM * norms.ry_JN[:, :rows] * factor
    dx = dy = None
    if products.gx_MD is not None:
        dx = _finish(products.gx_MD, x_MD, y_ND, dpos_JM, ps_JM * norms.rx2_JM, by, dims, dtypes[0])
    if products.gy_ND is not None:
        assert column_sums is not None
        column_sums[:, :rows] += ps_pos_JM
        dy = _finish(products.gy_ND, y_ND, x_MD, dpos_JM, column_sums * norms.ry2_JN, by, dims, dtypes[1])
    return PrefixGradients(dx, dy, dscale)


def _products(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, state: PrefixState, needs_grad: NeedsGrad, compute: ComputeOptions
) -> tuple[GradientProducts, Tensor, Tensor | None]:
    """Return the products of the gradients in z of all widths, and the sums of p · s of rows (J, M) and columns (J, N)."""
    widest = state.dims[-1]
    products = GradientProducts(x_MD[:, :widest], y_ND[:, :widest], needs_grad, compute)
    every = _gradient_args(state, scale)
    # Gradients in fp16 could underflow.
    count = 0 if x_MD.dtype == torch.float16 else sum(d <= LARGEST_NARROW_WIDTH for d in state.dims[:-1])
    row_sums, column_sums = _add_panels(products, x_MD, y_ND, every.of_widths(slice(count, None)), needs_grad, compute)
    if count:
        narrow = every.of_widths(slice(0, count))
        totals = _narrow_gradient(_launch("narrow", x_MD, y_ND, narrow.dims, compute), narrow, products.gx_MD)
        row_sums = torch.cat([totals, row_sums])
        if column_sums is not None:
            launch = _launch("narrow", y_ND, x_MD, narrow.dims, compute)
            column_sums = torch.cat([_narrow_gradient(launch, narrow.exchanged(), products.gy_ND), column_sums])
    return products, row_sums, column_sums


def _narrow_gradient(launch: Launch, args: GradientArgs, into: Tensor | None) -> Tensor:
    """Add the gradients of narrow widths to `into`, and return the sums of p · s of rows (J, M)."""
    x_MD, y_ND, dims = launch.x_MD, launch.y_ND, args.dims
    p = Panel(slice(0, x_MD.shape[0]), slice(0, y_ND.shape[0]))
    gradient = x_MD.new_empty(p.rows, dims[-1], dtype=torch.float32)
    totals = x_MD.new_empty(len(dims), p.rows, dtype=torch.float32)
    for is_safe, softmax in ((False, args.fast), (True, args.safe)):
        narrow_gradient_kernel[(cdiv(p.rows, launch.blocks.m),)](
            *launch.operands(p), args.scale, *_norm_args(args.norms, p), *softmax, gradient, totals, args.needs_fallback, p.rows,
            p.columns, 0, DIMS=dims, SAFE=is_safe, M=launch.blocks.m, N=launch.blocks.n, **launch.product_constants,
        )  # fmt: skip
    if into is not None:
        into[:, : dims[-1]] += gradient
    return totals


def _add_panels(
    products: GradientProducts, x_MD: Tensor, y_ND: Tensor, args: GradientArgs, needs_grad: NeedsGrad, compute: ComputeOptions
) -> tuple[Tensor, Tensor | None]:
    """Add the products of the panels of these widths, and return the sums of p · s of rows (J, M) and columns (J, N)."""
    dims = args.dims
    launch = _launch("gradient", x_MD, y_ND, dims, compute)
    # Tiles in fp32 take twice the registers.
    ends = group_ends(dims, MAX_KEPT_TILES if panel_dtype(x_MD) == torch.bfloat16 or x_MD.device.type == "cpu" else 0)
    kinds = [SUMS.value] * cdiv(len(dims), 2)
    row_sums, column_sums = Sums(x_MD, kinds), Sums(y_ND, kinds) if needs_grad.y else None
    parts_per_cell = row_sums.bytes_per_cell(launch.blocks.n) + row_sums.bytes_per_cell(launch.blocks.m)
    buffer: Tensor | None = None
    for p in launch.panels(len(dims) * products.bytes_per_cell + parts_per_cell):
        down, across = launch.tile_counts(p)
        shape = len(dims), down * launch.blocks.m, cdiv(p.columns, ROW_ALIGNMENT.value) * ROW_ALIGNMENT.value
        if buffer is None:
            # The first panel is the largest.
            buffer = x_MD.new_empty(math.prod(shape), dtype=products.dtype)
        panels_JMN = buffer[: math.prod(shape)].view(shape)[:, :, : p.columns]
        row_parts = row_sums.new_parts(across, p.rows)
        column_parts = column_sums.new_parts(down, p.columns) if column_sums else None
        for is_safe, softmax in ((False, args.fast), (True, args.safe)):
            prefix_gradient_kernel[launch.grid(p)](
                *launch.operands(p), args.scale, *_norm_args(args.norms, p), *softmax.part(p),
                launch.target(panels_JMN.flatten(0, 1)), row_parts, column_parts, args.needs_fallback, p.rows, p.columns,
                p.r.start - p.c.start, shape[2], shape[1], DIMS=dims, GROUP_ENDS=ends, KEPT=max(map(ends.count, ends)) - 1,
                SAFE=is_safe, WARPS=launch.blocks.warps, ROUND_TO_TF32=products.rounds_to_tf32, **launch.constants,
            )  # fmt: skip
        merge_parts(p, row_sums, row_parts, column_sums, column_parts)
        for product in panel_products(dims, ends):
            products.add(panels_JMN[product.width, : p.rows], p, product.columns, starts=product.is_first)
        del row_parts, column_parts
    sums = [None if each is None else each.values.flatten(0, 1)[: len(dims)] for each in (row_sums, column_sums)]
    assert sums[0] is not None
    return sums[0], sums[1]


def _gradient_args(state: PrefixState, scale: Tensor) -> GradientArgs:
    """Return what the kernels of backward read of all widths."""
    offset = _offset_of(scale)
    fast: list[Tensor | None] = []
    safe: list[Tensor | None] = []
    out_of_range = []
    for side in (state.rows, state.columns):
        if side is None:
            fast, safe = [*fast, None, None], [*safe, None, None]
            continue
        fast += [_padded(side.gain * (offset - side.peak).exp_()), None]
        safe += [_padded(side.gain), _padded(side.peak)]
        out_of_range.append((side.peak < offset + LOWEST_PEAK.value).any())
    needs_fallback = torch.stack(out_of_range).any().to(torch.int32)
    return GradientArgs(state.dims, scale, state.norms, PrefixSoftmax(*fast), PrefixSoftmax(*safe), needs_fallback)


def _finish(
    gradient: Tensor,
    embeddings: Tensor,
    partners: Tensor,
    dpos_JM: Tensor,
    along: Tensor,
    by: Tensor,
    dims: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the embeddings; zero in the columns that no width contains."""
    rows, width = embeddings.shape
    finished = (torch.empty_like if width == dims[-1] else torch.zeros_like)(embeddings, dtype=dtype)
    finish_kernel[(cdiv(rows, ROWS),)](
        gradient, embeddings, partners, dpos_JM, along, by, finished, rows, dpos_JM.shape[1],
        DIMS=dims, WIDTH=width, R=ROWS, K=_step(dims, 64),
    )  # fmt: skip
    return finished
