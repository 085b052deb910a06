"""The tile contract in PyTorch operations, for any device and dtype. Contract and legend: contract.py.

Each pass walks over the tiles (products.py), which come with their similarities and a buffer. A function whose name ends with an
underscore overwrites both.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .contract import (
    ComputeOptions,
    NeedsGrad,
    Normalised,
    Pairs,
    Ranking,
    SigmoidPass,
    Softmax,
    SoftmaxPass,
    Stats,
    accumulator,
    at,
    merge,
)
from .products import Tile, add_products, no_product, positive_entries, similarities, slices, tile_blocks, units, walk
from .softplus import softplus_sums_

# While no |s| exceeds this, neither an exponential nor a sum of 2^30 of them leaves the normal range of fp32, so no maximum is
# needed and rows and columns share one exponential.
SAFE_LOGIT = 50.0
LOG2_E = 1 / math.log(2)


class Masks(NamedTuple):
    """The pairs of a tile that rows and columns leave out (the same object where they agree), and those with equal ids."""

    row_out: Tensor | None
    column_out: Tensor | None
    same: Tensor | None


def default_workspace(device: torch.device) -> int:
    """Return the default workspace in bytes: on a CPU the matrix of 4,096 pairs in fp32 (larger tiles are not faster), elsewhere
    large enough to hide kernel launches."""
    return (64 if device.type == "cpu" else 256) * 2**20


def positives(x_MD: Tensor, y_ND: Tensor, compute: ComputeOptions) -> Tensor:
    """Return the similarity of each row's positive (M)."""
    acc = accumulator(x_MD.dtype)
    positive_M = x_MD.new_empty(len(x_MD), dtype=acc)
    # Diagonals of small products instead of row-wise dot products: they accumulate in the order of a tile, so that equal rows tie.
    for rows in slices(len(x_MD), 128):
        with units(x_MD, compute.precision):
            positive_M[rows] = (x_MD[rows].to(acc) @ y_ND[rows].to(acc).T).diagonal()
    return positive_M


def softmax_stats(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, pairs: Pairs, *, columns: bool, compute: ComputeOptions, save_exp: bool = False
) -> SoftmaxPass:
    """Return stats and rankings of rows and, if `columns`, of columns. Nothing is saved: a tile is small against the matrix."""
    bounded = not pairs.compares and _bounded(x_MD, y_ND, scale)
    result = SoftmaxPass(
        _no_stats(x_MD, pairs),
        _no_stats(y_ND, pairs) if columns else None,
        _no_ranking(x_MD) if pairs.ranked else None,
        _no_ranking(y_ND) if pairs.ranked and columns else None,
    )
    for t in walk(x_MD, y_ND, pairs, compute):
        if pairs.is_local:
            positive_entries(t, t.z_RC).zero_()
        masks = _masks(t, pairs)
        _rank(t, pairs, masks.same, result.row_ranking, result.column_ranking)
        sums = [_plain_sums(t, pairs, masks, dim) for dim in ((1, 0) if columns else (1,))]
        totals = (_unshifted_totals_ if bounded else _shifted_totals_)(t, scale, pairs, masks, columns)
        _merge_into(result.rows, t.rows, Stats(*totals[0], *sums[0]))
        if result.columns is not None:
            _merge_into(result.columns, t.columns, Stats(*totals[1], *sums[1]))
    if bounded:
        result = result._replace(rows=_normalise_peak(result.rows), columns=result.columns and _normalise_peak(result.columns))
    return result


def normalise(
    rows: Stats, columns: Stats | None, positive_M: Tensor, scale: Tensor, weights_M: Tensor | None, label_smoothing: float
) -> Normalised:
    """Return losses of both sides together, the softmax of each, and the gradient in the positives' logits."""
    loss_M, softmax, dpos_M = _normalise(rows, positive_M, scale, weights_M, label_smoothing)
    column_softmax = None
    if columns is not None:
        column_loss_M, column_softmax, column_dpos_M = _normalise(columns, positive_M, scale, weights_M, label_smoothing)
        loss_M, dpos_M = loss_M + column_loss_M, dpos_M + column_dpos_M
    return Normalised(loss_M if weights_M is None else loss_M * weights_M, dpos_M, softmax, column_softmax)


