"""Rules about the negatives of a contrastive loss."""

from __future__ import annotations

from collections.abc import Iterator

from ...evidence import collisions
from ...objectives import BY_COST_NAME
from ..facts import TrainingFacts
from ..rule import Severity, Violation, rule
from ..tools import TOOLS, gathering, large_batch

# A similarity matrix of this many bytes in fp32 decides what fits in memory.
LARGE_MATRIX = 4 * 2**30
# The fixed scale of Sentence Transformers' losses.
USUAL_SCALE = 20.0


@rule(
    "negatives-per-rank",
    "error",
    "warning",
    "note",
    source="arithmetic; measured: 7 negatives instead of 63 put the loss at 6.37 instead of 9.23 and the gradient 31 % off",
    remedy="Compare with the pairs of all ranks, including their gradient.",
)
def negatives_per_rank(t: TrainingFacts) -> Iterator[Violation]:
    """Negatives of one rank only.

    If ranks do not exchange embeddings, each rank trains on its own shard: the shard is the effective contrastive batch, whatever
    the configured batch is. Where a tool does so by default, that may be intended.
    """
    if not t.contrastive or t.ranks is None or t.ranks == 1:
        return
    how = gathering(t.tool)
    advice = f"{how[0].upper()}{how[1:]} does that."
    if t.gather is None:
        text = (
            f"The file does not state whether the {t.ranks} ranks exchange embeddings. If not, a rank has only its own negatives."
        )
        yield Violation("note", "gather", text, advice=advice)
    elif t.gather == "none":
        numbers = "" if t.size is None or t.shard is None else f": {t.shard - 1:,} negatives instead of {t.size - 1:,}"
        text = f"Each of {t.ranks} ranks compares only its own pairs{numbers}."
        default = t.tool is not None and not TOOLS[t.tool].gathers_by_default
        yield Violation("warning" if default else "error", "gather", text, {"gather": "exact"}, advice)


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
    "warning",
    "note",
    source="measured: 8 micro-batches of 8 have 7 negatives per sample, not 63; gradient 31 % off; gradient caching is exact"
    " (3e-16)",
    remedy="Take the whole batch at once, without accumulation, and run the encoders in chunks.",
)
def accumulation_adds_no_negatives(t: TrainingFacts) -> Iterator[Violation]:
    """Gradient accumulation in a contrastive run.

    A contrastive loss is not a mean over samples. Each micro-batch is compared only with itself, and the sum of these losses is not
    the loss of the batch. With mined negatives that may be intended.
    """
    # Sentence Transformers' arguments do not name the loss, but most of its losses for retrieval have in-batch negatives.
    perhaps = t.objective is None and t.tool == "sentence_transformers"
    if not (t.contrastive or perhaps) or t.accumulates != "plain" or t.accumulation is None or t.accumulation == 1:
        return
    changes = {"accumulation": 1} | ({} if t.micro is None else {"micro": t.micro * t.accumulation})
    in_chunks = changes | ({} if t.micro is None else {"chunk": t.chunk or t.micro})
    rows = None if t.micro is None or t.ranks is None else t.micro * t.ranks
    numbers = "" if rows is None else f": {rows - 1:,} negatives per sample, not {rows * t.accumulation - 1:,}"
    how = large_batch(t.tool, t.chunk or t.micro)
    text = f"Accumulating {t.accumulation} micro-batches adds no negatives{numbers}."
    if perhaps:
        text = f"If the loss has in-batch negatives, accumulating {t.accumulation} micro-batches adds none{numbers}."
    # With mined negatives the others matter less, and published trainings accumulate (Tevatron, GritLM).
    severity: Severity = "note" if t.negatives else "warning" if perhaps else "error"
    yield Violation(severity, "accumulation", text, in_chunks, f"{how[0].upper()}{how[1:]}.", (changes,))


@rule(
    "accumulated-scale-gradient",
    "warning",
    source="open_clip_train/train.py; measured on an H200 (encoders-cuda.jsonl): the scale's gradient 4 times too large at 4"
    " micro-batches, and 90,836 MiB where chunks of the same size take 82,536",
    remedy="Use `--accum-freq 1` if it fits (`--grad-checkpointing` helps), or megabatch's loss and `cached` encoders.",
)
def accumulated_scale_gradient(t: TrainingFacts) -> Iterator[Violation]:
    """OpenCLIP's `--accum-freq` with clipping or SGD.

    It caches features, so the negatives are right. But every micro-batch goes backward through the loss of the whole batch: the
    gradients of the scale and the bias are counted once per micro-batch, which affects gradient clipping and SGD; the inputs of all
    micro-batches stay on the device; and dropout differs between the two passes.
    """
    if not t.contrastive or t.accumulates != "features" or t.accumulation is None or t.accumulation == 1:
        return
    # Adam without clipping is invariant to a constant factor.
    if not t.clip_norm and not t.follows_gradient_scale:
        return
    changes = {"accumulation": 1} | ({} if t.micro is None else {"micro": t.micro * t.accumulation})
    text = f"The gradient of the logit scale is {t.accumulation} times too large"
    text += " and is part of the norm that is clipped." if t.clip_norm else "."
    yield Violation("warning", "accumulation", text, changes, "Add --grad-checkpointing if it does not fit.")


