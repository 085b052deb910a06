"""The careful way to sums of exponentials: with a peak for each row and each column. Legend: ../../contract.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .logits import counted
from .product import halves
from .sums import LOG2_E, put_pair


@triton.jit
def put_careful_stats(
    z, special, factor, parts, panel, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Puts peaks and totals, these with a minus: that is how a total tells that it has a peak."""
    row_parts, _, _ = parts
    _, _, _, _, _, _, rows, columns, _ = panel
    peak, total = _sums(z, special, factor, parts, panel, row, column, IS_LOCAL, MULTI_POSITIVE, DROP, M, N, PIECES)
    put_pair(row_parts, 0, column // N, tl.cdiv(columns, N), row + tl.arange(0, M), rows, peak, -total)


@triton.jit
def _sums(
    z, special, factor, parts, panel, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Peaks and totals of rows; those of columns are put."""
    if PIECES > 1:
        left, right = halves(z, M, N)
        middle = column + N // 2
        peak, total = _sums(
            left, special, factor, parts, panel, row, column, IS_LOCAL, MULTI_POSITIVE, DROP, M, N // 2, PIECES // 2
        )
        peak_2, total_2 = _sums(
            right, special, factor, parts, panel, row, middle, IS_LOCAL, MULTI_POSITIVE, DROP, M, N // 2, PIECES // 2
        )
        anchor = _anchor(tl.maximum(peak, peak_2))
        total = total * tl.exp2((peak - anchor) * LOG2_E) + total_2 * tl.exp2((peak_2 - anchor) * LOG2_E)
        peak = tl.maximum(peak, peak_2)
    else:
        _, column_parts, _ = parts
        _, _, _, _, _, _, rows, columns, _ = panel
        logits, column_logits = counted(z * factor, z, special, panel, row, column, IS_LOCAL, MULTI_POSITIVE, DROP, M, N)
        peak, total = _anchored_total(logits, 1)
        if column_parts is not None:
            column_peak, column_total = _anchored_total(column_logits, 0)
            j = column + tl.arange(0, N)
            put_pair(column_parts, 0, row // M, tl.cdiv(rows, M), j, columns, column_peak, -column_total)
    return peak, total


@triton.jit
def _anchored_total(logits, AXIS: tl.constexpr):
    """Peaks, and sums of exponentials with them taken out."""
    peak = tl.max(logits, AXIS)
    return peak, tl.sum(tl.exp2((logits - tl.expand_dims(_anchor(peak), AXIS)) * LOG2_E), AXIS)


@triton.jit
def _anchor(peak):
    """What can be taken out of logits: the peak, unless there is none."""
    return tl.where(peak == float("-inf"), 0.0, peak)
