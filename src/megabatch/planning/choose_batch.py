"""Choose the batch: the given one, the one that a sweep recommends, or the one that the rules of the learning problem give.

The rules are arithmetic (`recipes`). Memory plays no role in them, and the machine only decides where the fastest way to a target
is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from .. import evidence, recipes
from ..evidence import FACTS, Confidence, steps_factor
from ..measurements import Noise
from ..objectives import DEFAULT, OBJECTIVES
from ..optimizers import closest
from ..recipes import Recipe, TrainingTask, advise_batch, law_for, power_near, updates_needed
from .estimator import Estimator
from .problem import Problem, kind_of
from .request import check_batch, check_budget

# With priority "accuracy", the smallest batch within this factor of the least time is taken.
NEARLY_FASTEST = 1.1


class BatchChoice(NamedTuple):
    """A batch, in samples, with its reason.

    low, high: the interval in which measured comparisons and published trainings of this kind and budget lie. warnings: why the
    training is a bad idea, and what to do instead. others: the most similar published trainings.
    """

    batch: int
    updates: int
    why: str
    source: str
    confidence: Confidence
    notes: tuple[str, ...] = ()
    low: int | None = None
    high: int | None = None
    warnings: tuple[str, ...] = ()
    others: tuple[Recipe, ...] = ()


class CriticalBatch(NamedTuple):
    """A critical batch, in samples, and its source. measured: a phrase on where and when, or None if it is a prior."""

    size: int
    source: str
    measured: str | None = None


def task_of(problem: Problem, params: int | None = None) -> TrainingTask:
    """Return what the problem trains, as the rules see it. params: parameters of the model."""
    request, (data, unique, seen) = problem.request, problem.budget
    finetuned = request.objective == "finetune" or request.lora is not None
    return TrainingTask(
        kind=kind_of(request, problem.base),
        start="pretrained" if finetuned and request.start == "scratch" else request.start,
        data=data,
        seen=seen,
        unique=unique,
        params=params,
        loss=problem.base.loss.objective if OBJECTIVES[problem.base.loss.objective].contrastive else DEFAULT,
        optimizer=closest(request.optimizer).family.name,
        negatives=request.negatives if request.pairs else 0,
        lora=request.lora,
        length=request.length,
    )


def choose_batch(problem: Problem, estimator: Estimator) -> BatchChoice:
    """Return the batch that the problem needs, as a multiple of the ranks."""
    request, (data, _, seen), ranks = problem.request, problem.budget, problem.machine.gpus
    check_budget(seen, data)
    task = task_of(problem, estimator.parameters)
    others = tuple(recipes.nearest(task))
    if problem.given is not None:
        remarks = tuple(_batch_norm(estimator, problem.given))
        choice = BatchChoice(problem.given, math.ceil(seen / problem.given), "as requested", "given", "high", remarks)
        against = (*recipes.warnings_for(task, problem.given, ranks), *judge(task, problem.given))
        return choice._replace(warnings=against, others=others)
    noise = estimator.calibration.noise
    measured = request.critical is not None or (noise is not None and not noise.coupled)
    if estimator.calibration.sweep is not None and estimator.calibration.same_data:
        choice = _swept(problem, estimator)
    elif not task.pairs and task.start == "scratch" and (measured or (request.priority == "speed" and task.kind != "lm")):
        choice = fastest_to_target(problem, estimator)
    else:
        choice = advised(task, request.priority)
        if noise is not None and noise.coupled:
            choice = _moved_by_noise(choice, task, noise, estimator.calibration.origin["noise"])
    batch = max(1, round(choice.batch / ranks)) * ranks
    if batch > min(data, choice.high or data):
        # Rounded up, it would leave too few updates, or take more samples than there are.
        batch = max(1, choice.batch // ranks) * ranks
    elif choice.low is not None and batch < choice.low <= choice.batch and batch + ranks <= min(data, choice.high or data):
        # Rounded down, it would be less than the rules advise at least.
        batch += ranks
    if choice.confidence == "measured" and batch != choice.batch:
        why = f"{choice.why}; rounded from {choice.batch:,} to {batch:,}, a multiple of {ranks} GPUs"
        choice = choice._replace(why=why, confidence="high")
    warnings = (*choice.warnings, *recipes.warnings_for(task, batch, ranks))
    if ranks > max(choice.batch, choice.high or 0):
        choice = choice._replace(why=f"one sample on each of {ranks:,} GPUs, not the advised {choice.batch:,}; {choice.why}")
        if recipes.too_few_updates(task, batch) is None:
            line = f"{ranks:,} GPUs need a batch of {batch:,}, but {choice.batch:,} suits the samples seen: take fewer GPUs."
            warnings = (*warnings, line)
    notes = (*choice.notes, *_batch_norm(estimator, batch))
    return choice._replace(batch=batch, updates=math.ceil(seen / batch), notes=notes, warnings=warnings, others=others)


def _batch_norm(estimator: Estimator, batch: int) -> list[str]:
    """Return what batch norm does with the chunks of a batch, if the model has it."""
    if not any(call.op_class == "batch norm" for tower in estimator.task.towers for call in tower.forward.calls):
        return []
    rows, fact = estimator.fastest(batch).strategy.chunk, FACTS["batch norm"]
    line = f"The model has batch norm: its statistics are those of a chunk, {rows:,} rows of one GPU, whatever the batch."
    if rows < evidence.BATCH_NORM_ROWS:
        line += f" These are few: {fact.says} ({fact.source}). Synchronise it over GPUs (SyncBatchNorm), or use group norm."
    return [line]


def advised(task: TrainingTask, priority: Literal["accuracy", "speed"] = "accuracy") -> BatchChoice:
    """Return the batch that the rules advise: the usual one, or with priority "speed" the largest that loses no quality.

    At equal samples seen a larger batch saves optimizer steps and exchanges of gradients, and can use more devices.
    """
    advice = advise_batch(task)
    assert advice is not None and task.seen is not None and task.data is not None
    batch = round(advice.high if priority == "speed" else advice.value)
    why = advice.why
    if priority == "speed" and batch > advice.value:
        why = f"the largest batch that leaves enough updates, for speed; usual is {advice.value:,.0f}: {why}"
    low, high = round(advice.low), round(advice.high)
    notes = [*advice.notes, *_remarks(task, batch)]
    return BatchChoice(batch, math.ceil(task.seen / batch), why, advice.source, advice.confidence, tuple(notes), low, high)


def _moved_by_noise(choice: BatchChoice, task: TrainingTask, noise: Noise, origin: str) -> BatchChoice:
    """Return an advised batch as the gradient noise of this very problem moves it, where the law of batches decided."""
    law = law_for(task)
    assert task.seen is not None and task.data is not None
    if law is None or task.seen >= evidence.LEAST_PUBLISHED:
        return choice
    factor = law.moved_by_noise(noise.critical, noise.batch)
    batch = min(power_near(choice.batch * factor), recipes.power_below(task.data))
    if batch == choice.batch:
        return choice
    note = (
        f"Gradient noise, a critical batch of {noise.critical:,.0f} at batch {noise.batch:,}, moved the batch from"
        f" {choice.batch:,} to {batch:,}; {origin}."
    )
    low, high = min(choice.low or batch, batch), max(choice.high or batch, batch)
    return choice._replace(batch=batch, updates=math.ceil(task.seen / batch), notes=(*choice.notes, note), low=low, high=high)


def _remarks(task: TrainingTask, batch: int) -> list[str]:
    """Return what to know about an advised batch."""
    assert task.seen is not None
    lines = []
    if task.pairs and task.start == "scratch" and batch < evidence.FLOOR:
        longer = _samples_for(evidence.FLOOR, task)
        lines.append(
            f"{evidence.FLOOR:,} is a good minimum if the budget allows it: it takes about {longer:,} samples seen. At"
            f" {task.seen:,} it would leave {math.ceil(task.seen / evidence.FLOOR):,} updates."
        )
    if task.pairs and task.start == "pretrained" and not task.negatives:
        lines.append(
            "Mined hard negatives replace a large batch: with a few per query (negatives=…), 64 to 2,048 queries are usual"
            f" ({FACTS['hard negatives'].source})."
        )
    if task.start == "pretrained":
        lines.append("Sweep the batch together with the learning rate.")
    if task.kind == "lm" and task.start == "scratch":
        fact = FACTS["ramp"]
        lines.append(
            f"The critical batch is small at first: begin with a quarter of the batch and double it twice in the first tenth of the"
            f" run, with the rate following its square root ({fact.says}; {fact.source})."
        )
        fact = FACTS["small lm"]
        lines.append(f"A smaller batch loses no quality if β2 and the rate follow it, only speed: {fact.says} ({fact.source}).")
    return lines


def _swept(problem: Problem, estimator: Estimator) -> BatchChoice:
    """Return the batch that a sweep over this data recommends."""
    calibration, (data, _, seen) = estimator.calibration, problem.budget
    sweep = calibration.sweep
    assert sweep is not None
    check_batch(sweep.batch, data)
    why = f"recommended by a sweep whose runs had equal {sweep.same}; {calibration.origin['sweep']}"
    return BatchChoice(sweep.batch, math.ceil(seen / sweep.batch), why, "megabatch sweep", "measured")


def fastest_to_target(problem: Problem, estimator: Estimator) -> BatchChoice:
    """Return the batch for a loss that is a mean over samples, by its critical batch: given, measured, or a prior."""
    request, noise, (data, _, seen) = problem.request, estimator.calibration.noise, problem.budget
    lm = request.objective == "lm"
    critical, measured = request.critical or recipes.critical_images(data), None
    source = "given" if request.critical is not None else FACTS["imagenet"].source
    if request.critical is None and noise is not None and not noise.coupled:
        if not noise.critical < math.inf:
            raise ValueError(
                f"the measured noise has no finite critical batch ({noise.critical}): the gradient was not visible above the noise;"
                " measure more steps, give critical=…, or leave the file out"
            )
        critical, source = max(1, round(noise.critical)), "megabatch noise"
        interval = f"{noise.low:,.0f} to {noise.high:,.0f}"
        measured = f"the critical batch is {critical:,} ({interval}), {estimator.calibration.origin['noise']}"
    rows = max(1, critical // request.length) if lm else critical
    return mean_loss(
        CriticalBatch(rows, source, measured),
        lambda size: estimator.fastest(size).seconds,
        seen,
        data,
        ranks=problem.machine.gpus,
        priority=request.priority,
    )


def judge(task: TrainingTask, batch: int) -> tuple[str, ...]:
    """Return remarks on a batch that the user chose: those that leave few updates, or lie outside what measurements support."""
    assert task.seen is not None and task.data is not None
    check_budget(task.seen, task.data)
    check_batch(batch, task.data)
    advice = advise_batch(task)
    assert advice is not None
    remarks, updates, first = [], math.ceil(task.seen / batch), advice.source.partition("; ")[0]
    needed = updates_needed(task.seen, task.start)
    # Fewer still are too few to learn from, which `recipes.warnings_for` says.
    if task.pairs and evidence.HOPELESS_UPDATES <= updates < needed / 2:
        remedy = "take a smaller batch or see more samples" if batch > advice.value else "see more samples"
        remarks.append(f"{updates:,} updates are few, about {needed:,} are needed: {remedy}.")
    if task.pairs and batch > evidence.CEILING:
        remarks.append(
            f"Above {evidence.CEILING:,} quality fell in every published run from scratch ({FACTS['negatives'].source})."
        )
    elif batch > 2 * advice.high:
        remarks.append(f"A batch of {batch:,} is large: usual are {advice.low:,.0f} to {advice.high:,.0f} ({first}): {advice.why}.")
    elif 2 * batch < advice.low:
        remarks.append(
            f"A batch of {batch:,} is small: the samples seen allow {advice.value:,.0f}, and {advice.low:,.0f} to"
            f" {advice.high:,.0f} are usual ({first})."
        )
    return tuple(remarks)


def soonest(critical: float, seconds: Callable[[int], float], most: int, least: int = 1) -> int:
    """Return the batch that reaches a target first, by steps(B) · time(B), among powers of two times `least` up to `most`."""
    sizes = [least]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return min(sizes, key=lambda batch: steps_factor(batch, critical) * seconds(batch))


def mean_loss(
    critical: CriticalBatch,
    seconds: Callable[[int], float],
    seen: int,
    data: int,
    *,
    ranks: int = 1,
    priority: Literal["accuracy", "speed"] = "accuracy",
) -> BatchChoice:
    """Return the batch of a supervised run or a language model: the fastest to a target, or the smallest that is nearly as fast."""
    check_budget(seen, data)
    most = max(ranks, min(critical.size, data))
    batch = fastest = soonest(critical.size, seconds, most, least=ranks)

    def total(size: int) -> float:
        return steps_factor(size, critical.size) * seconds(size)

    if priority == "accuracy":
        while batch // 2 >= ranks and batch % 2 == 0 and total(batch // 2) <= NEARLY_FASTEST * total(fastest):
            batch //= 2
    why = f"steps(B) · time(B) with steps ∝ 1 + {critical.size:,}/B is least at {fastest:,}"
    why += f"; {batch:,} takes at most a tenth longer and leaves more updates" if batch < fastest else ""
    if critical.measured is not None:
        return BatchChoice(batch, math.ceil(seen / batch), f"{why}; {critical.measured}", critical.source, "measured")
    low, high = round(critical.size / evidence.CRITICAL_FACTOR), round(critical.size * evidence.CRITICAL_FACTOR)
    note = f"The critical batch is a prior ({low:,} to {high:,}): measure it, and plan again with critical=…."
    return BatchChoice(batch, math.ceil(seen / batch), why, critical.source, "low", (note,) if critical.source != "given" else ())


def _samples_for(batch: int, task: TrainingTask) -> int:
    """Return about the fewest samples seen that leave enough updates at a batch, by doubling and bisection."""
    seen = batch
    while seen / updates_needed(seen, task.start) < batch:
        seen *= 2
    low = seen // 2
    while seen - low > seen // 64:
        middle = (low + seen) // 2
        low, seen = (low, middle) if middle / updates_needed(middle, task.start) >= batch else (middle, seen)
    return seen
