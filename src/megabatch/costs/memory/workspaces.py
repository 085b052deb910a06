"""Memory that CUDA's kernels allocate while they run, which no tensor of PyTorch shows: cuBLAS, cuDNN, attention, reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

MIB = 2**20
FP32_BYTES = 4
aten = torch.ops.aten
# Workspace of cuBLASLt, for matrix products with a bias: at::cuda's parseCUDABlasLtWorkspaceSize.
CUBLASLT_BYTES = MIB
# ATen/native/cuda/Embedding.cu: up to this many indices are not sorted; with more, each thread sums this many rows.
UNSORTED_INDICES, ROWS_PER_THREAD = 3072, 10


class KernelWorkspaces:
    """Workspaces by operation, and those that libraries keep from their first use on.

    Assumed of cuBLAS: one workspace for the thread of forward and one for the thread of backward.
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
    def cublas_bytes(self) -> int:
        """Bytes of one cuBLAS workspace.

        at::cuda::getChosenWorkspaceSize: 32 MiB on Hopper, elsewhere two buffers of 4 MiB and eight of 16 KiB.
        """
        return 32 * MIB if self.capability[0] == 9 else 8 * MIB + 128 * 1024

    def persistent(self) -> list[int]:
        """Return the bytes of the workspaces that libraries keep: cuBLAS in forward's thread and in backward's, cuBLASLt."""
        return [self.cublas_bytes, self.cublas_bytes, CUBLASLT_BYTES]

    def of(self, func: Any, args: Any, out: Any) -> list[int]:
        """Return the bytes that an operation allocates besides its results, one number for each of its last results."""
        return list(self._rules[func](args, out)) if func in self._rules else []

    def _sum(self, args: Any, out: Any) -> Iterator[int]:
        yield reduction_bytes(args[0], args[1], self.capability)

    def _attention_backward(self, args: Any, out: Any) -> Iterator[int]:
        """The query's gradient is accumulated in fp32, and the dot product of output and gradient is kept for each row."""
        rows, heads, length, width = args[1].shape
        # Where torch prefers cuDNN's kernel (check_prefer_cudnn_attention), sizes are exact; the flash kernel rounds them up.
        if self.capability not in ((9, 0), (10, 0)) or width > 128:
            length, width = -(-length // 128) * 128, -(-width // 32) * 32
        yield rows * heads * length * (width + 1) * 4

    def _convolution(self, args: Any, out: Any) -> Iterator[int]:
        yield convolution_bytes(args[0], args[1], out, args[3], args[8])

    def _convolution_backward(self, args: Any, out: Any) -> Iterator[int]:
        gradient, inputs, weight, stride, groups = args[0], args[1], args[2], args[4], args[9]
        for_inputs, for_weight, for_bias = args[10]
        yield convolution_bytes(inputs, weight, gradient, stride, groups) if for_inputs else 0
        yield weight_gradient_bytes(inputs, weight, gradient, stride, groups) if for_weight else 0
        yield reduction_bytes(gradient, [0, *range(2, gradient.ndim)], self.capability) if for_bias else 0

    def _embedding_backward(self, args: Any, out: Any) -> Iterator[int]:
        """Indices and positions, copied and sorted, and partial sums over the rows that share an index."""
        gradient, indices, count = args[0], args[1], args[2]
        if indices.numel() > UNSORTED_INDICES:
            sums = indices.numel() // ROWS_PER_THREAD + min(indices.numel(), count)
            yield 4 * indices.numel() * indices.element_size() + sums * -(-gradient.shape[-1] // 32) * 32 * 4


# Convolutions. cuDNN's kernels read channels-last tensors: from channels-first ones it makes copies of input, output and weights,
# with the channels of half precision padded to a multiple of 8. A 1×1 convolution is a matrix product in any layout; the gradient
# of its weights is a sum over the batch of one product per sample, each kept in fp32. The gradients of other weights are sums of a
# few partial results. A kernel as large as the image makes one matrix product of the batch. cuDNN does not document what its
# heuristics select: these algorithms and sizes were observed on an H200 (cuDNN 9).

HALF_CHANNELS = 8
# A matrix product reads rows of pixels in place if they begin at multiples of this many elements.
ALIGNED_PIXELS = 4
# Partial results of a weight's gradient, in fp32: at most this many, and within this many bytes.
MOST_PARTIALS, PARTIALS_BYTES = 16, 8 * 2**20


def convolution_bytes(inputs: Tensor, weight: Tensor, outputs: Tensor, stride: Sequence[int], groups: int) -> int:
    """Return cuDNN's workspace for the forward, or for the gradient of the input."""
    if not _needs_copies(inputs, outputs, groups) or _is_matrix_product(inputs, weight, stride, groups):
        return 0
    return _channels_last_bytes(inputs, weight, outputs)


def weight_gradient_bytes(inputs: Tensor, weight: Tensor, outputs: Tensor, stride: Sequence[int], groups: int) -> int:
    """Return cuDNN's workspace for the gradient of the weights."""
    if not _needs_copies(inputs, outputs, groups):
        return 0
    size = FP32_BYTES * weight.numel()
    with_copies = _channels_last_bytes(inputs, weight, outputs) + size * min(MOST_PARTIALS, PARTIALS_BYTES // size)
    return min(len(inputs) * size, with_copies) if _is_matrix_product(inputs, weight, stride, groups) else with_copies


def _needs_copies(inputs: Tensor, outputs: Tensor, groups: int) -> bool:
    """False for channels-last inputs, for outputs of one pixel, and for depthwise convolutions, which have kernels in PyTorch."""
    channels_last = inputs.ndim == 4 and inputs.is_contiguous(memory_format=torch.channels_last)
    return not channels_last and math.prod(outputs.shape[2:]) > 1 and not groups == inputs.shape[1] > 1


def _is_matrix_product(inputs: Tensor, weight: Tensor, stride: Sequence[int], groups: int) -> bool:
    pointwise = math.prod(weight.shape[2:]) == 1 and all(step == 1 for step in stride) and groups == 1
    return pointwise and math.prod(inputs.shape[2:]) % ALIGNED_PIXELS == 0


def _channels_last_bytes(inputs: Tensor, weight: Tensor, outputs: Tensor) -> int:
    sizes = [_padded_bytes(inputs), _padded_bytes(outputs)]
    # A 1×1 kernel has the same memory in both layouts.
    return sum([*sizes, _padded_bytes(weight)] if math.prod(weight.shape[2:]) > 1 else sizes)


def _padded_bytes(tensor: Tensor) -> int:
    channels = tensor.shape[1]
    padded = channels if tensor.element_size() == FP32_BYTES else -(-channels // HALF_CHANNELS) * HALF_CHANNELS
    return tensor.numel() // channels * padded * tensor.element_size()


# Reductions. Several thread blocks that share an output write partial sums, which the last block adds up. The launch follows
# setReduceConfig in ATen/native/cuda/Reduce.cuh. A sum over rows, such as a bias's gradient, takes one accumulator for every
# thread, output and block: for many rows as much memory as the summed tensor.

WARP, MAX_THREADS, VECTOR = 32, 512, 4
# Values per thread: from the second number on, several blocks share an output; each thread then has at least the first number.
FEW_VALUES, MANY_VALUES = 16, 256
ACCUMULATOR_BYTES = 4
# CUDA programming guide, technical specifications by compute capability: resident threads per multiprocessor, where not 2,048.
RESIDENT_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
# Of the largest common device: V100, T4, A100, RTX 3090, L40S, H100 and H200, B200, RTX 5090.
MULTIPROCESSORS = {(7, 0): 80, (7, 5): 40, (8, 0): 108, (8, 6): 82, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 170}


class Span(NamedTuple):
    """One dimension, or several that are contiguous: the stride and the number of its elements."""

    stride: int
    size: int


@dataclass(frozen=True)
class ReductionLaunch:
    """How thread blocks of width × height share a reduction.

    along: whether the block's width lies along the reduced dimension, because that is densest in memory; otherwise it lies across
    the outputs, `vector` of them per thread. shares_height: whether the block's height shares the sum too. values: what is left
    for each thread to add up.
    """

    width: int
    height: int
    vector: int
    along: bool
    values: int
    shares_height: bool

    def blocks_per_output(self, outputs: int, capability: tuple[int, int]) -> int:
        """Return how many blocks share an output: more than one if blocks are few and each thread would add up many values."""
        threads = self.width * self.height
        resident = MULTIPROCESSORS.get(capability, 132) * (RESIDENT_THREADS.get(capability, 2048) // threads)
        step = (1 if self.along else self.width) * (1 if self.shares_height else self.height)
        grid = -(-(outputs // self.vector) // step)
        if not self.shares_height or self.values < MANY_VALUES or grid > resident:
            return 1
        return max(min(-(-resident // grid), -(-self.values // FEW_VALUES)), -(-self.values // MANY_VALUES))


def reduction_bytes(tensor: Tensor, dims: Sequence[int] | None, capability: tuple[int, int]) -> int:
    """Return the bytes of partial sums while `tensor` is summed over `dims` (None: all)."""
    if not tensor.numel() or not tensor.ndim:
        return 0
    over = {dim % tensor.ndim for dim in dims} if dims else set(range(tensor.ndim))
    spans = [(dim in over, Span(*span)) for dim, span in enumerate(zip(tensor.stride(), tensor.shape, strict=True))]
    reduced, kept = (_merged([span for inside, span in spans if inside == wanted and span.size > 1]) for wanted in (True, False))
    outputs = math.prod(span.size for span in kept)
    launch = _reduction_launch(reduced, kept, tensor.numel() // outputs, outputs)
    blocks = launch.blocks_per_output(outputs, capability)
    if blocks == 1:
        return 0
    return ACCUMULATOR_BYTES * outputs * blocks * (1 if launch.along else launch.width * launch.vector)


def _reduction_launch(reduced: list[Span], kept: list[Span], inputs: int, outputs: int) -> ReductionLaunch:
    along = not kept or not reduced or reduced[0].stride < kept[0].stride
    wide, high, vector = (inputs, outputs, 1) if along else (outputs, inputs, 1)
    if along and reduced and reduced[0].stride == 1 and wide >= 128 and len(reduced) == 1:
        wide //= VECTOR
    elif not along and kept[0].stride == 1:
        vector = math.gcd(VECTOR, kept[0].size, *(span.stride for span in (*reduced, *kept[1:])))
        wide //= vector
    most = MAX_THREADS // vector
    wide, high = (_last_power_of_two(min(size, most)) for size in (wide, high))
    height = min(high, most // min(wide, WARP))
    width = min(wide, most // height)
    values = -(-inputs // width) if along else inputs
    shares_height = values >= min(height * FEW_VALUES, MANY_VALUES)
    if shares_height:
        values = -(-inputs // (height * (width if along else 1)))
    return ReductionLaunch(width, height, vector, along, values, shares_height)


def _merged(spans: list[Span]) -> list[Span]:
    """Return the spans, densest first, each merged with the next if that continues it."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.stride == merged[-1].stride * merged[-1].size:
            merged[-1] = Span(merged[-1].stride, merged[-1].size * span.size)
        else:
            merged.append(span)
    return merged


def _last_power_of_two(number: int) -> int:
    """Return the largest power of two that is not above the number."""
    return 1 << (number.bit_length() - 1)
