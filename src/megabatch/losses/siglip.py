"""The sigmoid contrastive loss (SigLIP) without the similarity matrix. Formula: reference.siglip_loss.

It has no normaliser: value and gradients come from one pass over the tiles, one tour of the ring, and backward only scales them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..ring import Group
from ..tiles.contract import Pairs, merge
from .autograd import finish, first_derivative_only, outside_autocast, outside_graphs, save, saved
from .diagnostics import Diagnostics, diagnose
from .inputs import Batch, Sharing, check_duplicates, join_backward, prepare, scalar
from .module import LossModule


@outside_graphs
def siglip_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    *,
    ids: Tensor | None = None,
    duplicates: str = "mask",
    weights: Tensor | None = None,
    group: Group = ...,
    equal_shards: bool = False,
    backend: str | None = None,
    workspace: int | None = None,
    precision: str = "ieee",
    diagnostics: bool = False,
) -> Any:
    """The sum over all pairs of `-logsigmoid(±(scale * x @ y.T + bias))`, + for positives, divided by the number of rows of x.

    bias: added to the logits; a float, or a tensor that may require a gradient. y may have more rows than x: extra negatives.
    weights: (M,) weight of each row of x: the weighted mean over rows of the sum over their pairs.
    Everything else as in `clip_loss`; pairs with equal ids that are not the positive itself are left out or, with
    duplicates="positive", have the label +1.

    >>> import torch, megabatch
    >>> x, y = torch.nn.functional.normalize(torch.randn(2, 1024, 64), dim=-1).unbind()
    >>> loss = megabatch.siglip_loss(x.requires_grad_(), y, scale=10.0, bias=-10.0)
    >>> loss.backward()
    """
    rules = Rules(duplicates, diagnostics)
    batch = prepare(
        x,
        y,
        {"scale": scale, "bias": bias},
        loss="siglip_loss",
        ids=ids,
        weights=weights,
        sharing=Sharing(group, equal_shards, backend, workspace, precision),
        options=rules,
        same_rows=False,
    )
    scale, bias = scalar(scale, x, batch), scalar(bias, x, batch)
    if batch.needs_grad is None:
        loss, found, _ = _solve(batch.read(x), batch.read(y), scale, bias, batch, rules)
    else:
        loss, found = _SigLipLoss.apply(join_backward(batch, x, y, scale, bias), y, scale, bias, batch, rules)
    return (loss, found) if diagnostics else loss


class SigLipLoss(LossModule):
    """`siglip_loss` with its options kept: `SigLipLoss(group=None)(x, y, scale, bias, ids=..., weights=...)`."""

    loss = staticmethod(siglip_loss)


@dataclass(frozen=True)
class Rules:
    """The options that say which pairs count, and how."""

    duplicates: str
    diagnostics: bool

    def check(self) -> None:
        check_duplicates(self.duplicates)


class Documents(NamedTuple):
    """A block on its way round the ring: embeddings, ids, and for diagnostics the similarities of the positives."""

    y_ND: Tensor
    ids_N: Tensor | None
    positive_N: Tensor | None


class Saved(NamedTuple):
    """What the gradient needs: gx_MD and gy_ND of the others, the gradient in the positives' logits, that in the bias, and what all
    of it is still to be multiplied with."""

    gx_MD: Tensor | None
    gy_ND: Tensor | None
    dpos_M: Tensor
    slope: Tensor
    share: Tensor | float


class _SigLipLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, batch: Batch, rules: Rules
    ) -> tuple[Tensor, Diagnostics | None]:
        loss, diagnostics, ctx.way_back = _solve(batch.read(x), batch.read(y), scale, bias, batch, rules)
        ctx.batch = batch
        save(ctx, x=x, y=y, scale=scale, bias=bias)
        return loss, diagnostics

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g: Tensor, _: None) -> tuple[Tensor | None, ...]:
        x, y, scale, _bias = saved(ctx)
        *products, dpos_M, slope, share = ctx.way_back
        # Not reused: backward may be called again.
        dx, dy, dscale, factor = finish(x, y, scale, ctx.batch, dpos_M, share, g, products, reuse=False)
        need_x, need_y, need_scale, need_bias, *_ = ctx.needs_input_grad
        return (
            dx if need_x else None,
            dy if need_y else None,
            dscale if need_scale else None,
            slope * factor if need_bias else None,
            None,
            None,
        )


@outside_autocast
def _solve(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, bias: Tensor, batch: Batch, rules: Rules
) -> tuple[Tensor, Diagnostics | None, Saved | None]:
    """The loss of the whole batch, this rank's diagnostics and, if gradients are wanted, what backward needs."""
    positive_M = batch.tiles.positives(x_MD, y_ND, batch.compute)

    def visit(block: Documents, owner: int) -> tuple[Any, Any]:
        pairs = Pairs(
            is_local=owner == batch.ring.rank,
            ids_M=None if batch.ids_N is None else batch.ids_N[: batch.rows],
            ids_N=block.ids_N,
            multi_positive=rules.duplicates == "positive",
            positive_M=positive_M,
            positive_N=block.positive_N,
            ranked=rules.diagnostics,
        )
        found = batch.tiles.sigmoid_sums(
            x_MD, block.y_ND, scale, bias, pairs, batch.weights_M, needs_grad=batch.needs_grad, compute=batch.compute
        )
        return (found.value_M, found.slope_M, found.gx_MD, found.row_ranking), (found.gy_ND, found.column_ranking)

    # A document without a row of its own has no positive to compare with, and NaN is above and below nothing.
    extra = positive_M.new_full((len(y_ND) - len(x_MD),), torch.nan)
    block = Documents(y_ND, batch.ids_N, torch.cat((positive_M, extra)) if rules.diagnostics else None)
    (value_M, slope_M, gx_MD, row_ranking), (gy_ND, column_ranking) = batch.ring.tour(block, batch.lengths, visit, merge)
    own_logit_M = scale * positive_M + bias
    weight_M = torch.ones_like(own_logit_M) if batch.weights_M is None else batch.weights_M
    dpos_M = -weight_M * torch.sigmoid(-own_logit_M)
    sums = [(weight_M * (value_M + softplus(-own_logit_M))).sum()]
    if slope_M is not None:
        sums.append((weight_M * slope_M + dpos_M).sum())
    (loss, *slope), weight = batch.totals(*sums)
    diagnostics = diagnose(positive_M, row_ranking, column_ranking) if rules.diagnostics else None
    return loss / weight, diagnostics, Saved(gx_MD, gy_ND, dpos_M, slope[0], 1 / weight) if slope else None
