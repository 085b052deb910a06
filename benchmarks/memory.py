"""Memory of this process: how much is available, and the peak of some work above what was in use before it."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megabatch import host_memory

SAMPLE_S = 0.002


class Peak(NamedTuple):
    """The result of the work, its peak above the start in bytes, and the method by which the peak was measured."""

    result: Any
    extra_bytes: int
    method: str


def peak_of(work: Callable[[], Any], device: str) -> Peak:
    """Run `work`; return its result and the highest memory use during it, minus the use just before it.

    On CUDA this counts allocated tensors, on a CPU the resident set of the process. Run it in a new process whose libraries are
    loaded and which has freed nothing large: the work would reuse memory that the allocator has kept.
    """
    _release_unused()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = work()
        torch.cuda.synchronize()
        return Peak(result, torch.cuda.max_memory_allocated() - before, "torch.cuda.max_memory_allocated")
    if _reset_high_water_mark():
        before = _status_bytes("VmRSS")
        result = work()
        return Peak(result, max(0, _status_bytes("VmHWM") - before), "VmHWM, reset before")
    if Path("/proc/self/status").exists():
        return _sampled(work)
    return _whole_process(work)


def available_bytes(device: str) -> int:
    """Return the bytes that a new case may use on this device now."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return host_memory.available() or _total_bytes()


def total_bytes(device: str) -> int:
    """Return the total memory of the device in bytes."""
    return torch.cuda.mem_get_info()[1] if device == "cuda" else _total_bytes()


def _total_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _release_unused() -> None:
    # The work would reuse pages that were kept after a free, which hides a part of its peak. This trims the C library's allocator;
    # the one in some builds of torch (mimalloc on ARM) offers no such call.
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _reset_high_water_mark() -> bool:
    try:
        # "5" resets VmHWM to the current resident set (see proc_pid_clear_refs(5)).
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    # Some sandboxes accept the write and ignore it.
    return _status_bytes("VmHWM") - _status_bytes("VmRSS") < 2**20


def _status_bytes(field: str) -> int:
    return _field_bytes(Path("/proc/self/status"), field)


def _field_bytes(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{path} has no field {field}: measure on another kernel, or on CUDA")


def _sampled(work: Callable[[], Any]) -> Peak:
    before = highest = _status_bytes("VmRSS")
    done = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(SAMPLE_S):
            highest = max(highest, _status_bytes("VmRSS"))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        result = work()
    finally:
        done.set()
        watcher.join()
    return Peak(result, highest - before, f"VmRSS, sampled every {SAMPLE_S * 1000:.0f} ms")


def _whole_process(work: Callable[[], Any]) -> Peak:
    import resource

    # macOS counts bytes, other systems KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = work()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Peak(result, (after - before) * unit, "ru_maxrss, a lower bound")
