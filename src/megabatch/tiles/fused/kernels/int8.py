"""Similarities in eight bits, for those of backward: how embeddings are rounded, and how large gradients are made right again.

Rows are rounded to whole multiples of a step of their own, of which the largest entry is 127. Few large entries would make it
coarse for all others, so rows are turned first, as one turns x and y alike without a change in their products: blocks of them are
multiplied with a Hadamard matrix, some signs changed first, so that every entry has a part of every other.

An error in a logit is one in its exponential, relative to it. In sums over pairs such errors add up as squares do, and most of a
sum of squares comes of few pairs, those with large probabilities: they are computed again. With d the error of a logit and g the
gradients in the logits below a limit, what is left is d² Σ g² ≤ d² limit Σ g. Legend: ../../contract.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .backward_from_saved_exp import GRAIN
from .sums import LOG2_E

# How many entries of a row are turned together.
BLOCK = tl.constexpr(128)


@triton.jit(do_not_specialize=["rows"])
def round_kernel(t, rounded, step, rows, WIDTH: tl.constexpr, R: tl.constexpr):
    """Turns and rounds rows, in whole blocks. A similarity is the sum of products of what comes out, times both steps."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    i = tl.program_id(0) * R + tl.arange(0, R)
    turn = _hadamard(t.dtype.element_ty)
    largest = tl.zeros((R,), tl.float32)
    for b in range(BLOCKS):
        largest = tl.maximum(largest, tl.max(tl.abs(_turned(t, turn, i, b, rows, WIDTH)), 1))
    fit = tl.where(largest > 0, 127.0 / tl.where(largest > 0, largest, 1.0), 0.0)
    for b in range(BLOCKS):
        found = tl.floor(_turned(t, turn, i, b, rows, WIDTH) * fit[:, None] + 0.5)
        here = i.to(tl.int64)[:, None] * (BLOCKS * BLOCK) + b * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(rounded + here, found.to(tl.int8), mask=(i < rows)[:, None])
    # What was turned is a root of BLOCK too short.
    tl.store(step + i, largest * (BLOCK**0.5 / 127), mask=i < rows)


@triton.jit
def _hadamard(dtype: tl.constexpr):
    """Signs that are mutually orthogonal, divided by BLOCK, so that no sum with them is larger than the largest entry."""
    k = tl.arange(0, BLOCK)
    bits = k[:, None] & k[None, :]
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    bits = bits ^ (bits >> 1)
    return ((1 - 2 * (bits & 1)).to(tl.float32) / BLOCK).to(dtype)


@triton.jit
def _turned(t, turn, i, b, rows, WIDTH: tl.constexpr):
    """A block of rows, with signs that look random: rows of equal entries are to spread too."""
    j = b * BLOCK + tl.arange(0, BLOCK)
    inside = (i < rows)[:, None] & (j < WIDTH)[None, :]
    block = tl.load(t + i.to(tl.int64)[:, None] * WIDTH + j[None, :], mask=inside, other=0.0)
    mixed = (j.to(tl.uint32) + 1) * 0x9E3779B1
    return tl.dot(tl.where(((mixed >> 16) & 1) == 0, block, -block), turn, input_precision="ieee")


@triton.jit(do_not_specialize=["rows", "columns", "grains"])
def correct_kernel(
    x, y, scale, panel, large, limit, row_gain, column_gain, rows, columns, grains,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Computes large gradients again, from the embeddings as they are: those in R rows of TILES tiles, each of N columns.

    WIDE: a power of two that holds the width; grains: in a row of the panel. Gains come lifted.
    """
    c = tl.arange(0, TILES * R)
    i, t = tl.program_id(0) * R + c % R, tl.program_id(1) * TILES + c // R
    least = tl.load(limit)
    marks = tl.load(large + t.to(tl.int64) * rows + i, mask=(i < rows) & (t < tl.cdiv(columns, N)), other=0)
    waiting = tl.where(marks != 0, c, TILES * R)
    found = tl.min(waiting, 0)
    while found < TILES * R:
        row, tile = tl.program_id(0) * R + found % R, tl.program_id(1) * TILES + found // R
        here = panel + row.to(tl.int64) * (grains * GRAIN)
        j = tile * N + tl.arange(0, N)
        large_N = tl.where(tl.load(here + j, mask=j < columns, other=0.0).to(tl.float32) > least, j, columns)
        column = tl.min(large_N, 0)
        while column < columns:
            g = _gradient(x, y, scale, row_gain, column_gain, row, column, WIDTH, WIDE)
            tl.store(here + column, g.to(panel.dtype.element_ty))
            column = tl.min(tl.where(large_N > column, large_N, columns), 0)
        found = tl.min(tl.where(waiting > found, waiting, TILES * R), 0)


@triton.jit
def _gradient(x, y, scale, row_gain, column_gain, i, j, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    k = tl.arange(0, WIDE)
    a = tl.load(x + i.to(tl.int64) * WIDTH + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    b = tl.load(y + j.to(tl.int64) * WIDTH + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    gain = tl.load(row_gain + i)
    if column_gain is not None:
        gain += tl.load(column_gain + j)
    return tl.exp2(tl.sum(a * b, 0) * (tl.load(scale) * LOG2_E)) * gain
