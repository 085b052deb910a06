"""How a loss is part of PyTorch: the Module, saved tensors and derivatives in autograd, torch.compile and autocast."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from .batch import Diagnostics, LossBatch
from .checks import is_transformed

Call = TypeVar("Call", bound=Callable[..., Any])
LossResult = TypeVar("LossResult", Tensor, tuple[Tensor, Diagnostics])

# Keyword arguments of a loss that come with each batch; a Module stores all others.
WITH_EACH_BATCH = ("ids", "weights", "x_mask", "y_mask", "negatives_of", "guide", "queue")


class LossModule(nn.Module, Generic[LossResult]):
    """A loss as a Module: it stores the options of the function `loss`, and calls it with the inputs of each batch.

    The signature of the constructor is that of the function's options.
    """

    loss: ClassVar[Callable[..., Any]]
    # nn.Module declares Callable[..., Any]; this one says what forward returns.
    __call__: Callable[..., LossResult]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        parameters = inspect.signature(cls.loss).parameters.values()
        options = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in WITH_EACH_BATCH]
        # For help(), inspect and completion in a notebook.
        cls.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        known = list(inspect.signature(type(self)).parameters)
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TypeError(
                f"unknown options {unknown}: must be among {known}; ids, weights and other tensors are passed with each batch"
            )
        self.options = options

    def forward(self, *inputs: Any, **with_batch: Any) -> LossResult:
        if not with_batch.keys() <= set(WITH_EACH_BATCH):
            stored = sorted(set(with_batch) - set(WITH_EACH_BATCH))
            raise TypeError(
                f"{stored} with a batch: only {WITH_EACH_BATCH} are passed with each batch; pass options to the constructor"
            )
        return self.loss(*inputs, **with_batch, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


def outside_graphs(call: Call) -> Call:
    """Make a function one clean graph break under torch.compile, which would otherwise unroll its tiles into the graph."""
    # torch.compiler.disable would import the compiler together with megabatch, which takes seconds; this decorator, which
    # torch.optim uses, imports it at the first call.
    return cast(Call, _disable_dynamo(call))


def outside_autocast(computation: Call) -> Call:
    """Disable autocast in a computation whose first argument is a tensor: its inputs have the right dtypes already."""

    @functools.wraps(computation)
    def call(x: Tensor, *args: Any, **options: Any) -> Any:
        if not torch.is_autocast_enabled(x.device.type):
            return computation(x, *args, **options)
        with torch.autocast(x.device.type, enabled=False):
            return computation(x, *args, **options)

    return cast(Call, call)


def save(ctx: Any, **inputs: Tensor) -> None:
    """Save the differentiable inputs for backward, where `saved` returns them."""
    ctx.save_for_backward(*inputs.values())
    # To name the input that was modified, if one was. Weak references to embeddings, so that saved-tensor hooks can free their
    # memory. A scalar may be a view of the caller's tensor that nothing else holds.
    ctx.versions = [(name, weakref.ref(t) if t.ndim else t, t._version) for name, t in inputs.items()]


def saved(ctx: Any) -> tuple[Tensor, ...]:
    """Return the saved inputs; raise an error that names the one that was modified in place since forward."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        # Not if the graph has been freed: after a step of the optimizer, versions differ in that case too.
        changes = ctx.versions if "inplace operation" in str(error) else ()
        for name, reference, version in changes:
            tensor = reference() if isinstance(reference, weakref.ref) else reference
            if tensor is not None and tensor._version != version:
                raise modified(name) from error
        raise


def modified(name: str) -> RuntimeError:
    """Return the error for an input whose values at forward are lost."""
    return RuntimeError(
        f"{name} has been modified by an inplace operation between the forward and the backward pass of the loss, whose gradient "
        f"needs the values of forward: modify it after backward, or pass {name}.clone() to the loss"
    )


def second_derivative() -> RuntimeError:
    """Return the error for a gradient that is differentiated again."""
    return RuntimeError(
        "megabatch's losses have first derivatives only, and this asks for a second one (a gradient penalty, a Hessian): "
        "use the formula in megabatch.reference for that, at a batch whose matrix fits"
    )


def first_derivative_only(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Make the gradients of a backward pass raise a clear error if they are differentiated again.

    The Function must save its differentiable inputs: a second differentiation reaches only what depends on them.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if any([isinstance(g, Tensor) and is_transformed(g) for g in grads]):
            raise RuntimeError(
                "the backward pass of megabatch's losses takes one plain gradient, not a batch of them (is_grads_batched, vmap, a "
                "vectorized Jacobian) nor a dual tensor: call it once for each, or use the formula in megabatch.reference"
            )
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
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
        raise second_derivative()


class PartialGradients(NamedTuple):
    """The gradient before the last step of backward.

    products: gx_MD and gy_ND of the negatives, None where not needed.
    dpos_M: the gradient in the logit of each row's positive.
    share: the factor of the mean, by which all of it is still to be multiplied.
    """

    products: list[Tensor | None]
    dpos_M: Tensor
    share: Tensor | float


class Gradients(NamedTuple):
    """The gradients of x, y and the scale as backward returns them, and the factor for a gradient in the bias."""

    dx: Tensor | None
    dy: Tensor | None
    dscale: Tensor
    factor: Tensor


@outside_autocast
def finish(
    g: Tensor, x: Tensor, y: Tensor, scale: Tensor, batch: LossBatch, partial: PartialGradients, *, reuse: bool
) -> Gradients:
    """Return the final gradients: add the part of the positives, and multiply by the scale, the mean's share and g.

    g: the incoming gradient. reuse: whether the products may be overwritten, and freed once they are used.
    """
    # The ranks hold one loss: its gradient takes the sum of the gradients that come in on all ranks, and the scale's is shared.
    g = batch.ring.sum(g.to(batch.acc, copy=batch.ring.size > 1)) * partial.share
    factor = g * scale
    products = partial.products
    gradients: list[Tensor | None] = [None, None]
    slopes = None
    for side, (embeddings, partners) in enumerate(((x, y), (y, x))):
        product = products[side]
        if product is None:
            continue
        in_place = reuse and product.dtype == embeddings.dtype
        finished = product if in_place else torch.empty_like(product, dtype=embeddings.dtype)
        side_slopes = batch.tiles.finish(product, batch.read(embeddings), batch.read(partners), partial.dpos_M, factor, finished)
        slopes = side_slopes if slopes is None else slopes
        gradients[side] = finished
        if reuse:
            product = products[side] = None
    assert slopes is not None
    slope = batch.ring.sum(slopes.sum())
    g = g if batch.ring.size == 1 else g / batch.ring.size
    return Gradients(gradients[0], gradients[1], slope * g, g)
