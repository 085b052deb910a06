"""What one operation of PyTorch costs: its class, FLOPs, the share of the device's peak rates that it reaches, and implicit copies.

Operations are sorted into classes of similar efficiency. What makes a class is what slows a kernel down: widths that tensor cores
cannot load in one vector, operands whose memory layout differs from what the kernel reads, too little work per thread block. Each
class has a share of the device's FLOP/s, of its memory bandwidth, or of both (`FLOPS_EFFICIENCY`, `BYTES_EFFICIENCY`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# Matrix products, and the position of the first factor among the arguments.
MATRIX_PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}

OpClass = Literal[
    "matmul",
    "unaligned matmul",
    "convolution",
    "direct convolution",
    "grouped convolution",
    "few-channel convolution",
    "depthwise convolution",
    "depthwise gradient",
    "depthwise convolution, channels last",
    "attention",
    "attention in fp32",
    "elementwise",
    "strided",
    "copy",
    "transpose",
    "reduction",
    "normalisation",
    "narrow normalisation",
    "softmax",
    "batch norm",
    "half batch norm",
    "pooling",
    "gather or scatter",
]

# Efficiency by class: the share of the peak FLOP/s of matrix products, and of the peak memory bandwidth, that kernels reach. An
# operation takes the longer of its two times. Fitted to single operations of training steps on one H200, timed by PyTorch's
# profiler.
FLOPS_EFFICIENCY: Mapping[OpClass, float] = MappingProxyType(
    {
        "matmul": 0.72,
        "unaligned matmul": 0.19,
        "convolution": 0.45,
        "direct convolution": 0.50,
        "grouped convolution": 0.40,
        "few-channel convolution": 0.41,
        "depthwise convolution": 0.045,
        "depthwise gradient": 0.013,
        "depthwise convolution, channels last": 0.13,
        "attention": 0.20,
        "attention in fp32": 0.35,
        "pooling": 0.015,
    }
)
BYTES_EFFICIENCY: Mapping[OpClass, float] = MappingProxyType(
    {
        "matmul": 0.80,
        "unaligned matmul": 0.45,
        "convolution": 0.14,
        "direct convolution": 0.60,
        "grouped convolution": 0.11,
        "few-channel convolution": 0.08,
        "depthwise convolution": 0.09,
        "depthwise gradient": 0.05,
        # Not visible in ConvNeXt's operations; fitted to the whole step of PVTv2, which has few operations for its bytes.
        "depthwise convolution, channels last": 0.18,
        "attention": 0.25,
        "attention in fp32": 0.80,
        "elementwise": 0.80,
        "strided": 0.50,
        "copy": 0.60,
        "transpose": 0.26,
        "reduction": 0.29,
        "normalisation": 0.34,
        "narrow normalisation": 0.21,
        "softmax": 0.55,
        "batch norm": 0.42,
        "half batch norm": 0.13,
        "pooling": 0.80,
        "gather or scatter": 0.20,
    }
)
# Classes that torch.compile fuses into each other: those that compute next to nothing for their bytes, except random access.
FUSED_CLASSES = BYTES_EFFICIENCY.keys() - FLOPS_EFFICIENCY.keys() - {"gather or scatter"}
# In fp32, PyTorch lets cuDNN use TF32 for these classes where the device has it; matrix products stay in fp32.
TF32_CLASSES = ("convolution", "direct convolution", "grouped convolution")
# Too few channels for tensor cores: these run at a share of the fp32 rate in every precision.
NO_TENSOR_CORE_CLASSES = (
    "few-channel convolution",
    "depthwise convolution",
    "depthwise gradient",
    "depthwise convolution, channels last",
    "pooling",
)
# The device that the efficiencies were fitted on: bytes per second, FLOP/s of its tensor cores, and fp32 FLOP/s divided by the fp32
# units of a multiprocessor.
FITTED_DEVICE = "H200"
FITTED_BANDWIDTH, FITTED_TENSOR_RATE, FITTED_PACE = 4.8e12, 989.4e12, 66.9e12 / 128


def flops_efficiency(tensor_rate: float, fp32_rate: float, capability: tuple[int, int]) -> Mapping[OpClass, float]:
    """Return the shares of another device's FLOP/s that each class reaches.

    A class of tensor-core operations that stays below the best one on an H200 is limited by its threads, which compute what is not
    a matrix product and feed the tensor cores: it gains where these are slower relative to the threads. Classes without tensor
    cores keep their shares.
    """
    ratio = _pace(fp32_rate, capability) / FITTED_PACE * FITTED_TENSOR_RATE / tensor_rate
    best = max(FLOPS_EFFICIENCY.values())
    return MappingProxyType(
        {
            op_class: share if op_class in NO_TENSOR_CORE_CLASSES else min(best, max(share, share * ratio))
            for op_class, share in FLOPS_EFFICIENCY.items()
        }
    )


def _pace(fp32_rate: float, capability: tuple[int, int]) -> float:
    """Return multiprocessors times clock, from the fp32 rate and the fp32 units of a multiprocessor."""
    return fp32_rate / (64 if capability < (8, 6) else 128)


def bytes_efficiency(bandwidth: float, fp32_rate: float, capability: tuple[int, int]) -> Mapping[OpClass, float]:
    """Return the shares of another device's bandwidth that each class reaches.

    A class that stays below the bandwidth of an H200 is limited by the speed of its threads. On another device they run at that
    device's pace: multiprocessors times clock, computed from the fp32 rate and the fp32 units of a multiprocessor. No class exceeds
    the best share in the table.
    """
    ratio = _pace(fp32_rate, capability) / FITTED_PACE * FITTED_BANDWIDTH / bandwidth
    best = max(BYTES_EFFICIENCY.values())
    return MappingProxyType({op_class: min(best, share * ratio) for op_class, share in BYTES_EFFICIENCY.items()})


# Tensor cores load vectors of this many elements: of an operand's width in half precision, of a convolution's channels or pixels.
VECTOR_WIDTH = 8
# Rows of up to this many elements cost a thread block more for its start and its final reduction than for reading the row.
NARROW_ROW = 512
# Batch norm gives each channel one thread block: with fewer channels, some multiprocessors are idle.
BATCH_NORM_CHANNELS = 200
# Where memory layouts differ, a thread moves one element at a time: a 4-byte word, or half of one.
WORD_BYTES = 4
# Half-precision rows of odd width are read element by element, since a word would begin in the previous row.
ODD_WIDTH_UTILIZATION = 0.6
HALF = (torch.bfloat16, torch.float16)
# A pooling kernel has one thread for each output, or in backward for each input, which visits its windows one element at a time:
# its instructions take the time, whatever the dtype. Picoseconds per output and per element of its window, fitted to forwards of
# 2 × 2 averages and 3 × 3 maxima on an H200; per input of an average's backward, and per window that an input belongs to, fitted to
# the backward of 2 × 2 averages and to the whole step of PoolFormer, whose windows overlap.
POOLING_OUTPUT, POOLING_ELEMENT = 10.3, 0.66
POOLING_INPUT, POOLING_WINDOW = 14.4, 4.7
# Elements up to which a dimension is narrow: where memory runs along it in one of two layouts, all elements of a cache line are
# used before the line is evicted, and a transposing copy is no slower than other strided ones.
NARROW_DIM = 16
# Operators classified by their whole name, because their names are parts of others ("min" in clamp_min, "norm" in
# linalg_vector_norm).
_SUMS = frozenset(
    ("sum", "nansum", "mean", "var", "std", "var_mean", "std_mean", "prod", "cumsum", "logsumexp", "linalg_vector_norm")
)
_EXTREMES = frozenset(("max", "min", "amax", "amin", "argmax", "argmin", "any", "all"))
CLASS_BY_NAME: dict[OpClass, frozenset[str]] = {"reduction": _SUMS | _EXTREMES, "copy": frozenset(("cat", "stack"))}
# Operators classified by a part of their name; the first match counts.
CLASS_BY_NAME_PART: tuple[tuple[str, OpClass], ...] = (
    ("scaled_dot_product", "attention"),
    ("attention", "attention"),
    ("convolution", "convolution"),
    ("batch_norm", "batch norm"),
    ("norm", "normalisation"),
    ("softmax", "softmax"),
    ("adaptive", "gather or scatter"),
    ("pool", "pooling"),
    ("upsample", "gather or scatter"),
    ("embedding", "gather or scatter"),
    ("index", "gather or scatter"),
    ("scatter", "gather or scatter"),
    ("gather", "gather or scatter"),
    ("roll", "gather or scatter"),
    ("flip", "gather or scatter"),
    ("copy", "copy"),
    ("clone", "copy"),
    ("_pad", "copy"),
)


def class_of(operator: str, args: Any, out: Any, *, has_flops: bool) -> OpClass:
    """Return the class of a call. has_flops: whether `flops_of` counts matrix products for it."""
    op_class = _class_by_name(operator, has_flops)
    inputs, outputs = tensors_in(args), tensors_in(out)
    half = any(tensor.dtype in HALF for tensor in (*inputs, *outputs))
    match op_class:
        case "convolution":
            return _convolution_class(operator, args, half)
        case "attention":
            return "attention" if half else "attention in fp32"
        case "batch norm":
            return "half batch norm" if half else "batch norm"
        case "matmul":
            unaligned = half and any(size % VECTOR_WIDTH for size in _widths((*inputs, *outputs)))
            return "unaligned matmul" if unaligned else "matmul"
        case "normalisation":
            return "narrow normalisation" if _normalises_narrow_rows(operator, args) else "normalisation"
        case "copy" | "elementwise" if outputs:
            return _class_by_layout(operator, op_class, inputs, outputs[0])
    return op_class


def utilization_of(op_class: OpClass, args: Any, out: Any) -> float:
    """Return the share of its class's usual rate that a call reaches: below 1 where blocks, tiles or words are partly empty."""
    tensors = tensors_in((args, out))
    match op_class:
        case "unaligned matmul":
            return ODD_WIDTH_UTILIZATION if any(size % 2 for size in _widths(tensors)) else 1.0
        case "grouped convolution":
            # The widths of tensor-core tiles are powers of two.
            width = min(tensor.shape[1] for tensor in tensors if tensor.ndim > 2)
            return float(width / 2 ** math.ceil(math.log2(width)))
        case "batch norm" | "half batch norm":
            images = max(tensors, key=Tensor.numel)
            return 1.0 if is_channels_last(images) else min(1.0, images.shape[1] / BATCH_NORM_CHANNELS)
        case "strided" | "transpose":
            elements = sum(tensor.numel() for tensor in tensors)
            return min(1.0, sum(tensor.numel() * tensor.element_size() for tensor in tensors) / max(1, WORD_BYTES * elements))
    return 1.0


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _class_by_name(operator: str, has_flops: bool) -> OpClass:
    for op_class, names in CLASS_BY_NAME.items():
        if operator in names:
            return op_class
    return next((op_class for part, op_class in CLASS_BY_NAME_PART if part in operator), "matmul" if has_flops else "elementwise")


