"""What the losses share towards autograd and the compiler."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from .inputs import Batch, is_transformed

Loss = TypeVar("Loss", bound=Callable[..., Any])


def outside_graphs(loss: Loss) -> Loss:
    """The loss as one clean graph break under torch.compile, which would otherwise unroll its tiles into the graph."""
    # torch.compiler.disable would import the compiler, which takes seconds, together with megabatch; this one, which torch.optim
    # uses, waits for the first call.
    return cast(Loss, _disable_dynamo(loss))


def outside_autocast(computation: Loss) -> Loss:
    """A computation on x (its first argument) and others in the dtypes that they have, whatever autocast is in force."""

    @functools.wraps(computation)
    def call(x: Tensor, *args: Any, **options: Any) -> Any:
        if not torch.is_autocast_enabled(x.device.type):
            return computation(x, *args, **options)
        with torch.autocast(x.device.type, enabled=False):
            return computation(x, *args, **options)

    return cast(Loss, call)


def save(ctx: Any, **inputs: Tensor) -> None:
    """Save the differentiable inputs for backward, where `saved` returns them."""
    ctx.save_for_backward(*inputs.values())
    # These name the input that was modified, if one was.
    ctx.versions = {name: (_reference(t), t._version) for name, t in inputs.items()}


def saved(ctx: Any) -> tuple[Tensor, ...]:
    """Return the saved inputs; raise an error that names the one that was modified in place since forward."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        # Not where the graph has been freed: after a step of the optimizer, versions differ there too.
        changes = ctx.versions.items() if "inplace operation" in str(error) else ()
        for name, (reference, version) in changes:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                raise modified(name) from error
        raise


def _reference(t: Tensor) -> Callable[[], Tensor | None]:
    """A reference that shares t's version counter: weak for embeddings, so that hooks on saved tensors can free their memory."""
    if t.ndim:
        return weakref.ref(t)
    # A scalar is a view of what the caller passed, and nothing else may hold that view.
    scalar = t.detach()
    return lambda: scalar


def modified(name: str) -> RuntimeError:
    """The error for an input whose values at forward are gone."""
    return RuntimeError(
        f"{name} has been modified by an inplace operation between the forward and the backward pass of the loss, whose gradient "
        f"needs the values that forward saw: modify it after backward, or pass {name}.clone() to the loss"
    )


def first_derivative_only(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A backward pass whose gradients raise a clear error when they are differentiated again.

    The Function must save its differentiable inputs: only what hangs on them is reached by a second differentiation.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if any(isinstance(g, Tensor) and is_transformed(g) for g in grads):
            raise RuntimeError(
                "the backward pass of megabatch's losses takes one plain gradient, not a batch of them (is_grads_batched, vmap, a "
                "vectorized Jacobian) nor a dual tensor: call it once for each, or use the formula in megabatch.reference"
            )
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        tensors = [t for t in results if isinstance(t, Tensor)]
        sealed = iter(_NoSecondDerivative.apply(len(tensors), *tensors, *ctx.saved_tensors, *grads))
        return tuple(next(sealed) if isinstance(t, Tensor) else t for t in results)

    return once


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Any) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "megabatch's losses have first derivatives only, and this asks for a second one (a gradient penalty, a Hessian): "
            "use the formula in megabatch.reference for that, at a batch whose matrix fits"
        )


class Finished(NamedTuple):
    """The gradients in x and y, as they leave backward; the gradient in the scale; and what a slope is to be multiplied with."""

    dx: Tensor | None
    dy: Tensor | None
    dscale: Tensor
    factor: Tensor


@outside_autocast
def finish(
    x: Tensor,
    y: Tensor,
    scale: Tensor,
    batch: Batch,
    dpos_M: Tensor,
    share: Tensor | float,
    g: Tensor,
    products: list[Tensor | None],
    *,
    reuse: bool,
) -> Finished:
    """The last step of backward: the positives' part, the scale, the mean's share and the gradient that comes down are put in.

    dpos_M: the gradient in the logit of each row's positive; products: gx_MD and gy_ND, which go as they are used up if `reuse`.
    """
    # The ranks hold one loss: its gradient takes what every rank's graph sends down, and all share one gradient in the scale.
    g = batch.ring.sum(g.to(batch.acc, copy=batch.ring.size > 1)) * share
    factor = g * scale
    gradients: list[Tensor | None] = [None, None]
    slopes = None
    for side, (mine, partners) in enumerate(((x, y), (y, x))):
        product = products[side]
        if product is None:
            continue
        finished = product if reuse and product.dtype == mine.dtype else torch.empty_like(product, dtype=mine.dtype)
        found = batch.tiles.finish(product, batch.read(mine), batch.read(partners), dpos_M, factor, finished)
        slopes = found if slopes is None else slopes
        gradients[side] = finished
        if reuse:
            product = products[side] = None
    assert slopes is not None
    slope = batch.ring.sum(slopes.sum())
    g = g if batch.ring.size == 1 else g / batch.ring.size
    return Finished(gradients[0], gradients[1], slope * g, g)
