"""Kernels that do a little work per row, and their launchers: similarities of positives, losses from sums, final gradients.

Legend: ../contract.py. The formula of `normalise` is in ../eager.py, _normalise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import ComputeOptions, Normalised, Softmax, Stats
from .architectures import architecture_of
from .launch import Launch, cdiv, on_device_of_input, run_kernel
from .tile import LOG2_E, log1p, similarities

NORMALISED_ROWS = 256
FINISHED_ROWS, FINISHED_COLUMNS = 8, 256


class StatsArgs(NamedTuple):
    """The sums of rows or columns (contract.Stats) in a kernel."""

    peak: Any
    total: Any
    further: Any
    further_count: Any
    counted: Any
    counted_count: Any


class LossAndSlope(NamedTuple):
    """The loss, and the gradient in the positive's logit."""

    loss: Any
    dpos: Any


@triton.jit(do_not_specialize=["rows"])
def positives_kernel(
    x, y, positive, rows, WIDTH: tl.constexpr, M: tl.constexpr, K: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr
):
    """Write the diagonals of the tiles on the diagonal, which round like every tile, so that equal rows tie."""
    row = tl.program_id(0) * M
    z = similarities(x, y, row, row, rows, rows, WIDTH, M, M, K, DESCRIPTORS, PRECISION)
    i = tl.arange(0, M)
    tl.store(positive + row + i, tl.sum(tl.where(i[:, None] == i[None, :], z, 0.0), 1), mask=row + i < rows)


@on_device_of_input
def positives(x_MD: Tensor, y_ND: Tensor, compute: ComputeOptions) -> Tensor:
    """Return the similarity of each row's positive (M)."""
    rows = x_MD.shape[0]
    positive_M = x_MD.new_empty(rows, dtype=torch.float32)
    if rows:
        launch = Launch(architecture_of(x_MD.device), "stats", x_MD, y_ND, compute)
        m = launch.blocks.m
        run_kernel(
            positives_kernel, (cdiv(rows, m),), *launch.diagonal_operands(), positive_M, rows, M=m, **launch.product_constants
        )
    return positive_M


