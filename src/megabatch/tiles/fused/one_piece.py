"""The losses of one block with the whole similarity matrix in the workspace, for small batches on CUDA. Legend: ../contract.py.

At some thousand rows the device waits for the host, so a step is few launches: the product z = x @ y.T, the sums of its rows and
columns (softmax only), the gradient in the logits, a sum over all tiles, the two products of the gradient; and one in backward.
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
from .launch import cdiv
from .tile import LN_2, LOG2_E, log1p

# Beyond so many pairs the tiles are faster: they write no fp32 matrix.
MAX_PAIRS = 8192**2
# A program sums over so many rows (columns), reading so many entries of each at a time.
ROW_TILE, COLUMN_TILE = (16, 256), (128, 32)
GRADIENT_TILE = (32, 128)
# How many numbers a program adds, or finishes, at a time.
BLOCK = 1024

# Compiled kernels by all that they depend on. Triton's own search for them takes longer than a launch.
_compiled: dict[tuple[Any, ...], Any] = {}


class FusedGradients(NamedTuple):
    """Products of the gradient in the logits without the positives, and what `finish` needs to add these.

    x_MD, y_ND: as the products read them. others_SM: 1 - p of each positive times the factor of the mean, for each side.
    derivatives: in the scale and, for the sigmoid loss, in the bias.
    """

    x_MD: Tensor
    y_ND: Tensor
    gx_MD: Tensor | None
    gy_ND: Tensor | None
    others_SM: Tensor
    derivatives: Tensor


def fits(rows: int, documents: int, dtype: torch.dtype, compute: ComputeOptions) -> bool:
    """Return whether the workspace holds the matrix and its gradient, and the tiles would not be faster."""
    # fp16 cannot represent small gradients, and tf32 would need them rounded.
    if dtype != torch.bfloat16 and (dtype != torch.float32 or compute.precision != "ieee"):
        return False
    cells = rows * documents
    return rows > 0 and 1 < documents and cells <= MAX_PAIRS and cells * (4 + dtype.itemsize) <= compute.workspace


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
    new = z_MN.new_empty
    # others, peak, gain and loss of each side.
    sums, loss = new((4, sides, rows)), new(())
    count = sides * rows
    programs = cdiv(rows, ROW_TILE[0]) + (cdiv(columns, COLUMN_TILE[1]) if sides == 2 else 0)
    key = x_MD.dtype, x_MD.device.index, sides
    _launch(key, softmax_sums_kernel, programs, 1, z_MN, scale, sums, 1 / count, rows, columns, sides, *ROW_TILE, *COLUMN_TILE)
    if needs_grad is None:
        _launch((*key, 0), total_kernel, 1, 1, sums, sums, loss, loss, 1 / count, 3 * count, count, 0, 0, 0, BLOCK)
        return OnePiece(loss)
    g_MN, derivatives = new((rows, columns), dtype=x_MD.dtype), new(2)
    down, across = cdiv(rows, GRADIENT_TILE[0]), cdiv(columns, GRADIENT_TILE[1])
    parts = new(down * across)
    _launch(key, softmax_gradient_kernel, down, across, z_MN, scale, sums, g_MN, parts, rows, columns, sides, *GRADIENT_TILE)
    gx_MD, gy_ND = _products(g_MN, x_MD, y_ND, needs_grad, compute)
    _launch(key, total_kernel, 1, 1, sums, parts, loss, derivatives, 1 / count, 3 * count, count, 0, down * across, 1, BLOCK)
    return OnePiece(loss, FusedGradients(x_MD, y_ND, gx_MD, gy_ND, sums, derivatives))


def sigmoid_loss(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, bias: Tensor, *, needs_grad: NeedsGrad | None, compute: ComputeOptions
) -> OnePiece:
    """Return the mean over rows of the sum of -logsigmoid(label * (logit + bias)), and its gradients."""
    rows, columns = x_MD.shape[0], y_ND.shape[0]
    z_MN = _similarities(x_MD, y_ND, compute)
    new = z_MN.new_empty
    down, across = cdiv(rows, GRADIENT_TILE[0]), cdiv(columns, GRADIENT_TILE[1])
    tiles = down * across
    g_MN = new((rows, columns), dtype=x_MD.dtype) if needs_grad else None
    parts, others_M, loss, derivatives = new((3, tiles)), new((1, rows)), new(()), new(2)
    key = x_MD.dtype, x_MD.device.index, needs_grad is None
    _launch(
        key, sigmoid_kernel, down, across, z_MN, scale, bias, g_MN, parts, others_M, 1 / rows, rows, columns, *GRADIENT_TILE
    )  # fmt: skip
    gradients = None
    if needs_grad is not None:
        assert g_MN is not None
        gradients = FusedGradients(x_MD, y_ND, *_products(g_MN, x_MD, y_ND, needs_grad, compute), others_M, derivatives)
    _launch(key, total_kernel, 1, 1, parts, parts, loss, derivatives, 1 / rows, 0, tiles, tiles, tiles, 2 if needs_grad else 0, BLOCK)
    return OnePiece(loss, gradients)


def finish(
    gradients: FusedGradients, g: Tensor | None, scale: Tensor, dtypes: tuple[torch.dtype, torch.dtype], needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, y, the scale and the bias for the gradient g of the loss; those that are not needed are None."""
    x_MD, y_ND, gx_MD, gy_ND, others_SM, derivatives = gradients
    (rows, width), columns = x_MD.shape, y_ND.shape[0]
    need_x, need_y = needs[:2]
    dx = torch.empty_like(x_MD, dtype=dtypes[0], memory_format=torch.contiguous_format) if need_x else None
    dy = torch.empty_like(y_ND, dtype=dtypes[1], memory_format=torch.contiguous_format) if need_y else None
    dscalars = [derivatives.new_empty(()) if need else None for need in (*needs[2:], False)[:2]]
    sides = 2 if others_SM.ndim == 3 and others_SM.shape[1] == 2 else 1
    programs = need_x * cdiv(rows * width, BLOCK) + need_y * cdiv(columns * width, BLOCK)
    key = x_MD.dtype, x_MD.device.index, dtypes, needs, g is None, width, sides
    _launch(
        key, finish_kernel, max(programs, 1), 1, x_MD, y_ND, gx_MD if need_x else None, gy_ND if need_y else None, others_SM,
        derivatives, scale, g, dx, dy, *dscalars, rows, columns, x_MD.stride(0), y_ND.stride(0), sides, width, BLOCK,
    )  # fmt: skip
    return dx, dy, *dscalars


