"""Rules for batch, learning rate, warm-up, β2 and weight decay, each with its interval, reason and source.

`planning` and `audit` call the same functions, so that a plan and an audit cannot disagree. A rule has few constants: measured
comparisons where there are some, and what published trainings have in common otherwise. `published.RECIPES` holds those trainings;
`benchmarks/practice.py` asks the rules for each of them and lists where they differ.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from . import batch_law, evidence
from .batch_law import MeasuredLaw
from .evidence import FACTS, Confidence, Fact, round_rate
from .objectives import OBJECTIVES
from .optimizers import FAMILIES, FamilyName, rate_factor
from .published import RECIPES, Kind, Recipe, Start, TrainingTask

__all__ = [
    "NO_NEGATIVES",
    "RECIPES",
    "Advice",
    "Kind",
    "Recipe",
    "Shortage",
    "Start",
    "TrainingTask",
    "advise_batch",
    "advise_beta2",
    "advise_decay",
    "advise_rate",
    "advise_warmup",
    "nearest",
    "plausible_rates",
    "possible_rates",
    "too_few_updates",
    "updates_needed",
    "usual_epochs",
    "warnings_for",
]


# What plans and audits say of a contrastive batch of 1.
NO_NEGATIVES = "A batch of 1 has no negatives, and a contrastive loss learns from nothing else"


class Advice(NamedTuple):
    """A recommended value, the interval in which published and measured values lie, the reason, the source and the confidence."""

    value: float
    low: float
    high: float
    why: str
    source: str
    confidence: Confidence
    notes: tuple[str, ...] = ()


# --- Batch ---


def advise_batch(task: TrainingTask) -> Advice | None:
    """Return the batch in samples (sequences for a language model), or None if the samples seen are unknown.

    low and high: the batches between which measured comparisons and published trainings of this kind and budget lie.
    """
    if task.seen is None:
        return None
    if task.pairs:
        law = law_for(task)
        if task.negatives:
            advice = _with_hard_negatives(task, task.seen)
        elif law is not None and task.seen < evidence.LEAST_PUBLISHED:
            advice = _by_law(law, task, task.seen)
        else:
            advice = _from_batch_negatives(task, task.seen)
            advice = advice if law is None else advice._replace(notes=(_extrapolated(law, task, task.seen),))
        advice = _within_unique(task, _with_enough_updates(task, task.seen, advice))
    elif task.start != "scratch":
        advice = _fine_tuning(task, task.seen)
    elif task.kind == "lm":
        advice = _token_batch(task, task.seen)
    else:
        advice = _images(task, task.data or task.seen)
    most = math.inf if task.data is None else power_below(task.data)
    if advice.value > most:
        advice = advice._replace(why=f"{advice.why}; at most the {task.data:,} samples of the data")
    return advice._replace(value=min(advice.value, most), low=min(advice.low, most), high=min(advice.high, most))


def updates_needed(seen: int, start: Start = "scratch") -> int:
    """Return the optimizer steps below which the quality of a contrastive run falls, given the samples that it sees.

    A power law in the samples seen, through the geometric middle of "too few" and "enough" of two measurements. Towers trained from
    scratch need twice the updates of a locked one; pretrained towers lie between. Never fewer than with which any run is poor.

    >>> updates_needed(2_000_000), updates_needed(450_000_000, "locked"), updates_needed(1_000)
    (976, 6866, 250)
    """
    scratch = math.sqrt(evidence.SCRATCH_TOO_FEW * evidence.SCRATCH_ENOUGH)
    locked = math.sqrt(evidence.LOCKED_TOO_FEW * evidence.LOCKED_ENOUGH)
    factor = {"scratch": 1.0, "pretrained": evidence.SCRATCH_OVER_LOCKED**-0.5, "locked": 1 / evidence.SCRATCH_OVER_LOCKED}
    growth = math.log(evidence.SCRATCH_OVER_LOCKED * locked / scratch) / math.log(evidence.LOCKED_SEEN / evidence.SCRATCH_SEEN)
    return max(evidence.POOR_UPDATES, round(factor[start] * scratch * (seen / evidence.SCRATCH_SEEN) ** growth))


def _from_batch_negatives(task: TrainingTask, seen: int) -> Advice:
    """Return the batch of pairs whose negatives come from the batch alone.

    The interval ends at the batch that leaves just enough updates. From scratch it begins at the usual minimum, and the advice is
    the geometric middle of both, or what leaves as many updates as large published trainings make.
    """
    needed, saturation, floor = updates_needed(seen, task.start), _saturation(task), evidence.FLOOR
    bound = seen / needed
    facts = [FACTS["updates from scratch"], FACTS["updates locked"], FACTS["negatives"]]
    if task.start == "pretrained":
        least = min(evidence.FINETUNE_LEAST, max(evidence.SMALLEST_PAIRS, power_near(seen / evidence.FINETUNE_FEWEST)))
        value = min(max(power_near(seen / evidence.FINETUNE_UPDATES), least), evidence.FINETUNE_MOST)
        low, saturation = max(least, power_near(value / 4)), min(saturation, evidence.FINETUNE_MOST)
        why = f"{seen:,} pairs seen / about {evidence.FINETUNE_UPDATES:,} updates, as published fine-tunings make"
        if value == least:
            why = f"the smallest that keeps quality with {seen:,} pairs seen; they leave {math.ceil(seen / value):,} updates"
        if value == evidence.SMALLEST_PAIRS:
            why = f"the smallest with enough negatives; {seen:,} pairs seen leave {math.ceil(seen / value):,} updates"
        facts = [FACTS["published fine-tuning"], FACTS["fine-tuning pairs"], FACTS["unlabelled text"]]
    elif task.start == "locked":
        value, low = power_near(bound / 2), power_near(bound / 8)
        why = f"{seen:,} samples seen / twice the {needed:,} updates that a locked tower needs at least"
    elif bound <= floor:
        value, low = power_near(bound), power_near(bound / 4)
        why = f"{seen:,} samples seen / about {needed:,} updates needed; {floor:,} would leave {math.ceil(seen / floor):,}"
    elif seen / evidence.USUAL_UPDATES > math.sqrt(floor * bound):
        value, low = power_near(seen / evidence.USUAL_UPDATES), power_near(math.sqrt(floor * bound))
        why = f"{seen:,} samples seen / the {evidence.USUAL_UPDATES:,} updates that large published trainings make"
        facts = [FACTS["published updates"], *facts]
    else:
        value, low = power_below(math.sqrt(floor * bound)), floor
        why = (
            f"between {floor:,}, the usual minimum, and {min(power_near(bound), saturation):,}, which leaves about the {needed:,}"
            f" updates needed for {seen:,} seen"
        )
        facts = [FACTS["published updates"], *facts, FACTS["data"]]
    if value >= saturation:
        value, why = saturation, f"{why}; at most {saturation:,}, where more negatives stop helping"
    high = max(value, min(power_near(bound), saturation))
    confidence: Confidence = "medium" if seen >= evidence.SCRATCH_SEEN / 4 else "low"
    return Advice(value, min(low, value), high, why, _sources(facts), confidence)


def _with_enough_updates(task: TrainingTask, seen: int, advice: Advice) -> Advice:
    """Return the advice within the batches that have enough negatives and leave enough updates.

    Where few samples are seen, no batch leaves enough, and the smallest that has enough negatives is advised.
    """
    law = law_for(task)
    least = evidence.SMALLEST_PAIRS if law is None else round(law.batches[0])
    large = evidence.FINETUNE_LARGE if task.start == "pretrained" else evidence.FLOOR
    most = max(power_below(seen / evidence.POOR_UPDATES), least)
    most = min(most, max(power_below(seen / evidence.FEWEST_UPDATES), large))
    if advice.value < least:
        advice = advice._replace(why=f"{advice.why}; at least {least}, because smaller batches have too few negatives")
    value, low, high = (min(max(batch, least), most) for batch in advice[:3])
    return advice._replace(value=value, low=low, high=high)


def law_for(task: TrainingTask) -> MeasuredLaw | None:
    """Return the measured law of contrastive batches if there is one for such a training: from scratch, without mined negatives."""
    alike = task.pairs and task.start == "scratch" and not task.negatives and _is_pairs_of_media(task)
    return batch_law.load() if alike else None


def different_pairs(task: TrainingTask, seen: int) -> int:
    """Return the different pairs among those that training sees."""
    return min(seen, task.unique or task.data or seen)


def _by_law(law: MeasuredLaw, task: TrainingTask, seen: int) -> Advice:
    """Return the batch that the measured law plans.

    At least the smallest that was measured, and at most the usual minimum of published trainings, which see more samples.
    """
    pairs = different_pairs(task, seen)
    largest, interval, beyond = law.largest(seen, pairs), law.interval(seen, pairs), law.beyond(seen, pairs)
    planned = law.planned(seen, pairs)
    value = min(max(power_near(planned), law.batches[0]), evidence.FLOOR)
    why = (
        f"up to about {largest:,.0f} (90 % interval {interval[0]:,.0f} to {interval[1]:,.0f}) a batch loses less than 1 point or"
        f" 3 % of recall at {seen:,} samples seen and {pairs:,} pairs; {planned / largest:.0%} of that lost least in measured cases"
    )
    low, high = max(power_near(value * interval[0] / largest), law.batches[0]), power_near(largest)
    small = task.params is None or task.params < evidence.LARGE_MODEL
    confidence: Confidence = "medium" if beyond <= 1 and small and law.held_back >= 0.9 else "low"
    why += f"; no batch below {law.batches[0]:,.0f} was measured" if planned < law.batches[0] else ""
    why += "" if beyond <= 1 else f", extrapolated {beyond:,.3g}× beyond the measured range"
    return Advice(value, min(low, value), max(high, value), why, law.source, confidence)


def _extrapolated(law: MeasuredLaw, task: TrainingTask, seen: int) -> str:
    """Return what the law says where published trainings decide, beyond the range that it was measured in."""
    pairs = different_pairs(task, seen)
    low, high = law.interval(seen, pairs)
    line = f"The largest batch without a loss is {law.largest(seen, pairs):,.0f} ({low:,.0f} to {high:,.0f}) by {law.source}"
    beyond = law.beyond(seen, pairs)
    return f"{line}, extrapolated {beyond:,.3g}× beyond the measured range." if beyond > 1 else f"{line}."


def _saturation(task: TrainingTask) -> int:
    """Return the pairs of a batch above which more negatives bought nothing."""
    saturation = OBJECTIVES[task.loss].saturation
    assert saturation is not None
    return saturation


def _with_hard_negatives(task: TrainingTask, seen: int) -> Advice:
    """Return the batch of queries that have mined negatives: about as many documents in all as is usual."""
    documents = 1 + task.negatives
    usual, least = power_near(evidence.HARD_DOCUMENTS / documents), power_near(evidence.LEAST_QUERIES)
    affordable = max(evidence.SMALLEST_PAIRS, power_near(seen / evidence.FINETUNE_FEWEST))
    value = max(min(usual, affordable), min(least, affordable))
    why = f"{value:,} queries with {documents:,} documents each; with mined negatives about {evidence.HARD_DOCUMENTS:,} documents"
    why += " a step are usual, whatever the data"
    why += f"; {seen:,} samples seen leave {math.ceil(seen / value):,} updates" if value == affordable else ""
    fact = FACTS["hard negatives"]
    low, high = min(least, value), max(value, min(evidence.MOST_QUERIES, affordable))
    return Advice(value, low, high, why, fact.source, fact.confidence)


def _within_unique(task: TrainingTask, advice: Advice) -> Advice:
    """Return the advice with a batch in which at most half of the rows have an equal row."""
    if task.unique is None or task.data is None or task.unique >= task.data:
        return advice
    copies = task.data / task.unique
    most = max(2, power_near(0.5 * task.data / (copies - 1)))
    if advice.value <= most:
        return advice
    why = (
        f"{advice.why}; {task.unique:,} different items among {task.data:,}: above {most:,} every other row would have a duplicate"
    )
    return advice._replace(value=most, low=min(advice.low, most), high=most, why=why)


def _fine_tuning(task: TrainingTask, seen: int) -> Advice:
    """Return a batch for fine-tuning a classifier or a language model: small where there is little data."""
    updates, least, most = evidence.FINETUNE_LM if task.kind == "lm" else evidence.FINETUNE_CLASSIFIER
    value = min(max(power_near(seen / updates), least), most)
    fact = FACTS["fine-tuning lm" if task.kind == "lm" else "fine-tuning"]
    why = f"{seen:,} samples seen give {math.ceil(seen / value):,} updates; {least} to {most} are usual"
    high = min(2 * most, power_near(8 * seen / updates))
    high = max(value, min(high, max(evidence.FINETUNE_LARGE_SAMPLES, power_below(seen / evidence.FEWEST_UPDATES))))
    return Advice(value, least / 2, high, why, fact.source, fact.confidence)


def _token_batch(task: TrainingTask, seen: int) -> Advice:
    """Return the sequences of a language model's batch: its optimal tokens grow with the tokens seen, not with the model."""
    tokens = power_near(critical_tokens(seen * task.length))
    value = max(1, round(tokens / task.length))
    fact = FACTS["lm batch"]
    why = f"{_short(tokens)} tokens ({value:,} × {task.length:,}) for {_short(seen * task.length)} tokens seen; {fact.says}"
    return Advice(value, max(1, value / 4), value * 4, why, fact.source, fact.confidence)


