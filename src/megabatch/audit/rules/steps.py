"""Rules about what happens within a step: micro-batches, normalisation, precision; and about what is kept aside to judge by."""

from __future__ import annotations

from collections.abc import Iterator

from ..rule import Problem, Severity, rule
from ..training import Training

# Below this many rows, statistics of a batch are too noisy.
FEWEST_ROWS = 16
# The share of the starting weights in an average that is still worth a word.
REMEMBERED = 0.01
MICRO = "accumulation equals the large batch to 1e-15 at 1,024 micro-batches (measured), where all else acts once an optimizer step"


def _per_micro_batch(t: Training, fact: str, name: str) -> Iterator[Problem]:
    if getattr(t, fact) == "micro-batch" and t.accumulation is not None and t.accumulation > 1:
        text = f"{name} acts {t.accumulation} times an optimizer step."
        yield Problem("error", fact, text, {fact: "step"})


@rule(
    "ema-per-micro-batch",
    "error",
    source=f"arithmetic: with k micro-batches ρ becomes ρ^k; {MICRO}",
    remedy="Update the average after optimizer.step().",
)
def ema_per_micro_batch(t: Training) -> Iterator[Problem]:
    """A moving average that is updated once a micro-batch.

    Between two optimizer steps the weights do not change: the average forgets as many times too fast as there are micro-batches.
    """
    yield from _per_micro_batch(t, "ema_at", "the moving average")


@rule(
    "clip-per-micro-batch",
    "error",
    source=f"arithmetic; {MICRO}",
    remedy="Clip once, after the last micro-batch and before optimizer.step().",
)
def clip_per_micro_batch(t: Training) -> Iterator[Problem]:
    """Gradients that are clipped once a micro-batch.

    Sums that are clipped on the way are not the clipped sum: the first micro-batches count less.
    """
    yield from _per_micro_batch(t, "clip_at", "clipping")


@rule("schedule-per-micro-batch", "error", source=f"arithmetic; {MICRO}", remedy="Step the scheduler after optimizer.step().")
def schedule_per_micro_batch(t: Training) -> Iterator[Problem]:
    """A schedule that advances once a micro-batch.

    Warm-up and decay are over as many times too early as there are micro-batches.
    """
    yield from _per_micro_batch(t, "schedule_at", "the schedule")


@rule(
    "mean-of-means",
    "error",
    "warning",
    "note",
    source="measured: gradient off by 1.7 relative, sum over total exact; transformers issues 24725, 34242 and pull request 34191",
    remedy="Divide the sum by the tokens of the whole batch: `megabatch.accumulate(count=…)`,"
    " `average_tokens_across_devices=True`.",
)
def mean_of_means(t: Training) -> Iterator[Problem]:
    """A mean of means over ragged tokens.

    Where samples differ in length, the mean of the micro-batches' (or ranks') mean losses is not the mean over tokens: tokens in
    short samples count more.
    """
    if t.objective != "lm" or t.ragged is False or t.token_mean == "total":
        return
    micro, ranks = (t.accumulation or 1) > 1, (t.ranks or 1) > 1
    if t.token_mean is None:
        if micro:
            text = f"nothing says how the token means of {t.accumulation} micro-batches are put together."
            yield Problem("note", "token_mean", text)
    elif ranks or (micro and t.token_mean == "micro-batch"):
        severity: Severity = "error" if t.ragged else "warning"
        doubt = "" if t.ragged else " (unless all samples have the same length)"
        yield Problem(severity, "token_mean", f"the loss is a mean of each {t.token_mean}'s mean{doubt}.", {"token_mean": "total"})


@rule(
    "ema-remembers-the-start",
    "warning",
    source="arithmetic: ρ^steps of the average is the starting weights; to change the batch by k, ρ becomes ρ^k (2307.13813)",
    remedy="A decay whose memory, 1/(1−ρ) steps, is a tenth of the run.",
)
def ema_remembers_the_start(t: Training) -> Iterator[Problem]:
    """A moving average that remembers the random weights.

    A decay made for hundreds of thousands of small steps is too slow for a few thousand large ones.
    """
    if t.ema is None or t.updates is None or t.updates <= 10 or t.ema**t.updates <= REMEMBERED:
        return
    share = t.ema**t.updates
    text = f"after {t.updates:,} updates with decay {t.ema:g}, {share:.0%} of the average is the starting weights."
    yield Problem("warning", "ema", text, {"ema": float(f"{1 - 10 / t.updates:.5g}")})


