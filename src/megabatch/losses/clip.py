"""The softmax contrastive loss (InfoNCE, CLIP) without the similarity matrix. Formula: reference.clip_loss.

Forward: one tour of the ring collects, for rows and columns at once, the sums over the other pairs; the positives are added here.
Backward: a second tour recomputes the tiles and brings each block's gradient home.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ring import Group
from ..tiles.contract import Pairs, Softmax, Stats, merge
from .autograd import add_positives, first_derivative_only, outside_autocast, outside_graphs
from .diagnostics import Diagnostics, diagnose
from .inputs import Batch, Sharing, check_duplicates, check_number, join_backward, prepare, scalar
from .module import LossModule


@outside_graphs
def clip_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    *,
    symmetric: bool = True,
    ids: Tensor | None = None,
    duplicates: str = "mask",
    label_smoothing: float = 0.0,
    drop_above: float | None = None,
    weights: Tensor | None = None,
    group: Group = ...,
    equal_shards: bool = False,
    backend: str | None = None,
    tile: int | None = None,
    diagnostics: bool = False,
) -> Any:
    """The mean cross-entropy of `scale * x @ y.T`, row i's positive being y's row i, over the rows of all ranks in `group`.

    x: (M, D), y: (N, D) embeddings of this rank, normalised or not; N = M, or N >= M with symmetric=False.
    scale: multiplies the similarities (1 / temperature); a float, or a tensor that may require a gradient.
    symmetric: also the mean over columns, halved. False: queries to documents only; y's rows beyond M are extra negatives.
    ids: (N,) integers, one for each row of y, which row i of x shares. Pairs with equal ids that are not the positive itself are
        left out (duplicates="mask") or are further positives with equal shares of the target (duplicates="positive").
    label_smoothing: as in torch.nn.functional.cross_entropy, over the pairs that count.
    drop_above: negatives whose similarity exceeds the positive's by more than this are left out as likely false.
    weights: (M,) weight of each pair in the mean; not all zero.
    group: None for this process alone; a process group or one-dimensional device mesh for the batch of all its ranks. Ranks may
        hold different numbers of rows, even none. Must be given where there are several processes.
    equal_shards: states that every rank passes the same shapes and options, which saves the exchange that checks it.
    backend: "eager" or "fused"; None chooses by device. tile: working memory in bytes (None: 32 MiB on a CPU, 256 elsewhere).
    diagnostics: also return a `Diagnostics`, as (loss, diagnostics).

    Every rank gets the loss of the whole batch, and DDP's average of gradients is exactly that loss's gradient.
    Under autocast the embeddings are rounded as a matrix product would; logits, sums and gradients stay in fp32.

    >>> import torch, megabatch
    >>> x, y = torch.nn.functional.normalize(torch.randn(2, 1024, 64), dim=-1).unbind()
    >>> loss = megabatch.clip_loss(x.requires_grad_(), y, scale=20.0)
    >>> loss.backward()
    """
    rules = Rules(symmetric, duplicates, label_smoothing, drop_above, diagnostics)
    batch = prepare(
        x,
        y,
        {"scale": scale},
        ids=ids,
        weights=weights,
        sharing=Sharing(group, equal_shards, backend, tile),
        options=rules,
        same_rows=symmetric,
    )
    scale = scalar(scale, x, batch)
    if batch.wanted is None:
        loss, found, _ = _solve(batch.read(x), batch.read(y), scale, batch, rules)
    else:
        loss, found = _ClipLoss.apply(join_backward(batch, x, y, scale), y, scale, batch, rules)
    return (loss, found) if diagnostics else loss


class ClipLoss(LossModule):
    """`clip_loss` with its options kept: `ClipLoss(symmetric=False, group=None)(x, y, scale, ids=..., weights=...)`."""

    loss = staticmethod(clip_loss)


@dataclass(frozen=True)
class Rules:
    """The options that say which pairs count, and how."""

    symmetric: bool
    duplicates: str
    label_smoothing: float
    drop_above: float | None
    diagnostics: bool

    def check(self) -> None:
        check_duplicates(self.duplicates)
        check_number("label_smoothing", self.label_smoothing, low=0, high=1)
        if self.drop_above is not None:
            check_number("drop_above", self.drop_above)


class Documents(NamedTuple):
    """A block on its way round the ring: embeddings, ids, similarities of the positives and, in backward, the columns' softmax."""

    y_ND: Tensor
    ids_N: Tensor | None
    positive_N: Tensor | None
    columns: Softmax | None


class WayBack(NamedTuple):
    """What the gradient needs: the softmax of rows and columns, the gradient in the positives' logits, what all of it is still to
    be multiplied with, and the positives' similarities if pairs are compared with them."""

    rows: Softmax
    columns: Softmax | None
    own_M: Tensor
    share: Tensor
    compared_M: Tensor | None


