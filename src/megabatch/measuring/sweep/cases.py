"""Which runs a sweep needs, as arithmetic: rates around a rule, more where the best lies at the edge, seeds for the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from ... import config
from ...optimizers import closest
from ...planning.hyperparameters import RANGE, Hyperparameters, base_for, follow
from ...training.schedules import step_schedule

Edge = Literal["lowest", "highest"]
FAILED = -math.inf


class Case(NamedTuple):
    """One run of a sweep."""

    batch: int
    lr: float
    weight_decay: float
    seed: int


@dataclass(frozen=True)
class Space:
    """What is searched. middles: the rate that the rule gives at each batch. factors: of it, tried at every batch. decays: weight
    decays, the usual one first. extend: how many further factors may follow beyond an edge, for each batch."""

    middles: Mapping[int, float]
    factors: tuple[float, ...]
    decays: tuple[float, ...]
    seeds: tuple[int, ...]
    extend: int


class ChosenRate(NamedTuple):
    """The rate and the decay that the first seed liked best at a batch.

    edge: whether the rate is the lowest or the highest that was tried; None where there are others on both sides, or it is the only
    one. extended: rates that were tried beyond the factors asked for.
    """

    lr: float
    weight_decay: float
    edge: Edge | None
    extended: int


def rate(middle: float, factor: float) -> float:
    """A rate, or a decay, as it is tried and written: three digits; the middle itself as it is.

    >>> rate(0.004, 0.5), rate(0.0012345, 1), rate(0.0012345, 2)
    (0.002, 0.0012345, 0.00247)
    """
    return middle if factor == 1 else float(f"{middle * factor:.3g}")


def wanted(space: Space, scores: Mapping[Case, float]) -> list[Case]:
    """The runs that are still needed by what is known, the middle rates of all batches first; none when the sweep is complete.

    scores: of the runs that came to an end; FAILED where one has none.
    """
    needed = [entry for batch in sorted(space.middles) for entry in _wanted(space, scores, batch)]
    return [case for _, case in sorted(needed, key=lambda entry: entry[0])]


def left(space: Space, scores: Mapping[Case, float]) -> int:
    """How many runs are still to come if none of them changes what is best, and no edge is met."""
    known = dict(scores)
    while missing := wanted(space, known):
        known |= dict.fromkeys(missing, -1.0)
    return len(known) - len(scores)


def choice(space: Space, scores: Mapping[Case, float], batch: int) -> ChosenRate | None:
    """What was chosen at a batch, as far as is known; None where every run failed."""
    factors = _factors(space, scores, batch)
    known = [factor for factor in factors if _case(space, batch, factor) in scores]
    best = _best(space, scores, batch, known)
    if best is None:
        return None
    edge: Edge | None = None
    if len(known) > 1:
        edge = "lowest" if best == min(known) else "highest" if best == max(known) else None
    decays = [decay for decay in space.decays if _case(space, batch, best, decay) in scores]
    # The usual decay wins a tie: it is first, and max keeps the first.
    decay = max(decays, key=lambda decay: scores[_case(space, batch, best, decay)])
    return ChosenRate(rate(space.middles[batch], best), decay, edge, len(set(known) - set(space.factors)))


def _wanted(space: Space, scores: Mapping[Case, float], batch: int) -> list[tuple[int, Case]]:
    """What one batch needs next, and when its turn is: its rates, then other decays at the best of them, then the other seeds."""
    rates = [_case(space, batch, factor) for factor in _factors(space, scores, batch)]
    chosen = choice(space, scores, batch) if all(case in scores for case in rates) else None
    if chosen is None:
        return [(place, case) for place, case in enumerate(rates) if case not in scores]
    decays = [Case(batch, chosen.lr, decay, space.seeds[0]) for decay in space.decays]
    seeds = [Case(batch, chosen.lr, chosen.weight_decay, seed) for seed in space.seeds]
    missing = [case for case in decays if case not in scores] or [case for case in seeds if case not in scores]
    return [(len(rates) + place, case) for place, case in enumerate(missing)]


def _factors(space: Space, scores: Mapping[Case, float], batch: int) -> list[float]:
    """The factors of a batch, those nearest to the rule first, and the next one beyond an edge at which the best lies."""
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
    """The factor with the highest score; of equal ones the nearest to the rule."""
    ended = {factor: scores[_case(space, batch, factor)] for factor in factors}
    finite = {factor: score for factor, score in ended.items() if score > FAILED}
    return max(finite, key=lambda factor: (finite[factor], -_distance(factor)), default=None)


def _case(space: Space, batch: int, factor: float, decay: float | None = None) -> Case:
    return Case(batch, rate(space.middles[batch], factor), space.decays[0] if decay is None else decay, space.seeds[0])


def _distance(factor: float) -> float:
    return abs(math.log(factor))


Same = Literal["samples", "updates", "time"]
# A run may warm up for this share of its steps, or for the share that the base run does, if that is more.
MOST_WARMUP = 0.2
# Steps that a pilot takes to find out how fast a batch is, and the held-out pairs that it is evaluated on, which nobody reads.
PILOT_STEPS, PILOT_PAIRS = 8, 64


def middle_rate(base: config.Run, batch: int) -> float:
    """The learning rate at a batch by the plan's rule, from the base run's own: linear for SGD, the square root for others."""
    return base.optimizer.lr if batch == base.batch.size else _follow(base, batch).lr


def rule_in_words(base: config.Run, batches: tuple[int, ...]) -> str:
    """How rates follow the batch, and whether the rule has been tried so far from the base."""
    rule = "in proportion to the batch" if closest(base.optimizer.name).lr_rule == "linear" else "with the square root of the batch"
    words = f"The middle rate grows {rule}, from {base.optimizer.lr:g} at {base.batch.size:,}."
    far = [batch for batch in batches if not 1 / RANGE <= batch / base.batch.size <= RANGE]
    if not far:
        return words
    names = " and ".join(f"{batch:,}" for batch in far)
    return f"{words} The rule was tried up to {RANGE} times either way, and not at {names}."


def length_of(base: config.Run, same: Same, batch: int, pairs: float = 0.0) -> dict[str, int]:
    """How long a run at a batch is: {"samples": …} or {"steps": …}. The base run's length is not in epochs.

    pairs: for the same time, how many the batch manages in it; rounded to whole steps, at least one.
    """
    steps = step_schedule(base, 0)
    if same == "updates":
        return {"steps": len(steps)}
    if same == "time":
        return {"samples": batch * max(1, round(pairs / batch))}
    return {"samples": steps.samples}


def derived(base: config.Run, case: Case, length: Mapping[str, int], folder: Path) -> config.Run:
    """The run of a case, checked. Its folder's name tells it from all others of the sweep."""
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
        optimizer=replace(base.optimizer, lr=case.lr, weight_decay=case.weight_decay, ema=_follow(base, case.batch).ema),
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


