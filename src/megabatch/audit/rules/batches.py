"""Rules about the size of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ...evidence import (
    CEILING,
    ENOUGH_UPDATES,
    FEWEST_UPDATES,
    FINETUNE_LARGE,
    FINETUNE_LARGE_SAMPLES,
    FLOOR,
    HOPELESS_UPDATES,
    POOR_UPDATES,
    SMALLEST_PAIRS,
)
from ...objectives import BY_COST_NAME
from ...recipes import NO_NEGATIVES, Shortage, advise_batch
from ...recipes import too_few_updates as shortage_of
from ..facts import SMALLEST_BATCH, TrainingFacts, power_of_two
from ..rule import Severity, Violation, rule
from ..tools import TOOLS, large_batch

# A fix proposes a batch of at most this fraction (1/16) of the data. Our choice, not from a paper.
SHARE = 16
# A chunk that is so many times larger than the share of a rank was meant to be the batch.
SWAPPED = 16


@rule(
    "too-few-updates",
    "error",
    "warning",
    "note",
    source="SigLIP (2303.15343, table 8): at 450M seen, 256k (1.7k updates) is 9 points below 32k (13.7k updates); measured on"
    " 67k icons, 2M seen: 1,953 updates 27.3, 488 updates 21.5, 122 updates 1.1, 30 updates 0.03 recall@1",
    remedy="Take a smaller batch or a longer run. The batch is about (samples that will be seen) / (updates needed).",
)
def too_few_updates(t: TrainingFacts) -> Iterator[Violation]:
    """Too few updates.

    The samples seen are divided between the size of a batch and the number of updates. Below about 2,000 to 15,000 updates quality
    falls steeply, more so for towers trained from scratch, and more negatives do not make up for it. At the batch that `plan` would
    take, or below it, the budget is small, which may be intended; above, a smaller batch is better. Fewer than a hundred updates
    are too few to learn from, also for pretrained weights.
    """
    updates, size = t.updates, t.size
    if not t.contrastive or updates is None or size is None or updates >= ENOUGH_UPDATES:
        return
    if updates < HOPELESS_UPDATES:
        shortage, smaller = _shortage(t, updates, size)
        remedy = _sentence(shortage.remedy)
        if t.steps is not None:
            yield Violation("error", "batch", f"{shortage.says}.", {"steps": FEWEST_UPDATES})
        elif smaller:
            yield Violation("error", "batch", f"{shortage.says}.", smaller[0], remedy, tuple(smaller[1:]))
        elif shortage.batch < size:
            yield Violation("warning", "batch", f"{shortage.says}.", {}, remedy)
        return
    if t.finetuning or (updates >= FEWEST_UPDATES and size <= FLOOR):
        return
    severity: Severity = "note"
    if updates < POOR_UPDATES or (updates < FEWEST_UPDATES and size > FLOOR):
        severity = "warning"
    text = f"The run makes {updates:,} updates of {size:,}. Quality falls steeply below {FEWEST_UPDATES:,} to {ENOUGH_UPDATES:,}."
    if t.steps is not None:
        changes = {"steps": FEWEST_UPDATES} if updates < FEWEST_UPDATES else {}
        yield Violation(severity, "batch", text, changes)
        return
    # What a plan would choose, or the largest that leaves enough updates.
    advice = advise_batch(t.tasks()[0])
    if advice is not None and size <= advice.value:
        if severity == "warning":
            yield Violation("note", "batch", text, {}, "The batch suits this budget: only a longer run makes more updates.")
        return
    batches = [None if advice is None else round(advice.value), t.affordable_batch]
    smaller = [t.at_batch(batch) for batch in batches if batch is not None and SMALLEST_BATCH <= batch < size]
    changes = smaller[0] if smaller else {}
    yield Violation(severity, "batch", text, changes, "Alternatively, train longer at the same batch.", tuple(smaller[1:]))


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _shortage(t: TrainingFacts, updates: int, size: int) -> tuple[Shortage, list[dict[str, Any]]]:
    """Return what a plan says of so few updates, and changes to smaller batches that the ranks can share."""
    tasks = [dataclasses.replace(task, seen=updates * size if t.steps is not None else t.seen) for task in t.tasks()]
    found = [shortage for task in tasks if (shortage := shortage_of(task, size, t.ranks or 1)) is not None]
    # If the start is unknown: the one that allows the largest batch.
    shortage = max(found, key=lambda each: each.batch)
    batches = [shortage.batch, *([] if t.affordable_batch is None else [t.affordable_batch])]
    return shortage, [changes for changes in map(t.at_batch, batches) if changes["batch"] < size]


@rule(
    "too-little-training",
    "warning",
    source="measured on 67k icons, 2M seen: 1,953 updates 27.3, 488 updates 21.5, 122 updates 1.1, 30 updates 0.03 recall@1",
    remedy="Train longer or on more data.",
)
def too_little_training(t: TrainingFacts) -> Iterator[Violation]:
    """Too little training for any batch.

    A smaller batch than the one that `plan` would take makes more updates, but has too few negatives. Only more samples help.
    """
    updates, size = t.updates, t.size
    if not t.contrastive or updates is None or size is None or t.steps is not None or updates >= HOPELESS_UPDATES:
        return
    shortage, _ = _shortage(t, updates, size)
    if shortage.batch == size:
        yield Violation("warning", "batch", f"{shortage.says}.", {}, _sentence(shortage.remedy))


@rule(
    "no-negatives",
    "error",
    source="arithmetic: the softmax over one candidate is 1, whatever the embeddings are",
    remedy="Take a batch of 16 pairs or more, or mined hard negatives.",
)
def no_negatives(t: TrainingFacts) -> Iterator[Violation]:
    """A contrastive batch of one pair.

    Without mined negatives, a pair is compared with the other pairs of the batch. A single pair has nothing to be compared with:
    InfoNCE has no gradient, and the sigmoid loss only draws the two sides together.
    """
    # A run of megabatch without hard negatives is refused with a batch of 1 when it is read: this one has some.
    if not t.contrastive or t.negatives or t.size != 1 or t.tool == "megabatch":
        return
    advice = advise_batch(t.tasks()[0])
    batch = SMALLEST_PAIRS if advice is None else round(advice.value)
    yield Violation("error", "batch", f"{NO_NEGATIVES}.", t.at_batch(batch), "With mined negatives, state how many (negatives=…).")


@rule(
    "batch-below-floor",
    "warning",
    source="SigLIP (2303.15343, table 5), 3B seen, sigmoid/softmax: 512 51.5/47.7, 1k 57.3/53.2, 2k 62.1/59.3, 4k 65.3/63.8;"
    " SogCLR (2202.12387), DCL (2110.06848): other losses are workable below",
    remedy="Take 4,096 or more.",
)
def batch_below_floor(t: TrainingFacts) -> Iterator[Violation]:
    """A contrastive batch that is smaller than the budget allows.

    Quality rises smoothly with the number of negatives in a batch. If the budget allows thousands of updates at 4,096, a smaller
    batch of plain InfoNCE loses quality. The loss does not fail below 4,096, it degrades.
    """
    if not t.contrastive or t.finetuning or t.size is None or t.size == 1 or t.seen is None or t.size >= FLOOR:
        return
    at_floor = t.seen // FLOOR
    if at_floor < ENOUGH_UPDATES or (t.data is not None and t.data < SHARE * FLOOR):
        return
    text = f"The batch is {t.size:,} pairs, but the run allows {at_floor:,} updates at {FLOOR:,}."
    parts = (t.ranks or 1) * (t.accumulation or 1)
    how = large_batch(t.tool, t.chunk or t.micro)
    larger = t.at_batch(-(-FLOOR // parts) * parts)
    changes: dict[str, Any] = larger
    otherwise: tuple[dict[str, Any], ...] = ()
    if t.tool is not None and TOOLS[t.tool].accumulation_keeps_negatives and t.micro and t.ranks:
        # The same rows at once, accumulated: the memory stays about as it is.
        more = -(-FLOOR // (t.micro * t.ranks))
        accumulated = dict(larger) | {"batch": t.micro * t.ranks * more, "micro": t.micro, "accumulation": more}
        changes, otherwise = accumulated, (larger,)
    yield Violation("warning", "batch", text, changes, f"{how[0].upper()}{how[1:]}.", otherwise)


@rule(
    "batch-beyond-saturation",
    "warning",
    "note",
    source="SigLIP (2303.15343, tables 2, 5): sigmoid best at 32k, softmax at 98k, both lower at 307k, multilingual retrieval"
    " falls past 32k; Inf-CL (figure 5, table 3): best at 16k on CC3M, 32k on CC12M, 256k on LAION-400M, 1M loses 1.35 points",
    remedy="Take 32,768 (sigmoid) to 98,304 (softmax) pairs, or check what the larger batch improves.",
)
def batch_beyond_saturation(t: TrainingFacts) -> Iterator[Violation]:
    """A batch beyond saturation.

    More negatives stop helping at about 32k (sigmoid) to 100k (softmax) pairs. Above 256k no published comparison gains, and most
    lose.
    """
    saturated = BY_COST_NAME[t.objective].saturation if t.objective in BY_COST_NAME else None
    if saturated is None or t.size is None or t.size <= saturated:
        return
    severity: Severity = "warning" if t.size > CEILING else "note"
    text = f"The batch is {t.size:,} pairs, but more negatives stop helping at about {saturated:,} for {t.objective}."
    yield Violation(severity, "batch", text, t.at_batch(saturated))


@rule(
    "batch-exceeds-data",
    "error",
    source="arithmetic",
    remedy="Take a batch that is a small part of the data.",
)
def batch_exceeds_data(t: TrainingFacts) -> Iterator[Violation]:
    """A batch larger than the data.

    One step would see samples twice: every repetition is a negative of itself, or a gradient that counts double.
    """
    if t.size is None or t.data is None or t.size <= t.data:
        return
    batch = min(t.affordable_batch or t.data, power_of_two(t.data // SHARE))
    yield Violation("error", "batch", f"The batch is {t.size:,}, but the data has {t.data:,} samples.", t.at_batch(batch))


@rule(
    "batch-from-memory",
    "warning",
    source="what helps or hurts is a property of the learning problem (1811.03600, 1705.08741); Hugging Face's"
    " auto_find_batch_size changes the batch instead of the accumulation",
    remedy="State the batch, and let the micro-batch or the chunk follow the memory.",
)
def batch_from_memory(t: TrainingFacts) -> Iterator[Violation]:
    """The largest batch that fits, taken as the best one.

    What fits says nothing about what learns well. A batch that is found by running out of memory also differs from machine to
    machine, and the learning rate does not follow it.
    """
    if t.batch_from_memory:
        text = "The batch is what memory allows. It changes with the machine while the learning rate stays."
        yield Violation("warning", "batch_from_memory", text, {"batch_from_memory": False})


@rule(
    "batch-arithmetic",
    "error",
    source="DeepSpeed's configuration: train_batch_size must equal micro-batch × accumulation × number of GPUs",
    remedy="Make the numbers agree.",
)
def batch_arithmetic(t: TrainingFacts) -> Iterator[Violation]:
    """Batch, micro-batch, accumulation and ranks that do not agree.

    Two different batches follow from the configuration. The learning rate belongs to one of them, and only one is trained.
    """
    if t.batch is None or t.micro is None or t.accumulation is None:
        return
    part = t.micro * t.accumulation
    if t.batch % part or (t.ranks is not None and t.ranks * part != t.batch):
        ranks = t.ranks or max(1, round(t.batch / part))
        factors = f"{t.micro} × {t.accumulation} × {t.ranks or 'any number'}"
        text = f"The batch is {t.batch:,}, but micro-batch × accumulation × ranks is {factors}."
        yield Violation("error", "batch", text, {"batch": ranks * part, "micro": t.micro})


@rule(
    "chunk-exceeds-shard",
    "warning",
    "note",
    source="megabatch's encoders (docs/encoders.md); users of Sentence Transformers swap the two (issues 2750, 2864)",
    remedy="Take a chunk of at most batch / ranks.",
)
def chunk_exceeds_shard(t: TrainingFacts) -> Iterator[Violation]:
    """A chunk larger than a rank's share of the batch.

    The shard then runs in one piece. Memory is that of the shard, and a larger batch will take more than planned. If the chunk is
    many times larger, the two were probably swapped.
    """
    shard = t.shard if t.shard is not None else t.micro
    if t.chunk is None or shard is None or t.chunk <= shard:
        return
    text = f"The chunk is {t.chunk:,}, but a rank's share of the batch is {shard:,}."
    if t.chunk < SWAPPED * shard:
        yield Violation("note", "chunk", text, {"chunk": shard})
    else:
        yield Violation(
            "warning", "chunk", f"{text} Were they swapped?", {"chunk": shard, "micro": t.chunk}, "", ({"chunk": shard},)
        )


@rule(
    "finetune-batch",
    "warning",
    "note",
    source="BERT (1810.04805): 16 or 32; text embedders pre-train at 16k–32k and fine-tune at 64 to 2,048 (GTE, e5-mistral,"
    " GritLM); LoRA: sweep (2602.09492). Confidence low to medium",
    remedy="Take tens of samples or hundreds of pairs, and sweep.",
)
def finetune_batch(t: TrainingFacts) -> Iterator[Violation]:
    """Fine-tuning at a pre-training batch.

    Fine-tuning has little data and needs its updates. A large batch does not make the weights forget, but it leaves too few steps
    to learn in. With thousands of updates it is a second stage of pre-training, and nothing is reported.
    """
    # If the ranks are unknown, the batch is at least that of one.
    size = t.size if t.size is not None else (t.micro or 0) * (t.accumulation or 1)
    if not t.finetuning or t.objective is None:
        return
    limit = FINETUNE_LARGE if t.contrastive else FINETUNE_LARGE_SAMPLES
    if size > limit and (t.updates is None or t.updates < FEWEST_UPDATES):
        kind = "pairs" if t.contrastive else "samples"
        length = "" if t.updates is None else f" and makes {t.updates:,} updates"
        text = f"Fine-tuning uses {size:,}{'' if t.size else ' or more'} {kind} per step{length}."
        advice = advise_batch(t.tasks()[0])
        instead = limit if advice is None else min(limit, round(advice.value))
        severity: Severity = "note" if t.updates is None else "warning"
        one_rank = {"micro": max(1, instead // (t.accumulation or 1))}
        yield Violation(severity, "batch", text, t.at_batch(instead), "", () if t.size else (one_rank,))


RULES = (
    batch_exceeds_data,
    batch_arithmetic,
    no_negatives,
    too_few_updates,
    too_little_training,
    batch_below_floor,
    batch_beyond_saturation,
    batch_from_memory,
    finetune_batch,
    chunk_exceeds_shard,
)
