"""Operations of PyTorch by how near their kernels come to what a device is able to.

A kind has a share of the device's operations a second, of its bytes a second, or of both (`devices.Shares`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Kind = Literal[
    "product",
    "odd product",
    "convolution",
    "thin convolution",
    "depthwise convolution",
    "depthwise convolution in fp32",
    "attention",
    "attention in fp32",
    "elementwise",
    "copy",
    "joining",
    "reduction",
    "normalisation",
    "batch norm",
    "half batch norm",
    "scattered",
]
# Of an operand's width in half precision, and of a convolution's channels: what tensor cores read in one piece.
GRAIN = 8
HALF = (torch.bfloat16, torch.float16)
# By parts of the operator's name, in this order.
NAMED: tuple[tuple[str, Kind], ...] = (
    ("scaled_dot_product", "attention"),
    ("attention", "attention"),
    ("convolution", "convolution"),
    ("batch_norm", "batch norm"),
    ("norm", "normalisation"),
    ("softmax", "normalisation"),
    ("pool", "scattered"),
    ("upsample", "scattered"),
    ("embedding", "scattered"),
    ("index", "scattered"),
    ("scatter", "scattered"),
    ("gather", "scattered"),
    ("copy", "copy"),
    ("clone", "copy"),
    ("contiguous", "copy"),
    ("roll", "copy"),
    ("flip", "copy"),
    ("cat", "joining"),
    ("stack", "joining"),
    ("sum", "reduction"),
    ("mean", "reduction"),
    ("amax", "reduction"),
    ("var", "reduction"),
)


def kind_of(operator: str, args: Any, out: Any, *, counted: bool) -> Kind:
    """The kind of a call. counted: whether it has operations of matrix products."""
    kind = next((kind for part, kind in NAMED if part in operator), "product" if counted else "elementwise")
    tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor)]
    half = any(tensor.dtype in HALF for tensor in tensors)
    if kind == "convolution":
        weight, groups = (args[2], args[9]) if "backward" in operator else (args[1], args[8])
        if groups > 1 and weight.shape[1] == 1:
            # ConvNeXt, which has many, took four times as long for a row in fp32 as in bf16.
            return "depthwise convolution" if half else "depthwise convolution in fp32"
        return "thin convolution" if groups == 1 and weight.shape[1] < GRAIN else kind
    if kind == "batch norm" and half:
        return "half batch norm"
    if kind == "attention" and not half:
        return "attention in fp32"
    if kind == "product" and half and any(size % GRAIN for tensor in tensors if tensor.ndim > 1 for size in tensor.shape[-2:]):
        return "odd product"
    return kind
