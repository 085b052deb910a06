"""Sums and gradients of distillation, one pass over the two products of a panel, and their launchers. Legend: ../distill.py.

The products are cuBLAS's, in fp32, and a kernel reads each of them once: 8 bytes of traffic for each pair and pass after the 8 that
the products write. Blocks write their sums, and a second small kernel merges those of a panel in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import ComputeOptions, NeedsGrad, Softmax
from ..distill import DistillStats, Operands, Scales, no_stats
from ..products import operand, units
from .gradient_panels import GradientProducts
from .launch import Panel, cdiv, on_device_of_input, panels_of, part
from .tile import LOG2_E, round_to_tf32

# What both products and the gradient of a panel take of the workspace at most: 16,384 pairs a side are four panels.
PANEL_BYTES = 2**30
# The logit of a pair outside of the panel: its exponential is zero, and no sum of a block's logits overflows.
LOWEST = tl.constexpr(-1e35)
# Fields of `BlockSums`, each in fp32.
SUMS = 6
# Tiles and rows that a program merges at a time.
MERGED_TILES, MERGED_ROWS = 32, 32


class DistillBlocks(NamedTuple):
    """Configuration of both kernels: blocks of m rows by n columns; for sums a program walks down so many `steps` of them."""

    m: int
    n: int
    steps: int
    sum_warps: int
    gradient_warps: int


# By the registers that the compiler takes: 16 warps of sums fit on a multiprocessor of an H100, and 24 of gradients.
COMPILED = DistillBlocks(32, 128, 4, 4, 8)
# In Triton's interpreter: small, so that small inputs have edges and several blocks.
INTERPRETED = DistillBlocks(16, 32, 2, 4, 4)


class BlockSums(NamedTuple):
    """The sums of `DistillStats`. An entropy that is not asked for repeats `cross`, because JIT functions cannot return None."""

    peak: Any
    total: Any
    teacher_peak: Any
    teacher_total: Any
    cross: Any
    entropy: Any


@triton.jit(do_not_specialize=["rows"])
def stats_kernel(
    student, teacher, scale, teacher_scale, row_parts, column_parts, rows, columns,
    ENTROPY: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write the sums of each block for its rows (sum, block, row) and, if column_parts is given, those of each program for its
    columns (sum, program, column)."""
    down, across = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row_step, column_step = tl.num_programs(1).to(tl.int64) * rows, tl.num_programs(0).to(tl.int64) * columns
    j = tl.program_id(1) * N + tl.arange(0, N)
    first = tl.program_id(0) * (STEPS * M)
    peak, teacher_peak = tl.full((N,), LOWEST, tl.float32), tl.full((N,), LOWEST, tl.float32)
    total, teacher_total = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.float32)
    cross, entropy = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.float32)
    for row in range(first, tl.minimum(first + STEPS * M, rows), M):
        i = row + tl.arange(0, M)
        s = _logits(student, scale, i, j, rows, columns)
        t = _logits(teacher, teacher_scale, i, j, rows, columns)
        _put(row_parts + across * rows + i, row_step, _sums(s, t, 1, ENTROPY), i < rows, ENTROPY)
        if column_parts is not None:
            block = _sums(s, t, 0, ENTROPY)
            higher, teacher_higher = tl.maximum(peak, block.peak), tl.maximum(teacher_peak, block.teacher_peak)
            own, other = _power(teacher_peak - teacher_higher), _power(block.teacher_peak - teacher_higher)
            total = total * _power(peak - higher) + block.total * _power(block.peak - higher)
            teacher_total = teacher_total * own + block.teacher_total * other
            cross = cross * own + block.cross * other
            entropy = entropy * own + block.entropy * other
            peak, teacher_peak = higher, teacher_higher
    if column_parts is not None:
        sums = BlockSums(peak, total, teacher_peak, teacher_total, cross, entropy)
        _put(column_parts + down * columns + j, column_step, sums, j < columns, ENTROPY)


