"""int8 similarities for backward: how embeddings are quantised, and how large gradients are computed again; kernels and launchers.

Each row is quantised to integer multiples of its own step, with 127 steps for its largest entry. A few large entries would make the
step coarse for all others, so rows are rotated first, which changes no product as x and y are rotated alike: blocks of 128 entries
are multiplied with a Hadamard matrix after some signs are flipped, so that every entry gets a part of every other.

Embeddings often share a direction. The error of a row along it would be the same in all logits of the row, which no sum averages
out. So the mean of each side is first subtracted from its rows, and what that changes is added to the logits again, as an exact
number for each row and each column: x·y = (x - u)·(y - v) + (x - u/2)·v + (y - v/2)·u for the means u and v.

An error in a logit is a relative error in its exponential. In sums over pairs such errors add up in squares, and most of a sum of
squares comes from a few pairs, those with large probabilities: these are computed again. With d the error of a logit and g the
gradients in the logits below a limit, the remaining squared error is d² Σ g² ≤ d² limit Σ g. Legend: ../contract.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gradient_panels import ROW_ALIGNMENT
from .launch import Launch, Panel, cdiv, part, run_kernel
from .tile import LOG2_E, exp_offset

# How many entries of a row are rotated together.
BLOCK = tl.constexpr(128)
QUANTISED_ROWS = 64
CORRECTED_ROWS, CORRECTED_TILES = 32, 8
# A gradient in a logit is large from this fraction of a typical gradient in a positive's logit on.
LARGE = 1 / 128


class QuantisedRows(NamedTuple):
    """Centred and rotated rows in int8; the step of each row, and what its similarities have besides their integer product, both
    with padding beyond the last row."""

    values: Tensor
    steps: Tensor
    biases: Tensor


class Int8Operands(NamedTuple):
    """The quantised embeddings of a panel, and the limit above which a gradient is computed again."""

    x: QuantisedRows
    y: QuantisedRows
    limit: Tensor


class Int8Embeddings:
    """The operands of panels, which come row after row. y is quantised once, x once per row of panels."""

    def __init__(self, launch: Launch, dpos_M: Tensor, padding: int) -> None:
        """dpos_M: the gradients in the positives' logits; padding: by how many rows steps and biases are readable
        beyond the last one."""
        self.launch, self.padding = launch, padding
        # A mean weighted by size: pairs that are learnt already, however many, do not lower it.
        self.limit = dpos_M.square().sum() / dpos_M.abs().sum() * LARGE
        self.r: slice | None = None
        self.y: QuantisedRows | None = None

    def operands(self, p: Panel) -> Int8Operands:
        if self.y is None:
            self.x_mean, self.y_mean = (t.mean(0, dtype=torch.float32) for t in (self.launch.x_MD, self.launch.y_ND))
            self.y = quantise(self.launch.y_ND, self.y_mean, self.x_mean, self.padding)
        if self.r != p.r:
            self.r, self.x = p.r, quantise(part(self.launch.x_MD, p.r), self.x_mean, self.y_mean, self.padding)
        return Int8Operands(self.x, QuantisedRows(part(self.y.values, p.c), *(t[p.c.start :] for t in self.y[1:])), self.limit)


def quantise(t: Tensor, mean: Tensor, partner_mean: Tensor, padding: int) -> QuantisedRows:
    """Centre, rotate and quantise rows. Their width is padded to whole blocks, their steps and biases by `padding` zeros.

    mean: of these rows, or of more. partner_mean: of the rows that they are multiplied with.
    """
    rows, width = t.shape
    values = t.new_empty(rows, cdiv(width, BLOCK.value) * BLOCK.value, dtype=torch.int8)
    # Not two rows of one matrix: kernels are compiled for aligned vectors.
    steps, biases = (t.new_zeros(rows + padding, dtype=torch.float32) for _ in range(2))
    grid = (cdiv(rows, QUANTISED_ROWS),)
    run_kernel(quantise_kernel, grid, t, mean, partner_mean, values, steps, biases, rows, WIDTH=width, R=QUANTISED_ROWS)
    return QuantisedRows(values, steps, biases)


@triton.jit(do_not_specialize=["rows"])
def quantise_kernel(t, mean, partner_mean, quantised, step, bias, rows, WIDTH: tl.constexpr, R: tl.constexpr):
    """Centre, rotate and quantise rows. A similarity is the integer product of two quantised rows times both steps, plus both
    biases."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    i = tl.program_id(0) * R + tl.arange(0, R)
    rotation = _hadamard(t.dtype.element_ty)
    largest, biases = tl.zeros((R,), tl.float32), tl.zeros((R,), tl.float32)
    for b in range(BLOCKS):
        j = b * BLOCK + tl.arange(0, BLOCK)
        block = _centred(t, mean, i, j, rows, WIDTH)
        half = tl.load(mean + j, mask=j < WIDTH, other=0.0) / 2
        biases += tl.sum((block + half[None, :]) * tl.load(partner_mean + j, mask=j < WIDTH, other=0.0)[None, :], 1)
        largest = tl.maximum(largest, tl.max(tl.abs(_rotated(block, rotation, j)), 1))
    to_127 = tl.where(largest > 0, 127.0 / tl.where(largest > 0, largest, 1.0), 0.0)
    for b in range(BLOCKS):
        j = b * BLOCK + tl.arange(0, BLOCK)
        values = tl.floor(_rotated(_centred(t, mean, i, j, rows, WIDTH), rotation, j) * to_127[:, None] + 0.5)
        place = i.to(tl.int64)[:, None] * (BLOCKS * BLOCK) + b * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(quantised + place, values.to(tl.int8), mask=(i < rows)[:, None])
    # The rotation is scaled by 1 / BLOCK instead of 1 / sqrt(BLOCK).
    tl.store(step + i, largest * (BLOCK**0.5 / 127), mask=i < rows)
    tl.store(bias + i, biases, mask=i < rows)


