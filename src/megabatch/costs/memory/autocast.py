"""CUDA's autocast on CPU tensors: the operations that its lists name and CPU's do not, and those of CPU's that it leaves alone.

Which operations have a kernel for either device is read from the dispatcher itself, which knows them without a GPU; what the kernel
does is what aten/src/ATen/autocast_mode.h says of it. Products and convolutions, with autocast's copies of the weights, are in both
lists and stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

LOWER = {"addmv", "addr", "chain_matmul", "einsum", "linalg_multi_dot", "mv"}
# The result's dtype is an argument, and is float32 where it is not given.
SET_DTYPE = {"cumprod", "cumsum", "linalg_matrix_norm", "linalg_vector_norm", "log_softmax", "prod", "softmax", "sum"}
PROMOTED = {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "scatter_add", "tensordot", "vdot"}
# Reached through others of the list, or not to be had on a CPU.
ELSEWHERE = {
    "_convolution",
    "convolution",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "_scaled_dot_product_flash_attention",
}
CELLS = {"_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"}

_outside = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def autocast_kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Names of operators, without the namespace, and what autocast on a CPU has to do with them to do as on CUDA."""
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        on_cpu, on_cuda = (torch._C._dispatch_has_kernel_for_dispatch_key(name, f"Autocast{d}") for d in ("CPU", "CUDA"))
        short = name.removeprefix("aten::")
        packet, _, overload = short.partition(".")
        if on_cpu and not on_cuda:
            yield short, torch.library.fallthrough_kernel
        elif on_cuda and not on_cpu and packet not in ELSEWHERE:
            yield short, _kernel(getattr(getattr(torch.ops.aten, packet), overload or "default"), packet)


def _kernel(operator: Any, packet: str) -> Callable[..., Any]:
    if packet in SET_DTYPE:
        return _with_dtype(operator)
    if packet in LOWER | CELLS:
        return _cast_all(operator, lambda _: torch.get_autocast_dtype("cpu"))
    if packet in PROMOTED:
        return _cast_all(operator, _widest)
    return _cast_all(operator, lambda _: torch.float32)


def _cast_all(operator: Any, choose: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = choose((args, kwargs))
        args, kwargs = tree_map(lambda t: t.to(dtype) if _is_eligible(t) else t, (args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(_outside):
            return operator(*args, **kwargs)

    return run


def _with_dtype(operator: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments if not argument.kwarg_only]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        if _is_eligible(args[0]) and given.get("dtype") is None:
            given["dtype"] = torch.float32
        rest = [given.pop(name) for name in names if name in given and name != "dtype"]
        with torch._C._ExcludeDispatchKeyGuard(_outside):
            return operator(*rest, **given)

    return run


def _is_eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _widest(tree: Any) -> torch.dtype:
    found: set[torch.dtype] = set()
    tree_map(lambda t: found.add(t.dtype) if _is_eligible(t) else None, tree)
    return torch.float32 if torch.float32 in found else torch.get_autocast_dtype("cpu")
