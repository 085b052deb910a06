"""How a batch is reached, in numbers with their reasons."""

from __future__ import annotations

from dataclasses import replace

from ..costs.hardware import Machine
from . import batch as batches
from .calibration import Known
from .evidence import FACTS, Confidence, Number
from .search import Found

GIB = 2**30
PREDICTED, PROFILE = "memory predicted on fake tensors", "megabatch profile"


def reach_numbers(found: Found, limit: int, machine: Machine, known: Known) -> list[Number]:
    """How the batch is reached, number by number."""
    strategy = found.strategy
    again = (
        "nothing is computed twice"
        if strategy.accumulate or strategy.keep >= strategy.chunks
        else "one extra forward for the others"
    )
    rows = [
        Number("shard", strategy.shard, f"{strategy.shard:,} rows × {strategy.ranks}", "batch / GPUs", "arithmetic", "high"),
        _chunk_number(found, limit, known),
        Number(
            "precision",
            strategy.precision,
            strategy.precision,
            "the fastest that the device trains in",
            machine.device.source,
            "high",
        ),
    ]
    if not strategy.accumulate:
        why = f"of {strategy.chunks} chunks a tower, as many as still fit; {again}"
        rows.insert(2, Number("keep", strategy.keep, f"{strategy.keep}", why, PREDICTED, "medium"))
    if strategy.checkpointing:
        rows.append(
            Number("checkpointing", "on", "on", "faster here than chunks as small as they would be without", "time model", "medium")
        )
    if strategy.ranks > 1:
        sharded = strategy.sharding == "fsdp2"
        why = (
            "weights, gradients and optimizer state are sharded: whole, they do not fit, or cost more"
            if sharded
            else "weights fit whole"
        )
        rows.append(Number("sharding", strategy.sharding, strategy.sharding, why, "memory and time models", "medium"))
    return [*rows, _seconds_number(found, machine, known), _memory_number(found, limit, known)]


def _fits(found: Found, limit: int) -> str:
    return f"predicted {found.peak / GIB:.1f} GiB of the {limit / GIB:.1f} GiB that may be used"


def _chunk_number(found: Found, limit: int, known: Known) -> Number:
    chunk, shown = found.strategy.chunk, f"{found.strategy.chunk:,} rows"
    if known.fit is not None:
        held = "" if known.fit.limit_bytes is None else f" within {known.fit.limit_bytes / GIB:.1f} GiB"
        why = f"{known.fit.chunk:,} rows are the largest that ran{held}, {known.said['fit']}; the batch does not depend on it"
        confidence: Confidence = "measured" if known.has_run(replace(found.strategy, keep=0)) else "medium"
        return Number("chunk", chunk, shown, why, "megabatch fit", confidence)
    if chunk in known.timed:
        said = next(step.said for step in known.steps if step.strategy.chunk == chunk)
        why = f"the fastest of {len(known.timed)} that were timed, of those that fit, {said}: {_fits(found, limit)}"
        return Number("chunk", chunk, shown, why, PROFILE, "measured")
    why = f"the largest that fits: {_fits(found, limit)}; the batch does not depend on it"
    return Number("chunk", chunk, shown, why, PREDICTED, "high")


def _seconds_number(found: Found, machine: Machine, known: Known) -> Number:
    shown, step = f"{found.seconds:.3g} s", known.nearest(found.strategy)
    why = f"counted operations and bytes over {machine.device.name}'s rates, at the shares stated"
    confidence = known.confidence(found.strategy)
    if step is None or confidence is None:
        return Number("seconds a step", found.seconds, shown, why, machine.device.source, "medium")
    if confidence == "measured":
        why = f"the median of steps at this batch and chunk, {step.said}"
        return Number("seconds a step", found.seconds, shown, why, PROFILE, confidence)
    why += f"; scaled by what steps at batch {step.strategy.batch:,} in chunks of {step.strategy.chunk:,} took, {step.said}"
    return Number("seconds a step", found.seconds, shown, why, f"{PROFILE}; {machine.device.source}", confidence)


def _memory_number(found: Found, limit: int, known: Known) -> Number:
    shown, step = f"{found.peak / GIB:.1f} GiB", known.nearest(found.strategy)
    if step is None or step.memory is None:
        return Number("peak memory", found.peak, shown, _fits(found, limit), PREDICTED, "high")
    if step.strategy == found.strategy:
        why = f"of the {limit / GIB:.1f} GiB that may be used; {step.said}"
        return Number("peak memory", found.peak, shown, why, PROFILE, "measured" if step.factor is None else "medium")
    measured = f"batch {step.strategy.batch:,} in chunks of {step.strategy.chunk:,}"
    why = f"{_fits(found, limit)}, scaled by what {measured} took, {step.said}"
    return Number("peak memory", found.peak, shown, why, f"{PROFILE}; {PREDICTED}", "high" if step.factor is None else "medium")


def contrastive_numbers(batch: int, unique: int) -> list[Number]:
    """What a contrastive batch holds beside pairs: duplicates, by chance."""
    fact, expected = FACTS["collisions"], batches.collisions(batch, unique)
    why = f"{fact.says}: B = {batch:,}, U = {unique:,}; they are masked, not taken for negatives"
    return [Number("colliding pairs a batch", expected, f"{expected:,.3g}", why, fact.source, fact.confidence)]
