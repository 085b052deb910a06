"""What a number was measured on: a row without its machine, versions and date says nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import megabatch
from benchmarks import memory


def describe(device: str) -> dict[str, object]:
    """The machine, its versions and the time now, as a flat record that JSON holds."""
    record: dict[str, object] = {
        "cpu": cpu_name(),
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


def cpu_name() -> str:
    """The processor's name as the system gives it, or the architecture."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    # ARM kernels leave the name out of /proc/cpuinfo.
    for command in (["lscpu"], ["sysctl", "-n", "machdep.cpu.brand_string"]):
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        if command == ["lscpu"]:
            text = next((line.split(":", 1)[1] for line in text.splitlines() if line.startswith("Model name")), "")
        if text.strip():
            return text.strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
