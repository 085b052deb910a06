"""Losses of small batches on a CPU, with the whole similarity matrix in the workspace (tiles/one_piece.py).

At some hundred rows a step takes as long as its Python code and the dispatch of its operations, so both are few: `accept` replaces
the checks of `prepare` for the usual calls, and backward only multiplies the gradients that were computed with the value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from ..ring import Group
from ..tiles import backend_for, computes_in_one_piece, one_piece
from ..tiles.contract import ComputeOptions, NeedsGrad, accumulator
from ..tiles.one_piece import OnePiece
from .autograd import first_derivative_only, outside_autocast, save, saved
from .batch import LossBatch, is_accumulating
from .checks import DTYPES, PLAIN_TENSORS


class OnePieceCall(NamedTuple):
    """How to compute a loss in one piece.

    dtype: that in which the products read the embeddings. scalars: the scale, and the bias if the loss has one.
    """

    dtype: torch.dtype
    scalars: tuple[Tensor, ...]
    needs_grad: NeedsGrad | None
    compute: ComputeOptions


# From x, y and the scalars to the loss and its gradients.
OnePieceLoss = Callable[..., OnePiece]


def accept(
    x: Tensor, y: Tensor, scalars: tuple[Tensor | float, ...], group: Group, backend: str | None, workspace: int | None
) -> OnePieceCall | None:
    """Return the call if it is certainly right and fits. Otherwise None: `prepare` checks everything and names what is wrong.

    Right are dense matrices of one shape on a CPU, and scalars that are tensors of the dtype of logits, with a scale of at least 1;
    in one process, without autocast.
    """
    if group is not None and (group is not ... or (dist.is_available() and dist.is_initialized())):
        return None
    # The transforms of torch.func, and dual tensors of forward-mode AD.
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    if backend not in (None, "eager") or is_accumulating() or torch.is_autocast_enabled("cpu"):
        return None
    if not (_is_dense(x) and _is_dense(y)):
        return None
    shape, dtype = x.shape, x.dtype
    if len(shape) != 2 or shape[1] == 0 or y.shape != shape or y.dtype != dtype or dtype not in DTYPES:
        return None
    if workspace is None:
        workspace = backend_for(x.device, dtype, backend).default_workspace(x.device)
    if type(workspace) is not int or not one_piece.fits(shape[0], shape[0], dtype, workspace):
        return None
    options = ComputeOptions(workspace)
    acc = accumulator(dtype)
    for scalar in scalars:
        if not _is_dense(scalar) or scalar.ndim or scalar.dtype != acc:  # type: ignore[union-attr]
            return None
    tensors = cast(tuple[Tensor, ...], scalars)
    if not tensors[0].item() >= 1:
        return None
    if not torch.is_grad_enabled():
        return OnePieceCall(dtype, tensors, None, options)
    needs_x, needs_y = x.requires_grad, y.requires_grad
    if not (needs_x or needs_y or any([t.requires_grad for t in tensors])):
        return OnePieceCall(dtype, tensors, None, options)
    if x.is_inference() or y.is_inference() or any([t.is_inference() for t in tensors]):
        return None
    return OnePieceCall(dtype, tensors, NeedsGrad(needs_x or not needs_y, needs_y), options)


def _is_dense(t: object) -> bool:
    """Return whether t is a tensor of PyTorch's own class, dense and on a CPU."""
    return type(t) in PLAIN_TENSORS and t.is_cpu and t.layout is torch.strided and not t.is_nested  # type: ignore[attr-defined]


def one_piece_of(batch: LossBatch, x: Tensor, y: Tensor, *scalars: Tensor) -> OnePieceCall | None:
    """Return the call for a batch that `prepare` has checked, or None if it needs the tiles."""
    if batch.ids_N is not None or batch.weights_M is not None or batch.ring.size > 1:
        return None
    if not computes_in_one_piece(batch.tiles, x.device):
        return None
    if not one_piece.fits(len(x), len(y), batch.dtype, batch.compute.workspace):
        return None
    return OnePieceCall(batch.dtype, scalars, batch.needs_grad, batch.compute)


def loss_in_one_piece(x: Tensor, y: Tensor, call: OnePieceCall, loss: OnePieceLoss) -> Tensor:
    """Return the loss, connected to x, y and the scalars in autograd."""
    if call.needs_grad is None:
        with torch.no_grad():
            return compute(x, y, call, loss).loss
    return cast(Tensor, _OnePieceLoss.apply(x, y, call, loss, *call.scalars))


@outside_autocast
def compute(x: Tensor, y: Tensor, call: OnePieceCall, loss: OnePieceLoss) -> OnePiece:
    """Return the loss and its gradients, without autograd."""
    return loss(_read(x, call), _read(y, call), *call.scalars, needs_grad=call.needs_grad, compute=call.compute)


def _read(embeddings: Tensor, call: OnePieceCall) -> Tensor:
    if embeddings.dtype == call.dtype and not embeddings.is_neg():
        return embeddings
    return embeddings.to(call.dtype).resolve_neg()


class _OnePieceLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, call: OnePieceCall, loss: OnePieceLoss, *scalars: Tensor) -> Tensor:
        result = compute(x, y, call, loss)
        # Not the loss itself, which refers to ctx: both would live on if backward is never called.
        ctx.gradients, ctx.call, ctx.loss = result._replace(loss=None), call, loss  # type: ignore[arg-type]
        save(ctx, x=x, y=y, **dict(zip(("scale", "bias"), scalars, strict=False)))
        return result.loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, y, scale, *_ = saved(ctx)
        # The first backward overwrites the gradients; a further one through a retained graph computes them again.
        result, ctx.gradients = ctx.gradients, None
        if result is None:
            result = compute(x, y, ctx.call, ctx.loss)
        need_x, need_y, _call, _loss, need_scale, *need_bias = ctx.needs_input_grad
        factor = g * scale
        return (
            result.gx_MD.mul_(factor).to(x.dtype) if need_x else None,
            result.gy_ND.mul_(factor).to(y.dtype) if need_y else None,
            None,
            None,
            result.dscale * g if need_scale else None,
            *(result.dbias * g if need else None for need in need_bias),
        )
