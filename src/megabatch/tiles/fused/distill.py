"""Sums and gradients of distillation, one pass over the two products of a tile, and their launchers. Legend: ../distill.py.

The products are cuBLAS's. What follows them reads each product once, where PyTorch operations read and write a tile tens of times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import ComputeOptions, NeedsGrad, Softmax
from ..distill import DistillStats, Operands, Scales, merge_tile, no_stats, walk_both
from ..products import Tile, add_products, no_product
from .launch import cdiv, on_device_of_input
from .tile import LOG2_E

ROWS, COLUMNS = 32, 128
# Peak, total, the teacher's peak and total, cross and entropy: what a block writes for each of its rows and columns.
PARTS = 6


@triton.jit(do_not_specialize=["rows", "columns"])
def stats_kernel(
    student, teacher, scale, teacher_scale, row_parts, column_parts, rows, columns,
    BOTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the sums of a block for its rows (part, block, row) and, if BOTH, for its columns (part, block, column)."""
    i = tl.program_id(0) * R + tl.arange(0, R)
    j = tl.program_id(1) * C + tl.arange(0, C)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    at = i.to(tl.int64)[:, None] * columns + j[None, :]
    s = tl.load(student + at, mask=inside, other=0.0) * tl.load(scale)
    t = tl.load(teacher + at, mask=inside, other=0.0) * tl.load(teacher_scale)
    _write_sums(s, t, inside, 1, row_parts + tl.program_id(1) * rows + i, tl.num_programs(1) * rows, i < rows)
    if BOTH:
        _write_sums(s, t, inside, 0, column_parts + tl.program_id(0) * columns + j, tl.num_programs(0) * columns, j < columns)


@triton.jit
def _write_sums(s, t, inside, AXIS: tl.constexpr, out, stride, valid):
    """Write the sums along an axis. A row or column of the block that lies outside has sums of nothing, which are not stored."""
    lowest = -3.0e38
    peak = tl.max(tl.where(inside, s, lowest), AXIS)
    teacher_peak = tl.max(tl.where(inside, t, lowest), AXIS)
    e = _exponential(s, peak, inside, AXIS)
    f = _exponential(t, teacher_peak, inside, AXIS)
    tl.store(out, peak, mask=valid)
    tl.store(out + stride, tl.sum(e, AXIS), mask=valid)
    tl.store(out + 2 * stride, teacher_peak, mask=valid)
    tl.store(out + 3 * stride, tl.sum(f, AXIS), mask=valid)
    tl.store(out + 4 * stride, tl.sum(f * s, AXIS), mask=valid)
    tl.store(out + 5 * stride, tl.sum(f * t, AXIS), mask=valid)


@triton.jit
def _exponential(s, peak, inside, AXIS: tl.constexpr):
    """Return exp(s - peak), zero outside."""
    return tl.where(inside, tl.exp2(tl.where(inside, s - tl.expand_dims(peak, AXIS), 0.0) * LOG2_E), 0.0)


