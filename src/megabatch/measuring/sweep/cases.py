"""The runs of a sweep: which ones are needed next, and the configuration of each. Pure arithmetic; nothing here trains.

For every batch, learning rates around the scaling rule come first, further ones if the best is the lowest or the highest that was
tried, then weight decays, and then more seeds of the best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from ... import config
from ...evidence import MOST_WARMUP, RATE_RANGE, ema_at, round_rate
from ...optimizers import closest, rate_factor
from ...training.schedules import step_schedule

Same = Literal["samples", "updates", "time"]
Edge = Literal["lowest", "highest"]
# The score of a run without a result.
FAILED = -math.inf
# Steps of a pilot run, which measures the speed of a batch, and its held-out pairs, whose quality nobody uses.
PILOT_STEPS, PILOT_PAIRS = 8, 64


class Case(NamedTuple):
    """What distinguishes one run of a sweep from the others."""

    batch: int
    lr: float
    weight_decay: float
    seed: int


@dataclass(frozen=True)
class Space:
    """The search space of a sweep.

    middles: the learning rate that the scaling rule gives at each batch. factors: of that rate, tried at every batch. decays:
    weight decays, the run's own first. extend: how many further factors may be tried at each batch if the best is at an edge.
    """

    middles: Mapping[int, float]
    factors: tuple[float, ...]
    decays: tuple[float, ...]
    seeds: tuple[int, ...]
    extend: int


class ChosenRate(NamedTuple):
    """The learning rate and weight decay that are best at a batch, by the first seed.

    edge: whether the rate is the lowest or the highest that was tried; None if there are others on both sides, or no others.
    extended: the number of rates that were tried beyond the requested factors.
    """

    lr: float
    weight_decay: float
    edge: Edge | None
    extended: int


def rate(middle: float, factor: float) -> float:
    """Return a learning rate, or weight decay, rounded to three digits; `middle` itself is not rounded.

    >>> rate(0.004, 0.5), rate(0.0012345, 1), rate(0.0012345, 2)
    (0.002, 0.0012345, 0.00247)
    """
    return middle if factor == 1 else float(f"{middle * factor:.3g}")


def needed_cases(space: Space, scores: Mapping[Case, float]) -> list[Case]:
    """Return the runs that are needed next, the middle rates of all batches first; none if the sweep is complete.

    scores: of the runs that ended, FAILED for those without a result.
    """
    needed = [entry for batch in sorted(space.middles) for entry in _needed_at(space, scores, batch)]
    return [case for _, case in sorted(needed, key=lambda entry: entry[0])]


def remaining(space: Space, scores: Mapping[Case, float]) -> int:
    """Return how many runs are left, if none of them changes what is best and no best rate is at an edge."""
    known = dict(scores)
    while missing := needed_cases(space, known):
        known |= dict.fromkeys(missing, -1.0)
    return len(known) - len(scores)


def chosen_rate(space: Space, scores: Mapping[Case, float], batch: int) -> ChosenRate | None:
    """Return the best rate and decay at a batch, as far as is known; None if every run failed."""
    factors = _factors(space, scores, batch)
    known = [factor for factor in factors if _case(space, batch, factor) in scores]
    best = _best(space, scores, batch, known)
    if best is None:
        return None
    edge: Edge | None = None
    if len(known) > 1:
        edge = "lowest" if best == min(known) else "highest" if best == max(known) else None
    decays = [decay for decay in space.decays if _case(space, batch, best, decay) in scores]
    # The run's own decay wins a tie: it is first, and max returns the first.
    decay = max(decays, key=lambda decay: scores[_case(space, batch, best, decay)])
    return ChosenRate(rate(space.middles[batch], best), decay, edge, len(set(known) - set(space.factors)))


def middle_rate(base: config.Run, batch: int) -> float:
    """Return the learning rate at a batch by the plan's rule, from the base run's own: linear for SGD, square root for others."""
    if batch == base.batch.size:
        return base.optimizer.lr
    return round_rate(base.optimizer.lr * rate_factor(closest(base.optimizer.name).lr_rule, batch / base.batch.size))


def rule_in_words(base: config.Run, batches: tuple[int, ...]) -> str:
    """Return a sentence on how the learning rate scales with the batch, and on batches for which the rule is not proven."""
    linear = closest(base.optimizer.name).lr_rule == "linear"
    rule = "in proportion to the batch" if linear else "with the square root of the batch"
    sentence = f"The middle rate grows {rule}, from {base.optimizer.lr:g} at {base.batch.size:,}."
    far = [batch for batch in batches if not 1 / RATE_RANGE <= batch / base.batch.size <= RATE_RANGE]
    if not far:
        return sentence
    names = " and ".join(f"{batch:,}" for batch in far)
    return f"{sentence} The rule has been tested up to a factor of {RATE_RANGE} in either direction, and not at {names}."


def length_of(base: config.Run, same: Same, batch: int, pairs: float = 0.0) -> dict[str, int]:
    """Return the length of a run at a batch, {"samples": …} or {"steps": …}. The base run's length must not be in epochs.

    pairs: for same="time", the pairs that the batch processes in that time; rounded to whole steps, at least one.
    """
    steps = step_schedule(base, 0)
    if same == "updates":
        return {"steps": len(steps)}
    if same == "time":
        return {"samples": batch * max(1, round(pairs / batch))}
    return {"samples": steps.samples}


def run_of(base: config.Run, case: Case, length: Mapping[str, int], folder: Path) -> config.Run:
    """Return the checked run of a case: the base run with the case's settings, and those that follow from them."""
    start = base.batch.start
    size = replace(base.batch, size=case.batch, start=start and max(1, round(start * case.batch / base.batch.size)))
    if size.schedule == "noise":
        # A batch that changes by itself cannot be compared with others.
        size = replace(size, schedule="constant")
    schedule = replace(base.schedule, samples=length.get("samples"), steps=length.get("steps"))
    run = replace(
        base,
        out=str(folder / "runs" / name_of(base, case)),
        seed=case.seed,
        batch=size,
        optimizer=replace(base.optimizer, lr=case.lr, weight_decay=case.weight_decay, ema=_ema_at(base, case.batch)),
        schedule=schedule,
        checkpoint=replace(base.checkpoint, keep=1),
        watch=replace(base.watch, bar=False, report=False),
        evaluate=replace(base.evaluate, every=None, large=()),
        planned=config.Planned(),
    )
    run = config.without_unused(run)
    run = replace(run, schedule=replace(schedule, warmup=_warmup(base, case.batch, len(step_schedule(run, 0)))))
    config.check(run)
    return run


