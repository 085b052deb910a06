"""One size tried in earnest: real steps, whatever they change put back, the device clean, and one answer of all ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...chunks.ddp_fsdp import modules_in, submodules
from ...chunks.oom import Attempt, Shrinkable, current_attempt, is_out_of_memory, release
from ...ring import Ring
from .memory import Limit, PeakMemory, held
from .snapshot import Snapshot

# The first step creates the optimizer's state, at its end: what forward and backward take beside it shows in the second.
STEPS = 2
RAN, REFUSED, ABOVE, BROKEN = range(4)
REASONS = {RAN: None, REFUSED: "out of memory", ABOVE: "above the limit"}


class Trial(NamedTuple):
    """What was seen at one size. peak_bytes: the highest of all ranks, None where it is not known; seconds: of the last step, on
    the slowest. why: None where it ran."""

    size: int
    ran: bool
    peak_bytes: int | None
    seconds: float
    why: str | None


class Trials:
    """Tries sizes: called with one, it says whether that ran, on all ranks alike. `done` holds what was seen.

    step: takes a size and runs one step of training, forward, backward and the update of the weights.
    meeting: whether ranks wait for each other inside it in ways that cannot be put off.
    """

    def __init__(self, step: Callable[[int], Any], snapshot: Snapshot, limit: Limit, ring: Ring, *, meeting: bool = False) -> None:
        self.done: list[Trial] = []
        self.words = ""
        self._step, self._snapshot, self._limit, self._ring = step, snapshot, limit, ring
        self._meeting = meeting
        self._device = snapshot.device
        self._exchanging = _exchanging([*snapshot.modules, *_modules_of(step)])

    def __call__(self, size: int) -> bool:
        seconds = 0.0
        try:
            with held(self._limit, self._device), PeakMemory(self._device) as peak:
                verdict = RAN
                for _ in range(STEPS):
                    began = time.perf_counter()
                    verdict = self._agreed(self._take(size))
                    seconds = time.perf_counter() - began
                    if verdict != RAN:
                        break
        finally:
            self._snapshot.restore()
            release()
        self.done.append(self._judged(size, verdict, peak.bytes, seconds))
        return self.done[-1].ran

    def refusals(self) -> bool:
        """Whether some size failed because the device, and not the limit that was set, had no more."""
        return self._limit.how != "enforced" and any(trial.why == REASONS[REFUSED] for trial in self.done)

    def peaks(self) -> dict[int, int]:
        """The peaks of the sizes that came to their end."""
        return {trial.size: trial.peak_bytes for trial in self.done if trial.why != REASONS[REFUSED] and trial.peak_bytes}

    def _take(self, size: int) -> int | Exception:
        """One step: whether it ran or ran out of memory; any other error as it is."""
        seen = ChunkObserver(self._ring)
        with ExitStack() as contexts:
            if not self._meeting:
                # Gradients stay on their rank: one that has run out of memory does not come to the exchange.
                token = current_attempt.set(seen)
                contexts.callback(current_attempt.reset, token)
                for module in self._exchanging:
                    contexts.enter_context(module.no_sync())
            try:
                self._step(size)
                _wait(self._device)
            except Exception as error:
                if not is_out_of_memory(error):
                    return error
                self.words = str(error).partition("\n")[0]
            else:
                return REFUSED if seen.has_shrunk() else RAN
        return REFUSED

    def _agreed(self, mine: int | Exception) -> int:
        """The worst of all ranks; another error than of memory is raised on every rank."""
        if mine != RAN and self._ring.size > 1:
            # The answer itself takes memory, if little.
            release()
        verdicts = [each[0] for each in self._ring.gather([BROKEN if isinstance(mine, Exception) else mine], self._device)]
        if isinstance(mine, Exception):
            raise mine
        if BROKEN in verdicts:
            raise RuntimeError(f"rank {verdicts.index(BROKEN)} failed in a trial, and says there why; this one stops with it")
        return max(verdicts)

    def _judged(self, size: int, verdict: int, peak: int | None, seconds: float) -> Trial:
        if peak is not None and self._device.type == "cpu":
            # The copies of the state are there for the trial alone.
            peak = max(0, peak - self._snapshot.bytes)
        facts = self._ring.gather([peak or 0, round(1e6 * seconds), self._limit.bytes or 0], self._device)
        if verdict == RAN and self._limit.how == "measured" and any(used > allowed for used, _, allowed in facts):
            verdict = ABOVE
        highest, slowest = (max(column) for column in list(zip(*facts, strict=True))[:2])
        return Trial(size, verdict == RAN, highest or None, slowest / 1e6, REASONS[verdict])


class ChunkObserver(Attempt):
    """Notes the chunks that its callables begin with: one that went on in smaller chunks has run out of memory too."""

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        self.begun: dict[int, tuple[Shrinkable, int]] = {}

    def join(self, chunked: Shrinkable, meeting: list[Ring], ddp: DistributedDataParallel | None) -> None:
        super().join(chunked, meeting, ddp)
        self.begun.setdefault(id(chunked), (chunked, chunked.chunk))

    def has_shrunk(self) -> bool:
        """Whether any did; they get their chunks back."""
        shrunk = [(chunked, chunk) for chunked, chunk in self.begun.values() if chunked.chunk < chunk]
        for chunked, chunk in shrunk:
            chunked.chunk = chunk
        return bool(shrunk)


def _modules_of(step: Callable[[int], Any]) -> list[nn.Module]:
    """The modules that a step refers to: the state may hold the model and not the wrapper that is called."""
    # A name that it refers to may have no value yet.
    with contextlib.suppress(ValueError):
        return modules_in(step)
    return []


def _exchanging(modules: list[nn.Module]) -> list[DistributedDataParallel]:
    return [module for module in submodules(modules) if isinstance(module, DistributedDataParallel)]


def _wait(device: torch.device) -> None:
    """Returns when the device has done what it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