def critical_tokens(seen: int) -> float:
    """Return the tokens of a batch above which a language model that sees so many tokens gains little (FACTS["lm batch"]).

    >>> round(critical_tokens(10**10))
    524288
    """
    return evidence.LM_BATCH * (seen / evidence.LM_SEEN) ** evidence.LM_GROWTH


def critical_images(data: int) -> int:
    """Return a prior for the critical batch of supervised learning: ImageNet's, times √(data / ImageNet)."""
    return max(16, round(evidence.IMAGENET_CRITICAL * math.sqrt(data / evidence.IMAGENET)))


def _images(task: TrainingTask, data: int) -> Advice:
    """Return the batch of a classifier from scratch: the part of the critical batch that is usual with the optimizer."""
    critical = critical_images(data)
    part = evidence.SGD_PART if FAMILIES[task.optimizer].lr_rule == "linear" else evidence.ADAM_PART
    value = min(power_near(critical / part), evidence.FLOOR)
    why = f"1/{part} of the critical batch, about {critical:,} for {data:,} images: {1 / part:.0%} more samples than small batches"
    facts = (FACTS["imagenet"], FACTS["usual images"])
    high = max(value, min(power_near(critical), evidence.IMAGENET_CRITICAL))
    return Advice(value, max(1, value / 4), high, why, _sources(facts), "medium")


