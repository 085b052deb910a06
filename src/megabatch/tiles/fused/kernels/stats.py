"""The forward kernel of the softmax loss. Legend: ../../contract.py; what a panel is: pairs.py.

Of this kernel and the backward one there are a fast and a careful launch. The fast ones take one exponential an element, shared by
rows and columns, without a maximum. For most tiles that is right, and which ones are not is known on the device: forward by the
sums, which show whether something overflowed or was lost; backward by the peaks of rows and columns, which bound the logits. Such a
tile leaves a mark in `needs_fallback`. The careful launches follow always: without a mark they end at once, with one they compute those
tiles again, with a peak for each row and each column.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .logits import counted, mark, marked
from .options import LOWEST_LOGIT, finite_of_columns, finite_of_rows, further_sums
from .pairs import is_special, rivals
from .product import halves, put_block, side_by_side, similarities, tile_at
from .safe_softmax import put_careful_stats
from .sums import LOG2_E, bars, bars_of_piece, get, put, put_pair
from .warp_reduce import LARGEST, TOTAL, behind, columns_together, of_columns, of_rows, row_order, rows_together

# A sum of exponentials in here has lost nothing that counts: what underflowed is below 2^-126 a term, and 2^27 of them do not
# overflow.
LEAST_SUM = tl.constexpr(2.0**-60)
LARGEST_SUM = tl.constexpr(2.0**100)
# What is kept of a pair that counts, if its exponential is less.
LEAST_KEPT = tl.constexpr(2.0**-126)


@triton.jit(do_not_specialize=["rows", "columns", "shift", "stride"])
def stats_kernel(
    x, y, scale, row_parts, column_parts, needs_fallback, matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns, shift,
    kept, stride, IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, SMOOTHED: tl.constexpr, RANKED: tl.constexpr,
    CAREFUL: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    PIECES: tl.constexpr, WARPS: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the sums of each tile for its rows and, if there is room for them, for its columns. kept: its exponentials too.

    CAREFUL: only where they have lost something.
    """
    panel = (matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns, shift)
    parts = (row_parts, column_parts, needs_fallback)
    target = (kept, stride)
    tiles = tl.cdiv(rows, M) * tl.cdiv(columns, N)
    # In powers of two, but for the careful way, whose logits are too large for another rounding.
    factor = tl.load(scale) if CAREFUL else _nonzero(tl.load(scale)) * LOG2_E
    if CAREFUL:
        tiles = tl.where(marked(needs_fallback, M if M > N else N), tiles, 0)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=not CAREFUL):
        row, column = tile_at(t, rows, columns, M, N, GROUP)
        needs_grad = True
        if CAREFUL:
            needs_grad = _has_lost(parts, panel, row, column, M, N)
        if needs_grad:
            z = similarities(x, y, row, column, rows, columns, WIDTH, M, N, K, DESCRIBED, PRECISION)
            special = is_special(panel, row, column, IS_LOCAL, M, N)
            if CAREFUL:
                put_careful_stats(z, special, factor, parts, panel, row, column, IS_LOCAL, MULTI_POSITIVE, DROP, M, N, PIECES)
            else:
                bar_M = bars(positive_M, row, rows, M)
                sums = _sums(
                    z, special, bar_M, factor, parts, target, panel, row, column,
                    IS_LOCAL, MULTI_POSITIVE, DROP, SMOOTHED, RANKED, M, N, PIECES, WARPS, DESCRIBED,
                )  # fmt: skip
                _put_columns(sums, parts, panel, row, column, RANKED, M, N)
                _put_rows(sums, factor, parts, panel, row, column, MULTI_POSITIVE, SMOOTHED, RANKED, M, N, WARPS)


