"""What a loss accepts: checks of one rank's arguments, and the warning for a temperature passed as the scale.

Every check raises a ValueError that names the value, the rule and the remedy.
"""

from __future__ import annotations

import math
import numbers
import sys
import warnings
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..ring import Ring
from ..tiles.contract import accumulator

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
ID_DTYPES = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)
DUPLICATES = ("mask", "positive")
PRECISIONS = ("ieee", "tf32")

# Rows of each side whose norms the warning for a small scale reads, and how far from 1 they may be: bf16 rounds them by less.
NORM_ROWS, NORM_TOLERANCE = 8, 0.02

_examined_on_device = False
# The scales that a warning was given for, to one digit: a learnable one changes in every step.
_warned: set[str] = set()


def product_dtype(t: Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product reads t: that of autocast if it is enabled, except for float64."""
    if t.dtype != torch.float64 and torch.is_autocast_enabled(t.device.type):
        return torch.get_autocast_dtype(t.device.type)
    return t.dtype


def is_transformed(t: Tensor) -> bool:
    """Return whether t carries a tangent or belongs to a transform such as vmap."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
        return True
    return is_functorch_wrapped_tensor(t) or is_legacy_batchedtensor(t)


def can_read(device: torch.device) -> bool:
    """Return whether the host can read a tensor on `device` now: not while a CUDA graph is captured."""
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def check_number(name: str, value: object, *, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise unless value is a finite number in [low, high]."""
    try:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        valid = is_number and math.isfinite(value) and low <= float(value) <= high  # type: ignore[arg-type]
    except OverflowError:
        # An integer that no float can represent; it has too many digits to be shown.
        raise ValueError(f"{name} has more than 308 digits: must be a finite number") from None
    if not valid:
        limits = "" if math.isinf(low) else f" in [{low:g}, {high:g}]"
        raise ValueError(f"{name}={value!r}: must be a finite number{limits}")


def check_duplicates(value: object) -> None:
    """Raise unless value is one of the two treatments of equal ids."""
    if value not in DUPLICATES:
        raise ValueError(f"duplicates={value!r}: must be one of {', '.join(map(repr, DUPLICATES))}")


def check_tensor(name: str, t: object, meaning: str) -> None:
    """Raise unless t is a dense tensor with values that no function transform has wrapped."""
    if not isinstance(t, Tensor):
        raise ValueError(f"{name} is a {type(t).__name__}: must be a tensor of {meaning}")
    if is_functorch_wrapped_tensor(t):
        raise ValueError(
            f"{name} is inside a transform of torch.func (grad, vjp, jvp, vmap, …), which the tiled losses do not support: use "
            "torch.autograd.grad or .backward() for first derivatives, and the formula in megabatch.reference for everything else"
        )
    if forward_ad.unpack_dual(t).tangent is not None:
        raise ValueError(
            f"{name} is a dual tensor of forward-mode AD, and the tiled losses have reverse-mode derivatives only: use "
            ".backward(), or the formula in megabatch.reference"
        )
    if t.is_nested:
        raise ValueError(
            f"{name} is a nested tensor: must be dense; pass torch.cat({name}.unbind()), or the padded tensor without its padding"
        )
    if t.layout != torch.strided:
        raise ValueError(f"{name} has the layout {t.layout}: must be dense; pass {name}.to_dense()")
    if t.is_meta:
        raise ValueError(f"{name} is on the meta device, where tensors have no values: create it on a CPU or an accelerator")
    if type(t) not in PLAIN_TENSORS and is_traceable_wrapper_subclass(t):
        kind = type(t).__name__
        remedy = (
            f"{name}.to_local() for rows sharded over `group`, {name}.full_tensor() for one value"
            if kind == "DTensor"
            else "that one"
        )
        raise ValueError(f"{name} is a {kind}, which wraps another tensor: must be a plain tensor; pass {remedy}")


def check_embeddings(x: Tensor, y: Tensor, *, same_rows: bool) -> None:
    """Raise unless x and y are embeddings of one width, dtype and device, y with at least as many rows."""
    for name, t in (("x", x), ("y", y)):
        check_tensor(name, t, "embeddings")
        if t.ndim != 2 or t.shape[1] == 0:
            raise ValueError(f"{name} has shape {tuple(t.shape)}: must be (rows, width) with a width of at least 1")
        if t.dtype not in DTYPES:
            raise ValueError(f"{name} is {t.dtype}: must be one of {', '.join(map(str, DTYPES))}; convert it with .float()")
    if x.device != y.device:
        raise ValueError(f"x is on {x.device} and y on {y.device}: must be on one device; move one with .to()")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x has width {x.shape[1]} and y {y.shape[1]}: must be equal; project both to one embedding width")
    if x.dtype != y.dtype and product_dtype(x) != product_dtype(y):
        raise ValueError(f"x is {x.dtype} and y {y.dtype}: must be equal; convert one with .to()")
    if len(y) < len(x):
        raise ValueError(f"x has {len(x)} rows and y {len(y)}: y must hold the positive of every row of x as its first rows")
    if same_rows and len(y) != len(x):
        raise ValueError(
            f"x has {len(x)} rows and y {len(y)}: a symmetric loss needs equally many; pass symmetric=False to use the further "
            "rows of y as extra negatives"
        )


def check_ids(ids: Tensor | None, x: Tensor, y: Tensor, name: str = "ids") -> None:
    """Raise unless ids is None or one integer for each row of y."""
    if ids is None:
        return
    check_tensor(name, ids, "integers, one for each row of y")
    if ids.dtype not in ID_DTYPES:
        raise ValueError(f"{name} is {ids.dtype}: must be a tensor of integers, one for each row of y, for example of torch.int64")
    if ids.shape != y.shape[:1]:
        raise ValueError(f"{name} has shape {tuple(ids.shape)}: must be ({len(y)},), one for each row of y")
    if ids.device != x.device:
        raise ValueError(f"{name} is on {ids.device} and x on {x.device}: must be on one device; move it with .to()")


def check_weights(weights: Tensor | None, x: Tensor) -> None:
    """Raise unless weights is None or one number without a gradient for each row of x."""
    if weights is None:
        return
    check_tensor("weights", weights, "floating-point numbers, one for each row of x")
    if not weights.is_floating_point():
        raise ValueError(f"weights is {weights.dtype}: must be a floating-point tensor")
    if weights.shape != x.shape[:1]:
        raise ValueError(f"weights has shape {tuple(weights.shape)}: must be ({len(x)},), one for each row of x")
    if weights.device != x.device:
        raise ValueError(f"weights is on {weights.device} and x on {x.device}: must be on one device; move it with .to()")
    if weights.requires_grad:
        raise ValueError("weights requires a gradient: the loss has none for it; pass weights.detach()")
    # Elsewhere, reading them would synchronise the device.
    if weights.is_cpu and len(weights):
        least, most = (float(t) for t in weights.aminmax())
        if not (least >= 0 and math.isfinite(most)):
            raise ValueError(
                f"weights holds {least:g} to {most:g}: must be finite and not negative; a row of weight 0 does not count"
            )


def check_scalar(name: str, value: Tensor | float, x: Tensor) -> None:
    """Raise unless the scale or bias is one number that logits can represent."""
    if not isinstance(value, Tensor):
        check_number(name, value)
        largest = torch.finfo(accumulator(product_dtype(x))).max
        if abs(value) > largest:
            raise ValueError(f"{name}={value!r}: must be within ±{largest:.3g}, what logits of {x.dtype} embeddings can hold")
        return
    check_tensor(name, value, "one number")
    if value.numel() != 1 or not value.is_floating_point():
        raise ValueError(f"{name} has shape {tuple(value.shape)} and is {value.dtype}: must be one floating-point number")


def check_group(x: Tensor, ring: Ring) -> None:
    """Raise if no backend of the group exchanges tensors of x's device."""
    if ring.size > 1 and x.device.type not in ring.backends:
        raise ValueError(
            f"x is on {x.device}, and the backends of group exchange tensors on {' and '.join(ring.backends)}: move the "
            "embeddings there, or initialise the process group with a backend for this device"
        )


def check_workspace(workspace: int | None) -> None:
    """Raise unless workspace is None or a positive number of bytes."""
    if workspace is not None and (not isinstance(workspace, int) or isinstance(workspace, bool) or workspace <= 0):
        raise ValueError(f"workspace={workspace!r}: must be a positive number of bytes, for example 64 * 2**20")


def check_precision(precision: object, int8_backward: object, dtype: torch.dtype) -> None:
    """Raise unless precision is a known value and int8_backward a bool, which bf16 embeddings alone may have as True."""
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision={precision!r}: must be one of {', '.join(map(repr, PRECISIONS))}; it affects fp32 products only"
        )
    if not isinstance(int8_backward, bool):
        raise ValueError(f"int8_backward={int8_backward!r}: must be True or False")
    if int8_backward and dtype != torch.bfloat16:
        raise ValueError(
            f"int8_backward=True and x is {str(dtype).removeprefix('torch.')}: must be bfloat16; pass x.bfloat16(), or call the "
            "loss under torch.autocast in bfloat16"
        )


def check_inference(names: Sequence[str], inference_by_rank: Sequence[Sequence[bool]]) -> None:
    """Raise if a tensor was made in inference mode on any rank: it cannot be saved for backward.

    names: of the tensors; inference_by_rank: for each rank, which of them were made in inference mode.
    """
    for rank, flags in enumerate(inference_by_rank):
        for name, inference in zip(names, flags, strict=True):
            if inference:
                where = f" on rank {rank}" if len(inference_by_rank) > 1 else ""
                raise ValueError(
                    f"{name}{where} was made in inference mode and cannot take part in a gradient: make it under torch.no_grad() "
                    f"instead, or pass {name}.clone()"
                )


@overload
def outside_inference(t: Tensor) -> Tensor: ...
@overload
def outside_inference(t: Tensor | None) -> Tensor | None: ...
def outside_inference(t: Tensor | None) -> Tensor | None:
    """Return a tensor that can be saved for backward: a copy of one that was made in inference mode."""
    return t.clone() if t is not None and t.is_inference() else t


def warn_of_small_scale(scale: float | None, x: Tensor, y: Tensor) -> None:
    """Warn if the scale is below 1 and the embeddings have unit length, so that all logits lie between -1 and 1.

    Embeddings on a CPU are read in every call with such a scale; on other devices, where reading synchronises, in the first one.
    """
    if scale is None or not scale < 1 or f"{scale:.0e}" in _warned:
        return
    global _examined_on_device
    if x.device.type != "cpu":
        if _examined_on_device or not can_read(x.device):
            return
        _examined_on_device = True
    if not (_is_normalised(x) and _is_normalised(y)):
        return
    harm = "puts all logits close together" if scale > 0 else "pulls no positive pair together"
    remedy = f"for a temperature of {scale:.3g} pass scale={1 / scale:.3g}" if scale > 0 else "pass a positive one"
    warnings.warn(
        f"scale={scale:.3g} with normalised embeddings {harm}; scale is 1 / temperature: {remedy}",
        UserWarning,
        stacklevel=_callers_level(),
    )
    _warned.add(f"{scale:.0e}")


def _is_normalised(embeddings: Tensor) -> bool:
    if not len(embeddings):
        return False
    norms = torch.linalg.vector_norm(embeddings.detach()[:NORM_ROWS].float(), dim=1)
    return bool(((norms - 1).abs() <= NORM_TOLERANCE).all())


def _callers_level() -> int:
    """Return the stacklevel of the first frame outside of megabatch and torch, which wraps losses and Modules in frames."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("megabatch", "torch"):
        level, frame = level + 1, frame.f_back
    return level