def pilot_of(base: config.Run, batch: int, folder: Path) -> config.Run:
    """Return a run of a few steps at a batch, which measures its speed."""
    case = Case(batch, middle_rate(base, batch), base.optimizer.weight_decay, base.seed)
    run = run_of(base, case, {"steps": PILOT_STEPS}, folder)
    return replace(run, out=str(folder / "pilots" / f"{batch}"), evaluate=replace(run.evaluate, limit=PILOT_PAIRS))


def name_of(base: config.Run, case: Case) -> str:
    """Return the name of a case's folder, which no other case of the sweep has.

    >>> name_of(config.Run(), Case(256, 0.002, 0.1, 0)), name_of(config.Run(), Case(256, 0.002, 0.05, 1))
    ('256-0.002-0', '256-0.002-decay0.05-1')
    """
    decay = "" if case.weight_decay == base.optimizer.weight_decay else f"decay{case.weight_decay!r}-"
    return f"{case.batch}-{case.lr!r}-{decay}{case.seed}"


def _needed_at(space: Space, scores: Mapping[Case, float], batch: int) -> list[tuple[int, Case]]:
    """Return what one batch needs next, with its priority: its rates, then decays at the best rate, then the other seeds."""
    rates = [_case(space, batch, factor) for factor in _factors(space, scores, batch)]
    chosen = chosen_rate(space, scores, batch) if all(case in scores for case in rates) else None
    if chosen is None:
        return [(place, case) for place, case in enumerate(rates) if case not in scores]
    decays = [Case(batch, chosen.lr, decay, space.seeds[0]) for decay in space.decays]
    seeds = [Case(batch, chosen.lr, chosen.weight_decay, seed) for seed in space.seeds]
    missing = [case for case in decays if case not in scores] or [case for case in seeds if case not in scores]
    return [(len(rates) + place, case) for place, case in enumerate(missing)]


def _factors(space: Space, scores: Mapping[Case, float], batch: int) -> list[float]:
    """Return the factors of a batch, nearest to the rule first, and the next one beyond an edge at which the best is."""
    factors = sorted(set(space.factors), key=_distance)
    for _ in range(space.extend):
        if len(factors) < 2 or any(_case(space, batch, factor) not in scores for factor in factors):
            break
        best, ordered = _best(space, scores, batch, factors), sorted(factors)
        if best == ordered[0]:
            factors.append(best**2 / ordered[1])
        elif best is not None and best == ordered[-1]:
            factors.append(best**2 / ordered[-2])
    return factors


def _best(space: Space, scores: Mapping[Case, float], batch: int, factors: Sequence[float]) -> float | None:
    """Return the factor with the highest score; of equal scores the nearest to the rule."""
    ended = {factor: scores[_case(space, batch, factor)] for factor in factors}
    finite = {factor: score for factor, score in ended.items() if score > FAILED}
    return max(finite, key=lambda factor: (finite[factor], -_distance(factor)), default=None)


def _case(space: Space, batch: int, factor: float, decay: float | None = None) -> Case:
    return Case(batch, rate(space.middles[batch], factor), space.decays[0] if decay is None else decay, space.seeds[0])


def _distance(factor: float) -> float:
    return abs(math.log(factor))


def _warmup(base: config.Run, batch: int, steps: int) -> float:
    """Return the warm-up at a batch.

    A fraction stays as it is. A number of steps stays for Adam, whose averages count steps, and follows the samples for SGD. It is
    cut where it would take more of a shorter run than a fifth, or than it takes of the base run.
    """
    given = base.schedule.warmup
    if given < 1:
        return given
    base_steps = len(step_schedule(base, 0))
    if (batch, steps) == (base.batch.size, base_steps):
        return given
    uncut = given if closest(base.optimizer.name).uses_beta2 else given * base.batch.size / batch
    return float(max(1, min(round(uncut), int(max(MOST_WARMUP, given / base_steps) * steps))))


def _ema_at(base: config.Run, batch: int) -> float | None:
    """Return the decay of the moving average at a batch, or None without an average."""
    return None if base.optimizer.ema is None else ema_at(base.optimizer.ema, batch / base.batch.size)