# --- Learning rate ---


class RateRule(NamedTuple):
    """A learning rate of Adam that is right at a batch, for models of so many parameters.

    Above the batch it grows with the square root. Below, it falls likewise if `falls`, and stays if not. It falls with the
    parameters to the power of evidence.RATE_SIZE, or does not depend on them (None).
    """

    lr: float
    batch: int
    fact: str
    params: int | None = None
    falls: bool = False


# Adam's rates, by kind and start.
ADAM_RATES: dict[tuple[Kind, Start], RateRule] = {
    ("image-text", "scratch"): RateRule(5e-4, 32_768, "clip rate"),
    ("image-text", "locked"): RateRule(1e-3, 32_768, "locked rate"),
    ("image-text", "pretrained"): RateRule(1e-5, 512, "clip fine-tuning rate"),
    ("embedder", "scratch"): RateRule(5e-4, 32_768, "embedder scratch rate"),
    ("embedder", "locked"): RateRule(1e-3, 32_768, "locked rate"),
    ("embedder", "pretrained"): RateRule(2e-5, 256, "embedder rate", params=110_000_000),
    # The batch is in tokens.
    ("lm", "scratch"): RateRule(6e-4, 524_288, "lm rate", params=124_000_000, falls=True),
    ("lm", "locked"): RateRule(5e-5, 32_768, "lm fine-tuning rate", params=124_000_000),
    ("lm", "pretrained"): RateRule(5e-5, 32_768, "lm fine-tuning rate", params=124_000_000),
    ("classifier", "scratch"): RateRule(1e-3, 1_024, "classifier rate", falls=True),
    ("classifier", "locked"): RateRule(1e-3, 1_024, "classifier rate"),
    ("classifier", "pretrained"): RateRule(3e-5, 512, "classifier fine-tuning rate"),
}
# SGD's rates at a batch of 256: from scratch, fine-tuning, and a linear layer on a locked body.
SGD_RATES: dict[Start, float] = {"scratch": 0.1, "pretrained": 0.01, "locked": 0.1}
SGD_BATCH = 256


