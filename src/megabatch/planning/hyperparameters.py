"""Learning rate, warm-up, β2, weight decay and moving average for a batch. The rules are starting points for a sweep."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..evidence import FACTS, RATE_RANGE, Fact, ema_at, round_rate
from ..optimizers import FAMILIES, rate_factor
from ..recipes import Advice, TrainingTask, advise_beta2, advise_decay, advise_rate, advise_warmup, law_for
from .plan import Number

# Contrastive runs from scratch on less data than this, and all classifiers from scratch, get label smoothing.
SMALL_DATA, SMOOTHING = 1_000_000, 0.1
# β2 where an optimizer does not use it: the default of PyTorch.
UNUSED_BETA2 = 0.999


class Hyperparameters(NamedTuple):
    """Values for the optimizer and the schedule of a run. warmup: steps. sweep: rates to try in rising order, or empty."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    warmup: int
    ema: float | None
    label_smoothing: float
    steps: int
    sweep: tuple[float, ...]
    numbers: tuple[Number, ...]


class KnownRate(NamedTuple):
    """A learning rate that is right at a batch: given by the user, or the best of a sweep."""

    lr: float
    batch: int
    fact: Fact

    @property
    def measured(self) -> bool:
        """Whether the rate is the best of several that were tried on this very problem."""
        return self.fact.confidence == "measured"


GIVEN = Fact("the rate that was given", "given", "medium")


def derive_hyperparameters(
    task: TrainingTask,
    batch: int,
    known: KnownRate | None = None,
    *,
    ema: tuple[float, int] | None = None,
    smooths_labels: bool = True,
) -> Hyperparameters:
    """Return the hyperparameters at a batch, each with its reason.

    known: the rate to scale from, instead of the usual one. ema: decay of the moving average, and the batch for which it is right.
    smooths_labels: whether the loss supports label smoothing.
    """
    assert task.seen is not None and task.data is not None
    steps = math.ceil(task.seen / batch)
    lr, sweep, rate_number = _usual_rate(task, batch) if known is None else _scaled_rate(task, batch, known)
    warmup, decay, beta2 = advise_warmup(task, batch), advise_decay(task), advise_beta2(task, batch)
    numbers = [
        rate_number,
        _number("warm-up", warmup, f"{warmup.value:,.0f} steps"),
        *([] if beta2 is None else [_number("β2", beta2)]),
        _number("weight decay", decay),
        Number("steps", steps, f"{steps:,}", f"{task.seen:,} samples / {batch:,}", "arithmetic", "high"),
        _epochs(task.seen, task.data),
    ]
    decayed = None if ema is None else ema_at(ema[0], batch / ema[1])
    if decayed is not None:
        fact = FACTS["ema"]
        numbers.append(Number("EMA", decayed, f"{decayed:.6g}", fact.says, fact.source, fact.confidence))
    small = task.start != "pretrained" and (task.kind == "classifier" or (task.pairs and task.data < SMALL_DATA))
    smoothing = SMOOTHING if smooths_labels and small else 0.0
    if smoothing:
        why = "a model memorizes small data: soften the targets, and compare with 0"
        numbers.append(Number("label smoothing", smoothing, f"{smoothing:g}", why, "common practice", "low"))
    betas = (0.9, UNUSED_BETA2 if beta2 is None else beta2.value)
    return Hyperparameters(lr, betas, decay.value, round(warmup.value), decayed, smoothing, steps, sweep, tuple(numbers))


def _usual_rate(task: TrainingTask, batch: int) -> tuple[float, tuple[float, ...], Number]:
    """Return the usual rate of such a training, and the rates to sweep where it is uncertain."""
    advice = advise_rate(task, batch)
    uncertain = task.start == "pretrained" or advice.confidence == "low"
    sweep = tuple(round_rate(advice.value * factor) for factor in (10**-0.5, 1, 10**0.5)) if uncertain else ()
    return advice.value, sweep, _number("learning rate", advice, _shown(advice.value, sweep))


def _scaled_rate(task: TrainingTask, batch: int, known: KnownRate) -> tuple[float, tuple[float, ...], Number]:
    """Return a known rate at another batch, and the rates to sweep where the rule was not tested."""
    if known.lr <= 0 or known.batch < 1:
        raise ValueError(f"base_lr is {known.lr:g}@{known.batch}: must be a rate above 0 at a batch of at least 1, as in 1e-3@256")
    if batch == known.batch and known.measured:
        return known.lr, (), Number("learning rate", known.lr, f"{known.lr:g}", known.fact.says, known.fact.source, "measured")
    growth, rule = batch / known.batch, FAMILIES[task.optimizer].lr_rule
    exponent = _measured_exponent(task, batch, known.batch)
    if exponent is not None:
        law = law_for(task)
        assert law is not None
        lr = round_rate(known.lr * growth**exponent)
        why = f"{known.lr:g} at {known.batch:,}, times ({batch:,}/{known.batch:,})^{exponent:.2f}; {known.fact.says}"
        return lr, (), Number("learning rate", lr, f"{lr:g}", why, f"{law.source}; {known.fact.source}", "medium")
    lr = known.lr * rate_factor(rule, growth)
    tested = 1 / RATE_RANGE <= growth <= RATE_RANGE
    # Outside the tested range the rule tends to overshoot, so the sweep reaches further down than up.
    sweep = () if tested else tuple(round_rate(lr * factor) for factor in (0.25, 0.5, 1, 2))
    ratio = f"{batch:,}/{known.batch:,}"
    why = f"{known.lr:g} at {known.batch:,}, times {ratio if rule == 'linear' else f'√({ratio})'}; {known.fact.says}"
    why += "" if tested else f"; outside the range in which the rule was tested ({RATE_RANGE} times larger or smaller)"
    source = f"{FACTS['linear' if rule == 'linear' else 'square root'].source}; {known.fact.source}"
    number = Number("learning rate", round_rate(lr), _shown(round_rate(lr), sweep), why, source, "medium" if tested else "low")
    return round_rate(lr), sweep, number


def _measured_exponent(task: TrainingTask, *batches: int) -> float | None:
    """Return the exponent of the batch in the best rate of Adam if it was measured for such a training at such batches."""
    law = law_for(task)
    if law is None or FAMILIES[task.optimizer].name != "adam" or task.kind not in ("image-text", "embedder"):
        return None
    return law.rate_exponent if all(law.batches[0] <= batch <= law.batches[1] for batch in batches) else None


def _shown(lr: float, sweep: tuple[float, ...]) -> str:
    return f"{lr:g}" + (f", sweep {', '.join(f'{rate:g}' for rate in sweep)}" if sweep else "")


def _number(name: str, advice: Advice, shown: str | None = None) -> Number:
    return Number(name, advice.value, shown or f"{advice.value:g}", advice.why, advice.source, advice.confidence)


def _epochs(seen: int, data: int) -> Number:
    return Number(
        "epochs", seen / data, f"{seen / data:.3g}", f"{seen:,} samples seen / {data:,} in the data", "arithmetic", "high"
    )
