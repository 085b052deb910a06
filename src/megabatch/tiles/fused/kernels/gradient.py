"""The backward kernel of the softmax loss. Legend: ../../contract.py; what a panel is: pairs.py; why two launches: stats.py.

Peaks of rows and columns bound the logits. Where they are moderate, exponentials are taken as they are, one for rows and columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .logits import counted, mark, marked
from .pairs import further_positives, is_special
from .product import halves, put_block, similarities, tile_at
from .sums import LOG2_E, vector

# Peaks in here, which no logit exceeds, let exponentials be taken as they are: one that underflows is below e^-50 of its row.
LOWEST_PEAK = tl.constexpr(-32.0)
HIGHEST_PEAK = tl.constexpr(64.0)


@triton.jit(do_not_specialize=["rows", "columns", "shift", "stride"])
def gradient_kernel(
    x, y, scale, gradient, needs_fallback, row_peak, row_gain, row_further, row_counted,
    column_peak, column_gain, column_further, column_counted,
    matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns, shift, stride,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, CAREFUL: tl.constexpr,
    WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr,
    DESCRIBED: tl.constexpr, PRECISION: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Writes the gradient in the logits, zero for pairs that do not count and for positives.

    CAREFUL: only where some peak is out of the range in which exponentials can be taken as they are.
    """
    # In powers of two, but for the careful way, whose logits are too large for another rounding.
    factor = tl.load(scale) if CAREFUL else tl.load(scale) * LOG2_E
    panel = (matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns, shift)
    softmax = (row_peak, row_gain, row_further, row_counted, column_peak, column_gain, column_further, column_counted)
    target = (gradient, stride)
    tiles = tl.cdiv(rows, M) * tl.cdiv(columns, N)
    if CAREFUL:
        tiles = tl.where(marked(needs_fallback, M if M > N else N), tiles, 0)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=not CAREFUL):
        row, column = tile_at(t, rows, columns, M, N, GROUP)
        needs_grad = True
        if CAREFUL:
            needs_grad = _has_wild_peaks(softmax, panel, row, column, M, N)
        if needs_grad:
            z = similarities(x, y, row, column, rows, columns, WIDTH, M, N, K, DESCRIBED, PRECISION)
            special = is_special(panel, row, column, IS_LOCAL, M, N)
            gains_M, gains_N = tl.zeros((M, 1), tl.float32), tl.zeros((M, N), tl.float32)
            if not CAREFUL:
                gains_M, gains_N = _gains(softmax, needs_fallback, panel, row, column, M, N)
            _put_gradient(
                z, special, factor, gains_M, gains_N, softmax, target, panel, row, column,
                IS_LOCAL, MULTI_POSITIVE, DROP, CAREFUL, M, N, PIECES, DESCRIBED, ROUND_TO_TF32,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "columns"])
def lift_kernel(
    row_peak, row_gain, column_peak, column_gain, lifted_M, lifted_N, needs_fallback, rows, columns, R: tl.constexpr
):  # fmt: skip
    """Gains for exponentials as they are, zero beyond the rows and columns. Leaves marks where these cannot be taken so."""
    programs = tl.cdiv(rows, R)
    if tl.program_id(0) < programs:
        _lift(row_peak, row_gain, lifted_M, needs_fallback, tl.program_id(0) * R, rows, R)
    elif column_peak is not None:
        _lift(column_peak, column_gain, lifted_N, needs_fallback, (tl.program_id(0) - programs) * R, columns, R)


@triton.jit
def _lift(peak, gain, lifted_to, needs_fallback, first, length, R: tl.constexpr):
    peaks = vector(peak, first, length, R)
    mark(needs_fallback, tl.arange(0, R), wild(peaks))
    tl.store(lifted_to + first + tl.arange(0, R), lifted(vector(gain, first, length, R), peaks))


@triton.jit
def _gains(softmax, needs_fallback, panel, row, column, M: tl.constexpr, N: tl.constexpr):
    """What exponentials of a tile are multiplied with, for rows (M, 1) and columns (M, N), zero if they do not count. Leaves marks.

    Made for the whole tile, where a thread has one row and one column: for its part of a piece, each would make many.
    """
    row_peak, row_gain, _, _, column_peak, column_gain, _, _ = softmax
    _, _, _, _, _, _, rows, columns, _ = panel
    peaks, gains_M = vector(row_peak, row, rows, M), vector(row_gain, row, rows, M)
    wide_N = tl.zeros((M, N), tl.float32)
    if column_peak is not None:
        peaks_N, gains_N = vector(column_peak, column, columns, N), vector(column_gain, column, columns, N)
        mark(needs_fallback, tl.arange(0, N), wild(peaks_N))
        wide_N = tl.broadcast_to(lifted(gains_N, peaks_N)[None, :], (M, N))
    mark(needs_fallback, tl.arange(0, M), wild(peaks))
    return lifted(gains_M, peaks)[:, None], wide_N


