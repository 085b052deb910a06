"""Learning rate, warm-up, β2, weight decay and moving average for a batch. The rules are starting points for a sweep."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..evidence import FACTS, MOST_WARMUP, PRETRAINING_RATE, RATE_RANGE, Fact, adam_warmup, ema_at, round_rate, sgd_warmup
from ..optimizers import DEFAULT, OPTIMIZERS, WEIGHT_DECAY, OptimizerName, rate_factor
from .plan import Number

# Contrastive batches of this size need a faster β2; models of this size have a published learning rate.
LARGE_BATCH, LARGE_MODEL = 16_384, 20_000_000
# Learning rate and batch from which the rules scale, for small and for large models.
SMALL_BASE, LARGE_BASE = (1e-3, 256), (PRETRAINING_RATE, 32_768)
# Contrastive runs on less data than this, and all supervised runs, get label smoothing.
SMALL_DATA, SMOOTHING = 1_000_000, 0.1


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


class BaseRecipe(NamedTuple):
    """The training that the rules scale from: a learning rate that is right at a batch, with its source.

    ema: decay of the moving average and the batch for which it is right. smoothed: whether the loss supports label smoothing.
    """

    lr: float
    batch: int
    fact: Fact
    optimizer: OptimizerName = DEFAULT
    objective: str = "contrastive"
    weight_decay: float = WEIGHT_DECAY
    ema: tuple[float, int] | None = None
    smoothed: bool = True

    @property
    def measured(self) -> bool:
        """Whether the rate is the best of several that were tried on this very problem."""
        return self.fact.confidence == "measured"

    @property
    def lowered(self) -> bool:
        """Whether the rate is lowered for fine-tuning."""
        return self.objective == "finetune" and not self.measured


GIVEN = Fact("the rate that was given", "given", "medium")


def base_recipe(
    objective: str,
    parameters: int,
    optimizer: OptimizerName,
    given: tuple[float, int] | None = None,
    fact: Fact = GIVEN,
) -> BaseRecipe:
    """Return the recipe with the given (rate, batch), or the usual one for the objective and the size of the model."""
    if given is not None:
        lr, batch = given
        if lr <= 0 or batch < 1:
            raise ValueError(f"base_lr is {lr:g}@{batch}: must be a rate above 0 at a batch of at least 1, as in 1e-3@256")
        return BaseRecipe(lr, batch, fact, optimizer, objective)
    spec = OPTIMIZERS[optimizer]
    if spec.base_lr is not None:
        fact = FACTS[spec.lr_fact]
        return BaseRecipe(spec.base_lr, spec.base_batch, fact, optimizer, objective, weight_decay=spec.base_weight_decay)
    if objective == "contrastive" and parameters >= LARGE_MODEL:
        return BaseRecipe(*LARGE_BASE, FACTS["clip rate"], optimizer, objective, weight_decay=0.2)
    return BaseRecipe(*SMALL_BASE, FACTS["small towers"], optimizer, objective)


def derive_hyperparameters(batch: int, seen: int, data: int, base: BaseRecipe) -> Hyperparameters:
    """Return the hyperparameters at a batch, each with its reason."""
    steps = math.ceil(seen / batch)
    betas = (0.9, _beta2(batch, base.objective))
    lr, sweep = _rate(batch, base)
    warmup = _warmup(steps, betas[1], batch, data, base.optimizer)
    ema = None if base.ema is None else ema_at(base.ema[0], batch / base.ema[1])
    small = base.objective == "supervised" or (base.objective == "contrastive" and data < SMALL_DATA)
    smoothing = SMOOTHING if base.smoothed and small else 0.0
    numbers = [
        _rate_number(lr, sweep, batch, base),
        _warmup_number(warmup, steps, betas[1], base.optimizer),
        _decay_number(batch, base),
        Number("steps", steps, f"{steps:,}", f"{seen:,} samples / {batch:,}", "arithmetic", "high"),
        Number("epochs", seen / data, f"{seen / data:.3g}", f"{seen:,} samples seen / {data:,} in the data", "arithmetic", "high"),
    ]
    if OPTIMIZERS[base.optimizer].uses_beta2:
        fact = FACTS["beta2 in tokens" if base.objective == "lm" else "beta2"]
        numbers.insert(2, Number("β2", betas[1], f"{betas[1]:g}", fact.says, fact.source, fact.confidence))
    if ema is not None:
        fact = FACTS["ema"]
        numbers.append(Number("EMA", ema, f"{ema:.6g}", fact.says, fact.source, fact.confidence))
    if smoothing:
        why = "a model memorizes small data: soften the targets, and compare with 0"
        numbers.append(Number("label smoothing", smoothing, f"{smoothing:g}", why, "common practice", "low"))
    return Hyperparameters(lr, betas, base.weight_decay, warmup, ema, smoothing, steps, sweep, tuple(numbers))


def _beta2(batch: int, objective: str) -> float:
    if objective == "contrastive":
        return 0.95 if batch >= LARGE_BATCH else 0.98
    return 0.95 if objective == "lm" else 0.999


def _rate(batch: int, base: BaseRecipe) -> tuple[float, tuple[float, ...]]:
    """Return the learning rate at a batch, and the rates to sweep where the rule is not trusted."""
    growth = batch / base.batch
    if growth == 1 and base.measured:
        return base.lr, ()
    lr = base.lr * rate_factor(OPTIMIZERS[base.optimizer].lr_rule, growth)
    if base.lowered:
        lr /= 10 * math.sqrt(10)
        return round_rate(lr), tuple(round_rate(lr * factor) for factor in (10**-0.5, 1, 10**0.5))
    if 1 / RATE_RANGE <= growth <= RATE_RANGE:
        return round_rate(lr), ()
    # Outside the tested range the rule tends to overshoot, so the sweep reaches further down than up.
    return round_rate(lr), tuple(round_rate(lr * factor) for factor in (0.25, 0.5, 1, 2))


def _rate_number(lr: float, sweep: tuple[float, ...], batch: int, base: BaseRecipe) -> Number:
    shown = f"{lr:g}" + (f", sweep {', '.join(f'{rate:g}' for rate in sweep)}" if sweep else "")
    if base.measured and batch == base.batch:
        return Number("learning rate", lr, shown, base.fact.says, base.fact.source, "measured")
    spec = OPTIMIZERS[base.optimizer]
    ratio = f"{batch:,}/{base.batch:,}"
    why = f"{base.lr:g} at {base.batch:,}, times {ratio if spec.lr_rule == 'linear' else f'√({ratio})'}; {base.fact.says}"
    if base.lowered:
        why += "; lowered 10 to 100 times for fine-tuning (common practice, not a law)"
    if sweep and base.objective != "finetune":
        why += f"; outside the range in which the rule was tested ({RATE_RANGE} times larger or smaller)"
    confidence = "low" if sweep else "medium" if base.measured else base.fact.confidence
    return Number("learning rate", lr, shown, why, f"{FACTS[spec.lr_fact].source}; {base.fact.source}", confidence)


def _warmup(steps: int, beta2: float, batch: int, data: int, optimizer: OptimizerName) -> int:
    wanted = round(adam_warmup(beta2)) if OPTIMIZERS[optimizer].uses_beta2 else math.ceil(sgd_warmup(data, batch))
    return max(1, min(wanted, int(MOST_WARMUP * steps)))


def _warmup_number(warmup: int, steps: int, beta2: float, optimizer: OptimizerName) -> Number:
    spec = OPTIMIZERS[optimizer]
    fact = FACTS[spec.warmup_fact]
    why = fact.says + (f", at β2 = {beta2:g}" if spec.uses_beta2 else "")
    why += f"; at most a fifth of the {steps:,} steps" if warmup == int(MOST_WARMUP * steps) else ""
    return Number("warm-up", warmup, f"{warmup:,} steps", why, fact.source, fact.confidence)


def _decay_number(batch: int, base: BaseRecipe) -> Number:
    decay, spec = base.weight_decay, OPTIMIZERS[base.optimizer]
    if not spec.scales_decay:
        return Number("weight decay", decay, f"{decay:g}", "the usual value", FACTS[spec.lr_fact].source, "medium")
    scaled = decay * math.sqrt(batch / base.batch)
    why = f"the usual value; {FACTS['decay'].says} would give {scaled:.2g} if it was tuned at {base.batch:,}"
    return Number("weight decay", decay, f"{decay:g}", why, FACTS["decay"].source, "low")
