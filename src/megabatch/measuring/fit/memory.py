"""How much memory a step may take, and how that is held: measured on a CPU, enforced on a GPU, else whatever the device refuses."""

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
from ...reporting.wording import bytes_text


class Limit(NamedTuple):
    """What a step is held to, in bytes, the margin taken off.

    how: "measured": the resident set of the process is compared with it; "enforced": the device's allocator refuses what goes
    beyond; "raised": there is no number, and the step fails where the device says that it has no more.
    """

    bytes: int | None
    how: Literal["measured", "enforced", "raised"]


def limit_of(device: torch.device, budget: int | None, margin: float, ranks: int = 1) -> Limit:
    """The limit of a device.

    budget: bytes, of the whole process on a CPU, of tensors on a GPU; None is what the GPU has free, or half of what the host has,
        shared among the ranks, since others live on that too and nothing stops a process that takes more.
    """
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise ValueError(f"budget is {budget!r}: must be a number of bytes above 0")
    if not 0 <= margin < 1:
        raise ValueError(f"margin is {margin!r}: a share of the memory that is left free, from 0 up and below 1")
    if device.type == "cpu":
        there = _host_bytes()
        holds = resident_bytes()
        usual = holds + (there - holds) // (2 * ranks)
    elif _is_enforceable(device):
        usual = there = _device_bytes(device)
    elif budget is not None:
        raise ValueError(f"budget is {bytes_text(budget)}: the memory of {device.type} cannot be limited from here; leave it out")
    else:
        return Limit(None, "raised")
    if budget is not None and budget > there:
        raise ValueError(f"budget is {bytes_text(budget)}: {device} has {bytes_text(there)} for this process; ask for no more")
    return Limit(int((budget or usual) * (1 - margin)), "measured" if device.type == "cpu" else "enforced")


@contextmanager
def held(limit: Limit, device: torch.device) -> Iterator[None]:
    """Lets the device's allocator refuse what goes beyond an enforced limit."""
    if limit.how != "enforced":
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


class PeakMemory:
    """A context; afterwards `bytes` is the highest use within it, None where the device does not tell."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: int | None = None
        self._host = PeakResident() if device.type == "cpu" else None
        self._module: Any = torch.get_device_module(device)

    def __enter__(self) -> PeakMemory:
        if self._host is not None:
            self._host.__enter__()
        elif hasattr(self._module, "reset_peak_memory_stats"):
            self._module.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._host is not None:
            self._host.__exit__(*error)
            self.bytes = self._host.bytes
        elif hasattr(self._module, "max_memory_allocated"):
            self.bytes = self._module.max_memory_allocated(self.device)


def _host_bytes() -> int:
    """What this process has and may still take."""
    return resident_bytes() + known(host_memory.available())


def _is_enforceable(device: torch.device) -> bool:
    module = torch.get_device_module(device)
    return all(hasattr(module, name) for name in ("set_per_process_memory_fraction", "mem_get_info", "memory_reserved"))


def _device_bytes(device: torch.device) -> int:
    """What tensors of this process may take of the device, those there are included."""
    release()
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    return min(free + module.memory_reserved(device), int(total * _fraction(device)))


def _fraction(device: torch.device) -> float:
    """The share of the device's memory that the process has allowed itself."""
    read = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", None)
    return 1.0 if read is None else float(read(device))


SAMPLE_S = 0.002
# What mimalloc waits before it returns pages, and sizes at which it looks for them; nothing of them is written to.
DELAY_S, SIZES = 0.11, (2**18, 2**22, 2**26)


def resident_bytes() -> int:
    """Return the resident set size of this process; ValueError where this system does not tell it."""
    return known(host_memory.resident())


def known(size: int | None) -> int:
    """Return a size that the system told; ValueError where it did not."""
    if size is None:
        raise ValueError(f"what fits on this CPU cannot be measured, since {host_memory.REMEDY}, or use an accelerator")
    return size


def give_back() -> None:
    """Lets allocators return what was freed: pages that they keep would be counted to the next piece of work."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
    # mimalloc, which PyTorch brings along on ARM, does so in its own time, and only when it is called.
    before, now = sys.maxsize, resident_bytes()
    while now < before - host_memory.INEXACT:
        time.sleep(DELAY_S)
        for size in SIZES:
            # Where not even that is to be had, there is little to give back.
            with contextlib.suppress(RuntimeError, MemoryError):
                torch.empty(size, dtype=torch.uint8)
        before, now = now, resident_bytes()


class PeakResident:
    """A context; afterwards `bytes` is the highest resident set within it.

    The kernel's own mark where it can be reset, else samples of every two milliseconds.
    """

    def __enter__(self) -> PeakResident:
        self.bytes = 0
        self._done = threading.Event()
        self._watcher: threading.Thread | None = None
        give_back()
        if not host_memory.reset_peak():
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bytes = max(self.bytes, resident_bytes())
        if self._watcher is None:
            self.bytes = max(self.bytes, host_memory.peak_resident() or 0)
            return
        self._done.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_S):
            self.bytes = max(self.bytes, resident_bytes())