def advise_rate(task: TrainingTask, batch: int) -> Advice:
    """Return the learning rate at a batch (of sequences for a language model). It is a starting point: sweep around it."""
    family = FAMILIES[task.optimizer]
    if family.lr_rule == "linear":
        growth = min(batch, family.largest_rule_batch or batch) / SGD_BATCH
        base, fact = SGD_RATES[task.start], FACTS["linear"]
        lr = round_rate(base * rate_factor("linear", growth))
        why = f"{base:g} at {SGD_BATCH}, times {batch:,}/{SGD_BATCH}" + (" up to 8,192" if batch > 8_192 else "")
        return Advice(lr, lr / 3, lr * 3, why, fact.source, fact.confidence if task.kind == "classifier" else "low")
    if task.lora is not None:
        fact, lr = FACTS["lora rate"], evidence.LORA_RATE
        return Advice(lr, lr / 3, lr * 3, fact.says, fact.source, fact.confidence)
    rule = ADAM_RATES[task.kind, task.start]
    fact = FACTS["views rate" if task.pairs and OBJECTIVES[task.loss].views else rule.fact]
    size = batch * task.length if task.kind == "lm" else batch
    # Below the range in which the square root was tested, a rate that followed it further would be too small to learn.
    growth = max(size / rule.batch, 1 / evidence.RATE_RANGE if rule.falls else 1.0)
    if task.kind == "lm":
        # Published rates do not grow with the batch above half a million tokens: the model does, and lowers them.
        growth = min(1.0, growth)
    lr, why = rule.lr * math.sqrt(growth), f"{rule.lr:g} at {rule.batch:,}{' tokens' if task.kind == 'lm' else ''}"
    why += "" if growth == 1 else f", times √({round(growth * rule.batch):,}/{rule.batch:,})"
    if rule.params is not None and task.params is not None:
        lr *= (rule.params / task.params) ** evidence.RATE_SIZE
        if _short(rule.params) != _short(task.params):
            why += f", times ({_short(rule.params)}/{_short(task.params)})^{evidence.RATE_SIZE:g}"
    elif task.kind == "image-text" and task.start == "scratch" and (task.params or evidence.LARGE_MODEL) < evidence.LARGE_MODEL:
        lr, why = lr * 2, f"{why}, twice for towers below {_short(evidence.LARGE_MODEL)} parameters"
    lr = round_rate(lr)
    confidence = "low" if task.optimizer != "adam" or not 1 / 4 <= growth <= evidence.RATE_RANGE**2 else fact.confidence
    return Advice(lr, lr / 3, lr * 3, f"{why}; {fact.says}", fact.source, confidence)


