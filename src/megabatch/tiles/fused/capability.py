"""What a device can do, found out by asking it, never by a crash."""

from __future__ import annotations

import functools
import os

import torch

# Triton reads this when a kernel is declared, so what held then holds for good.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot serve such embeddings, or None."""
    if dtype == torch.float64:
        return "there are no fused tiles for float64"
    if INTERPRETED:
        if dtype == torch.bfloat16:
            return "Triton's interpreter (TRITON_INTERPRET=1) computes bfloat16 wrongly"
        return None
    if device.type != "cuda":
        return f"there are no fused tiles for {device.type}, only for CUDA devices"
    if torch.version.hip is None and _capability(device) < (8, 0):
        return f"this device has compute capability {'.'.join(map(str, _capability(device)))}, and fused tiles need 8.0"
    return None


def has_descriptors(device: torch.device) -> bool:
    """Whether kernels read and write by tensor descriptors (TMA), as NVIDIA's devices do since Hopper; interpreted ones can too."""
    return device.type == "cpu" or (torch.version.hip is None and _capability(device) >= (9, 0))


@functools.cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors; two on a CPU, so that interpreted programs share the tiles."""
    return 2 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
