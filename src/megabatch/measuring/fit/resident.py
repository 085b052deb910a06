"""The memory of this process on a CPU, again and again: its resident set now, and the highest it rose to during a piece of work."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from types import TracebackType

import torch

from ... import host_memory

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


class Highest:
    """A context; afterwards `bytes` is the highest resident set within it.

    The kernel's own mark where it can be reset, else samples of every two milliseconds.
    """

    def __enter__(self) -> Highest:
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
