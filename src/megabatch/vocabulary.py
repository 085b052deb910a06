"""How other trainers name the settings of a batch: for errors that know their names, and for one line that translates a batch."""

from __future__ import annotations

from typing import NamedTuple


class ForeignName(NamedTuple):
    """A setting of other trainers.

    ours: the key of a run's file, or "" if megabatch has no such setting. note: what differs. option: that of `megabatch plan`.
    """

    ours: str
    note: str = ""
    option: str = ""

    def remedy(self, name: str) -> str:
        """Return what to write instead of `name` in a run's file."""
        write = f"write {self.ours}" if self.ours else "leave it out"
        return f"{name!r} is a name of other trainers: {write}" + (f" ({self.note})" if self.note else "")


_CHUNK = ForeignName("batch.chunk", "rows that an encoder takes at once; it changes memory, not the loss")
_PER_DEVICE = ForeignName("batch.per_device", "pairs on each GPU; batch.size is over all GPUs", "--per-gpu")
_ACCUMULATION = ForeignName(
    "", "batch.size is reached in chunks of batch.chunk, which keep all negatives; accumulation would add none", "--batch"
)
_GATHER = ForeignName("", "negatives always come from all ranks, with their gradients")
_TEMPERATURE = ForeignName("loss.scale", "the scale is 1 / temperature")
_EPOCHS, _STEPS = ForeignName("schedule.epochs", option="--epochs"), ForeignName("schedule.steps")
_WARMUP = ForeignName("schedule.warmup", "steps, or a fraction of the run if below 1")
_CHECKPOINTING = ForeignName("x.checkpointing", "and y.checkpointing, a switch of each tower", "--checkpointing")
_WORKERS, _SOURCE = ForeignName("data.workers"), ForeignName("data.source", option="--source")

# By the names in lower case with underscores. Sources: OpenCLIP's `open_clip_train/params.py`, Hugging Face's `TrainingArguments`,
# the losses of Sentence Transformers, FlagEmbedding and Tevatron, DeepSpeed's and Megatron's documentation.
FOREIGN = {
    "batch_size": ForeignName("batch.size", "over all GPUs, or batch.per_device for the pairs on each GPU", "--per-gpu"),
    "train_batch_size": ForeignName("batch.size", "pairs of one step over all GPUs", "--batch"),
    "global_batch_size": ForeignName("batch.size", "pairs of one step over all GPUs", "--batch"),
    "per_device_train_batch_size": _PER_DEVICE,
    "per_device_batch_size": _PER_DEVICE,
    "local_batch_size": _PER_DEVICE,
    "micro_batch_size": _CHUNK,
    "train_micro_batch_size_per_gpu": _CHUNK,
    "mini_batch_size": _CHUNK,
    "sub_batch_size": _CHUNK,
    "chunk_size": _CHUNK,
    "gc_chunk_size": _CHUNK,
    "gradient_accumulation_steps": _ACCUMULATION,
    "accumulation_steps": _ACCUMULATION,
    "accumulate_grad_batches": _ACCUMULATION,
    "accum_freq": _ACCUMULATION,
    "gather_with_grad": _GATHER,
    "local_loss": _GATHER,
    "gather_across_devices": _GATHER,
    "negatives_cross_device": _GATHER,
    "temperature": _TEMPERATURE,
    "tau": _TEMPERATURE,
    "logit_scale": ForeignName("loss.scale", "the factor itself, not its logarithm"),
    "learning_rate": ForeignName("optimizer.lr", option="--base-lr"),
    "lr": ForeignName("optimizer.lr", option="--base-lr"),
    "wd": ForeignName("optimizer.weight_decay"),
    "beta2": ForeignName("optimizer.betas", "both values, as [0.9, 0.98]"),
    "adam_beta2": ForeignName("optimizer.betas", "both values, as [0.9, 0.98]"),
    "epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "max_epochs": _EPOCHS,
    "max_steps": _STEPS,
    "warmup_steps": _WARMUP,
    "warmup_ratio": _WARMUP,
    "grad_checkpointing": _CHECKPOINTING,
    "gradient_checkpointing": _CHECKPOINTING,
    "bf16": ForeignName("compute.precision", 'as "bf16"', "--precision"),
    "fp16": ForeignName("compute.precision", 'as "fp16"', "--precision"),
    "num_workers": _WORKERS,
    "dataloader_num_workers": _WORKERS,
    "train_data": _SOURCE,
    "lora_r": ForeignName("", "`train` has no LoRA; `plan --lora` predicts it", "--lora"),
    "max_seq_length": ForeignName("", "an option of the tower: y.options.length", "--text-length"),
}


