"""Gradient noise between independent batches at the same weights, for losses that compare samples with each other.

The micro-batches of a contrastive batch have fewer negatives and so a different loss. Whole batches are independent: the variance
of their gradients is the noise at that batch, and at no other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType

import torch
from torch import Tensor

from ...chunks.ddp_fsdp import submodules
from ...chunks.rng_state import ForwardState, buffers_of
from ...training.loop import Training, seed_of
from ...training.noise.estimator import Micro, Moments, moments
from ...training.optimizer import clip_gradients
from ...training.run_logger import RunLogger

# Batches whose gradients are compared in one probe.
BATCHES = 4
# Probes within the window of steps that an estimate averages over.
PROBES = 8


class Probes(AbstractContextManager["Probes"]):
    """A callback that every few steps computes the gradients of BATCHES independent batches of the run's size.

    The training itself is not affected. window: steps that `steps` covers. last: the last step after which to probe. The batches
    come after the samples of the run, in the endless stream that it reads from.
    """

    def __init__(self, training: Training, window: int, last: int) -> None:
        self.training = training
        self.every = max(1, window // PROBES)
        self.steps: deque[Moments] = deque(maxlen=max(PROBES, window // self.every))
        self._at = range(training.number + self.every, last + 1, self.every)
        self._batches = training.parts.shuffled().batches(self._positions())

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._batches.close()

    def __call__(self, logger: RunLogger) -> None:
        if self.training.number in self._at:
            measured = self._probe()
            if measured is not None:
                self.steps.append(measured)

    def _positions(self) -> Iterator[tuple[int, int]]:
        first = self.training.samples
        for number in self._at:
            pairs = self.training.schedule[min(number, len(self.training.schedule)) - 1].pairs
            for _ in range(BATCHES):
                yield first, pairs
                first += pairs

    def _probe(self) -> Moments | None:
        """Return the moments of one probe; None if a gradient overflowed, or no sample of a batch could be read."""
        training = self.training
        parameters = [p for p in training.parts.model.parameters() if p.requires_grad]
        scaler, ranks = training.parts.objective.scaler, training.ranks
        before = ForwardState([], buffers_of(submodules([training.parts.model])))
        sums: list[Tensor | None] = [None] * len(parameters)
        micros = []
        for number in range(BATCHES):
            batch = next(self._batches)
            rows = ranks.sum(len(batch.keys))[0]
            micros.append(Micro(math.nan, rows, 1 / BATCHES))
            if not rows:
                continue
            torch.manual_seed(seed_of(training.run.seed, training.number, number, ranks.rank))
            training.step_fn(batch)
            norm = float(clip_gradients(parameters, None)) / scaler.get_scale()
            micros[-1] = micros[-1]._replace(square=norm**2)
            sums = [_added(total, p.grad) for total, p in zip(sums, parameters, strict=True)]
            training.optimizer.zero_grad()
        for p, total in zip(parameters, sums, strict=True):
            p.grad = total
        whole = float(clip_gradients(parameters, None)) / scaler.get_scale() / BATCHES
        training.optimizer.zero_grad()
        before.restore()
        finite = all(math.isfinite(square) for square in (whole, *(micro.square for micro in micros)))
        return moments(micros, whole**2) if finite else None


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if total is None or gradient is None:
        return total if gradient is None else gradient.detach().clone()
    return total.add_(gradient.detach())
