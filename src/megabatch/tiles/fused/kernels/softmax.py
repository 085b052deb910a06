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
from .product import halves, put_block, similarities, tile_at
from .sums import get, is_ahead, larger_and_sum, put, put_pair, sum_larger_and_sum

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
    PIECES: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the sums of each tile, or piece of one, for its rows and, if there is room for them, for its columns.

    CAREFUL: only where they have lost something.
    """
    panel = (matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns, shift, PIECES * tl.cdiv(columns, N))
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
            wanted = _has_lost(parts, panel, row, column, M, N, PIECES)
        if wanted:
            z = similarities(x, y, row, column, rows, columns, WIDTH, M, N, K, DESCRIBED, PRECISION)
            if PIECES == 1:
                _put_stats(z, factor, parts, panel, row, column, HOME, SEVERAL, DROP, SMOOTHED, RANKED, CAREFUL, M, N)
            else:
                left, right = halves(z, M, N)
                middle = column + N // 2
                _put_stats_of_half(
                    left, factor, parts, panel, row, column, HOME, SEVERAL, DROP, SMOOTHED, RANKED, CAREFUL, M, N // 2, PIECES
                )
                _put_stats_of_half(
                    right, factor, parts, panel, row, middle, HOME, SEVERAL, DROP, SMOOTHED, RANKED, CAREFUL, M, N // 2, PIECES
                )


@triton.jit
def _put_stats_of_half(
    z, factor, parts, panel, row, column,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, DROP: tl.constexpr, SMOOTHED: tl.constexpr, RANKED: tl.constexpr,
    CAREFUL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    if PIECES == 2:
        _put_stats(z, factor, parts, panel, row, column, HOME, SEVERAL, DROP, SMOOTHED, RANKED, CAREFUL, M, N)
    else:
        left, right = halves(z, M, N)
        _put_stats(left, factor, parts, panel, row, column, HOME, SEVERAL, DROP, SMOOTHED, RANKED, CAREFUL, M, N // 2)
        _put_stats(right, factor, parts, panel, row, column + N // 2, HOME, SEVERAL, DROP, SMOOTHED, RANKED, CAREFUL, M, N // 2)


@triton.jit
def _put_stats(
    z, factor, parts, panel, row, column,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, DROP: tl.constexpr, SMOOTHED: tl.constexpr, RANKED: tl.constexpr,
    CAREFUL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    if CAREFUL:
        _put_careful_stats(z, factor, parts, panel, row, column, HOME, SEVERAL, DROP, M, N)
    else:
        _put_fast_stats(z, factor, parts, panel, row, column, HOME, SEVERAL, DROP, SMOOTHED, RANKED, M, N)


@triton.jit
def _put_fast_stats(
    z, factor, parts, panel, row, column,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, DROP: tl.constexpr, SMOOTHED: tl.constexpr, RANKED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row_parts, column_parts, trouble = parts
    _, _, _, positive_M, positive_N, _, rows, columns, _, across = panel
    i, j, down = row + tl.arange(0, M), column + tl.arange(0, N), tl.cdiv(rows, M)
    special = is_special(panel, row, column, HOME, M, N)
    if SEVERAL:
        channel: tl.constexpr = 4 if RANKED else 2
        row_sum, row_number = tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32)
        column_sum, column_number = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.float32)
        if special:
            further = further_positives(panel, row, column, HOME, M, N)
            further_z = tl.where(further, z, 0.0)
            row_sum, row_number = tl.sum(further_z, 1), tl.sum(further.to(tl.float32), 1)
            column_sum, column_number = tl.sum(further_z, 0), tl.sum(further.to(tl.float32), 0)
        put_pair(row_parts, channel, column // N, across, i, rows, row_sum, row_number)
        if column_parts is not None:
            put_pair(column_parts, channel, row // M, down, j, columns, column_sum, column_number)

    logits, column_logits = _counted(z * factor, z, special, panel, row, column, HOME, SEVERAL, DROP, M, N)
    if SMOOTHED:
        last: tl.constexpr = 2 + 2 * RANKED + 2 * SEVERAL
        row_sum, row_number = _finite_sum(logits, special, DROP, 1, M, N)
        put_pair(row_parts, last, column // N, across, i, rows, row_sum / factor, row_number)
        if column_parts is not None:
            column_sum, column_number = _finite_sum(column_logits, special, DROP, 0, N, M)
            put_pair(column_parts, last, row // M, down, j, columns, column_sum / factor, column_number)

    power = tl.exp2(logits)
    total = tl.sum(power, 1)
    put(row_parts, 1, column // N, across, i, rows, total)
    _mark(trouble, _lost(total) & (i < rows) & (column < columns))
    if RANKED:
        found = rivals(z, special, panel, row, column, HOME, M, N)
        hardest, ahead = tl.reduce((found, is_ahead(found, positive_M, i, rows, 1)), 1, larger_and_sum)
        put_pair(row_parts, 2, column // N, across, i, rows, hardest, ahead)
    if column_parts is not None:
        if DROP:
            power = tl.exp2(column_logits)
        if RANKED:
            # Sums over rows are exchanged between warps: together, they wait for each other once.
            total, hardest, ahead = tl.reduce((power, found, is_ahead(found, positive_N, j, columns, 0)), 0, sum_larger_and_sum)
            put_pair(column_parts, 2, row // M, down, j, columns, hardest, ahead)
        else:
            total = tl.sum(power, 0)
        put(column_parts, 1, row // M, down, j, columns, total)
        _mark(trouble, _lost(total) & (j < columns))


@triton.jit
def _has_lost(parts, panel, row, column, M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr):
    """Whether the sums that a tile has put have lost something."""
    row_parts, column_parts, _ = parts
    _, _, _, _, _, _, rows, columns, _, across = panel
    i, j = row + tl.arange(0, M), column + tl.arange(0, N)
    lost = False
    for piece in tl.static_range(PIECES):
        first = column + piece * (N // PIECES)
        total = get(row_parts, 1, first // (N // PIECES), across, i, rows)
        lost = lost | (tl.max((_lost(total) & (i < rows) & (first < columns)).to(tl.int32), 0) > 0)
    if column_parts is not None:
        total = get(column_parts, 1, row // M, tl.cdiv(rows, M), j, columns)
        lost = lost | (tl.max((_lost(total) & (j < columns)).to(tl.int32), 0) > 0)
    return lost


@triton.jit
def _put_careful_stats(
    z, factor, parts, panel, row, column,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, DROP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Puts peaks and totals, these with a minus: that is how a total tells that it has a peak."""
    row_parts, column_parts, _ = parts
    _, _, _, _, _, _, rows, columns, _, across = panel
    i, j = row + tl.arange(0, M), column + tl.arange(0, N)
    special = is_special(panel, row, column, HOME, M, N)
    logits, column_logits = _counted(z * factor, z, special, panel, row, column, HOME, SEVERAL, DROP, M, N)
    peak, total = _anchored_total(logits, 1)
    put_pair(row_parts, 0, column // N, across, i, rows, peak, -total)
    if column_parts is not None:
        peak, total = _anchored_total(column_logits, 0)
        put_pair(column_parts, 0, row // M, tl.cdiv(rows, M), j, columns, peak, -total)


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
    panel = (matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns, shift, PIECES * tl.cdiv(columns, N))
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
            if PIECES == 1:
                g = _gradient(z, factor, softmax, panel, row, column, HOME, SEVERAL, DROP, CAREFUL, M, N)
                put_block(target, g, row, column, rows, columns, M, N, DESCRIBED, ROUND_TO_TF32)
            else:
                left, right = halves(z, M, N)
                g = _gradient(left, factor, softmax, panel, row, column, HOME, SEVERAL, DROP, CAREFUL, M, N // 2)
                put_block(target, g, row, column, rows, columns, M, N // 2, DESCRIBED, ROUND_TO_TF32)
                g = _gradient(right, factor, softmax, panel, row, column + N // 2, HOME, SEVERAL, DROP, CAREFUL, M, N // 2)
                put_block(target, g, row, column + N // 2, rows, columns, M, N // 2, DESCRIBED, ROUND_TO_TF32)


@triton.jit
def _gradient(
    z, factor, softmax, panel, row, column,
    HOME: tl.constexpr, SEVERAL: tl.constexpr, DROP: tl.constexpr, CAREFUL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row_peak, row_gain, row_further, row_counted, column_peak, column_gain, column_further, column_counted = softmax
    _, _, _, _, _, _, rows, columns, _, _ = panel
    i, j = row + tl.arange(0, M), column + tl.arange(0, N)
    special = is_special(panel, row, column, HOME, M, N)
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
    _, _, _, positive_M, positive_N, margin, rows, columns, _, _ = panel
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
    anchor = tl.expand_dims(tl.where(peak == float("-inf"), 0.0, peak), AXIS)
    return peak, tl.sum(tl.exp2((logits - anchor) * LOG2_E), AXIS)


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
    _, _, _, _, _, _, rows, columns, _, _ = panel
    peak = _values(row_peak, row + tl.arange(0, M), rows)
    wild_M, wild_N = (peak < LOWEST_PEAK) | (peak > HIGHEST_PEAK), tl.zeros((N,), tl.int1)
    if column_peak is not None:
        peak = _values(column_peak, column + tl.arange(0, N), columns)
        wild_N = (peak < LOWEST_PEAK) | (peak > HIGHEST_PEAK)
    return wild_M, wild_N
