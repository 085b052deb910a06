"""Memory that CUDA's kernels take while they run, which no tensor of PyTorch shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

MIB = 2**20
aten = torch.ops.aten


class Scratch:
    """The bytes that an operation takes beyond its results, while it runs; and those that libraries hold from the first use on.

    What is assumed of cuBLAS: a workspace for the thread of forward and one for that of backward. Of cuDNN: where a convolution's
    operands lie with channels first, input and output are laid out anew for it.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability
        self._rules: dict[Any, Callable[[Any, Any], float]] = {
            aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
            aten._scaled_dot_product_cudnn_attention_backward.default: _flash_backward,
            aten.convolution.default: _convolution,
            aten.convolution_backward.default: _convolution_backward,
            aten.embedding_dense_backward.default: _sorted_indices,
        }

    @property
    def blas_bytes(self) -> int:
        """Of one workspace: at::cuda::getChosenWorkspaceSize gives Hopper 32 MiB, others two of 4 MiB and eight of 16 KiB."""
        return 32 * MIB if self.capability[0] == 9 else 8 * MIB + 128 * 1024

    def of(self, func: Any, args: Any, out: Any) -> Iterator[int]:
        rule = self._rules.get(func)
        size = int(rule(args, out)) if rule else 0
        if size:
            yield size


def _flash_backward(args: Any, out: Any) -> float:
    # dq is summed up in fp32, and each row's product of output and gradient is kept, for lengths rounded up to 128.
    rows, heads, length, width = args[1].shape
    return rows * heads * (-(-length // 128) * 128) * (-(-width // 32) * 32 + 1) * 4


def _convolution(args: Any, out: Any) -> float:
    return _laid_out_anew(args[0], args[1], out, groups=args[8])


def _convolution_backward(args: Any, out: Any) -> float:
    return _laid_out_anew(args[1], args[2], args[0], groups=args[9])


def _laid_out_anew(inputs: Tensor, weight: Tensor, outputs: Tensor, groups: int) -> float:
    channels_first = inputs.ndim != 4 or not inputs.is_contiguous(memory_format=torch.channels_last)
    if not channels_first or groups == inputs.shape[1] > 1:
        return 0
    return sum(math.prod(t.shape) * t.element_size() for t in (inputs, outputs))


def _sorted_indices(args: Any, out: Any) -> float:
    # Indices and places, sorted into new ones.
    return 4.0 * args[1].numel() * args[1].element_size()
