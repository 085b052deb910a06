"""One size tried with real training steps: afterwards the state is restored, memory is released, and all ranks agree."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...chunks.ddp_fsdp import modules_in, submodules
from ...chunks.oom import Attempt, Shrinkable, current_attempt, is_out_of_memory, release
from ...ring import Ring
from ..timing import synchronize
from .memory import Limit, PeakTracker, enforced
from .snapshot import Snapshot

# The first step creates the optimizer's state, after its forward and backward: only the second one needs memory for all of them.
STEPS = 2
# Results of a step on one rank, the worst one highest.
RAN, REFUSED, ABOVE, BROKEN = range(4)
REASONS = {RAN: None, REFUSED: "out of memory", ABOVE: "above the limit"}


class Trial(NamedTuple):
    """What was measured at one size.

    peak_bytes: the highest of all ranks, None on a device that does not report it. seconds: of the last step, on the slowest rank.
    why: the reason of a failure, None if the size ran.
    """

    size: int
    ran: bool
    peak_bytes: int | None
    seconds: float
    why: str | None


class Trials:
    """A callable that tries a size and returns whether it ran, the same on all ranks. `done` lists the trials so far.

    step: takes a size and runs one step of training: forward, backward and optimizer.
    meeting: whether ranks wait for each other inside the step in a way that cannot be postponed.
    steps: how often a size runs in one trial.
    """

    def __init__(
        self, step: Callable[[int], Any], snapshot: Snapshot, limit: Limit, ring: Ring, *, meeting: bool = False, steps: int = STEPS
    ) -> None:
        self.done: list[Trial] = []
        self.last_error = ""
        self._step, self._snapshot, self._limit, self._ring = step, snapshot, limit, ring
        self._meeting, self._steps = meeting, steps
        self._device = snapshot.device
        self._ddp_modules = _ddp_modules([*snapshot.modules, *_modules_of(step)])

    def __call__(self, size: int) -> bool:
        seconds = 0.0
        try:
            with enforced(self._limit, self._device), PeakTracker(self._device) as peak:
                verdict = RAN
                for _ in range(self._steps):
                    began = time.perf_counter()
                    verdict = self._agreed(self._try_step(size))
                    seconds = time.perf_counter() - began
                    if verdict != RAN:
                        break
        finally:
            self._snapshot.restore()
            release()
        self.done.append(self._trial(size, verdict, peak.bytes, seconds))
        return self.done[-1].ran

    def has_refusals(self) -> bool:
        """Return whether some size failed because the device itself, and not an enforced limit, ran out of memory."""
        return self._limit.mode != "enforced" and any(trial.why == REASONS[REFUSED] for trial in self.done)

    def peaks(self) -> dict[int, int]:
        """Return the peak of each size whose steps finished."""
        return {trial.size: trial.peak_bytes for trial in self.done if trial.why != REASONS[REFUSED] and trial.peak_bytes}

    def _try_step(self, size: int) -> int | Exception:
        """Run one step; return RAN, REFUSED if it ran out of memory, or any other error that it raised."""
        observer = ChunkObserver(self._ring)
        with ExitStack() as contexts:
            if not self._meeting:
                # Gradients are not synchronized: a rank that has run out of memory would not come to the all-reduce.
                token = current_attempt.set(observer)
                contexts.callback(current_attempt.reset, token)
                for module in self._ddp_modules:
                    contexts.enter_context(module.no_sync())
            try:
                self._step(size)
                synchronize(self._device)
            except Exception as error:
                if not is_out_of_memory(error):
                    return error
                self.last_error = str(error).partition("\n")[0]
            else:
                return REFUSED if observer.restore_shrunk() else RAN
        return REFUSED

    def _agreed(self, result: int | Exception) -> int:
        """Return the worst result of all ranks; an error other than out of memory is raised on every rank."""
        if result != RAN and self._ring.size > 1:
            # The exchange of results needs a little memory itself.
            release()
        results = [each[0] for each in self._ring.gather([BROKEN if isinstance(result, Exception) else result], self._device)]
        if isinstance(result, Exception):
            raise result
        if BROKEN in results:
            raise RuntimeError(
                f"rank {results.index(BROKEN)} failed in a trial, so this rank stops too; that rank reports the error"
            )
        return max(results)

    def _trial(self, size: int, verdict: int, peak: int | None, seconds: float) -> Trial:
        if peak is not None and self._device.type == "cpu":
            # The copies of the state exist during trials only.
            peak = max(0, peak - self._snapshot.bytes)
        measured = self._ring.gather([peak or 0, round(1e6 * seconds), self._limit.bytes or 0], self._device)
        if verdict == RAN and self._limit.mode == "measured" and any(used > allowed for used, _, allowed in measured):
            verdict = ABOVE
        highest, slowest = (max(column) for column in list(zip(*measured, strict=True))[:2])
        return Trial(size, verdict == RAN, highest or None, slowest / 1e6, REASONS[verdict])


class ChunkObserver(Attempt):
    """Records the chunks that the step's callables start with: a step that continued in smaller chunks ran out of memory too."""

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        self.first_chunks: dict[int, tuple[Shrinkable, int]] = {}

    def join(self, chunked: Shrinkable, meeting: list[Ring], ddp: DistributedDataParallel | None) -> None:
        super().join(chunked, meeting, ddp)
        self.first_chunks.setdefault(id(chunked), (chunked, chunked.chunk))

    def restore_shrunk(self) -> bool:
        """Give every callable that shrank its first chunk back; return whether there was one."""
        shrunk = [(chunked, chunk) for chunked, chunk in self.first_chunks.values() if chunked.chunk < chunk]
        for chunked, chunk in shrunk:
            chunked.chunk = chunk
        return bool(shrunk)


def _modules_of(step: Callable[[int], Any]) -> list[nn.Module]:
    """Return the modules that a step refers to: the state may hold the model and not the DDP wrapper that is called."""
    # A name that the step refers to may not have a value yet.
    with contextlib.suppress(ValueError):
        return modules_in(step)
    return []


def _ddp_modules(modules: list[nn.Module]) -> list[DistributedDataParallel]:
    return [module for module in submodules(modules) if isinstance(module, DistributedDataParallel)]
