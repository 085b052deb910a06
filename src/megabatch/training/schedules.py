"""The course of a run as arithmetic: how large each step's batch is, and its learning rate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ..config import Batch, Run, Schedule


class Step(NamedTuple):
    """One step: its first position in the stream of samples, the pairs of its batch, and the factor of its learning rate."""

    first: int
    pairs: int
    rate: float


def course(run: Run, length: int, doubled: Sequence[int] = ()) -> list[Step]:
    """Every step of a run over a source of `length` samples.

    doubled: of a batch that follows the noise, the steps from which on it was twice as large; it stays as it is after the last.

    >>> from megabatch import config
    >>> [step.pairs for step in course(config.build({"schedule": {"samples": 3000}}), length=500)]
    [1024, 1024, 952]
    """
    pairs = batch_sizes(run.batch, run.schedule, length, doubled)
    first = list(itertools.accumulate(pairs, initial=0))
    # Doublings make the run shorter, and must not shorten a warm-up that has begun.
    steps = math.ceil(first[-1] / size_after(run.batch, 0)) if run.batch.schedule == "noise" else len(pairs)
    rates = rate_factors(run.schedule, first, steps)
    follow = {"linear": lambda share: share, "sqrt": math.sqrt, "none": lambda share: 1.0}[run.batch.lr_rule]
    # A last batch that is cut short is no smaller batch by plan: only a schedule of the batch changes the rate.
    grown = [1.0] * len(pairs) if run.batch.schedule == "constant" else [follow(size / run.batch.size) for size in pairs]
    return [Step(*step) for step in zip(first, pairs, map(math.prod, zip(rates, grown, strict=True)), strict=False)]


def batch_sizes(batch: Batch, schedule: Schedule, length: int, doubled: Sequence[int] = ()) -> list[int]:
    """The pairs of each step; with a budget of samples they add up to it."""
    if schedule.steps is not None:
        return [size_at(batch, step / schedule.steps) for step in range(schedule.steps)]
    budget = schedule.samples if schedule.epochs is None else round(schedule.epochs * length)
    assert budget is not None
    sizes: list[int] = []
    seen = 0
    while seen < budget:
        if batch.schedule == "noise":
            size = size_after(batch, sum(step <= len(sizes) for step in doubled))
        else:
            size = size_at(batch, seen / budget)
        sizes.append(min(size, budget - seen))
        seen += sizes[-1]
    return sizes


def size_at(batch: Batch, progress: float) -> int:
    """The pairs of a batch at a point of the run between 0 and 1."""
    share = min(1.0, progress / batch.ramp)
    if batch.schedule == "constant" or batch.start is None or share >= 1:
        return batch.size
    if batch.schedule == "linear":
        return round(batch.start + share * (batch.size - batch.start))
    growth = batch.size / batch.start
    if batch.schedule == "exponential":
        return round(batch.start * growth**share)
    # Doublings: as many as fit between start and size, each lasting equally long. The small number makes up for rounding.
    doublings = math.ceil(math.log2(growth))
    return min(batch.size, batch.start * 2 ** int(share * (doublings + 1) + 1e-9))


def size_after(batch: Batch, doublings: int) -> int:
    """The pairs of a step after so many doublings of the start.

    >>> [size_after(Batch(size=100, start=30), doublings) for doublings in range(4)]
    [30, 60, 100, 100]
    """
    return min(batch.size, (batch.start or batch.size) * 2**doublings)


def rate_factors(schedule: Schedule, first: Sequence[int], planned: int) -> list[float]:
    """The factor of the learning rate at each step. `first` holds the samples seen before each, and at last those of the run;
    `planned` is the number of steps that a warm-up below 1 is a share of.

    Warm-up counts steps, since it is there for the optimizer's averages; what follows counts samples, so that it ends with them.
    """
    steps = len(first) - 1
    warmup = min(steps, round(schedule.warmup * planned if schedule.warmup < 1 else schedule.warmup))
    begin, end = first[warmup], first[-1]
    factors = []
    for step in range(steps):
        progress = max(0.0, (first[step] - begin) / (end - begin)) if end > begin else 1.0
        rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
        factors.append(rise * (schedule.floor + (1 - schedule.floor) * _fall(schedule.shape, progress)))
    return factors


def _fall(shape: str, progress: float) -> float:
    if shape == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    return 1 - progress if shape == "linear" else 1.0