@triton.jit
def _put_columns(sums, parts, panel, row, column, RANKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    _, column_parts, needs_fallback = parts
    _, _, _, _, _, _, rows, columns, _ = panel
    j, down = column + tl.arange(0, N), tl.cdiv(rows, M)
    if column_parts is not None:
        total = columns_together(sums[7], TOTAL)
        put(column_parts, 1, row // M, down, j, columns, total)
        mark(needs_fallback, tl.arange(0, N), _lost(total) & (j < columns))
        if RANKED:
            hardest, ahead = columns_together(sums[8], LARGEST), M - columns_together(sums[9], TOTAL)
            put_pair(column_parts, 2, row // M, down, j, columns, hardest, ahead.to(tl.float32))


@triton.jit
def _put_rows(
    sums, factor, parts, panel, row, column,
    MULTI_POSITIVE: tl.constexpr, SMOOTHED: tl.constexpr, RANKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    row_parts, _, needs_fallback = parts
    _, _, _, _, _, _, rows, columns, _ = panel
    order, tile, across = row_order(M, WARPS), column // N, tl.cdiv(columns, N)
    i = row + order
    total = rows_together(sums[0], TOTAL, M, WARPS)
    put(row_parts, 1, tile, across, i, rows, total)
    mark(needs_fallback, order, _lost(total) & (i < rows))
    if RANKED:
        hardest, ahead = rows_together(sums[1], LARGEST, M, WARPS), N - rows_together(sums[2], TOTAL, M, WARPS)
        put_pair(row_parts, 2, tile, across, i, rows, hardest, ahead.to(tl.float32))
    if MULTI_POSITIVE:
        total, number = rows_together(sums[3], TOTAL, M, WARPS), rows_together(sums[4], TOTAL, M, WARPS)
        put_pair(row_parts, 2 + 2 * RANKED, tile, across, i, rows, total, number.to(tl.float32))
    if SMOOTHED:
        total, number = rows_together(sums[5], TOTAL, M, WARPS), N - rows_together(sums[6], TOTAL, M, WARPS)
        put_pair(row_parts, 2 + 2 * RANKED + 2 * MULTI_POSITIVE, tile, across, i, rows, total / factor, number.to(tl.float32))


@triton.jit
def _sums(
    z, special, bar_M, factor, parts, target, panel, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, SMOOTHED: tl.constexpr, RANKED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr, WARPS: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Of rows: exponentials, the hardest rivals, how many are behind; further positives and all that count, with their numbers.
    Then the first three of columns, whose other sums are put. In parts (exchange.py); what is not wanted repeats the first."""
    if PIECES > 1:
        left, right = halves(z, M, N)
        a = _sums(
            left, special, bar_M, factor, parts, target, panel, row, column,
            IS_LOCAL, MULTI_POSITIVE, DROP, SMOOTHED, RANKED, M, N // 2, PIECES // 2, WARPS, DESCRIBED,
        )  # fmt: skip
        b = _sums(
            right, special, bar_M, factor, parts, target, panel, row, column + N // 2,
            IS_LOCAL, MULTI_POSITIVE, DROP, SMOOTHED, RANKED, M, N // 2, PIECES // 2, WARPS, DESCRIBED,
        )  # fmt: skip
        sums = (
            a[0] + b[0], tl.maximum(a[1], b[1]), a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5], a[6] + b[6],
            side_by_side(a[7], b[7]), side_by_side(a[8], b[8]), side_by_side(a[9], b[9]),
        )  # fmt: skip
    else:
        sums = _sums_of_piece(
            z, special, bar_M, factor, parts, target, panel, row, column,
            IS_LOCAL, MULTI_POSITIVE, DROP, SMOOTHED, RANKED, M, N, WARPS, DESCRIBED,
        )  # fmt: skip
    return sums


@triton.jit
def _sums_of_piece(
    z, special, bar_M, factor, parts, target, panel, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, SMOOTHED: tl.constexpr, RANKED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    _, column_parts, _ = parts
    _, _, _, _, positive_N, _, rows, columns, _ = panel
    bar_N = bars_of_piece(positive_N, column, columns, N)
    if RANKED:
        found = rivals(z, special, panel, row, column, IS_LOCAL, M, N)
    if RANKED and target[0] is None and not (MULTI_POSITIVE or DROP or SMOOTHED):
        # The pairs that count are the rivals. A negative scale makes the others +inf, and the careful launch takes over. What is
        # kept has to be zero there.
        logits = found * factor
        column_logits = logits
    else:
        logits, column_logits = counted(z * factor, z, special, panel, row, column, IS_LOCAL, MULTI_POSITIVE, DROP, M, N)
    if SMOOTHED:
        every, missing = finite_of_rows(logits, True if DROP else special, M, N)
        if column_parts is not None:
            last: tl.constexpr = 2 + 2 * RANKED + 2 * MULTI_POSITIVE
            every_N, missing_N = finite_of_columns(column_logits, True if DROP else special, M, N, WARPS)
            j, down = column + tl.arange(0, N), tl.cdiv(rows, M)
            put_pair(column_parts, last, row // M, down, j, columns, every_N / factor, (M - missing_N).to(tl.float32))
    if MULTI_POSITIVE:
        further, further_number = further_sums(z, special, column_parts, panel, row, column, IS_LOCAL, RANKED, M, N, WARPS)
    power = tl.exp2(logits)
    if target[0] is not None:
        kept = power
        if SMOOTHED:
            # By it backward tells the pairs that count.
            kept = tl.where(logits < LOWEST_LOGIT, 0.0, tl.maximum(power, LEAST_KEPT))
        put_block(target, kept, row, column, rows, columns, M, N, DESCRIBED, False)
    total = of_rows(power, TOTAL, M, N)
    hardest, behind_M = total, total
    total_N, hardest_N, behind_N = tl.zeros((1, N), tl.float32), tl.zeros((1, N), tl.float32), tl.zeros((1, N), tl.float32)
    if RANKED:
        hardest, behind_M = of_rows(found, LARGEST, M, N), of_rows(behind(found, bar_M[:, None]), TOTAL, M, N)
    if column_parts is not None:
        if DROP:
            power = tl.exp2(column_logits)
        total_N = of_columns(power, TOTAL, M, N, WARPS)
        if RANKED:
            hardest_N = of_columns(found, LARGEST, M, N, WARPS)
            behind_N = of_columns(behind(found, bar_N[None, :]), TOTAL, M, N, WARPS)
    if not MULTI_POSITIVE:
        further, further_number = total, total
    if not SMOOTHED:
        every, missing = total, total
    return total, hardest, behind_M, further, further_number, every, missing, total_N, hardest_N, behind_N


@triton.jit
def _has_lost(parts, panel, row, column, M: tl.constexpr, N: tl.constexpr):
    """Whether the sums that a tile has put have lost something."""
    row_parts, column_parts, _ = parts
    _, _, _, _, _, _, rows, columns, _ = panel
    i, j = row + tl.arange(0, M), column + tl.arange(0, N)
    total = get(row_parts, 1, column // N, tl.cdiv(columns, N), i, rows)
    lost = tl.max((_lost(total) & (i < rows)).to(tl.int32), 0) > 0
    if column_parts is not None:
        total = get(column_parts, 1, row // M, tl.cdiv(rows, M), j, columns)
        lost = lost | (tl.max((_lost(total) & (j < columns)).to(tl.int32), 0) > 0)
    return lost


@triton.jit
def _lost(total):
    """Which sums of exponentials are so large that something overflowed, or so small that something underflowed."""
    return (total < LEAST_SUM) | (total > LARGEST_SUM)


@triton.jit
def _nonzero(factor):
    """The scale, by which sums of logits can be divided: zero becomes a number that no logit shows."""
    return tl.where(factor == 0, 1e-30, factor)