@triton.jit
def _logits(product, scale, i, j, rows, columns):
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    z = tl.load(product + (i.to(tl.int64) * columns)[:, None] + j[None, :], mask=inside, other=0.0)
    return tl.where(inside, z * tl.load(scale), LOWEST)


@triton.jit
def _power(difference):
    return tl.exp2(difference * LOG2_E)


@triton.jit
def _sums(s, t, AXIS: tl.constexpr, ENTROPY: tl.constexpr):
    """Return the sums of a block along an axis."""
    peak, teacher_peak = tl.max(s, AXIS), tl.max(t, AXIS)
    total = tl.sum(_power(s - tl.expand_dims(peak, AXIS)), AXIS)
    f = _power(t - tl.expand_dims(teacher_peak, AXIS))
    cross = tl.sum(f * s, AXIS)
    entropy = cross
    if ENTROPY:
        entropy = tl.sum(f * t, AXIS)
    return BlockSums(peak, total, teacher_peak, tl.sum(f, AXIS), cross, entropy)


@triton.jit
def _put(place, step, sums, inside, ENTROPY: tl.constexpr):
    """Write each of the sums, `step` apart."""
    tl.store(place, sums.peak, mask=inside)
    tl.store(place + step, sums.total, mask=inside)
    tl.store(place + 2 * step, sums.teacher_peak, mask=inside)
    tl.store(place + 3 * step, sums.teacher_total, mask=inside)
    tl.store(place + 4 * step, sums.cross, mask=inside)
    if ENTROPY:
        tl.store(place + 5 * step, sums.entropy, mask=inside)


