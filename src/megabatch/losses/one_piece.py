"""Losses of small batches, with the whole similarity matrix in the workspace (tiles/one_piece.py, tiles/fused/one_piece.py).

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
from ..tiles import backend_for, one_piece_for
from ..tiles.contract import ComputeOptions, NeedsGrad, OnePiece, OnePieceTiles, accumulator
from .autograd import first_derivative_only, outside_autocast, save, saved
from .batch import LossBatch, is_accumulating
from .checks import DTYPES, PLAIN_TENSORS, product_dtype

# CUDA devices of calls that `prepare` has checked. It reads the scale of the first one, to warn of a temperature; reading it in
# every call would wait for the device.
_checked_devices: set[torch.device] = set()


class OnePieceCall(NamedTuple):
    """How to compute a loss in one piece.

    dtype: that in which the products read the embeddings. scalars: the scale, and the bias if the loss has one.
    """

    tiles: OnePieceTiles
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

    Right are dense matrices of one shape on a CPU or on the current CUDA device, and scalars that are tensors of the dtype of
    logits, with a scale of at least 1; in one process, and on a CPU without autocast.
    """
    if group is not None and (group is not ... or (dist.is_available() and dist.is_initialized())):
        return None
    # The transforms of torch.func, and dual tensors of forward-mode AD.
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    if is_accumulating() or not (_is_dense(x) and _is_dense(y)):
        return None
    shape, dtype, device = x.shape, x.dtype, x.device
    if len(shape) != 2 or shape[1] == 0 or y.shape != shape or y.dtype != dtype or y.device != device or dtype not in DTYPES:
        return None
    if device.type == "cuda":
        if device not in _checked_devices or device.index != torch.cuda.current_device():
            return None
        dtype = product_dtype(x)
        if dtype not in DTYPES or x.stride(1) != 1 or y.stride(1) != 1:
            return None
    elif torch.is_autocast_enabled("cpu"):
        return None
    if backend is not None and (backend != "eager" or device.type != "cpu"):
        return None
    tiles = backend_for(device, dtype, backend)
    whole = one_piece_for(tiles, device)
    if workspace is None:
        workspace = tiles.default_workspace(device)
    if whole is None or type(workspace) is not int:
        return None
    compute = ComputeOptions(workspace)
    if not whole.fits((shape[0], shape[0], shape[1]), dtype, compute):
        return None
    acc = accumulator(dtype)
    for scalar in scalars:
        if not _is_dense(scalar) or scalar.ndim or scalar.dtype != acc or scalar.device != device:  # type: ignore[union-attr]
            return None
    tensors = cast(tuple[Tensor, ...], scalars)
    if device.type == "cpu" and not tensors[0].item() >= 1:
        return None
    if not torch.is_grad_enabled():
        return OnePieceCall(whole, dtype, tensors, None, compute)
    needs_x, needs_y = x.requires_grad, y.requires_grad
    if not (needs_x or needs_y or any([t.requires_grad for t in tensors])):
        return OnePieceCall(whole, dtype, tensors, None, compute)
    if x.is_inference() or y.is_inference() or any([t.is_inference() for t in tensors]):
        return None
    return OnePieceCall(whole, dtype, tensors, NeedsGrad(needs_x or not needs_y, needs_y), compute)


def _is_dense(t: object) -> bool:
    """Return whether t is a tensor of PyTorch's own class, dense and on a CPU or a CUDA device."""
    if type(t) not in PLAIN_TENSORS:
        return False
    tensor = cast(Tensor, t)
    return (tensor.is_cpu or tensor.is_cuda) and tensor.layout is torch.strided and not tensor.is_nested


def one_piece_of(batch: LossBatch, x: Tensor, y: Tensor, *scalars: Tensor) -> OnePieceCall | None:
    """Return the call for a batch that `prepare` has checked, or None if it needs the tiles."""
    if batch.ids_N is not None or batch.weights_M is not None or batch.ring.size > 1:
        return None
    whole = one_piece_for(batch.tiles, x.device)
    if whole is None or not whole.fits((len(x), *y.shape), batch.dtype, batch.compute):
        return None
    if x.is_cuda:
        if x.stride(1) != 1 or y.stride(1) != 1 or x.device.index != torch.cuda.current_device():
            return None
        _checked_devices.add(x.device)
    return OnePieceCall(whole, batch.dtype, scalars, batch.needs_grad, batch.compute)


def softmax_in_one_piece(call: OnePieceCall, symmetric: bool) -> OnePieceLoss:
    """Return the function that computes the softmax over rows and columns, or over rows alone."""
    return call.tiles.softmax_loss if symmetric else call.tiles.row_softmax_loss


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
        ctx.gradients, ctx.call, ctx.loss = result.gradients, call, loss
        save(ctx, x=x, y=y, **dict(zip(("scale", "bias"), scalars, strict=False)))
        return result.loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, y, scale, *_ = saved(ctx)
        # The first backward overwrites the gradients; a further one through a retained graph computes them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            gradients = compute(x, y, ctx.call, ctx.loss).gradients
        need_x, need_y, _call, _loss, *need_scalars = ctx.needs_input_grad
        needs = need_x, need_y, *need_scalars
        dx, dy, *dscalars = ctx.call.tiles.finish(gradients, g, scale, (x.dtype, y.dtype), needs)
        return dx, dy, None, None, *dscalars[: len(need_scalars)]
