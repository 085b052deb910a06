"""What a number was measured on: a row without its machine, versions and date says nothing."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

import torch

import megabatch
from benchmarks import memory
from megabatch import environment


def describe(device: str) -> dict[str, object]:
    """The machine, its versions and the time now, as a flat record that JSON holds."""
    record: dict[str, object] = {
        "cpu": environment.describe()["devices"][0]["name"] or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory.total_bytes(device),
        "platform": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megabatch": megabatch.__version__,
        "open_clip": _version("open_clip_torch"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if device == "cuda":
        record |= {
            "gpu": torch.cuda.get_device_name(),
            "triton": _version("triton"),
            "float32_products": torch.get_float32_matmul_precision(),
        }
    return record


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
