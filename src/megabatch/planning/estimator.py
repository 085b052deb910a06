"""Memory and time of any strategy for one problem: predicted, and corrected by measurements where there are some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .. import config
from ..costs.hardware import Machine
from ..costs.memory import MemoryPredictor, PeakMemory, Prediction
from ..costs.strategy import Precision, Sharding, Strategy
from ..costs.time import StepTime, StepWork, rescale, step_time
from ..towers import BuiltTower
from .calibration import Calibration, calibrate
from .problem import Problem
from .reading import ReadingRate, reading_rate
from .request import Request
from .search import ChunkSizes, Estimate, NothingFitsError, candidate_strategies, chunk_sizes, search
from .sides import both_sides
from .workload import Workload, loss_options, traced, update_is_fused, workload

# Bytes per parameter with gradient and Adam's state in fp32. Sharding is tried if these take more than this share of the limit.
STATE_BYTES, LARGE_SHARE = 16, 0.25
# Of these, what every optimizer needs with DDP: weights, gradients and their buckets; and what it needs in any case, weights and
# gradients. Frozen weights are in half precision.
DDP_BYTES, LEAST_BYTES, FROZEN_BYTES = 12, 8, 2


class Tools(NamedTuple):
    """The functions that count the work of a step and predict its memory. Tests replace them by formulas."""

    workload: Callable[[Request, config.Run, Precision, Machine], Workload] = workload
    predict: Callable[[Request, config.Run, Workload, Machine], MemoryPredictor] = traced
    reading: Callable[[config.Run, Sequence[BuiltTower]], ReadingRate] = reading_rate


@dataclass(frozen=True)
class Estimator:
    """The memory and time models of a problem. peaks: traced memory, extrapolated. task: counted work of a step. count: counts the
    work of a step of another run of the same request. reading: how fast another run reads. text_length: tokens of the texts whose
    work was counted."""

    problem: Problem
    calibration: Calibration
    task: StepWork
    peaks: PeakMemory
    count: Callable[[config.Run], StepWork]
    reading: Callable[[config.Run], ReadingRate]
    text_length: int | None = None

    @property
    def parameters(self) -> int:
        return sum(work.parameters for work in self.task.towers)

    @property
    def state_bytes(self) -> int:
        """Bytes of trained weights with gradients and Adam's state in fp32, and of frozen weights in half precision."""
        return STATE_BYTES * self.task.trainable + FROZEN_BYTES * (self.parameters - self.task.trainable)

    def memory(self, strategy: Strategy) -> int:
        """Return the bytes that a strategy takes of a device: predicted, and corrected by measurements."""
        predicted = self.calibration.memory(strategy, self.peaks)
        return min(predicted, self.problem.limit) if self.calibration.has_run(strategy) else predicted

    def step(self, strategy: Strategy, machine: Machine | None = None) -> StepTime:
        """Return the time of a step, corrected likewise; its parts keep their predicted proportions."""
        machine = machine or self.problem.machine
        predicted = step_time(self.task, strategy, machine)
        return rescale(predicted, self.calibration.seconds(strategy, lambda other: step_time(self.task, other, machine).seconds))

    def seconds(self, strategy: Strategy, machine: Machine | None = None) -> float:
        return self.step(strategy, machine).seconds

    def estimate(self, strategy: Strategy) -> Estimate:
        return Estimate(strategy, self.memory(strategy), self.seconds(strategy))

    def fastest(self, batch: int, machine: Machine | None = None) -> Estimate:
        """Return the fastest strategy that reaches the batch. Raises ValueError if none fits."""
        machine = machine or self.problem.machine
        least = (LEAST_BYTES * self.task.trainable + FROZEN_BYTES * (self.parameters - self.task.trainable)) // machine.gpus
        if least > self.problem.limit:
            # Tracing a step of such a model would take minutes.
            raise self._nothing_fits(least, sharded=machine.gpus > 1)
        # Sharding saves weights, gradients and optimizer state only, so it is tried if these take a large part of the memory. If
        # weights, gradients and DDP's buckets alone take more than there is, nothing else can work.
        state = self.state_bytes / self.problem.limit
        shardings: tuple[Sharding, ...] = ("ddp",)
        if state > LARGE_SHARE:
            shardings = ("fsdp2",) if state * DDP_BYTES / STATE_BYTES > 1 else ("ddp", "fsdp2")
            shardings += ("hsdp",) if machine.gpus > machine.node else ()
        asked = self.problem.request.checkpointing
        candidates = candidate_strategies(
            batch,
            machine.gpus,
            precisions=(self.problem.precision,),
            accumulate=not self.problem.request.pairs,
            checkpointing=(False, True) if asked is None else (asked,),
            shardings=shardings,
            node=machine.node,
            gradient_exchange=self.problem.base.compute.gradient_exchange,
        )
        candidates = [each for each in candidates if self.calibration.allows(replace(each, chunk=1))] or candidates
        seconds = lambda strategy: self.seconds(strategy, machine)  # noqa: E731
        try:
            return search(candidates, self.memory, seconds, self.problem.limit, self.sizes)
        except NothingFitsError as error:
            raise self._nothing_fits(error.smallest, sharded=error.sharded) from None

    def _nothing_fits(self, smallest: int, *, sharded: bool) -> NothingFitsError:
        problem = self.problem
        lora, memory = problem.request.lora is not None, problem.machine.device.memory
        return NothingFitsError(problem.limit, smallest, sharded=sharded, lora=lora, memory=memory)

    def fastest_or_none(self, batch: int, machine: Machine | None = None) -> Estimate | None:
        """Return the fastest strategy, or None if the data or the batch is too small or nothing fits."""
        ranks = (machine or self.problem.machine).gpus
        if batch < ranks or batch > self.problem.budget.data:
            return None
        try:
            return self.fastest(batch, machine)
        except ValueError:
            return None

    def checked(self, batch: int) -> tuple[Estimate, Prediction]:
        """Return the fastest strategy, and a step that was traced at its own chunk.

        `peaks` extrapolates from small chunks. If the traced step takes more memory, the model is raised and the search repeated.
        """
        while True:
            estimate = self.fastest(batch)
            short = _with_two_chunks(estimate.strategy)
            predicted = self.peaks.predict(short)
            if not self.peaks.correct(short, predicted.reserved_bytes):
                return estimate, predicted

    @property
    def sizes(self) -> ChunkSizes:
        """Chunk sizes to try: powers of two and the chunk of `fit`, none above it; if several chunks were timed, only those."""
        ran, timed = self.calibration.ran, self.calibration.timed

        def sizes_for(shard: int) -> list[int]:
            usual = {*chunk_sizes(shard), *([ran.chunk] if ran is not None and ran.chunk <= shard else [])}
            sizes = [size for size in timed if size <= shard] or usual
            return sorted(size for size in sizes if ran is None or size <= ran.chunk)

        return ChunkSizes(sizes_for, compare=bool(timed))