def _similarities(x_MD: Tensor, y_ND: Tensor, compute: ComputeOptions) -> Tensor:
    if x_MD.dtype == torch.bfloat16:
        return torch.mm(x_MD, y_ND.T, out_dtype=torch.float32)
    with units(x_MD, compute.precision):
        return torch.mm(x_MD, y_ND.T)


def _products(
    g_MN: Tensor, x_MD: Tensor, y_ND: Tensor, needs_grad: NeedsGrad, compute: ComputeOptions
) -> tuple[Tensor | None, Tensor | None]:
    if x_MD.dtype == torch.bfloat16:
        gx_MD = torch.mm(g_MN, y_ND, out_dtype=torch.float32) if needs_grad.x else None
        return gx_MD, torch.mm(g_MN.T, x_MD, out_dtype=torch.float32) if needs_grad.y else None
    with units(x_MD, compute.precision):
        return torch.mm(g_MN, y_ND) if needs_grad.x else None, torch.mm(g_MN.T, x_MD) if needs_grad.y else None


def _launch(key: tuple[Any, ...], kernel: Any, down: int, across: int, *arguments: Any) -> None:
    """Launch a kernel with all of its arguments by position; key: the dtypes and constants that it is compiled for."""
    grid = down, across, 1
    compiled = _compiled.get((kernel, key))
    if compiled is not None:
        compiled[grid](*arguments)
        return
    compiled = kernel[grid](*arguments)
    # Triton's interpreter compiles nothing.
    if compiled is not None:
        _compiled[kernel, key] = compiled


