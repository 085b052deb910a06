"""What forward and backward of the softmax loss have in common: which logits count, and the marks of tiles to be computed again."""

from __future__ import annotations

import triton
import triton.language as tl

from .pairs import negatives, others
from .sums import vector


@triton.jit
def counted(
    logits, z, special, panel, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The logits as rows and as columns count them: -inf where a pair does not count."""
    _, _, _, positive_M, positive_N, margin, rows, columns, _ = panel
    column_logits = logits
    if DROP:
        droppable = tl.full((M, N), True, tl.int1)
        if MULTI_POSITIVE:
            droppable = negatives(panel, row, column, IS_LOCAL, M, N)
        limit = vector(positive_M, row, rows, M) + margin
        logits = tl.where(droppable & (z > limit[:, None]), float("-inf"), logits)
        if positive_N is not None:
            limit = vector(positive_N, column, columns, N) + margin
            column_logits = tl.where(droppable & (z > limit[None, :]), float("-inf"), column_logits)
    if special:
        if MULTI_POSITIVE:
            present = others(panel, row, column, IS_LOCAL, M, N)
        else:
            present = negatives(panel, row, column, IS_LOCAL, M, N)
        logits = tl.where(present, logits, float("-inf"))
        if DROP:
            column_logits = tl.where(present, column_logits, float("-inf"))
    if not DROP:
        column_logits = logits
    return logits, column_logits


@triton.jit
def mark(needs_fallback, place, where):
    """Leaves marks at places of a tile: whichever threads and tiles do write the same."""
    tl.store(needs_fallback + place, 1, mask=where)


@triton.jit
def marked(needs_fallback, LENGTH: tl.constexpr):
    """Whether some tile has left a mark."""
    return tl.max(tl.load(needs_fallback + tl.arange(0, LENGTH)), 0) != 0
