"""Forward of the softmax loss: the kernel, its safe fallback, and the launcher. Legend: ../contract.py; panels and tiles: tile.py.

The forward and the backward kernel both have a fast and a safe launch. The fast one computes exp(s - offset) once per element,
shared by rows and columns, with one offset for all (tile.exp_offset) instead of the maximum of a row. That is right for most tiles,
and the device knows for which it is not: in forward by the sums, which show whether a term overflowed or underflowed; in backward
by the peaks of rows and columns, which bound the logits. Such a tile sets a mark in `needs_fallback`. The safe launch always
follows. Without a mark it ends at once; with one it computes those tiles again, with a maximum for each row and each column.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..contract import ComputeOptions, Pairs, SoftmaxPass, Stats
from .architectures import architecture_of
from .gradient_panels import allocate_saved_exp
from .launch import (
    MARKS,
    Launch,
    PartialSums,
    as_compared_ids,
    is_multi_positive,
    on_device_of_input,
    run_kernel,
    without_saved_exp,
)
from .reductions import (
    COUNTED,
    EXPONENTIALS,
    MAX,
    RANKING,
    SUM,
    Sums,
    encode_shifted_sum,
    finish_columns,
    finish_rows,
    get,
    is_below,
    merge_empty,
    merge_parts,
    put,
    put_pair,
    ranking,
    reduce_columns,
    reduce_rows,
    row_order,
    thresholds,
    thresholds_of_piece,
)
from .tile import (
    LOG2_E,
    PairArgs,
    Target,
    ToLogits,
    any_fallback,
    concat_columns,
    exp_offset,
    exp_sum_out_of_range,
    further_positives,
    halves,
    mark_fallback,
    masked_logits,
    negative_similarities,
    similarities,
    store_block,
    tile_at,
    tile_needs_mask,
)

# A panel is no wider than what fits of y into the L2 cache, because every row of tiles reads y again.
CACHED_BYTES = 24 * 2**20
# A tile that is saved leaves through shared memory in so many pieces, so that as many programs fit on a multiprocessor as without.
SAVED_PIECES = 4
# A logit that counts is above this, or its tile is computed again; the logit of a pair that does not count is -inf.
LOWEST_LOGIT = tl.constexpr(-(2.0**127))
# The least value saved for a pair that counts.
SMALLEST_SAVED_EXP = tl.constexpr(2.0**-126)


class TileSums(NamedTuple):
    """Sums of a tile, in parts (reductions.py). Those that options do not need repeat `total`, because JIT functions cannot return
    None."""

    total: Any  # Σ exp(s - offset) of rows
    hardest: Any  # the highest similarity of a negative
    below: Any  # the number of negatives below the positive
    further: Any  # Σ z and number of further positives
    further_count: Any
    counted: Any  # Σ s of all that count, and the number of those that do not
    missing_count: Any
    column_total: Any
    column_hardest: Any
    column_below: Any


class SumAndNumber(NamedTuple):
    total: Any
    number: Any


class MaxAndSum(NamedTuple):
    """A maximum, and the sum of exp(s - maximum)."""

    peak: Any
    total: Any


@triton.jit(do_not_specialize=["rows", "columns", "shift", "stride"])
def stats_kernel(
    x, y, scale, row_parts, column_parts, needs_fallback, matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns,
    shift, saved_exp, stride, IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, SMOOTHED: tl.constexpr,
    RANKED: tl.constexpr, SAFE: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr, PIECES: tl.constexpr, WARPS: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the sums of each tile for its rows and, if column_parts is given, for its columns; and its exponentials to saved_exp.

    SAFE: compute only the tiles whose sums are out of range, with maxima.
    """
    pairs = PairArgs(matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns, shift)
    sums = PartialSums(row_parts, column_parts, needs_fallback)
    target = Target(saved_exp, stride)
    tiles = tl.cdiv(rows, M) * tl.cdiv(columns, N)
    # Logits in base 2, except in the safe launch, whose logits are too large for another rounding.
    if SAFE:
        to_logits = ToLogits(tl.load(scale), 0.0)
    else:
        to_logits = ToLogits(_nonzero(tl.load(scale)) * LOG2_E, exp_offset(tl.load(scale)) * LOG2_E)
    if SAFE:
        tiles = tl.where(any_fallback(needs_fallback, M if M > N else N), tiles, 0)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=not SAFE):
        row, column = tile_at(t, rows, columns, M, N, GROUP)
        compute_tile = True
        if SAFE:
            compute_tile = _is_out_of_range(sums, pairs, row, column, M, N)
        if compute_tile:
            z = similarities(x, y, row, column, rows, columns, WIDTH, M, N, K, DESCRIPTORS, PRECISION)
            needs_mask = tile_needs_mask(pairs, row, column, IS_LOCAL, M, N)
            if SAFE:
                _put_safe_sums(z, needs_mask, to_logits, sums, pairs, row, column, IS_LOCAL, MULTI_POSITIVE, DROP, M, N, PIECES)
            else:
                threshold_M = thresholds(positive_M, row, rows, M)
                tile_sums = _tile_sums(
                    z, needs_mask, threshold_M, to_logits, sums, target, pairs, row, column,
                    IS_LOCAL, MULTI_POSITIVE, DROP, SMOOTHED, RANKED, M, N, PIECES, WARPS, DESCRIPTORS,
                )  # fmt: skip
                _put_columns(tile_sums, sums, pairs, row, column, RANKED, M, N)
                _put_rows(tile_sums, to_logits, sums, pairs, row, column, MULTI_POSITIVE, SMOOTHED, RANKED, M, N, WARPS)