def plausible_rates(task: TrainingTask, batch: int | None = None) -> tuple[float, float]:
    """Return the lowest and the highest learning rate that is no mistake by itself: ten times below and above the advice.

    batch: None if it is unknown; then the interval covers every usual batch.
    """
    low = advise_rate(task, batch or 16).value / 10
    high = advise_rate(task, batch or evidence.CEILING).value * 10
    return low, high


def possible_rates(optimizer: FamilyName) -> tuple[float, float]:
    """Return the rates outside which nothing learns with the optimizer, or everything diverges, whatever is trained."""
    return (1e-6, 100.0) if FAMILIES[optimizer].lr_rule == "linear" else (1e-8, 0.1)


# --- Epochs, warm-up, β2, weight decay ---


def usual_epochs(kind: Kind, start: Start, data: int) -> float:
    """Return how often a training of this kind usually sees its data, of so many samples (FACTS["epochs"]).

    >>> usual_epochs("image-text", "scratch", 12_000_000), usual_epochs("embedder", "pretrained", 200_000)
    (30.0, 3.0)
    """
    epochs = evidence.EPOCHS[kind, start != "pretrained"]
    if kind == "embedder":
        # Beyond, as many samples as those of few pairs, so that more data are never trained on less.
        return max(epochs, round(evidence.EPOCHS_OF_FEW_PAIRS * min(1, evidence.FEW_PAIRS / max(data, 1)), 1))
    if kind == "image-text" and start != "pretrained":
        return max(1.0, min(epochs, round(evidence.MOST_SEEN / data, 1)))
    return epochs


