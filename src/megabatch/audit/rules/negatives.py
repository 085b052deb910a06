"""Rules about the negatives of a contrastive loss."""

from __future__ import annotations

from collections.abc import Iterator

from ...evidence import collisions
from ...objectives import BY_COST_NAME
from ..facts import TrainingFacts
from ..rule import Severity, Violation, rule

# A similarity matrix of this many bytes in fp32 decides what fits in memory.
LARGE_MATRIX = 4 * 2**30


@rule(
    "negatives-per-rank",
    "error",
    "note",
    source="arithmetic; measured: 7 negatives instead of 63 put the loss at 6.37 instead of 9.23 and the gradient 31 % off",
    remedy="Compare with the pairs of all ranks, including their gradient: a megabatch loss with its `group`, OpenCLIP's"
    " `--local-loss --gather-with-grad`, or `gather_across_devices=True` in Sentence Transformers.",
)
def negatives_per_rank(t: TrainingFacts) -> Iterator[Violation]:
    """Negatives of one rank only.

    If ranks do not exchange embeddings, each rank trains on its own shard: the shard is the effective contrastive batch, whatever
    the configured batch is.
    """
    if not t.contrastive or t.ranks is None or t.ranks == 1:
        return
    if t.gather is None:
        text = (
            f"The file does not state whether the {t.ranks} ranks exchange embeddings. If not, a rank has only its own negatives."
        )
        yield Violation("note", "gather", text)
    elif t.gather == "none":
        numbers = "" if t.size is None or t.shard is None else f": {t.shard - 1:,} negatives instead of {t.size - 1:,}"
        yield Violation("error", "gather", f"Each of {t.ranks} ranks compares only its own pairs{numbers}.", {"gather": "exact"})


@rule(
    "gather-without-gradient",
    "error",
    "note",
    source="OpenCLIP's loss.py, computed for 4 ranks: encoder gradients half as long and 50 % off; open_clip issues 616, 894",
    remedy="Add `--gather-with-grad`.",
)
def gather_without_gradient(t: TrainingFacts) -> Iterator[Violation]:
    """Features of other ranks without gradient.

    With `--local-loss` alone a rank compares its rows with gathered features that carry no gradient, including its own. The
    gradient of a row as a negative of other rows, and as the target of its own pair, is missing: the result is not the gradient of
    the loss.
    """
    if t.contrastive and t.gather == "no-gradient" and t.ranks != 1:
        severity: Severity = "error" if t.ranks else "note"
        text = "Features of other ranks carry no gradient: on several ranks about half of the encoders' gradient is missing."
        yield Violation(severity, "gather", text, {"gather": "exact"})


@rule(
    "whole-matrix-on-each-rank",
    "warning",
    "note",
    source="OpenCLIP's loss.py, computed for 4 ranks: encoder gradients 4 times shorter, the scale's not; open_clip issues 616,"
    " 894",
    remedy="Add `--local-loss --gather-with-grad`.",
)
def whole_matrix(t: TrainingFacts) -> Iterator[Violation]:
    """The whole similarity matrix on each rank.

    Without `--local-loss` every rank computes all pairs of all ranks, batch² numbers each. Without `--gather-with-grad` the average
    over ranks also divides the encoders' gradient by the number of ranks, but not the gradient of the scale. Adam hardly notices;
    gradient clipping and SGD do.
    """
    if not t.contrastive or t.gather not in ("matrix", "whole") or t.ranks == 1:
        return
    size = t.size or 0
    each = f"Each of {t.ranks} ranks" if t.ranks else "On several ranks each rank"
    text = f"{each} computes the whole matrix" + (f" ({4 * size**2 / 2**20:,.0f} MiB in fp32)" if size else "")
    if t.gather == "whole":
        text += f", and the encoders' gradient is {t.ranks or 'that many'} times too short relative to the scale's"
    noticed = t.gather == "whole" and t.ranks is not None and (bool(t.clip_norm) or t.follows_gradient_scale)
    yield Violation("warning" if noticed or 4 * size**2 >= LARGE_MATRIX else "note", "gather", text + ".", {"gather": "exact"})