@triton.jit(do_not_specialize=["rows", "columns"], do_not_specialize_on_alignment=["scale"])
def softmax_sums_kernel(
    z, scale, sums, share, rows, columns,
    SIDES: tl.constexpr, M: tl.constexpr, ROW_K: tl.constexpr, COLUMN_K: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write 1 - p of the positive, peak, gain and loss of the rows and, with two sides, of the columns."""
    factor = tl.load(scale)
    row_programs = tl.cdiv(rows, M)
    if tl.program_id(0) < row_programs:
        # Rows beyond the edge repeat the last one.
        i = tl.program_id(0) * M + tl.arange(0, M)
        read = tl.minimum(i, rows - 1)
        first = z + read.to(tl.int64) * columns
        peak, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
        for start in range(0, columns, ROW_K):
            j = start + tl.arange(0, ROW_K)
            counted = (j < columns)[None, :] & (j[None, :] != read[:, None])
            s = tl.load(first[:, None] + j[None, :], mask=counted, other=0.0) * factor
            s = tl.where(counted, s, float("-inf"))
            higher = tl.maximum(peak, tl.max(s, 1))
            total = total * tl.exp2((peak - higher) * LOG2_E) + tl.sum(tl.exp2((s - higher[:, None]) * LOG2_E), 1)
            peak = higher
        _put_side(z, sums, factor, share, rows, columns, i, read, peak, total, 0, SIDES)
    elif SIDES == 2:
        j = (tl.program_id(0) - row_programs) * N + tl.arange(0, N)
        read = tl.minimum(j, columns - 1)
        peak, total = tl.full((N,), float("-inf"), tl.float32), tl.zeros((N,), tl.float32)
        for start in range(0, rows, COLUMN_K):
            i = start + tl.arange(0, COLUMN_K)
            counted = (i < rows)[:, None] & (i[:, None] != read[None, :])
            s = tl.load(z + i[:, None].to(tl.int64) * columns + read[None, :], mask=counted, other=0.0) * factor
            s = tl.where(counted, s, float("-inf"))
            higher = tl.maximum(peak, tl.max(s, 0))
            total = total * tl.exp2((peak - higher) * LOG2_E) + tl.sum(tl.exp2((s - higher[None, :]) * LOG2_E), 0)
            peak = higher
        _put_side(z, sums, factor, share, rows, columns, j, read, peak, total, 1, SIDES)


@triton.jit
def _put_side(z, sums, factor, share, rows, columns, i, read, peak, total, SIDE: tl.constexpr, SIDES: tl.constexpr):
    positive = tl.load(z + read.to(tl.int64) * (columns + 1)) * factor
    # The logarithm of the odds of the others against the positive.
    t = (peak - positive) + tl.log2(total) * LN_2
    u = tl.exp2(-tl.abs(t) * LOG2_E)
    others = tl.where(t > 0, 1.0, u) / (1.0 + u) * share
    at, vector = sums + SIDE * rows + i, SIDES * rows
    tl.store(at, others, mask=i < rows)
    tl.store(at + vector, peak, mask=i < rows)
    tl.store(at + 2 * vector, others / total, mask=i < rows)
    tl.store(at + 3 * vector, tl.maximum(t, 0.0) + log1p(u), mask=i < rows)


@triton.jit(do_not_specialize=["rows", "columns"], do_not_specialize_on_alignment=["scale"])
def softmax_gradient_kernel(
    z, scale, sums, gradient, parts, rows, columns, SIDES: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    """Write the gradient in the logits, with zeros for the positives, and each tile's part of the derivative in the scale."""
    factor = tl.load(scale)
    i, j = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    at = i[:, None].to(tl.int64) * columns + j[None, :]
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    counted = inside & (i[:, None] != j[None, :])
    similarity = tl.load(z + at, mask=counted, other=0.0)
    s = tl.where(counted, similarity * factor, float("-inf"))
    vector = SIDES * rows
    peak = tl.load(sums + vector + i, mask=i < rows, other=0.0)
    gain = tl.load(sums + 2 * vector + i, mask=i < rows, other=0.0)
    positive = tl.load(z + i.to(tl.int64) * (columns + 1), mask=i < rows, other=0.0)
    g = tl.exp2((s - peak[:, None]) * LOG2_E) * gain[:, None]
    # Differences: the derivatives of the positives are minus the sums of the others', and would cancel with them.
    part = tl.sum(tl.sum(g * (similarity - positive[:, None]), 1), 0)
    if SIDES == 2:
        peak = tl.load(sums + vector + rows + j, mask=j < columns, other=0.0)
        gain = tl.load(sums + 2 * vector + rows + j, mask=j < columns, other=0.0)
        positive = tl.load(z + j.to(tl.int64) * (columns + 1), mask=j < columns, other=0.0)
        of_columns = tl.exp2((s - peak[None, :]) * LOG2_E) * gain[None, :]
        part += tl.sum(tl.sum(of_columns * (similarity - positive[None, :]), 1), 0)
        g += of_columns
    tl.store(gradient + at, g, mask=inside)
    tl.store(parts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), part)


