"""Fake CPU tensors that are treated as CUDA's would be: operations whose memory depends on the device take CUDA's way.

Where a composite operation asks for the device, the answer is given in its place, in the dispatcher: it holds for calls from Python
and from inside other operations. The registrations are the process's, so they last for one trace, and traces take turns.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .autocast import autocast_kernels

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
_turn = threading.RLock()


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """A context in which attention, dropout and autocast on CPU tensors do what they do on CUDA tensors."""
    with _turn:
        library = torch.library.Library("aten", "IMPL")
        try:
            with warnings.catch_warnings():
                # That kernels are replaced is what this is for.
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
    """The kernel that CUDA chooses: flash for half precision without a mask, memory-efficient else, and plain products last."""
    width = query.shape[-1]
    if query.ndim != 4 or query.dtype == torch.float64 or value.shape[-1] != width or key.shape[-1] != width:
        return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if query.dtype in HALF and attn_mask is None and width <= 256:
        sides = [_padded(t, 8) for t in (query, key, value)]
        scale = scale if scale is not None else width**-0.5
        out = aten._scaled_dot_product_flash_attention.default(*sides, dropout_p, is_causal, scale=scale)[0]
        return out if out.shape[-1] == width else out[..., :width]
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    if attn_mask is not None:
        attn_mask = _bias(attn_mask, query, key)
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return aten._scaled_dot_product_efficient_attention.default(
        query, key, value, attn_mask, grad, dropout_p, is_causal, scale=scale
    )[0]


def _padded(t: Tensor, multiple: int) -> Tensor:
    lacking = -t.shape[-1] % multiple
    return torch.nn.functional.pad(t, (0, lacking)) if lacking else t


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as the kernel reads it: numbers of the query's dtype, rows that begin at multiples of 16."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf).to(query.dtype)
    length = mask.shape[-1]
    mask = _padded(mask, 16)[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _plain_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None, gqa: bool
) -> Tensor:
    return aten._scaled_dot_product_attention_math.default(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=gqa)[0]