def advise_warmup(task: TrainingTask, batch: int) -> Advice:
    """Return the steps of warm-up: a share of a short run, two thousand of a long one, a hundredth of a very long one."""
    steps, usual = task.steps(batch), evidence.USUAL_WARMUP
    fact = FACTS["epochs of warm-up" if task.kind == "classifier" else f"{task.kind} warm-up"]
    if steps is None:
        return Advice(usual, usual / 4, usual * 4, "the usual number; the length of the run is unknown", fact.source, "low")
    law = law_for(task)
    if law is not None and law.warm_up is not None and task.seen is not None and task.seen < evidence.LEAST_PUBLISHED:
        best = law.warm_up.at(batch)
        rising = max(1, round(best * steps))
        why = f"{best:.0%} of {steps:,} steps, the best share between {law.warm_up.least:.0%} and {law.warm_up.most:.0%}"
        return Advice(rising, max(1, rising / 4), min(steps, rising * 4), why, law.source, "medium")
    share = evidence.WARMUP_SHARE * steps
    if task.kind == "classifier":
        # Five epochs of ninety, whatever the steps are.
        value, why = share, f"{evidence.WARMUP_SHARE:.0%} of {steps:,} steps, as five epochs of ninety"
    else:
        value = min(share, max(usual, min(evidence.LONG_WARMUP * steps, evidence.MOST_WARMUP_STEPS)))
        why = f"{evidence.WARMUP_SHARE:.0%} of {steps:,} steps"
        if value < share:
            reason = "as many as long runs usually take" if value <= usual else "as very long runs take"
            why = f"{value:,.0f} of {steps:,} steps, {reason}"
    value = max(1, round(value))
    return Advice(value, max(1, value / 4), min(steps, value * 4), f"{why}; {fact.says}", fact.source, fact.confidence)


