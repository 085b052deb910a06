"""How one pair of blocks is computed: the contract, and the backend that implements it for a device and a dtype."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from . import distill, eager, maxsim, one_piece
from .contract import GraphGradients, GraphInputs, OnePieceTiles, PrefixTiles, Tiles
from .distill import DistillTiles
from .maxsim import MaxSimTiles

BACKENDS = ("eager", "fused")


def backend_name(device: torch.device, dtype: torch.dtype = torch.float32, backend: str | None = None) -> str:
    """Return the name of the backend for tensors on `device`: the requested one, or the fastest available."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: must be one of {', '.join(map(repr, BACKENDS))}, or None to choose by device")
    if backend == "eager" or (backend is None and device.type != "cuda"):
        return "eager"
    reason = _fused_unavailable(device, dtype)
    if reason is None:
        return "fused"
    if backend == "fused":
        raise ValueError(f"backend='fused': {reason}; pass backend='eager' or None")
    return "eager"


def backend_for(device: torch.device, dtype: torch.dtype, backend: str | None = None) -> Tiles:
    """Return the backend for tensors on `device`."""
    if backend_name(device, dtype, backend) == "eager":
        return eager
    from . import fused

    return fused


def one_piece_for(tiles: Tiles, device: torch.device) -> OnePieceTiles | None:
    """Return what computes a block with its whole similarity matrix where that fits the workspace; None if tiles are faster."""
    if tiles is eager:
        return one_piece if device.type == "cpu" else None
    from .fused import one_piece as fused_one_piece

    return fused_one_piece if device.type == "cuda" else None


def prefixes_for(tiles: Tiles) -> PrefixTiles | None:
    """Return what computes the prefixes of Matryoshka together; None if each width has to be computed by itself."""
    if tiles is eager:
        return None
    from .fused import matryoshka

    return matryoshka


def distillation_for(device: torch.device, dtype: torch.dtype, backend: str | None = None) -> DistillTiles:
    """Return the backend of distillation for tensors on `device`."""
    if backend_name(device, dtype, backend) == "eager":
        return distill
    from .fused import distill as fused_distill

    return fused_distill


def maxsim_for(device: torch.device, dtype: torch.dtype, backend: str | None = None) -> MaxSimTiles:
    """Return the backend of late interaction for tensors on `device`."""
    if backend_name(device, dtype, backend) == "eager":
        return maxsim
    from .fused import maxsim as fused_maxsim

    return fused_maxsim


def graph_inputs(inputs: Sequence[Tensor]) -> GraphInputs | None:
    """Return what fills the inputs of a CUDA graph in one launch, or None if they have to be filled one by one."""
    return graph_memory.CopiedInputs(inputs) if (graph_memory := _graph_memory_for(inputs)) else None


def graph_gradients(gradients: Sequence[Tensor]) -> GraphGradients | None:
    """Return what reads the gradients of a CUDA graph in one launch, or None if they have to be read one by one."""
    return graph_memory.ScaledGradients(gradients) if (graph_memory := _graph_memory_for(gradients)) else None


def _graph_memory_for(tensors: Sequence[Tensor]) -> ModuleType | None:
    if not tensors or not tensors[0].is_cuda or _fused_unavailable(tensors[0].device, torch.float32) is not None:
        return None
    from .fused import graph_memory

    return graph_memory if graph_memory.can_copy(tensors) else None


def _fused_unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the fused tiles cannot be used, or None. Triton is imported by the first loss that may use it."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install megabatch[fused])"
    try:
        from . import fused
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    return fused.unsupported(device, dtype)