@triton.jit
def _put_columns(tile_sums, sums, pairs, row, column, RANKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    j, down = column + tl.arange(0, N), tl.cdiv(pairs.rows, M)
    if sums.column_parts is not None:
        total = finish_columns(tile_sums.column_total, SUM)
        put(sums.column_parts, 1, row // M, down, j, pairs.columns, total)
        mark_fallback(sums.needs_fallback, tl.arange(0, N), exp_sum_out_of_range(total) & (j < pairs.columns))
        if RANKED:
            hardest, ahead = finish_columns(tile_sums.column_hardest, MAX), M - finish_columns(tile_sums.column_below, SUM)
            put_pair(sums.column_parts, 2, row // M, down, j, pairs.columns, hardest, ahead.to(tl.float32))


@triton.jit
def _put_rows(
    tile_sums, to_logits, sums, pairs, row, column,
    MULTI_POSITIVE: tl.constexpr, SMOOTHED: tl.constexpr, RANKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    parts, rows = sums.row_parts, pairs.rows
    order, tile, across = row_order(M, WARPS), column // N, tl.cdiv(pairs.columns, N)
    i = row + order
    total = finish_rows(tile_sums.total, SUM, M, WARPS)
    put(parts, 1, tile, across, i, rows, total)
    mark_fallback(sums.needs_fallback, order, exp_sum_out_of_range(total) & (i < rows))
    if RANKED:
        hardest, ahead = finish_rows(tile_sums.hardest, MAX, M, WARPS), N - finish_rows(tile_sums.below, SUM, M, WARPS)
        put_pair(parts, 2, tile, across, i, rows, hardest, ahead.to(tl.float32))
    if MULTI_POSITIVE:
        total, count = finish_rows(tile_sums.further, SUM, M, WARPS), finish_rows(tile_sums.further_count, SUM, M, WARPS)
        put_pair(parts, 2 + 2 * RANKED, tile, across, i, rows, total, count.to(tl.float32))
    if SMOOTHED:
        total, count = finish_rows(tile_sums.counted, SUM, M, WARPS), N - finish_rows(tile_sums.missing_count, SUM, M, WARPS)
        channel: tl.constexpr = 2 + 2 * RANKED + 2 * MULTI_POSITIVE
        put_pair(parts, channel, tile, across, i, rows, _unscaled(total, count, to_logits), count.to(tl.float32))


@triton.jit
def _tile_sums(
    z, needs_mask, threshold_M, to_logits, sums, target, pairs, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, SMOOTHED: tl.constexpr, RANKED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr, WARPS: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Return the sums of a tile, piece by piece. The sums of further positives and of counted logits of columns are written
    here."""
    if PIECES > 1:
        left, right = halves(z, M, N)
        a = _tile_sums(
            left, needs_mask, threshold_M, to_logits, sums, target, pairs, row, column,
            IS_LOCAL, MULTI_POSITIVE, DROP, SMOOTHED, RANKED, M, N // 2, PIECES // 2, WARPS, DESCRIPTORS,
        )  # fmt: skip
        b = _tile_sums(
            right, needs_mask, threshold_M, to_logits, sums, target, pairs, row, column + N // 2,
            IS_LOCAL, MULTI_POSITIVE, DROP, SMOOTHED, RANKED, M, N // 2, PIECES // 2, WARPS, DESCRIPTORS,
        )  # fmt: skip
        tile_sums = TileSums(
            a.total + b.total,
            tl.maximum(a.hardest, b.hardest),
            a.below + b.below,
            a.further + b.further,
            a.further_count + b.further_count,
            a.counted + b.counted,
            a.missing_count + b.missing_count,
            concat_columns(a.column_total, b.column_total),
            concat_columns(a.column_hardest, b.column_hardest),
            concat_columns(a.column_below, b.column_below),
        )
    else:
        tile_sums = _piece_sums(
            z, needs_mask, threshold_M, to_logits, sums, target, pairs, row, column,
            IS_LOCAL, MULTI_POSITIVE, DROP, SMOOTHED, RANKED, M, N, WARPS, DESCRIPTORS,
        )  # fmt: skip
    return tile_sums


@triton.jit
def _piece_sums(
    z, needs_mask, threshold_M, to_logits, sums, target, pairs, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, SMOOTHED: tl.constexpr, RANKED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    threshold_N = thresholds_of_piece(pairs.positive_N, column, pairs.columns, N)
    if RANKED:
        z_negative = negative_similarities(z, needs_mask, pairs, row, column, IS_LOCAL, M, N)
    if RANKED and target.matrix is None and not (MULTI_POSITIVE or DROP or SMOOTHED):
        # The pairs that count are the negatives. A negative scale turns the others into +inf, and the safe launch takes over. If
        # exponentials are saved, they have to be zero there.
        logits = z_negative * to_logits.factor - to_logits.offset
        column_logits = logits
    else:
        logits, column_logits = masked_logits(to_logits, z, needs_mask, pairs, row, column, IS_LOCAL, MULTI_POSITIVE, DROP, M, N)
    if SMOOTHED:
        counted, missing_count = _counted_in_rows(logits, True if DROP else needs_mask, M, N)
        if sums.column_parts is not None:
            last: tl.constexpr = 2 + 2 * RANKED + 2 * MULTI_POSITIVE
            counted_N, missing_N = _counted_in_columns(column_logits, True if DROP else needs_mask, M, N, WARPS)
            j, down = column + tl.arange(0, N), tl.cdiv(pairs.rows, M)
            count_N = (M - missing_N).to(tl.float32)
            put_pair(sums.column_parts, last, row // M, down, j, pairs.columns, _unscaled(counted_N, count_N, to_logits), count_N)
    if MULTI_POSITIVE:
        further, further_count = _further_sums(z, needs_mask, sums, pairs, row, column, IS_LOCAL, RANKED, M, N, WARPS)
    power = tl.exp2(logits)
    if target.matrix is not None:
        saved = power
        if SMOOTHED:
            # Backward tells by it which pairs count.
            saved = tl.where(logits < LOWEST_LOGIT, 0.0, tl.maximum(power, SMALLEST_SAVED_EXP))
        store_block(target, saved, row, column, pairs.rows, pairs.columns, M, N, DESCRIPTORS, False)
    total = reduce_rows(power, SUM, M, N)
    hardest, below = total, total
    column_total = tl.zeros((1, N), tl.float32)
    column_hardest, column_below = tl.zeros((1, N), tl.float32), tl.zeros((1, N), tl.float32)
    if RANKED:
        hardest = reduce_rows(z_negative, MAX, M, N)
        below = reduce_rows(is_below(z_negative, threshold_M[:, None]), SUM, M, N)
    if sums.column_parts is not None:
        if DROP:
            power = tl.exp2(column_logits)
        column_total = reduce_columns(power, SUM, M, N, WARPS)
        if RANKED:
            column_hardest = reduce_columns(z_negative, MAX, M, N, WARPS)
            column_below = reduce_columns(is_below(z_negative, threshold_N[None, :]), SUM, M, N, WARPS)
    if not MULTI_POSITIVE:
        further, further_count = total, total
    if not SMOOTHED:
        counted, missing_count = total, total
    return TileSums(
        total, hardest, below, further, further_count, counted, missing_count, column_total, column_hardest, column_below
    )


@triton.jit
def _further_sums(
    z, needs_mask, sums, pairs, row, column,
    IS_LOCAL: tl.constexpr, RANKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Return Σ z and number of further positives of rows; write those of columns."""
    total, count = tl.zeros((M // 16, 8, 2, 2), tl.float32), tl.zeros((M // 16, 8, 2, 2), tl.int32)
    total_N, count_N = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.int32)
    if needs_mask:
        mask = further_positives(pairs, row, column, IS_LOCAL, M, N)
        z_further, ones = tl.where(mask, z, 0.0), mask.to(tl.int32)
        total, count = reduce_rows(z_further, SUM, M, N), reduce_rows(ones, SUM, M, N)
        if sums.column_parts is not None:
            total_N = finish_columns(reduce_columns(z_further, SUM, M, N, WARPS), SUM)
            count_N = finish_columns(reduce_columns(ones, SUM, M, N, WARPS), SUM)
    if sums.column_parts is not None:
        j, down = column + tl.arange(0, N), tl.cdiv(pairs.rows, M)
        put_pair(sums.column_parts, 2 + 2 * RANKED, row // M, down, j, pairs.columns, total_N, count_N.to(tl.float32))
    return SumAndNumber(total, count)


@triton.jit
def _counted_in_rows(logits, masked, M: tl.constexpr, N: tl.constexpr):
    """Return Σ s of the logits that count, which are all unless `masked`, and the number of those that do not, of rows."""
    total, missing = reduce_rows(logits, SUM, M, N), tl.zeros((M // 16, 8, 2, 2), tl.int32)
    if masked:
        # Summed again: keeping the masked logits would hold a second copy of the tile in registers from here on.
        total = reduce_rows(tl.where(logits < LOWEST_LOGIT, 0.0, logits), SUM, M, N)
        missing = reduce_rows(is_below(logits, LOWEST_LOGIT), SUM, M, N)
    return SumAndNumber(total, missing)


@triton.jit
def _counted_in_columns(logits, masked, M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr):
    """Return the same of columns."""
    total, missing = finish_columns(reduce_columns(logits, SUM, M, N, WARPS), SUM), tl.zeros((N,), tl.int32)
    if masked:
        total = finish_columns(reduce_columns(tl.where(logits < LOWEST_LOGIT, 0.0, logits), SUM, M, N, WARPS), SUM)
        missing = finish_columns(reduce_columns(is_below(logits, LOWEST_LOGIT), SUM, M, N, WARPS), SUM)
    return SumAndNumber(total, missing)


@triton.jit
def _is_out_of_range(sums, pairs, row, column, M: tl.constexpr, N: tl.constexpr):
    """Return whether some sum that the fast launch wrote for a tile is out of range."""
    i, j = row + tl.arange(0, M), column + tl.arange(0, N)
    total = get(sums.row_parts, 1, column // N, tl.cdiv(pairs.columns, N), i, pairs.rows)
    lost = tl.max((exp_sum_out_of_range(total) & (i < pairs.rows)).to(tl.int32), 0) > 0
    if sums.column_parts is not None:
        total = get(sums.column_parts, 1, row // M, tl.cdiv(pairs.rows, M), j, pairs.columns)
        lost = lost | (tl.max((exp_sum_out_of_range(total) & (j < pairs.columns)).to(tl.int32), 0) > 0)
    return lost


@triton.jit
def _unscaled(total, count, to_logits):
    """Return Σ z of so many logits whose sum is given."""
    return (total + count * to_logits.offset) / to_logits.factor


@triton.jit
def _nonzero(factor):
    """Return the scale, by which sums of logits are divided; zero becomes a number too small to change a logit."""
    return tl.where(factor == 0, 1e-30, factor)


@triton.jit
def _put_safe_sums(
    z, needs_mask, to_logits, sums, pairs, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Write (max, sum) of a tile, where the sum is relative to the max."""
    safe = _safe_sums(z, needs_mask, to_logits, sums, pairs, row, column, IS_LOCAL, MULTI_POSITIVE, DROP, M, N, PIECES)
    i, across = row + tl.arange(0, M), tl.cdiv(pairs.columns, N)
    put_pair(sums.row_parts, 0, column // N, across, i, pairs.rows, safe.peak, encode_shifted_sum(safe.total))


@triton.jit
def _safe_sums(
    z, needs_mask, to_logits, sums, pairs, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Return (max, sum) of rows; write those of columns."""
    if PIECES > 1:
        left, right = halves(z, M, N)
        middle = column + N // 2
        a = _safe_sums(
            left, needs_mask, to_logits, sums, pairs, row, column, IS_LOCAL, MULTI_POSITIVE, DROP, M, N // 2, PIECES // 2
        )
        b = _safe_sums(
            right, needs_mask, to_logits, sums, pairs, row, middle, IS_LOCAL, MULTI_POSITIVE, DROP, M, N // 2, PIECES // 2
        )
        anchor = _anchor(tl.maximum(a.peak, b.peak))
        total = a.total * tl.exp2((a.peak - anchor) * LOG2_E) + b.total * tl.exp2((b.peak - anchor) * LOG2_E)
        safe = MaxAndSum(tl.maximum(a.peak, b.peak), total)
    else:
        logits, column_logits = masked_logits(to_logits, z, needs_mask, pairs, row, column, IS_LOCAL, MULTI_POSITIVE, DROP, M, N)
        safe = max_and_sum(logits, 1)
        if sums.column_parts is not None:
            columns = max_and_sum(column_logits, 0)
            j, down = column + tl.arange(0, N), tl.cdiv(pairs.rows, M)
            total_N = encode_shifted_sum(columns.total)
            put_pair(sums.column_parts, 0, row // M, down, j, pairs.columns, columns.peak, total_N)
    return safe


@triton.jit
def max_and_sum(logits, AXIS: tl.constexpr):
    peak = tl.max(logits, AXIS)
    return MaxAndSum(peak, tl.sum(tl.exp2((logits - tl.expand_dims(_anchor(peak), AXIS)) * LOG2_E), AXIS))


@triton.jit
def _anchor(peak):
    """Return what to subtract from logits: the peak, or 0 if no logit counts."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@on_device_of_input
def softmax_stats(
    x_MD: Tensor,
    y_ND: Tensor,
    scale: Tensor,
    pairs: Pairs,
    *,
    columns: bool,
    compute: ComputeOptions,
    save_exp: bool = False,
) -> SoftmaxPass:
    """Return stats and rankings of rows and, if `columns`, of columns."""
    if pairs.ranked and not (pairs.limit_M is None and pairs.limit_N is None and pairs.skip_N is None):
        # The kernels compare similarities with one vector, and rank what they do not skip: two passes.
        all_pairs = replace(pairs, limit_M=None, limit_N=None, skip_N=None, smoothed=False)
        ranked = softmax_stats(x_MD, y_ND, scale, all_pairs, columns=columns, compute=compute)
        counted = softmax_stats(
            x_MD, y_ND, scale, replace(pairs, ranked=False), columns=columns, compute=compute, save_exp=save_exp
        )
        return counted._replace(row_ranking=ranked.row_ranking, column_ranking=ranked.column_ranking)
    pairs = as_compared_ids(pairs, x_MD)
    multi_positive, drops = is_multi_positive(pairs), pairs.drop_above is not None
    kinds = [EXPONENTIALS.value] + [RANKING.value] * pairs.ranked + [COUNTED.value] * (multi_positive + pairs.smoothed)
    heavy = multi_positive or (pairs.ranked and (drops or pairs.smoothed))
    pieces = 4 if heavy else 2 if pairs.ranked or drops or pairs.ids_M is not None else 1
    launch = Launch(architecture_of(x_MD.device), "stats", x_MD, y_ND, compute, pieces)
    row_sums, column_sums = Sums(x_MD, kinds), Sums(y_ND, kinds) if columns else None
    bytes_per_cell = row_sums.bytes_per_cell(launch.blocks.n) + (column_sums.bytes_per_cell(launch.blocks.m) if column_sums else 0)
    # From exponentials alone, backward could not tell further positives, nor what columns have dropped.
    saved = allocate_saved_exp(launch, compute) if save_exp and not (multi_positive or drops) else None
    if saved is None:
        launch.workspace = without_saved_exp(compute).workspace
    needs_fallback = saved.marks if saved else launch.new_marks()
    is_plain = not (multi_positive or drops or pairs.ranked or pairs.smoothed)
    specialised = launch.architecture.load_kernels() if is_plain else None
    max_columns = CACHED_BYTES // (x_MD.shape[1] * x_MD.element_size())
    for p in launch.panels(bytes_per_cell, max_columns, saved.panel if saved else None):
        down, across = launch.tile_counts(p)
        row_parts = row_sums.new_parts(across, p.rows)
        column_parts = column_sums.new_parts(down, p.columns) if column_sums else None
        sums, pair_args = PartialSums(row_parts, column_parts, needs_fallback), launch.pair_args(pairs, p)
        view = saved.view(p) if saved is not None and saved.contains(p) else None
        computed = specialised is not None and specialised.softmax_stats(launch, p, scale, sums, pair_args, pairs, view)
        operands = launch.operands(p)
        for safe in (True,) if computed else (False, True):
            split, target, stride = launch, None, 0
            if view is not None and not safe:
                split = launch.with_pieces(SAVED_PIECES)
                target, stride = split.target(view), view.stride(0)
            run_kernel(
                stats_kernel, launch.grid(p),
                *operands, scale, *sums, *pair_args, target, stride, IS_LOCAL=pairs.is_local, MULTI_POSITIVE=multi_positive,
                DROP=drops, SMOOTHED=pairs.smoothed and not safe, RANKED=pairs.ranked and not safe, SAFE=safe,
                WARPS=launch.blocks.warps, **split.constants,
            )  # fmt: skip
        merge_parts(p, row_sums, row_parts, column_sums, column_parts, scale)
        # Free the partial sums before those of the next panel are allocated.
        del sums, row_parts, column_parts
    merge_empty(x_MD, y_ND, row_sums, column_sums)
    return SoftmaxPass(
        _stats(row_sums, pairs),
        _stats(column_sums, pairs) if column_sums else None,
        ranking(row_sums, 1, pairs),
        ranking(column_sums, 1, pairs),
        saved._replace(marks=saved.marks[MARKS:]) if saved else None,
    )


def _stats(sums: Sums, pairs: Pairs) -> Stats:
    options: list[Tensor | None] = []
    place = 1 + pairs.ranked
    for asked in (is_multi_positive(pairs), pairs.smoothed):
        options += [sums.values[place, 0], sums.counts[place]] if asked and sums.counts is not None else [None, None]
        place += asked
    return Stats(*sums.values[0].unbind(), *options)