def _widths(tensors: Iterable[Tensor]) -> set[int]:
    return {size for tensor in tensors if tensor.ndim > 1 for size in tensor.shape[-2:]}


def _convolution_class(operator: str, args: Any, half: bool) -> OpClass:
    """cuDNN computes in channels-last layout and transposes other tensors; a 1×1 convolution is a matrix product in any layout."""
    backward = "backward" in operator
    (x, weight), groups, stride = (args[1:3], args[9], args[4]) if backward else (args[:2], args[8], args[3])
    channels_last = is_channels_last(x)
    if groups > 1 and weight.shape[1] == 1:
        if half and channels_last:
            return "depthwise convolution, channels last"
        return "depthwise gradient" if backward else "depthwise convolution"
    if groups > 1:
        return "grouped convolution"
    if weight.shape[1] < VECTOR_WIDTH:
        return "few-channel convolution"
    pointwise = math.prod(weight.shape[2:]) == 1 and set(stride) == {1} and math.prod(x.shape[2:]) % VECTOR_WIDTH == 0
    return "direct convolution" if channels_last or pointwise else "convolution"


def _normalises_narrow_rows(operator: str, args: Any) -> bool:
    """Whether the normalised rows are short; the groups of a group norm are not."""
    by_row = any(part in operator for part in ("layer_norm", "rms_norm"))
    return by_row and math.prod(args[1 + ("backward" in operator)]) <= NARROW_ROW


