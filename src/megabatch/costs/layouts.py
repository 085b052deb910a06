"""How tensors lie in memory, as far as it slows kernels down: they are fast along one line of memory that all operands share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def alike(tensors: Iterable[Tensor], out: Tensor) -> bool:
    """Whether all of them, numbers aside, are gone through in one line beside the output, without a gap or a repetition."""
    place = _place(out)
    dense = out.numel() == 1 + sum((size - 1) * stride for size, stride in place)
    return dense and all(t.shape == out.shape and _place(t) == place for t in tensors if t.numel() > 1)


def spread(tensors: Iterable[Tensor], out: Tensor) -> bool:
    """Whether each can be spread over the output's shape, as operands of elementwise operations can."""
    return all(
        t.ndim <= out.ndim and all(a in (1, b) for a, b in zip(reversed(t.shape), reversed(out.shape), strict=False))
        for t in tensors
    )


def turned(tensor: Tensor, out: Tensor) -> bool:
    """Whether neighbours in one are none in the other: a transposition."""
    return tensor.shape == out.shape and tensor.numel() > 1 and _neighbours(tensor) != _neighbours(out)


def channels_last(tensor: Tensor) -> bool:
    """Whether a picture's channels are neighbours, as they are not by default."""
    return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _place(tensor: Tensor) -> list[tuple[int, int]]:
    return [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _neighbours(tensor: Tensor) -> int:
    """The dimension along which elements are next to each other."""
    sized = [dim for dim, size in enumerate(tensor.shape) if size != 1]
    return min(sized, key=lambda dim: (tensor.stride(dim), -dim))
