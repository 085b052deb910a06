"""How a plan is made: the batch from the problem, the way from the machine, the settings from the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from .. import config, trust
from ..costs.hardware import Machine, find_machine
from ..costs.memory import MemoryPredictor, PeakMemory, Prediction
from ..costs.strategy import Precision, Sharding, Strategy
from ..costs.time import StepTime, StepWork, rescale, step_time
from ..objectives import BY_COST_NAME, MEAN, OBJECTIVES
from . import batch as batches
from . import hyperparameters
from .alternatives import alternatives, changes, curve
from .choose_batch import choose
from .evidence import FACTS, Fact, Number
from .plan import Plan
from .read_measurements import gather
from .reasons import contrastive_numbers, reach_numbers
from .request import Request, budget, parse_base, parse_count, towers_of
from .search import Found, Sizes, all_ways, chunk_sizes, search
from .workload import Workload, traced, workload

# Bytes of a parameter with gradient and Adam's state in fp32, and the share of the memory from which on that is much.
STATE_BYTES, HEAVY = 16, 0.25


class Tools(NamedTuple):
    """What predicts a step: its work, and its memory. Replaced where there is nothing to trace."""

    workload: Callable[[Request, config.Run, Precision, Machine], Workload] = workload
    predict: Callable[[Request, config.Run, Workload, Machine], MemoryPredictor] = traced


def plan(model: str | config.Run | None = None, *, tools: Tools | None = None, trust_code: bool = False, **asked: Any) -> Plan:
    """The plan for a model, data and machine; see `Request` for what can be asked.

    Without arguments: the embedded default on this machine.
    trust_code: whether code that a Run names (`trust.callables`) may be imported and called. A function that `model` itself names,
        "package.module:function", is named by the caller and needs no further word.
    """
    if isinstance(model, config.Run):
        trust.require_trust(model, trust_code)
    try:
        question = Request(model, **asked)
    except TypeError as error:
        known = ", ".join(field.name for field in dataclasses.fields(Request))
        raise ValueError(f"plan: {error}; known are {known}") from None
    return Planner(question, tools or Tools()).plan()


class Planner:
    """The parts of one plan, in the order in which they are decided."""

    def __init__(self, question: Request, tools: Tools) -> None:
        self.question = question
        self.machine = find_machine(question.gpu, question.gpus, question.memory, question.rates)
        self.base = towers_of(question)
        if isinstance(question.model, config.Run) and question.start == "scratch" and (self.base.x.locked or self.base.x.weights):
            # A run's own towers say where they start.
            question = self.question = replace(question, start="locked" if self.base.x.locked else "pretrained")
        self.budget = budget(question, self.base)
        self.given = parse_count(question.batch, "batch")
        if self.given is not None:
            batches.check_batch(self.given, self.budget.data)
        self.precision = choose_precision(question.precision, self.machine)
        self.known = gather(question.measured, self.base, self.precision, self.machine)
        self.work = tools.workload(question, self.base, self.precision, self.machine)
        objective = OBJECTIVES[self.base.loss.objective if question.pairs else MEAN]
        self.task = StepWork(self.work.towers, objective.cost_name, self.base.loss.dim, question.optimizer)
        self.peaks = PeakMemory(tools.predict(question, self.base, self.work, self.machine))
        self.limit = int(question.share * self.machine.device.memory)

    def plan(self) -> Plan:
        choice = choose(self)
        found, predicted = self.reach_and_check(choice.batch)
        follows, step = self.follow(found.strategy.batch), self.step(found.strategy)
        learnt = "as it was asked for" if self.given is not None else choice.why
        numbers = (
            Number("batch", found.strategy.batch, f"{found.strategy.batch:,}", learnt, choice.source, choice.confidence),
            *reach_numbers(found, self.limit, self.machine, self.known),
            *(contrastive_numbers(found.strategy.batch, self.budget.unique) if self.question.pairs else ()),
            *follows.numbers,
        )
        return Plan(
            run=self.run(found, follows),
            strategy=found.strategy,
            machine=f"{self.machine.gpus} × {self.machine.device.name}",
            device_bytes=self.machine.device.memory,
            limit_bytes=self.limit,
            seconds_per_step=found.seconds,
            peak_bytes=found.peak,
            moment=predicted.moment,
            memory=_scaled(predicted, found.peak),
            time=step.parts,
            numbers=numbers,
            alternatives=tuple(alternatives(self, found)),
            notes=(*choice.notes, *self.known.notes, *self.notes(found.strategy.batch, follows)),
            changes=tuple(changes(self, found)),
            curve=tuple(curve(self, found)),
        )

    def reach(self, batch: int, machine: Machine | None = None) -> Found:
        """The fastest way to the batch that fits."""
        machine = machine or self.machine
        # Sharding frees no more than weights, gradients and the optimizer's state take: it is for models where that counts.
        heavy = STATE_BYTES * sum(work.parameters for work in self.work.towers) > HEAVY * self.limit
        shardings: tuple[Sharding, ...] = ("ddp", "fsdp2") if heavy else ("ddp",)
        accumulate = not self.question.pairs
        ways = all_ways(batch, machine.gpus, precisions=(self.precision,), accumulate=accumulate, shardings=shardings)
        ways = [way for way in ways if self.known.allows(replace(way, chunk=1))] or ways
        return search(ways, self.memory, lambda strategy: self.step(strategy, machine).seconds, self.limit, self.sizes)

    @property
    def sizes(self) -> Sizes:
        """Chunks to try: powers of two and the one that fit has found to run, none above it; where several were timed, those."""
        ran, timed = self.known.ran, self.known.timed

        def of(shard: int) -> list[int]:
            usual = {*chunk_sizes(shard), *([ran.chunk] if ran is not None and ran.chunk <= shard else [])}
            sizes = [size for size in timed if size <= shard] or usual
            return sorted(size for size in sizes if ran is None or size <= ran.chunk)

        return Sizes(of, fastest=bool(timed))

    def memory(self, strategy: Strategy) -> int:
        """Bytes that a way takes of the device: predicted, and put right by what was measured."""
        found = self.known.memory(strategy, self.peaks)
        return min(found, self.limit) if self.known.has_run(strategy) else found

    def reach_and_check(self, batch: int) -> tuple[Found, Prediction]:
        """The way to the batch, and a traced step of its own chunk: where that takes more than the lines say, they are raised."""
        while True:
            found = self.reach(batch)
            near = _nearby(found.strategy)
            predicted = self.peaks.predict(near)
            if not self.peaks.correct(near, predicted.reserved_bytes):
                return found, predicted

    def try_to_reach(self, batch: int, machine: Machine | None = None) -> Found | None:
        """The way to a batch beside the plan's; None where the data is too small, the ranks too many, or no way fits."""
        ranks = (machine or self.machine).gpus
        if batch < ranks or batch > self.budget.data:
            return None
        try:
            return self.reach(batch, machine)
        except ValueError:
            return None

    def step(self, strategy: Strategy, machine: Machine | None = None) -> StepTime:
        """The time of a step, likewise; its parts are the predicted ones in proportion."""
        machine = machine or self.machine
        predicted = step_time(self.task, strategy, machine)
        return rescale(predicted, self.known.seconds(strategy, lambda way: step_time(self.task, way, machine).seconds))

    def follow(self, batch: int) -> hyperparameters.Hyperparameters:
        question, parameters = self.question, sum(work.parameters for work in self.work.towers)
        given, fact, sweep = parse_base(question.base_lr), hyperparameters.GIVEN, self.known.sweep
        if given is None and sweep is not None:
            given = (sweep.lr, sweep.batch)
            fact = Fact(f"the best rate of a sweep at {sweep.batch:,}, {self.known.said['sweep']}", "megabatch sweep", "measured")
        elif given is None and question.model is None:
            # The embedded default's own, which was tuned there.
            given = (self.base.optimizer.lr, self.base.batch.size)
        base = hyperparameters.base_for(question.objective, parameters, question.optimizer, given, fact)._replace(ema=question.ema)
        objective = "contrastive" if question.pairs and question.objective != "finetune" else question.objective
        return hyperparameters.follow(
            batch,
            self.budget.seen,
            self.budget.data,
            base,
            optimizer=question.optimizer,
            objective=objective,
            smoothed=BY_COST_NAME[self.task.loss].smooths_labels,
        )

    def notes(self, batch: int, follows: hyperparameters.Hyperparameters) -> list[str]:
        said = []
        if self.question.pairs:
            said.append(
                FACTS["no accumulation"].says + f" ({FACTS['no accumulation'].source}): chunks, not accumulation, reach the batch"
            )
            said.append(
                "at equal samples a larger batch promises nothing that was not measured on your data: compare with half of it"
            )
        if follows.sweep:
            said.append(f"sweep the learning rate: {', '.join(f'{rate:g}' for rate in follows.sweep)}")
        if self.question.model is not None and self.question.source is None and not isinstance(self.question.model, config.Run):
            said.append("data.source in the file is a placeholder: put yours there")
        if self.machine.device.type == "cpu" and not self.known.steps and self.question.rates is None:
            said.append(f"this machine has no accelerator: times rest on an assumption ({self.machine.device.source})")
        return said

    def run(self, found: Found, follows: hyperparameters.Hyperparameters) -> config.Run | None:
        """The configuration: everything that was decided, in the place of what the base had."""
        if self.question.objective == "lm":
            return None
        base, strategy = self.base, found.strategy
        betas, decay = follows.betas, follows.weight_decay
        optimizer = replace(base.optimizer, name=self.question.optimizer, lr=follows.lr, betas=betas, weight_decay=decay)
        optimizer = replace(optimizer, ema=follows.ema)
        length: dict[str, Any] = {"samples": self.budget.seen, "epochs": None, "steps": None}
        planned = replace(
            base,
            out=self.question.out or base.out,
            x=replace(base.x, checkpointing=strategy.checkpointing),
            y=replace(base.y, checkpointing=strategy.checkpointing and base.y.name != "x"),
            loss=replace(base.loss, label_smoothing=follows.label_smoothing),
            batch=replace(base.batch, size=strategy.batch, chunk=strategy.chunk, keep=strategy.keep),
            optimizer=optimizer,
            schedule=replace(base.schedule, **length, warmup=float(follows.warmup)),
            compute=replace(base.compute, precision=strategy.precision, sharding=strategy.sharding),
            planned=config.Planned(found.peak, found.seconds),
        )
        # Another optimizer than the base's does not use all that the base says.
        run = config.without_unused(planned)
        config.check(run)
        return run