def softmax_grads(
    x_MD: Tensor,
    y_ND: Tensor,
    scale: Tensor,
    pairs: Pairs,
    rows: Softmax,
    columns: Softmax | None,
    *,
    needs_grad: NeedsGrad,
    compute: ComputeOptions,
    dpos_M: Tensor | None = None,
    saved_exp: None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return gx_MD and gy_ND of the others."""
    bounded = not pairs.compares and rows.counted is None and _bounded(x_MD, y_ND, scale)
    gx_MD, gy_ND = no_product(x_MD, needs_grad.x), no_product(y_ND, needs_grad.y)
    for t in walk(x_MD, y_ND, pairs, compute):
        masks = _masks(t, pairs)
        row, column = at(rows, t.rows), None if columns is None else at(columns, t.columns)
        g_RC = (_unshifted_gradient_ if bounded else _shifted_gradient_)(t, scale, masks, row, column)
        if masks.same is not None and row.further is not None:
            further = row.further[:, None] if column is None else row.further[:, None] + column.further
            g_RC.sub_(masks.same * further)
        if pairs.is_local:
            positive_entries(t, g_RC).zero_()
        add_products(x_MD, t, g_RC, gx_MD, gy_ND, compute)
    return gx_MD, gy_ND


def sigmoid_sums(
    x_MD: Tensor,
    y_ND: Tensor,
    scale: Tensor,
    bias: Tensor,
    pairs: Pairs,
    weights_M: Tensor | None,
    *,
    needs_grad: NeedsGrad | None,
    compute: ComputeOptions,
) -> SigmoidPass:
    """Return values of the others and, if asked for, their slopes and gradients from the same pass."""
    result = SigmoidPass(
        x_MD.new_zeros(len(x_MD), dtype=accumulator(x_MD.dtype)),
        None if needs_grad is None else x_MD.new_zeros(len(x_MD), dtype=accumulator(x_MD.dtype)),
        no_product(x_MD, needs_grad is not None and needs_grad.x),
        no_product(y_ND, needs_grad is not None and needs_grad.y),
        _no_ranking(x_MD) if pairs.ranked else None,
        _no_ranking(y_ND) if pairs.ranked else None,
    )
    for t in walk(x_MD, y_ND, pairs, compute):
        for block in tile_blocks(t):
            _sigmoid_block_(block, scale, bias, pairs, weights_M, result)
        if needs_grad is not None:
            add_products(x_MD, t, t.z_RC, result.gx_MD, result.gy_ND, compute)
    return result


def finish(gradient: Tensor, embeddings: Tensor, partners: Tensor, dpos_M: Tensor, factor: Tensor, finished: Tensor) -> Tensor:
    """Add the positives' part to gx (or gy), multiply with a factor, and write to `finished`, which may be the gradient itself.

    Returns the gradient in the scale, without the factor: Σ embeddings · gradient.
    """
    slope = dpos_M.new_zeros(())
    # Piece by piece, because whole fp32 copies of reduced-precision embeddings would take as much memory as the gradients.
    for piece in slices(len(gradient), 4096):
        own = dpos_M[piece, None]
        part = gradient[piece].clone()
        part[: len(own)].addcmul_(own, partners[piece][: len(own)].to(own.dtype))
        slope += (part * embeddings[piece].to(own.dtype)).sum()
        finished[piece] = part.mul_(factor)
    return slope


def _masks(t: Tile, pairs: Pairs) -> Masks:
    same = None
    if pairs.ids_M is not None and pairs.ids_N is not None:
        same = pairs.ids_M[t.rows, None] == pairs.ids_N[t.columns]
        if pairs.is_local:
            positive_entries(t, same).fill_(False)
    out = None if pairs.multi_positive else same
    if pairs.skip_N is not None:
        rows = torch.arange(t.rows.start, t.rows.stop, device=pairs.skip_N.device)
        skipped = rows[:, None] == pairs.skip_N[t.columns]
        out = skipped if out is None else out | skipped
    if not pairs.compares:
        return Masks(out, out, same)
    # Further positives are never too similar.
    kept = same if pairs.multi_positive else None
    guide_RC = None if pairs.guide is None else similarities(pairs.guide.x_MG[t.rows], pairs.guide.y_NG[t.columns])

    def out_of(positive: Tensor | None, limit: Tensor | None, guide_limit: Tensor | None) -> Tensor | None:
        above = None
        if pairs.drop_above is not None and positive is not None:
            above = t.z_RC > positive + pairs.drop_above
        elif limit is not None:
            above = t.z_RC > limit
        if guide_RC is not None and guide_limit is not None:
            guided = guide_RC > guide_limit
            above = guided if above is None else above | guided
        if above is None:
            return out
        above = above if kept is None else above & ~kept
        return above if out is None else above | out

    guide_M, guide_N = (None, None) if pairs.guide is None else (pairs.guide.limit_M, pairs.guide.limit_N)
    rows_of = (None if v is None else v[t.rows, None] for v in (pairs.positive_M, pairs.limit_M, guide_M))
    columns_of = (None if v is None else v[t.columns] for v in (pairs.positive_N, pairs.limit_N, guide_N))
    return Masks(out_of(*rows_of), out_of(*columns_of), same)


def _rank(t: Tile, pairs: Pairs, same: Tensor | None, rows: Ranking | None, columns: Ranking | None) -> None:
    if rows is None:
        return
    negative = t.work_RC.copy_(t.z_RC)
    if same is not None:
        negative.masked_fill_(same, -torch.inf)
    if pairs.is_local:
        positive_entries(t, negative).fill_(-torch.inf)
    assert pairs.positive_M is not None
    ahead = (negative >= pairs.positive_M[t.rows, None]).sum(1)
    _merge_into(rows, t.rows, Ranking(ahead, negative.amax(1)))
    if columns is not None:
        assert pairs.positive_N is not None
        ahead = (negative >= pairs.positive_N[t.columns]).sum(0)
        _merge_into(columns, t.columns, Ranking(ahead, negative.amax(0)))


def _plain_sums(t: Tile, pairs: Pairs, masks: Masks, dim: int) -> tuple[Tensor | None, ...]:
    """Return Σ z and number of further positives, then of all others that count; z of the positives themselves is zero here."""
    further = further_count = counted = counted_count = None
    if pairs.multi_positive and masks.same is not None:
        further, further_count = (t.z_RC * masks.same).sum(dim), masks.same.sum(dim)
    if pairs.smoothed:
        out = masks.row_out if dim else masks.column_out
        counts = torch.ones_like(t.z_RC, dtype=torch.bool) if out is None else ~out
        if pairs.is_local:
            positive_entries(t, counts).fill_(False)
        counted, counted_count = (t.z_RC * counts).sum(dim), counts.sum(dim)
    return further, further_count, counted, counted_count


def _logits_(t: Tile, factor: Tensor, pairs: Pairs, masks: Masks) -> Tensor:
    """Return the logits times a factor, -inf where neither rows nor columns count a pair."""
    s_RC = t.z_RC.mul_(factor)
    if pairs.is_local:
        positive_entries(t, s_RC).fill_(-torch.inf)
    if masks.row_out is not None and masks.row_out is masks.column_out:
        s_RC.masked_fill_(masks.row_out, -torch.inf)
    return s_RC


def _unshifted_totals_(t: Tile, scale: Tensor, pairs: Pairs, masks: Masks, columns: bool) -> list[tuple[Tensor, Tensor]]:
    """Return (peak, total) of rows and of columns from one exponential per element; right for bounded logits only."""
    # exp2 is cheaper than exp on CPUs.
    exponential = _logits_(t, scale * LOG2_E, pairs, masks).exp2_()
    totals = [exponential.sum(1)]
    if columns:
        # A product with ones is several times faster than sum(0), and in pieces of 128 rows as accurate.
        ones = exponential.new_ones(1, 128)
        totals.append(torch.cat([ones[:, : len(piece)] @ piece for piece in exponential.split(128)]).sum(0))
    return [(torch.zeros_like(total), total) for total in totals]


def _shifted_totals_(t: Tile, scale: Tensor, pairs: Pairs, masks: Masks, columns: bool) -> list[tuple[Tensor, Tensor]]:
    """Return (peak, total) of rows and of columns, each with its own maximum subtracted; right for any logits."""
    s_RC = _logits_(t, scale, pairs, masks)
    totals = []
    for dim, out in ((1, masks.row_out), (0, masks.column_out))[: 1 + columns]:
        counted = s_RC
        if out is not None and masks.row_out is not masks.column_out:
            counted = t.work_RC.copy_(s_RC).masked_fill_(out, -torch.inf)
        peak = counted.amax(dim, keepdim=True)
        anchor = peak.masked_fill(peak == -torch.inf, 0)
        total = torch.sub(counted, anchor, out=t.work_RC).exp_().sum(dim)
        totals.append((peak.squeeze(dim), total))
    return totals


def _normalise_peak(stats: Stats) -> Stats:
    """Return the same stats with the peak at the log-sum-exp, so that totals are about one."""
    peak = stats.peak + stats.total.log()
    anchor = peak.masked_fill(peak == -torch.inf, 0)
    return stats._replace(peak=peak, total=stats.total * (stats.peak - anchor).exp())


def _normalise(
    stats: Stats, positive_M: Tensor, scale: Tensor, weights_M: Tensor | None, label_smoothing: float
) -> tuple[Tensor, Softmax, Tensor]:
    """Return the loss of each row (or column), its softmax for the gradient, and the gradient in its positive's logit.

    With t the target of the positive itself (1 without further positives and smoothing), the gradient in its logit is
    p - t = (1 - t) - probability of the others.
    """
    weight = torch.ones_like(positive_M) if weights_M is None else weights_M
    s = scale * positive_M
    peak = torch.maximum(stats.peak, s)
    others = stats.total * (stats.peak - peak).exp()
    total = others + (s - peak).exp()
    # log(total), accurate also where the positive dominates and total is nearly one.
    loss = torch.log1p(others + torch.expm1(s - peak)) + (peak - s)
    target, further, counted = torch.full_like(s, 1 - label_smoothing), None, None
    if stats.further is not None and stats.further_count is not None:
        target = target / (1 + stats.further_count)
        further = weight * target
        loss = loss - scale * target * (stats.further - stats.further_count * positive_M)
    if stats.counted is not None and stats.counted_count is not None:
        uniform = torch.full_like(s, label_smoothing) / (1 + stats.counted_count)
        counted = weight * uniform
        loss = loss - scale * uniform * (stats.counted - stats.counted_count * positive_M)
        target = target + uniform
    dpos = weight * ((1 - target) - others / total)
    return loss, Softmax(peak, weight / total, further, counted), dpos


def _unshifted_gradient_(t: Tile, scale: Tensor, masks: Masks, row: Softmax, column: Softmax | None) -> Tensor:
    """Return the gradient in the logits from one exponential per element; right for bounded logits only."""
    g_RC = t.z_RC.mul_(scale * LOG2_E).exp2_()
    factor = (row.gain * (-row.peak).exp())[:, None]
    if column is not None:
        factor = torch.add(factor, column.gain * (-column.peak).exp(), out=t.work_RC)
    g_RC.mul_(factor)
    return g_RC if masks.row_out is None else g_RC.masked_fill_(masks.row_out, 0)


def _shifted_gradient_(t: Tile, scale: Tensor, masks: Masks, row: Softmax, column: Softmax | None) -> Tensor:
    """Return the gradient in the logits, rows and columns each with their own maximum subtracted; right for any logits."""
    s_RC = t.z_RC.mul_(scale)
    g_RC = torch.sub(s_RC, row.peak[:, None], out=t.work_RC).exp_().mul_(row.gain[:, None])
    if row.counted is not None:
        g_RC.sub_(row.counted[:, None])
    if masks.row_out is not None:
        g_RC.masked_fill_(masks.row_out, 0)
    if column is not None:
        s_RC.sub_(column.peak).exp_().mul_(column.gain)
        if column.counted is not None:
            s_RC.sub_(column.counted)
        if masks.column_out is not None:
            s_RC.masked_fill_(masks.column_out, 0)
        g_RC.add_(s_RC)
    return g_RC


def _sigmoid_block_(t: Tile, scale: Tensor, bias: Tensor, pairs: Pairs, weights_M: Tensor | None, result: SigmoidPass) -> None:
    """Add values, slopes and ranks of a block of rows to the result. Its similarities become the gradient in the logits."""
    masks = _masks(t, pairs)
    _rank(t, pairs, masks.same, result.row_ranking, result.column_ranking)
    logits = t.z_RC.mul_(scale).add_(bias)
    # A further positive costs softplus(-s), a negative softplus(s); a pair that does not count gets a logit of -inf.
    if pairs.multi_positive and masks.same is not None:
        torch.where(masks.same, -logits, logits, out=logits)
    if masks.row_out is not None:
        logits.masked_fill_(masks.row_out, -torch.inf)
    if pairs.is_local:
        positive_entries(t, logits).fill_(-torch.inf)
    result.value_M[t.rows] += softplus_sums_(logits, t.work_RC, 1, sigmoid=result.slope_M is not None)
    if result.slope_M is None:
        return
    g_RC = t.z_RC
    if pairs.multi_positive and masks.same is not None:
        torch.where(masks.same, -g_RC, g_RC, out=g_RC)
    result.slope_M[t.rows] += g_RC.sum(1)
    if weights_M is not None:
        g_RC.mul_(weights_M[t.rows, None])


def _bounded(x_MD: Tensor, y_ND: Tensor, scale: Tensor) -> bool:
    """Return whether all logits are known to be at most SAFE_LOGIT. Only on a CPU can this be read without synchronisation."""
    if x_MD.device.type != "cpu" or not len(x_MD) or not len(y_ND):
        return False
    norms = (torch.linalg.vector_norm(t, dim=1, dtype=scale.dtype).max() for t in (x_MD, y_ND))
    return bool(math.prod(norms, start=scale.abs()) <= SAFE_LOGIT)


def _no_stats(t: Tensor, pairs: Pairs) -> Stats:
    """Return the stats of an empty set of others for each row of t."""
    zero, none = t.new_zeros(len(t), dtype=accumulator(t.dtype)), t.new_zeros(len(t), dtype=torch.int64)
    further = (zero.clone(), none.clone()) if pairs.multi_positive and pairs.ids_M is not None else (None, None)
    counted = (zero.clone(), none) if pairs.smoothed else (None, None)
    return Stats(torch.full_like(zero, -torch.inf), zero, *further, *counted)


def _no_ranking(t: Tensor) -> Ranking:
    lowest = t.new_full((len(t),), -torch.inf, dtype=accumulator(t.dtype))
    return Ranking(t.new_zeros(len(t), dtype=torch.int64), lowest)


def _merge_into(into: Any, where: slice, more: Any) -> None:
    """Merge the results of a tile into those of the block, in place."""
    for vector, merged in zip(into, merge(at(into, where), more), strict=True):
        if vector is not None:
            vector[where] = merged