@triton.jit
def _put_gradient(
    z, special, factor, gains_M, gains_N, softmax, target, panel, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, CAREFUL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PIECES: tl.constexpr, DESCRIBED: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Puts the gradient of a tile, piece after piece."""
    if PIECES > 1:
        left, right = halves(z, M, N)
        gains_left, gains_right = halves(gains_N, M, N)
        _put_gradient(
            left, special, factor, gains_M, gains_left, softmax, target, panel, row, column,
            IS_LOCAL, MULTI_POSITIVE, DROP, CAREFUL, M, N // 2, PIECES // 2, DESCRIBED, ROUND_TO_TF32,
        )  # fmt: skip
        _put_gradient(
            right, special, factor, gains_M, gains_right, softmax, target, panel, row, column + N // 2,
            IS_LOCAL, MULTI_POSITIVE, DROP, CAREFUL, M, N // 2, PIECES // 2, DESCRIBED, ROUND_TO_TF32,
        )  # fmt: skip
    else:
        _, _, _, _, _, _, rows, columns, _ = panel
        g = _gradient(
            z, special, factor, gains_M, gains_N, softmax, panel, row, column, IS_LOCAL, MULTI_POSITIVE, DROP, CAREFUL, M, N
        )
        put_block(target, g, row, column, rows, columns, M, N, DESCRIBED, ROUND_TO_TF32)


@triton.jit
def _gradient(
    z, special, factor, gains_M, gains_N, softmax, panel, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, CAREFUL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row_peak, row_gain, row_further, row_counted, column_peak, column_gain, column_further, column_counted = softmax
    _, _, _, _, _, _, rows, columns, _ = panel
    logits, column_logits = counted(z * factor, z, special, panel, row, column, IS_LOCAL, MULTI_POSITIVE, DROP, M, N)
    if CAREFUL:
        g = _anchored(logits, vector(row_peak, row, rows, M)[:, None], vector(row_gain, row, rows, M)[:, None])
        if column_peak is not None:
            peaks, gains = vector(column_peak, column, columns, N), vector(column_gain, column, columns, N)
            g += _anchored(column_logits, peaks[None, :], gains[None, :])
    elif column_peak is None:
        g = tl.exp2(logits) * gains_M
    elif DROP:
        g = tl.exp2(logits) * gains_M + tl.exp2(column_logits) * gains_N
    else:
        g = tl.exp2(logits) * (gains_M + gains_N)
    if row_counted is not None:
        share = vector(row_counted, row, rows, M)[:, None]
        column_share = tl.zeros((1, N), tl.float32)
        if column_peak is not None:
            column_share = vector(column_counted, column, columns, N)[None, :]
        if DROP:
            g -= tl.where(logits > float("-inf"), share, 0.0) + tl.where(column_logits > float("-inf"), column_share, 0.0)
        else:
            g -= share + column_share
            if special:
                g = tl.where(logits > float("-inf"), g, 0.0)
    if MULTI_POSITIVE:
        if special:
            further = tl.broadcast_to(vector(row_further, row, rows, M)[:, None], (M, N))
            if column_peak is not None:
                further += vector(column_further, column, columns, N)[None, :]
            g -= tl.where(further_positives(panel, row, column, IS_LOCAL, M, N), further, 0.0)
    return g


@triton.jit
def _anchored(logits, peaks, gains):
    return tl.exp2((logits - peaks) * LOG2_E) * gains


@triton.jit
def _has_wild_peaks(softmax, panel, row, column, M: tl.constexpr, N: tl.constexpr):
    """Whether some peak of a tile is out of the range in which exponentials can be taken as they are."""
    row_peak, _, _, _, column_peak, _, _, _ = softmax
    _, _, _, _, _, _, rows, columns, _ = panel
    found = tl.max(wild(vector(row_peak, row, rows, M)).to(tl.int32), 0)
    if column_peak is not None:
        found = tl.maximum(found, tl.max(wild(vector(column_peak, column, columns, N)).to(tl.int32), 0))
    return found > 0


@triton.jit
def lifted(gain, peak):
    """What an exponential as it is, without its peak taken out, is to be multiplied with."""
    return gain * tl.exp2(-peak * LOG2_E)


@triton.jit
def wild(peak):
    """Whether exponentials below such a peak cannot be taken as they are."""
    return (peak < LOWEST_PEAK) | (peak > HIGHEST_PEAK)