@triton.jit(do_not_specialize=["length"])
def normalise_kernel(
    row_peak, row_total, row_further, row_further_count, row_counted, row_counted_count,
    column_peak, column_total, column_further, column_further_count, column_counted, column_counted_count,
    positive, scale, weights, loss, dpos, out, smoothing, length, SIDES: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Write losses and gradients in the positives' logits, both sides added, and the softmax (side, 4, row) of each side to
    `out`."""
    i = tl.program_id(0) * R + tl.arange(0, R)
    inside = i < length
    factor = tl.load(scale)
    z = tl.load(positive + i, mask=inside, other=0.0)
    weight = tl.full((R,), 1.0, tl.float32)
    if weights is not None:
        weight = tl.load(weights + i, mask=inside, other=0.0)
    stats = StatsArgs(row_peak, row_total, row_further, row_further_count, row_counted, row_counted_count)
    row_loss, row_dpos = _normalise_side(stats, out, z, factor, weight, smoothing, i, length, R)
    if SIDES == 2:
        stats = StatsArgs(column_peak, column_total, column_further, column_further_count, column_counted, column_counted_count)
        column_loss, column_dpos = _normalise_side(stats, out + 4 * length, z, factor, weight, smoothing, i, length, R)
        row_loss, row_dpos = row_loss + column_loss, row_dpos + column_dpos
    tl.store(loss + i, row_loss * weight, mask=inside)
    tl.store(dpos + i, row_dpos, mask=inside)


@triton.jit
def _normalise_side(stats, out, z, factor, weight, smoothing, i, length, R: tl.constexpr):
    """Return losses of rows (or columns) and gradients in their positives' logits; write peak, gain, further, counted to `out`."""
    inside = i < length
    others_peak = tl.load(stats.peak + i, mask=inside, other=0.0)
    s = factor * z
    peak = tl.maximum(others_peak, s)
    others = tl.load(stats.total + i, mask=inside, other=1.0) * tl.exp2((others_peak - peak) * LOG2_E)
    # Where the positive is the largest, its power is one and only the others are left. That case is written out, because s - peak
    # need not be exactly zero there: the compiler fuses the product factor * z into the difference.
    is_largest = s >= others_peak
    power = tl.where(is_largest, 1.0, tl.exp2((s - peak) * LOG2_E))
    total = others + power
    loss = log1p(others + (power - 1.0)) + tl.where(is_largest, 0.0, peak - s)
    target = tl.full((R,), 1.0, tl.float32) - smoothing
    if stats.further is not None:
        number = tl.load(stats.further_count + i, mask=inside, other=0).to(tl.float32)
        target = target / (1.0 + number)
        loss -= factor * target * (tl.load(stats.further + i, mask=inside, other=0.0) - number * z)
        tl.store(out + 2 * length + i, weight * target, mask=inside)
    if stats.counted is not None:
        number = tl.load(stats.counted_count + i, mask=inside, other=0).to(tl.float32)
        uniform = smoothing / (1.0 + number)
        loss -= factor * uniform * (tl.load(stats.counted + i, mask=inside, other=0.0) - number * z)
        target += uniform
        tl.store(out + 3 * length + i, weight * uniform, mask=inside)
    tl.store(out + i, peak, mask=inside)
    tl.store(out + length + i, weight / total, mask=inside)
    return LossAndSlope(loss, weight * ((1.0 - target) - others / total))


@on_device_of_input
def normalise(
    rows: Stats, columns: Stats | None, positive_M: Tensor, scale: Tensor, weights_M: Tensor | None, label_smoothing: float
) -> Normalised:
    """Return losses of both sides together, the softmax of each, and the gradient in the positives' logits."""
    length, sides = positive_M.shape[0], 1 if columns is None else 2
    loss_M, dpos_M, *out = positive_M.new_empty(2 + 4 * sides, length).unbind()
    if length:
        run_kernel(
            normalise_kernel, (cdiv(length, NORMALISED_ROWS),),
            *rows, *(columns or (None,) * 6), positive_M, scale, weights_M, loss_M, dpos_M, out[0], label_smoothing, length,
            SIDES=sides, R=NORMALISED_ROWS,
        )  # fmt: skip
    is_used = True, True, rows.further is not None, rows.counted is not None
    softmax = [
        Softmax(*(v if used else None for v, used in zip(out[4 * side :], is_used, strict=False)))  # type: ignore[arg-type]
        for side in range(sides)
    ]
    return Normalised(loss_M, dpos_M, softmax[0], None if columns is None else softmax[1])


@triton.jit(do_not_specialize=["rows", "positive_rows"])
def finish_kernel(
    gradient, embeddings, partners, dpos, factor, finished, slopes, rows, positive_rows,
    WIDTH: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write g · factor with g = gradient + dpos · partners to `finished`, and each program's Σ embeddings · g to `slopes`."""
    i = tl.program_id(0) * R + tl.arange(0, R)
    dpos_R = tl.load(dpos + i, mask=i < positive_rows, other=0.0)[:, None]
    by = tl.load(factor)
    slope = tl.zeros((R, K), tl.float32)
    for k in range(0, tl.cdiv(WIDTH, K)):
        j = k * K + tl.arange(0, K)
        inside = (i < rows)[:, None] & (j < WIDTH)[None, :]
        at = i.to(tl.int64)[:, None] * WIDTH + j[None, :]
        g = tl.load(gradient + at, mask=inside, other=0.0)
        g += dpos_R * tl.load(partners + at, mask=inside & (i < positive_rows)[:, None], other=0.0).to(tl.float32)
        slope += g * tl.load(embeddings + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(finished + at, (g * by).to(finished.dtype.element_ty), mask=inside)
    tl.store(slopes + tl.program_id(0), tl.sum(tl.sum(slope, 1), 0))


@on_device_of_input
def finish(gradient: Tensor, embeddings: Tensor, partners: Tensor, dpos_M: Tensor, factor: Tensor, finished: Tensor) -> Tensor:
    """Add the positives' part to gx (or gy), multiply with a factor, and write to `finished`, which may be the gradient itself.

    Returns partial sums of the gradient in the scale, without the factor: Σ embeddings · gradient.
    """
    rows, width = gradient.shape
    slopes = gradient.new_empty(cdiv(rows, FINISHED_ROWS))
    if rows:
        run_kernel(
            finish_kernel, (slopes.shape[0],),
            gradient, embeddings, partners, dpos_M, factor, finished, slopes, rows, dpos_M.shape[0],
            WIDTH=width, R=FINISHED_ROWS, K=FINISHED_COLUMNS,
        )  # fmt: skip
    return slopes
