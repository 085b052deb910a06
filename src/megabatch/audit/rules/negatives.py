"""Rules about what a pair is compared with."""

from __future__ import annotations

from collections.abc import Iterator

from ...objectives import BY_COST_NAME
from ..rule import Problem, Severity, rule
from ..training import Training

# Where the similarity matrix alone, in fp32, takes this many bytes, it decides what fits.
LARGE_MATRIX = 4 * 2**30


@rule(
    "negatives-per-rank",
    "error",
    "note",
    source="arithmetic; measured: 7 negatives instead of 63 put the loss at 6.37 instead of 9.23 and the gradient 31 % off",
    remedy="Compare with the pairs of all ranks, gradient included: a loss of megabatch with its `group`, or OpenCLIP's"
    " `--local-loss --gather-with-grad`, or `gather_across_devices=True` in Sentence Transformers.",
)
def negatives_per_rank(t: Training) -> Iterator[Problem]:
    """Negatives that are not global.

    On several ranks without an exchange of embeddings each rank trains on its own share: the batch that counts is the shard,
    whatever the batch is called.
    """
    if not t.contrastive or t.ranks is None or t.ranks == 1:
        return
    if t.gather is None:
        yield Problem(
            "note", "gather", f"nothing says whether the {t.ranks} ranks exchange embeddings; if not, negatives are a rank's own."
        )
    elif t.gather == "none":
        numbers = "" if t.size is None or t.shard is None else f": {t.shard - 1:,} negatives instead of {t.size - 1:,}"
        yield Problem("error", "gather", f"each of {t.ranks} ranks compares its own pairs alone{numbers}.", {"gather": "exact"})


@rule(
    "gather-without-gradient",
    "error",
    "note",
    source="OpenCLIP's loss.py, computed for 4 ranks: encoder gradients half as long and 50 % off; open_clip issues 616, 894",
    remedy="Add `--gather-with-grad`.",
)
def gather_without_gradient(t: Training) -> Iterator[Problem]:
    """Features of other ranks without gradient.

    With `--local-loss` alone a rank compares its rows with gathered features that carry no gradient, its own among them. What a row
    should learn as somebody's negative, or as the answer to its own pair, is missing: the gradient is not that of the loss.
    """
    if t.contrastive and t.gather == "no-gradient" and t.ranks != 1:
        severity: Severity = "error" if t.ranks else "note"
        text = "features of other ranks carry no gradient: on several ranks about half of the encoders' gradient is missing."
        yield Problem(severity, "gather", text, {"gather": "exact"})


@rule(
    "whole-matrix-on-each-rank",
    "warning",
    "note",
    source="OpenCLIP's loss.py, computed for 4 ranks: encoder gradients 4 times shorter, the scale's not; open_clip issues 616,"
    " 894",
    remedy="Add `--local-loss --gather-with-grad`.",
)
def whole_matrix(t: Training) -> Iterator[Problem]:
    """The whole similarity matrix on each rank.

    Without `--local-loss` each rank computes all pairs of all ranks: batch² numbers, over and over. Without `--gather-with-grad`
    the average over ranks then shortens the encoders' gradient by the number of ranks, and that of the scale not: Adam hardly
    notices, clipping and SGD do.
    """
    if not t.contrastive or t.gather not in ("matrix", "whole") or t.ranks == 1:
        return
    size = t.size or 0
    each = f"each of {t.ranks} ranks" if t.ranks else "on several ranks each"
    text = f"{each} computes the whole matrix" + (f" ({4 * size**2 / 2**20:,.0f} MiB in fp32)" if size else "")
    if t.gather == "whole":
        text += f", and the encoders' gradient is {t.ranks or 'that many'} times too short beside the scale's"
    felt = t.gather == "whole" and t.ranks is not None and (bool(t.clip_norm) or t.follows_gradient_scale)
    yield Problem("warning" if felt or 4 * size**2 >= LARGE_MATRIX else "note", "gather", text + ".", {"gather": "exact"})


