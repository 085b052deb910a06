"""What cuDNN takes while a convolution runs.

Its kernels want channels last: where they come first, input, output and weights are laid out anew, channels of half precision
filled up to a multiple of 8. Convolutions of 1 × 1 are products of matrices as they lie, whose weights' gradient is a sum over the
batch of one product a sample, kept apart in fp32; other weights' gradients are sums of a few parts. A kernel that covers a picture
makes one product of the batch. Which way cuDNN's heuristics go is not told: these ways and sizes were seen on an H200 (cuDNN 9).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

HALF_CHANNELS, FP32 = 8, 4
# Rows of pixels that a product takes as they lie begin at multiples of so many.
ALIGNED = 4
# The parts of a weight's gradient, in fp32: no more than this many, and within so many bytes.
MOST_PARTS, PARTS_BYTES = 16, 8 * 2**20


def forward_bytes(inputs: Tensor, weight: Tensor, outputs: Tensor, stride: Sequence[int], groups: int) -> int:
    """While the output is found, or the gradient of the input."""
    if not _is_laid_out(inputs, outputs, groups) or _is_product(inputs, weight, stride, groups):
        return 0
    return _copies(inputs, weight, outputs)


def weight_gradient_bytes(inputs: Tensor, weight: Tensor, outputs: Tensor, stride: Sequence[int], groups: int) -> int:
    """While the weights' gradient is found."""
    if not _is_laid_out(inputs, outputs, groups):
        return 0
    size = FP32 * weight.numel()
    laid_out = _copies(inputs, weight, outputs) + size * min(MOST_PARTS, PARTS_BYTES // size)
    return min(len(inputs) * size, laid_out) if _is_product(inputs, weight, stride, groups) else laid_out


def _is_laid_out(inputs: Tensor, outputs: Tensor, groups: int) -> bool:
    """Not where channels are last already, one pixel is left of a picture, or PyTorch has depthwise kernels of its own."""
    channels_last = inputs.ndim == 4 and inputs.is_contiguous(memory_format=torch.channels_last)
    return not channels_last and math.prod(outputs.shape[2:]) > 1 and not groups == inputs.shape[1] > 1


def _is_product(inputs: Tensor, weight: Tensor, stride: Sequence[int], groups: int) -> bool:
    pointwise = math.prod(weight.shape[2:]) == 1 and all(step == 1 for step in stride) and groups == 1
    return pointwise and math.prod(inputs.shape[2:]) % ALIGNED == 0


def _copies(inputs: Tensor, weight: Tensor, outputs: Tensor) -> int:
    sizes = [_filled_up(inputs), _filled_up(outputs)]
    # A kernel of one pixel lies the same way in both.
    return sum([*sizes, _filled_up(weight)] if math.prod(weight.shape[2:]) > 1 else sizes)


def _filled_up(tensor: Tensor) -> int:
    channels = tensor.shape[1]
    filled = channels if tensor.element_size() == FP32 else -(-channels // HALF_CHANNELS) * HALF_CHANNELS
    return tensor.numel() // channels * filled * tensor.element_size()
