"""Losses of small batches, with the whole similarity matrix in the workspace (tiles/one_piece.py, tiles/fused/one_piece.py).

With less than a hundred rows on a CPU, and a few thousand on a GPU, a step takes as long as its Python code and the dispatch of its
operations, so both are few: `accept` replaces the checks of `prepare` for the usual calls, and backward only multiplies the
gradients that were computed with the value. Batches that need the tiles are accepted too, if `prepare` has checked one like them.
"""

from __future__ import annotations

import functools
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
from .batch import LossBatch, is_accumulating, is_for_graph
from .checks import DTYPES, PLAIN_TENSORS, product_dtype

HAS_DISTRIBUTED = dist.is_available()
# CUDA devices of calls that `prepare` has checked. It reads the scale of the first one, to warn of a temperature; reading it in
# every call would wait for the device.
_checked_devices: set[torch.device] = set()
# Batches that need the tiles, by all that they depend on (`_kind`).
_checked_batches: dict[tuple[Any, ...], LossBatch] = {}
MAX_CHECKED_BATCHES = 256


class OnePieceCall(NamedTuple):
    """How to compute a loss in one piece.

    dtype: that in which the products read the embeddings. scalars: the scale, and the bias if the loss has one.
    direct: whether the embeddings have that dtype, are not lazily negated, and autocast is disabled.
    """

    tiles: OnePieceTiles
    dtype: torch.dtype
    scalars: tuple[Tensor, ...]
    needs_grad: NeedsGrad | None
    compute: ComputeOptions
    direct: bool = False


# From x, y and the scalars to the loss and its gradients.
OnePieceLoss = Callable[..., OnePiece]


def is_alone(group: Group) -> bool:
    """Return whether these rows are certainly the whole batch."""
    return group is None or (group is ... and not (HAS_DISTRIBUTED and dist.is_initialized()))


def accept(
    x: Tensor, y: Tensor, scalars: tuple[Tensor | float, ...], group: Group, backend: str | None, workspace: int | None
) -> OnePieceCall | LossBatch | None:
    """Return the call if it is certainly right and fits, or its batch if it does not fit and such a batch is known.

    Otherwise None: `prepare` checks everything and names what is wrong.

    Right are dense matrices of one shape on a CPU or on the current CUDA device, and scalars that are tensors of the dtype of
    logits; in one process, and on a CPU without autocast and with a scale of at least 1.
    """
    if not is_alone(group):
        return None
    # The transforms of torch.func, and dual tensors of forward-mode AD.
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or is_accumulating():
        return None
    # Plain and dense: everything below is defined for such tensors.
    for t in (x, y, *scalars):
        if type(t) not in PLAIN_TENSORS or t.layout is not torch.strided or t.is_nested:  # type: ignore[union-attr]
            return None
    shape, dtype, device = x.shape, x.dtype, x.device
    if y.shape != shape or y.dtype != dtype or y.device != device:
        return None
    if (backend is not None and backend != "eager") or (workspace is not None and type(workspace) is not int):
        return None
    on_cpu = x.is_cpu
    autocast = torch.is_autocast_enabled("cpu" if on_cpu else "cuda")
    if on_cpu:
        if autocast:
            return None
    elif device not in _checked_devices or device.index != torch.cuda.current_device() or x.stride(1) != 1 or y.stride(1) != 1:
        return None
    plan = plan_for(shape, product_dtype(x) if autocast else dtype, device, backend, workspace, is_for_graph())
    if plan is None:
        return None
    tensors = cast("tuple[Tensor, ...]", scalars)
    needs = False
    for t in tensors:
        if t.ndim or t.dtype != plan.logits or t.device != device:
            return None
        needs = needs or t.requires_grad
    if on_cpu and not tensors[0].item() >= 1:
        return None
    needs_x, needs_y = x.requires_grad, y.requires_grad
    needs_grad = None
    if (needs or needs_x or needs_y) and torch.is_grad_enabled():
        for t in (x, y, *tensors):
            if t.is_inference():
                return None
        needs_grad = NeedsGrad(needs_x or not needs_y, needs_y)
    if plan.tiles is None:
        return _checked_batches.get(_kind(x, y, tensors, plan.dtype, backend, workspace))
    direct = not (autocast or x.is_neg() or y.is_neg())
    return OnePieceCall(plan.tiles, plan.dtype, tensors, needs_grad, plan.compute, direct)