def _class_by_layout(operator: str, op_class: OpClass, inputs: list[Tensor], out: Tensor) -> OpClass:
    if operator in CLASS_BY_NAME["copy"]:
        return "copy" if all(tensor.is_contiguous() for tensor in inputs) else "strided"
    if have_same_layout(inputs, out) or (op_class == "elementwise" and not can_broadcast(inputs, out)):
        return op_class
    return "transpose" if op_class == "copy" and any(is_transposed(tensor, out) for tensor in inputs) else "strided"


# Memory layouts, as far as they slow kernels down: kernels are fast where all operands are read in one order of memory.


def have_same_layout(tensors: Iterable[Tensor], out: Tensor) -> bool:
    """Whether all tensors, except single elements, have the shape and strides of the output, and that is dense."""
    layout = _layout(out)
    dense = out.numel() == 1 + sum((size - 1) * stride for size, stride in layout)
    return dense and all(t.shape == out.shape and _layout(t) == layout for t in tensors if t.numel() > 1)


def can_broadcast(tensors: Iterable[Tensor], out: Tensor) -> bool:
    """Whether each tensor broadcasts to the output's shape, as operands of elementwise operations do."""
    return all(
        t.ndim <= out.ndim and all(a in (1, b) for a, b in zip(reversed(t.shape), reversed(out.shape), strict=False))
        for t in tensors
    )


