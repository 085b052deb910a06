"""Samples that fit into a budget of hours or money, and the hours that are too many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ..recipes import usual_epochs
from .choose_batch import choose_batch, task_of
from .estimator import Estimator
from .problem import Problem

# Repetitions of "seen → batch → time → seen". Time per sample hardly depends on the batch, so that two or three are enough.
MOST_ROUNDS = 12
# Share of the hours that a plan must use to be accepted, and that it aims at: the batch is rounded to a power of two.
LEAST_USED, AIM = 0.95, 0.98
# Hours beyond which a run is long, and beyond which it is not a plan any more.
LONG_HOURS, ABSURD_HOURS = 30 * 24, 365 * 24


class Spending(NamedTuple):
    """A problem whose samples fit into its budget, and what that means for the user."""

    problem: Problem
    estimator: Estimator
    why: str = ""
    notes: tuple[str, ...] = ()


def hours_allowed(problem: Problem) -> float | None:
    """Return the hours that the request allows, by time and by money; None if it names neither."""
    request = problem.request
    allowed = [] if request.hours is None else [request.hours]
    if request.budget is not None and request.price is not None:
        allowed.append(request.budget / (request.price * problem.machine.gpus))
    return min(allowed, default=None)


def within_budget(problem: Problem, estimator: Estimator) -> Spending:
    """Return the problem with as many samples seen as the hours or the money of the request allow.

    Samples or epochs that the request names stay. More than the usual epochs are not planned, because the data repeats.
    """
    request, hours = problem.request, hours_allowed(problem)
    if hours is None or request.seen is not None or request.epochs is not None:
        return Spending(problem, estimator)
    data = problem.budget.data
    task = task_of(problem)
    usual = usual_epochs(task.kind, task.start, data)

    def at(seen: int) -> tuple[Problem, Estimator]:
        changed = replace(problem, budget=problem.budget._replace(seen=max(1, seen)))
        return changed, replace(estimator, problem=changed)

    most = round(usual * data)
    taken = hours_of(*at(most))
    limits = f"{hours:,.3g} h" + (f" for {request.budget:,g} at {request.price:g} per GPU-hour" if request.budget else "")
    if taken <= hours:
        whole, found = at(most)
        note = (
            f"The budget of {limits} allows {usual * hours / taken:,.3g} epochs. Planned are {usual:g}, the usual number; give"
            " epochs=… to train longer."
        )
        length = f"{usual:g} epoch{'' if usual == 1 else 's'}, the usual number"
        return Spending(whole, found, f"{length}, fewer than the budget of {limits} allows", (note,))
    seen = fit_seen(hours, most, lambda number: hours_of(*at(number)))
    within, found = at(seen)
    notes = []
    if seen < data:
        notes.append(f"The budget of {limits} does not see all data once: {seen:,} of {data:,} samples.")
    return Spending(within, found, f"what {limits} allow at the predicted speed", tuple(notes))


def fit_seen(hours: float, most: int, hours_at: Callable[[int], float]) -> int:
    """Return the samples seen that take nearly `hours`, but not more. ValueError if not even one step fits.

    >>> fit_seen(10.0, 10**6, lambda seen: seen / 5_000)
    49000
    """
    seen, best = most, 0
    for _ in range(MOST_ROUNDS):
        taken = hours_at(seen)
        if taken <= hours:
            best = max(best, seen)
            if taken >= LEAST_USED * hours:
                break
        following = min(most, int(AIM * seen * hours / taken))
        if following in (0, seen):
            break
        seen = following
    if best == 0:
        raise ValueError(f"{hours:.3g} h do not allow a single step of this model on this machine; allow more, or take more GPUs")
    return best


def hours_of(problem: Problem, estimator: Estimator) -> float:
    """Return the hours of a problem at the batch that it needs."""
    batch = choose_batch(problem, estimator).batch
    steps = -(-problem.budget.seen // batch)
    return steps * estimator.checked(batch)[0].seconds / 3600


def time_warnings(problem: Problem, hours: float, cost: float | None) -> list[str]:
    """Return sentences on a run that takes far too long, or more than the request allows."""
    lines = []
    request, allowed = problem.request, hours_allowed(problem)
    if allowed is not None and hours > 1.02 * allowed:
        money = f" and costs {cost:,.3g}" if request.budget is not None and cost is not None else ""
        lines.append(
            f"The run takes {hours:,.3g} h{money}, more than the {allowed:,.3g} h that are allowed: lower the samples seen, or"
            " leave them out, and the plan takes what fits."
        )
    if hours > LONG_HOURS:
        length = (
            f"{hours / ABSURD_HOURS:,.{1 if hours < 100 * ABSURD_HOURS else 0}f} years"
            if hours > ABSURD_HOURS
            else f"{hours / 24:,.0f} days"
        )
        gpus = problem.machine.gpus * hours / (7 * 24)
        device = "accelerators" if problem.machine.device.type == "cpu" else f"about {gpus:,.0f} GPUs of this kind for a week's run"
        lines.append(
            f"The run takes {length} on {problem.machine.gpus} × {problem.machine.device.name}: use {device}, see fewer samples, or"
            " fine-tune a pretrained model."
        )
    return lines
