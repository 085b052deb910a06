"""The softmax contrastive loss (InfoNCE, CLIP) without the similarity matrix. Formula: reference.clip_loss.

Forward: one tour of the ring collects, for rows and columns at once, the sums over the other pairs; the positives are added here.
Backward: a second tour computes the tiles again, but for those that were kept, and brings each block's gradient home.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ring import Group
from ..tiles.contract import Pairs, Softmax, merge
from .autograd import finish, first_derivative_only, modified, outside_autocast, outside_graphs, save, saved
from .diagnostics import Diagnostics, diagnose
from .inputs import EIGHT_BITS, PRECISIONS, Batch, Sharing, check_duplicates, check_number, join_backward, prepare, scalar
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
    workspace: int | None = None,
    precision: str = "ieee",
    diagnostics: bool = False,
) -> Any:
    """The mean cross-entropy of `scale * x @ y.T`, row i's positive being y's row i, over the rows of all ranks in `group`.

    x: (M, D), y: (N, D) embeddings of this rank, normalised or not; N = M, or N >= M with symmetric=False.
    scale: multiplies the similarities (1 / temperature); a float, or a tensor that may require a gradient. Equal on all ranks.
    symmetric: also the mean over columns, halved. False: queries to documents only; y's rows beyond M are extra negatives.
    ids: (N,) integers, one for each row of y, which row i of x shares. Pairs with equal ids that are not the positive itself are
        left out (duplicates="mask") or are further positives with equal shares of the target (duplicates="positive").
    label_smoothing: as in torch.nn.functional.cross_entropy, over the pairs that count.
    drop_above: negatives whose similarity exceeds the positive's by more than this are left out as likely false.
    weights: (M,) weight of each pair in the mean; not all zero.
    group: None for this process alone; a process group or one-dimensional device mesh for the batch of all its ranks. Ranks may
        hold different numbers of rows, even none. Must be given where there are several processes.
    equal_shards: states that every rank passes the same shapes, options and scalars, which saves the exchange that checks it in
        every call but the first one on the group.
    backend: "eager" or "fused"; None chooses by device. workspace: working memory in bytes (None: 32 MiB on a CPU, 512 MiB on CUDA).
    precision: "tf32" lets CUDA devices round the operands of fp32 products to 10 bits; "ieee" does not. "int8", for bf16, lets
        them compute the similarities of backward from embeddings in eight bits, where they have kernels for it.
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
        loss="clip_loss",
        ids=ids,
        weights=weights,
        sharing=Sharing(group, equal_shards, backend, workspace, precision),
        options=rules,
        same_rows=symmetric,
        precisions=(*PRECISIONS, EIGHT_BITS),
    )
    scale = scalar(scale, x, batch)
    if batch.needs_grad is None:
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


@dataclass
class Saved:
    """What the gradient needs: the softmax of rows and columns, the gradient in the positives' logits, what all of it is still to
    be multiplied with, the positives' similarities if pairs are compared with them, and what tiles have kept of this rank's block.
    """

    rows: Softmax
    columns: Softmax | None
    dpos_M: Tensor
    share: Tensor | float
    compared_M: Tensor | None
    kept: Any

    def pop(self) -> Any:
        """What tiles have kept, at the first way back; another one computes it again."""
        kept, self.kept = self.kept, None
        return kept


class _ClipLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor, batch: Batch, rules: Rules) -> tuple[Tensor, Diagnostics | None]:
        loss, diagnostics, ctx.way_back = _solve(batch.read(x), batch.read(y), scale, batch, rules)
        ctx.batch, ctx.rules = batch, rules
        ctx.ids_version = None if batch.ids_N is None else batch.ids_N._version
        save(ctx, x=x, y=y, scale=scale)
        return loss, diagnostics

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, y, scale = saved(ctx)
        batch, way_back = ctx.batch, ctx.way_back
        if batch.ids_N is not None and batch.ids_N._version != ctx.ids_version:
            raise modified("ids")
        products = _gradients(batch.read(x), batch.read(y), scale, batch, ctx.rules, way_back)
        dx, dy, dscale, _ = finish(x, y, scale, batch, way_back.dpos_M, way_back.share, g, products, reuse=True)
        need_x, need_y, need_scale, *_ = ctx.needs_input_grad
        return dx if need_x else None, dy if need_y else None, dscale if need_scale else None, None, None