@rule(
    "batchnorm-on-few-rows",
    "warning",
    source="Group Normalization (1803.08494): error 23.6 → 34.7 % at 2 samples a device, 24.1 with GroupNorm",
    remedy="SyncBatchNorm over the ranks, larger chunks, or GroupNorm.",
)
def batchnorm_on_few_rows(t: Training) -> Iterator[Problem]:
    """BatchNorm on few rows.

    It normalises over what one forward sees on one device: the micro-batch or the chunk, not the batch.
    """
    rows, ranks = t.rows, t.ranks or 1
    if not t.batchnorm or rows is None:
        return
    together = rows * ranks if t.sync_batchnorm else rows
    if together >= FEWEST_ROWS:
        return
    changes: dict[str, object] = {}
    if not t.sync_batchnorm and rows * ranks >= FEWEST_ROWS:
        changes = {"sync_batchnorm": True}
    elif t.chunk is not None and (t.micro or t.shard or t.size or 0) >= FEWEST_ROWS:
        changes = {"chunk": FEWEST_ROWS}
    yield Problem(
        "warning", "sync_batchnorm", f"BatchNorm sees {together} rows at once; below {FEWEST_ROWS} it is too noisy.", changes
    )


@rule(
    "batchnorm-in-chunks",
    "note",
    source="megabatch's encoders (docs/encoders.md): no wrapper can mend it",
    remedy="An encoder without BatchNorm (LayerNorm, GroupNorm), or a frozen one.",
)
def batchnorm_in_chunks(t: Training) -> Iterator[Problem]:
    """BatchNorm in a contrastive encoder that runs in chunks.

    Each chunk is normalised by itself, so that the chunk, which memory decides, becomes part of what is learnt.
    """
    if t.contrastive and t.batchnorm and t.chunk is not None and t.shard is not None and t.chunk < t.shard:
        yield Problem("note", "chunk", f"BatchNorm normalises over chunks of {t.chunk:,}, not over a rank's {t.shard:,} rows.")


@rule(
    "fp16-unscaled",
    "error",
    source="Mixed precision training (1710.03740): many gradients are below fp16's smallest number; OpenCLIP scales in `amp` alone",
    remedy="bf16, or fp16 with a loss scale that adapts.",
)
def fp16_unscaled(t: Training) -> Iterator[Problem]:
    """fp16 without loss scaling.

    Gradients that fp16 cannot hold are zero, silently.
    """
    if t.precision == "fp16" and t.loss_scaling is False:
        text = "gradients in fp16 without a loss scale: small ones are zero."
        yield Problem("error", "loss_scaling", text, {"loss_scaling": True, "half_weights": False})


@rule(
    "half-precision-weights",
    "warning",
    source="1710.03740 keeps a copy in fp32; arithmetic: bf16 has 8 bits, an update below 1/512 of a weight is lost",
    remedy="Weights in fp32 and autocast (`--precision amp_bf16`).",
)
def half_precision_weights(t: Training) -> Iterator[Problem]:
    """Weights in half precision without a copy in fp32.

    An update that is small against its weight is rounded away, and late in training most of them are.
    """
    if t.half_weights and not (t.precision == "fp16" and t.loss_scaling is False):
        text = f"the weights themselves are in {t.precision or 'half precision'}."
        yield Problem("warning", "half_weights", text, {"half_weights": False})


@rule(
    "nothing-held-out",
    "warning",
    source="untuned settings and unequal updates, not the batch itself, make the gap (1811.03600, 1705.08741): validate at the"
    " new batch",
    remedy="Keep a part aside and evaluate on it.",
)
def nothing_held_out(t: Training) -> Iterator[Problem]:
    """Nothing is held out.

    Whether a batch, a rate or a longer run was better shows on data that was not trained on, and nowhere else.
    """
    if t.held_out is False:
        yield Problem("warning", "held_out", "nothing is evaluated on data that was not trained on.", {"held_out": True})


RULES = (
    ema_per_micro_batch,
    clip_per_micro_batch,
    schedule_per_micro_batch,
    mean_of_means,
    fp16_unscaled,
    half_precision_weights,
    batchnorm_on_few_rows,
    batchnorm_in_chunks,
    ema_remembers_the_start,
    nothing_held_out,
)
