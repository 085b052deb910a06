"""How long a device has nothing to do: then something else limits the run (`reporting.limits`)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import torch

# Seconds between two looks at the device: each of them makes the training's thread wait for some microseconds.
INTERVAL = 0.01


class IdleTime:
    """Adds up the time in which a device was idle. is_idle: looks at the device; what it says holds since the last look."""

    def __init__(self, is_idle: Callable[[], bool], clock: Callable[[], float] = time.perf_counter) -> None:
        self._is_idle = is_idle
        self._clock = clock
        self._looked = clock()
        self._seconds = self._taken = 0.0

    def look(self) -> None:
        now = self._clock()
        if self._is_idle():
            self._seconds += now - self._looked
        self._looked = now

    def take(self) -> float:
        """Return the idle seconds since the last call."""
        total = self._seconds
        seconds, self._taken = total - self._taken, total
        return seconds


@contextlib.contextmanager
def watch_idle(device: torch.device) -> Iterator[IdleTime | None]:
    """Look at the current stream of a CUDA device every few milliseconds, in a thread. None on other devices."""
    if device.type != "cuda":
        yield None
        return
    idle = IdleTime(torch.cuda.current_stream(device).query)
    ended = threading.Event()

    def watch() -> None:
        # A device that cannot be asked, after an error or while a graph is captured, is not asked again.
        with contextlib.suppress(RuntimeError):
            while not ended.wait(INTERVAL):
                idle.look()

    thread = threading.Thread(target=watch, name="megabatch-idle", daemon=True)
    thread.start()
    try:
        yield idle
    finally:
        ended.set()
        thread.join()
