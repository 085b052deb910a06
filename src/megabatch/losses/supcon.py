"""The supervised contrastive loss (SupCon, arXiv 2004.11362), without the similarity matrix. Formula: reference.supcon_loss.

The rows of x are compared with each other: those with the label of a row are its positives, and all but the row itself are in the
denominator. In the terms of the tiles (tiles/contract.py), the row itself is the positive that is not summed, and the rows with its
label are further positives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ring import Group
from ..tiles.contract import NeedsGrad, Pairs, Softmax, merge
from .autograd import first_derivative_only, outside_autocast, outside_graphs, save, saved
from .batch import Execution, Inputs, LossBatch, prepare
from .directions import Versions, slope_of
from .symmetric import symmetric_grads, symmetric_stats


@dataclass(frozen=True)
class SupConRules:
    """The loss has no options that say which pairs count."""

    loss_name: ClassVar[str] = "supcon_loss"
    same_rows: ClassVar[bool] = True

    def check(self) -> None:
        """There is nothing to check."""


@outside_graphs
def supcon_loss(
    x: Tensor,
    labels: Tensor,
    scale: Tensor | float,
    *,
    weights: Tensor | None = None,
    group: Group = ...,
    equal_shards: bool = False,
    backend: str | None = None,
    workspace: int | None = None,
    precision: str = "ieee",
) -> Tensor:
    """Return the supervised contrastive loss (SupCon) of all rows of all ranks, without storing the similarity matrix.

    The positives of a row are all other rows with its label. Its loss is the mean over its positives of the cross-entropy over all
    other rows (the definition with the mean outside of the logarithm). The result is the mean over the rows that have a positive.
    For two views of each sample, pass both: `supcon_loss(torch.cat([a, b]), labels.repeat(2), scale)`.

    x: (M, D) embeddings of this rank. labels: (M,) integers. scale: 1 / temperature. weights: (M,) weights of the rows in the mean.
    The other arguments are those of `clip_loss`. Returns NaN if no row has a positive.

    >>> import torch, megabatch
    >>> x = torch.nn.functional.normalize(torch.randn(512, 64), dim=-1)
    >>> loss = megabatch.supcon_loss(x, torch.arange(512) % 10, scale=10.0)
    """
    execution = Execution(group, equal_shards, backend, workspace, precision)
    inputs = Inputs(x, x, {"scale": scale}, labels, weights, ids_name="labels")
    batch = prepare(inputs, SupConRules(), execution, check_more=lambda: _check_labels(labels))
    scale = batch.scalar(scale, x)
    if batch.needs_grad is None:
        return _forward(batch.read(x), scale, batch)[0]
    return _SupConLoss.apply(batch.join_backward(x, scale), scale, batch)


class SupConSaved(NamedTuple):
    """What backward needs from forward: the softmax of this rank's rows, and the factor of the mean."""

    softmax: Softmax
    share: Tensor


class SupConBlock(NamedTuple):
    """One rank's block in the ring: embeddings, labels and, in backward, the softmax."""

    x_MD: Tensor
    labels_M: Tensor
    softmax: Softmax | None


class _SupConLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, batch: LossBatch) -> Tensor:
        loss, ctx.saved = _forward(batch.read(x), scale, batch)
        ctx.batch, ctx.versions_of_others = batch, Versions(labels=batch.ids_N)
        save(ctx, x=x, scale=scale)
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = saved(ctx)
        ctx.versions_of_others.check()
        dx, dscale = _gradients(g, x, scale, ctx.batch, ctx.saved)
        need_x, need_scale, *_ = ctx.needs_input_grad
        return dx if need_x else None, dscale if need_scale else None, None


@outside_autocast
def _forward(x_MD: Tensor, scale: Tensor, batch: LossBatch) -> tuple[Tensor, SupConSaved]:
    """Return the loss of the whole batch, and what backward needs."""
    labels_M = batch.ids_N
    assert labels_M is not None

    def visit(block: SupConBlock, owner: int) -> tuple[Any, Any]:
        pairs = _pairs(block, labels_M, owner == batch.ring.rank)
        if pairs.is_local:
            return symmetric_stats(batch, x_MD, scale, pairs), None
        computes, gives = _computes(owner, batch)
        if not computes:
            return None, None
        stats = batch.tiles.softmax_stats(x_MD, block.x_MD, scale, pairs, columns=gives, compute=batch.compute)
        return stats.rows, stats.columns

    rows, home = batch.ring.tour(SupConBlock(x_MD, labels_M, None), batch.row_lengths, visit, merge)
    stats = merge(rows, home)
    count = stats.further_count.to(batch.acc)
    weight = torch.ones_like(count) if batch.weights_M is None else batch.weights_M
    weight = weight.masked_fill(count == 0, 0)
    count = count.clamp(min=1)
    # A row without others has a peak of -inf, and no loss.
    peak = stats.peak.masked_fill(stats.peak == -torch.inf, 0)
    total = torch.where(stats.total > 0, stats.total, 1)
    loss_M = weight * (total.log() + peak - scale * stats.further / count)
    sums = batch.ring.sum(torch.stack((loss_M.sum(), weight.sum())))
    share = 1 / sums[1]
    return sums[0] * share, SupConSaved(Softmax(peak, weight / total, weight / count), share)


@outside_autocast
def _gradients(g: Tensor, x: Tensor, scale: Tensor, batch: LossBatch, saved_state: SupConSaved) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the scale."""
    x_MD, labels_M, softmax = batch.read(x), batch.ids_N, saved_state.softmax
    assert labels_M is not None
    slope = saved_state.share.new_zeros(())

    def visit(block: SupConBlock, owner: int) -> tuple[Any, Any]:
        nonlocal slope
        pairs = _pairs(block, labels_M, owner == batch.ring.rank)
        if pairs.is_local:
            own = symmetric_grads(batch, x_MD, scale, pairs, softmax)
            # Each logit is in this sum twice: as one of row i, and as one of column i.
            slope = slope + slope_of(x_MD, own, batch) / 2
            return own, None
        computes, gives = _computes(owner, batch)
        if not computes:
            return None, None
        gradient, home = batch.tiles.softmax_grads(
            x_MD,
            block.x_MD,
            scale,
            pairs,
            softmax,
            block.softmax if gives else None,
            needs_grad=NeedsGrad(True, True),
            compute=batch.compute,
        )
        slope = slope + slope_of(x_MD, gradient, batch)
        return gradient, home

    rows, home = batch.ring.tour(SupConBlock(x_MD, labels_M, softmax), batch.row_lengths, visit, merge)
    gradient = merge(rows, home)
    # The ranks hold one loss: its gradient takes the sum of the gradients that come in on all ranks, and the scale's is shared.
    g = batch.ring.sum(g.to(batch.acc, copy=batch.ring.size > 1)) * saved_state.share
    slope = batch.ring.sum(slope)
    return gradient.mul_(g * scale).to(x.dtype), slope * g / batch.ring.size


def _check_labels(labels: Tensor | None) -> dict[str, object]:
    if labels is None:
        raise ValueError("labels is None: must be a tensor of integers, one for each row of x")
    return {}


def _computes(owner: int, batch: LossBatch) -> tuple[bool, bool]:
    """Return whether this rank computes its product with another rank's block, and whether it does so for both ranks."""
    hops, size = (batch.ring.rank - owner) % batch.ring.size, batch.ring.size
    return 2 * hops <= size, 2 * hops < size


def _pairs(block: SupConBlock, labels_M: Tensor, is_local: bool) -> Pairs:
    return Pairs(is_local=is_local, ids_M=labels_M, ids_N=block.labels_M, multi_positive=True)
