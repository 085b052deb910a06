"""What follows from a batch: learning rate, warm-up, β2, decay, averages. Rules are starts for a sweep, and say so."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from ..optimizers import DEFAULT, OPTIMIZERS, WEIGHT_DECAY, OptimizerName, rate_factor
from .evidence import FACTS, Fact, Number

# Rules for the rate were tried over some sixteenfold; beyond that one sweeps.
RANGE = 16
# From here on a contrastive batch is large to β2, and a model no longer small to its learning rate.
LARGE_BATCH, LARGE_MODEL = 16_384, 20_000_000
SMALL_BASE, LARGE_BASE = (1e-3, 256), (5e-4, 32_768)
EPOCHS_OF_WARMUP = 5


class Hyperparameters(NamedTuple):
    """What a run's optimizer and schedule are given. warmup: steps. sweep: rates to try, lowest first; empty where none is due."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    warmup: int
    ema: float | None
    label_smoothing: float
    steps: int
    sweep: tuple[float, ...]
    numbers: tuple[Number, ...]


class Base(NamedTuple):
    """Where rules start: a learning rate that is right at a batch; likewise a decay of averages, where one is wanted."""

    lr: float
    batch: int
    fact: Fact
    weight_decay: float = WEIGHT_DECAY
    ema: tuple[float, int] | None = None

    @property
    def measured(self) -> bool:
        """Whether the rate is the best of several that were tried on the very problem."""
        return self.fact.confidence == "measured"


GIVEN = Fact("the base that was given", "given", "medium")


def base_for(objective: str, parameters: int, optimizer: str, given: tuple[float, int] | None = None, fact: Fact = GIVEN) -> Base:
    """The stated base, with what is known of it, or the usual one of the objective and the size of the model."""
    if given is not None:
        lr, batch = given
        if lr <= 0 or batch < 1:
            raise ValueError(f"base_lr is {lr:g}@{batch}: a rate above 0 at a batch of at least 1, as in 1e-3@256")
        return Base(lr, batch, fact)
    spec = OPTIMIZERS[optimizer]
    if spec.base_lr is not None:
        return Base(spec.base_lr, spec.base_batch, FACTS[spec.lr_fact], weight_decay=spec.base_weight_decay)
    if objective == "contrastive" and parameters >= LARGE_MODEL:
        return Base(*LARGE_BASE, FACTS["published rate"], weight_decay=0.2)
    return Base(*SMALL_BASE, FACTS["small towers"])


def follow(
    batch: int,
    seen: int,
    data: int,
    base: Base,
    *,
    optimizer: OptimizerName = DEFAULT,
    objective: str = "contrastive",
    smoothed: bool = True,
) -> Hyperparameters:
    """Everything that follows from a batch, with its reasons. smoothed: whether the loss has label smoothing."""
    steps = math.ceil(seen / batch)
    betas = (0.9, _beta2(batch, objective))
    lr, sweep = _rate(batch, base, optimizer, objective)
    warmup = _warmup(steps, betas[1], batch, data, optimizer)
    ema = None if base.ema is None else base.ema[0] ** (batch / base.ema[1])
    small = objective == "supervised" or (objective == "contrastive" and data < 1_000_000)
    smoothing = 0.1 if smoothed and small else 0.0
    numbers = [
        _rate_number(lr, sweep, batch, base, optimizer, objective),
        _warmup_number(warmup, steps, betas[1], optimizer),
        Number("weight decay", base.weight_decay, f"{base.weight_decay:g}", *_decay_reasons(base, batch, optimizer)),
        Number("steps", steps, f"{steps:,}", f"{seen:,} samples / {batch:,}", "arithmetic", "high"),
        Number("epochs", seen / data, f"{seen / data:.3g}", f"{seen:,} samples of {data:,}", "arithmetic", "high"),
    ]
    if OPTIMIZERS[optimizer].uses_beta2:
        fact = FACTS["beta2 in tokens" if objective == "lm" else "beta2"]
        numbers.insert(2, Number("β2", betas[1], f"{betas[1]:g}", fact.says, fact.source, fact.confidence))
    if ema is not None:
        fact = FACTS["ema"]
        numbers.append(Number("EMA", ema, f"{ema:.6g}", fact.says, fact.source, fact.confidence))
    if smoothing:
        why = "small data is learnt by heart: soften the targets, and compare with 0"
        numbers.append(Number("label smoothing", smoothing, f"{smoothing:g}", why, "a habit", "low"))
    return Hyperparameters(lr, betas, base.weight_decay, warmup, ema, smoothing, steps, sweep, tuple(numbers))


