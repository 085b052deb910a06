"""Rules about the learning rate and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...optimizers import DEFAULT, FAMILIES, OPTIMIZERS
from ..arithmetic import rounded, scaled_rate, wanted_warmup
from ..rule import Problem, Severity, rule
from ..training import Training

# Rules of thumb are good to a factor of √2: what differs by more was not scaled.
OFF = math.sqrt(2) * 1.001
# The batch from which a slow second moment is said to be a risk; the papers name no number, this one is ours.
LARGE_CONTRASTIVE = 8_192
# What CLIP was pre-trained with, and ten times the largest rate that BERT's paper fine-tunes with.
PRETRAINING_RATE, FINETUNING_RATE = 5e-4, 5e-5


@rule(
    "rate-not-scaled",
    "warning",
    source="SGD: linear, shown to 8,192 (1706.02677); Adam: square root as a start (2205.10287), can rise then fall (2405.14578)",
    remedy="Scale from the base with the effective batch: × k for SGD, × √k for Adam; then sweep around it.",
)
def rate_not_scaled(t: Training) -> Iterator[Problem]:
    """A learning rate that was not scaled with the effective batch.

    What counts is ranks × per-device batch × accumulation. Needs to be told a rate that is good at some batch (base_lr,
    base_batch).
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
    text = f"lr {t.lr:g} at an effective batch of {t.size:,}; {t.base_lr:g} at {t.base_batch:,} becomes {wanted:.2g} ({rule_name})"
    parts = {"one device's batch": t.micro, "the batch without accumulation": t.micro and t.ranks and t.micro * t.ranks}
    for name, part in parts.items():
        if part and part != t.size and abs(t.lr / scaled_rate(t.base_lr, t.base_batch, part, t.optimizer) - 1) < 0.05:
            text += f"; the rate fits {name} ({part:,})"
            break
    beyond = t.size > (family.largest_rule_batch or 16 * t.base_batch)
    text += "; this far from the base, sweep." if beyond else "."
    yield Problem("warning", "lr", text, {"lr": rounded(wanted)})


@rule(
    "no-warmup",
    "warning",
    "note",
    source="Adam: 2/(1−β2) steps (1910.04209); SGD at large batches: 5 epochs (1706.02677)",
    remedy="2/(1−β2) steps for Adam, 5 epochs for SGD; here at most a tenth of the run.",
)
def no_warmup(t: Training) -> Iterator[Problem]:
    """No warm-up, or too short a one.

    Adam's second moment is an average over 1/(1−β2) steps; until it has seen them the first steps are as long as they like. SGD
    at a scaled rate leaves the region where linear scaling holds.
    """
    if t.family is None or not t.family.scaling_is_studied or t.warmup is None:
        return
    if not t.family.uses_beta2 and (t.size is None or t.size <= 256):
        return
    wanted, steps = wanted_warmup(t), t.warmup_steps
    if t.warmup == 0:
        changes = {} if wanted is None else {"warmup": wanted}
        yield Problem("warning", "warmup", "the first step has the full learning rate.", changes)
    # A rule of thumb: half of it is no mistake.
    elif wanted is not None and steps is not None and steps < wanted / 2:
        severity: Severity = "warning" if steps < wanted / 10 else "note"
        yield Problem(severity, "warmup", f"{steps:,} steps of warm-up, where {wanted:,} are wanted.", {"warmup": wanted})


