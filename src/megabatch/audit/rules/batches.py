"""Rules about how large the batch is."""

from __future__ import annotations

from collections.abc import Iterator

from ...objectives import BY_COST_NAME
from ..arithmetic import CEILING, ENOUGH_UPDATES, FEWEST_UPDATES, FLOOR, affordable_batch, power_of_two, rebatched
from ..rule import Problem, Severity, rule
from ..training import Training

# Measured: 122 updates learnt nothing, 488 four fifths of what 1,953 did.
HOPELESS_UPDATES, POOR_UPDATES = 100, 500
# A fix proposes no batch that is more than one in so many of the data; ours, not a paper's.
SHARE = 16
# Fine-tuning: the largest batch that passes, and the one that is put in its place.
FINETUNED_PAIRS, FINETUNED_SAMPLES = (FLOOR, 512), (256, 32)


@rule(
    "too-few-updates",
    "error",
    "warning",
    "note",
    source="SigLIP (2303.15343, table 8): at 450M seen, 256k (1.7k updates) is 9 points below 32k (13.7k updates); measured on"
    " 67k icons, 2M seen: 1,953 updates 27.3, 488 updates 21.5, 122 updates 1.1, 30 updates 0.03 recall@1",
    remedy="A smaller batch, or a longer run. The batch is about (samples that will be seen) / (updates needed).",
)
def too_few_updates(t: Training) -> Iterator[Problem]:
    """Too few updates.

    Samples seen are shared between the size of a batch and the number of updates. Below some 2,000 to 15,000 updates quality falls
    steeply, more for towers trained from scratch, and no number of negatives makes up for it. At a batch of 4,096 or less this is a
    small budget, which may be meant; above, a smaller batch costs nothing.
    """
    updates, size = t.updates, t.size
    if not t.contrastive or t.finetuning or updates is None or size is None or updates >= ENOUGH_UPDATES:
        return
    if updates >= FEWEST_UPDATES and size <= FLOOR:
        return
    severity: Severity = "note"
    if updates < POOR_UPDATES or (updates < FEWEST_UPDATES and size > FLOOR):
        severity = "error" if updates < HOPELESS_UPDATES else "warning"
    text = f"{updates:,} updates of {size:,}: quality falls steeply below some {FEWEST_UPDATES:,} to {ENOUGH_UPDATES:,} updates."
    batch = affordable_batch(t) if updates < FEWEST_UPDATES else None
    changes = rebatched(t, batch) if batch is not None and batch < size and t.steps is None else {}
    if t.steps is not None and updates < FEWEST_UPDATES:
        changes = {"steps": FEWEST_UPDATES}
    yield Problem(severity, "batch", text, changes, "Or train longer, at the same batch.")


