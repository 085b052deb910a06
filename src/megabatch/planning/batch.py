"""Which batch: what the learning problem wants, as arithmetic.

Memory does not enter, and a machine only where the question is how soon one is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from ..objectives import DEFAULT, CostName, saturation_of
from . import evidence
from .evidence import FACTS, Confidence

Start = Literal["scratch", "pretrained", "locked"]


class Choice(NamedTuple):
    """A batch, in samples, with its reasons; `notes` are what to know beside it."""

    batch: int
    updates: int
    why: str
    source: str
    confidence: Confidence
    notes: tuple[str, ...] = ()


def updates_needed(seen: int, start: Start = "scratch") -> int:
    """Optimizer steps below which quality falls, for a contrastive run that sees so many samples.

    A power of the samples seen, through two measurements: between too few and enough updates, the middle by ratio. Towers from
    scratch need twice what a locked one does; fine-tuned ones lie between.

    >>> updates_needed(2_000_000), updates_needed(450_000_000, "locked")
    (976, 6866)
    """
    scratch = math.sqrt(evidence.SCRATCH_TOO_FEW * evidence.SCRATCH_ENOUGH)
    locked = math.sqrt(evidence.LOCKED_TOO_FEW * evidence.LOCKED_ENOUGH)
    factor = {"scratch": 1.0, "pretrained": evidence.SCRATCH_OVER_LOCKED**-0.5, "locked": 1 / evidence.SCRATCH_OVER_LOCKED}
    growth = math.log(evidence.SCRATCH_OVER_LOCKED * locked / scratch) / math.log(evidence.LOCKED_SEEN / evidence.SCRATCH_SEEN)
    return max(1, round(factor[start] * scratch * (seen / evidence.SCRATCH_SEEN) ** growth))


def collisions(batch: int, unique: int) -> float:
    """Pairs of a batch that are expected to be the same item, drawn uniformly of so many.

    >>> round(collisions(32768, 70_000))
    7670
    """
    return batch * batch / (2 * unique)


def contrastive(seen: int, data: int, loss: CostName = DEFAULT, start: Start = "scratch") -> Choice:
    """The batch of a contrastive run: samples seen over updates needed, where negatives still pay and the data has as many."""
    check_budget(seen, data)
    needed, most = updates_needed(seen, start), saturation_of(loss)
    target = seen / needed
    batch = min(nearest_power(target), most)
    why = f"{seen:,} samples seen / about {needed:,} updates needed ({start}) = {target:,.0f}"
    notes: list[str] = []
    if batch == most and target > most:
        why += f", capped where negatives stop paying for this loss ({most:,})"
    if batch < evidence.FLOOR and seen / evidence.FLOOR >= evidence.FLOOR_UPDATES:
        batch, why = evidence.FLOOR, why + f"; raised to {evidence.FLOOR:,}, which leaves thousands of updates"
    if batch < evidence.FLOOR:
        longer = _samples_for(evidence.FLOOR, start)
        notes.append(
            f"{evidence.FLOOR:,} is a good floor where the budget pays for it: that takes about {longer:,} samples seen; at"
            f" {seen:,} it would leave {math.ceil(seen / evidence.FLOOR):,} updates"
        )
    if batch > data:
        batch = 2 ** int(math.log2(data))
        why += f"; the data has {data:,}"
    source = f"{FACTS['updates from scratch'].source}; {FACTS['updates locked'].source}; {FACTS['negatives'].source}"
    confidence: Confidence = "medium" if seen >= evidence.SCRATCH_SEEN / 4 else "low"
    return Choice(batch, math.ceil(seen / batch), why, source, confidence, tuple(notes))


def judge(batch: int, seen: int, data: int, start: Start, loss: CostName) -> tuple[str, ...]:
    """What is to be said about a batch that somebody else chose for a contrastive run."""
    check_budget(seen, data)
    check_batch(batch, data)
    updates, needed = math.ceil(seen / batch), updates_needed(seen, start)
    said = []
    if updates < needed / 2:
        said.append(f"{updates:,} updates are few: about {needed:,} are needed; take a smaller batch, or see more samples")
    if batch > evidence.CEILING:
        said.append(f"above {evidence.CEILING:,} quality fell in every published run from scratch ({FACTS['negatives'].source})")
    elif batch > saturation_of(loss):
        said.append(f"above {saturation_of(loss):,} more negatives bought nothing with this loss ({FACTS['negatives'].source})")
    if batch < evidence.FLOOR and seen / evidence.FLOOR >= needed:
        said.append(f"the budget pays for {evidence.FLOOR:,}: larger batches were better there ({FACTS['negatives'].source})")
    return tuple(said)


def critical_batch(objective: Literal["supervised", "lm"], data: int) -> int:
    """A prior for the critical batch, in samples of images or tokens of text: right within a factor of four, if that.

    ImageNet's 8,192, with the square root of the data beside it; half a million tokens for language models.
    """
    if objective == "lm":
        return evidence.CRITICAL_TOKENS
    return max(16, round(evidence.IMAGENET_CRITICAL * math.sqrt(data / evidence.IMAGENET)))


def steps_factor(batch: int, critical: float) -> float:
    """Steps to a target, as a multiple of what an endless batch takes.

    >>> steps_factor(8192, 8192), steps_factor(1024, 8192)
    (2.0, 9.0)
    """
    return 1 + critical / batch


def soonest(critical: float, seconds: Callable[[int], float], most: int, least: int = 1) -> int:
    """The batch, a power of two times `least`, with which a target is reached first: steps(B) · time(B), no larger than `most`."""
    sizes = [least]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return min(sizes, key=lambda batch: steps_factor(batch, critical) * seconds(batch))


def mean_loss(
    critical: int,
    seconds: Callable[[int], float],
    seen: int,
    data: int,
    *,
    ranks: int = 1,
    priority: Literal["accuracy", "speed"] = "accuracy",
    source: str = FACTS["critical batch"].source,
    measured: str | None = None,
) -> Choice:
    """The batch of a supervised run or a language model: the soonest to a target, or the smallest that is nearly as soon.

    measured: of a critical batch that is no prior, what is to be said of it.
    """
    check_budget(seen, data)
    most = max(ranks, min(critical, data))
    fastest = soonest(critical, seconds, most, least=ranks)
    batch = fastest

    def total(size: int) -> float:
        return steps_factor(size, critical) * seconds(size)

    if priority == "accuracy":
        while batch // 2 >= ranks and batch % 2 == 0 and total(batch // 2) <= 1.1 * total(fastest):
            batch //= 2
    why = f"steps(B) · time(B) with steps ∝ 1 + {critical:,}/B is least at {fastest:,}"
    why += f"; {batch:,} is within a tenth of it and leaves more updates" if batch < fastest else ""
    if measured is not None:
        return Choice(batch, math.ceil(seen / batch), f"{why}; {measured}", source, "measured")
    low, high = round(critical / evidence.CRITICAL_FACTOR), round(critical * evidence.CRITICAL_FACTOR)
    note = f"the critical batch is a prior ({low:,} to {high:,}): measure it, and plan again with critical=…"
    return Choice(batch, math.ceil(seen / batch), why, source, "low", (note,))


def fine_tuning(seen: int, data: int, *, pairs: bool) -> Choice:
    """Small: 32 for a classifier or a language model, 512 pairs for encoders whose negatives come from the batch."""
    check_budget(seen, data)
    fact = FACTS["fine-tuning pairs" if pairs else "fine-tuning"]
    batch = min(512 if pairs else 32, 2 ** int(math.log2(data)))
    return Choice(batch, math.ceil(seen / batch), fact.says, fact.source, fact.confidence, ("sweep it with the learning rate",))


def nearest_power(number: float) -> int:
    """The power of two that is nearest by ratio.

    >>> nearest_power(724), nearest_power(1450)
    (512, 2048)
    """
    return 2 ** max(0, round(math.log2(max(1.0, number))))


def check_budget(seen: int, data: int) -> None:
    if data < 2:
        raise ValueError(f"data is {data}: must be at least 2 samples")
    if seen < 1:
        raise ValueError(f"seen is {seen}: the samples that training sees must be at least 1; give seen=… or epochs=…")


def check_batch(batch: int, data: int) -> None:
    if batch < 1:
        raise ValueError(f"batch is {batch}: must be at least 1")
    if batch > data:
        raise ValueError(f"batch is {batch:,} and data is {data:,}: a batch cannot hold more samples than there are; lower it")


def _samples_for(batch: int, start: Start) -> int:
    """The fewest samples seen, by doubling, for which the rule asks for such a batch."""
    seen = batch
    while seen / updates_needed(seen, start) < batch:
        seen *= 2
    low = seen // 2
    while seen - low > seen // 64:
        middle = (low + seen) // 2
        low, seen = (low, middle) if middle / updates_needed(middle, start) >= batch else (middle, seen)
    return seen
