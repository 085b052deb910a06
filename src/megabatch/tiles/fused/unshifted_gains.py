"""The gains of rows and columns for saved exponentials, exp(s - offset) with one offset for all. Legend: ../contract.py."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..contract import Softmax
from .launch import cdiv, run_kernel
from .tile import exp_offset, exp_peak_out_of_range, load_vector, mark_fallback, unshifted_gain

# Gains of a program. The tiles of hopper/ have as many rows, and its kernels read PADDING tiles beyond the end.
TILE = 128
PADDING = tl.constexpr(2)
# Below, what is rounded to bf16 may be subnormal: the second of two bf16 numbers (hopper/saved_products.py), and embeddings times
# their gain.
SMALLEST_BF16_GAIN = tl.constexpr(2.0**-110)


@triton.jit(do_not_specialize=["rows", "columns"])
def unshifted_gains_kernel(
    scale, row_peak, row_gain, column_peak, column_gain, gains_M, gains_N, needs_fallback, rows, columns, R: tl.constexpr
):  # fmt: skip
    """Write unshifted gains of rows and columns, zero beyond their end. Mark peaks out of range, and gains too small for bf16."""
    programs, offset = tl.cdiv(rows, R) + PADDING, exp_offset(tl.load(scale))
    if tl.program_id(0) < programs:
        _put_unshifted(offset, row_peak, row_gain, gains_M, needs_fallback, tl.program_id(0) * R, rows, R)
    elif column_peak is not None:
        _put_unshifted(offset, column_peak, column_gain, gains_N, needs_fallback, (tl.program_id(0) - programs) * R, columns, R)


@triton.jit
def _put_unshifted(offset, peak, gain, gains, needs_fallback, first, length, R: tl.constexpr):
    i = first + tl.arange(0, R)
    peaks = load_vector(peak, first, length, R)
    values = unshifted_gain(load_vector(gain, first, length, R), peaks, offset)
    is_tiny = (values != 0) & (tl.abs(values) < SMALLEST_BF16_GAIN)
    mark_fallback(needs_fallback, tl.arange(0, R), (exp_peak_out_of_range(peaks, offset) | is_tiny) & (i < length))
    tl.store(gains + i, tl.where(i < length, values, 0.0))


class UnshiftedGains(NamedTuple):
    """Unshifted gains of rows and columns, padded by PADDING tiles."""

    rows: Tensor
    columns: Tensor | None


def unshifted_gains(scale: Tensor, rows: Softmax, columns: Softmax | None, needs_fallback: Tensor) -> UnshiftedGains:
    """Return the gains for exp(s - offset), and mark peaks out of range."""
    length, width = rows.peak.shape[0], columns.peak.shape[0] if columns else 0
    tiles_M, tiles_N = cdiv(length, TILE) + PADDING.value, cdiv(width, TILE) + PADDING.value if columns else 0
    gains_M, gains_N = rows.peak.new_empty((tiles_M + tiles_N) * TILE).split((tiles_M * TILE, tiles_N * TILE))
    run_kernel(
        unshifted_gains_kernel, (tiles_M + tiles_N,),
        scale, rows.peak, rows.gain, columns.peak if columns else None, columns.gain if columns else None, gains_M, gains_N,
        needs_fallback, length, width, R=TILE,
    )  # fmt: skip
    return UnshiftedGains(gains_M, gains_N if columns else None)
