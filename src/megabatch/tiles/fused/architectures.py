"""The GPU architectures: which devices the fused tiles support, and which kernels are used on each."""

from __future__ import annotations

import functools
import os

import torch
import triton

from .launch import Architecture, SpecialisedKernels

# Triton reads this when a kernel is declared, so a later change has no effect.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# The Hopper kernels are written in Gluon, which is experimental and changes between releases. They were run with these.
HOPPER_TRITON_VERSIONS = ("3.6.",)


@functools.cache
def _hopper_kernels() -> SpecialisedKernels | None:
    if not triton.__version__.startswith(HOPPER_TRITON_VERSIONS):
        return None
    # Not every Triton has what this imports.
    from . import hopper

    return hopper


# By compute capability, ascending. A device has the last record whose capability it reaches.
ARCHITECTURES = (
    Architecture("ampere", (8, 0)),
    Architecture("hopper", (9, 0), descriptors=True, load_kernels=_hopper_kernels, prefixes=True),
    Architecture("blackwell", (10, 0), descriptors=True),
)
ROCM = Architecture("rocm")
INTERPRETER = Architecture("interpreter", descriptors=True, prefixes=True)


def architecture_of(device: torch.device) -> Architecture:
    """Return the architecture of a device that `unsupported` has nothing to say about."""
    if device.type == "cpu":
        return INTERPRETER
    if torch.version.hip is not None:
        return ROCM
    return next(record for record in reversed(ARCHITECTURES) if record.capability <= _capability(device))


def unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the fused tiles cannot compute such embeddings, or None."""
    if dtype == torch.float64:
        return "there are no fused tiles for float64"
    if INTERPRETED:
        if dtype == torch.bfloat16:
            return "Triton's interpreter (TRITON_INTERPRET=1) computes bfloat16 wrongly"
        return None
    if device.type != "cuda":
        return f"there are no fused tiles for {device.type}, only for CUDA devices"
    if torch.version.hip is None and _capability(device) < ARCHITECTURES[0].capability:
        needed = ".".join(map(str, ARCHITECTURES[0].capability))
        return f"this device has compute capability {'.'.join(map(str, _capability(device)))}, and fused tiles need {needed}"
    return None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
