"""The kernels of the softmax loss. Legend: ../../contract.py; what a panel is: pairs.py.

The fast launches take one exponential an element, shared by rows and columns, without a maximum. For most tiles that is right, and
which ones are not is known on the device: forward by the sums, which show whether something overflowed or was lost; backward by the
peaks of rows and columns, which bound the logits. Such a tile leaves a mark in `trouble`. The careful launches follow always:
without a mark they end at once, with one they compute those tiles again, with a peak for each row and each column.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pairs import further_positives, is_special, negatives, others, rivals
from .product import halves, put_block, side_by_side, similarities, tile_at
from .sums import bars, counts_of_columns, get, of_columns, of_rows, put, put_pair, sum_and_larger, unpacked

LOG2_E = tl.constexpr(1.4426950408889634)
# A sum of exponentials in here has lost nothing that counts: what underflowed is below 2^-126 a term, and 2^27 of them do not
# overflow.
LEAST_SUM = tl.constexpr(2.0**-60)
LARGEST_SUM = tl.constexpr(2.0**100)
# Peaks in here, which no logit exceeds, let exponentials be taken as they are: one that underflows is below e^-50 of its row.
LOWEST_PEAK = tl.constexpr(-32.0)
HIGHEST_PEAK = tl.constexpr(64.0)


@triton.jit(do_not_specialize=["rows", "columns", "shift"])
def stats_kernel(
    x, y, scale, row_parts, column_parts, trouble, matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns, shift,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, DROP: tl.constexpr, SMOOTHED: tl.constexpr, RANKED: tl.constexpr,
    CAREFUL: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    PIECES: tl.constexpr, WARPS: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the sums of each tile for its rows and, if there is room for them, for its columns.

    CAREFUL: only where they have lost something.
    """
    panel = (matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns, shift)
    parts = (row_parts, column_parts, trouble)
    tiles = tl.cdiv(rows, M) * tl.cdiv(columns, N)
    # In powers of two, but for the careful way, whose logits are too large for another rounding.
    factor = tl.load(scale) if CAREFUL else _nonzero(tl.load(scale)) * LOG2_E
    if CAREFUL:
        tiles = tl.where(tl.load(trouble) == 0, 0, tiles)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=not CAREFUL):
        row, column = tile_at(t, rows, columns, M, N, GROUP)
        wanted = True
        if CAREFUL:
            wanted = _has_lost(parts, panel, row, column, M, N)
        if wanted:
            z = similarities(x, y, row, column, rows, columns, WIDTH, M, N, K, DESCRIBED, PRECISION)
            special = is_special(panel, row, column, HOME, M, N)
            if CAREFUL:
                _put_careful_stats(z, special, factor, parts, panel, row, column, HOME, SEVERAL, DROP, M, N, PIECES)
            else:
                _put_fast_stats(
                    z, special, factor, parts, panel, row, column,
                    HOME, SEVERAL, DROP, SMOOTHED, RANKED, M, N, PIECES, WARPS,
                )  # fmt: skip