@triton.jit
def _hadamard(dtype: tl.constexpr):
    """Return a Hadamard matrix divided by BLOCK, so that no entry of a product with it exceeds the largest entry of the row."""
    k = tl.arange(0, BLOCK)
    bits = k[:, None] & k[None, :]
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    bits = bits ^ (bits >> 1)
    return ((1 - 2 * (bits & 1)).to(tl.float32) / BLOCK).to(dtype)


@triton.jit
def _centred(t, mean, i, j, rows, WIDTH: tl.constexpr):
    """Return a block of rows minus the mean, in fp32."""
    inside = (i < rows)[:, None] & (j < WIDTH)[None, :]
    block = tl.load(t + i.to(tl.int64)[:, None] * WIDTH + j[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, block - tl.load(mean + j, mask=j < WIDTH, other=0.0)[None, :], 0.0)


@triton.jit
def _rotated(block, rotation, j):
    """Return a rotated block of rows. Pseudo-random signs are flipped first, so that rows of equal entries spread too."""
    mixed = (j.to(tl.uint32) + 1) * 0x9E3779B1
    flipped = tl.where(((mixed >> 16) & 1) == 0, block, -block).to(rotation.dtype)
    return tl.dot(flipped, rotation, input_precision="ieee")


class Correction(NamedTuple):
    """What the large gradients of a panel are computed again from.

    large: marks (tile, row) of tiles of width `tile_width` that have a gradient above the limit. Gains are unshifted.
    """

    scale: Tensor
    large: Tensor
    tile_width: int
    limit: Tensor
    row_gain: Tensor
    column_gain: Tensor | None


def correct_large(launch: Launch, p: Panel, panel: Tensor, correction: Correction) -> None:
    """Compute the large gradients of a panel again, from the unquantised embeddings."""
    scale, large, tile_width, limit, row_gain, column_gain = correction
    width, grid = launch.x_MD.shape[1], (cdiv(p.rows, CORRECTED_ROWS), cdiv(large.shape[0], CORRECTED_TILES))
    run_kernel(
        correct_kernel, grid,
        part(launch.x_MD, p.r), part(launch.y_ND, p.c), scale, panel, large, limit, row_gain, column_gain, p.rows, p.columns,
        panel.stride(0) // ROW_ALIGNMENT.value, WIDTH=width, PADDED_WIDTH=1 << (width - 1).bit_length(), N=tile_width,
        R=CORRECTED_ROWS, TILES=CORRECTED_TILES, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "columns", "stride_units"])
def correct_kernel(
    x, y, scale, panel, large, limit, row_gain, column_gain, rows, columns, stride_units,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, N: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Compute large gradients again, from the unquantised embeddings: those in R rows of TILES tiles of N columns each.

    PADDED_WIDTH: the next power of two; stride_units: the stride of the panel in units of ROW_ALIGNMENT. Gains are unshifted.
    """
    c = tl.arange(0, TILES * R)
    i, t = tl.program_id(0) * R + c % R, tl.program_id(1) * TILES + c // R
    smallest = tl.load(limit)
    marks = tl.load(large + t.to(tl.int64) * rows + i, mask=(i < rows) & (t < tl.cdiv(columns, N)), other=0)
    marked = tl.where(marks != 0, c, TILES * R)
    current = tl.min(marked, 0)
    while current < TILES * R:
        row, tile = tl.program_id(0) * R + current % R, tl.program_id(1) * TILES + current // R
        row_start = panel + row.to(tl.int64) * (stride_units * ROW_ALIGNMENT)
        j = tile * N + tl.arange(0, N)
        large_N = tl.where(tl.load(row_start + j, mask=j < columns, other=0.0).to(tl.float32) > smallest, j, columns)
        column = tl.min(large_N, 0)
        while column < columns:
            g = _exact_gradient(x, y, scale, row_gain, column_gain, row, column, WIDTH, PADDED_WIDTH)
            tl.store(row_start + column, g.to(panel.dtype.element_ty))
            column = tl.min(tl.where(large_N > column, large_N, columns), 0)
        current = tl.min(tl.where(marked > current, marked, TILES * R), 0)


@triton.jit
def _exact_gradient(x, y, scale, row_gain, column_gain, i, j, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr):
    k = tl.arange(0, PADDED_WIDTH)
    a = tl.load(x + i.to(tl.int64) * WIDTH + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    b = tl.load(y + j.to(tl.int64) * WIDTH + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    gain = tl.load(row_gain + i)
    if column_gain is not None:
        gain += tl.load(column_gain + j)
    return tl.exp2((tl.sum(a * b, 0) * tl.load(scale) - exp_offset(tl.load(scale))) * LOG2_E) * gain