@rule(
    "batch-below-floor",
    "warning",
    source="SigLIP (2303.15343, table 5), 3B seen, sigmoid/softmax: 512 51.5/47.7, 1k 57.3/53.2, 2k 62.1/59.3, 4k 65.3/63.8;"
    " SogCLR (2202.12387), DCL (2110.06848): other losses are workable below",
    remedy="4,096 or more; what fits decides the chunk and never the batch.",
)
def batch_below_floor(t: Training) -> Iterator[Problem]:
    """A contrastive batch that is as large as memory was.

    Quality rises smoothly with the negatives of a batch. Where the budget pays for thousands of updates at 4,096, a smaller batch
    of plain InfoNCE gives them away; the loss does not break below, it degrades.
    """
    if not t.contrastive or t.finetuning or t.size is None or t.seen is None or t.size >= FLOOR:
        return
    at_floor = t.seen // FLOOR
    if at_floor < ENOUGH_UPDATES or (t.data is not None and t.data < SHARE * FLOOR):
        return
    text = f"{t.size:,} pairs, where the run pays for {at_floor:,} updates at {FLOOR:,}."
    parts = (t.ranks or 1) * (t.accumulation or 1)
    advice = "Memory does not grow with it: encoders in chunks, the loss in tiles."
    yield Problem("warning", "batch", text, rebatched(t, -(-FLOOR // parts) * parts), advice)


@rule(
    "batch-beyond-saturation",
    "warning",
    "note",
    source="SigLIP (2303.15343, tables 2, 5): sigmoid best at 32k, softmax at 98k, both lower at 307k, multilingual retrieval"
    " falls past 32k; Inf-CL (figure 5, table 3): best at 16k on CC3M, 32k on CC12M, 256k on LAION-400M, 1M loses 1.35 points",
    remedy="32,768 (sigmoid) to 98,304 (softmax) pairs, or a longer look at what a larger batch is to buy.",
)
def batch_beyond_saturation(t: Training) -> Iterator[Problem]:
    """A batch beyond saturation.

    Negatives stop paying around 32k (sigmoid) to 100k (softmax), and above 256k no published comparison
    gains, and most lose.
    """
    saturated = BY_COST_NAME[t.objective].saturation if t.objective in BY_COST_NAME else None
    if saturated is None or t.size is None or t.size <= saturated:
        return
    severity: Severity = "warning" if t.size > CEILING else "note"
    text = f"{t.size:,} pairs, where negatives stop paying around {saturated:,} for {t.objective}."
    yield Problem(severity, "batch", text, rebatched(t, saturated))


@rule(
    "batch-exceeds-data",
    "error",
    source="arithmetic",
    remedy="A batch that is a small part of the data.",
)
def batch_exceeds_data(t: Training) -> Iterator[Problem]:
    """A batch larger than the data.

    One step would see samples twice: every repetition is a negative of itself, or a gradient that counts double.
    """
    if t.size is None or t.data is None or t.size <= t.data:
        return
    batch = min(affordable_batch(t) or t.data, power_of_two(t.data // SHARE))
    yield Problem("error", "batch", f"the batch is {t.size:,}, the data {t.data:,}.", rebatched(t, batch))


@rule(
    "batch-from-memory",
    "warning",
    source="what helps or hurts is a property of the learning problem (1811.03600, 1705.08741); Hugging Face's"
    " auto_find_batch_size changes the batch instead of the accumulation",
    remedy="Say the batch; let the micro-batch or the chunk follow memory.",
)
def batch_from_memory(t: Training) -> Iterator[Problem]:
    """The largest batch that fits, taken for the best.

    What fits says nothing about what learns. A batch that is found by running out of memory also differs from machine to machine,
    and the learning rate does not follow it.
    """
    if t.batch_from_memory:
        text = "the batch is what memory allows, and changes with the machine while the learning rate stays."
        yield Problem("warning", "batch_from_memory", text, {"batch_from_memory": False})


@rule(
    "batch-arithmetic",
    "error",
    source="DeepSpeed's configuration: train_batch_size must equal micro-batch × accumulation × number of GPUs",
    remedy="Make the three agree.",
)
def batch_arithmetic(t: Training) -> Iterator[Problem]:
    """Batch, micro-batch, accumulation and ranks that do not agree.

    The learning rate belongs to one of two batches, and only one of them is trained.
    """
    if t.batch is None or t.micro is None or t.accumulation is None:
        return
    part = t.micro * t.accumulation
    if t.batch % part or (t.ranks is not None and t.ranks * part != t.batch):
        ranks = t.ranks or max(1, round(t.batch / part))
        factors = f"{t.micro} × {t.accumulation} × {t.ranks or 'any number'}"
        text = f"the batch is {t.batch:,}, and micro-batch × accumulation × ranks is {factors}."
        yield Problem("error", "batch", text, {"batch": ranks * part, "micro": t.micro})


@rule(
    "chunk-exceeds-shard",
    "note",
    source="megabatch's encoders (docs/encoders.md)",
    remedy="A chunk of at most batch / ranks.",
)
def chunk_exceeds_shard(t: Training) -> Iterator[Problem]:
    """A chunk larger than a rank's share of the batch.

    Nothing is chunked then: memory is that of the shard, and a larger batch will take more than planned.
    """
    if t.chunk is not None and t.shard is not None and t.chunk > t.shard:
        text = f"the chunk is {t.chunk:,}, a rank's share of the batch {t.shard:,}."
        yield Problem("note", "chunk", text, {"chunk": t.shard})


@rule(
    "finetune-batch",
    "warning",
    source="BERT (1810.04805): 16 or 32; text embedders pre-train at 16k–32k and fine-tune at hundreds (nomic's configurations);"
    " LoRA: sweep (2602.09492). Confidence low to medium",
    remedy="Tens of samples, hundreds of pairs; sweep.",
)
def finetune_batch(t: Training) -> Iterator[Problem]:
    """Fine-tuning at a pre-training batch.

    Fine-tuning has little data and needs its updates. A large batch does not make weights forget; it leaves too few steps to
    learn in.
    """
    if not t.finetuning or t.objective is None or t.size is None:
        return
    limit, instead = FINETUNED_PAIRS if t.contrastive else FINETUNED_SAMPLES
    if t.size > limit:
        kind = "pairs" if t.contrastive else "samples"
        yield Problem("warning", "batch", f"fine-tuning at {t.size:,} {kind} a step.", rebatched(t, instead))


RULES = (
    batch_exceeds_data,
    batch_arithmetic,
    too_few_updates,
    batch_below_floor,
    batch_beyond_saturation,
    batch_from_memory,
    finetune_batch,
    chunk_exceeds_shard,
)
