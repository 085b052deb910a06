"""The losses of one block with the whole similarity matrix in the workspace, for small batches on CUDA. Legend: ../contract.py.

At some thousand rows the device waits for the host, so a step is few launches: the product z = x @ y.T, the sums of its rows and
columns in two launches (softmax only), the gradient in the logits, its two products, a sum over all tiles; in backward one.
6·M·N·D operations for both losses. The formulas are those of ../one_piece.py. All pairs count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import ComputeOptions, NeedsGrad, OnePiece
from ..products import units
from .launch import cdiv, launch_compiled
from .tile import LN_2, LOG2_E, log1p

# Beyond so many pairs the tiles are faster: they write no fp32 matrix. Kernels address fewer than 2^31 of them. In a CUDA graph,
# where more launches cost little, the tiles of bf16 embeddings are faster from fewer pairs on.
MAX_PAIRS, MAX_PAIRS_IN_GRAPH = 8192**2, 4096**2
# Rows and columns of a program's tile, and how many of its rows it computes at a time: few, so that registers suffice for many
# programs side by side. The best of fifteen on an H200.
TILE = (64, 256, 4)
# A program merges the sums of so many tiles for so many rows (columns) at a time.
MERGED = (32, 32)
# How many numbers a program adds, or finishes, at a time.
BLOCK = 1024

# Compiled kernels by all that they depend on. Triton's own search for them takes longer than a launch.
_compiled: dict[tuple[Any, ...], Any] = {}


class FusedGradients(NamedTuple):
    """Products of the gradient in the logits without the positives, and what `finish` needs to add these.

    x_MD, y_ND: as the products read them. sides: 1 for rows, 2 for rows and columns.
    sums: starts with 1 - p of each positive times the factor of the mean, for each side (sides, M).
    derivatives_at: the place in `sums` of the derivative in the scale; for the sigmoid loss, that in the bias follows.
    """

    x_MD: Tensor
    y_ND: Tensor
    gx_MD: Tensor | None
    gy_ND: Tensor | None
    sides: int
    sums: Tensor
    derivatives_at: int


def fits(shape: tuple[int, int, int], dtype: torch.dtype, compute: ComputeOptions) -> bool:
    """Return whether the workspace holds the matrix and its gradient, and the tiles would not be faster."""
    rows, documents, width = shape
    # fp16 cannot represent small gradients, and tf32 would need them rounded.
    if dtype != torch.bfloat16 and (dtype != torch.float32 or compute.precision != "ieee"):
        return False
    cells = rows * documents
    # What kernels address by 32-bit numbers.
    if documents * width > 2**31 - BLOCK:
        return False
    limit = MAX_PAIRS_IN_GRAPH if compute.in_graph and dtype == torch.bfloat16 else MAX_PAIRS
    return rows > 0 and documents > 1 and cells <= limit and cells * (4 + dtype.itemsize) <= compute.workspace


def softmax_loss(x_MD: Tensor, y_ND: Tensor, scale: Tensor, *, needs_grad: NeedsGrad | None, compute: ComputeOptions) -> OnePiece:
    """Return the mean over rows and columns of the cross-entropy of the logits, and its gradients."""
    return _softmax_loss(x_MD, y_ND, scale, 2, needs_grad, compute)


def row_softmax_loss(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, *, needs_grad: NeedsGrad | None, compute: ComputeOptions
) -> OnePiece:
    """Return the mean over rows alone."""
    return _softmax_loss(x_MD, y_ND, scale, 1, needs_grad, compute)


def _softmax_loss(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, sides: int, needs_grad: NeedsGrad | None, compute: ComputeOptions
) -> OnePiece:
    rows, columns = x_MD.shape[0], y_ND.shape[0]
    z_MN = _similarities(x_MD, y_ND, compute)
    device = x_MD.device
    down, across = cdiv(rows, TILE[0]), cdiv(columns, TILE[1])
    tiles, count, merging = down * across, sides * rows, cdiv(rows, MERGED[1])
    parts = _new(2 * (across * rows + (down * columns if sides == 2 else 0)), device)
    # Of each side: 1 - p of the positives, peaks, gains and similarities of the positives; then parts of the loss and of dscale,
    # and dscale itself.
    derivatives_at = 4 * count + sides * merging + tiles
    sums, loss = _new(derivatives_at + 1, device), _new((), device)
    kind = x_MD.dtype, device.index
    _launch(softmax_parts_kernel, (across, down), kind, (z_MN, scale, parts, rows, columns), (sides, *TILE))
    merged = z_MN, scale, parts, sums, 1 / count, rows, columns, down, across
    _launch(merge_kernel, (merging, sides), kind, merged, (sides, *MERGED))
    losses = 1 / count, 4 * count, sides * merging
    if needs_grad is None:
        _launch(total_kernel, (1, 1), kind, (sums, loss, *losses, 0), (0, BLOCK))
        return OnePiece(loss)
    g_MN = _new((rows, columns), device, x_MD.dtype)
    differentiated = z_MN, scale, sums, g_MN, rows, columns, 4 * count + sides * merging
    _launch(softmax_gradient_kernel, (across, down), kind, differentiated, (sides, *TILE))
    gx_MD, gy_ND = _products(g_MN, x_MD, y_ND, needs_grad, compute)
    _launch(total_kernel, (1, 1), kind, (sums, loss, *losses, tiles), (1, BLOCK))
    return OnePiece(loss, FusedGradients(x_MD, y_ND, gx_MD, gy_ND, sides, sums, derivatives_at))


def sigmoid_loss(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, bias: Tensor, *, needs_grad: NeedsGrad | None, compute: ComputeOptions
) -> OnePiece:
    """Return the mean over rows of the sum of -logsigmoid(label * (logit + bias)), and its gradients."""
    rows, columns = x_MD.shape[0], y_ND.shape[0]
    z_MN = _similarities(x_MD, y_ND, compute)
    device = x_MD.device
    down, across = cdiv(rows, TILE[0]), cdiv(columns, TILE[1])
    tiles = down * across
    g_MN = _new((rows, columns), device, x_MD.dtype) if needs_grad else None
    # 1 - p of the positives; then parts of the loss and its derivatives, and these themselves.
    derivatives_at = rows + 3 * tiles
    sums, loss = _new(derivatives_at + 2, device), _new((), device)
    kind = x_MD.dtype, device.index, needs_grad is None
    _launch(sigmoid_kernel, (across, down), kind, (z_MN, scale, bias, g_MN, sums, 1 / rows, rows, columns), TILE)
    gradients = None
    if needs_grad is not None:
        assert g_MN is not None
        gradients = FusedGradients(x_MD, y_ND, *_products(g_MN, x_MD, y_ND, needs_grad, compute), 1, sums, derivatives_at)
    totals = sums, loss, 1 / rows, rows, tiles, tiles
    _launch(total_kernel, (1, 1), kind, totals, (2 if needs_grad else 0, BLOCK))
    return OnePiece(loss, gradients)


def finish(
    gradients: FusedGradients, g: Tensor | None, scale: Tensor, dtypes: tuple[torch.dtype, torch.dtype], needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, y, the scale and the bias for the gradient g of the loss; those that are not needed are None."""
    x_MD, y_ND, gx_MD, gy_ND, sides, sums, derivatives_at = gradients
    (rows, width), columns, device = x_MD.shape, y_ND.shape[0], x_MD.device
    need_x, need_y, *need_scalars = needs
    dx = _new((rows, width), device, dtypes[0]) if need_x else None
    dy = _new((columns, width), device, dtypes[1]) if need_y else None
    dscale, dbias = (_new((), device) if need else None for need in (*need_scalars, False)[:2])
    programs = need_x * cdiv(rows * width, BLOCK) + need_y * cdiv(columns * width, BLOCK)
    products = gx_MD if need_x else None, gy_ND if need_y else None
    sizes = rows, columns, x_MD.stride(0), y_ND.stride(0), derivatives_at
    _launch(
        finish_kernel,
        (max(programs, 1), 1),
        (x_MD.dtype, device.index, dtypes, needs, g is None),
        (x_MD, y_ND, *products, sums, scale, g, dx, dy, dscale, dbias, *sizes),
        (sides, width, BLOCK),
    )
    return dx, dy, dscale, dbias


