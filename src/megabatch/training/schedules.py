"""The steps of a run as arithmetic: the batch and the learning rate of each."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, overload

from ..config import INT64, Batch, Run, Schedule
from ..optimizers import rate_factor

# Different sizes that a growing batch may take. All are computed before the first step, which takes about a second for so many.
MOST_PLATEAUS = 2**17


class Step(NamedTuple):
    """One step: its first position in the stream of samples, the pairs of its batch, and the factor of the learning rate."""

    first: int
    pairs: int
    rate: float


def step_schedule(run: Run, length: int, doubled: Sequence[int] = ()) -> StepSchedule:
    """Return the steps of a run over a source of `length` samples; each is computed on access.

    doubled: with batch.schedule "noise", the steps from which on the batch was twice as large. It is constant after the last.

    >>> from megabatch import config
    >>> [step.pairs for step in step_schedule(config.build({"schedule": {"samples": 3000}}), length=500)]
    [1024, 1024, 952]
    """
    return StepSchedule(run, _plateaus(run.batch, run.schedule, length, doubled))


class Plateaus(NamedTuple):
    """Steps grouped by equal batch: the first step of each group, its first sample, and its pairs.

    steps, samples: of the whole run. The last step takes the remaining samples, which may be fewer than the pairs of its group.
    """

    step: array[int]
    first: array[int]
    pairs: array[int]
    steps: int
    samples: int

    def seen_before(self, step: int) -> int:
        """Return the samples of all steps before this one; `step` may be the number of steps."""
        if step == self.steps:
            return self.samples
        at = bisect_right(self.step, step) - 1
        return self.first[at] + (step - self.step[at]) * self.pairs[at]

    def pairs_of(self, step: int) -> int:
        return min(self.pairs[bisect_right(self.step, step) - 1], self.samples - self.seen_before(step))


class LazySteps(Sequence[Step]):
    """A sequence of steps that are computed on access; slices are lazy too."""

    def __init__(self, step_at: Callable[[int], Step], numbers: range) -> None:
        self._step_at = step_at
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> LazySteps: ...
    def __getitem__(self, index: int | slice) -> Step | LazySteps:
        if isinstance(index, slice):
            return LazySteps(self._step_at, self._numbers[index])
        return self._step_at(self._numbers[index])

    def __iter__(self) -> Iterator[Step]:
        return map(self._step_at, self._numbers)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LazySteps):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))


class StepSchedule(LazySteps):
    """All steps of a run. Neither memory nor the time until the first step depends on their number."""

    def __init__(self, run: Run, plateaus: Plateaus) -> None:
        super().__init__(self._compute, range(plateaus.steps))
        self._batch, self._schedule = run.batch, run.schedule
        self._plateaus = plateaus
        # Doublings make the run shorter and must not shorten a warm-up that has begun.
        planned = -(-plateaus.samples // size_after(run.batch, 0)) if run.batch.schedule == "noise" else plateaus.steps
        warmup = run.schedule.warmup
        self._warmup = min(plateaus.steps, round(warmup * planned if warmup < 1 else warmup))
        self._warm = plateaus.seen_before(self._warmup)

    @property
    def samples(self) -> int:
        """The samples of all steps."""
        return self._plateaus.samples

    def largest(self) -> Step:
        """Return the first of the steps with the most pairs."""
        # Only the last step of all can be smaller than others of its plateau.
        return max((self[step] for step in self._plateaus.step), key=lambda step: step.pairs)

    def _compute(self, number: int) -> Step:
        first, pairs = self._plateaus.seen_before(number), self._plateaus.pairs_of(number)
        rate = self._rate_factor(number, first)
        # A last batch that is cut short keeps its rate: only a schedule of the batch changes it.
        if self._batch.schedule != "constant":
            rate *= rate_factor(self._batch.lr_rule, pairs / self._batch.size)
        return Step(first, pairs, rate)

    def _rate_factor(self, number: int, first: int) -> float:
        """Return the factor of the learning rate by warm-up and decay.

        Warm-up counts steps, since it serves the optimizer's running averages; the decay counts samples, so that it ends with
        them.
        """
        begin, end, floor = self._warm, self._plateaus.samples, self._schedule.floor
        # A warm-up as long as the run leaves no decay: the rate rises until the end.
        progress = max(0.0, (first - begin) / (end - begin)) if end > begin else 0.0
        rise = min(1.0, (number + 1) / self._warmup) if self._warmup else 1.0
        return rise * (floor + (1 - floor) * _decay(self._schedule.shape, progress))


def samples_of(schedule: Schedule, length: int) -> int:
    """Return the samples of a schedule that is given in samples, or in epochs of `length` samples."""
    if schedule.epochs is None:
        assert schedule.samples is not None
        return schedule.samples
    # A float, which may be infinite where 64 bits do not suffice.
    samples = schedule.epochs * length
    if samples > INT64:
        raise ValueError(f"schedule.epochs is {schedule.epochs!r}: with {length:,} samples, that exceeds 64 bits; train for fewer")
    if round(samples) < 1:
        raise ValueError(
            f"schedule.epochs is {schedule.epochs!r}: with {length:,} samples, that is less than one sample; train for"
            " more, or give schedule.samples or schedule.steps"
        )
    return round(samples)


def _plateaus(batch: Batch, schedule: Schedule, length: int, doubled: Sequence[int]) -> Plateaus:
    """Return the batches of a run; with a budget of samples they add up to it.

    Sizes never shrink, so the end of each plateau is found by bisection: the work follows the number of sizes, not steps.
    """
    starts, firsts, sizes = array("q"), array("q"), array("q")
    budget = samples_of(schedule, length) if schedule.steps is None else 0

    def size_of(step: int, seen: int) -> int:
        if schedule.steps is not None:
            return size_at(batch, step / schedule.steps)
        if batch.schedule == "noise":
            return size_after(batch, sum(at <= step for at in doubled))
        return size_at(batch, seen / budget)

    def steps_of(size: int, step: int, seen: int) -> int:
        end = _end_of_size(batch, size)
        if schedule.steps is None:
            most, guess = -(-(budget - seen) // size), (end * budget - seen) / size
        else:
            most, guess = schedule.steps - step, end * schedule.steps - step
        return _first(lambda ahead: size_of(step + ahead, seen + ahead * size) != size, most, guess=max(1, math.ceil(guess)))

    step = seen = 0
    while (seen < budget) if schedule.steps is None else (step < schedule.steps):
        size = size_of(step, seen)
        steady = steps_of(size, step, seen)
        for column, value in ((starts, step), (firsts, seen), (sizes, size)):
            column.append(value)
        if len(starts) > MOST_PLATEAUS:
            raise ValueError(
                f"batch.start is {batch.start} and batch.size {batch.size}: over so many steps the batch would take more than"
                f' {MOST_PLATEAUS:,} different sizes; choose batch.schedule "steps", which doubles the batch'
            )
        step, seen = step + steady, seen + steady * size
    return Plateaus(starts, firsts, sizes, step, budget if schedule.steps is None else seen)


def _first(holds: Callable[[int], bool], most: int, guess: int) -> int:
    """Return the smallest number from 1 up for which a monotone condition holds, or `most` where it holds for none below.

    Few numbers are tested if `guess` is near the result.

    >>> _first(lambda number: number >= 7, 100, guess=2), _first(lambda number: False, 100, guess=1)
    (7, 100)
    """
    # The result is above `low` and at most `high`.
    low, high, stride = 0, most, 1
    probe = min(guess, most - 1)
    while probe > low and probe < high:
        if holds(probe):
            high, probe = probe, probe - stride
        else:
            low, probe = probe, probe + stride
        stride *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def size_at(batch: Batch, progress: float) -> int:
    """Return the pairs of a batch at a point of the run between 0 and 1."""
    share = min(1.0, progress / batch.ramp)
    if batch.schedule == "constant" or batch.start is None or share >= 1:
        return batch.size
    if batch.schedule == "linear":
        return round(batch.start + share * (batch.size - batch.start))
    growth = batch.size / batch.start
    if batch.schedule == "exponential":
        return round(batch.start * growth**share)
    # Doublings: as many as fit between start and size, each of equal length. 1e-9 compensates for rounding.
    doublings = math.ceil(math.log2(growth))
    return min(batch.size, batch.start * 2 ** int(share * (doublings + 1) + 1e-9))


def _end_of_size(batch: Batch, size: int) -> float:
    """Return the point of the run, between 0 and 1, at which a batch outgrows a size: the inverse of `size_at` up to rounding."""
    if size >= batch.size or batch.start is None:
        return 1.0
    if batch.schedule == "linear":
        return batch.ramp * (size + 0.5 - batch.start) / (batch.size - batch.start)
    if batch.schedule == "exponential":
        return batch.ramp * math.log((size + 0.5) / batch.start) / math.log(batch.size / batch.start)
    # Doublings are few, so no guess is needed.
    return 0.0


def size_after(batch: Batch, doublings: int) -> int:
    """Return the pairs of a step after a number of doublings.

    >>> [size_after(Batch(size=100, start=30), doublings) for doublings in range(4)]
    [30, 60, 100, 100]
    """
    return min(batch.size, (batch.start or batch.size) * 2**doublings)


def _decay(shape: str, progress: float) -> float:
    if shape == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    return 1 - progress if shape == "linear" else 1.0