def _kind(
    x: Tensor, y: Tensor, scalars: tuple[Tensor, ...], dtype: torch.dtype, backend: str | None, workspace: int | None
) -> tuple[Any, ...]:
    """Return all that the batch of a call depends on, if it is alone and x and y are alike. dtype: that of the products."""
    enabled = torch.is_grad_enabled()
    return x.shape, dtype, x.device, backend, workspace, *[enabled and t.requires_grad for t in (x, y, *scalars)]


def remember(
    batch: LossBatch, x: Tensor, y: Tensor, scalars: tuple[Tensor, ...], backend: str | None, workspace: int | None
) -> None:
    """Let `accept` return this batch, which needs the tiles and which `prepare` has checked, for calls like this one."""
    if batch.ring.group is not None or x.shape != y.shape or (backend is not None and (backend != "eager" or x.is_cuda)):
        return
    if x.is_cuda:
        _checked_devices.add(x.device)
    if len(_checked_batches) >= MAX_CHECKED_BATCHES:
        _checked_batches.clear()
    _checked_batches[_kind(x, y, scalars, batch.dtype, backend, workspace)] = batch


class OnePiecePlan(NamedTuple):
    """What a call depends on, apart from its tensors. tiles: None if they do not fit in one piece.

    dtype: that in which the products read embeddings; logits: that of logits.
    """

    tiles: OnePieceTiles | None
    dtype: torch.dtype
    logits: torch.dtype
    compute: ComputeOptions


@functools.lru_cache(maxsize=256)
def plan_for(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, backend: str | None, workspace: int | None, in_graph: bool
) -> OnePiecePlan | None:
    """Return the plan for x and y of this shape, or None if `prepare` has to look at them."""
    if len(shape) != 2 or shape[1] == 0 or dtype not in DTYPES or device.type not in ("cpu", "cuda"):
        return None
    if backend is not None and device.type != "cpu":
        return None
    tiles = backend_for(device, dtype, backend)
    whole = one_piece_for(tiles, device)
    compute = ComputeOptions(tiles.default_workspace(device) if workspace is None else workspace, in_graph=in_graph)
    fits = whole is not None and whole.fits((shape[0], shape[0], shape[1]), dtype, compute)
    return OnePiecePlan(whole if fits else None, dtype, accumulator(dtype), compute)


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
    apply = _apply if call.direct else _OnePieceLoss.apply
    return cast(Tensor, apply(x, y, call, loss, *call.scalars))


def compute(x: Tensor, y: Tensor, call: OnePieceCall, loss: OnePieceLoss) -> OnePiece:
    """Return the loss and its gradients, without autograd."""
    if call.direct:
        # Skips the layers of autograd in the dispatch of every operation.
        with torch._C._AutoDispatchBelowAutograd():
            return loss(x, y, *call.scalars, needs_grad=call.needs_grad, compute=call.compute)
    return _convert_and_compute(x, y, call, loss)


@outside_autocast
def _convert_and_compute(x: Tensor, y: Tensor, call: OnePieceCall, loss: OnePieceLoss) -> OnePiece:
    x, y = (t.to(call.dtype).resolve_neg() for t in (x, y))
    return loss(x, y, *call.scalars, needs_grad=call.needs_grad, compute=call.compute)


class _OnePieceLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, call: OnePieceCall, loss: OnePieceLoss, *scalars: Tensor) -> Tensor:
        result = compute(x, y, call, loss)
        # Not the loss itself, which refers to ctx: both would live on if backward is never called.
        ctx.gradients, ctx.call, ctx.loss = result.gradients, call, loss
        save(ctx, **dict(zip(("x", "y", "scale", "bias"), (x, y, *scalars), strict=False)))
        return result.loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, y, scale, *_ = saved(ctx)
        # The first backward overwrites the gradients; a further one through a retained graph computes them again.
        gradients, ctx.gradients = ctx.gradients, None
        call = ctx.call
        if gradients is None:
            gradients = _convert_and_compute(x, y, call, ctx.loss).gradients
        need_x, need_y, _call, _loss, *need_scalars = ctx.needs_input_grad
        needs = need_x, need_y, *need_scalars
        dx, dy, *dscalars = call.tiles.finish(gradients, g, scale, (x.dtype, y.dtype), needs)
        return dx, dy, None, None, *dscalars[: len(need_scalars)]


# Function.apply without what it does for the transforms of torch.func, in which `accept` finds no call to be right.
_apply = super(torch.autograd.Function, _OnePieceLoss).apply
