"""Run operations on fake CPU tensors as CUDA would: attention, dropout and autocast take the kernels that CUDA takes.

Kernels are replaced in PyTorch's dispatcher, so the replacement holds for calls from Python and from inside other operations. The
registrations are global to the process: they last for one trace, and traces in several threads wait for each other.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
_lock = threading.RLock()


@contextmanager
def dispatch_as_cuda() -> Iterator[None]:
    """A context in which attention, dropout and autocast on CPU tensors do what they do on CUDA tensors."""
    with _lock:
        library = torch.library.Library("aten", "IMPL")
        try:
            with warnings.catch_warnings():
                # PyTorch warns about every replaced kernel; replacing them is the purpose here.
                warnings.simplefilter("ignore", UserWarning)
                library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
                library.impl("dropout", _dropout, "AutogradCPU")
                for name, kernel in autocast_kernels():
                    library.impl(name, kernel, "AutocastCPU")
            yield
        finally:
            library._destroy()


def _dropout(inputs: Tensor, p: float, train: bool) -> Tensor:
    if not train or p in (0, 1) or not inputs.numel():
        return inputs if not train or p == 0 or not inputs.numel() else inputs * 0
    return aten.native_dropout.default(inputs, p, train)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the kernel that CUDA selects: flash for half precision without a mask, else memory-efficient, else the math kernel."""
    width = query.shape[-1]
    if query.ndim != 4 or query.dtype == torch.float64 or value.shape[-1] != width or key.shape[-1] != width:
        return aten._scaled_dot_product_attention_math.default(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if query.dtype in HALF and attn_mask is None and width <= 256:
        padded = [_pad_width(t, 8) for t in (query, key, value)]
        scale = scale if scale is not None else width**-0.5
        out = aten._scaled_dot_product_flash_attention.default(*padded, dropout_p, is_causal, scale=scale)[0]
        return out if out.shape[-1] == width else out[..., :width]
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    if attn_mask is not None:
        attn_mask = _attention_bias(attn_mask, query, key)
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return aten._scaled_dot_product_efficient_attention.default(
        query, key, value, attn_mask, grad, dropout_p, is_causal, scale=scale
    )[0]


def _pad_width(t: Tensor, multiple: int) -> Tensor:
    missing = -t.shape[-1] % multiple
    return torch.nn.functional.pad(t, (0, missing)) if missing else t


def _attention_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask as the memory-efficient kernel reads it: in the query's dtype, rows aligned to 16 elements."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf).to(query.dtype)
    length = mask.shape[-1]
    mask = _pad_width(mask, 16)[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


# CUDA's autocast on CPU tensors. Which operators have an autocast kernel for a device is read from the dispatcher, which knows
# them without a GPU; what each kernel does follows aten/src/ATen/autocast_mode.h. Matrix products and convolutions, with
# autocast's cached copies of the weights, are on the lists of both devices and stay as they are.

# Cast to the lower precision.
LOWER_PRECISION = {"addmv", "addr", "chain_matmul", "einsum", "linalg_multi_dot", "mv"}
LOWER_PRECISION_CELLS = {"_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"}
# The dtype of the result is an argument, float32 by default.
SET_DTYPE = {"cumprod", "cumsum", "linalg_matrix_norm", "linalg_vector_norm", "log_softmax", "prod", "softmax", "sum"}
# All operands are cast to the widest dtype among them.
PROMOTED = {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "scatter_add", "tensordot", "vdot"}
# Reached through other operators of the list, or not available on a CPU.
NOT_REPLACED = {
    "_convolution",
    "convolution",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "_scaled_dot_product_flash_attention",
}

_autocast_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@functools.cache
def autocast_kernels() -> tuple[tuple[str, Callable[..., Any]], ...]:
    """Return operator names, without the namespace, and the kernel that makes autocast on a CPU do what it does on CUDA."""
    kernels: list[tuple[str, Callable[..., Any]]] = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        on_cpu, on_cuda = (torch._C._dispatch_has_kernel_for_dispatch_key(name, f"Autocast{d}") for d in ("CPU", "CUDA"))
        short = name.removeprefix("aten::")
        packet, _, overload = short.partition(".")
        if on_cpu and not on_cuda:
            kernels.append((short, torch.library.fallthrough_kernel))
        elif on_cuda and not on_cpu and packet not in NOT_REPLACED:
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            kernels.append((short, _autocast_kernel(operator, packet)))
    return tuple(kernels)


def _autocast_kernel(operator: Any, packet: str) -> Callable[..., Any]:
    if packet in SET_DTYPE:
        return _with_float32_result(operator)
    if packet in LOWER_PRECISION | LOWER_PRECISION_CELLS:
        return _cast_operands(operator, lambda _: torch.get_autocast_dtype("cpu"))
    if packet in PROMOTED:
        return _cast_operands(operator, _widest_dtype)
    return _cast_operands(operator, lambda _: torch.float32)


def _cast_operands(operator: Any, choose_dtype: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = choose_dtype((args, kwargs))
        args, kwargs = tree_map(lambda t: t.to(dtype) if _is_eligible(t) else t, (args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(_autocast_cpu):
            return operator(*args, **kwargs)

    return run


def _with_float32_result(operator: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments if not argument.kwarg_only]

    def run(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip(names, args, strict=False)) | kwargs
        if _is_eligible(args[0]) and named.get("dtype") is None:
            named["dtype"] = torch.float32
        positional = [named.pop(name) for name in names if name in named and name != "dtype"]
        with torch._C._ExcludeDispatchKeyGuard(_autocast_cpu):
            return operator(*positional, **named)

    return run


def _is_eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _widest_dtype(tree: Any) -> torch.dtype:
    dtypes: set[torch.dtype] = set()
    tree_map(lambda t: dtypes.add(t.dtype) if _is_eligible(t) else None, tree)
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cpu")
