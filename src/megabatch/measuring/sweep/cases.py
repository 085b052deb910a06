"""Which runs a sweep needs, as arithmetic: rates around a rule, more where the best lies at the edge, seeds for the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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


class Choice(NamedTuple):
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


def choice(space: Space, scores: Mapping[Case, float], batch: int) -> Choice | None:
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
    return Choice(rate(space.middles[batch], best), decay, edge, len(set(known) - set(space.factors)))


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