@rule(
    "duplicates-as-negatives",
    "warning",
    "note",
    source="arithmetic: about B²/2·(1/U − 1/N) equal pairs in a batch of B of N samples with U different captions;"
    " sentence-transformers issue 3189 (70k documents at 32k)",
    remedy='Set `loss.duplicates = "mask"`, or `batch_sampler="no_duplicates"` in Sentence Transformers; elsewhere pass ids to'
    " megabatch's losses.",
)
def duplicates_as_negatives(t: TrainingFacts) -> Iterator[Violation]:
    """Duplicates as negatives.

    Two pairs with the same caption in one batch are pushed away from each other. How often that happens grows with the square of
    the batch. An epoch visits each sample once, so that data without equal captions has none.
    """
    if not t.contrastive or t.duplicates != "negative":
        return
    if t.unique is None and t.tool == "sentence_transformers":
        text = "Texts that occur more than once are negatives of each other if they meet in a batch."
        yield Violation("note", "duplicates", text, {"duplicates": "mask"})
    if t.size is None or t.unique is None:
        return
    pairs = collisions(t.size, t.unique, t.data)
    if pairs < 1:
        return
    text = (
        f"A batch of {t.size:,} of data with {t.unique:,} different items holds about {pairs:,.0f} pairs of equal items, which are"
    )
    text += " trained as negatives."
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


@rule(
    "scale-too-small",
    "error",
    source="arithmetic: cosine similarities differ by at most 2, so that a softmax over thousands of them at a scale of 1 is"
    " nearly uniform; published scales are 20 to 100, temperatures 0.01 to 0.05",
    remedy="Give the scale (20), or its inverse where the parameter is a temperature (0.05).",
)
def scale_too_small(t: TrainingFacts) -> Iterator[Violation]:
    """A temperature in the place of a scale, or the other way round.

    The loss hardly depends on the similarities, and nothing is learned.
    """
    if t.contrastive and t.scale is not None and t.scale <= 1:
        text = f"Similarities are multiplied by {t.scale:.3g}, a temperature of {1 / t.scale:.3g}."
        # The inverse was meant, if it is a usual scale.
        inverse = 1 / t.scale
        yield Violation("error", "scale", text, {"scale": float(f"{inverse:.6g}") if inverse >= 10 else USUAL_SCALE})


@rule(
    "temperature-ignored",
    "error",
    source="tevatron/retriever/gc_trainer.py: the loss of GradCacheTrainer has no temperature",
    remedy="Train without --grad_cache, or divide the embeddings by the square root of the temperature in the model.",
)
def temperature_ignored(t: TrainingFacts) -> Iterator[Violation]:
    """A temperature without effect.

    Tevatron's trainer with a gradient cache computes the logits without it, so that they are as if the temperature were 1.
    """
    if t.temperature_ignored:
        yield Violation("error", "temperature_ignored", "With --grad_cache, Tevatron ignores --temperature.")


@rule(
    "cached-gradient-sum",
    "warning",
    "note",
    source="computed with PyLate 1.4: the gradient is 16 times that of the reported mean at a batch of 16",
    remedy="Use a batch-independent clipping threshold (max_grad_norm × batch), or another implementation of the loss.",
)
def cached_gradient_sum(t: TrainingFacts) -> Iterator[Violation]:
    """Cached gradients of a sum.

    PyLate's CachedContrastive reports a mean, but its gradients are larger by the batch. Adam hardly notices; clipping then cuts
    every step to the same length.
    """
    if t.cached_gradient_sum:
        text = "The gradients of PyLate's CachedContrastive are larger than those of its loss, by a factor of the batch"
        text += f", and are clipped at {t.clip_norm:g}." if t.clip_norm else "."
        yield Violation("warning" if t.clip_norm or t.follows_gradient_scale else "note", "cached_gradient_sum", text)


@rule(
    "scale-outside-ddp",
    "warning",
    "note",
    source="sentence-transformers' base/trainer.py: the loss is not wrapped by DistributedDataParallel",
    remedy="Make the scale a parameter of the model, or average its gradient over the ranks before each step.",
)
def scale_outside_ddp(t: TrainingFacts) -> Iterator[Violation]:
    """A learnable scale that ranks do not synchronize.

    DDP averages the gradients of the model's parameters. A parameter of a loss beside the model gets each rank's own gradient, and
    the ranks drift apart.
    """
    if t.scale_outside_ddp and t.ranks != 1:
        text = "The scale is a parameter of the loss, which DDP does not synchronize between ranks."
        yield Violation("warning" if t.ranks else "note", "scale_outside_ddp", text)


RULES = (
    negatives_per_rank,
    gather_without_gradient,
    accumulation_adds_no_negatives,
    scale_too_small,
    temperature_ignored,
    duplicates_as_negatives,
    whole_matrix,
    accumulated_scale_gradient,
    cached_gradient_sum,
    scale_outside_ddp,
    scale_unclamped,
)
