"""What the losses share towards autograd and the compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

Loss = TypeVar("Loss", bound=Callable[..., Any])


def outside_graphs(loss: Loss) -> Loss:
    """The loss as one clean graph break under torch.compile, which would otherwise unroll its tiles into the graph."""
    # torch.compiler.disable would import the compiler, which takes seconds, together with megabatch; this one, which torch.optim
    # uses, waits for the first call.
    return cast(Loss, _disable_dynamo(loss))


def outside_autocast(computation: Loss) -> Loss:
    """A computation on x (its first argument) and others in the dtypes that they have, whatever autocast is in force."""

    @functools.wraps(computation)
    def call(x: Tensor, *args: Any) -> Any:
        if not torch.is_autocast_enabled(x.device.type):
            return computation(x, *args)
        with torch.autocast(x.device.type, enabled=False):
            return computation(x, *args)

    return cast(Loss, call)


def first_derivative_only(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A backward pass whose gradients raise a clear error when they are differentiated again.

    The Function must save its differentiable inputs: only what hangs on them is reached by a second differentiation.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> tuple[Any, ...]:
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


def add_positives(x_MD: Tensor, y_ND: Tensor, own_M: Tensor, gx_MD: Tensor | None, gy_ND: Tensor | None) -> Tensor:
    """Adds the positives' part to gx_MD and gy_ND in place; returns the sum of g·z over all pairs, the gradient in the scale.

    own_M: the gradient in the logit of each row's positive. The sum is that over rows of x·gx or, without gx, of y·gy.
    """
    slope = own_M.new_zeros(())
    # Piece by piece: in fp32, whole copies of reduced-precision embeddings would cost as much as the gradients.
    for start in range(0, len(y_ND), 4096):
        piece = slice(start, start + 4096)
        x, y, own = x_MD[piece].to(own_M.dtype), y_ND[piece].to(own_M.dtype), own_M[piece, None]
        if gx_MD is not None:
            gx_MD[piece].addcmul_(own, y[: len(x)])
            slope += (x * gx_MD[piece]).sum()
        if gy_ND is not None:
            gy_ND[piece][: len(x)].addcmul_(own, x)
            if gx_MD is None:
                slope += (y * gy_ND[piece]).sum()
    return slope
