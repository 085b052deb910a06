"""Rules about one step: micro-batches, normalization and precision; and about held-out data."""

from __future__ import annotations

from collections.abc import Iterator

from ..facts import TrainingFacts
from ..rule import Severity, Violation, rule

# Batch statistics over fewer rows than this are too noisy.
FEWEST_ROWS = 16
# Report a moving average if this share of it or more is still the starting weights.
REMEMBERED = 0.01
# Evaluations closer together than this take most of the time, whatever is held out. Our choice.
RARELY = 10
MICRO = (
    "accumulation equals the large batch to 1e-15 at 1,024 micro-batches (measured), if everything else acts once per optimizer"
    " step"
)


def _per_micro_batch(t: TrainingFacts, fact: str, name: str) -> Iterator[Violation]:
    if getattr(t, fact) == "micro-batch" and t.accumulation is not None and t.accumulation > 1:
        text = f"{name} acts {t.accumulation} times per optimizer step."
        yield Violation("error", fact, text, {fact: "step"})


@rule(
    "ema-per-micro-batch",
    "error",
    source=f"arithmetic: with k micro-batches ρ becomes ρ^k; {MICRO}",
    remedy="Update the average after optimizer.step().",
)
def ema_per_micro_batch(t: TrainingFacts) -> Iterator[Violation]:
    """A moving average that is updated once per micro-batch.

    The weights do not change between two optimizer steps, so with k micro-batches the average forgets k times too fast.
    """
    yield from _per_micro_batch(t, "ema_at", "The moving average")


@rule(
    "clip-per-micro-batch",
    "error",
    source=f"arithmetic; {MICRO}",
    remedy="Clip once, after the last micro-batch and before optimizer.step().",
)
def clip_per_micro_batch(t: TrainingFacts) -> Iterator[Violation]:
    """Gradients that are clipped once per micro-batch.

    Clipping the partial sums is not the same as clipping the sum: the first micro-batches count less.
    """
    yield from _per_micro_batch(t, "clip_at", "Clipping")


@rule("schedule-per-micro-batch", "error", source=f"arithmetic; {MICRO}", remedy="Step the scheduler after optimizer.step().")
def schedule_per_micro_batch(t: TrainingFacts) -> Iterator[Violation]:
    """A schedule that advances once per micro-batch.

    With k micro-batches, warm-up and decay end k times too early.
    """
    yield from _per_micro_batch(t, "schedule_at", "The schedule")


@rule(
    "mean-of-means",
    "error",
    "warning",
    "note",
    source="measured: gradient off by 1.7 relative, sum over total exact; transformers issues 24725, 34242 and pull request 34191",
    remedy="Divide the sum by the tokens of the whole batch: `megabatch.accumulate(count=…)`,"
    " `average_tokens_across_devices=True`.",
)
def mean_of_means(t: TrainingFacts) -> Iterator[Violation]:
    """A mean of means over ragged tokens.

    If samples differ in length, the mean of the mean losses of micro-batches or ranks is not the mean over tokens: tokens in short
    samples count more.
    """
    if t.objective != "lm" or t.ragged is False or t.token_mean == "total":
        return
    micro, ranks = (t.accumulation or 1) > 1, (t.ranks or 1) > 1
    if t.token_mean is None:
        # The Trainer divides by the tokens of all micro-batches (since transformers 4.46).
        if micro and t.tool in (None, "deepspeed", "accelerate", "lightning"):
            text = f"The file does not state how the token means of {t.accumulation} micro-batches are combined."
            yield Violation("note", "token_mean", text)
    elif ranks or (micro and t.token_mean == "micro-batch"):
        severity: Severity = "error" if t.ragged else "warning"
        doubt = "" if t.ragged else " (unless all samples have the same length)"
        text = f"The loss is the mean of each {t.token_mean}'s mean{doubt}."
        yield Violation(severity, "token_mean", text, {"token_mean": "total"})


@rule(
    "ema-remembers-the-start",
    "warning",
    source="arithmetic: ρ^steps of the average is the starting weights; to change the batch by k, ρ becomes ρ^k (2307.13813)",
    remedy="Use a decay whose memory, 1/(1−ρ) steps, is a tenth of the run.",
)
def ema_remembers_the_start(t: TrainingFacts) -> Iterator[Violation]:
    """A moving average that still contains the random starting weights.

    A decay chosen for hundreds of thousands of small steps is too slow for a few thousand large ones.
    """
    if t.ema is None or t.updates is None or t.updates <= 10 or t.ema**t.updates <= REMEMBERED:
        return
    share = t.ema**t.updates
    text = f"After {t.updates:,} updates with decay {t.ema:g}, {share:.0%} of the average is the starting weights."
    yield Violation("warning", "ema", text, {"ema": float(f"{1 - 10 / t.updates:.5g}")})


