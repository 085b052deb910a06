"""The kernels that touch each positive once: its similarity, and its part of the gradient. Legend: ../../contract.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .product import similarities


@triton.jit(do_not_specialize=["rows"])
def positives_kernel(
    x, y, found, rows, WIDTH: tl.constexpr, M: tl.constexpr, K: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr
):
    """The diagonals of the tiles on the diagonal: rounded as every tile rounds, so that equal rows tie."""
    row = tl.program_id(0) * M
    z = similarities(x, y, row, row, rows, rows, WIDTH, M, M, K, DESCRIBED, PRECISION)
    i = tl.arange(0, M)
    tl.store(found + row + i, tl.sum(tl.where(i[:, None] == i[None, :], z, 0.0), 1), mask=row + i < rows)


@triton.jit(do_not_specialize=["rows", "own_rows"])
def finish_kernel(
    gradient, embeddings, partners, own, factor, finished, slopes, rows, own_rows,
    WIDTH: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """finished = (gradient + own · partners) · factor, and each program's sum of embeddings · (gradient + own · partners)."""
    i = tl.program_id(0) * R + tl.arange(0, R)
    pull = tl.load(own + i, mask=i < own_rows, other=0.0)[:, None]
    by = tl.load(factor)
    slope = tl.zeros((R, K), tl.float32)
    for k in range(0, tl.cdiv(WIDTH, K)):
        j = k * K + tl.arange(0, K)
        inside = (i < rows)[:, None] & (j < WIDTH)[None, :]
        at = i.to(tl.int64)[:, None] * WIDTH + j[None, :]
        g = tl.load(gradient + at, mask=inside, other=0.0)
        g += pull * tl.load(partners + at, mask=inside & (i < own_rows)[:, None], other=0.0).to(tl.float32)
        slope += g * tl.load(embeddings + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(finished + at, (g * by).to(finished.dtype.element_ty), mask=inside)
    tl.store(slopes + tl.program_id(0), tl.sum(tl.sum(slope, 1), 0))