def is_transposed(tensor: Tensor, out: Tensor) -> bool:
    """Whether elements that are adjacent in memory lie along different dimensions in the two tensors, both of them wide."""
    if tensor.shape != out.shape or tensor.numel() <= 1:
        return False
    dims = _densest_dim(tensor), _densest_dim(out)
    return dims[0] != dims[1] and all(tensor.shape[dim] > NARROW_DIM for dim in dims)


def is_channels_last(tensor: Tensor) -> bool:
    """Whether an image's channels are adjacent in memory, which is not the default."""
    return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _layout(tensor: Tensor) -> list[tuple[int, int]]:
    return [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _densest_dim(tensor: Tensor) -> int:
    """Return the dimension along which elements are adjacent in memory."""
    sized = [dim for dim, size in enumerate(tensor.shape) if size != 1]
    return min(sized, key=lambda dim: (tensor.stride(dim), -dim))


def flops_of(operator: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the FLOPs of one call; 0 for operations that multiply no matrices.

    The formulas are those of torch.utils.flop_counter, which is imported for rare operations only, since it imports Triton. Two of
    its faults are corrected: it lacks the attention operators of CPUs, and it counts the backward of a grouped convolution once for
    every channel instead of twice the forward.
    """
    packet = operator._overloadpacket
    name = packet.__name__
    if packet in MATRIX_PRODUCTS:
        first, second = args[MATRIX_PRODUCTS[packet] :][:2]
        return float(2 * first.numel() * second.shape[-1])
    if packet is aten.convolution:
        return _convolution_flops(args[0], args[1], out, transposed=args[6])
    if packet is aten.convolution_backward:
        gradient, x, weight, transposed, needed = args[0], args[1], args[2], args[7], args[10]
        return sum(needed[:2]) * _convolution_flops(x, weight, gradient, transposed=transposed)
    if "pool2d" in name and "adaptive" not in name:
        return _pooling_work(name, args, out)
    if "scaled_dot_product" in name:
        return _attention_flops(operator, args, kwargs)
    if not any(part in name for part in ("mm", "conv", "attention")):
        return 0.0
    from torch.utils.flop_counter import flop_registry

    return float(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0.0


def _convolution_flops(x: Tensor, weight: Tensor, out: Tensor, *, transposed: bool) -> float:
    """Every position of the output, or of the input of a transposed convolution, takes the whole weight."""
    positions = math.prod((x if transposed else out).shape[2:])
    return float(2 * x.shape[0] * positions * weight.numel())


def _pooling_work(name: str, args: Any, out: Any) -> float:
    """Return the instructions of a pooling, in units of which an H200 computes one per picosecond."""
    backward = "backward" in name
    kernel, stride = (
        [*each] * (3 - len(each)) for each in ((args[2], args[3]) if backward else (args[1], args[2] if len(args) > 2 else ()))
    )
    window = math.prod(kernel[:2])
    if not backward:
        return float(tensors_in(out)[0].numel() * (POOLING_OUTPUT + POOLING_ELEMENT * window))
    windows = window / math.prod((stride or kernel)[:2])
    base = POOLING_INPUT if "avg" in name else 0.0
    return float(args[1].numel() * (base + POOLING_WINDOW * windows))


def _attention_flops(operator: Any, args: Any, kwargs: Any) -> float:
    """Forward has two matrix products of the size of the scores, backward five; kernels skip half of a causal one."""
    backward = "backward" in operator._schema.name
    query, key, value = args[1:4] if backward else args[:3]
    arguments = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | kwargs
    factor = (2.5 if backward else 1.0) * (0.5 if arguments.get("is_causal") else 1.0)
    # Not torch's sdpa_flop_count, which requires as many heads of keys as of queries: several queries may share a key's head.
    (*batch, queries, width), keys = query.shape, key.shape[-2]
    return factor * 2.0 * math.prod(batch) * queries * keys * (width + value.shape[-1])


# Kernels of these classes read contiguous tensors only: other tensors are copied first.
CONTIGUOUS_CLASSES = ("normalisation", "narrow normalisation", "softmax")


class ImplicitOp(NamedTuple):
    """Work that a kernel does inside another operation, where counting PyTorch's operations does not see it."""

    op_class: OpClass
    bytes: float
    utilization: float


def implicit_ops(operator: str, op_class: OpClass, args: Any, out: Any) -> Iterator[ImplicitOp]:
    """Yield the copies to contiguous memory, the addition of a convolution's bias, and the reduction of the bias's gradient."""
    if op_class in CONTIGUOUS_CLASSES:
        for tensor in tensors_in(args):
            if not tensor.is_contiguous():
                yield _copy_to_contiguous(tensor)
    if "convolution" not in operator or op_class in ("depthwise convolution", "depthwise gradient"):
        return
    if "backward" in operator:
        if args[10][2]:
            yield ImplicitOp("reduction", _bytes(args[0]), 1.0)
    elif args[2] is not None:
        yield ImplicitOp("strided", 2 * _bytes(out), utilization_of("strided", out, ()))


def _copy_to_contiguous(tensor: Tensor) -> ImplicitOp:
    op_class: OpClass = "transpose" if is_transposed(tensor, tensor.new_empty(tensor.shape)) else "strided"
    return ImplicitOp(op_class, 2 * _bytes(tensor), utilization_of(op_class, tensor, ()))


def _bytes(tensor: Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())