def estimator_for(problem: Problem, tools: Tools | None = None) -> Estimator:
    """Read the measurements of a problem, count the work of its model, and prepare the prediction of its memory."""
    tools = tools or Tools()
    request, base, machine = problem.request, problem.base, problem.machine
    calibration = calibrate(request.measured, base, problem.precision, machine)
    work = tools.workload(request, base, problem.precision, machine)

    def reading(run: config.Run) -> ReadingRate:
        return tools.reading(run, work.built)

    rate = reading(base)
    task = StepWork(
        both_sides(work.towers, pairs=request.pairs, negatives=request.negatives),
        problem.objective.cost_name,
        base.loss.dim,
        request.optimizer,
        fused=update_is_fused(request, base, machine),
        loss_options=loss_options(base, request.negatives),
        reading_s=rate.seconds,
        workers=base.data.workers,
        decoding_s=rate.decoding,
    )

    def count(run: config.Run) -> StepWork:
        towers = tools.workload(request, run, problem.precision, machine).towers
        return replace(task, towers=both_sides(towers, pairs=request.pairs, negatives=request.negatives))

    lengths = [length for tower in work.built if tower.kind == "text" if (length := getattr(tower.prepare, "length", None))]
    length = request.length if request.objective == "lm" else max(lengths, default=None)
    return Estimator(problem, calibration, task, PeakMemory(tools.predict(request, base, work, machine)), count, reading, length)


def _with_two_chunks(strategy: Strategy) -> Strategy:
    """Return the strategy with at most two chunks of the same size: it has the same peak per chunk and traces much faster."""
    chunks = min(strategy.chunks, 2)
    return replace(strategy, shard=min(strategy.shard, chunks * strategy.chunk), keep=min(strategy.keep, chunks))
