"""Measurements as JSON files, each with its run and machine: `measuring` writes them, and a plan reads them."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from .files import write_text

Kind = Literal["fit", "profile", "noise", "sweep"]
NOT_FINITE = ("inf", "-inf", "nan")
# A larger number means that the file is damaged, and arithmetic on it would overflow.
LARGEST = 1e18
# Fields that count must be at least 1 if they are given. Fields of time or memory must not be negative.
COUNTS = ("batch", "best", "branch", "chunk", "enough", "knee", "ranks", "size", "soonest")
BYTES = ("limit_bytes", "peak_bytes", "reserved_bytes", "predicted_bytes", "predicted_reserved")
QUANTITIES = ("lr", "pairs_per_s", "seconds", "predicted_seconds", *BYTES)


@dataclass(frozen=True)
class Fit:
    """The largest chunk that ran.

    limit_bytes: the memory limit of the trials. trials: size, ran, why (if it did not run), peak_bytes, seconds and
    predicted_bytes.
    """

    chunk: int
    limit_bytes: int | None
    trials: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Profile:
    """Steps at several sizes.

    points: batch, chunk, keep, ranks, seconds (median), spread (half of the interquartile range), pairs_per_s, peak_bytes and, on a
        GPU, reserved_bytes; with a prediction also predicted_seconds, predicted_bytes and predicted_reserved. A size that ran out
        of memory has `out_of_memory` instead.
    against: the size that varies. best: the size with the highest rate. enough: the smallest size within 5 % of it. knee: the size
        at which the curve bends. soonest: the batch that reaches a target first, if the `critical` batch is known.
    reading_per_s: pairs per second that the loader reads. notes: remarks on the whole profile.
    """

    points: tuple[Mapping[str, Any], ...]
    best: int
    enough: int
    knee: int | None = None
    against: Literal["batch", "chunk"] = "batch"
    soonest: int | None = None
    critical: float | None = None
    reading_per_s: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Noise:
    """The critical batch that gradient noise implies, with a 95 % interval.

    coupled: whether samples were compared with each other, so that the number holds for `batch` only. course: step, critical, low
    and high over training. branch: the largest batch that lost nothing when the run was branched, or None if that was not tried.
    """

    critical: float
    low: float
    high: float
    batch: int
    coupled: bool
    course: tuple[Mapping[str, Any], ...] = ()
    branch: int | None = None


@dataclass(frozen=True)
class Sweep:
    """The batch that a sweep recommends, and the best learning rate at it.

    same: what all runs had in common. rows: batch, lr, mean and spread of the quality, and seconds of each batch at its best rate.
    """

    batch: int
    lr: float
    same: Literal["samples", "updates", "time"]
    rows: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Measured:
    """A measurement: the result, its run (as `config.as_table` gives it), the device, the version of torch and the date."""

    found: Fit | Profile | Noise | Sweep
    run: Mapping[str, Any]
    device: str
    torch: str
    date: str = field(default="")

    @property
    def kind(self) -> Kind:
        return next(kind for kind, record in KINDS.items() if isinstance(self.found, record))


KINDS: dict[Kind, type[Any]] = {"fit": Fit, "profile": Profile, "noise": Noise, "sweep": Sweep}


def write(measured: Measured, path: str | Path) -> Path:
    """Write a measurement to a file, and create its directory if needed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, as_json(measured) + "\n")
    return path


def as_json(measured: Measured) -> str:
    """Return the content of a measurement's file."""
    table = {"measured": measured.kind, **asdict(measured), "found": _strict(asdict(measured.found))}
    return json.dumps(table, indent=1, allow_nan=False)


def read(path: str | Path) -> Measured:
    """Read the measurement of a file. Raises ValueError if the file is missing or damaged."""
    try:
        table = json.loads(Path(path).read_text("utf-8"))
        record = KINDS[table.pop("measured")]
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in _loose(table.pop("found")).items()}
        measured = Measured(record(**fields), **table)
        check_types(measured)
        check_types(measured.found)
        _check_numbers(asdict(measured.found))
        return measured
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file; give one that fit, profile, noise or sweep has written") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        kinds = ", ".join(get_args(Kind))
        raise ValueError(f"{path}: holds no measurement of {kinds} ({error!r}); measure again") from None


def check_types(record: Any) -> None:
    """Raise ValueError if a field of a dataclass that was read from a file does not have the annotated type."""
    for name, hint in typing.get_type_hints(type(record)).items():
        value = getattr(record, name)
        if not _fits(value, hint):
            raise ValueError(f"{name} is {value!r:.80}, not {hint.__name__ if isinstance(hint, type) else hint}")


def _fits(value: Any, hint: Any) -> bool:
    origin, choices = typing.get_origin(hint), get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, choice) for choice in choices)
    if origin is Literal:
        return isinstance(value, str) and value in choices
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(each, choices[0]) for each in value)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(isinstance(key, str) and _fits(each, choices[1]) for key, each in value.items())
    if hint is Any:
        return True
    if hint in (int, float):
        # bool is a subclass of int.
        is_number = isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
        return is_number and not (abs(value) > LARGEST and abs(value) != math.inf)
    return isinstance(value, hint)


def _check_numbers(table: Mapping[str, Any]) -> None:
    """Raise ValueError if a number of a measurement, or of its rows, cannot have been measured."""
    for name, value in table.items():
        for row in value if isinstance(value, (list, tuple)) else ():
            if isinstance(row, Mapping):
                _check_numbers(row)
        if value is None or name not in COUNTS + QUANTITIES:
            continue
        if not _fits(value, int if name in COUNTS else float) or not (1 if name in COUNTS else 0) <= value < math.inf:
            rule = "must be an integer of at least 1" if name in COUNTS else "must be a finite number of at least 0"
            raise ValueError(f"{name} is {value!r:.80}: {rule}")


def _strict(value: Any) -> Any:
    """Return the value in strict JSON, in which infinities and NaN are written as strings."""
    if isinstance(value, Mapping):
        return {key: _strict(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _loose(value: Any) -> Any:
    """Undo `_strict`."""
    if isinstance(value, dict):
        return {key: _loose(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_loose(each) for each in value]
    return float(value) if isinstance(value, str) and value in NOT_FINITE else value
