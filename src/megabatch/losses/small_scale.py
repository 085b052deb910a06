"""A warning where a temperature was probably passed as the scale, which is its inverse."""

from __future__ import annotations

import sys
import warnings

import torch
from torch import Tensor

# How many rows of each side are looked at, and how far their norms may be from 1: bf16 rounds them by less.
ROWS, TOLERANCE = 8, 0.02

_examined_on_device = False
# The scales that a warning was given for, to one digit: a learnable one changes in every step.
_warned: set[str] = set()


def can_wait(device: torch.device) -> bool:
    """Return whether a tensor on `device` can be read now: not while a CUDA graph is captured."""
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def warn_of_small_scale(scale: float | None, x: Tensor, y: Tensor) -> None:
    """Warn if the scale is below 1 and the embeddings have unit length, so that all logits lie between -1 and 1.

    Embeddings on a CPU are looked at in every call with such a scale; on other devices, where that takes a wait, in the first one.
    """
    if scale is None or not scale < 1 or f"{scale:.0e}" in _warned:
        return
    global _examined_on_device
    if x.device.type != "cpu":
        if _examined_on_device or not can_wait(x.device):
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
    norms = torch.linalg.vector_norm(embeddings.detach()[:ROWS].float(), dim=1)
    return bool(((norms - 1).abs() <= TOLERANCE).all())


def _callers_level() -> int:
    """The stacklevel of the first frame outside this package and PyTorch, which wraps losses and Modules in frames of its own."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("megabatch", "torch"):
        level, frame = level + 1, frame.f_back
    return level