def choose_precision(asked: Precision | None, machine: Machine) -> Precision:
    """bf16 where the device has it, else fp16, else fp32."""
    if asked is not None:
        machine.device.flops_per_second(asked)
        return asked
    # CPUs that have half precisions may be far slower in them.
    order: tuple[Precision, ...] = ("bf16", "fp16", "fp32") if machine.device.type != "cpu" else ("fp32",)
    return next(precision for precision in order if precision in machine.device.rates)


def _nearby(strategy: Strategy) -> Strategy:
    """A way with the same chunk and few of them: what a peak is made of shows there, at a fraction of the time."""
    chunks = min(strategy.chunks, 2)
    return replace(strategy, shard=min(strategy.shard, chunks * strategy.chunk), keep=min(strategy.keep, chunks))


def _scaled(predicted: Prediction, peak: int) -> dict[str, int]:
    """The parts of a prediction, and what else is in the peak: more rows, kept chunks, the allocator's reserve."""
    parts = dict(predicted.parts)
    rest = peak - sum(parts.values())
    if rest >= 0:
        return {**parts, "further rows, kept chunks, reserve": rest} if rest else parts
    # A measured peak below the predicted one: the parts in proportion.
    return {name: round(part * peak / sum(parts.values())) for name, part in parts.items()}
