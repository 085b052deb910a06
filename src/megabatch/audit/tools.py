"""The tools whose files the audit reads, one record each: what a fix can ask of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ToolName = Literal[
    "megabatch", "open_clip", "transformers", "sentence_transformers", "deepspeed", "accelerate", "lightning", "axolotl",
    "tevatron", "flag_embedding", "swift",
]  # fmt: skip


@dataclass(frozen=True)
class ToolSpec:
    """What one tool is.

    title: its name in sentences.
    large_batch: how a contrastive batch larger than memory allows is trained with it; "{rows}" is what fits at once.
    accumulation_keeps_negatives: whether its accumulation gives the negatives of the whole batch.
    gather: how its contrastive losses compare the samples of all ranks.
    gathers_by_default: whether a contrastive loss compares the samples of all ranks unless a setting says otherwise; None if its
        files do not name the loss.
    trains_embedders: whether its contrastive trainings are of text encoders, not of image and text towers.
    """

    name: ToolName
    title: str
    large_batch: str
    gather: str = ""
    accumulation_keeps_negatives: bool = False
    gathers_by_default: bool | None = None
    trains_embedders: bool = False


_GROUP = "a megabatch loss with `group=torch.distributed.group.WORLD`"
_CACHED = "`megabatch.cached(encoder, chunk={rows})` runs the encoders in chunks and keeps the memory of {rows} rows"
TOOLS: dict[str, ToolSpec] = {
    spec.name: spec
    for spec in (
        ToolSpec("megabatch", "megabatch", "`batch.chunk` bounds the memory, whatever the batch is", gathers_by_default=True),
        ToolSpec(
            "open_clip",
            "OpenCLIP",
            "`--accum-freq` keeps all negatives, because it caches features, and takes one more forward pass;"
            " `--grad-checkpointing` saves memory too",
            "`--local-loss --gather-with-grad`",
            accumulation_keeps_negatives=True,
            gathers_by_default=True,
        ),
        ToolSpec(
            "sentence_transformers",
            "Sentence Transformers",
            "`CachedMultipleNegativesRankingLoss(model, mini_batch_size={rows})` takes the memory of {rows} rows",
            "`gather_across_devices=True`",
            gathers_by_default=False,
            trains_embedders=True,
        ),
        ToolSpec("transformers", "Hugging Face's Trainer", f"in `compute_loss`, {_CACHED}", f"in `compute_loss`, {_GROUP}"),
        ToolSpec("accelerate", "accelerate", _CACHED),
        ToolSpec(
            "lightning",
            "Lightning",
            f"in `training_step`, {_CACHED}",
            f"in `training_step`, {_GROUP}, or `self.all_gather(embeddings, sync_grads=True)`",
        ),
        ToolSpec("deepspeed", "DeepSpeed", f"with ZeRO-1 or 2, {_CACHED}"),
        ToolSpec("axolotl", "axolotl", _CACHED),
        ToolSpec(
            "tevatron",
            "Tevatron",
            "`--grad_cache --gc_q_chunk_size {rows} --gc_p_chunk_size {rows}` takes the memory of {rows} rows",
            gathers_by_default=True,
            trains_embedders=True,
        ),
        ToolSpec(
            "flag_embedding",
            "FlagEmbedding",
            "`--sub_batch_size {rows}` takes the memory of {rows} rows",
            "`--negatives_cross_device`",
            gathers_by_default=False,
            trains_embedders=True,
        ),
        ToolSpec("swift", "ms-swift", _CACHED, trains_embedders=True),
    )
}


def gathering(tool: str | None) -> str:
    """Return how a tool compares the samples of all ranks."""
    return (TOOLS[tool].gather if tool else "") or _GROUP


def large_batch(tool: str | None, rows: int | None) -> str:
    """Return how a tool trains a contrastive batch that is larger than memory allows. rows: what fits at once."""
    sentence = TOOLS[tool].large_batch if tool else _CACHED
    return sentence.replace("{rows}", str(rows or "N"))
