"""How a batch is reached, in numbers with their reasons."""

from __future__ import annotations

from . import batch as batches
from .evidence import FACTS, Number
from .hardware import Machine
from .search import Found

PREDICTED = "memory predicted on fake tensors"


def reach_numbers(found: Found, limit: int, machine: Machine) -> list[Number]:
    """How the batch is reached, number by number."""
    how, gib = found.how, 2**30
    fits = f"predicted {found.peak / gib:.1f} GiB of the {limit / gib:.1f} GiB that may be used"
    chunk_why = f"the largest that fits: {fits}; the batch does not depend on it"
    again = "nothing is computed twice" if how.accumulate or how.keep >= how.chunks else "one extra forward for the others"
    rows = [
        Number("shard", how.shard, f"{how.shard:,} rows × {how.ranks}", "batch / GPUs", "arithmetic", "high"),
        Number("chunk", how.chunk, f"{how.chunk:,} rows", chunk_why, PREDICTED, "high"),
        Number("precision", how.precision, how.precision, "the fastest that the device trains in", machine.device.source, "high"),
    ]
    if not how.accumulate:
        why = f"of {how.chunks} chunks a tower, as many as still fit; {again}"
        rows.insert(2, Number("keep", how.keep, f"{how.keep}", why, PREDICTED, "medium"))
    if how.checkpointing:
        rows.append(
            Number("checkpointing", "on", "on", "faster here than chunks as small as they would be without", "time model", "medium")
        )
    if how.ranks > 1:
        sharded = how.sharding == "fsdp2"
        why = (
            "weights, gradients and optimizer state are sharded: whole, they do not fit, or cost more"
            if sharded
            else "weights fit whole"
        )
        rows.append(Number("sharding", how.sharding, how.sharding, why, "memory and time models", "medium"))
    why = f"counted operations and bytes over {machine.device.name}'s rates, at the shares stated"
    rows.append(Number("seconds a step", found.seconds, f"{found.seconds:.3g} s", why, machine.device.source, "medium"))
    rows.append(Number("peak memory", found.peak, f"{found.peak / gib:.1f} GiB", fits, PREDICTED, "high"))
    return rows


def contrastive_numbers(batch: int, unique: int) -> list[Number]:
    """What a contrastive batch holds beside pairs: duplicates, by chance."""
    fact, expected = FACTS["collisions"], batches.collisions(batch, unique)
    why = f"{fact.says}: B = {batch:,}, U = {unique:,}; they are masked, not taken for negatives"
    return [Number("colliding pairs a batch", expected, f"{expected:,.3g}", why, fact.source, fact.confidence)]