@outside_autocast
def _solve(x_MD: Tensor, y_ND: Tensor, scale: Tensor, batch: Batch, rules: Rules) -> tuple[Tensor, Diagnostics | None, Saved]:
    """The loss of the whole batch, this rank's diagnostics, and what backward needs."""
    # Only where pairs are compared with the positives do these travel, and have to be there first.
    compares = rules.drop_above is not None or rules.diagnostics
    compared_M = batch.tiles.positives(x_MD, y_ND, batch.compute) if compares else None
    kept: Any = None

    def visit(block: Documents, owner: int) -> tuple[Any, Any]:
        nonlocal kept
        pairs = _pairs(block, owner, batch, rules, compared_M)
        # Of this rank's own block, which both tours visit first: working memory is free again for the others.
        keep = pairs.is_local and batch.needs_grad is not None
        found = batch.tiles.softmax_stats(
            x_MD, block.y_ND, scale, pairs, columns=rules.symmetric, compute=batch.compute, save_exp=keep
        )
        kept = found.saved_exp if keep else kept
        return (found.rows, found.row_ranking), (found.columns, found.column_ranking)

    block = Documents(y_ND, batch.ids_N, compared_M if rules.symmetric else None, None)
    (row_stats, row_ranking), (column_stats, column_ranking) = batch.ring.tour(block, batch.lengths, visit, merge)
    # Else the device has work to do while these are on their way.
    positive_M = batch.tiles.positives(x_MD, y_ND, batch.compute) if compared_M is None else compared_M
    loss_M, dpos_M, rows, columns = batch.tiles.normalise(
        row_stats, column_stats, positive_M, scale, batch.weights_M, rules.label_smoothing
    )
    (loss,), weight = batch.totals(loss_M.sum())
    share = 1 / (weight * (2 if rules.symmetric else 1))
    diagnostics = diagnose(positive_M, row_ranking, column_ranking) if rules.diagnostics else None
    return loss * share, diagnostics, Saved(rows, columns, dpos_M, share, compared_M, kept)


@outside_autocast
def _gradients(x_MD: Tensor, y_ND: Tensor, scale: Tensor, batch: Batch, rules: Rules, way_back: Saved) -> list[Tensor | None]:
    """gx_MD and gy_ND of the others."""
    needs_grad = batch.needs_grad
    assert needs_grad is not None

    def visit(block: Documents, owner: int) -> tuple[Any, Any]:
        pairs = _pairs(block, owner, batch, rules, way_back.compared_M)
        kept = way_back.pop() if pairs.is_local else None
        return batch.tiles.softmax_grads(
            x_MD,
            block.y_ND,
            scale,
            pairs,
            way_back.rows,
            block.columns,
            needs_grad=needs_grad,
            compute=batch.compute,
            dpos_M=way_back.dpos_M,
            saved_exp=kept,
        )

    compared_N = way_back.compared_M if rules.symmetric else None
    block = Documents(y_ND, batch.ids_N, compared_N, way_back.columns)
    return list(batch.ring.tour(block, batch.lengths, visit, merge))


def _pairs(block: Documents, owner: int, batch: Batch, rules: Rules, compared_M: Tensor | None) -> Pairs:
    return Pairs(
        is_local=owner == batch.ring.rank,
        ids_M=None if batch.ids_N is None else batch.ids_N[: batch.rows],
        ids_N=block.ids_N,
        multi_positive=rules.duplicates == "positive",
        drop_above=rules.drop_above,
        positive_M=compared_M,
        positive_N=block.positive_N,
        smoothed=rules.label_smoothing > 0,
        ranked=rules.diagnostics,
    )
