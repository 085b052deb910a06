"""Memory that CUDA's kernels take while they run, which no tensor of PyTorch shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .convolution import forward_bytes, weight_gradient_bytes
from .reduction import reduction_bytes

MIB = 2**20
aten = torch.ops.aten
# at::cuda's parseCUDABlasLtWorkspaceSize, for products with a bias.
BLAS_LT_BYTES = MIB
# ATen/native/cuda/Embedding.cu: so few indices are not sorted; of more, each thread sums up so many rows.
UNSORTED, ROWS_A_THREAD = 3072, 10


class Scratch:
    """The bytes that an operation takes beyond its results, while it runs; and those that libraries hold from the first use on.

    What is assumed of cuBLAS: a workspace for the thread of forward and one for that of backward.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability
        self._rules: dict[Any, Callable[[Any, Any], Iterator[int]]] = {
            aten._scaled_dot_product_flash_attention_backward.default: self._attention_backward,
            aten.convolution.default: self._convolution,
            aten.convolution_backward.default: self._convolution_backward,
            aten.embedding_dense_backward.default: self._embedding_backward,
            aten.sum.dim_IntList: self._sum,
            aten.mean.dim: self._sum,
        }

    @property
    def blas_bytes(self) -> int:
        """Of one workspace: at::cuda::getChosenWorkspaceSize gives Hopper 32 MiB, others two of 4 MiB and eight of 16 KiB."""
        return 32 * MIB if self.capability[0] == 9 else 8 * MIB + 128 * 1024

    def lasting(self) -> list[int]:
        """What the libraries hold: cuBLAS for forward's thread and for backward's, cuBLASLt."""
        return [self.blas_bytes, self.blas_bytes, BLAS_LT_BYTES]

    def of(self, func: Any, args: Any, out: Any) -> list[int]:
        """The bytes that an operation takes when its results are there: of the last results, one number each."""
        return list(self._rules[func](args, out)) if func in self._rules else []

    def _sum(self, args: Any, out: Any) -> Iterator[int]:
        yield reduction_bytes(args[0], args[1], self.capability)

    def _attention_backward(self, args: Any, out: Any) -> Iterator[int]:
        """The query's gradient is summed up in fp32, and each row's product of output and gradient is kept."""
        rows, heads, length, width = args[1].shape
        # Where torch prefers cuDNN's kernel (check_prefer_cudnn_attention); the other one rounds up.
        if self.capability not in ((9, 0), (10, 0)) or width > 128:
            length, width = -(-length // 128) * 128, -(-width // 32) * 32
        yield rows * heads * length * (width + 1) * 4

    def _convolution(self, args: Any, out: Any) -> Iterator[int]:
        yield forward_bytes(args[0], args[1], out, args[3], args[8])

    def _convolution_backward(self, args: Any, out: Any) -> Iterator[int]:
        gradient, inputs, weight, stride, groups = args[0], args[1], args[2], args[4], args[9]
        of_inputs, of_weight, of_bias = args[10]
        yield forward_bytes(inputs, weight, gradient, stride, groups) if of_inputs else 0
        yield weight_gradient_bytes(inputs, weight, gradient, stride, groups) if of_weight else 0
        yield reduction_bytes(gradient, [0, *range(2, gradient.ndim)], self.capability) if of_bias else 0

    def _embedding_backward(self, args: Any, out: Any) -> Iterator[int]:
        """Indices and places, sorted into new ones, and the sums over parts of the rows that have one index."""
        gradient, indices, count = args[0], args[1], args[2]
        if indices.numel() > UNSORTED:
            sums = indices.numel() // ROWS_A_THREAD + min(indices.numel(), count)
            yield 4 * indices.numel() * indices.element_size() + sums * -(-gradient.shape[-1] // 32) * 32 * 4
