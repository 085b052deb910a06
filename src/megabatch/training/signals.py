"""The wish to stop: SIGTERM and SIGINT end a run after the step in hand, with a checkpoint."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

# A second Ctrl-C counts from so many seconds on: one key press may arrive twice, through the launcher and directly.
PATIENCE = 2.0


class Stopped(Exception):
    """The run ended before its time. `status` is what a shell is to be told."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class EmptyBatch(Stopped):
    """None of a step's samples can be read. A run goes on with the next step; whoever wants this very step stops."""


class StopSign:
    """Inside it signals are noted instead of obeyed. `number` is that of the first, 0 without one.

    Launchers pass signals on that a scheduler has sent to everybody already, so a repeated SIGTERM changes nothing, and the
    checkpoint is finished. Whoever presses Ctrl-C again means it.
    """

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSign:
        # Handlers can be set in the main thread only; elsewhere signals are somebody else's business.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._since = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > PATIENCE:
            raise KeyboardInterrupt