@triton.jit(do_not_specialize=["rows", "columns"], do_not_specialize_on_alignment=["scale", "bias"])
def sigmoid_kernel(
    z, scale, bias, gradient, parts, others, share, rows, columns, M: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Write each tile's parts of the loss and of the derivatives in scale and bias; if `gradient` is given, also the gradient in the
    logits with zeros for the positives, and minus that of the positives to `others`."""
    i, j = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    at = i[:, None].to(tl.int64) * columns + j[None, :]
    inside, is_positive = (i < rows)[:, None] & (j < columns)[None, :], i[:, None] == j[None, :]
    similarity = tl.load(z + at, mask=inside, other=0.0)
    s = similarity * tl.load(scale) + tl.load(bias)
    # A positive costs softplus(-s), a negative softplus(s).
    s = tl.where(inside, tl.where(is_positive, -s, s), float("-inf"))
    u = tl.exp2(-tl.abs(s) * LOG2_E)
    tile, tiles = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.num_programs(0) * tl.num_programs(1)
    tl.store(parts + tile, tl.sum(tl.sum(tl.maximum(s, 0.0) + log1p(u), 1), 0))
    if gradient is not None:
        g = tl.where(s > 0, 1.0, u) / (1.0 + u) * share
        slope = tl.where(is_positive, -g, g)
        tl.store(parts + tiles + tile, tl.sum(tl.sum(slope * similarity, 1), 0))
        tl.store(parts + 2 * tiles + tile, tl.sum(tl.sum(slope, 1), 0))
        tl.store(gradient + at, tl.where(is_positive, 0.0, g), mask=inside)
        column = tl.program_id(1) * N
        holds_positive = (i >= column) & (i < column + N) & (i < rows) & (i < columns)
        tl.store(others + i, tl.sum(tl.where(is_positive, g, 0.0), 1), mask=holds_positive)


@triton.jit(do_not_specialize=["start", "count", "part_start", "part_count"])
def total_kernel(
    values, parts, loss, derivatives, factor, start, count, part_start, part_count, DERIVATIVES: tl.constexpr, K: tl.constexpr
):
    """Write the sum of the values, times factor, to `loss`, and the sums of the parts to `derivatives`."""
    k = tl.arange(0, K)
    total = tl.zeros((K,), tl.float32)
    for first in range(0, count, K):
        total += tl.load(values + start + first + k, mask=first + k < count, other=0.0)
    tl.store(loss, tl.sum(total, 0) * factor)
    for derivative in tl.static_range(DERIVATIVES):
        total = tl.zeros((K,), tl.float32)
        for first in range(0, part_count, K):
            total += tl.load(parts + part_start + derivative * part_count + first + k, mask=first + k < part_count, other=0.0)
        tl.store(derivatives + derivative, tl.sum(total, 0))


@triton.jit(
    do_not_specialize=["rows", "columns", "x_stride", "y_stride"], do_not_specialize_on_alignment=["x", "y", "scale", "g"]
)
def finish_kernel(
    x, y, gx, gy, others, derivatives, scale, g, dx, dy, dscale, dbias, rows, columns, x_stride, y_stride,
    SIDES: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write the gradients with the positives and all factors."""
    incoming = 1.0
    if g is not None:
        incoming = tl.load(g)
    program = tl.program_id(0)
    if program == 0:
        if dscale is not None:
            tl.store(dscale, tl.load(derivatives) * incoming)
        if dbias is not None:
            tl.store(dbias, tl.load(derivatives + 1) * incoming)
    factor = tl.load(scale) * incoming
    if dx is not None:
        _finish_rows(gx, y, others, dx, factor, program, rows, rows, y_stride, SIDES, WIDTH, K)
        program -= tl.cdiv(rows * WIDTH, K)
    if dy is not None:
        _finish_rows(gy, x, others, dy, factor, program, columns, rows, x_stride, SIDES, WIDTH, K)


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
