"""Operations of PyTorch by how near their kernels come to what a device is able to.

A kind has a share of the device's operations a second, of its bytes a second, or of both (`shares.py`). What slows a kernel
down is what makes a kind: widths that tensor cores do not read in one piece, tensors that lie in another order than the kernel
reads, little to do for each block of threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .layouts import alike, channels_last, spread, turned

Kind = Literal[
    "product",
    "odd product",
    "convolution",
    "direct convolution",
    "grouped convolution",
    "thin convolution",
    "depthwise convolution",
    "depthwise gradient",
    "depthwise convolution, channels last",
    "attention",
    "attention in fp32",
    "elementwise",
    "strided",
    "copy",
    "transposition",
    "reduction",
    "normalisation",
    "narrow normalisation",
    "softmax",
    "batch norm",
    "half batch norm",
    "scattered",
]
# Of an operand's width in half precision, and of a convolution's channels or pixels: what tensor cores read in one piece.
GRAIN = 8
# Numbers of a row up to which a block of threads spends more on starting and adding up than on reading it.
NARROW = 512
# A batch norm gives each channel one block of threads: with fewer, multiprocessors have nothing to do.
CHANNELS = 200
# Where tensors differ in their order, a thread takes one element at a time: it moves a word, or half of one.
WORD = 4
# Halves of an odd width are read one by one, as a word of them would begin in the row before.
ODD = 0.6
HALF = (torch.bfloat16, torch.float16)
# By their whole names: parts of these are in the names of others ("min" in clamp_min, "norm" in linalg_vector_norm).
SUMS = frozenset(
    ("sum", "nansum", "mean", "var", "std", "var_mean", "std_mean", "prod", "cumsum", "logsumexp", "linalg_vector_norm")
)
EXTREMES = frozenset(("max", "min", "amax", "amin", "argmax", "argmin", "any", "all"))
WHOLE: dict[Kind, frozenset[str]] = {"reduction": SUMS | EXTREMES, "copy": frozenset(("cat", "stack"))}
# By parts of the operator's name, in this order.
NAMED: tuple[tuple[str, Kind], ...] = (
    ("scaled_dot_product", "attention"),
    ("attention", "attention"),
    ("convolution", "convolution"),
    ("batch_norm", "batch norm"),
    ("norm", "normalisation"),
    ("softmax", "softmax"),
    ("pool", "scattered"),
    ("upsample", "scattered"),
    ("embedding", "scattered"),
    ("index", "scattered"),
    ("scatter", "scattered"),
    ("gather", "scattered"),
    ("roll", "scattered"),
    ("flip", "scattered"),
    ("copy", "copy"),
    ("clone", "copy"),
    ("_pad", "copy"),
)


def kind_of(operator: str, args: Any, out: Any, *, counted: bool) -> Kind:
    """The kind of a call. counted: whether it has operations of matrix products."""
    kind = _named(operator, counted)
    inputs, outputs = tensors_of(args), tensors_of(out)
    half = any(tensor.dtype in HALF for tensor in (*inputs, *outputs))
    match kind:
        case "convolution":
            return _convolution(operator, args, half)
        case "attention":
            return "attention" if half else "attention in fp32"
        case "batch norm":
            return "half batch norm" if half else "batch norm"
        case "product":
            return "odd product" if half and any(size % GRAIN for size in _widths((*inputs, *outputs))) else "product"
        case "normalisation":
            return "narrow normalisation" if _narrow(operator, args) else "normalisation"
        case "copy" | "elementwise" if outputs:
            return _moved(operator, kind, inputs, outputs[0])
    return kind


def filling_of(kind: Kind, args: Any, out: Any) -> float:
    """The share of a kind's usual rate that a call reaches, where blocks, tiles or words go partly empty."""
    tensors = tensors_of((args, out))
    match kind:
        case "odd product":
            return ODD if any(size % 2 for size in _widths(tensors)) else 1.0
        case "grouped convolution":
            # Tiles of tensor cores are as wide as powers of two.
            width = min(tensor.shape[1] for tensor in tensors if tensor.ndim > 2)
            return float(width / 2 ** math.ceil(math.log2(width)))
        case "batch norm" | "half batch norm":
            images = max(tensors, key=Tensor.numel)
            return 1.0 if channels_last(images) else min(1.0, images.shape[1] / CHANNELS)
        case "strided" | "transposition":
            elements = sum(tensor.numel() for tensor in tensors)
            return min(1.0, sum(tensor.numel() * tensor.element_size() for tensor in tensors) / max(1, WORD * elements))
    return 1.0


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _named(operator: str, counted: bool) -> Kind:
    for kind, names in WHOLE.items():
        if operator in names:
            return kind
    return next((kind for part, kind in NAMED if part in operator), "product" if counted else "elementwise")


def _widths(tensors: Iterable[Tensor]) -> set[int]:
    return {size for tensor in tensors if tensor.ndim > 1 for size in tensor.shape[-2:]}


def _convolution(operator: str, args: Any, half: bool) -> Kind:
    """cuDNN computes with channels as neighbours, and turns tensors that lie otherwise; 1×1 is a product of matrices as it lies."""
    backward = "backward" in operator
    (x, weight), groups, stride = (args[1:3], args[9], args[4]) if backward else (args[:2], args[8], args[3])
    last = channels_last(x)
    if groups > 1 and weight.shape[1] == 1:
        if half and last:
            return "depthwise convolution, channels last"
        return "depthwise gradient" if backward else "depthwise convolution"
    if groups > 1:
        return "grouped convolution"
    if weight.shape[1] < GRAIN:
        return "thin convolution"
    point = math.prod(weight.shape[2:]) == 1 and set(stride) == {1} and math.prod(x.shape[2:]) % GRAIN == 0
    return "direct convolution" if last or point else "convolution"


def _narrow(operator: str, args: Any) -> bool:
    """Whether rows are short; what groups normalise together is not."""
    return any(part in operator for part in ("layer_norm", "rms_norm")) and math.prod(args[1 + ("backward" in operator)]) <= NARROW


def _moved(operator: str, kind: Kind, inputs: list[Tensor], out: Tensor) -> Kind:
    if operator in WHOLE["copy"]:
        return "copy" if all(tensor.is_contiguous() for tensor in inputs) else "strided"
    if alike(inputs, out) or (kind == "elementwise" and not spread(inputs, out)):
        return kind
    return "transposition" if kind == "copy" and any(turned(tensor, out) for tensor in inputs) else "strided"