def pilot(base: config.Run, batch: int, folder: Path) -> config.Run:
    """A few steps at a batch, whose speed is all that matters."""
    case = Case(batch, middle_rate(base, batch), base.optimizer.weight_decay, base.seed)
    run = derived(base, case, {"steps": PILOT_STEPS}, folder)
    return replace(run, out=str(folder / "pilots" / f"{batch}"), evaluate=replace(run.evaluate, limit=PILOT_PAIRS))


def name_of(base: config.Run, case: Case) -> str:
    """The name of a case's folder.

    >>> name_of(config.Run(), Case(256, 0.002, 0.1, 0)), name_of(config.Run(), Case(256, 0.002, 0.05, 1))
    ('256-0.002-0', '256-0.002-decay0.05-1')
    """
    decay = "" if case.weight_decay == base.optimizer.weight_decay else f"decay{case.weight_decay!r}-"
    return f"{case.batch}-{case.lr!r}-{decay}{case.seed}"


def _warmup(base: config.Run, batch: int, steps: int) -> float:
    """A fraction stays one. Steps stay for Adam, whose averages count steps, and follow the samples for SGD; both are cut where
    they would take more of a shorter run than a fifth, or than they did of the base run."""
    given = base.schedule.warmup
    if given < 1:
        return given
    own = len(step_schedule(base, 0))
    if (batch, steps) == (base.batch.size, own):
        return given
    steady = given if closest(base.optimizer.name).uses_beta2 else given * base.batch.size / batch
    return float(max(1, min(round(steady), int(max(MOST_WARMUP, given / own) * steps))))


def _follow(base: config.Run, batch: int) -> Hyperparameters:
    """What the plan lets follow from a batch; its rate and average depend on neither the data nor the length, which are made up."""
    average = None if base.optimizer.ema is None else (base.optimizer.ema, base.batch.size)
    known = base_for("", 0, "", (base.optimizer.lr, base.batch.size))._replace(ema=average)
    return follow(batch, batch, batch, known, optimizer=closest(base.optimizer.name).name)
