"""Entry point of the `megabatch` command and of `python -m megabatch`.

Signal handlers are installed before anything else is imported: Ctrl-C ends the command with one sentence at any moment, also while
torch is being imported.
"""

# PYTHON_ARGCOMPLETE_OK: argcomplete may run this program to complete a command line.

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

# A second signal within this many seconds is ignored: one key press may arrive twice, from a launcher and directly.
PATIENCE = 2.0
# Functions of torch that its C++ dispatcher calls and that must not raise.
CALLED_BY_DISPATCH = ("__torch_dispatch__", "find_torch_dispatch_rule")
# 128 plus the number of SIGPIPE: the status that a shell reports if a program wrote to a closed pipe.
CLOSED_PIPE = 141


def main() -> int:
    """Run the command line of this process and return its exit status."""
    signals = Signals()
    status, message = 1, None
    try:
        signals.install()
        status, message = _run()
        signals.finished = status
    except KeyboardInterrupt:
        # StopSign raises it for a second Ctrl-C.
        signals.number = signals.number or signal.SIGINT
    except OSError as error:
        status, message = _output_failed(error)
    except BaseException:
        # An interrupt can end in another exception, which adds nothing.
        if not signals.number:
            raise
    if signals.number:
        status, message = 128 + signals.number, signals.sentence()
    signals.finished = status
    if message is not None:
        _print_error(message)
    return status


def _run() -> tuple[int, str | None]:
    """Run the command line; return its exit status and the error in one line, None if there is none."""
    from megabatch import cli

    if hasattr(sys.stdout, "reconfigure"):
        # Characters that the terminal's encoding lacks are printed as escape sequences.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        outcome = cli.run()
    except SystemExit as exit_:
        # argparse raises it after --help and after an error in the arguments.
        outcome = int(exit_.code or 0), None
    if sys.stdout is not None:
        # Here an error can still be reported; when the interpreter exits it cannot.
        sys.stdout.flush()
    return outcome


class Interrupt(KeyboardInterrupt):
    """A signal.

    A subclass, because Python ends by SIGINT, whatever the exit status, once a KeyboardInterrupt itself has passed through exec()
    of a string, which dataclasses use.
    """


class Signals:
    """Handlers of SIGINT and SIGTERM: they raise KeyboardInterrupt in the main thread, or end the process where that would be lost.

    `number` is the first signal that arrived, 0 without one. A second one, later than PATIENCE, ends the process at once too.
    `finished` is the exit status once the command is done: a signal while the interpreter exits then ends the process with it.
    """

    def __init__(self) -> None:
        self.number = 0
        self.finished: int | None = None
        self._since = 0.0
        self._process = os.getpid()

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            # Ignored signals stay ignored: shells start background jobs with them.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        sys.unraisablehook = self._unraisable
        # Registered first, so called last: the interpreter removes its handlers next, and a signal would then kill the process and
        # hide the status of a finished command.
        atexit.register(self._ignore)

    def sentence(self) -> str:
        return f"megabatch: stopped by {signal.Signals(self.number).name} before the command was finished"

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked worker that has not set its own handlers yet: its parent decides when it ends.
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        if self.finished is not None:
            os._exit(self.finished)
        if not self.number:
            self.number, self._since = number, time.monotonic()
            if not _may_raise(frame):
                self._exit_now()
            raise Interrupt
        if time.monotonic() - self._since > PATIENCE:
            self._exit_now()

    def _ignore(self) -> None:
        if os.getpid() == self._process:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)

    def _unraisable(self, unraisable: Any) -> None:
        """Replace sys.unraisablehook: Python drops exceptions that are raised in finalizers and callbacks, interrupts too."""
        if os.getpid() == self._process and issubclass(unraisable.exc_type, KeyboardInterrupt) and self.finished is None:
            self._exit_now()
        # After an interrupt it is normal that finalizers of half-built objects fail.
        if not self.number:
            sys.__unraisablehook__(unraisable)

    def _exit_now(self) -> None:
        self.number = self.number or signal.SIGINT
        # A progress bar hides the cursor.
        cursor = "\x1b[?25h" if os.isatty(2) else ""
        # Not print(): the signal may have interrupted a call of it.
        with contextlib.suppress(OSError):
            os.write(2, f"{cursor}{self.sentence()}\n".encode())
        os._exit(128 + self.number)


def _may_raise(frame: FrameType | None) -> bool:
    """Return whether an exception at this place reaches `main`.

    It does not from an import, because modules catch whatever an optional import raises, and the command would continue. Nor from a
    dispatch mode of torch, which tracing uses, or the search for its rule: there an exception makes C++ code abort the process.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib") or frame.f_code.co_name in CALLED_BY_DISPATCH:
            return False
        frame = frame.f_back
    return True


def _output_failed(error: OSError) -> tuple[int, str | None]:
    """Return the status and the message for a standard output that cannot be written, and redirect it to the null device."""
    message = None if _reader_is_gone() else f"megabatch: error: {error}"
    null = os.open(os.devnull, os.O_WRONLY)
    # The interpreter flushes standard output once more when it exits.
    os.dup2(null, 1)
    return (CLOSED_PIPE, None) if message is None else (1, message)


def _reader_is_gone() -> bool:
    """Return whether standard output or standard error is a pipe that nobody reads any more, as after `| head -1`."""
    import select

    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(1, 0)
    poll.register(2, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _print_error(message: str) -> None:
    try:
        print(message, file=sys.stderr, flush=True)
    except OSError:
        # Nobody reads it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


if __name__ == "__main__":
    sys.exit(main())
