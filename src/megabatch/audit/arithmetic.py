"""The numbers that rules compare with and put in place of others: learning rate, warm-up and batch."""

from __future__ import annotations

import math
from typing import Any

from ..optimizers import FAMILIES, rate_factor
from .training import Training

# Steps that a contrastive training needs: below the first it falls steeply, above the second batches of any size did equally well.
FEWEST_UPDATES, ENOUGH_UPDATES = 2_000, 15_000
# The batch from which plain InfoNCE is comfortable, and the one above which no published comparison gains.
FLOOR = 4_096
CEILING = 262_144
# No fix proposes a contrastive batch below this; a longer run is the better advice then. Ours, not a paper's.
SMALLEST = 64
# The longest share of a run that a fix spends on warm-up; ours, not a paper's.
WARMUP_SHARE = 0.1


def scaled_rate(lr: float, batch: int, other: int, optimizer: str) -> float:
    """The learning rate at another batch: linear for SGD, by the square root for Adam."""
    return lr * rate_factor(FAMILIES[optimizer].lr_rule, other / batch)


def wanted_warmup(training: Training) -> int | None:
    """Steps of warm-up: 2/(1−β2) for Adam, five epochs for SGD at a large batch; never more than a tenth of the run."""
    if training.family is None or not training.family.scaling_is_studied:
        return None
    if training.family.uses_beta2 and training.beta2 is not None:
        steps: float = 2 / (1 - training.beta2)
    elif not training.family.uses_beta2 and training.data is not None and training.size is not None:
        steps = 5 * training.data / training.size
    else:
        return None
    limit = math.inf if training.updates is None else training.updates * WARMUP_SHARE
    return max(1, math.floor(min(steps, limit) + 1e-6))


def affordable_batch(training: Training) -> int | None:
    """The largest power of two that leaves enough updates in the run, unless that is too small to learn from."""
    limit = 0 if training.seen is None else training.seen // FEWEST_UPDATES
    return power_of_two(limit) if limit >= SMALLEST else None


def power_of_two(limit: int) -> int:
    """The largest power of two up to a limit."""
    return 1 << (max(1, limit).bit_length() - 1)


def rebatched(training: Training, batch: int) -> dict[str, Any]:
    """The facts of the same training at another batch: with it go the learning rate, the chunk and the warm-up."""
    parts = (training.ranks or 1) * (training.accumulation or 1)
    batch = max(1, batch // parts) * parts
    changes: dict[str, Any] = {"batch": batch}
    if training.lr is not None and training.optimizer is not None and training.size is not None:
        lr, base = training.lr, training.size
        if training.base_lr is not None and training.base_batch is not None:
            lr, base = training.base_lr, training.base_batch
        changes["lr"] = rounded(scaled_rate(lr, base, batch, training.optimizer))
    if training.chunk is not None and training.ranks is not None and training.chunk > -(-batch // training.ranks):
        changes["chunk"] = -(-batch // training.ranks)
    after = training.changed(changes)
    wanted, steps = wanted_warmup(after), after.warmup_steps
    if training.warmup and wanted is not None and steps is not None and not wanted <= steps < (after.updates or math.inf):
        changes["warmup"] = wanted
    return changes


def rounded(value: float) -> float:
    """Two digits: a rate that follows a rule of thumb has no more."""
    return float(f"{value:.2g}")
