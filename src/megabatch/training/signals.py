"""SIGTERM and SIGINT end a run after the current step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

# Seconds after which a second Ctrl-C counts: one key press may arrive twice, through the launcher and directly.
PATIENCE = 2.0


class Stopped(Exception):
    """The run ended early. `status` is the exit status of the process."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class EmptyBatch(Stopped):
    """None of a step's samples can be read. A run continues with the next step; a measurement of this step ends."""


class StopSign:
    """While it is active, signals are recorded instead of ending the process. `number` is the first signal, or 0.

    Launchers forward signals that a scheduler has already sent to every process, so a repeated SIGTERM changes nothing and the
    checkpoint is finished. A second Ctrl-C raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSign:
        # Python allows signal handlers in the main thread only.
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