@triton.jit(do_not_specialize=["row_tiles", "row_length", "row_stride", "column_tiles", "column_length", "column_stride"])
def merge_kernel(
    row_parts, row_sums, row_tiles, row_length, row_stride, column_parts, column_sums, column_tiles, column_length, column_stride,
    ROW_FIRST: tl.constexpr, COLUMN_FIRST: tl.constexpr, ENTROPY: tl.constexpr, T: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a panel into sums (sum, row), and with their contents if not FIRST. One launch for rows and columns."""
    programs = tl.cdiv(row_length, R)
    if tl.program_id(0) < programs:
        i = tl.program_id(0) * R + tl.arange(0, R)
        _merge(row_parts, row_sums, i, row_tiles, row_length, row_stride, ROW_FIRST, ENTROPY, T, R)
    elif column_parts is not None:
        i = (tl.program_id(0) - programs) * R + tl.arange(0, R)
        _merge(column_parts, column_sums, i, column_tiles, column_length, column_stride, COLUMN_FIRST, ENTROPY, T, R)


@triton.jit
def _merge(
    parts, sums, i, tiles, length, stride, FIRST: tl.constexpr, ENTROPY: tl.constexpr, T: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    inside = i < length
    stride = stride.to(tl.int64)
    peak, teacher_peak = tl.full((R,), LOWEST, tl.float32), tl.full((R,), LOWEST, tl.float32)
    total, teacher_total = tl.zeros((R,), tl.float32), tl.zeros((R,), tl.float32)
    cross, entropy = tl.zeros((R,), tl.float32), tl.zeros((R,), tl.float32)
    if not FIRST:
        peak, total = tl.load(sums + i, mask=inside, other=0.0), tl.load(sums + stride + i, mask=inside, other=0.0)
        teacher_peak = tl.load(sums + 2 * stride + i, mask=inside, other=0.0)
        teacher_total = tl.load(sums + 3 * stride + i, mask=inside, other=0.0)
        cross = tl.load(sums + 4 * stride + i, mask=inside, other=0.0)
        if ENTROPY:
            entropy = tl.load(sums + 5 * stride + i, mask=inside, other=0.0)
    step = tiles.to(tl.int64) * length
    for start in range(0, tiles, T):
        tile = start + tl.arange(0, T)
        place = parts + tile.to(tl.int64)[:, None] * length + i[None, :]
        mask = (tile < tiles)[:, None] & inside[None, :]
        peaks = tl.load(place, mask=mask, other=LOWEST)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        totals = tl.load(place + step, mask=mask, other=0.0) * _power(peaks - higher[None, :])
        total = total * _power(peak - higher) + tl.sum(totals, 0)
        teacher_peaks = tl.load(place + 2 * step, mask=mask, other=LOWEST)
        teacher_higher = tl.maximum(teacher_peak, tl.max(teacher_peaks, 0))
        own, other = _power(teacher_peak - teacher_higher), _power(teacher_peaks - teacher_higher[None, :])
        teacher_total = teacher_total * own + tl.sum(tl.load(place + 3 * step, mask=mask, other=0.0) * other, 0)
        cross = cross * own + tl.sum(tl.load(place + 4 * step, mask=mask, other=0.0) * other, 0)
        if ENTROPY:
            entropy = entropy * own + tl.sum(tl.load(place + 5 * step, mask=mask, other=0.0) * other, 0)
        peak, teacher_peak = higher, teacher_higher
    _put(sums + i, stride, BlockSums(peak, total, teacher_peak, teacher_total, cross, entropy), inside, ENTROPY)


@triton.jit(do_not_specialize=["rows"])
def gradient_kernel(
    student, teacher, scale, teacher_scale, gradient, row_peak, row_gain, teacher_row_peak, teacher_row_gain,
    column_peak, column_gain, teacher_column_peak, teacher_column_gain, rows, columns, stride,
    ROUND_TO_TF32: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the student's minus the teacher's probabilities, of rows and, if given, of columns added.

    stride: that of the gradient, which may be the student's product itself.
    """
    i, j = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    s = _logits(student, scale, i, j, rows, columns)
    t = _logits(teacher, teacher_scale, i, j, rows, columns)
    g = _probabilities(s, row_peak, row_gain, i, rows, 1) - _probabilities(t, teacher_row_peak, teacher_row_gain, i, rows, 1)
    if column_peak is not None:
        g += _probabilities(s, column_peak, column_gain, j, columns, 0)
        g -= _probabilities(t, teacher_column_peak, teacher_column_gain, j, columns, 0)
    if ROUND_TO_TF32:
        g = round_to_tf32(g)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    place = gradient + (i.to(tl.int64) * stride)[:, None] + j[None, :]
    tl.store(place, g.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _probabilities(s, peak, gain, i, length, AXIS: tl.constexpr):
    peaks, gains = tl.load(peak + i, mask=i < length, other=0.0), tl.load(gain + i, mask=i < length, other=0.0)
    return _power(s - tl.expand_dims(peaks, AXIS)) * tl.expand_dims(gains, AXIS)


@on_device_of_input
def distill_stats(
    x_MD: Tensor, operands: Operands, scales: Scales, *, columns: bool, entropy: bool, compute: ComputeOptions
) -> tuple[DistillStats, DistillStats | None]:
    """Return the stats of rows and, if `columns`, of columns. x_MD: that of the operands."""
    y_ND = operands.y_ND
    if not len(x_MD) or not len(y_ND):
        return no_stats(x_MD, entropy), no_stats(y_ND, entropy) if columns else None
    m, n, steps, warps, _ = _blocks(x_MD)
    row_sums = x_MD.new_empty(SUMS, len(x_MD), dtype=torch.float32)
    column_sums = row_sums.new_empty(SUMS, len(y_ND)) if columns else None
    row_parts = column_parts = None
    for p, student, teacher in _walk(operands, compute, bytes_per_cell=8):
        down, across = cdiv(p.rows, m * steps), cdiv(p.columns, n)
        if row_parts is None:
            # The first panel is the largest.
            row_parts = row_sums.new_empty(SUMS * across * p.rows)
            column_parts = row_sums.new_empty(SUMS * down * p.columns) if columns else None
        stats_kernel[down, across](
            student, teacher, scales.student, scales.teacher, row_parts, column_parts, p.rows, p.columns,
            ENTROPY=entropy, M=m, N=n, STEPS=steps, num_warps=warps,
        )  # fmt: skip
        programs = cdiv(p.rows, MERGED_ROWS) + (cdiv(p.columns, MERGED_ROWS) if columns else 0)
        merge_kernel[(programs,)](
            row_parts, row_sums[:, p.r], across, p.rows, len(x_MD),
            column_parts, None if column_sums is None else column_sums[:, p.c], down, p.columns, len(y_ND),
            ROW_FIRST=p.c.start == 0, COLUMN_FIRST=p.r.start == 0, ENTROPY=entropy, T=MERGED_TILES, R=MERGED_ROWS,
        )  # fmt: skip
    return _stats(row_sums, entropy), None if column_sums is None else _stats(column_sums, entropy)


@on_device_of_input
def distill_grads(
    x_MD: Tensor,
    operands: Operands,
    scales: Scales,
    rows: tuple[Softmax, Softmax],
    columns: tuple[Softmax, Softmax] | None,
    *,
    needs_grad: NeedsGrad,
    compute: ComputeOptions,
) -> tuple[Tensor | None, Tensor | None]:
    """Return gx_MD and gy_ND, the products with the student's minus the teacher's probabilities."""
    products = GradientProducts(x_MD, operands.y_ND, needs_grad, compute)
    m, n, _, _, warps = _blocks(x_MD)
    # A gradient in fp32 overwrites the student's product, one in bf16 has a buffer of its own.
    in_place = products.dtype == torch.float32
    for p, student, teacher in _walk(operands, compute, 8 if in_place else 8 + products.bytes_per_cell):
        panel = student if in_place else products.panel(p)
        row_args = [part(v, p.r) for side in rows for v in (side.peak, side.gain)]
        column_args = [part(v, p.c) for side in columns for v in (side.peak, side.gain)] if columns else [None] * 4
        gradient_kernel[cdiv(p.rows, m), cdiv(p.columns, n)](
            student, teacher, scales.student, scales.teacher, panel, *row_args, *column_args, p.rows, p.columns, panel.stride(0),
            ROUND_TO_TF32=products.rounds_to_tf32, M=m, N=n, num_warps=warps,
        )  # fmt: skip
        products.add(panel, p)
    return products.gx_MD, products.gy_ND


def _walk(operands: Operands, compute: ComputeOptions, bytes_per_cell: int) -> Iterator[tuple[Panel, Tensor, Tensor]]:
    """Yield every panel with the student's and the teacher's similarities, in buffers that the next panel overwrites."""
    x_MD, y_ND, teacher_x_MT, teacher_y_NT = (operand(t) for t in operands)
    m, n, steps, _, _ = _blocks(x_MD)
    area = Panel(slice(0, len(x_MD)), slice(0, len(y_ND)))
    buffers = None
    for p in panels_of(area, (m * steps, n), min(compute.workspace, PANEL_BYTES), bytes_per_cell):
        shape = p.rows, p.columns
        if buffers is None:
            buffers = x_MD.new_empty(2, math.prod(shape), dtype=torch.float32)
        student, teacher = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
        _multiply(part(x_MD, p.r), part(y_ND, p.c), student, compute)
        _multiply(part(teacher_x_MT, p.r), part(teacher_y_NT, p.c), teacher, compute)
        yield p, student, teacher


def _multiply(x_RD: Tensor, y_CD: Tensor, out_RC: Tensor, compute: ComputeOptions) -> None:
    """Write x @ y.T in fp32: exact products of 16 bits, or of fp32 in the precision asked for."""
    if x_RD.dtype != torch.float32:
        torch.mm(x_RD, y_CD.T, out_dtype=torch.float32, out=out_RC)
        return
    with units(x_RD, compute.precision):
        torch.mm(x_RD, y_CD.T, out=out_RC)


def _stats(sums: Tensor, entropy: bool) -> DistillStats:
    peak, total, teacher_peak, teacher_total, cross, own = sums.unbind()
    return DistillStats(peak, total, teacher_peak, teacher_total, cross, own if entropy else None)


def _blocks(t: Tensor) -> DistillBlocks:
    return INTERPRETED if t.device.type == "cpu" else COMPILED