def advise_beta2(task: TrainingTask, batch: int) -> Advice | None:
    """Return Adam's β2, or None for an optimizer without it."""
    if not FAMILIES[task.optimizer].uses_beta2:
        return None
    if task.kind == "lm" and task.start == "scratch":
        # The half-life stays the same in tokens.
        fact, share = FACTS["lm beta2"], batch * task.length / evidence.LM_BATCH
        value = 0.95 if share >= 1 else float(f"{min(0.9999, 0.95**share):.4g}")
    elif task.pairs and task.start != "pretrained":
        fact, value = FACTS["beta2"], 0.95 if batch >= evidence.LARGE_CONTRASTIVE else 0.98
    elif task.kind == "image-text":
        fact, value = FACTS["beta2"], 0.98
    else:
        fact, value = FACTS["default beta2"], 0.999
    return Advice(value, min(value, 0.95), 0.999, fact.says, fact.source, fact.confidence)


def advise_decay(task: TrainingTask) -> Advice:
    """Return the usual weight decay."""
    if FAMILIES[task.optimizer].lr_rule == "linear":
        return Advice(1e-4, 1e-5, 1e-3, "the usual value of SGD", FACTS["linear"].source, "high")
    value = evidence.WEIGHT_DECAYS[task.kind, task.start != "pretrained"] if task.lora is None else 0.0
    fact = FACTS["decay" if task.kind == "lm" and task.start == "scratch" else "usual decay"]
    return Advice(value, value / 10, max(value * 5, 0.1), fact.says, fact.source, fact.confidence)


# --- What others did, and what is a bad idea ---


def nearest(task: TrainingTask, count: int = 2) -> list[Recipe]:
    """Return the published trainings most alike: of the same kind and start, nearest by samples seen, then by size of the model.

    Only those with a published batch and length. Their differences count in powers of ten.
    """

    def distance(recipe: Recipe) -> float:
        other = recipe.task
        far = 2.0 * (bool(task.negatives) != bool(other.negatives)) + 1.0 * ((task.lora is None) != (other.lora is None))
        far += 0.5 * (task.loss != other.loss)
        if task.seen is not None and other.seen is not None:
            far += abs(math.log10(task.seen * task.length / (other.seen * other.length)))
        if task.params is not None and other.params is not None:
            far += 0.5 * abs(math.log10(task.params / other.params))
        return far

    alike = [recipe for recipe in RECIPES if recipe.task.kind == task.kind and recipe.task.start == task.start]
    alike = [recipe for recipe in alike if OBJECTIVES[recipe.task.loss].views == OBJECTIVES[task.loss].views]
    return sorted((recipe for recipe in alike if recipe.batch and recipe.task.seen), key=distance)[:count]


def warnings_for(task: TrainingTask, batch: int | None = None, ranks: int = 1) -> list[str]:
    """Return sentences that say why the training is a bad idea and what to do instead; empty if it is not.

    ranks: GPUs that share the batch.
    """
    lines = []
    large = task.params is None or task.params >= evidence.LARGE_MODEL
    if (
        task.kind == "image-text"
        and task.start == "scratch"
        and large
        and _is_pairs_of_media(task)
        and (task.seen or math.inf) < evidence.CLIP_LEAST_SEEN
    ):
        fact = FACTS["clip from scratch"]
        lines.append(
            f"This budget cannot train CLIP from scratch: {task.seen:,} samples seen, and {fact.says} ({fact.source})."
            " Fine-tune pretrained weights (--start pretrained), or lock a pretrained image tower (--start locked)."
        )
    elif task.kind == "image-text" and task.start == "scratch" and _is_pairs_of_media(task) and task.seen is not None:
        fact = FACTS["clip sizes"]
        if (task.params or 0) > evidence.LARGE_CLIP and task.seen < evidence.LARGE_CLIP_SEEN:
            lines.append(
                f"{_short(task.seen)} samples seen are few for {_short(task.params or 0)} parameters from scratch: {fact.says}"
                f" ({fact.source}). Take a smaller model, fine-tune pretrained weights (--start pretrained), or train longer."
            )
    if task.kind == "embedder" and task.start == "scratch":
        fact = FACTS["embedder from scratch"]
        lines.append(f"Start from pretrained weights: {fact.says} ({fact.source}).")
    if task.kind == "lm" and task.start == "scratch" and task.seen is not None and task.params is not None:
        tokens = task.seen * task.length
        if tokens < evidence.LEAST_TOKENS * task.params:
            fact = FACTS["tokens per parameter"]
            lines.append(
                f"{_short(tokens)} tokens are {tokens / task.params:.2g} for each of {_short(task.params)} parameters;"
                f" {fact.says} ({fact.source}). Train a smaller model, or fine-tune pretrained weights."
            )
    if task.kind == "classifier" and task.start == "scratch" and large and (task.data or math.inf) < evidence.CLASSIFIER_LEAST:
        lines.append(
            f"{task.data:,} images are few for {_short(task.params or evidence.LARGE_MODEL)} parameters from scratch: start from"
            " pretrained weights (--start pretrained)."
        )
    if batch == 1 and task.pairs and not task.negatives:
        lines.append(f"{NO_NEGATIVES}: take {evidence.SMALLEST_PAIRS} or more.")
    shortage = None if batch is None else too_few_updates(task, batch, ranks)
    if shortage is not None:
        fact = FACTS["published fine-tuning" if task.start == "pretrained" else "updates from scratch"]
        lines.append(f"{shortage.says} ({fact.source}): {shortage.remedy}.")
    return lines


