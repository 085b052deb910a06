"""The memory limit that a trial step must respect, and the peak memory that it reaches.

On a CPU the resident set of the process is measured and compared with the limit. On a GPU the caching allocator enforces the limit.
On devices that report no memory (MPS), a size fails when the device itself runs out.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch

from ... import host_memory
from ...chunks.oom import release
from ...reporting.format import bytes_text
from ...training.memory import peak, reset_peak

# Seconds between two samples of the resident set, where the kernel's peak cannot be reset.
SAMPLE_S = 0.002
# mimalloc returns freed pages after this delay, and only when it is called: an allocation of each size makes it look for them.
MIMALLOC_DELAY_S, MIMALLOC_SIZES = 0.11, (2**18, 2**22, 2**26)


class Limit(NamedTuple):
    """The bytes that a step may use, margin already subtracted, and what happens beyond them.

    mode: "measured": the peak resident set of the process is compared with the limit afterwards; "enforced": the device's allocator
    raises beyond it; "raised": there is no number, and the step fails when the device runs out of memory.
    """

    bytes: int | None
    mode: Literal["measured", "enforced", "raised"]


def limit_of(device: torch.device, budget: int | None, margin: float, ranks: int = 1) -> Limit:
    """Return the memory limit of a device.

    budget: bytes: of the whole process on a CPU, of tensors on a GPU. None means the free memory of a GPU. On a CPU it means this
        rank's share of half of the memory that is available on the host, because other programs need memory too and nothing stops a
        process that takes more.
    margin: fraction of the budget that stays free.
    """
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise ValueError(f"budget is {budget!r}: must be a positive number of bytes")
    if not 0 <= margin < 1:
        raise ValueError(f"margin is {margin!r}: must be a fraction of the memory, at least 0 and below 1")
    if device.type == "cpu":
        used = resident_bytes()
        available = used + _known(host_memory.available())
        default = used + (available - used) // (2 * ranks)
    elif _is_enforceable(device):
        default = available = _device_bytes(device)
    elif budget is not None:
        raise ValueError(f"budget is {bytes_text(budget)}: PyTorch cannot limit the memory of {device.type}; omit the budget")
    else:
        return Limit(None, "raised")
    if budget is not None and budget > available:
        raise ValueError(
            f"budget is {bytes_text(budget)}: {device} has only {bytes_text(available)} for this process; choose a smaller budget"
        )
    return Limit(int((budget or default) * (1 - margin)), "measured" if device.type == "cpu" else "enforced")


@contextmanager
def enforced(limit: Limit, device: torch.device) -> Iterator[None]:
    """Make the device's allocator raise beyond the limit inside this context, if the limit is an enforced one."""
    if limit.mode != "enforced":
        yield
        return
    assert limit.bytes is not None
    module = torch.get_device_module(device)
    before, total = _fraction(device), module.mem_get_info(device)[1]
    module.set_per_process_memory_fraction(min(1.0, limit.bytes / total), device)
    try:
        yield
    finally:
        module.set_per_process_memory_fraction(before, device)


class PeakTracker:
    """A context manager; afterwards `bytes` is the peak memory inside it, None on a device that does not report its memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: int | None = None
        self._host = ResidentTracker() if device.type == "cpu" else None

    def __enter__(self) -> PeakTracker:
        if self._host is not None:
            self._host.__enter__()
        else:
            reset_peak(self.device)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._host is not None:
            self._host.__exit__(*error)
            self.bytes = self._host.bytes
        else:
            self.bytes = peak(self.device)


class ResidentTracker:
    """A context manager; afterwards `bytes` is the highest resident set of this process inside it.

    It uses the kernel's own peak where that can be reset, and samples every two milliseconds elsewhere.
    """

    def __enter__(self) -> ResidentTracker:
        self.bytes = 0
        self._done = threading.Event()
        self._sampler: threading.Thread | None = None
        return_freed_pages()
        if not host_memory.reset_peak():
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bytes = max(self.bytes, resident_bytes())
        if self._sampler is None:
            self.bytes = max(self.bytes, host_memory.peak_resident() or 0)
            return
        self._done.set()
        self._sampler.join()

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_S):
            self.bytes = max(self.bytes, resident_bytes())


def resident_bytes() -> int:
    """Return the resident set size of this process, or raise ValueError on a system that does not report it."""
    return _known(host_memory.resident())


def return_freed_pages() -> None:
    """Make the allocators return freed pages to the system: pages that they keep would count as memory of the next trial."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
    # mimalloc, which PyTorch uses on ARM, returns pages only after a delay, inside a later call.
    before, now = sys.maxsize, resident_bytes()
    while now < before - host_memory.COUNTING_ERROR:
        time.sleep(MIMALLOC_DELAY_S)
        for size in MIMALLOC_SIZES:
            # If even this fails, there is little to return.
            with contextlib.suppress(RuntimeError, MemoryError):
                torch.empty(size, dtype=torch.uint8)
        before, now = now, resident_bytes()


def _known(size: int | None) -> int:
    """Return the size, or raise ValueError if the system did not report it (None)."""
    if size is None:
        raise ValueError(f"memory cannot be measured on this CPU, since {host_memory.REMEDY}, or use an accelerator")
    return size


def _is_enforceable(device: torch.device) -> bool:
    module = torch.get_device_module(device)
    return all(hasattr(module, name) for name in ("set_per_process_memory_fraction", "mem_get_info", "memory_reserved"))


def _device_bytes(device: torch.device) -> int:
    """Return the bytes of device memory that this process may use, those that it already uses included."""
    release()
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    return min(free + module.memory_reserved(device), int(total * _fraction(device)))


def _fraction(device: torch.device) -> float:
    """Return the fraction of the device's memory that this process has limited itself to."""
    read = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", None)
    return 1.0 if read is None else float(read(device))
