"""The outcome of one run of a sweep: how it is assessed, and the file by which a finished run is recognised and not repeated.

Quality is measured on one half of the held-out pairs to choose a learning rate by, on the other half to report, and on pairs that
the run was trained on.
"""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ... import config
from ...data.sampler import Order, Subset, stable_hash
from ...data.source import Source
from ...files import write_text
from ...measurements import check_types
from ...reporting.history import read_history
from ...training.build import Assembly
from ...training.evaluate import evaluate_held_out, evaluation_order
from ...training.inference import opened

FILE = "outcome.json"
# Settings that may differ without making it another run: where and how it is computed, stored and displayed.
FREE = ("out", "planned", "watch", "checkpoint", "compute.device", "compute.threads", "data.workers")
# Halves with fewer pairs than this are too small to measure quality on.
LEAST = 16
# Pairs that the run was trained on are looked for among this many of its last samples.
REMEMBERED = 2**18
# The first steps are slower, because kernels are chosen and memory is allocated.
UNSTEADY = 2

# Samples of a source, each as (shard, index).
Places = list[tuple[int, int]]


@dataclass(frozen=True)
class RunOutcome:
    """What one run reached. Qualities are fractions in [0, 1]; None means not measured.

    quality: on the held-out pairs that are reported; choosing: on those by which a rate is chosen. apart: whether these are
    different pairs. training: on as many pairs that were trained on; gap: training less the quality on as many held-out pairs.
    loss: mean of the last tenth of the steps. seconds: of all steps, reading included. pairs_per_s: of the median step.
    error: why there is no quality.
    """

    quality: float | None = None
    choosing: float | None = None
    apart: bool = False
    pairs: int = 0
    training: float | None = None
    gap: float | None = None
    loss: float | None = None
    seconds: float = 0.0
    pairs_per_s: float = 0.0
    steps: int = 0
    samples: int = 0
    peak_bytes: int | None = None
    error: str | None = None


def read_outcome(run: config.Run) -> RunOutcome | None:
    """Return the outcome in the run's folder; None if the run has not finished. ValueError if it was a different run."""
    path = Path(run.out) / FILE
    try:
        record = json.loads(path.read_text("utf-8"))
        before, outcome = record["run"], RunOutcome(**record["outcome"])
        check_types(outcome)
        if not isinstance(before, dict):
            raise ValueError(f"run is {before!r:.80}, not a table")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the outcome of a run ({error!r}); delete its folder to train the run again") from None
    now = _settings(run)
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if changed:
        changes = ", ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in changed[:4])
        raise ValueError(f"{path.parent} has a run with other settings: {changes}. Choose another folder (out), or delete this one")
    return outcome


def write_outcome(run: config.Run, outcome: RunOutcome) -> None:
    """Write the outcome of a finished run into its folder, atomically."""
    write_whole(Path(run.out) / FILE, json.dumps({"run": _settings(run), "outcome": asdict(outcome)}, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, and create its folder: if the process is killed meanwhile, the old file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def assess(folder: Path, device: str | None = None, *, trust_code: bool = False) -> RunOutcome:
    """Evaluate the finished run in a folder and return its outcome; `trust_code` as in `train`."""
    result = json.loads((folder / "result.json").read_text("utf-8"))
    steps = read_history(folder / "log.jsonl").steps
    with opened(folder, device, trust_code=trust_code) as parts:
        if not sum(parts.held_out.lengths):
            raise ValueError("data.held_out is empty, and a sweep compares held-out quality; raise it, or name another source")
        qualities = _qualities(parts, result["samples"])
    last = [row["loss"] for row in steps[-max(1, len(steps) // 10) :]]
    steady = [row["batch"] / row["seconds"] for row in steps[UNSTEADY:] or steps]
    return RunOutcome(
        **qualities,
        loss=fmean(last),
        seconds=result["seconds"],
        pairs_per_s=median(steady),
        steps=result["steps"],
        samples=result["samples"],
        peak_bytes=result["peak_bytes"],
    )


def halves(source: Source, limit: int) -> tuple[Source, Source] | None:
    """Split the samples of an evaluation, at most `limit` of the source, into two halves; None if they are too few.

    Groups stay whole and are ordered by a hash of their names, so the halves are the same in every run.
    """
    groups = _groups(source, _evaluated(source, limit))
    counts = list(accumulate(len(places) for _, places in groups))
    cut = min(range(len(counts)), key=lambda place: abs(2 * counts[place] - counts[-1]))
    first, second = ([place for _, places in part for place in places] for part in (groups[: cut + 1], groups[cut + 1 :]))
    if min(len(first), len(second)) < LEAST:
        return None
    return _part(source, first), _part(source, second)


def seen(parts: Assembly, samples: int, pairs: int) -> Source:
    """Return about as many pairs that the run was trained on, in whole groups as far as it has seen them."""
    order = Order(parts.training.lengths, parts.run.data.window, parts.run.seed)
    # One epoch contains all of them.
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
    split = halves(parts.held_out, limit)
    choosing, reported = split or (parts.held_out, parts.held_out)
    pairs = min(limit, sum(reported.lengths))
    choosing_quality = _quality(parts, choosing, limit)
    quality = _quality(parts, reported, limit) if split else choosing_quality
    # Recall falls with the number of candidates: both sides of the gap are measured among equally many pairs.
    trained = seen(parts, samples, pairs)
    equal = min(pairs, sum(trained.lengths))
    training, unseen = _quality(parts, trained, equal), quality if equal == pairs else _quality(parts, reported, equal)
    return {
        "quality": quality,
        "choosing": choosing_quality,
        "apart": split is not None,
        "pairs": pairs,
        "training": training,
        "gap": training - unseen,
    }


def _quality(parts: Assembly, source: Source, limit: int) -> float:
    """Return the accuracy, or the mean recall@1 of both directions, on at most so many samples of a source."""
    run = replace(parts.run, evaluate=replace(parts.run.evaluate, limit=limit))
    found, _ = evaluate_held_out(replace(parts, held_out=source, run=run), None)
    return float(found["accuracy"]) if "accuracy" in found else (found["x_to_y"]["1"] + found["y_to_x"]["1"]) / 2


def _groups(source: Source, places: Iterable[tuple[int, int]]) -> list[tuple[int, Places]]:
    """Return the samples by group, in the order of a hash."""
    groups: dict[int, Places] = defaultdict(list)
    for shard, index in places:
        groups[stable_hash(source.group(shard, index))].append((shard, index))
    return sorted(groups.items())


def _evaluated(source: Source, limit: int) -> Places:
    """Return the samples that `embed_source` takes of a source."""
    order = evaluation_order(source)
    return [order.at(position) for position in range(min(limit, order.total))]


def _part(source: Source, places: Places) -> Source:
    indices = [array("q") for _ in source.lengths]
    for shard, index in sorted(places):
        indices[shard].append(index)
    return Subset(source, indices)


def _settings(run: config.Run) -> dict[str, Any]:
    """Return the settings that define a run, by dotted names, as they are after a round trip through JSON."""
    flat = json.loads(json.dumps(config.flat(config.as_table(run))))
    return {key: value for key, value in flat.items() if not {key, key.partition(".")[0]} & {*FREE}}