class _ClipLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor, batch: Batch, rules: Rules) -> tuple[Tensor, Diagnostics | None]:
        loss, diagnostics, ctx.way_back = _solve(batch.read(x), batch.read(y), scale, batch, rules)
        ctx.batch, ctx.rules = batch, rules
        ctx.save_for_backward(x, y, scale)
        return loss, diagnostics

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g: Tensor, _: None) -> tuple[Tensor | None, ...]:
        x, y, scale = ctx.saved_tensors
        batch, way_back = ctx.batch, ctx.way_back
        gx_MD, gy_ND, slope = _gradients(batch.read(x), batch.read(y), scale, batch, ctx.rules, way_back)
        # The ranks hold one loss: its gradient takes what every rank's graph sends down, and all share one gradient in the scale.
        g, slope = batch.ring.sum(torch.stack((g.to(slope.dtype), slope)))
        g = g * way_back.share
        need_x, need_y, need_scale, *_ = ctx.needs_input_grad
        return (
            gx_MD.mul_(g * scale).to(x.dtype) if need_x and gx_MD is not None else None,
            gy_ND.mul_(g * scale).to(y.dtype) if need_y and gy_ND is not None else None,
            slope * g / batch.ring.size if need_scale else None,
            None,
            None,
        )


@outside_autocast
def _solve(x_MD: Tensor, y_ND: Tensor, scale: Tensor, batch: Batch, rules: Rules) -> tuple[Tensor, Diagnostics | None, WayBack]:
    """The loss of the whole batch, this rank's diagnostics, and what backward needs."""
    compared_M = batch.tiles.positives(x_MD, y_ND) if rules.drop_above is not None or rules.diagnostics else None

    def visit(block: Documents, owner: int) -> tuple[Any, Any]:
        pairs = _pairs(block, owner, batch, rules, compared_M)
        found = batch.tiles.softmax_stats(x_MD, block.y_ND, scale, pairs, columns=rules.symmetric, tile=batch.tile)
        return (found.rows, found.row_ranking, found.positive_M), (found.columns, found.column_ranking)

    block = Documents(y_ND, batch.ids_N, compared_M if rules.symmetric else None, None)
    (row_stats, row_ranking, positive_M), (column_stats, column_ranking) = batch.ring.tour(block, batch.lengths, visit, merge)
    loss_M, rows, own_M = _finish(row_stats, positive_M, scale, batch.weights_M, rules.label_smoothing)
    columns = None
    if rules.symmetric:
        column_loss_M, columns, column_own_M = _finish(column_stats, positive_M, scale, batch.weights_M, rules.label_smoothing)
        loss_M, own_M = loss_M + column_loss_M, own_M + column_own_M
    if batch.weights_M is not None:
        loss_M = loss_M * batch.weights_M
    loss, weight = batch.ring.sum(torch.stack((loss_M.sum(), batch.weight_sum(x_MD))))
    share = 1 / (weight * (2 if rules.symmetric else 1))
    diagnostics = diagnose(positive_M, row_ranking, column_ranking) if rules.diagnostics else None
    return loss * share, diagnostics, WayBack(rows, columns, own_M, share, compared_M)


@outside_autocast
def _gradients(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, batch: Batch, rules: Rules, way_back: WayBack
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """gx_MD, gy_ND (without the scale) and this rank's part of the gradient in the scale, all without the mean's share."""
    wanted = batch.wanted
    assert wanted is not None

    def visit(block: Documents, owner: int) -> tuple[Any, Any]:
        pairs = _pairs(block, owner, batch, rules, way_back.compared_M)
        return batch.tiles.softmax_grads(
            x_MD, block.y_ND, scale, pairs, way_back.rows, block.columns, wanted=wanted, tile=batch.tile
        )

    compared_N = way_back.compared_M if rules.symmetric else None
    block = Documents(y_ND, batch.ids_N, compared_N, way_back.columns)
    gx_MD, gy_ND = batch.ring.tour(block, batch.lengths, visit, merge)
    return gx_MD, gy_ND, add_positives(x_MD, y_ND, way_back.own_M, gx_MD, gy_ND)


def _pairs(block: Documents, owner: int, batch: Batch, rules: Rules, compared_M: Tensor | None) -> Pairs:
    return Pairs(
        home=owner == batch.ring.rank,
        ids_M=None if batch.ids_N is None else batch.ids_N[: batch.rows],
        ids_N=block.ids_N,
        several=rules.duplicates == "positive",
        drop_above=rules.drop_above,
        positive_M=compared_M,
        positive_N=block.positive_N,
        smoothed=rules.label_smoothing > 0,
        ranked=rules.diagnostics,
    )


def _finish(
    stats: Stats, positive_M: Tensor, scale: Tensor, weights_M: Tensor | None, label_smoothing: float
) -> tuple[Tensor, Softmax, Tensor]:
    """Each row's (or column's) loss, its softmax for the gradient, and the gradient in its positive's logit.

    With t the weight of the target on the positive itself (1 without further positives and smoothing), the gradient in its logit is
    p - t = (1 - t) - share of the others.
    """
    weight = torch.ones_like(positive_M) if weights_M is None else weights_M
    s = scale * positive_M
    peak = torch.maximum(stats.peak, s)
    others = stats.total * (stats.peak - peak).exp()
    total = others + (s - peak).exp()
    # log(total), exact also where the positive is all there is and total is nearly one.
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
    own = weight * ((1 - target) - others / total)
    return loss, Softmax(peak, weight / total, further, counted), own
