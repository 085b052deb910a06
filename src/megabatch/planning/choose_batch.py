"""Choose the batch: the given one, the one that a sweep recommends, or the one that the rules of the learning problem give.

The rules are arithmetic. Memory plays no role in them, and the machine only decides where the fastest way to a target is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from .. import evidence
from ..evidence import FACTS, Confidence, steps_factor
from ..objectives import DEFAULT, CostName, saturation_of
from .estimator import Estimator
from .problem import Problem
from .request import Start, check_batch, check_budget

# With priority "accuracy", the smallest batch within this factor of the least time is taken.
NEARLY_FASTEST = 1.1


class BatchChoice(NamedTuple):
    """A batch, in samples, with its reason."""

    batch: int
    updates: int
    why: str
    source: str
    confidence: Confidence
    notes: tuple[str, ...] = ()


class CriticalBatch(NamedTuple):
    """A critical batch, in samples, and its source. measured: a phrase on where and when, or None if it is a prior."""

    size: int
    source: str
    measured: str | None = None


def choose_batch(problem: Problem, estimator: Estimator) -> BatchChoice:
    """Return the batch that the problem needs, as a multiple of the ranks."""
    request, (data, _, seen), ranks = problem.request, problem.budget, problem.machine.gpus
    if problem.given is not None:
        notes = judge(problem.given, seen, data, request.start, request.loss) if request.pairs else ()
        return BatchChoice(problem.given, math.ceil(seen / problem.given), "as requested", "given", "high", notes)
    if estimator.calibration.sweep is not None and estimator.calibration.same_data:
        choice = _swept(problem, estimator)
    elif request.objective == "finetune":
        choice = fine_tuning(seen, data, pairs=request.pairs)
    elif request.pairs:
        choice = contrastive(seen, data, problem.objective.cost_name, request.start)
    else:
        choice = fastest_to_target(problem, estimator)
    batch = max(ranks, round(choice.batch / ranks) * ranks)
    if choice.confidence == "measured" and batch != choice.batch:
        why = f"{choice.why}; rounded from {choice.batch:,} to {batch:,}, a multiple of {ranks} GPUs"
        choice = choice._replace(why=why, confidence="high")
    return choice._replace(batch=batch)


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
    kind: Literal["lm", "supervised"] = "lm" if request.objective == "lm" else "supervised"
    critical, measured = request.critical or critical_batch(kind, data), None
    source = FACTS["lm critical batch" if kind == "lm" else "imagenet"].source
    if request.critical is None and noise is not None and not noise.coupled:
        if not noise.critical < math.inf:
            raise ValueError(
                f"the measured noise has no finite critical batch ({noise.critical}): the gradient was not visible above the noise;"
                " measure more steps, give critical=…, or leave the file out"
            )
        critical, source = max(1, round(noise.critical)), "megabatch noise"
        interval = f"{noise.low:,.0f} to {noise.high:,.0f}"
        measured = f"the critical batch is {critical:,} ({interval}), {estimator.calibration.origin['noise']}"
    rows = max(1, critical // request.length) if kind == "lm" else critical
    return mean_loss(
        CriticalBatch(rows, source, measured),
        lambda size: estimator.fastest(size).seconds,
        seen,
        data,
        ranks=problem.machine.gpus,
        priority=request.priority,
    )


def updates_needed(seen: int, start: Start = "scratch") -> int:
    """Return the optimizer steps below which the quality of a contrastive run falls, given the samples that it sees.

    A power law in the samples seen, through the geometric middle of "too few" and "enough" of two measurements. Towers trained from
    scratch need twice the updates of a locked one; pretrained towers lie between.

    >>> updates_needed(2_000_000), updates_needed(450_000_000, "locked")
    (976, 6866)
    """
    scratch = math.sqrt(evidence.SCRATCH_TOO_FEW * evidence.SCRATCH_ENOUGH)
    locked = math.sqrt(evidence.LOCKED_TOO_FEW * evidence.LOCKED_ENOUGH)
    factor = {"scratch": 1.0, "pretrained": evidence.SCRATCH_OVER_LOCKED**-0.5, "locked": 1 / evidence.SCRATCH_OVER_LOCKED}
    growth = math.log(evidence.SCRATCH_OVER_LOCKED * locked / scratch) / math.log(evidence.LOCKED_SEEN / evidence.SCRATCH_SEEN)
    return max(1, round(factor[start] * scratch * (seen / evidence.SCRATCH_SEEN) ** growth))


def contrastive(seen: int, data: int, loss: CostName = DEFAULT, start: Start = "scratch") -> BatchChoice:
    """Return the batch of a contrastive run: samples seen over updates needed, capped by saturation and by the data."""
    check_budget(seen, data)
    needed, most = updates_needed(seen, start), saturation_of(loss)
    target = seen / needed
    batch = min(nearest_power(target), most)
    why = f"{seen:,} samples seen / about {needed:,} updates needed ({start}) = {target:,.0f}"
    notes: list[str] = []
    if batch == most and target > most:
        why += f", capped at {most:,}, where more negatives stop helping this loss"
    if batch < evidence.FLOOR and seen / evidence.FLOOR >= evidence.FEWEST_UPDATES:
        batch, why = evidence.FLOOR, why + f"; raised to {evidence.FLOOR:,}, which leaves thousands of updates"
    if batch < evidence.FLOOR:
        longer = _samples_for(evidence.FLOOR, start)
        notes.append(
            f"{evidence.FLOOR:,} is a good minimum if the budget allows it: it takes about {longer:,} samples seen. At {seen:,} it"
            f" would leave {math.ceil(seen / evidence.FLOOR):,} updates."
        )
    if batch > data:
        batch = 2 ** int(math.log2(data))
        why += f"; capped by the {data:,} samples of the data"
    source = f"{FACTS['updates from scratch'].source}; {FACTS['updates locked'].source}; {FACTS['negatives'].source}"
    confidence: Confidence = "medium" if seen >= evidence.SCRATCH_SEEN / 4 else "low"
    return BatchChoice(batch, math.ceil(seen / batch), why, source, confidence, tuple(notes))


def judge(batch: int, seen: int, data: int, start: Start, loss: CostName) -> tuple[str, ...]:
    """Return remarks on a batch that the user chose for a contrastive run."""
    check_budget(seen, data)
    check_batch(batch, data)
    updates, needed = math.ceil(seen / batch), updates_needed(seen, start)
    source = FACTS["negatives"].source
    remarks = []
    if updates < needed / 2:
        remarks.append(f"{updates:,} updates are few, about {needed:,} are needed: take a smaller batch or see more samples.")
    if batch > evidence.CEILING:
        remarks.append(f"Above {evidence.CEILING:,} quality fell in every published run from scratch ({source}).")
    elif batch > saturation_of(loss):
        remarks.append(f"Above {saturation_of(loss):,} more negatives did not help this loss ({source}).")
    if batch < evidence.FLOOR and seen / evidence.FLOOR >= needed:
        remarks.append(f"The budget allows {evidence.FLOOR:,}: larger batches were better at such budgets ({source}).")
    return tuple(remarks)


def critical_batch(objective: Literal["supervised", "lm"], data: int) -> int:
    """Return a prior for the critical batch, in images or in tokens; it can be off by a factor of four or more.

    Images: ImageNet's 8,192, times the square root of the data relative to ImageNet. Language models: half a million tokens.
    """
    if objective == "lm":
        return evidence.CRITICAL_TOKENS
    return max(16, round(evidence.IMAGENET_CRITICAL * math.sqrt(data / evidence.IMAGENET)))


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
    return BatchChoice(batch, math.ceil(seen / batch), why, critical.source, "low", (note,))


def fine_tuning(seen: int, data: int, *, pairs: bool) -> BatchChoice:
    """Return a small batch: 32 for a classifier or a language model, 512 pairs for encoders whose negatives come from the batch."""
    check_budget(seen, data)
    fact = FACTS["fine-tuning pairs" if pairs else "fine-tuning"]
    batch = min(evidence.FINETUNE_PAIRS if pairs else evidence.FINETUNE_SAMPLES, 2 ** int(math.log2(data)))
    notes = ("Sweep the batch together with the learning rate.",)
    return BatchChoice(batch, math.ceil(seen / batch), fact.says, fact.source, fact.confidence, notes)


def nearest_power(number: float) -> int:
    """Return the power of two that is nearest by ratio.

    >>> nearest_power(724), nearest_power(1450)
    (512, 2048)
    """
    return 2 ** max(0, round(math.log2(max(1.0, number))))


def _samples_for(batch: int, start: Start) -> int:
    """Return about the fewest samples seen for which the rule gives such a batch, by doubling and bisection."""
    seen = batch
    while seen / updates_needed(seen, start) < batch:
        seen *= 2
    low = seen // 2
    while seen - low > seen // 64:
        middle = (low + seen) // 2
        low, seen = (low, middle) if middle / updates_needed(middle, start) >= batch else (middle, seen)
    return seen
