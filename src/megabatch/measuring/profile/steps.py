"""Steps of a run at any size, timed: what is read before the clock starts, and what memory rises to meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from ... import config
from ...chunks.oom import is_out_of_memory, release
from ...data.loader import PIECE
from ...training.build import assemble
from ...training.distributed import Ranks
from ...training.loop import Training
from ...training.memory import peak, peak_of_tensors, reset_peak
from ...training.objective import Contrastive
from ...training.schedules import Step

# The first step makes the optimizer's state and shows what a kept chunk takes, the second is the first that keeps them.
WARMUP = 2
# How long the loader is watched.
READING_S = 1.0


class Timed(NamedTuple):
    """Steps at one size. seconds: of each, on the slowest rank. peak_bytes: of tensors; reserved_bytes: what the allocator has
    asked of the device for them, None on a CPU; both are None on a device that does not tell. keep: chunks that were not computed
    twice."""

    seconds: tuple[float, ...]
    peak_bytes: int | None
    reserved_bytes: int | None
    keep: int


def time_steps(
    step: Callable[[], object], steps: int, *, wait: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> tuple[float, ...]:
    """Seconds of each of so many steps. `wait` returns when the device has done what it was given."""
    seconds = []
    wait()
    for _ in range(steps):
        began = clock()
        step()
        wait()
        seconds.append(clock() - began)
    return tuple(seconds)


class ProfileBench:
    """A run whose steps are taken at any batch and chunk. The learning rate is 0: weights stay what they are."""

    def __init__(self, run: config.Run, here: Ranks, folder: Path) -> None:
        # How long the run would be does not matter, and a list of all of its steps could be long.
        self.run = replace(run, schedule=replace(run.schedule, samples=None, epochs=None, steps=1))
        self.here = here
        self.folder = folder
        self.parts = assemble(self.run, here)
        self.parts.model.train()

    @property
    def length(self) -> int:
        """Samples that training has."""
        return sum(self.parts.training.lengths)

    def measure(self, batch: int, chunk: int, steps: int) -> Timed | None:
        """So many steps at a size, after some to warm up; None where memory ran out on any rank."""
        try:
            return self._measure(batch, chunk, steps)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        finally:
            # Not in the except clause: while the exception lives, its frames hold the tensors that have to go.
            self.parts.model.zero_grad()
            release()
        return None

    def reading_per_s(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Samples a second that the run's loader reads while nothing else is computed, of all ranks together."""
        pairs = PIECE * self.here.size
        steps = ((number * pairs, pairs) for number in itertools.count())
        with contextlib.closing(self.parts.shuffled().batches(steps)) as batches:
            # Workers start, and what they read ahead meanwhile goes.
            for _ in range(3 + 3 * self.run.data.workers):
                next(batches)
            began, read = clock(), 0
            while clock() - began < READING_S:
                next(batches)
                read += pairs
            rate = read / (clock() - began)
        return min(self.here.gather(rate))

    def _measure(self, batch: int, chunk: int, steps: int) -> Timed | None:
        training = self._at(batch, chunk)
        device = self.here.device
        (rows,) = training.parts.shuffled().batches([(0, batch)])
        planned = Step(0, batch, 0.0)
        reset_peak(device)
        with warnings.catch_warnings():
            # That a chunk was halved is seen below, and said in the curve.
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(WARMUP):
                training.step(planned, rows)
                if _chunk(training) < chunk:
                    return None
            tensors = 0
            if device.type == "cpu":
                tensors = peak_of_tensors(lambda: training.step(planned, rows), training.tensors().values())
            seconds = time_steps(lambda: training.step(planned, rows), steps, wait=lambda: wait_for(device))
        if _chunk(training) < chunk:
            return None
        slowest = tuple(max(each) for each in zip(*self.here.gather(seconds), strict=True))
        read = None if device.type == "cpu" else getattr(torch.get_device_module(device), "max_memory_reserved", None)
        reserved = None if read is None else read(device)
        return Timed(slowest, tensors or peak(device), reserved, _kept(training))

    def _at(self, batch: int, chunk: int) -> Training:
        """The run at another size, with an optimizer of its own."""
        run = replace(self.run, batch=replace(self.run.batch, size=batch, chunk=chunk, schedule="constant", start=None))
        if self.here.group is not None and run.compute.sharding == "fsdp2":
            # Weights can be sharded once only.
            self.parts = assemble(run, self.here)
            self.parts.model.train()
            return Training(self.parts, self.folder)
        objective = type(self.parts.objective)(self.parts.model, run, self.here)  # type: ignore[arg-type]
        return Training(replace(self.parts, run=run, objective=objective), self.folder)


def wait_for(device: torch.device) -> None:
    """Returns when the device has nothing left to do."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The median, and half of the range that the middle half of the values takes.

    >>> median_and_spread([5.0, 1.0, 2.0, 3.0, 4.0])
    (3.0, 1.0)
    """
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return at(0.5), (at(0.75) - at(0.25)) / 2


def _chunk(training: Training) -> int:
    """The rows that really go through at once: out of memory, there are fewer than asked for."""
    return min(each.chunk for each in training.parts.objective.chunked)


def _kept(training: Training) -> int:
    objective = training.parts.objective
    return min(objective.encode_x.kept, objective.encode_y.kept) if isinstance(objective, Contrastive) else 0
