"""Sums of the softmax loss that options ask for: of further positives, and of all logits that count. Legend: ../../contract.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .pairs import further_positives
from .sums import put_pair
from .warp_reduce import TOTAL, behind, columns_together, of_columns, of_rows

# A logit that counts is above, unless its tile is computed again; one that does not is -inf.
LOWEST_LOGIT = tl.constexpr(-(2.0**127))


@triton.jit
def further_sums(
    z, special, column_parts, panel, row, column,
    IS_LOCAL: tl.constexpr, RANKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The similarities of further positives and their numbers, of rows; those of columns are put."""
    _, _, _, _, _, _, rows, columns, _ = panel
    total, number = tl.zeros((M // 16, 8, 2, 2), tl.float32), tl.zeros((M // 16, 8, 2, 2), tl.int32)
    total_N, number_N = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.int32)
    if special:
        positive = further_positives(panel, row, column, IS_LOCAL, M, N)
        kept, ones = tl.where(positive, z, 0.0), positive.to(tl.int32)
        total, number = of_rows(kept, TOTAL, M, N), of_rows(ones, TOTAL, M, N)
        if column_parts is not None:
            total_N = columns_together(of_columns(kept, TOTAL, M, N, WARPS), TOTAL)
            number_N = columns_together(of_columns(ones, TOTAL, M, N, WARPS), TOTAL)
    if column_parts is not None:
        j, down = column + tl.arange(0, N), tl.cdiv(rows, M)
        put_pair(column_parts, 2 + 2 * RANKED, row // M, down, j, columns, total_N, number_N.to(tl.float32))
    return total, number


@triton.jit
def finite_of_rows(logits, masked, M: tl.constexpr, N: tl.constexpr):
    """The logits that count, all unless `masked`, and how many do not, of rows."""
    total, missing = of_rows(logits, TOTAL, M, N), tl.zeros((M // 16, 8, 2, 2), tl.int32)
    if masked:
        # Summed up again: the logits themselves would be kept twice from here on.
        total = of_rows(tl.where(logits < LOWEST_LOGIT, 0.0, logits), TOTAL, M, N)
        missing = of_rows(behind(logits, LOWEST_LOGIT), TOTAL, M, N)
    return total, missing


@triton.jit
def finite_of_columns(logits, masked, M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr):
    """The same of columns."""
    total, missing = columns_together(of_columns(logits, TOTAL, M, N, WARPS), TOTAL), tl.zeros((N,), tl.int32)
    if masked:
        total = columns_together(of_columns(tl.where(logits < LOWEST_LOGIT, 0.0, logits), TOTAL, M, N, WARPS), TOTAL)
        missing = columns_together(of_columns(behind(logits, LOWEST_LOGIT), TOTAL, M, N, WARPS), TOTAL)
    return total, missing