@triton.jit
def _put_fast_stats(
    z, special, factor, parts, panel, row, column,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, DROP: tl.constexpr, SMOOTHED: tl.constexpr, RANKED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Puts the sums of a tile's rows, having collected those of its pieces."""
    row_parts, _, trouble = parts
    _, _, _, positive_M, _, _, rows, columns, _ = panel
    i, across = row + tl.arange(0, M), tl.cdiv(columns, N)
    bar_M = bars(positive_M, i, rows)
    total, hardest, ahead, further, further_number, counted, counted_number = _fast_sums(
        z, special, bar_M, factor, parts, panel, row, column, HOME, SEVERAL, DROP, SMOOTHED, RANKED, M, N, PIECES, WARPS
    )
    total = tl.sum(total, 1)
    put(row_parts, 1, column // N, across, i, rows, total)
    _mark(trouble, _lost(total) & (i < rows))
    if RANKED:
        put_pair(row_parts, 2, column // N, across, i, rows, tl.max(hardest, 1), tl.sum(ahead, 1).to(tl.float32))
    if SEVERAL:
        put_pair(row_parts, 2 + 2 * RANKED, column // N, across, i, rows, further, further_number)
    if SMOOTHED:
        put_pair(row_parts, 2 + 2 * RANKED + 2 * SEVERAL, column // N, across, i, rows, counted / factor, counted_number)


@triton.jit
def _fast_sums(
    z, special, bar_M, factor, parts, panel, row, column,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, DROP: tl.constexpr, SMOOTHED: tl.constexpr, RANKED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Sums of rows: of exponentials, rankings, of further positives and of all that count, with their numbers. What is not wanted
    repeats the first. Those of columns are put, of two pieces at once: for less, warps wait too often, and more takes registers.
    """
    if PIECES > 1:
        left, right = halves(z, M, N)
        middle = column + N // 2
        if PIECES > 2:
            a = _fast_sums(
                left, special, bar_M, factor, parts, panel, row, column,
                HOME, SEVERAL, DROP, SMOOTHED, RANKED, M, N // 2, PIECES // 2, WARPS,
            )  # fmt: skip
            b = _fast_sums(
                right, special, bar_M, factor, parts, panel, row, middle,
                HOME, SEVERAL, DROP, SMOOTHED, RANKED, M, N // 2, PIECES // 2, WARPS,
            )  # fmt: skip
        else:
            a = _fast_sums_of_piece(
                left, special, bar_M, factor, parts, panel, row, column,
                HOME, SEVERAL, DROP, SMOOTHED, RANKED, M, N // 2, WARPS,
            )  # fmt: skip
            b = _fast_sums_of_piece(
                right, special, bar_M, factor, parts, panel, row, middle,
                HOME, SEVERAL, DROP, SMOOTHED, RANKED, M, N // 2, WARPS,
            )  # fmt: skip
            found = side_by_side(a[7], b[7]), side_by_side(a[8], b[8]), side_by_side(a[9], b[9])
            _put_columns(found, parts, panel, row, column, RANKED, M, N, PIECES)
        sums = a[0] + b[0], tl.maximum(a[1], b[1]), a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5], a[6] + b[6]
    else:
        a = _fast_sums_of_piece(
            z, special, bar_M, factor, parts, panel, row, column, HOME, SEVERAL, DROP, SMOOTHED, RANKED, M, N, WARPS
        )
        _put_columns((a[7], a[8], a[9]), parts, panel, row, column, RANKED, M, N, PIECES)
        sums = a[0], a[1], a[2], a[3], a[4], a[5], a[6]
    return sums


@triton.jit
def _put_columns(found, parts, panel, row, column, RANKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr):
    total, hardest, ahead = found
    _, column_parts, trouble = parts
    _, _, _, _, _, _, rows, columns, _ = panel
    j, down = column + tl.arange(0, N), tl.cdiv(rows, M)
    if column_parts is not None:
        if RANKED:
            # Warps wait for each other once for both.
            total, hardest = tl.reduce((total, hardest), 0, sum_and_larger)
            ahead = unpacked(tl.sum(ahead, 0), M, N, PIECES).to(tl.float32)
            put_pair(column_parts, 2, row // M, down, j, columns, hardest, ahead)
        else:
            total = tl.sum(total, 0)
        put(column_parts, 1, row // M, down, j, columns, total)
        _mark(trouble, _lost(total) & (j < columns))


@triton.jit
def _fast_sums_of_piece(
    z, special, bar_M, factor, parts, panel, row, column,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, DROP: tl.constexpr, SMOOTHED: tl.constexpr, RANKED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The same of one piece, and at the end what columns have of exponentials and rankings, to be put; their other sums are put."""
    _, column_parts, _ = parts
    _, _, _, _, positive_N, _, rows, columns, _ = panel
    j, down = column + tl.arange(0, N), tl.cdiv(rows, M)
    bar_N = bars(positive_N, j, columns)
    if SEVERAL:
        further, further_number = tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32)
        column_sum, column_number = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.float32)
        if special:
            positive = further_positives(panel, row, column, HOME, M, N)
            further_z = tl.where(positive, z, 0.0)
            further, further_number = tl.sum(further_z, 1), tl.sum(positive.to(tl.float32), 1)
            column_sum, column_number = tl.sum(further_z, 0), tl.sum(positive.to(tl.float32), 0)
        if column_parts is not None:
            put_pair(column_parts, 2 + 2 * RANKED, row // M, down, j, columns, column_sum, column_number)

    logits, column_logits = _counted(z * factor, z, special, panel, row, column, HOME, SEVERAL, DROP, M, N)
    if SMOOTHED:
        counted, counted_number = _finite_sum(logits, special, DROP, 1, M, N)
        if column_parts is not None:
            last: tl.constexpr = 2 + 2 * RANKED + 2 * SEVERAL
            column_sum, column_number = _finite_sum(column_logits, special, DROP, 0, N, M)
            put_pair(column_parts, last, row // M, down, j, columns, column_sum / factor, column_number)

    power = tl.exp2(logits)
    total = of_rows(power, False, M, N)
    hardest, ahead = total, total
    column_total, column_hardest, column_ahead = total, total, total
    if column_parts is not None:
        if DROP:
            power = tl.exp2(column_logits)
        column_total = of_columns(power, False, M, N, WARPS)
    if RANKED:
        found = rivals(z, special, panel, row, column, HOME, M, N)
        hardest, ahead = of_rows(found, True, M, N), of_rows((found >= bar_M[:, None]).to(tl.int32), False, M, N)
        if column_parts is not None:
            column_hardest = of_columns(found, True, M, N, WARPS)
            column_ahead = counts_of_columns((found >= bar_N[None, :]).to(tl.int32), M, N, WARPS)
    if not SEVERAL:
        further, further_number = total, total
    if not SMOOTHED:
        counted, counted_number = total, total
    return (
        total, hardest, ahead, further, further_number, counted, counted_number, column_total, column_hardest, column_ahead
    )  # fmt: skip


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
def _put_careful_stats(
    z, special, factor, parts, panel, row, column,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, DROP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Puts peaks and totals, these with a minus: that is how a total tells that it has a peak."""
    row_parts, _, _ = parts
    _, _, _, _, _, _, rows, columns, _ = panel
    peak, total = _careful_sums(z, special, factor, parts, panel, row, column, HOME, SEVERAL, DROP, M, N, PIECES)
    put_pair(row_parts, 0, column // N, tl.cdiv(columns, N), row + tl.arange(0, M), rows, peak, -total)


@triton.jit
def _careful_sums(
    z, special, factor, parts, panel, row, column,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, DROP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Peaks and totals of rows; those of columns are put."""
    if PIECES > 1:
        left, right = halves(z, M, N)
        middle = column + N // 2
        peak, total = _careful_sums(left, special, factor, parts, panel, row, column, HOME, SEVERAL, DROP, M, N // 2, PIECES // 2)
        peak_2, total_2 = _careful_sums(
            right, special, factor, parts, panel, row, middle, HOME, SEVERAL, DROP, M, N // 2, PIECES // 2
        )
        anchor = _anchor(tl.maximum(peak, peak_2))
        total = total * tl.exp2((peak - anchor) * LOG2_E) + total_2 * tl.exp2((peak_2 - anchor) * LOG2_E)
        peak = tl.maximum(peak, peak_2)
    else:
        _, column_parts, _ = parts
        _, _, _, _, _, _, rows, columns, _ = panel
        logits, column_logits = _counted(z * factor, z, special, panel, row, column, HOME, SEVERAL, DROP, M, N)
        peak, total = _anchored_total(logits, 1)
        if column_parts is not None:
            column_peak, column_total = _anchored_total(column_logits, 0)
            j = column + tl.arange(0, N)
            put_pair(column_parts, 0, row // M, tl.cdiv(rows, M), j, columns, column_peak, -column_total)
    return peak, total


@triton.jit(do_not_specialize=["rows", "columns", "shift", "stride"])
def gradient_kernel(
    x, y, scale, gradient, trouble, row_peak, row_gain, row_further, row_counted,
    column_peak, column_gain, column_further, column_counted,
    matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns, shift, stride,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, DROP: tl.constexpr, CAREFUL: tl.constexpr,
    WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr,
    DESCRIBED: tl.constexpr, PRECISION: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Writes the gradient in the logits, zero for pairs that do not count and for positives.

    CAREFUL: only where some peak is out of the range in which exponentials can be taken as they are.
    """
    factor = tl.load(scale)
    panel = (matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns, shift)
    softmax = (row_peak, row_gain, row_further, row_counted, column_peak, column_gain, column_further, column_counted)
    target = (gradient, stride)
    tiles = tl.cdiv(rows, M) * tl.cdiv(columns, N)
    if CAREFUL:
        tiles = tl.where(tl.load(trouble) == 0, 0, tiles)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=not CAREFUL):
        row, column = tile_at(t, rows, columns, M, N, GROUP)
        wanted = True
        if CAREFUL:
            wild_M, wild_N = _wild_peaks(softmax, panel, row, column, M, N)
            wanted = tl.maximum(tl.max(wild_M.to(tl.int32), 0), tl.max(wild_N.to(tl.int32), 0)) > 0
        if wanted:
            z = similarities(x, y, row, column, rows, columns, WIDTH, M, N, K, DESCRIBED, PRECISION)
            if not CAREFUL:
                wild_M, wild_N = _wild_peaks(softmax, panel, row, column, M, N)
                _mark(trouble, wild_M)
                _mark(trouble, wild_N)
            special = is_special(panel, row, column, HOME, M, N)
            if PIECES == 1:
                g = _gradient(z, special, factor, softmax, panel, row, column, HOME, SEVERAL, DROP, CAREFUL, M, N)
                put_block(target, g, row, column, rows, columns, M, N, DESCRIBED, ROUND_TO_TF32)
            else:
                left, right = halves(z, M, N)
                g = _gradient(left, special, factor, softmax, panel, row, column, HOME, SEVERAL, DROP, CAREFUL, M, N // 2)
                put_block(target, g, row, column, rows, columns, M, N // 2, DESCRIBED, ROUND_TO_TF32)
                g = _gradient(right, special, factor, softmax, panel, row, column + N // 2, HOME, SEVERAL, DROP, CAREFUL, M, N // 2)
                put_block(target, g, row, column + N // 2, rows, columns, M, N // 2, DESCRIBED, ROUND_TO_TF32)


@triton.jit
def _gradient(
    z, special, factor, softmax, panel, row, column,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, DROP: tl.constexpr, CAREFUL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row_peak, row_gain, row_further, row_counted, column_peak, column_gain, column_further, column_counted = softmax
    _, _, _, _, _, _, rows, columns, _ = panel
    i, j = row + tl.arange(0, M), column + tl.arange(0, N)
    # In powers of two, but for the careful way, whose logits are too large for another rounding.
    logits = z * (factor if CAREFUL else factor * LOG2_E)
    logits, column_logits = _counted(logits, z, special, panel, row, column, HOME, SEVERAL, DROP, M, N)
    peak, gain = _values(row_peak, i, rows)[:, None], _values(row_gain, i, rows)[:, None]
    if CAREFUL:
        g = tl.exp2((logits - peak) * LOG2_E) * gain
    else:
        gain *= tl.exp2(-peak * LOG2_E)
        power = tl.exp2(logits)
    if column_peak is not None:
        column_peaks, column_gains = _values(column_peak, j, columns)[None, :], _values(column_gain, j, columns)[None, :]
        if CAREFUL:
            g += tl.exp2((column_logits - column_peaks) * LOG2_E) * column_gains
        else:
            column_gains *= tl.exp2(-column_peaks * LOG2_E)
            if DROP:
                g = power * gain + tl.exp2(column_logits) * column_gains
            else:
                g = power * (gain + column_gains)
    elif not CAREFUL:
        g = power * gain
    if row_counted is not None:
        share = _values(row_counted, i, rows)[:, None]
        column_share = tl.zeros((1, N), tl.float32)
        if column_peak is not None:
            column_share = _values(column_counted, j, columns)[None, :]
        if DROP:
            g -= tl.where(logits > float("-inf"), share, 0.0) + tl.where(column_logits > float("-inf"), column_share, 0.0)
        else:
            g -= share + column_share
            if special:
                g = tl.where(logits > float("-inf"), g, 0.0)
    if SEVERAL:
        if special:
            further = tl.broadcast_to(_values(row_further, i, rows)[:, None], (M, N))
            if column_peak is not None:
                further += _values(column_further, j, columns)[None, :]
            g -= tl.where(further_positives(panel, row, column, HOME, M, N), further, 0.0)
    return g


@triton.jit
def _counted(
    logits, z, special, panel, row, column,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, DROP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The logits as rows and as columns count them: -inf where a pair does not count."""
    _, _, _, positive_M, positive_N, margin, rows, columns, _ = panel
    column_logits = logits
    if DROP:
        droppable = tl.full((M, N), True, tl.int1)
        if SEVERAL:
            droppable = negatives(panel, row, column, HOME, M, N)
        i, j = row + tl.arange(0, M), column + tl.arange(0, N)
        limit = _values(positive_M, i, rows) + margin
        logits = tl.where(droppable & (z > limit[:, None]), float("-inf"), logits)
        if positive_N is not None:
            limit = _values(positive_N, j, columns) + margin
            column_logits = tl.where(droppable & (z > limit[None, :]), float("-inf"), column_logits)
    if special:
        if SEVERAL:
            counted = others(panel, row, column, HOME, M, N)
        else:
            counted = negatives(panel, row, column, HOME, M, N)
        logits = tl.where(counted, logits, float("-inf"))
        if DROP:
            column_logits = tl.where(counted, column_logits, float("-inf"))
    if not DROP:
        column_logits = logits
    return logits, column_logits


@triton.jit
def _finite_sum(logits, special, DROP: tl.constexpr, AXIS: tl.constexpr, LENGTH: tl.constexpr, ACROSS: tl.constexpr):
    """The sum of the logits that count, and their number."""
    if DROP:
        finite = logits > float("-inf")
        total, number = tl.sum(tl.where(finite, logits, 0.0), AXIS), tl.sum(finite.to(tl.float32), AXIS)
    else:
        total, number = tl.sum(logits, AXIS), tl.full((LENGTH,), ACROSS, tl.float32)
        if special:
            finite = logits > float("-inf")
            total, number = tl.sum(tl.where(finite, logits, 0.0), AXIS), tl.sum(finite.to(tl.float32), AXIS)
    return total, number


@triton.jit
def _anchored_total(logits, AXIS: tl.constexpr):
    """Peaks, and sums of exponentials with them taken out."""
    peak = tl.max(logits, AXIS)
    return peak, tl.sum(tl.exp2((logits - tl.expand_dims(_anchor(peak), AXIS)) * LOG2_E), AXIS)


@triton.jit
def _anchor(peak):
    """What can be taken out of logits: the peak, unless there is none."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _values(vector, i, length):
    return tl.load(vector + i, mask=i < length, other=0.0)


@triton.jit
def _nonzero(factor):
    """The scale, by which sums of logits can be divided: zero becomes a number that no logit shows."""
    return tl.where(factor == 0, 1e-30, factor)


@triton.jit
def _mark(trouble, where):
    """Leaves a mark: whichever threads do write the same."""
    tl.store(trouble + tl.zeros_like(where.to(tl.int32)), 1, mask=where)


@triton.jit
def _lost(total):
    """Which sums of exponentials are so large that something overflowed, or so small that something underflowed."""
    return (total < LEAST_SUM) | (total > LARGEST_SUM)


@triton.jit
def _wild_peaks(softmax, panel, row, column, M: tl.constexpr, N: tl.constexpr):
    """Which peaks of a tile are out of the range in which exponentials can be taken as they are."""
    row_peak, _, _, _, column_peak, _, _, _ = softmax
    _, _, _, _, _, _, rows, columns, _ = panel
    peak = _values(row_peak, row + tl.arange(0, M), rows)
    wild_M, wild_N = (peak < LOWEST_PEAK) | (peak > HIGHEST_PEAK), tl.zeros((N,), tl.int1)
    if column_peak is not None:
        peak = _values(column_peak, column + tl.arange(0, N), columns)
        wild_N = (peak < LOWEST_PEAK) | (peak > HIGHEST_PEAK)
    return wild_M, wild_N
