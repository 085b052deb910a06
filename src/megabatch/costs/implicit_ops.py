"""What kernels call of their own, where a count of PyTorch's operations does not see it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .layouts import turned
from .op_classes import Kind, filling_of, tensors_of

# Of these kinds, kernels read contiguous tensors alone: of others they make a copy first.
IN_ORDER = ("normalisation", "narrow normalisation", "softmax")


def hidden_of(operator: str, kind: Kind, args: Any, out: Any) -> Iterator[tuple[Kind, float, float]]:
    """Kinds, bytes and filling (`kinds.filling_of`) of copies into order, of sums with a convolution's bias and of its gradient."""
    if kind in IN_ORDER:
        for tensor in tensors_of(args):
            if not tensor.is_contiguous():
                yield _copied(tensor)
    if "convolution" not in operator or kind in ("depthwise convolution", "depthwise gradient"):
        return
    if "backward" in operator:
        if args[10][2]:
            yield "reduction", _bytes(args[0]), 1.0
    elif args[2] is not None:
        yield "strided", 2 * _bytes(out), filling_of("strided", out, ())


def _copied(tensor: Tensor) -> tuple[Kind, float, float]:
    kind: Kind = "transposition" if turned(tensor, tensor.new_empty(tensor.shape)) else "strided"
    return kind, 2 * _bytes(tensor), filling_of(kind, tensor, ())


def _bytes(tensor: Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())
