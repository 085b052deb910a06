"""How large the blocks of each kernel are: as measured on this device, or on one of its kind, or a guess that fits the rest.

tuned_configs.json holds what `python -m benchmarks.tune` measured, with device and date: `blocks` of the kernels for all devices,
`rings` of those for Hopper.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

MEASURED = Path(__file__).with_name("tuned_configs.json")


class Blocks(NamedTuple):
    """A tile of m by n, k of the width at a time; `programs` on each multiprocessor; tiles in groups of `group` rows of tiles; what
    is made of a tile's product is made of it whole, or in two or four `pieces`."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    programs: int = 1
    group: int = 8
    pieces: int = 1


class Rings(NamedTuple):
    """Of a kernel for Hopper: pairs of tiles in groups of `group` rows; slots for x of each group of warps, and for y of both; how
    many steps the second group is `behind` the first; through how many `places` of each a gradient leaves. And from how many
    pairs of tiles for a multiprocessor on it is faster than the kernel for all devices, if it ever is."""

    group: int
    x_slots: int
    y_slots: int
    behind: int
    places: int
    least_pairs: float | None


# What Triton's interpreter runs on a CPU: small, so that small inputs have edges and several tiles.
INTERPRETED = Blocks(16, 32, 16, 4, 1, pieces=2)


@functools.cache
def blocks_for(kernel: str, device: torch.device, dtype: torch.dtype, precision: str, width: int) -> Blocks:
    """The blocks for a kernel: "stats", "gradient" or "sigmoid"."""
    if device.type == "cpu":
        return INTERPRETED
    entry = _measured("blocks", kernel, device, kind_of(dtype, precision), width)
    return _narrowed(Blocks(*(entry[field] for field in Blocks._fields)) if entry else _guess(device, dtype, precision), width)


@functools.cache
def rings_for(kernel: str, device: torch.device, dtype: torch.dtype, width: int) -> Rings | None:
    """The rings for a kernel, by the same names, where it was measured."""
    entry = _measured("rings", kernel, device, kind_of(dtype, ""), width)
    return Rings(*(entry[field] for field in Rings._fields)) if entry else None


def _measured(what: str, kernel: str, device: torch.device, kind: str, width: int) -> dict[str, Any] | None:
    """The entry for this device, or one of its kind, at the nearest width."""
    name, capability = device_kind(device)
    known = [entry for entry in json.loads(MEASURED.read_text())[what] if (entry["kernel"], entry["kind"]) == (kernel, kind)]
    near = [entry for entry in known if entry["device"] == name] or [entry for entry in known if entry["capability"] == capability]
    return min(near, key=lambda entry: abs(entry["width"] - width), default=None)


def kind_of(dtype: torch.dtype, precision: str) -> str:
    """How products are computed: by the dtype of the embeddings, or by what fp32 may be rounded to."""
    return precision if dtype == torch.float32 else str(dtype).removeprefix("torch.")


def device_kind(device: torch.device) -> tuple[str, str]:
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.gcnArchName if torch.version.hip else f"{properties.major}.{properties.minor}"


def _guess(device: torch.device, dtype: torch.dtype, precision: str) -> Blocks:
    """Blocks of the largest size that the memory of a multiprocessor has room for, whatever the device."""
    if dtype == torch.float32 and precision == "ieee":
        return Blocks(64, 64, 16, 4, 2)
    properties: Any = torch.cuda.get_device_properties(device)
    room = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    k = 128 // dtype.itemsize
    sizes = (Blocks(128, 128, k, 8, 3), Blocks(128, 128, k // 2, 8, 2), Blocks(64, 64, k // 2, 4, 2))
    return next((blocks for blocks in sizes if _shared_bytes(blocks, dtype) <= room), sizes[-1])


def _shared_bytes(blocks: Blocks, dtype: torch.dtype) -> int:
    """Operands of all stages, and a tile of the gradient on its way out."""
    out = 2 if dtype == torch.bfloat16 else 4
    return blocks.stages * (blocks.m + blocks.n) * blocks.k * dtype.itemsize + blocks.m * blocks.n * out // blocks.pieces


def _narrowed(blocks: Blocks, width: int) -> Blocks:
    """No wider than the embeddings need."""
    return blocks._replace(k=min(blocks.k, max(16, 1 << (width - 1).bit_length())))
