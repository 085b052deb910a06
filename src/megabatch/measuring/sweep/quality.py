"""What a finished run is worth: on held-out pairs to choose by, on others to report, and on pairs that it was trained on."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ...data.sampler import Order, stable_hash
from ...data.source import Source
from ...data.split import Part
from ...reporting.history import read_history
from ...training.build import Assembly
from ...training.held_out import measure
from ...training.inference import opened
from .outcome import Outcome

# Halves with fewer pairs than this would say nothing.
LEAST = 16
# The samples that a run has seen among which those to measure are looked for.
REMEMBERED = 2**18
# The first steps are slower: kernels are chosen, memory is taken.
UNSTEADY = 2

Places = list[tuple[int, int]]


def assess(folder: Path, device: str | None = None, *, trust_code: bool = False) -> Outcome:
    """The outcome of the run that has come to its end in a folder; `trust_code` as in `train`."""
    result = json.loads((folder / "result.json").read_text("utf-8"))
    steps = read_history(folder / "log.jsonl").steps
    with opened(folder, device, trust_code=trust_code) as parts:
        if not sum(parts.held_out.lengths):
            raise ValueError("nothing is held out: a sweep compares held-out quality; raise data.held_out, or name another source")
        found = _qualities(parts, result["samples"])
    last = [row["loss"] for row in steps[-max(1, len(steps) // 10) :]]
    steady = [row["batch"] / row["seconds"] for row in steps[UNSTEADY:] or steps]
    return Outcome(
        **found,
        loss=fmean(last),
        seconds=result["seconds"],
        pairs_per_s=median(steady),
        steps=result["steps"],
        samples=result["samples"],
        peak_bytes=result["peak_bytes"],
    )


def halves(source: Source, limit: int) -> tuple[Source, Source] | None:
    """The samples of a source that an evaluation takes, at most so many, in two parts of about as many; None where they cannot be
    parted. Groups stay whole, and go by a hash of their names: the halves are the same in every run."""
    groups = _groups(source, _evaluated(source, limit))
    counts = list(accumulate(len(places) for _, places in groups))
    cut = min(range(len(counts)), key=lambda place: abs(2 * counts[place] - counts[-1]))
    first, second = ([place for _, places in part for place in places] for part in (groups[: cut + 1], groups[cut + 1 :]))
    if min(len(first), len(second)) < LEAST:
        return None
    return _part(source, first), _part(source, second)


def seen(parts: Assembly, samples: int, pairs: int) -> Source:
    """Training pairs that the run has seen, about as many as asked for if there are, whole groups where it has seen them whole."""
    order = Order(parts.training.lengths, parts.run.data.window, parts.run.seed)
    # One epoch holds all of them.
    end = min(samples, order.total)
    places = [order.at(position) for position in range(max(0, end - REMEMBERED), end)]
    chosen: Places = []
    for _, group in _groups(parts.training, places):
        if len(chosen) >= pairs:
            break
        chosen += group
    return _part(parts.training, chosen)


def _qualities(parts: Assembly, samples: int) -> dict[str, Any]:
    limit = parts.run.evaluate.limit
    parted = halves(parts.held_out, limit)
    choosing, reported = parted or (parts.held_out, parts.held_out)
    pairs = min(limit, sum(reported.lengths))
    chosen = _measured(parts, choosing, limit)
    quality = _measured(parts, reported, limit) if parted else chosen
    # A pair is harder to find among more: both sides of the gap are measured among equally many.
    trained = seen(parts, samples, pairs)
    equal = min(pairs, sum(trained.lengths))
    training, fresh = _measured(parts, trained, equal), quality if equal == pairs else _measured(parts, reported, equal)
    return {
        "quality": quality,
        "choosing": chosen,
        "apart": parted is not None,
        "pairs": pairs,
        "training": training,
        "gap": training - fresh,
    }


def _measured(parts: Assembly, source: Source, limit: int) -> float:
    """Accuracy, or recall at 1 as the mean of both directions, on at most so many samples of a source."""
    run = dataclasses.replace(parts.run, evaluate=dataclasses.replace(parts.run.evaluate, limit=limit))
    found, _ = measure(dataclasses.replace(parts, held_out=source, run=run), None)
    return float(found["accuracy"]) if "accuracy" in found else (found["x_to_y"]["1"] + found["y_to_x"]["1"]) / 2


def _groups(source: Source, places: Iterable[tuple[int, int]]) -> list[tuple[int, Places]]:
    """The places by their groups, in the order of a hash."""
    groups: dict[int, Places] = defaultdict(list)
    for shard, index in places:
        groups[stable_hash(source.group(shard, index))].append((shard, index))
    return sorted(groups.items())


def _evaluated(source: Source, limit: int) -> Places:
    """The samples that `embed_source` takes of a source."""
    order = Order(source.lengths, max(1, sum(source.lengths)), 0)
    return [order.at(position) for position in range(min(limit, order.total))]


def _part(source: Source, places: Places) -> Source:
    indices = [array("q") for _ in source.lengths]
    for shard, index in sorted(places):
        indices[shard].append(index)
    return Part(source, indices)