class Shortage(NamedTuple):
    """Too few updates to learn from: what is the case, and what to do, as parts of a sentence. batch: the one to take."""

    says: str
    remedy: str
    batch: int


def too_few_updates(task: TrainingTask, batch: int, ranks: int = 1) -> Shortage | None:
    """Return that a contrastive run at a batch makes too few updates to learn from, or None if it makes enough.

    A smaller batch is only a remedy if the rules advise one and the ranks can share it. Where no batch leaves enough updates, the
    remedy is a longer run: as long that the batch leaves evidence.POOR_UPDATES.
    """
    if not task.pairs or task.seen is None or math.ceil(task.seen / batch) >= evidence.HOPELESS_UPDATES:
        return None
    advice, updates = advise_batch(task), math.ceil(task.seen / batch)
    assert advice is not None
    size = min(batch, round(advice.value))
    says = f"{updates:,} update{'' if updates == 1 else 's'} of {batch:,} are too few to learn from"
    smaller = f"take at most {size:,} GPUs and a batch of {size:,}" if ranks > size else f"take a smaller batch, {size:,}"
    if math.ceil(task.seen / size) >= evidence.HOPELESS_UPDATES:
        return Shortage(says, f"{smaller}, or train longer", size)
    samples = evidence.POOR_UPDATES * size
    length = f"{samples:,} samples"
    if task.data is not None:
        length = f"{math.ceil(samples / task.data):,} epochs ({length} seen), or collect more data"
    why = "this is too little training for any batch"
    return Shortage(says, f"{why}, so {f'{smaller}, and ' if size < batch else ''}train at least {length}", size)


def _is_pairs_of_media(task: TrainingTask) -> bool:
    """Whether pairs are an image and a text, not two views of one image."""
    return not OBJECTIVES[task.loss].views


def power_near(number: float) -> int:
    """Return the power of two that is nearest by ratio.

    >>> power_near(724), power_near(1450)
    (512, 2048)
    """
    return 2 ** max(0, round(math.log2(max(1.0, number))))


def power_below(number: float) -> int:
    """Return the largest power of two up to a number."""
    return 1 << (max(1, int(number)).bit_length() - 1)


def _short(count: int) -> str:
    # Each limit is where three digits would round up to the next unit.
    size, unit = next((each for each in ((1e12, "T"), (1e9, "B")) if count >= 0.9995 * each[0]), (1e6, "M"))
    return f"{count / size:.3g} {unit}"


def _sources(facts: list[Fact] | tuple[Fact, ...]) -> str:
    return "; ".join(dict.fromkeys(fact.source for fact in facts))
