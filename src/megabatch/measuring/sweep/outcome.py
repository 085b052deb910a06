"""What became of one run of a sweep, and the file by which a finished one is known and not repeated."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ... import config
from ...files import write_text
from ...measurements import check_types

FILE = "outcome.json"
# What may differ without making it another run: where and how it is computed, kept and watched.
FREE = ("out", "planned", "watch", "checkpoint", "compute.device", "compute.threads", "data.workers")


@dataclass(frozen=True)
class Outcome:
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


def finished(run: config.Run) -> Outcome | None:
    """The outcome that the run's folder holds; None where it has not come to its end. ValueError where it was another run."""
    path = Path(run.out) / FILE
    try:
        record = json.loads(path.read_text("utf-8"))
        before, outcome = record["run"], Outcome(**record["outcome"])
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


def record(run: config.Run, outcome: Outcome) -> None:
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
