"""The backward kernel of the softmax loss where forward has kept its exponentials. Legend: ../../contract.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .gradient import lifted, wild
from .product import rounded_to_tf32
from .sums import vector

# Rows of a panel begin at multiples of so many elements: threads read and write as many at once.
GRAIN = tl.constexpr(8)


@triton.jit(do_not_specialize=["rows", "columns", "grains"])
def weigh_kernel(
    panel, needs_fallback, row_peak, row_gain, row_counted, column_peak, column_gain, column_counted, rows, columns, grains,
    M: tl.constexpr, N: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Turns exponentials into the gradient in the logits, in place; pairs that do not count are zero already.

    grains: in a row, what fills up the last one included. Leaves a mark where a peak is out of the range in which exponentials can
    be taken as they are.
    """
    stride = grains * GRAIN
    across = tl.cdiv(columns, N)
    row, column = tl.program_id(0) // across * M, tl.program_id(0) % across * N
    i, j = row + tl.arange(0, M), column + tl.arange(0, N)
    here = panel + (i.to(tl.int64) * stride)[:, None] + j[None, :]
    inside = (i < rows)[:, None] & (j < stride)[None, :]
    power = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    peaks = vector(row_peak, row, rows, M)
    gains = lifted(vector(row_gain, row, rows, M), peaks)[:, None]
    found = tl.max(wild(peaks).to(tl.int32), 0)
    if column_peak is not None:
        peaks_N = vector(column_peak, column, columns, N)
        gains = gains + lifted(vector(column_gain, column, columns, N), peaks_N)[None, :]
        found = tl.maximum(found, tl.max(wild(peaks_N).to(tl.int32), 0))
    g = power * gains
    if row_counted is not None:
        shares = tl.broadcast_to(vector(row_counted, row, rows, M)[:, None], (M, N))
        if column_counted is not None:
            shares += vector(column_counted, column, columns, N)[None, :]
        g -= tl.where(power > 0, shares, 0.0)
    if ROUND_TO_TF32:
        g = rounded_to_tf32(g)
    tl.store(here, g.to(panel.dtype.element_ty), mask=inside)
    if found > 0:
        tl.store(needs_fallback, 1)
