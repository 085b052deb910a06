"""Softmax sums and gradients of tiles whose scores are given, with the positive of a row in any column. Legend: contract.py.

z_RC are the scores of a tile and s_RC = scale * z_RC its logits. As in the contract, the positive of a row is not part of the sums.
Functions whose name ends with an underscore overwrite the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .contract import Softmax, Stats, at, merge


@dataclass(frozen=True)
class ScoredPairs:
    """Which pairs of a block count, and how. By default all of them count, as negatives.

    target_M: for each row the column of its positive in this block, negative if it is in another block; None if all are.
    ids_M, ids_N: pairs with equal ids are not negatives. They are left out or, if `multi_positive`, are further positives.
    smoothed: label smoothing needs plain sums over the pairs that count.
    """

    target_M: Tensor | None = None
    ids_M: Tensor | None = None
    ids_N: Tensor | None = None
    multi_positive: bool = False
    smoothed: bool = False


class Place(NamedTuple):
    """The place of a tile in its block."""

    rows: slice
    columns: slice


class ScoreSums(NamedTuple):
    """The scores of the positives found so far, zero elsewhere, and the sums over the others; columns None where not asked for."""

    positive_M: Tensor
    rows: Stats
    columns: Stats | None


def no_sums(rows: int, documents: int, like: Tensor, pairs: ScoredPairs, *, columns: bool) -> ScoreSums:
    """Return the sums of no tiles. like: a tensor of the sums' device and dtype."""

    def stats(length: int) -> Stats:
        zero, none = like.new_zeros(length), torch.zeros(length, dtype=torch.int64, device=like.device)
        further = (zero.clone(), none.clone()) if pairs.multi_positive and pairs.ids_M is not None else (None, None)
        counted = (zero.clone(), none.clone()) if pairs.smoothed else (None, None)
        return Stats(torch.full_like(zero, -torch.inf), zero, *further, *counted)

    return ScoreSums(like.new_zeros(rows), stats(rows), stats(documents) if columns else None)


def add_tile_(sums: ScoreSums, z_RC: Tensor, place: Place, scale: Tensor, pairs: ScoredPairs) -> None:
    """Add the sums of one tile, in place."""
    positive = _positives(pairs, place, z_RC)
    if positive is not None:
        score_R = z_RC.gather(1, positive.column_R1).squeeze(1)
        sums.positive_M[place.rows] += torch.where(positive.inside_R, score_R, 0)
        positive.write_(z_RC, torch.zeros_like(score_R))
    same = _same(pairs, place, positive)
    out = None if pairs.multi_positive else same
    sides = ((sums.rows, place.rows, 1), (sums.columns, place.columns, 0))
    plain = [_plain_sums(z_RC, pairs, same, out, positive, dim) for side, _, dim in sides if side is not None]
    s_RC = z_RC.mul_(scale)
    if positive is not None:
        positive.write_(s_RC, s_RC.new_full((len(s_RC),), -torch.inf))
    if out is not None:
        s_RC.masked_fill_(out, -torch.inf)
    for (side, where, dim), further in zip(sides, plain, strict=False):
        if side is None:
            continue
        peak = s_RC.amax(dim, keepdim=True)
        anchor = peak.masked_fill(peak == -torch.inf, 0)
        more = Stats(peak.squeeze(dim), (s_RC - anchor).exp_().sum(dim), *further)
        for vector, merged in zip(side, merge(at(side, where), more), strict=True):
            if vector is not None:
                vector[where] = merged


def gradient_(
    z_RC: Tensor, place: Place, scale: Tensor, pairs: ScoredPairs, rows: Softmax, columns: Softmax | None, dpos_M: Tensor
) -> Tensor:
    """Return the gradient in the logits of a tile, with dpos_M at the positives."""
    positive = _positives(pairs, place, z_RC)
    same = _same(pairs, place, positive)
    row = at(rows, place.rows)
    s_RC = z_RC.mul_(scale)
    g_RC = (s_RC - row.peak[:, None]).exp_().mul_(row.gain[:, None])
    if row.counted is not None:
        g_RC.sub_(row.counted[:, None])
    further = row.further[:, None] if row.further is not None else None
    if columns is not None:
        column = at(columns, place.columns)
        g_RC.add_(s_RC.sub_(column.peak).exp_().mul_(column.gain))
        if column.counted is not None:
            g_RC.sub_(column.counted)
        further = None if further is None else further + column.further
    if same is not None and not pairs.multi_positive:
        g_RC.masked_fill_(same, 0)
    elif same is not None and further is not None:
        g_RC.sub_(same * further)
    if positive is not None:
        positive.write_(g_RC, dpos_M[place.rows])
    return g_RC


class _Positives(NamedTuple):
    """The positives in a tile: whether that of a row is inside, and its column there (any valid one if it is not)."""

    inside_R: Tensor
    column_R1: Tensor

    def write_(self, matrix_RC: Tensor, values_R: Tensor) -> None:
        """Write one value for each row at its positive, if that is inside; each entry is written once, so the order is fixed."""
        before_R = matrix_RC.gather(1, self.column_R1).squeeze(1)
        matrix_RC.scatter_(1, self.column_R1, torch.where(self.inside_R, values_R, before_R)[:, None])


def _positives(pairs: ScoredPairs, place: Place, z_RC: Tensor) -> _Positives | None:
    if pairs.target_M is None or not z_RC.numel():
        return None
    column_R = pairs.target_M[place.rows] - place.columns.start
    inside_R = (column_R >= 0) & (column_R < z_RC.shape[1])
    return _Positives(inside_R, column_R.clamp(0, z_RC.shape[1] - 1)[:, None])


def _same(pairs: ScoredPairs, place: Place, positive: _Positives | None) -> Tensor | None:
    """Return which pairs have equal ids, apart from the positives themselves."""
    if pairs.ids_M is None or pairs.ids_N is None:
        return None
    same = pairs.ids_M[place.rows, None] == pairs.ids_N[place.columns]
    if positive is not None:
        positive.write_(same, torch.zeros_like(positive.inside_R))
    return same


def _plain_sums(
    z_RC: Tensor, pairs: ScoredPairs, same: Tensor | None, out: Tensor | None, positive: _Positives | None, dim: int
) -> tuple[Tensor | None, ...]:
    """Return Σ z and number of further positives, then of all others that count; z of the positives themselves is zero here."""
    further = further_count = counted = counted_count = None
    if pairs.multi_positive and same is not None:
        further, further_count = (z_RC * same).sum(dim), same.sum(dim)
    if pairs.smoothed:
        counts = torch.ones_like(z_RC, dtype=torch.bool) if out is None else ~out
        if positive is not None:
            positive.write_(counts, torch.zeros_like(positive.inside_R))
        counted, counted_count = (z_RC * counts).sum(dim), counts.sum(dim)
    return further, further_count, counted, counted_count
