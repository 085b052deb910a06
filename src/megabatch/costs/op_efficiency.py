"""What kernels reach of a device's peaks, by kinds: read off the operations of steps on one H200 under PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .op_classes import Kind

# By kinds of operations: of the rate of matrix products, and of the memory's. An operation takes the longer of its two times.
FLOPS: Mapping[Kind, float] = MappingProxyType(
    {
        "product": 0.72,
        "odd product": 0.19,
        "convolution": 0.45,
        "direct convolution": 0.50,
        "grouped convolution": 0.40,
        "thin convolution": 0.41,
        "depthwise convolution": 0.045,
        "depthwise gradient": 0.013,
        "depthwise convolution, channels last": 0.13,
        "attention": 0.20,
        "attention in fp32": 0.35,
    }
)
BYTES: Mapping[Kind, float] = MappingProxyType(
    {
        "product": 0.80,
        "odd product": 0.45,
        "convolution": 0.14,
        "direct convolution": 0.60,
        "grouped convolution": 0.11,
        "thin convolution": 0.08,
        "depthwise convolution": 0.09,
        "depthwise gradient": 0.05,
        # ConvNeXt's operations hide it; PVTv2's whole step, which has few operations for its bytes, shows it.
        "depthwise convolution, channels last": 0.18,
        "attention": 0.25,
        "attention in fp32": 0.80,
        "elementwise": 0.80,
        "strided": 0.50,
        "copy": 0.60,
        "transposition": 0.26,
        "reduction": 0.29,
        "normalisation": 0.34,
        "narrow normalisation": 0.21,
        "softmax": 0.55,
        "batch norm": 0.42,
        "half batch norm": 0.13,
        "scattered": 0.20,
    }
)
# In fp32, PyTorch lets cuDNN take TF32 for these where there is one; products of matrices stay as they are.
IN_TF32 = ("convolution", "direct convolution", "grouped convolution")
# Too few channels for tensor cores: computed at a share of the rate of fp32 in any precision.
WITHOUT_TENSOR_CORES = ("thin convolution", "depthwise convolution", "depthwise gradient", "depthwise convolution, channels last")
# The device that shares of bytes were found on: bytes a second, and its pace.
FOUND_AT, FOUND_PACE = 4.8e12, 66.9e12 / 128


def bytes_shares(bandwidth: float, fp32: float, capability: tuple[int, int]) -> Mapping[Kind, float]:
    """The shares of another device's bandwidth.

    A kind that stays below an H200's bandwidth is as slow as its threads are: on another device they go at that device's pace (its
    multiprocessors times their clock, from the rate of fp32 and the units of a multiprocessor), up to the best share there is.
    """
    units = 64 if capability < (8, 6) else 128
    ratio = fp32 / units / FOUND_PACE * FOUND_AT / bandwidth
    most = max(BYTES.values())
    return MappingProxyType({kind: min(most, share * ratio) for kind, share in BYTES.items()})