def foreign(name: str) -> ForeignName | None:
    """Return what megabatch calls a setting of another trainer, or None if the name is not known.

    >>> foreign("--per-device-train-batch-size").ours
    'batch.per_device'
    """
    return FOREIGN.get(name.strip("-").replace("-", "_").lower())


def negatives_per_query(batch: int, negatives: int = 0, views: bool = False) -> int:
    """Return what each query is compared with beside its own. negatives: hard ones per query; views: two views of every sample.

    >>> negatives_per_query(1024), negatives_per_query(1024, negatives=3), negatives_per_query(1024, views=True)
    (1023, 4095, 2046)
    """
    return 2 * batch - 2 if views else batch * (1 + negatives) - 1


def identity(
    batch: int, ranks: int, chunk: int, *, pairs: bool = True, negatives: int = 0, views: bool = False, open_clip: bool = True
) -> str:
    """Return a batch in megabatch's words and in those of other trainers.

    chunk: rows that an encoder takes at once. pairs: whether samples are compared with each other. negatives: hard ones per query.
    views: whether a sample is compared in two views of itself.
    open_clip: whether OpenCLIP could train it, that is pairs of images and texts.

    >>> for sentence in identity(1024, 2, 128).split(". "):
    ...     print(sentence)
    batch 1,024 = 2 ranks × 512 = 2 × 4 chunks of 128; 1,023 negatives per query
    OpenCLIP: --batch-size 128 --accum-freq 4
    Hugging Face: per_device_train_batch_size=512, no accumulation (its own CLIP loss takes the negatives of one GPU, 511)
    Sentence Transformers: per_device_train_batch_size=512, mini_batch_size=128, gather_across_devices=True.
    """
    shard = -(-batch // ranks)
    chunk = min(chunk, shard)
    chunks = -(-shard // chunk)
    about = "" if ranks * shard == batch else "up to "
    parts = [f"batch {batch:,}"]
    if ranks > 1:
        parts.append(f"{ranks} ranks × {about}{shard:,}")
    if chunks > 1:
        parts.append((f"{ranks} × " if ranks > 1 else "") + f"{chunks} chunks of {about if ranks == 1 else ''}{chunk:,}")
    equation = " = ".join(parts)
    even = shard % chunk == 0
    if not pairs:
        accumulated = f"{chunk}, gradient_accumulation_steps={chunks}" if even else f"{shard}"
        return f"{equation}. Hugging Face: per_device_train_batch_size={accumulated}."
    size = f"{chunk} --accum-freq {chunks}" if even and chunks > 1 else f"{shard}"
    in_open_clip = f" OpenCLIP: --batch-size {size}." if open_clip else ""
    local = f" (its own CLIP loss takes the negatives of one GPU, {shard - 1:,})" if open_clip and ranks > 1 else ""
    crossing = ", gather_across_devices=True" if ranks > 1 else ""
    return (
        f"{equation}; {negatives_per_query(batch, negatives, views):,} negatives per query.{in_open_clip} Hugging Face:"
        f" per_device_train_batch_size={shard}, no accumulation{local}. Sentence Transformers: per_device_train_batch_size={shard},"
        f" mini_batch_size={chunk}{crossing}."
    )
