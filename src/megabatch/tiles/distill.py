"""Two similarity matrices tile by tile, a teacher's and a student's: the sums and gradients of distillation. Legend: contract.py.

s_MN are the student's logits and t_MN the teacher's. In PyTorch operations, for any device and dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .contract import ComputeOptions, NeedsGrad, Pairs, Softmax, accumulator, at
from .products import Tile, add_products, no_product, walk


class DistillTiles(Protocol):
    """The functions of distillation for a device; a backend that is not this module implements them in its own kernels."""

    def distill_stats(
        self, x_MD: Tensor, operands: Operands, scales: Scales, *, columns: bool, entropy: bool, compute: ComputeOptions
    ) -> tuple[DistillStats, DistillStats | None]: ...

    def distill_grads(
        self,
        x_MD: Tensor,
        operands: Operands,
        scales: Scales,
        rows: tuple[Softmax, Softmax],
        columns: tuple[Softmax, Softmax] | None,
        *,
        needs_grad: NeedsGrad,
        compute: ComputeOptions,
    ) -> tuple[Tensor | None, Tensor | None]: ...


class Operands(NamedTuple):
    """The rows of one rank and the documents of one block, of the student and of the teacher; the teacher's width may differ."""

    x_MD: Tensor
    y_ND: Tensor
    teacher_x_MT: Tensor
    teacher_y_NT: Tensor


class Scales(NamedTuple):
    """The factors of the student's and the teacher's similarities."""

    student: Tensor
    teacher: Tensor


class DistillStats(NamedTuple):
    """For each row (or column): Σ exp(s) = total * exp(peak); Σ exp(t), Σ exp(t)·s and Σ exp(t)·t relative to the teacher's peak.

    entropy: Σ exp(t)·t, None where not asked for.
    """

    peak: Tensor
    total: Tensor
    teacher_peak: Tensor
    teacher_total: Tensor
    cross: Tensor
    entropy: Tensor | None


def merge_distill(a: Any, b: Any) -> Any:
    """Merge the results of two disjoint sets of documents: nested tuples item by item; gradients are added to `a` in place."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, Tensor):
        return a.add_(b)
    if isinstance(a, DistillStats):
        peak, (own, other) = _merged_peak(a.peak, b.peak)
        teacher_peak, (teacher_own, teacher_other) = _merged_peak(a.teacher_peak, b.teacher_peak)
        sums = ((a.teacher_total, b.teacher_total), (a.cross, b.cross), (a.entropy, b.entropy))
        merged = [None if s is None or t is None else s * teacher_own + t * teacher_other for s, t in sums]
        return DistillStats(peak, a.total * own + b.total * other, teacher_peak, *merged)  # type: ignore[arg-type]
    return tuple(merge_distill(s, t) for s, t in zip(a, b, strict=True))


def merge_tile(stats: DistillStats, where: slice, more: DistillStats) -> None:
    """Merge the stats of a tile into those of the block, in place."""
    for vector, merged in zip(stats, merge_distill(at(stats, where), more), strict=True):
        if vector is not None:
            vector[where] = merged


def no_stats(t: Tensor, entropy: bool) -> DistillStats:
    """Return the stats of no tiles for each row of t."""
    zero = t.new_zeros(len(t), dtype=accumulator(t.dtype))
    lowest = torch.full_like(zero, -torch.inf)
    return DistillStats(lowest, zero, lowest.clone(), zero.clone(), zero.clone(), zero.clone() if entropy else None)


def walk_both(operands: Operands, compute: ComputeOptions) -> Iterator[tuple[Tile, Tile]]:
    """Yield the same tile of both matrices; together they take the workspace."""
    x_MD, y_ND, teacher_x_MT, teacher_y_NT = operands
    half = compute._replace(workspace=max(1, compute.workspace // 2))
    return zip(walk(x_MD, y_ND, Pairs(), half), walk(teacher_x_MT, teacher_y_NT, Pairs(), half), strict=True)


def distill_stats(
    x_MD: Tensor, operands: Operands, scales: Scales, *, columns: bool, entropy: bool, compute: ComputeOptions
) -> tuple[DistillStats, DistillStats | None]:
    """Return the stats of rows and, if `columns`, of columns. x_MD: that of the operands."""
    rows_result = no_stats(operands.x_MD, entropy)
    columns_result = no_stats(operands.y_ND, entropy) if columns else None
    for student, teacher in walk_both(operands, compute):
        student.z_RC.mul_(scales.student)
        teacher.z_RC.mul_(scales.teacher)
        for result, where, dim in ((rows_result, student.rows, 1), (columns_result, student.columns, 0)):
            if result is not None:
                merge_tile(result, where, _tile_stats(student, teacher, dim, entropy))
    return rows_result, columns_result


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
    """Return gx_MD and gy_ND, the products with the student's minus the teacher's probabilities.

    rows, columns: the softmax of the student and of the teacher; only peak and gain are read.
    """
    y_ND = operands.y_ND
    gx_MD, gy_ND = no_product(x_MD, needs_grad.x), no_product(y_ND, needs_grad.y)
    for student, teacher in walk_both(operands, compute):
        student.z_RC.mul_(scales.student)
        teacher.z_RC.mul_(scales.teacher)
        g_RC = _difference(student, teacher, *(at(side, student.rows) for side in rows))
        if columns is not None:
            # Only now are the logits needed no more: the second difference overwrites them.
            g_RC = g_RC.add_(_difference_(student, teacher, *(at(side, student.columns) for side in columns)))
        add_products(x_MD, student, g_RC, gx_MD, gy_ND, compute)
    return gx_MD, gy_ND


def _tile_stats(student: Tile, teacher: Tile, dim: int, entropy: bool) -> DistillStats:
    peak = student.z_RC.amax(dim, keepdim=True)
    total = torch.sub(student.z_RC, peak, out=student.work_RC).exp_().sum(dim)
    teacher_peak = teacher.z_RC.amax(dim, keepdim=True)
    exponential = torch.sub(teacher.z_RC, teacher_peak, out=teacher.work_RC).exp_()
    teacher_total = exponential.sum(dim)
    own = torch.mul(exponential, teacher.z_RC, out=student.work_RC).sum(dim) if entropy else None
    cross = exponential.mul_(student.z_RC).sum(dim)
    return DistillStats(peak.squeeze(dim), total, teacher_peak.squeeze(dim), teacher_total, cross, own)


def _difference(student: Tile, teacher: Tile, own: Softmax, theirs: Softmax) -> Tensor:
    """Return the student's minus the teacher's probabilities of rows, in the work buffers."""
    probability = torch.sub(student.z_RC, own.peak[:, None], out=student.work_RC).exp_().mul_(own.gain[:, None])
    teacher_p = torch.sub(teacher.z_RC, theirs.peak[:, None], out=teacher.work_RC).exp_().mul_(theirs.gain[:, None])
    return probability.sub_(teacher_p)


def _difference_(student: Tile, teacher: Tile, own: Softmax, theirs: Softmax) -> Tensor:
    """Return the student's minus the teacher's probabilities of columns; overwrites the logits."""
    probability = student.z_RC.sub_(own.peak).exp_().mul_(own.gain)
    return probability.sub_(teacher.z_RC.sub_(theirs.peak).exp_().mul_(theirs.gain))


def _merged_peak(a: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the higher peak, and the factor of each side's sums relative to it."""
    peak = torch.maximum(a, b)
    # Where neither side has a pair both peaks are -inf, and -inf - -inf would be NaN.
    anchor = peak.masked_fill(peak == -torch.inf, 0)
    return peak, ((a - anchor).exp(), (b - anchor).exp())
