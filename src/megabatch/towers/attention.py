"""Faster attention for the short sequences of vision transformers and texts, in place of PyTorch's.

PyTorch's kernels go over blocks of 128 positions or so. The 257 positions of ViT-L/14, the 50 of ViT-B/32 and the 77 of CLIP's
texts fill such blocks badly.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .patches import product_dtype

Model = TypeVar("Model", bound=nn.Module)
# Width of a head and dtype of the kernels, and the most positions that they take.
WIDTH, DTYPE, LONGEST = 64, torch.bfloat16, 257
# PyTorch's kernels pad these numbers of positions to 256 as well. They were not measured.
LEFT_TO_PYTORCH = range(129, 193)
# The devices and the versions of Triton with which the kernels were run. Another version may compile them to something else.
CAPABILITY, TRITON_VERSIONS = (9, 0), ("3.6.",)


def short_attention(model: Model) -> Model:
    """Compute the attention of a model over short sequences by kernels of its own, with the same results; return the model.

    While the model's forward runs, `torch.nn.functional.scaled_dot_product_attention`, which timm, OpenCLIP and transformers call,
    and `torch.nn.MultiheadAttention` use these kernels where they are faster: on Hopper GPUs with Triton 3.6, in bf16 (or autocast
    to it), for 1 to 128 and 193 to 257 positions and heads 64 wide, with as many keys as queries, causal or not, without a mask and
    without dropout. Everything else is computed by PyTorch as before. The softmax is computed in fp32, as in PyTorch's kernels:
    results differ by rounding alone. Parameters and the state dict do not change. Call it on the module that is called,
    `model.visual` if that is called by itself, and before `torch.compile`. Blocks under activation checkpointing are computed again
    outside of the model's forward, and PyTorch raises a CheckpointError there: use one or the other.

    >>> import torch, megabatch
    >>> layer = torch.nn.TransformerEncoderLayer(d_model=128, nhead=2, batch_first=True)
    >>> megabatch.short_attention(layer)(torch.randn(4, 50, 128)).shape
    torch.Size([4, 50, 128])
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: must be a torch.nn.Module whose forward calls attention")
    if _enter not in model._forward_pre_hooks.values():
        # First, so that _leave undoes it if another hook raises.
        model.register_forward_pre_hook(_enter, prepend=True)
        model.register_forward_hook(_leave, always_call=True)
    return model


class ShortAttention(TorchFunctionMode):
    """Mode in which attention over short sequences is computed by the kernels of this package."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = OWN.get(func)
        found = own(*args, **kwargs) if own else None
        return func(*args, **kwargs) if found is None else found


_mode = ShortAttention()


def _enter(module: nn.Module, args: Any) -> None:
    _mode.__enter__()


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    _mode.__exit__(None, None, None)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return what scaled_dot_product_attention does, or None if PyTorch has to compute it."""
    if attn_mask is not None or dropout_p or not _are_plain(query, key, value):
        return None
    if query.ndim != 4 or not query.shape == key.shape == value.shape or not query.device == key.device == value.device:
        return None
    if query.shape[-1] != WIDTH or not query.numel() or not _is_short(query.shape[2], query.device):
        return None
    # The kernels subtract the largest similarity, which a negative scale would make the smallest logit.
    if any(product_dtype(t) != DTYPE for t in (query, key, value)) or (scale is not None and not scale > 0):
        return None
    factor = 1 / math.sqrt(WIDTH) if scale is None else float(scale)
    return torch.ops.megabatch.short_attention(query.to(DTYPE), key.to(DTYPE), value.to(DTYPE), is_causal, factor)[0]


def _multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    heads: int,
    weight: Tensor | None,
    bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_weight: Tensor,
    out_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None] | None:
    """Return what multi_head_attention_forward does for self-attention without masks, or None if PyTorch has to compute it.

    PyTorch's own function calls scaled_dot_product_attention outside of the mode.
    """
    more.pop("average_attn_weights", None)
    given = (key_padding_mask, attn_mask, bias_k, bias_v, *more.values())
    if need_weights or add_zero_attn or (training and dropout_p) or any(t is not None and t is not False for t in given):
        return None
    if weight is None or query is not key or key is not value:
        return None
    if not _are_plain(query) or query.ndim != 3 or product_dtype(query) != DTYPE or not query.numel():
        return None
    if embed_dim != query.shape[2] or heads * WIDTH != embed_dim or not _is_short(query.shape[0], query.device):
        return None
    # Both products read and write (N, L, E), which is how batch_first=True has it in memory.
    x = query.transpose(0, 1)
    q, k, v = F.linear(x, weight, bias).unflatten(-1, (3, heads, WIDTH)).unbind(2)
    output = _attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    if output is None:
        return None
    result = F.linear(output.transpose(1, 2).flatten(2), out_weight, out_bias).transpose(0, 1)
    return result.contiguous() if query.is_contiguous() else result, None


OWN: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head_attention,
}


def _are_plain(*tensors: Tensor) -> bool:
    """Return whether tensors are PyTorch's own, in one dense piece of memory, and autograd alone differentiates them."""
    if not torch.compiler.is_compiling() and (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0):
        return False
    return not any(type(t) not in (Tensor, nn.Parameter) or t.is_nested for t in tensors)


def _is_short(length: int, device: torch.device) -> bool:
    return 0 < length <= LONGEST and length not in LEFT_TO_PYTORCH and has_kernels(device)


# torch.compile takes its result as it is.
@torch.compiler.assume_constant_result
def has_kernels(device: torch.device) -> bool:
    """Return whether the kernels run on a device."""
    return unavailable(device) is None


@functools.cache
def unavailable(device: torch.device) -> str | None:
    """Return why the kernels do not run on a device, or None."""
    is_cuda = device.type == "cuda" and torch.cuda.is_available() and torch.version.hip is None
    if not is_cuda or torch.cuda.get_device_capability(device) != CAPABILITY:
        return "the kernels are for Hopper GPUs"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    from .attention_kernels import TRITON_VERSION

    if not TRITON_VERSION.startswith(TRITON_VERSIONS):
        return f"Triton is {TRITON_VERSION}, and the kernels were run with {' and '.join(TRITON_VERSIONS)}x"
    return None


@torch.library.custom_op("megabatch::short_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    from . import attention_kernels

    with torch.cuda.device_of(q):
        return attention_kernels.forward(q, k, v, causal, scale)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _new_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("megabatch::short_attention_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from . import attention_kernels

    with torch.cuda.device_of(q):
        return attention_kernels.backward(q, k, v, o, lse, do, causal, scale)


@_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _new_like(q), _new_like(q), _new_like(q)


def _new_like(t: Tensor) -> Tensor:
    # As the kernels do, which need Triton.
    return torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, do: Tensor, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    return *torch.ops.megabatch.short_attention_backward(*ctx.saved_tensors, do, ctx.causal, ctx.scale), None, None


_forward.register_autograd(_differentiate, setup_context=_save)
