"""Several ranks against one process: ragged shards of a batch, and value and gradients of a loss of any signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Rows of each rank, for worlds of one to three ranks. A rank may have none.
SHARDS = {1: [9], 2: [6, 3], 3: [5, 0, 4]}


def pieces(t: Tensor, size: int) -> list[Tensor]:
    """Return each rank's rows of a batch of nine rows."""
    return list(t.split(SHARDS[size][:size]))


def gradients(loss: Callable[..., Tensor], tensors: Sequence[Tensor], grad: Tensor | float = 1.0) -> tuple[Tensor, list[Tensor]]:
    """Return the value of loss(*tensors) and the gradient in each tensor."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    value = loss(*leaves)
    value.backward(torch.as_tensor(grad, dtype=value.dtype))
    return value.detach(), [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-10) -> None:
    """Assert that tensors agree, each relative to its own size and to one."""
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        error = (a - b).norm() / (1 + b.norm())
        assert error < tolerance, (index, error.item())
