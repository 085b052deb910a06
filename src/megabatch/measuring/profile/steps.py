"""Steps of a run at any batch and chunk, timed on batches that were read before, with their peak memory."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from ... import config
from ...chunks.oom import is_out_of_memory, release
from ...data.loader import PIECE_ROWS
from ...training.build import assemble
from ...training.distributed import Ranks
from ...training.idle import watch_idle
from ...training.loop import Training
from ...training.memory import peak, peak_of_tensors, reset_peak
from ...training.objective import Contrastive
from ...training.schedules import Step
from ..timing import synchronize, time_steps
from .curve import Size
from .quantities import Timed

# The first step creates the optimizer's state and shows what a kept chunk costs; the second is the first that keeps chunks.
WARMUP = 2
# Seconds for which the loader's speed is measured.
READING_S = 1.0


class ProfileBench:
    """A run whose steps can be timed at any batch and chunk. The learning rate is 0, so the weights do not change."""

    def __init__(self, run: config.Run, ranks: Ranks, folder: Path) -> None:
        # The length of the run does not matter here, and the list of all its steps could be long.
        self.run = replace(run, schedule=replace(run.schedule, samples=None, epochs=None, steps=1))
        self.ranks = ranks
        self.folder = folder
        self.parts = assemble(self.run, ranks)
        self.parts.model.train()

    @property
    def length(self) -> int:
        """The number of training samples."""
        return sum(self.parts.training.lengths)

    def measure(self, size: Size, steps: int) -> Timed | None:
        """Time so many steps at a size, after a warm-up; return None if any rank ran out of memory."""
        try:
            return self._measure(size, steps)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        finally:
            # Not in the except clause: while the exception is alive, its frames hold the tensors that must be freed.
            self.parts.model.zero_grad()
            release()
        return None

    def reading_per_s(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Return the samples per second that the loaders of all ranks read together while nothing else is computed."""
        pairs = PIECE_ROWS * self.ranks.size
        steps = ((number * pairs, pairs) for number in itertools.count())
        with contextlib.closing(self.parts.shuffled().batches(steps)) as batches:
            # Skip what is read while workers start and fill their queues.
            for _ in range(3 + 3 * self.run.data.workers):
                next(batches)
            began, read = clock(), 0
            while clock() - began < READING_S:
                next(batches)
                read += pairs
            rate = read / (clock() - began)
        return min(self.ranks.gather(rate))

    def _measure(self, size: Size, steps: int) -> Timed | None:
        training = self._training_at(size)
        device = self.ranks.device
        (rows,) = training.parts.shuffled().batches([(0, size.batch)])
        planned = Step(0, size.batch, 0.0)
        reset_peak(device)
        with warnings.catch_warnings():
            # A chunk that was halved is noticed below, and is part of the result.
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(WARMUP):
                training.step(planned, rows)
                if _chunk(training) < size.chunk:
                    return None
            tensors = 0
            if device.type == "cpu":
                tensors = peak_of_tensors(lambda: training.step(planned, rows), training.tensors().values())
            with watch_idle(device) as idle:
                seconds = time_steps(lambda: training.step(planned, rows), steps, wait=lambda: synchronize(device))
        if _chunk(training) < size.chunk:
            return None
        slowest = tuple(max(each) for each in zip(*self.ranks.gather(seconds), strict=True))
        read = None if device.type == "cpu" else getattr(torch.get_device_module(device), "max_memory_reserved", None)
        reserved = None if read is None else read(device)
        shares = [] if idle is None else self.ranks.gather(idle.take() / sum(seconds))
        share = sum(shares) / len(shares) if shares else None
        return Timed(slowest, tensors or peak(device), reserved, _kept(training), share)

    def _training_at(self, size: Size) -> Training:
        """Return the run at another size, with a new optimizer."""
        batch = replace(self.run.batch, size=size.batch, chunk=size.chunk, schedule="constant", start=None)
        run = replace(self.run, batch=batch)
        if self.ranks.group is not None and run.compute.sharded:
            # Weights can be sharded only once.
            self.parts = assemble(run, self.ranks)
            self.parts.model.train()
            return Training(self.parts, self.folder)
        objective = type(self.parts.objective)(self.parts.model, run, self.ranks)  # type: ignore[arg-type]
        return Training(replace(self.parts, run=run, objective=objective), self.folder)


def _chunk(training: Training) -> int:
    """Return the rows that are really processed at once: fewer than requested after running out of memory."""
    return min(each.chunk for each in training.parts.objective.chunked)


def _kept(training: Training) -> int:
    objective = training.parts.objective
    return min(objective.encode_x.kept, objective.encode_y.kept) if isinstance(objective, Contrastive) else 0
