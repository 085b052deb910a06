"""Inputs on their way to the device, behind the work that it has already been given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .rows import map_tensors


def bring(tree: Any, device: torch.device | str) -> Any:
    """The tree with its tensors on the device; the host does not wait for them.

    A copy from pageable memory stops the host until the device is through with all that came before, and then until the copy is
    done. So what lies on the host goes through pinned memory, which PyTorch keeps for the next chunk.
    """
    ready = _pinned if torch.device(device).type == "cuda" else _as_it_is
    return map_tensors(tree, lambda tensor: ready(tensor).to(device, non_blocking=True))


def _pinned(tensor: Tensor) -> Tensor:
    plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_nested
    return tensor.pin_memory() if plain and not tensor.requires_grad else tensor


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