def _beta2(batch: int, objective: str) -> float:
    if objective == "contrastive":
        return 0.95 if batch >= LARGE_BATCH else 0.98
    return 0.95 if objective == "lm" else 0.999


def _rate(batch: int, base: Base, optimizer: str, objective: str) -> tuple[float, tuple[float, ...]]:
    growth = batch / base.batch
    if growth == 1 and base.measured:
        return base.lr, ()
    lr = base.lr * rate_factor(OPTIMIZERS[optimizer].lr_rule, growth)
    if objective == "finetune" and not base.measured:
        lr /= 10 * math.sqrt(10)
        return _rounded(lr), tuple(_rounded(lr * factor) for factor in (10**-0.5, 1, 10**0.5))
    if 1 / RANGE <= growth <= RANGE:
        return _rounded(lr), ()
    # Beyond the sourced range the rule's own answer is the middle of what to try.
    return _rounded(lr), tuple(_rounded(lr * factor) for factor in (0.25, 0.5, 1, 2))


def _rate_number(lr: float, sweep: tuple[float, ...], batch: int, base: Base, optimizer: str, objective: str) -> Number:
    rule = FACTS[OPTIMIZERS[optimizer].lr_fact]
    growth = f"{batch:,}/{base.batch:,}"
    factor = growth if OPTIMIZERS[optimizer].lr_rule == "linear" else f"√({growth})"
    why = f"{base.lr:g} at {base.batch:,}, times {factor}; {base.fact.says}"
    if objective == "finetune" and not base.measured:
        why += ", 10 to 100 times lower for fine-tuning (a habit, not a law)"
    shown = f"{lr:g}" + (f", sweep {', '.join(f'{rate:g}' for rate in sweep)}" if sweep else "")
    why += (
        f"; outside the range in which the rule was tried ({RANGE} times either way)" if sweep and objective != "finetune" else ""
    )
    if base.measured and batch == base.batch:
        return Number("learning rate", lr, shown, base.fact.says, base.fact.source, "measured")
    confidence = "low" if sweep else "medium" if base.measured else base.fact.confidence
    return Number("learning rate", lr, shown, why, f"{rule.source}; {base.fact.source}", confidence)


def _warmup(steps: int, beta2: float, batch: int, data: int, optimizer: str) -> int:
    wanted = round(2 / (1 - beta2)) if OPTIMIZERS[optimizer].uses_beta2 else math.ceil(EPOCHS_OF_WARMUP * data / batch)
    # A fifth of the run at most: what warms up has to train too.
    return max(1, min(wanted, steps // 5))


def _warmup_number(warmup: int, steps: int, beta2: float, optimizer: str) -> Number:
    fact = FACTS[OPTIMIZERS[optimizer].warmup_fact]
    why = fact.says + (f", at β2 = {beta2:g}" if OPTIMIZERS[optimizer].uses_beta2 else "")
    why += f"; no more than a fifth of the {steps:,} steps" if warmup == steps // 5 else ""
    return Number("warm-up", warmup, f"{warmup:,} steps", why, fact.source, fact.confidence)


def _decay_reasons(base: Base, batch: int, optimizer: str) -> tuple[str, str, Literal["medium", "low"]]:
    if not OPTIMIZERS[optimizer].scales_decay:
        return "fixed", FACTS[OPTIMIZERS[optimizer].lr_fact].source, "medium"
    factor = math.sqrt(batch / base.batch)
    why = (
        f"the usual one; {FACTS['decay'].says} would make it {base.weight_decay * factor:.2g} where it was tuned at {base.batch:,}"
    )
    return why, FACTS["decay"].source, "low"


def _rounded(number: float) -> float:
    """To two digits: more would claim what no rule knows."""
    return float(f"{number:.2g}")
