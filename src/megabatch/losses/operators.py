"""The losses as operators of torch.library: torch.compile sees one operator and does not break the graph.

An operator returns the loss together with its gradients for an incoming gradient of one, in the dtype of sums, so that backward is
a few multiplications, which a compiler fuses with what follows. In eager mode the losses do not use the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tiles.contract import NeedsGrad, accumulator
from .autograd import second_derivative
from .batch import Execution, Inputs, LossBatch, Rules, prepare
from .checks import product_dtype
from .one_piece import OnePieceCall, OnePieceLoss, compute

# Devices whose losses torch.compile sees as operators. On all others a loss breaks the graph: the operators have run on these only.
OPERATOR_DEVICES = {"cpu", "cuda"}

INPUTS = "Tensor x, Tensor y, Tensor scale, Tensor? bias, Tensor? ids, Tensor? weights, bool[] needs_grad, ScalarType? autocast"
EXECUTION = "bool alone, bool equal_shards, str? backend, SymInt? workspace, str precision, bool int8_backward"


class ValueAndGradients(NamedTuple):
    """The loss, and the gradients of x, y, the scale and the bias; those that are not needed are None."""

    loss: Tensor
    dx: Tensor | None
    dy: Tensor | None
    dscale: Tensor | None
    dbias: Tensor | None


def in_one_piece(x: Tensor, y: Tensor, call: OnePieceCall, loss: OnePieceLoss) -> ValueAndGradients:
    """Return a loss in one piece and its gradients for an incoming gradient of one."""
    result = compute(x, y, call, loss)
    if call.needs_grad is None:
        return ValueAndGradients(result.loss, None, None, None, None)
    scale, *bias = call.scalars
    acc = accumulator(call.dtype)
    needs = *call.needs_grad, True, *(True for _ in bias)
    return ValueAndGradients(result.loss, *call.tiles.finish(result.gradients, None, scale, (acc, acc), needs))


# From x, y, the scalars as the tiles read them, the batch and the loss's rules.
Compute = Callable[[Tensor, Tensor, Tensor, Tensor | None, LossBatch, Any], ValueAndGradients]


def declare(name: str, rules: Callable[..., Rules], options: str, compute: Compute) -> Callable[..., Tensor]:
    """Register an operator and return the loss that calls it.

    rules: makes the loss's rules from `options`, which are declared in the language of PyTorch's schemas.
    The returned function takes x, y, scale, bias, ids, weights, the options, and the fields of an `Execution`.
    """
    count = len(options.split(","))
    outputs = "(Tensor loss, Tensor dx, Tensor dy, Tensor dscale, Tensor dbias)"
    schema = f"({INPUTS}, {options}, {EXECUTION}) -> {outputs}"

    def run(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor | None, ids: Any, weights: Any, *more: Any) -> tuple[Tensor, ...]:
        needs_grad, autocast, *fields = more
        alone, *how = fields[count:]
        scalars = {"scale": scale} if bias is None else {"scale": scale, "bias": bias}
        with torch.no_grad(), torch.autocast(x.device.type, dtype=autocast or x.dtype, enabled=autocast is not None):
            made = rules(*fields[:count])
            batch = prepare(Inputs(x, y, scalars, ids, weights), made, Execution(None if alone else ..., *how))
            if any(needs_grad):
                batch = replace(batch, needs_grad=NeedsGrad(needs_grad[0] or not needs_grad[1], needs_grad[1]))
            tensors = [batch.scalar(value, x).detach() for value in scalars.values()]
            result = compute(x.detach(), y.detach(), tensors[0], tensors[1] if bias is not None else None, batch, made)
        gradients = zip(result[1:], needs_grad, strict=True)
        nothing = [x.new_empty(0, dtype=batch.acc) for _ in needs_grad]
        return result.loss, *(g if need and g is not None else n for (g, need), n in zip(gradients, nothing, strict=True))

    operator = torch.library.custom_op(f"megabatch::{name}", run, mutates_args=(), schema=schema)

    @operator.register_fake
    def _(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor | None, ids: Any, weights: Any, *more: Any) -> tuple[Tensor, ...]:
        needs_grad, autocast = more[:2]
        acc = accumulator(x.dtype if autocast is None else autocast)
        shapes = (x.shape, y.shape, (), ())
        return x.new_empty((), dtype=acc), *(
            x.new_empty(shape if need else (0,), dtype=acc) for shape, need in zip(shapes, needs_grad, strict=True)
        )

    operator.register_autograd(_backward, setup_context=_setup_context)

    def call(x: Tensor, y: Tensor, scale: Any, bias: Any, ids: Any, weights: Any, *fields: Any) -> Tensor:
        scale, bias = (_as_tensor(value, x) for value in (scale, bias))
        inputs = (x, y, scale, bias)
        needs_grad = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs]
        autocast = product_dtype(x) if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64 else None
        return operator(*inputs, ids, weights, needs_grad, autocast, *fields)[0]

    return call


def _as_tensor(value: Tensor | float | None, x: Tensor) -> Tensor | None:
    """Return a scalar as a tensor. A number keeps its digits: `run` rounds it as the loss itself does."""
    if value is None or isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=torch.float64, device=x.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.like = [None if t is None else (t.dtype, t.shape) for t in inputs[:4]]
    ctx.needs = inputs[6]
    ctx.count = len(inputs)
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, g: Tensor, *further: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(t is not None for t in further):
        raise second_derivative()
    gradients = [
        (each * g).to(like[0]).reshape(like[1]) if need else None
        for each, like, need in zip(ctx.saved_tensors, ctx.like, ctx.needs, strict=True)
    ]
    return *gradients, *[None] * (ctx.count - len(gradients))


def is_operator_call(x: object, group: object, diagnostics: object) -> bool:
    """Return whether a call inside a compiled function can be an operator."""
    alone = group is None or group is ...
    return alone and diagnostics is False and isinstance(x, Tensor) and x.device.type in OPERATOR_DEVICES
