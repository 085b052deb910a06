"""HOW one pair of blocks is computed: the contract, and which backend fulfils it for a device."""

from __future__ import annotations

import torch

from . import eager
from .contract import Tiles

BACKENDS = ("eager", "fused")


def backend_name(device: torch.device, backend: str | None = None) -> str:
    """The backend that serves tensors on `device`: the one that is asked for, or the fastest there is."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: must be one of {', '.join(map(repr, BACKENDS))}, or None to choose by device")
    if backend == "fused":
        raise ValueError(f"backend='fused': there are no fused tiles for {device.type} yet; pass backend='eager' or None")
    return "eager"


def backend_for(device: torch.device, backend: str | None = None) -> Tiles:
    """The tiles that serve tensors on `device`."""
    backend_name(device, backend)
    return eager
