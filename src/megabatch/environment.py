"""What a bug report should contain about a machine: versions, devices, and how its processes were launched.

It is only reported: nothing here decides what is computed.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

import torch

from megabatch.tiles import backend_name

from . import host_memory
from .version import __version__

JsonObject = dict[str, Any]

# Triton's builds for other hardware have other distribution names.
TRITONS = ("triton", "triton-rocm", "triton-xpu", "triton-windows", "pytorch-triton", "pytorch-triton-rocm")
PEERS = ("open_clip_torch", "sentence-transformers", "transformers", "lightning")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


def describe() -> JsonObject:
    """Return the report: nested dicts and lists of plain types, ready for JSON. None is absent or unknown; memory is in bytes.

    It does not fail: a device that cannot be queried is reported with its error.

    >>> describe()["devices"][0]["device"]
    'cpu'
    """
    return {
        "megabatch": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        "torch": {"version": str(torch.__version__), "cuda": torch.version.cuda, "rocm": torch.version.hip},
        "triton": next(iter(_installed(TRITONS).values()), None),
        "devices": _devices(),
        "peers": _installed(PEERS),
        "distributed": _distributed(),
    }


def as_text(report: JsonObject) -> str:
    """Return the report of `describe` as lines of a label and a value."""
    lines = [
        ("megabatch", report["megabatch"]),
        ("Python", report["python"]),
        ("PyTorch", _torch_text(report["torch"])),
        ("Triton", report["triton"] or "not installed"),
        ("system", report["system"]),
        *(("device", _device_text(device)) for device in report["devices"]),
        ("peers", ", ".join(f"{name} {version}" for name, version in report["peers"].items()) or "none installed"),
        ("distributed", _distributed_text(report["distributed"])),
        ("launcher", " ".join(f"{k}={v}" for k, v in report["distributed"]["launcher"].items()) or "no variables"),
    ]
    return "\n".join(f"{label:<12} {value}" for label, value in lines)


def device_name(device: torch.device) -> str:
    """Return the name of a device: of a GPU from its driver, of a CPU its model."""
    if device.type == "cpu":
        return _cpu_name() or "cpu"
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return device.type if properties is None else str(properties(device).name)


def device_memory(device: torch.device) -> int | None:
    """Return the size of a device's memory in bytes; None for a CPU whose system does not report it."""
    if device.type == "cpu":
        return host_memory.total()
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def _installed(distributions: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed ones, from their metadata: importing them could take seconds, or fail."""
    versions = {}
    for name in distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _devices() -> list[JsonObject]:
    """Return one entry per device, the CPU first."""
    kinds: dict[str, Callable[[], list[JsonObject]]] = {"cpu": _cpu, "cuda": _cuda, "mps": _mps, "xpu": _xpu}
    entries = []
    for kind, probe in kinds.items():
        # A broken driver can raise anything, and that is when this report is needed.
        try:
            entries += probe()
        except Exception as error:
            entries.append({"device": kind, "error": f"{type(error).__name__}: {error}"})
    return entries


def _device(device: str, name: str | None, capability: str | None, memory: int | None, **more: Any) -> JsonObject:
    entry = {"device": device, "name": name, "capability": capability, "memory": memory, **more}
    return {**entry, "backend": backend_name(torch.device(device))}


def _cpu() -> list[JsonObject]:
    capability = torch.backends.cpu.get_cpu_capability()
    return [_device("cpu", _cpu_name(), capability, host_memory.total(), threads=torch.get_num_threads())]


def _cuda() -> list[JsonObject]:
    # ROCm devices are "cuda" devices to torch, and have an architecture name instead of a compute capability.
    entries = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = properties.gcnArchName if torch.version.hip else f"{properties.major}.{properties.minor}"
        entries.append(_device(f"cuda:{index}", properties.name, capability, properties.total_memory))
    return entries


def _mps() -> list[JsonObject]:
    if not torch.backends.mps.is_available():
        return []
    return [_device("mps", _cpu_name(), None, torch.mps.recommended_max_memory())]


def _xpu() -> list[JsonObject]:
    entries = []
    for index in range(torch.xpu.device_count() if torch.xpu.is_available() else 0):
        properties = torch.xpu.get_device_properties(index)
        entries.append(_device(f"xpu:{index}", properties.name, None, properties.total_memory))
    return entries


def _cpu_name() -> str | None:
    """Return the name of the CPU model; the standard library knows it on Windows only."""
    commands = {"Linux": ["lscpu"], "Darwin": ["sysctl", "machdep.cpu.brand_string"]}
    command = commands.get(platform.system())
    if command is not None:
        try:
            environment = {**os.environ, "LC_ALL": "C"}
            output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=5, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            output = ""
        for line in output.splitlines():
            label, _, value = line.partition(":")
            if label.strip() in ("Model name", "machdep.cpu.brand_string"):
                return value.strip()
    return platform.processor() or None


def _distributed() -> JsonObject:
    distributed = torch.distributed
    report: JsonObject = {
        "available": distributed.is_available(),
        "backends": [],
        "group": None,
        "launcher": {name: os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ},
    }
    if distributed.is_available():
        report["backends"] = [b for b in ("gloo", "nccl", "xccl", "mpi") if distributed.is_backend_available(b)]
        if distributed.is_initialized():
            report["group"] = {
                "backend": distributed.get_backend(),
                "rank": distributed.get_rank(),
                "world_size": distributed.get_world_size(),
            }
    return report


def _torch_text(versions: JsonObject) -> str:
    builds = [f"{name} {versions[key]}" for name, key in (("CUDA", "cuda"), ("ROCm", "rocm")) if versions[key]]
    return f"{versions['version']}, built {'for ' + ', '.join(builds) if builds else 'without CUDA and ROCm'}"


def _device_text(device: JsonObject) -> str:
    if "error" in device:
        return f"{device['device']}: cannot be queried: {device['error']}"
    parts = [device["name"] or "unknown name"]
    if "threads" in device:
        parts.append(f"{device['threads']} threads")
    if device["capability"] is not None:
        parts.append(f"capability {device['capability']}")
    parts.append("unknown memory" if device["memory"] is None else f"{device['memory'] / 2**30:.1f} GiB")
    return f"{device['device']}: {', '.join(parts)}; {device['backend']} tiles"


def _distributed_text(distributed: JsonObject) -> str:
    if not distributed["available"]:
        return "not in this build of PyTorch"
    backends = f"has {', '.join(distributed['backends']) or 'no backends'}"
    group = distributed["group"]
    if group is None:
        return f"{backends}; no process group"
    return f"{backends}; {group['backend']} group, rank {group['rank']} of {group['world_size']}"
