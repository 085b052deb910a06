"""Tile sizes of each kernel: as tuned on this device, or on one of the same capability, or a guess that fits any other.

tuned_configs.json holds what `python -m benchmarks.tune` measured, with device and date: `blocks` of the portable kernels and
`pipelines` of those for Hopper.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

TUNED = Path(__file__).with_name("tuned_configs.json")


class Blocks(NamedTuple):
    """Configuration of a portable kernel: tiles of m by n, with k of the embedding width per step of the product.

    programs: per multiprocessor.
    group: how many rows of tiles are walked together, for the L2 cache.
    pieces: the epilogue handles a tile whole, or in two or four pieces.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    programs: int = 1
    group: int = 8
    pieces: int = 1


class Pipeline(NamedTuple):
    """Configuration of a Hopper kernel, whose warp groups compute pairs of tiles (hopper/pipeline.py).

    group: how many rows of pairs of tiles are walked together, for the L2 cache.
    x_slots, y_slots: shared memory for blocks of x, per warp group, and of y, shared by both.
    lag: how many steps the second warp group is behind the first.
    out_slots: through how many slots per warp group a gradient leaves.
    min_tile_pairs: from how many pairs of tiles per multiprocessor on the kernel is faster than the portable one; None for never.
    """

    group: int
    x_slots: int
    y_slots: int
    lag: int
    out_slots: int
    min_tile_pairs: float | None


# For Triton's interpreter on a CPU: small, so that small inputs have edges and several tiles.
INTERPRETED = Blocks(16, 32, 16, 4, 1, pieces=2)


@functools.cache
def blocks_for(kernel: str, device: torch.device, dtype: torch.dtype, precision: str, width: int) -> Blocks:
    """Return the blocks of a kernel: "stats", "gradient" or "sigmoid"."""
    if device.type == "cpu":
        return INTERPRETED
    entry = _tuned("blocks", kernel, device, kind_of(dtype, precision), width)
    return _narrowed(Blocks(*(entry[field] for field in Blocks._fields)) if entry else _guess(device, dtype, precision), width)


@functools.cache
def pipeline_for(kernel: str, device: torch.device, dtype: torch.dtype, width: int) -> Pipeline | None:
    """Return the pipeline of a Hopper kernel, or None if it was not measured on such a device."""
    entry = _tuned("pipelines", kernel, device, kind_of(dtype, ""), width)
    return Pipeline(*(entry[field] for field in Pipeline._fields)) if entry else None


def _tuned(what: str, kernel: str, device: torch.device, kind: str, width: int) -> dict[str, Any] | None:
    """Return the entry of this device, or else of its capability, at the nearest width."""
    name, capability = device_kind(device)
    known = [entry for entry in json.loads(TUNED.read_text())[what] if (entry["kernel"], entry["kind"]) == (kernel, kind)]
    near = [entry for entry in known if entry["device"] == name] or [entry for entry in known if entry["capability"] == capability]
    return min(near, key=lambda entry: abs(entry["width"] - width), default=None)


def kind_of(dtype: torch.dtype, precision: str) -> str:
    """Return how products are computed: the dtype of the embeddings, or the precision for fp32."""
    return precision if dtype == torch.float32 else str(dtype).removeprefix("torch.")


def device_kind(device: torch.device) -> tuple[str, str]:
    """Return the name of a device and its compute capability, or the architecture on ROCm."""
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.gcnArchName if torch.version.hip else f"{properties.major}.{properties.minor}"


def _guess(device: torch.device, dtype: torch.dtype, precision: str) -> Blocks:
    """Return the largest blocks that fit into the shared memory of a multiprocessor, whatever the device."""
    if dtype == torch.float32 and precision == "ieee":
        return Blocks(64, 64, 16, 4, 2)
    properties: Any = torch.cuda.get_device_properties(device)
    available = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    k = 128 // dtype.itemsize
    sizes = (Blocks(128, 128, k, 8, 3), Blocks(128, 128, k // 2, 8, 2), Blocks(64, 64, k // 2, 4, 2))
    return next((blocks for blocks in sizes if _shared_bytes(blocks, dtype) <= available), sizes[-1])


def _shared_bytes(blocks: Blocks, dtype: torch.dtype) -> int:
    """Return the shared memory for the operands of all stages and a piece of the gradient."""
    out = 2 if dtype == torch.bfloat16 else 4
    return blocks.stages * (blocks.m + blocks.n) * blocks.k * dtype.itemsize + blocks.m * blocks.n * out // blocks.pieces


def _narrowed(blocks: Blocks, width: int) -> Blocks:
    """Limit k to what the embeddings need."""
    return blocks._replace(k=min(blocks.k, max(16, 1 << (width - 1).bit_length())))