@rule(
    "accumulation-adds-no-negatives",
    "error",
    source="measured: 8 micro-batches of 8 have 7 negatives a sample, not 63; gradient 31 % off; gradient caching is exact (3e-16)",
    remedy="Take the whole batch at once and the encoders in chunks: `megabatch.cached(encoder, chunk=…)` costs the memory of one"
    " micro-batch and gives the gradient of the batch.",
)
def accumulation_adds_no_negatives(t: Training) -> Iterator[Problem]:
    """Gradient accumulation in a contrastive run.

    A contrastive loss is no mean over samples: each micro-batch is compared with itself alone, and their sum is not the loss of the
    batch.
    """
    if not t.contrastive or t.accumulates != "plain" or t.accumulation is None or t.accumulation == 1:
        return
    changes = {"accumulation": 1} | ({} if t.micro is None else {"micro": t.micro * t.accumulation})
    rows = None if t.micro is None or t.ranks is None else t.micro * t.ranks
    numbers = "" if rows is None else f": {rows - 1:,} negatives a sample, not {rows * t.accumulation - 1:,}"
    advice = f"Keep memory where it is with megabatch.cached(encoder, chunk={t.micro or '…'})."
    yield Problem(
        "error", "accumulation", f"accumulating {t.accumulation} micro-batches adds no negatives{numbers}.", changes, advice
    )


@rule(
    "accumulated-scale-gradient",
    "warning",
    "note",
    source="open_clip_train/train.py; measured on an H200 (encoders-cuda.jsonl): the scale's gradient 4 times too large at 4"
    " micro-batches, and 90,836 MiB where chunks of the same size take 82,536",
    remedy="`--accum-freq 1` where it fits (`--grad-checkpointing` helps), or megabatch's loss and `cached` encoders.",
)
def accumulated_scale_gradient(t: Training) -> Iterator[Problem]:
    """OpenCLIP's `--accum-freq`.

    It caches features, so the negatives are right. But every micro-batch goes backward through the loss of the whole batch:
    gradients of the scale and the bias are counted as often as there are micro-batches, which clipping and SGD notice; inputs of
    all micro-batches stay on the device; and dropout differs between the two passes.
    """
    if not t.contrastive or t.accumulates != "features" or t.accumulation is None or t.accumulation == 1:
        return
    changes = {"accumulation": 1} | ({} if t.micro is None else {"micro": t.micro * t.accumulation})
    text = f"the gradient of the logit scale is {t.accumulation} times too large"
    felt = bool(t.clip_norm) or t.follows_gradient_scale
    text += ", and takes part in the norm that is clipped." if t.clip_norm else "." if felt else "; Adam hardly notices."
    yield Problem("warning" if felt else "note", "accumulation", text, changes, "Add --grad-checkpointing if it does not fit.")


@rule(
    "duplicates-as-negatives",
    "warning",
    "note",
    source="arithmetic: B²/2U for U different items drawn uniformly; sentence-transformers issue 3189 (70k documents at 32k)",
    remedy='`loss.duplicates = "mask"`; `batch_sampler="no_duplicates"` in Sentence Transformers; ids in megabatch\'s losses'
    " elsewhere.",
)
def duplicates_as_negatives(t: Training) -> Iterator[Problem]:
    """Duplicates as negatives.

    Two pairs with the same caption in one batch are told to be far from each other. How often that happens grows with the square of
    the batch.
    """
    unique = t.unique or t.data
    if not t.contrastive or t.duplicates != "negative" or t.size is None or unique is None:
        return
    pairs = t.size**2 / (2 * unique)
    if pairs < 1:
        return
    text = f"a batch of {t.size:,} of {unique:,} different items, drawn uniformly, holds about {pairs:,.0f} pairs of equals,"
    text += " trained as negatives."
    yield Problem("warning" if pairs >= t.size / 100 else "note", "duplicates", text, {"duplicates": "mask"})


@rule(
    "scale-unclamped",
    "warning",
    source="CLIP (2103.00020) clips it at 100, and OpenCLIP's train.py does the same",
    remedy="Clamp the scale at 100 after each step (`loss.max_scale = 100.0`).",
)
def scale_unclamped(t: Training) -> Iterator[Problem]:
    """A logit scale without limit.

    The scale is learnt as an exponential; nothing holds it once the training pairs are told apart.
    """
    limit = BY_COST_NAME[t.objective].max_scale if t.objective in BY_COST_NAME else None
    if limit is not None and t.max_scale is not None and t.max_scale > limit:
        yield Problem("warning", "max_scale", f"the logit scale may grow to {t.max_scale:g}.", {"max_scale": limit})


RULES = (
    negatives_per_rank,
    gather_without_gradient,
    accumulation_adds_no_negatives,
    duplicates_as_negatives,
    whole_matrix,
    accumulated_scale_gradient,
    scale_unclamped,
)