@rule(
    "warmup-too-long",
    "error",
    "warning",
    source="arithmetic; OpenCLIP's default is 10,000 steps whatever the run",
    remedy="A tenth of the run at most, or a longer run.",
)
def warmup_too_long(t: Training) -> Iterator[Problem]:
    """A warm-up as long as the run.

    The full rate is never reached, or hardly.
    """
    if t.warmup_steps is None or t.updates is None or t.warmup_steps * 2 <= t.updates:
        return
    severity: Severity = "error" if t.warmup_steps >= t.updates else "warning"
    wanted = wanted_warmup(t) or max(1, t.updates // 10)
    yield Problem(severity, "warmup", f"{t.warmup_steps:,} steps of warm-up in a run of {t.updates:,}.", {"warmup": wanted})


@rule(
    "beta2-too-slow",
    "warning",
    source="SigLIP (2303.15343): large batches need β2 = 0.95 to be stable; OpenCLIP's default for vision transformers, after"
    " CLIP, is 0.98",
    remedy="β2 of 0.98 or 0.95.",
)
def beta2_too_slow(t: Training) -> Iterator[Problem]:
    """β2 of 0.999 at a large contrastive batch.

    The second moment remembers a thousand steps, and a large-batch run has few: it lags behind, and gradient spikes pass it.
    """
    adaptive = t.family is not None and t.family.uses_beta2
    if t.contrastive and adaptive and t.beta2 is not None and t.beta2 >= 0.999 and (t.size or 0) >= LARGE_CONTRASTIVE:
        yield Problem("warning", "beta2", f"β2 is {t.beta2:g} at {t.size:,} pairs.", {"beta2": 0.95})


@rule(
    "finetune-rate",
    "warning",
    source="BERT (1810.04805) fine-tunes at 2e-5 to 5e-5; OpenCLIP's default for pre-training, after CLIP, is 5e-4. 10–100× below"
    " pre-training is a habit, not a law: sweep; adapters (LoRA) take more. Confidence low to medium",
    remedy="Start a tenth of the pre-training rate or lower, and sweep.",
)
def finetune_rate(t: Training) -> Iterator[Problem]:
    """Fine-tuning at a pre-training rate.

    Pre-trained weights are near where they should be; a rate that was made for random ones takes them away from there first.
    """
    if t.finetuning and t.family is not None and t.family.uses_beta2 and (t.lr or 0) >= PRETRAINING_RATE and t.base_lr is None:
        yield Problem("warning", "lr", f"fine-tuning with Adam at {t.lr:g}.", {"lr": FINETUNING_RATE})


@rule(
    "rate-ignores-growth",
    "warning",
    source="2205.10287; batch ramps keep lr/√batch in step (2510.14717, 2505.23971)",
    remedy='`batch.lr_rule = "sqrt"` (Adam), "linear" (SGD).',
)
def rate_ignores_growth(t: Training) -> Iterator[Problem]:
    """A batch that grows and a rate that does not follow.

    The small batches at the start are then trained at the rate of the large one.
    """
    if t.rate_follows is False:
        yield Problem(
            "warning", "rate_follows", "the batch grows during the run, the rate does not follow.", {"rate_follows": True}
        )


@rule(
    "layerwise-optimizer",
    "note",
    source="2102.06356: Nesterov and Adam match LARS and LAMB at large batches when tuned",
    remedy="AdamW or SGD with momentum, tuned.",
)
def layerwise_optimizer(t: Training) -> Iterator[Problem]:
    """LARS or LAMB for the sake of the batch.

    They are not needed, and what is known about scaling the rate was learnt with SGD and Adam.
    """
    if t.family is not None and not t.family.scaling_is_studied:
        instead = OPTIMIZERS[DEFAULT].family.name
        yield Problem("note", "optimizer", f"{t.family.name.upper()} is not needed for large batches.", {"optimizer": instead})


@rule(
    "decay-on-gains",
    "warning",
    "note",
    source="OpenCLIP's main.py and Hugging Face's Trainer leave gains and biases out; so does megabatch",
    remedy="Two parameter groups: decay for parameters of two dimensions and more, none for the rest and for the logit scale.",
)
def decay_on_gains(t: Training) -> Iterator[Problem]:
    """Weight decay on gains, biases and the logit scale.

    A gain that decays is a layer that fades; a logit scale that decays is a temperature nobody chose.
    """
    if not t.weight_decay:
        return
    if t.decays_gains:
        yield Problem(
            "warning", "decays_gains", f"weight decay {t.weight_decay:g} also on gains and biases.", {"decays_gains": False}
        )
    elif t.decays_gains is None and t.optimizer is not None:
        text = f"nothing says whether weight decay {t.weight_decay:g} spares gains and biases: the model's parameter groups decide."
        yield Problem("note", "decays_gains", text)


RULES = (
    rate_not_scaled,
    no_warmup,
    warmup_too_long,
    beta2_too_slow,
    finetune_rate,
    rate_ignores_growth,
    decay_on_gains,
    layerwise_optimizer,
)
