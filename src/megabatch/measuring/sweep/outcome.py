"""What became of one run of a sweep, and the file by which a finished one is known and not repeated."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ... import config
from ...data.sampler import Order, stable_hash
from ...data.source import Source
from ...data.split import Part
from ...files import write_text
from ...measurements import check_types
from ...reporting.history import read_history
from ...training.build import Assembly
from ...training.evaluate import evaluate_held_out, evaluation_order
from ...training.inference import opened

FILE = "outcome.json"
# What may differ without making it another run: where and how it is computed, kept and watched.
FREE = ("out", "planned", "watch", "checkpoint", "compute.device", "compute.threads", "data.workers")


@dataclass(frozen=True)
class RunOutcome:
    """What one run reached. Qualities are shares in [0, 1]; None is not measured.

    quality: on the held-out pairs that are reported; choosing: on those by which a rate is chosen. apart: whether these are
    different pairs. training: on as many pairs that were trained on; gap: by how much that is more than on held-out ones.
    loss: of the last tenth of the steps. seconds: of all steps, reading included. pairs_per_s: of the median step.
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


def finished(run: config.Run) -> RunOutcome | None:
    """The outcome that the run's folder holds; None where it has not come to its end. ValueError where it was another run."""
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
        raise ValueError(f"{path}: holds no outcome of a run ({error!r}); delete the folder, and it is trained again") from None
    now = _settings(run)
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if changed:
        was = ", ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in changed[:4])
        raise ValueError(f"{path.parent}: holds a run with other settings: {was}. Name another folder (out), or delete this one")
    return outcome


def record(run: config.Run, outcome: RunOutcome) -> None:
    """Writes down that the run has come to its end, all at once or not at all."""
    write_whole(Path(run.out) / FILE, json.dumps({"run": _settings(run), "outcome": asdict(outcome)}, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes a file, and its folder where that is missing; whoever reads it while this is killed finds the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def _settings(run: config.Run) -> dict[str, Any]:
    """The settings that make a run what it is, by dotted names, as JSON gives them back."""
    flat = json.loads(json.dumps(_flat(config.as_table(run))))
    return {key: value for key, value in flat.items() if not {key, key.partition(".")[0]} & {*FREE}}


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


# Halves with fewer pairs than this would say nothing.
LEAST = 16
# The samples that a run has seen among which those to measure are looked for.
REMEMBERED = 2**18
# The first steps are slower: kernels are chosen, memory is taken.
UNSTEADY = 2

Places = list[tuple[int, int]]


def assess(folder: Path, device: str | None = None, *, trust_code: bool = False) -> RunOutcome:
    """The outcome of the run that has come to its end in a folder; `trust_code` as in `train`."""
    result = json.loads((folder / "result.json").read_text("utf-8"))
    steps = read_history(folder / "log.jsonl").steps
    with opened(folder, device, trust_code=trust_code) as parts:
        if not sum(parts.held_out.lengths):
            raise ValueError("nothing is held out: a sweep compares held-out quality; raise data.held_out, or name another source")
        found = _qualities(parts, result["samples"])
    last = [row["loss"] for row in steps[-max(1, len(steps) // 10) :]]
    steady = [row["batch"] / row["seconds"] for row in steps[UNSTEADY:] or steps]
    return RunOutcome(
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
    found, _ = evaluate_held_out(dataclasses.replace(parts, held_out=source, run=run), None)
    return float(found["accuracy"]) if "accuracy" in found else (found["x_to_y"]["1"] + found["y_to_x"]["1"]) / 2


def _groups(source: Source, places: Iterable[tuple[int, int]]) -> list[tuple[int, Places]]:
    """The places by their groups, in the order of a hash."""
    groups: dict[int, Places] = defaultdict(list)
    for shard, index in places:
        groups[stable_hash(source.group(shard, index))].append((shard, index))
    return sorted(groups.items())


def _evaluated(source: Source, limit: int) -> Places:
    """The samples that `embed_source` takes of a source."""
    order = evaluation_order(source)
    return [order.at(position) for position in range(min(limit, order.total))]


def _part(source: Source, places: Places) -> Source:
    indices = [array("q") for _ in source.lengths]
    for shard, index in sorted(places):
        indices[shard].append(index)
    return Part(source, indices)
