"""What measurements write and a plan reads: one JSON file for each, with the run and the machine that it is true of."""

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
# Larger numbers in a file are damage, and arithmetic on them would overflow.
LARGEST = 1e18
# What counts things, where it is given: at least one. What takes time or room is above zero.
COUNTS = ("batch", "best", "branch", "chunk", "enough", "knee", "ranks", "size", "soonest")
BYTES = ("limit_bytes", "peak_bytes", "reserved_bytes", "predicted_bytes", "predicted_reserved")
QUANTITIES = ("lr", "pairs_per_s", "seconds", "predicted_seconds", *BYTES)


@dataclass(frozen=True)
class Fit:
    """The largest chunk that really ran. `limit_bytes`: what it was held to; `trials`: size, ran, why not, peak_bytes, seconds and
    predicted_bytes of each."""

    chunk: int
    limit_bytes: int | None
    trials: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Profile:
    """Steps at several sizes: batch, chunk, keep, ranks, seconds (median), spread (half of the middle half), pairs_per_s,
    peak_bytes and, of a device, reserved_bytes; predicted_seconds, predicted_bytes and predicted_reserved where there is a
    prediction. A size that ran out of memory has `out_of_memory` and none of these.

    `against`: which size varies. `best`: that of the highest rate; `enough`: the smallest within 5 % of it; `knee`: where the
    curve bends; `soonest`: the batch with which a target is reached first, where the `critical` batch is known.
    `reading_per_s`: pairs that the loader reads a second; `notes`: what to know of it all."""

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
    """The critical batch that gradient noise implies, with a 95 % interval; `coupled`: samples were compared with each other, and
    the number belongs to `batch` alone. `course`: step, critical, low, high over training. `branch`: the largest batch that lost
    nothing when the run was branched, where that was tried."""

    critical: float
    low: float
    high: float
    batch: int
    coupled: bool
    course: tuple[Mapping[str, Any], ...] = ()
    branch: int | None = None


@dataclass(frozen=True)
class Sweep:
    """The batch that a sweep recommends, and the learning rate that was best at it. `same`: what all runs had equal.
    `rows`: batch, lr, mean and spread of the quality, seconds of each batch at its best rate."""

    batch: int
    lr: float
    same: Literal["samples", "updates", "time"]
    rows: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Measured:
    """A measurement: what was found, the run it is true of (as `config.as_table` gives it), the device and the date."""

    found: Fit | Profile | Noise | Sweep
    run: Mapping[str, Any]
    device: str
    torch: str
    date: str = field(default="")

    @property
    def kind(self) -> Kind:
        return next(kind for kind, made in KINDS.items() if isinstance(self.found, made))


KINDS: dict[Kind, type[Any]] = {"fit": Fit, "profile": Profile, "noise": Noise, "sweep": Sweep}


def write(measured: Measured, path: str | Path) -> Path:
    """The file of a measurement; its folder is made where it is missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, as_json(measured) + "\n")
    return path


def as_json(measured: Measured) -> str:
    """What the file of a measurement holds."""
    table = {"measured": measured.kind, **asdict(measured), "found": _strict(asdict(measured.found))}
    return json.dumps(table, indent=1, allow_nan=False)


def read(path: str | Path) -> Measured:
    """The measurement of a file."""
    try:
        table = json.loads(Path(path).read_text("utf-8"))
        made = KINDS[table.pop("measured")]
        found = {key: tuple(value) if isinstance(value, list) else value for key, value in _loose(table.pop("found")).items()}
        measured = Measured(made(**found), **table)
        check_types(measured)
        check_types(measured.found)
        _check_numbers(asdict(measured.found))
        return measured
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file; name one that fit, profile, noise or sweep has written") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        known = ", ".join(get_args(Kind))
        raise ValueError(f"{path}: holds no measurement of {known} ({error!r}); write it anew") from None


def check_types(record: Any) -> None:
    """Raise ValueError where a field of a dataclass, read from a file, does not hold what its annotation says."""
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
        # True is an int to Python.
        is_number = isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
        return is_number and not (abs(value) > LARGEST and abs(value) != math.inf)
    return isinstance(value, hint)


def _check_numbers(table: Mapping[str, Any]) -> None:
    """Raise ValueError where a number of a measurement, also in its rows, is none that could have been measured."""
    for name, value in table.items():
        for row in value if isinstance(value, (list, tuple)) else ():
            if isinstance(row, Mapping):
                _check_numbers(row)
        if value is None or name not in COUNTS + QUANTITIES:
            continue
        if not _fits(value, int if name in COUNTS else float) or not (1 if name in COUNTS else 0) <= value < math.inf:
            rule = "must be a whole number of at least 1" if name in COUNTS else "must be a finite number, not negative"
            raise ValueError(f"{name} is {value!r:.80}: {rule}")


def _strict(value: Any) -> Any:
    """The value as every reader of JSON takes it, which has no infinity: its name stands for it."""
    if isinstance(value, Mapping):
        return {key: _strict(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _loose(value: Any) -> Any:
    """What `_strict` was given."""
    if isinstance(value, dict):
        return {key: _loose(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_loose(each) for each in value]
    return float(value) if isinstance(value, str) and value in NOT_FINITE else value