@rule(
    "batchnorm-on-few-rows",
    "warning",
    source="Group Normalization (1803.08494): error 23.6 → 34.7 % at 2 samples a device, 24.1 with GroupNorm",
    remedy="Use SyncBatchNorm over the ranks, larger chunks, or GroupNorm.",
)
def batchnorm_on_few_rows(t: TrainingFacts) -> Iterator[Violation]:
    """BatchNorm on few rows.

    It normalizes over the rows of one forward pass on one device: the micro-batch or the chunk, not the batch.
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
    text = f"BatchNorm sees {together} rows at once; below {FEWEST_ROWS} its statistics are too noisy."
    yield Violation("warning", "sync_batchnorm", text, changes)


@rule(
    "batchnorm-in-chunks",
    "note",
    source="megabatch's encoders (docs/encoders.md): no wrapper can correct it",
    remedy="Use an encoder without BatchNorm (LayerNorm, GroupNorm), or a frozen one.",
)
def batchnorm_in_chunks(t: TrainingFacts) -> Iterator[Violation]:
    """BatchNorm in a contrastive encoder that runs in chunks.

    Each chunk is normalized separately, so the chunk size, which memory decides, changes what is learned.
    """
    if t.contrastive and t.batchnorm and t.chunk is not None and t.shard is not None and t.chunk < t.shard:
        text = f"BatchNorm normalizes over chunks of {t.chunk:,}, not over a rank's {t.shard:,} rows."
        yield Violation("note", "chunk", text)


@rule(
    "fp16-unscaled",
    "error",
    source="Mixed precision training (1710.03740): many gradients are below fp16's smallest number; OpenCLIP scales in `amp` only",
    remedy="Use bf16, or fp16 with a dynamic loss scale.",
)
def fp16_unscaled(t: TrainingFacts) -> Iterator[Violation]:
    """fp16 without loss scaling.

    Gradients that are too small for fp16 become zero without any error.
    """
    if t.precision == "fp16" and t.loss_scaling is False:
        text = "Gradients are in fp16 without a loss scale: small ones become zero."
        yield Violation("error", "loss_scaling", text, {"loss_scaling": True, "half_weights": False})


@rule(
    "half-precision-weights",
    "warning",
    source="1710.03740 keeps a copy in fp32; arithmetic: bf16 has 8 bits, an update below 1/512 of a weight is lost",
    remedy="Keep the weights in fp32 and use autocast (`--precision amp_bf16`).",
)
def half_precision_weights(t: TrainingFacts) -> Iterator[Violation]:
    """Weights in half precision without a copy in fp32.

    An update that is small relative to its weight is lost in rounding. Late in training most updates are that small.
    """
    if t.half_weights and not (t.precision == "fp16" and t.loss_scaling is False):
        text = f"The weights are in {t.precision or 'half precision'}."
        yield Violation("warning", "half_weights", text, {"half_weights": False})


@rule(
    "evaluation-too-often",
    "warning",
    source="arithmetic: an evaluation is a pass over all held-out data",
    remedy="Evaluate some twenty times in a run.",
)
def evaluation_too_often(t: TrainingFacts) -> Iterator[Violation]:
    """An evaluation after every few steps.

    Each is a pass over all held-out data, so that the run mostly evaluates.
    """
    if t.eval_every is None or t.eval_every >= RARELY or (t.updates is not None and t.updates <= 20 * t.eval_every):
        return
    every = "each step" if t.eval_every == 1 else f"every {t.eval_every} steps"
    wanted = 500 if t.updates is None else max(t.eval_every + 1, t.updates // 20)
    yield Violation("warning", "eval_every", f"The run is evaluated after {every}.", {"eval_every": wanted})


@rule(
    "nothing-held-out",
    "warning",
    "note",
    source="untuned hyperparameters and unequal updates, not the batch itself, make the gap (1811.03600, 1705.08741): validate at"
    " the new batch",
    remedy="Hold out a part of the data and evaluate on it.",
)
def nothing_held_out(t: TrainingFacts) -> Iterator[Violation]:
    """No held-out data.

    Only data that was not trained on shows whether a batch, a rate or a longer run is better. Other tools are often evaluated by a
    command of its own.
    """
    if t.held_out is False:
        severity: Severity = "warning" if t.tool in (None, "megabatch") else "note"
        yield Violation(severity, "held_out", "The run is not evaluated on held-out data.", {"held_out": True})


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
    evaluation_too_often,
    nothing_held_out,
)
