"""Rules about the learning rate and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...evidence import LARGE_CONTRASTIVE, RATE_RANGE, USUAL_WARMUP, round_rate
from ...optimizers import DEFAULT, FAMILIES, OPTIMIZERS
from ...recipes import advise_beta2, advise_rate, possible_rates
from ..facts import TrainingFacts, scaled_rate
from ..rule import Severity, Violation, rule

# The rules of thumb are good to a factor of √2: a rate that differs by more was not scaled.
OFF = math.sqrt(2) * 1.001
# Published fine-tunings at up to this rate do without warm-up (SimCSE, FlagEmbedding).
SMALL_RATE = 1e-4
# The limits of plausible rates are good to this factor: published files differ that much.
DOUBT = 3.0
# Adam's default β2, and slower ones.
SLOW = 0.999


@rule(
    "rate-out-of-range",
    "error",
    source="published rates (practice with AdamW is 1e-6 to 3e-3, with SGD up to tens); with Adam a step moves each weight by about"
    " the rate",
    remedy="Check the exponent.",
)
def rate_out_of_range(t: TrainingFacts) -> Iterator[Violation]:
    """A learning rate that no training uses.

    Usually a lost minus in the exponent: the first step destroys the weights, or no step changes them.
    """
    if t.lr is None:
        return
    smallest, largest = _possible(t)
    if smallest <= t.lr <= largest:
        return
    name = "any optimizer" if t.family is None else "Adam" if t.family.uses_beta2 else t.family.name.upper()
    text = f"The rate is {t.lr:g}; with {name} only {smallest:g} to {largest:g} can be meant."
    # A lost or doubled minus: 5e4 for 5e-4.
    mantissa, _, exponent = f"{t.lr:e}".partition("e")
    mirrored = float(f"{mantissa}e{-int(exponent)}")
    low, high = t.rates()
    changes = {"lr": round_rate(mirrored) if low <= mirrored <= high else _advised(t)}
    yield Violation("error", "lr", text, changes)


@rule(
    "scheduler-sets-rate",
    "error",
    source="DeepSpeed's runtime/lr_schedules.py: WarmupLR and WarmupDecayLR set the rate to warmup_max_lr, 0.001 by default",
    remedy="Set scheduler.params.warmup_max_lr to the optimizer's rate.",
)
def scheduler_sets_rate(t: TrainingFacts) -> Iterator[Violation]:
    """A schedule that replaces the optimizer's learning rate.

    The schedule warms up to a rate of its own, and the optimizer's has no effect.
    """
    if t.lr is not None and t.schedule_lr is not None and not 1 / OFF < t.lr / t.schedule_lr < OFF:
        text = f"The optimizer's rate is {t.lr:g}, but the schedule warms up to {t.schedule_lr:g}, which is what is trained with."
        yield Violation("error", "schedule_lr", text, {"schedule_lr": t.lr})


@rule(
    "warmup-beyond-one",
    "error",
    source="arithmetic: warmup_ratio is a share of the run; transformers refuses more than 1",
    remedy="Give the share (0.05), or the steps in warmup_steps.",
)
def warmup_beyond_one(t: TrainingFacts) -> Iterator[Violation]:
    """A share of warm-up that is not below one.

    The number is meant as percent or as steps. The tool refuses to start, or never reaches the rate.
    """
    if t.warmup_share is not None and t.warmup_share >= 1:
        text = f"The warm-up is {t.warmup_share:g} of the run, which has to be below 1."
        as_percent = t.warmup_share / 100 if t.warmup_share <= 20 else 0.05
        yield Violation("error", "warmup_share", text, {"warmup_share": as_percent})


@rule(
    "rate-not-scaled",
    "warning",
    source="SGD: linear, shown to 8,192 (1706.02677); Adam: square root as a start (2205.10287), can rise then fall (2405.14578)",
    remedy="Scale the rate from the base with the effective batch, × k for SGD and × √k for Adam, then sweep around it.",
)
def rate_not_scaled(t: TrainingFacts) -> Iterator[Violation]:
    """A learning rate that was not scaled with the effective batch.

    The effective batch is ranks × per-device batch × accumulation. The rule needs a rate that is known to be good at some batch
    (base_lr, base_batch).
    """
    if t.lr is None or t.size is None or t.optimizer is None or t.base_lr is None or t.base_batch is None:
        return
    family = FAMILIES[t.optimizer]
    if not family.scaling_is_studied:
        return
    wanted = scaled_rate(t.base_lr, t.base_batch, t.size, t.optimizer)
    if 1 / OFF < t.lr / wanted < OFF:
        return
    rule_name = "linear" if family.lr_rule == "linear" else "square-root"
    text = f"The rate is {t.lr:g} at an effective batch of {t.size:,}, but {t.base_lr:g} at {t.base_batch:,} scales to {wanted:.2g}"
    text += f" ({rule_name})."
    parts = {"one device's batch": t.micro, "the batch without accumulation": t.micro and t.ranks and t.micro * t.ranks}
    for name, part in parts.items():
        if part and part != t.size and abs(t.lr / scaled_rate(t.base_lr, t.base_batch, part, t.optimizer) - 1) < 0.05:
            text += f" The rate fits {name} ({part:,})."
            break
    if t.size > (family.largest_rule_batch or RATE_RANGE * t.base_batch):
        text += " The batch is far from the base: sweep the rate."
    yield Violation("warning", "lr", text, {"lr": round_rate(wanted)})


@rule(
    "no-warmup",
    "warning",
    "note",
    source="published: 500 (DataComp) to 20,000 steps (SigLIP 2), CLIP and LLaMA 2,000, about 5 % of short runs; Adam's second"
    " moment needs 2/(1−β2) steps (1910.04209)",
    remedy="Warm up for 5 % of a short run, for 2,000 steps of a long one.",
)
def no_warmup(t: TrainingFacts) -> Iterator[Violation]:
    """No warm-up, or a warm-up that is too short.

    Adam's second moment is an average over 1/(1−β2) steps. Until it has seen that many, the size of the updates is unreliable. SGD
    at a scaled rate leaves the region in which linear scaling holds. Pretrained weights at a small rate often do without.
    """
    if t.family is None or not t.family.scaling_is_studied or t.warmup is None:
        return
    if not t.family.uses_beta2 and (t.size is None or t.size <= 256):
        return
    wanted, steps = t.wanted_warmup, t.warmup_steps
    # Published fine-tunings at small rates have none.
    careful = bool(t.finetuning or t.adapter) or (t.family.uses_beta2 and (t.lr or 1) <= SMALL_RATE)
    if t.warmup == 0:
        severity: Severity = "note" if careful else "warning"
        yield Violation(severity, "warmup", "The first step has the full learning rate.", {"warmup": wanted})
    # Published numbers differ by a factor of four.
    elif steps is not None and t.updates is not None and steps < min(wanted, USUAL_WARMUP) / 10 and not careful:
        severity = "warning" if steps < min(wanted, USUAL_WARMUP) / 40 else "note"
        yield Violation(severity, "warmup", f"The warm-up is {steps:,} steps; {wanted:,} are usual.", {"warmup": wanted})


@rule(
    "warmup-too-long",
    "error",
    "warning",
    source="arithmetic; OpenCLIP's default is 10,000 steps whatever the run",
    remedy="Warm up for about 5 % of the run, or train longer.",
)
def warmup_too_long(t: TrainingFacts) -> Iterator[Violation]:
    """A warm-up as long as the run.

    The full rate is never reached, or only for a short time.
    """
    if t.warmup_steps is None or t.updates is None or t.warmup_steps * 2 <= t.updates:
        return
    severity: Severity = "error" if t.warmup_steps >= t.updates else "warning"
    text = f"The warm-up is {t.warmup_steps:,} steps of a run of {t.updates:,}."
    yield Violation(severity, "warmup", text, {"warmup": t.wanted_warmup})


@rule(
    "beta2-too-slow",
    "warning",
    source="SigLIP (2303.15343): large batches need β2 = 0.95 to be stable; CLIP's vision transformers use 0.98",
    remedy="Use a β2 of 0.98 or 0.95.",
)
def beta2_too_slow(t: TrainingFacts) -> Iterator[Violation]:
    """β2 of 0.999 at a large contrastive batch.

    The second moment averages over a thousand steps, but a large-batch run has few: it lags behind and does not damp gradient
    spikes. CLIP's ResNets trained with 0.999, and so did text encoders from pretrained weights.
    """
    adaptive = t.family is not None and t.family.uses_beta2
    if not t.contrastive or not adaptive or t.beta2 is None or t.beta2 < SLOW or t.size is None or t.size < LARGE_CONTRASTIVE:
        return
    wanted = advise_beta2(t.tasks()[0], t.size)
    if wanted is not None and wanted.value < SLOW and not t.batchnorm and t.finetuning is False:
        yield Violation("warning", "beta2", f"β2 is {t.beta2:g} at {t.size:,} pairs.", {"beta2": wanted.value})


@rule(
    "finetune-rate",
    "warning",
    "note",
    source="published: CLIP 1e-6 to 1e-4, text encoders 1e-5 to 2e-4, language models 2e-5 (LoRA ten times that), lower for larger"
    " models and higher for larger batches; megabatch's rule for plans, and ten times above it. Confidence low to medium",
    remedy="Start at the rate that others use for this kind of model, and sweep.",
)
def finetune_rate(t: TrainingFacts) -> Iterator[Violation]:
    """Fine-tuning at a rate for random weights.

    Pre-trained weights are already close to a good solution. A rate chosen for random weights moves them away from it first.
    """
    if not t.finetuning or t.optimizer is None or t.lr is None or t.base_lr is not None or _is_impossible(t):
        return
    _, high = t.rates()
    if t.lr > high:
        kind = "LoRA" if t.adapter else "fine-tuning"
        text = f"The rate is {t.lr:g}, but {kind} of this kind of model usually takes at most {high:.2g}."
        yield Violation("warning" if t.lr > DOUBT * high else "note", "lr", text, {"lr": _advised(t)})


@rule(
    "rate-unusual",
    "warning",
    "note",
    source="megabatch's rules for plans, made from published trainings, and ten times above and below them",
    remedy="Take the rate that others use for this kind of model, batch and start, and sweep around it.",
)
def rate_unusual(t: TrainingFacts) -> Iterator[Violation]:
    """A learning rate more than ten times off.

    Published trainings of the same kind from the same start agree within a factor of three or so.
    """
    if t.lr is None or t.optimizer is None or t.base_lr is not None or _is_impossible(t):
        return
    low, high = t.rates()
    # Other rules report fine-tuning at too high a rate, and random weights at one for pretrained ones.
    too_low = t.lr < low / DOUBT and not (t.contrastive and t.finetuning is False)
    if too_low or (t.lr > high and not t.finetuning):
        text = f"The rate is {t.lr:g}; {low:.1g} to {high:.1g} is plausible for what is trained."
        # Some trainings, such as that of preferences, take much smaller rates on purpose.
        yield Violation("note" if too_low else "warning", "lr", text, {"lr": _advised(t)})


def _possible(t: TrainingFacts) -> tuple[float, float]:
    """Return the rates that can be meant; with an unknown optimizer, those that can be meant with some optimizer."""
    intervals = [possible_rates(t.optimizer)] if t.optimizer else [possible_rates(family.name) for family in FAMILIES.values()]
    return min(low for low, _ in intervals), max(high for _, high in intervals)


def _is_impossible(t: TrainingFacts) -> bool:
    """Return whether `rate_out_of_range` reports the rate."""
    low, high = _possible(t)
    return t.lr is not None and not low <= t.lr <= high


def _advised(t: TrainingFacts) -> float:
    return advise_rate(t.tasks()[0], t.size or 256).value


@rule(
    "rate-ignores-growth",
    "warning",
    source="2205.10287; batch ramps keep lr/√batch constant (2510.14717, 2505.23971)",
    remedy='Set `batch.lr_rule = "sqrt"` for Adam, or "linear" for SGD.',
)
def rate_ignores_growth(t: TrainingFacts) -> Iterator[Violation]:
    """A batch that grows, with a rate that does not follow.

    The small batches at the start are then trained at the rate of the large one.
    """
    if t.rate_follows is False:
        text = "The batch grows during the run, but the rate does not follow it."
        yield Violation("warning", "rate_follows", text, {"rate_follows": True})


@rule(
    "layerwise-optimizer",
    "note",
    source="2102.06356: Nesterov and Adam match LARS and LAMB at large batches when tuned",
    remedy="Use AdamW or SGD with momentum, tuned.",
)
def layerwise_optimizer(t: TrainingFacts) -> Iterator[Violation]:
    """LARS or LAMB because of the batch size.

    They are not needed, and the rules for scaling the rate were found with SGD and Adam.
    """
    if t.family is not None and not t.family.scaling_is_studied:
        instead = OPTIMIZERS[DEFAULT].family.name
        yield Violation("note", "optimizer", f"{t.family.name.upper()} is not needed for large batches.", {"optimizer": instead})


@rule(
    "decay-on-gains",
    "warning",
    "note",
    source="OpenCLIP's main.py and Hugging Face's Trainer leave gains and biases out; so does megabatch",
    remedy="Use two parameter groups: decay for parameters of two or more dimensions, none for the rest and for the logit scale.",
)
def decay_on_gains(t: TrainingFacts) -> Iterator[Violation]:
    """Weight decay on gains, biases and the logit scale.

    Decay shrinks the gain of a normalization layer, and with it the layer's output; on the logit scale it changes the temperature.
    """
    if not t.weight_decay:
        return
    if t.decays_gains:
        text = f"Weight decay {t.weight_decay:g} also applies to gains and biases."
        yield Violation("warning", "decays_gains", text, {"decays_gains": False})
    elif t.decays_gains is None and t.optimizer is not None:
        text = f"The file does not state whether weight decay {t.weight_decay:g} applies to gains and biases: the model's parameter"
        text += " groups decide it."
        yield Violation("note", "decays_gains", text)


RULES = (
    rate_out_of_range,
    scheduler_sets_rate,
    warmup_beyond_one,
    rate_not_scaled,
    finetune_rate,
    rate_unusual,
    no_warmup,
    warmup_too_long,
    beta2_too_slow,
    rate_ignores_growth,
    decay_on_gains,
    layerwise_optimizer,
)