@rule(
    "accumulation-adds-no-negatives",
    "error",
    source="measured: 8 micro-batches of 8 have 7 negatives per sample, not 63; gradient 31 % off; gradient caching is exact"
    " (3e-16)",
    remedy="Take the whole batch at once and run the encoders in chunks: `megabatch.cached(encoder, chunk=…)` takes the memory of"
    " one micro-batch and gives the gradient of the batch.",
)
def accumulation_adds_no_negatives(t: TrainingFacts) -> Iterator[Violation]:
    """Gradient accumulation in a contrastive run.

    A contrastive loss is not a mean over samples. Each micro-batch is compared only with itself, and the sum of these losses is not
    the loss of the batch.
    """
    if not t.contrastive or t.accumulates != "plain" or t.accumulation is None or t.accumulation == 1:
        return
    changes = {"accumulation": 1} | ({} if t.micro is None else {"micro": t.micro * t.accumulation})
    rows = None if t.micro is None or t.ranks is None else t.micro * t.ranks
    numbers = "" if rows is None else f": {rows - 1:,} negatives per sample, not {rows * t.accumulation - 1:,}"
    advice = f"megabatch.cached(encoder, chunk={t.micro or '…'}) keeps memory as it is."
    text = f"Accumulating {t.accumulation} micro-batches adds no negatives{numbers}."
    yield Violation("error", "accumulation", text, changes, advice)


@rule(
    "accumulated-scale-gradient",
    "warning",
    "note",
    source="open_clip_train/train.py; measured on an H200 (encoders-cuda.jsonl): the scale's gradient 4 times too large at 4"
    " micro-batches, and 90,836 MiB where chunks of the same size take 82,536",
    remedy="Use `--accum-freq 1` if it fits (`--grad-checkpointing` helps), or megabatch's loss and `cached` encoders.",
)
def accumulated_scale_gradient(t: TrainingFacts) -> Iterator[Violation]:
    """OpenCLIP's `--accum-freq`.

    It caches features, so the negatives are right. But every micro-batch goes backward through the loss of the whole batch: the
    gradients of the scale and the bias are counted once per micro-batch, which affects gradient clipping and SGD; the inputs of all
    micro-batches stay on the device; and dropout differs between the two passes.
    """
    if not t.contrastive or t.accumulates != "features" or t.accumulation is None or t.accumulation == 1:
        return
    changes = {"accumulation": 1} | ({} if t.micro is None else {"micro": t.micro * t.accumulation})
    text = f"The gradient of the logit scale is {t.accumulation} times too large"
    noticed = bool(t.clip_norm) or t.follows_gradient_scale
    text += " and is part of the norm that is clipped." if t.clip_norm else "." if noticed else "; Adam hardly notices."
    advice = "Add --grad-checkpointing if it does not fit."
    yield Violation("warning" if noticed else "note", "accumulation", text, changes, advice)


@rule(
    "duplicates-as-negatives",
    "warning",
    "note",
    source="arithmetic: B²/2U for U different items drawn uniformly; sentence-transformers issue 3189 (70k documents at 32k)",
    remedy='Set `loss.duplicates = "mask"`, or `batch_sampler="no_duplicates"` in Sentence Transformers; elsewhere pass ids to'
    " megabatch's losses.",
)
def duplicates_as_negatives(t: TrainingFacts) -> Iterator[Violation]:
    """Duplicates as negatives.

    Two pairs with the same caption in one batch are pushed away from each other. How often that happens grows with the square of
    the batch.
    """
    unique = t.unique or t.data
    if not t.contrastive or t.duplicates != "negative" or t.size is None or unique is None:
        return
    pairs = collisions(t.size, unique)
    if pairs < 1:
        return
    text = f"A batch of {t.size:,}, drawn uniformly from {unique:,} different items, holds about {pairs:,.0f} pairs of equal items,"
    text += " which are trained as negatives."
    yield Violation("warning" if pairs >= t.size / 100 else "note", "duplicates", text, {"duplicates": "mask"})


@rule(
    "scale-unclamped",
    "warning",
    source="CLIP (2103.00020) clips it at 100, and OpenCLIP's train.py does the same",
    remedy="Clamp the scale at 100 after each step (`loss.max_scale = 100.0`).",
)
def scale_unclamped(t: TrainingFacts) -> Iterator[Violation]:
    """A logit scale without limit.

    The scale is learned as an exponential. Once the training pairs are separated, nothing keeps it from growing.
    """
    limit = BY_COST_NAME[t.objective].max_scale if t.objective in BY_COST_NAME else None
    if limit is not None and t.max_scale is not None and t.max_scale > limit:
        yield Violation("warning", "max_scale", f"The logit scale may grow to {t.max_scale:g}.", {"max_scale": limit})


RULES = (
    negatives_per_rank,
    gather_without_gradient,
    accumulation_adds_no_negatives,
    duplicates_as_negatives,
    whole_matrix,
    accumulated_scale_gradient,
    scale_unclamped,
)