def _new(shape: int | tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _similarities(x_MD: Tensor, y_ND: Tensor, compute: ComputeOptions) -> Tensor:
    if x_MD.dtype == torch.bfloat16:
        return torch.mm(x_MD, y_ND.t(), out_dtype=torch.float32)
    with units(x_MD, compute.precision):
        return torch.mm(x_MD, y_ND.t())


def _products(
    g_MN: Tensor, x_MD: Tensor, y_ND: Tensor, needs_grad: NeedsGrad, compute: ComputeOptions
) -> tuple[Tensor | None, Tensor | None]:
    if x_MD.dtype == torch.bfloat16:
        gx_MD = torch.mm(g_MN, y_ND, out_dtype=torch.float32) if needs_grad.x else None
        return gx_MD, torch.mm(g_MN.t(), x_MD, out_dtype=torch.float32) if needs_grad.y else None
    with units(x_MD, compute.precision):
        return torch.mm(g_MN, y_ND) if needs_grad.x else None, torch.mm(g_MN.t(), x_MD) if needs_grad.y else None


def _launch(
    kernel: Any, programs: tuple[int, int], kind: tuple[Any, ...], arguments: tuple[Any, ...], constants: tuple[int, ...]
) -> None:
    """Launch a kernel with its arguments and constants by position.

    kind: what the kernel is compiled for beside the constants: a dtype, the index of the device, and which arguments are None.
    """
    # Not the kernel itself: Triton computes its hash from its source.
    key = id(kernel), kind, constants
    grid = *programs, 1
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = kernel[grid](*arguments, *constants)
        # Triton's interpreter compiles nothing.
        if compiled is not None:
            _compiled[key] = compiled
        return
    launch_compiled(compiled, grid, kind[1], arguments, constants)


@triton.jit(do_not_specialize=["rows", "columns"], do_not_specialize_on_alignment=["scale"])
def softmax_parts_kernel(z, scale, parts, rows, columns, SIDES: tl.constexpr, M: tl.constexpr, N: tl.constexpr, R: tl.constexpr):
    """Write peak and Σ exp(s - peak) over the others of each row of a tile to (2, across, rows) and, with two sides, of each column
    to (2, down, columns) behind it."""
    across, down = tl.num_programs(0), tl.num_programs(1)
    j = tl.program_id(0) * N + tl.arange(0, N)
    factor = tl.load(scale)
    column_peak, column_total = tl.full((R, N), float("-inf"), tl.float32), tl.zeros((R, N), tl.float32)
    for start in range(0, M, R):
        i = tl.program_id(1) * M + start + tl.arange(0, R)
        counted = ((i < rows)[:, None] & (j < columns)[None, :]) & (i[:, None] != j[None, :])
        s = tl.load(z + (i * columns)[:, None] + j[None, :], mask=counted, other=0.0) * factor
        s = tl.where(counted, s, float("-inf"))
        peak = tl.max(s, 1)
        total = tl.sum(_exp(s, peak[:, None]), 1)
        at = parts + tl.program_id(0) * rows + i
        tl.store(at, peak, mask=i < rows)
        tl.store(at + across * rows, total, mask=i < rows)
        if SIDES == 2:
            higher = tl.maximum(column_peak, s)
            column_total = column_total * _exp(column_peak, higher) + _exp(s, higher)
            column_peak = higher
    if SIDES == 2:
        highest = tl.max(column_peak, 0)
        sum_of_column = tl.sum(column_total * _exp(column_peak, highest[None, :]), 0)
        place = parts + 2 * across * rows + tl.program_id(1) * columns + j
        tl.store(place, highest, mask=j < columns)
        tl.store(place + down * columns, sum_of_column, mask=j < columns)


@triton.jit
def _exp(s, peak):
    """Return exp(s - peak), and zero where there is nothing: where both are -inf."""
    return tl.exp2((s - tl.where(peak == float("-inf"), 0.0, peak)) * LOG2_E)


@triton.jit(do_not_specialize=["rows", "columns", "down", "across"], do_not_specialize_on_alignment=["scale"])
def merge_kernel(
    z, scale, parts, sums, share, rows, columns, down, across, SIDES: tl.constexpr, K: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """Merge the parts of rows (columns) and write, for each side, 1 - p of the positive with its share in the mean, peak, gain and
    similarity of the positive; then the sum of the losses of each program."""
    side = tl.program_id(1)
    i = tl.program_id(0) * M + tl.arange(0, M)
    # Rows beyond the edge repeat the last one.
    read, length = tl.minimum(i, rows - 1), tl.where(side == 0, rows, columns)
    first, number = parts + side * 2 * across * rows, tl.where(side == 0, across, down)
    peak, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    for start in range(0, number, K):
        k = start + tl.arange(0, K)
        at = first + (k * length)[:, None] + read[None, :]
        part_peak = tl.load(at, mask=(k < number)[:, None], other=float("-inf"))
        part_total = tl.load(at + number * length, mask=(k < number)[:, None], other=0.0)
        higher = tl.maximum(peak, tl.max(part_peak, 0))
        total = total * _exp(peak, higher) + tl.sum(part_total * _exp(part_peak, higher[None, :]), 0)
        peak = higher
    similarity = tl.load(z + read * (columns + 1))
    # The logarithm of the odds of the others against the positive.
    t = (peak - similarity * tl.load(scale)) + tl.log2(total) * LN_2
    u = tl.exp2(-tl.abs(t) * LOG2_E)
    others = tl.where(t > 0, 1.0, u) / (1.0 + u) * share
    out, vector = sums + side * rows + i, SIDES * rows
    tl.store(out, others, mask=i < rows)
    tl.store(out + vector, peak, mask=i < rows)
    tl.store(out + 2 * vector, others / total, mask=i < rows)
    tl.store(out + 3 * vector, similarity, mask=i < rows)
    loss = tl.sum(tl.where(i < rows, tl.maximum(t, 0.0) + log1p(u), 0.0), 0)
    tl.store(sums + 4 * vector + side * tl.num_programs(0) + tl.program_id(0), loss)


@triton.jit(do_not_specialize=["rows", "columns", "parts_at"], do_not_specialize_on_alignment=["scale"])
def softmax_gradient_kernel(
    z, scale, sums, gradient, rows, columns, parts_at,
    SIDES: tl.constexpr, M: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Write the gradient in the logits, with zeros for the positives, and each tile's part of the derivative in the scale."""
    j = tl.program_id(0) * N + tl.arange(0, N)
    factor, vector = tl.load(scale), SIDES * rows
    if SIDES == 2:
        column_peak = tl.load(sums + vector + rows + j, mask=j < columns, other=0.0)
        column_gain = tl.load(sums + 2 * vector + rows + j, mask=j < columns, other=0.0)
        column_positive = tl.load(sums + 3 * vector + rows + j, mask=j < columns, other=0.0)
    part = tl.zeros((R, N), tl.float32)
    for start in range(0, M, R):
        i = tl.program_id(1) * M + start + tl.arange(0, R)
        at = (i * columns)[:, None] + j[None, :]
        inside = (i < rows)[:, None] & (j < columns)[None, :]
        counted = inside & (i[:, None] != j[None, :])
        similarity = tl.load(z + at, mask=counted, other=0.0)
        s = tl.where(counted, similarity * factor, float("-inf"))
        peak = tl.load(sums + vector + i, mask=i < rows, other=0.0)
        gain = tl.load(sums + 2 * vector + i, mask=i < rows, other=0.0)
        positive = tl.load(sums + 3 * vector + i, mask=i < rows, other=0.0)
        g = tl.exp2((s - peak[:, None]) * LOG2_E) * gain[:, None]
        # Differences: the derivatives of the positives are minus the sums of the others', and would cancel with them.
        part += g * (similarity - positive[:, None])
        if SIDES == 2:
            of_columns = tl.exp2((s - column_peak[None, :]) * LOG2_E) * column_gain[None, :]
            part += of_columns * (similarity - column_positive[None, :])
            g += of_columns
        tl.store(gradient + at, g, mask=inside)
    tl.store(sums + parts_at + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(part, 1), 0))


@triton.jit(do_not_specialize=["rows", "columns"], do_not_specialize_on_alignment=["scale", "bias"])
def sigmoid_kernel(
    z, scale, bias, gradient, sums, share, rows, columns, M: tl.constexpr, N: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Write each tile's parts of the loss and of the derivatives in scale and bias behind the first `rows` of `sums`; if `gradient`
    is given, also the gradient in the logits with zeros for the positives, whose own, negated, comes first in `sums`."""
    j = tl.program_id(0) * N + tl.arange(0, N)
    factor, offset = tl.load(scale), tl.load(bias)
    value, slope, slope_in_scale = (tl.zeros((R, N), tl.float32), tl.zeros((R, N), tl.float32), tl.zeros((R, N), tl.float32))
    for start in range(0, M, R):
        i = tl.program_id(1) * M + start + tl.arange(0, R)
        at = (i * columns)[:, None] + j[None, :]
        inside, is_positive = (i < rows)[:, None] & (j < columns)[None, :], i[:, None] == j[None, :]
        similarity = tl.load(z + at, mask=inside, other=0.0)
        s = similarity * factor + offset
        # A positive costs softplus(-s), a negative softplus(s).
        s = tl.where(inside, tl.where(is_positive, -s, s), float("-inf"))
        u = tl.exp2(-tl.abs(s) * LOG2_E)
        # One division for 1 / (1 + u) and for u / (2 + u), whose inverse hyperbolic tangent is log(1 + u) / 2.
        both = 1.0 / ((1.0 + u) * (2.0 + u))
        value += tl.maximum(s, 0.0) + _twice_atanh(u * (1.0 + u) * both)
        if gradient is not None:
            g = tl.where(s > 0, 1.0, u) * ((2.0 + u) * both) * share
            signed = tl.where(is_positive, -g, g)
            slope += signed
            slope_in_scale += signed * similarity
            tl.store(gradient + at, tl.where(is_positive, 0.0, g), mask=inside)
            column, row = tl.program_id(0) * N, tl.program_id(1) * M + start
            if (column < row + R) & (column + N > row):
                has_positive = (i >= column) & (i < column + N) & (i < rows)
                tl.store(sums + i, tl.sum(tl.where(is_positive, g, 0.0), 1), mask=has_positive)
    tile, tiles = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.num_programs(0) * tl.num_programs(1)
    tl.store(sums + rows + tile, tl.sum(tl.sum(value, 1), 0))
    if gradient is not None:
        tl.store(sums + rows + tiles + tile, tl.sum(tl.sum(slope_in_scale, 1), 0))
        tl.store(sums + rows + 2 * tiles + tile, tl.sum(tl.sum(slope, 1), 0))


@triton.jit
def _twice_atanh(w):
    """Return 2 atanh(w) for 0 <= w <= 1/3 by its series, whose first omitted term is below 2e-8 of the result."""
    square = w * w
    series = 1 / 15 + square * (1 / 17)
    series = 1 / 13 + square * series
    series = 1 / 11 + square * series
    series = 1 / 9 + square * series
    series = 1 / 7 + square * series
    series = 1 / 5 + square * series
    series = 1 / 3 + square * series
    return 2.0 * w + 2.0 * w * square * series


@triton.jit(do_not_specialize=["start", "count", "part_count"])
def total_kernel(sums, loss, factor, start, count, part_count, DERIVATIVES: tl.constexpr, K: tl.constexpr):
    """Write the sum of `count` numbers of `sums`, times factor, to `loss`, and the sums of the parts behind them behind those."""
    tl.store(loss, _sum(sums + start, count, K) * factor)
    for derivative in tl.static_range(DERIVATIVES):
        parts = sums + start + count
        tl.store(parts + DERIVATIVES * part_count + derivative, _sum(parts + derivative * part_count, part_count, K))


@triton.jit
def _sum(values, count, K: tl.constexpr):
    k = tl.arange(0, K)
    total = tl.zeros((K,), tl.float32)
    for first in range(0, count, K):
        total += tl.load(values + first + k, mask=first + k < count, other=0.0)
    return tl.sum(total, 0)


@triton.jit(
    do_not_specialize=["rows", "columns", "x_stride", "y_stride", "derivatives_at"],
    do_not_specialize_on_alignment=["x", "y", "scale", "g"],
)
def finish_kernel(
    x, y, gx, gy, sums, scale, g, dx, dy, dscale, dbias, rows, columns, x_stride, y_stride, derivatives_at,
    SIDES: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write the gradients with the positives and all factors."""
    incoming = 1.0
    if g is not None:
        incoming = tl.load(g)
    program = tl.program_id(0)
    if program == 0:
        if dscale is not None:
            tl.store(dscale, tl.load(sums + derivatives_at) * incoming)
        if dbias is not None:
            tl.store(dbias, tl.load(sums + derivatives_at + 1) * incoming)
    factor = tl.load(scale) * incoming
    if dx is not None:
        _finish_rows(gx, y, sums, dx, factor, program, rows, rows, y_stride, SIDES, WIDTH, K)
        program -= tl.cdiv(rows * WIDTH, K)
    if dy is not None:
        _finish_rows(gy, x, sums, dy, factor, program, columns, rows, x_stride, SIDES, WIDTH, K)


@triton.jit
def _finish_rows(
    product, partners, others, out, factor, program, length, rows, stride, SIDES: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr
):
    """Write factor · (product - others · partners) of one block of numbers; nothing if the program has another task."""
    k = program * K + tl.arange(0, K)
    inside = (k >= 0) & (k < length * WIDTH)
    i, d = k // WIDTH, k % WIDTH
    has_partner = inside & (i < rows)
    dpos = tl.load(others + i, mask=has_partner, other=0.0)
    if SIDES == 2:
        dpos += tl.load(others + rows + i, mask=has_partner, other=0.0)
    partner = tl.load(partners + i.to(tl.int64) * stride + d, mask=has_partner, other=0.0).to(tl.float32)
    gradient = tl.load(product + k, mask=inside, other=0.0) - dpos * partner
    tl.store(out + k, gradient * factor, mask=inside)