@triton.jit(do_not_specialize=["rows", "columns"])
def gradient_kernel(
    student, teacher, scale, teacher_scale, gradient, row_peak, row_gain, teacher_row_peak, teacher_row_gain,
    column_peak, column_gain, teacher_column_peak, teacher_column_gain, rows, columns,
    BOTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the student's minus the teacher's probabilities, of rows and, if BOTH, of columns added."""
    i = tl.program_id(0) * R + tl.arange(0, R)
    j = tl.program_id(1) * C + tl.arange(0, C)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    at = i.to(tl.int64)[:, None] * columns + j[None, :]
    s = tl.load(student + at, mask=inside, other=0.0) * tl.load(scale)
    t = tl.load(teacher + at, mask=inside, other=0.0) * tl.load(teacher_scale)
    g = _probability(s, row_peak + i, row_gain + i, i < rows, inside, 1)
    g -= _probability(t, teacher_row_peak + i, teacher_row_gain + i, i < rows, inside, 1)
    if BOTH:
        g += _probability(s, column_peak + j, column_gain + j, j < columns, inside, 0)
        g -= _probability(t, teacher_column_peak + j, teacher_column_gain + j, j < columns, inside, 0)
    tl.store(gradient + at, g.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _probability(s, peak, gain, valid, inside, AXIS: tl.constexpr):
    peaks, gains = tl.load(peak, mask=valid, other=0.0), tl.load(gain, mask=valid, other=0.0)
    return _exponential(s, peaks, inside, AXIS) * tl.expand_dims(gains, AXIS)


@on_device_of_input
def distill_stats(
    x_MD: Tensor, operands: Operands, scales: Scales, *, columns: bool, entropy: bool, compute: ComputeOptions
) -> tuple[DistillStats, DistillStats | None]:
    """Return the stats of rows and, if `columns`, of columns. x_MD: that of the operands."""
    row_stats = no_stats(operands.x_MD, entropy)
    column_stats = no_stats(operands.y_ND, entropy) if columns else None
    for student, teacher in walk_both(operands, compute):
        height, width = student.z_RC.shape
        grid = cdiv(height, ROWS), cdiv(width, COLUMNS)
        row_parts = student.z_RC.new_empty(PARTS, grid[1], height)
        column_parts = student.z_RC.new_empty(PARTS, grid[0], width) if columns else None
        stats_kernel[grid](
            student.z_RC, teacher.z_RC, scales.student, scales.teacher, row_parts, column_parts, height, width,
            BOTH=columns, R=ROWS, C=COLUMNS,
        )  # fmt: skip
        merge_tile(row_stats, student.rows, _added(row_parts, entropy))
        if column_stats is not None and column_parts is not None:
            merge_tile(column_stats, student.columns, _added(column_parts, entropy))
    return row_stats, column_stats


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
    y_ND = operands.y_ND
    gx_MD, gy_ND = no_product(x_MD, needs_grad.x), no_product(y_ND, needs_grad.y)
    for student, teacher in walk_both(operands, compute):
        height, width = student.z_RC.shape
        g_RC = _gradient_buffer(student)
        row_args = [v[student.rows] for side in rows for v in (side.peak, side.gain)]
        column_args: list[Tensor | None] = [None] * 4
        if columns is not None:
            column_args = [v[student.columns] for side in columns for v in (side.peak, side.gain)]
        gradient_kernel[cdiv(height, ROWS), cdiv(width, COLUMNS)](
            student.z_RC, teacher.z_RC, scales.student, scales.teacher, g_RC, *row_args, *column_args, height, width,
            BOTH=columns is not None, R=ROWS, C=COLUMNS,
        )  # fmt: skip
        add_products(x_MD, student, g_RC, gx_MD, gy_ND, compute)
    return gx_MD, gy_ND


def _added(parts: Tensor, entropy: bool) -> DistillStats:
    """Return the stats of a tile from those of its blocks."""
    peaks, totals, teacher_peaks, teacher_totals, crosses, entropies = parts
    peak, teacher_peak = peaks.amax(0), teacher_peaks.amax(0)
    factor, teacher_factor = (peaks - peak).exp_(), (teacher_peaks - teacher_peak).exp_()
    own = (entropies * teacher_factor).sum(0) if entropy else None
    teacher_total, cross = ((part * teacher_factor).sum(0) for part in (teacher_totals, crosses))
    return DistillStats(peak, (totals * factor).sum(0), teacher_peak, teacher_total, cross, own)


def _gradient_buffer(t: Tile) -> Tensor:
    """Return the work buffer of a tile as a matrix in the dtype that the products read."""
    if t.x_RD.dtype != torch.bfloat16:
        return t.work_RC
    return t.work_RC.view(-1).view(torch.bfloat16)[: t.work_RC.numel()].view(t.work_RC.shape)
