"""An AdamW step of stacked runs with a rate for each, in one kernel and one pass over the weights."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from benchmarks.study import stack

BLOCK = 1024


@triton.jit
def _adamw(
    weight_ptr, gradient_ptr, mean_ptr, square_ptr, rates_ptr, now_ptr, n, decay,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPSILON: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    # A stack can have more than 2^31 weights.
    at = run.to(tl.int64) * n + column
    rate = tl.load(rates_ptr + run) * tl.load(now_ptr)
    gradient = tl.load(gradient_ptr + at, mask=inside, other=0.0)
    mean = tl.load(mean_ptr + at, mask=inside, other=0.0)
    mean += (gradient - mean) * (1 - BETA1)
    square = tl.load(square_ptr + at, mask=inside, other=0.0)
    square += (gradient * gradient - square) * (1 - BETA2)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    step = mean * tl.load(now_ptr + 1) / (tl.sqrt(square * tl.load(now_ptr + 2)) + EPSILON)
    tl.store(weight_ptr + at, weight * (1 - rate * decay) - rate * step, mask=inside)
    tl.store(mean_ptr + at, mean, mask=inside)
    tl.store(square_ptr + at, square, mask=inside)


def launch(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, rates: Tensor, now: Tensor, decay: float) -> None:
    """Take the step of `stack.update` in place. All of weight's shape are contiguous."""
    runs, n = len(weight), weight[0].numel()
    _adamw[(triton.cdiv(n, BLOCK), runs)](
        weight, gradient, mean, square, rates, now, n, decay,
        BETA1=stack.BETAS[0], BETA2=stack.BETAS[1], EPSILON=stack.EPSILON, BLOCK=BLOCK,
    )  # fmt: skip
