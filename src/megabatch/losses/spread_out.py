"""The spread-out regulariser (global orthogonal regularisation) from a D×D matrix. Formula: reference.spread_out_loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..ring import Group
from ..tiles.contract import accumulator
from .autograd import first_derivative_only, outside_autocast, outside_graphs, save, saved
from .batch import RankSummary, SharedCall, agree, summarise
from .checks import DTYPES, check_group, check_tensor, product_dtype

if TYPE_CHECKING:
    from ..ring import Ring


@outside_graphs
def spread_out_loss(x: Tensor, *, group: Group = ..., equal_shards: bool = False) -> Tensor:
    """Return the mean squared inner product of all pairs of different rows, over all ranks.

    This is the spread-out regulariser of EmbeddingGemma, `Σ_{i≠j} (x_i·x_j)² / (B * (B - 1))` of the B rows of all ranks. It is
    computed from the D×D matrix x.T @ x, with one sum over ranks and without a B×B matrix. Add it with a weight to the loss, once
    for each side.

    x: (M, D) embeddings of this rank, usually normalised. group, equal_shards: as in `clip_loss`.

    One row has no pairs, and gives 0. Returns a float32 scalar (float64 for float64 embeddings), the same on every rank. DDP's
    average of gradients is exactly the gradient of this loss.

    >>> import torch, megabatch
    >>> x = torch.nn.functional.normalize(torch.randn(512, 64), dim=-1).requires_grad_()
    >>> megabatch.spread_out_loss(x).backward()
    """

    def describe(ring: Ring, waits: bool) -> tuple[RankSummary, dict[str, object]]:
        check_tensor("x", x, "embeddings")
        if x.ndim != 2 or x.shape[1] == 0 or x.dtype not in DTYPES:
            raise ValueError(
                f"x has shape {tuple(x.shape)} and is {x.dtype}: must be (rows, width), in one of {', '.join(map(str, DTYPES))}"
            )
        check_group(x, ring)
        facts = {"loss": "spread_out_loss", "width of the embeddings": x.shape[1], "dtype of the embeddings": product_dtype(x)}
        return summarise(len(x), len(x), ([x],), (), waits=waits), facts

    device = x.device if isinstance(x, Tensor) else torch.device("cpu")
    call = agree(group, equal_shards, device, ("x",), describe)
    rows = sum(each.rows for each in call.summaries)
    pairs = rows * (rows - 1)
    if not any(call.requires_grad):
        return _forward(x.detach(), call, pairs)[0]
    loss: Tensor = _SpreadOutLoss.apply(x, torch.zeros((), requires_grad=True), call, pairs)
    return loss


class Gram(NamedTuple):
    """What backward needs: x.T @ x of all ranks, and the squared norms of this rank's rows."""

    gram_DD: Tensor
    squared_M: Tensor


class _SpreadOutLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, joins: Tensor, call: SharedCall, pairs: int) -> Tensor:
        loss, ctx.gram = _forward(x, call, pairs)
        ctx.call, ctx.pairs = call, pairs
        save(ctx, x=x)
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = saved(ctx)
        return _gradient(x, g, ctx.gram, ctx.call, ctx.pairs), None, None, None


@outside_autocast
def _forward(x: Tensor, call: SharedCall, pairs: int) -> tuple[Tensor, Gram]:
    x_MD = x.to(accumulator(x.dtype))
    squared_M = torch.linalg.vecdot(x_MD, x_MD)
    # One exchange for both: the matrix, and the sum of what its square holds of pairs of a row with itself.
    both = call.ring.sum(torch.cat(((x_MD.T @ x_MD).flatten(), squared_M.square().sum()[None])))
    gram, own = both[:-1], both[-1]
    # What rounding leaves of the difference, without pairs or where all are orthogonal.
    value = (gram.square().sum() - own).clamp(min=0) / pairs if pairs else gram.new_zeros(())
    return value, Gram(gram.view(x.shape[1], x.shape[1]), squared_M)


@outside_autocast
def _gradient(x: Tensor, g: Tensor, gram: Gram, call: SharedCall, pairs: int) -> Tensor:
    x_MD = x.to(accumulator(x.dtype))
    g = call.ring.sum(g.to(x_MD.dtype, copy=call.ring.size > 1))
    dx = torch.addcmul(x_MD @ gram.gram_DD, gram.squared_M[:, None], x_MD, value=-1)
    return (dx.mul_(4 * g / pairs) if pairs else dx.zero_()).to(x.dtype)
