"""Which batch is planned: the one given, the one that a sweep found, or the one that the problem's rules want."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from . import batch as batches
from .evidence import FACTS

if TYPE_CHECKING:
    from .planner import Planner


def choose(planner: Planner) -> batches.Choice:
    """The batch that the problem wants, a multiple of the ranks."""
    question, (data, _, seen), ranks = planner.question, planner.budget, planner.machine.gpus
    if planner.given is not None:
        notes = batches.judge(planner.given, seen, data, question.start, question.loss) if question.pairs else ()
        return batches.Choice(planner.given, math.ceil(seen / planner.given), "given", "given", "high", notes)
    if planner.known.sweep is not None and planner.known.same_data:
        choice = _swept(planner)
    elif question.objective == "finetune":
        choice = batches.fine_tuning(seen, data, pairs=question.pairs)
    elif question.pairs:
        choice = batches.contrastive(seen, data, planner.task.loss, question.start)
    else:
        choice = _soonest(planner)
    batch = max(ranks, round(choice.batch / ranks) * ranks)
    if choice.confidence == "measured" and batch != choice.batch:
        why = f"{choice.why}; {choice.batch:,} is no multiple of {ranks} GPUs, {batch:,} is"
        choice = choice._replace(why=why, confidence="high")
    return choice._replace(batch=batch)


def _swept(planner: Planner) -> batches.Choice:
    """The batch that a sweep over this data recommends."""
    sweep, (data, _, seen) = planner.known.sweep, planner.budget
    assert sweep is not None
    batches.check_batch(sweep.batch, data)
    why = f"the batch that a sweep recommends, its runs having the same {sweep.same}; {planner.known.said['sweep']}"
    return batches.Choice(sweep.batch, math.ceil(seen / sweep.batch), why, "megabatch sweep", "measured")


def _soonest(planner: Planner) -> batches.Choice:
    """The batch of a loss that is a mean over samples, by its critical batch: given, measured, or a prior."""
    question, noise, (data, _, seen) = planner.question, planner.known.noise, planner.budget
    kind: Literal["lm", "supervised"] = "lm" if question.objective == "lm" else "supervised"
    critical, said = question.critical or batches.critical_batch(kind, data), None
    source = FACTS["lm critical batch" if kind == "lm" else "imagenet"].source
    if question.critical is None and noise is not None and not noise.coupled:
        if not noise.critical < math.inf:
            raise ValueError(
                f"the measured noise has no finite critical batch ({noise.critical}): no gradient was seen above it; measure more"
                " steps, give the critical batch itself (critical=…), or leave the file out"
            )
        critical, source = max(1, round(noise.critical)), "megabatch noise"
        said = f"the critical batch is {critical:,} ({noise.low:,.0f} to {noise.high:,.0f}), {planner.known.said['noise']}"
    rows = max(1, critical // question.length) if kind == "lm" else critical
    return batches.mean_loss(
        rows,
        lambda size: planner.reach(size).seconds,
        seen,
        data,
        ranks=planner.machine.gpus,
        priority=question.priority,
        source=source,
        measured=said,
    )
