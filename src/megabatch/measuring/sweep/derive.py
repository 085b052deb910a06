"""The run of each case: the base run at another batch, rate, decay and seed, with all that follows from them, and its length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ... import config
from ...optimizers import closest
from ...planning.hyperparameters import RANGE, Settings, base_for, follow
from ...training.schedules import course
from .cases import Case

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
    steps = course(base, 0)
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
    run = replace(run, schedule=replace(schedule, warmup=_warmup(base, case.batch, len(course(run, 0)))))
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
    own = len(course(base, 0))
    if (batch, steps) == (base.batch.size, own):
        return given
    steady = given if closest(base.optimizer.name).uses_beta2 else given * base.batch.size / batch
    return float(max(1, min(round(steady), int(max(MOST_WARMUP, given / own) * steps))))


def _follow(base: config.Run, batch: int) -> Settings:
    """What the plan lets follow from a batch; its rate and average depend on neither the data nor the length, which are made up."""
    average = None if base.optimizer.ema is None else (base.optimizer.ema, base.batch.size)
    known = base_for("", 0, "", (base.optimizer.lr, base.batch.size))._replace(ema=average)
    return follow(batch, batch, batch, known, optimizer=closest(base.optimizer.name).name)
