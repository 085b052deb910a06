"""The events of a run, read from its log.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

Row = Mapping[str, Any]


class History(NamedTuple):
    """Rows of a log by event, in order of steps. unread: number of invalid lines, such as the last one of a killed run."""

    steps: list[Row]
    evaluations: list[Row]
    bad: list[Row]
    notes: list[Row]
    unread: int


def read_history(log: Path) -> History:
    """Return the history of a run, empty where there is no log yet.

    A run that resumes repeats the steps after its last checkpoint: a row of a step replaces earlier rows of that step and of all
    later ones.
    """
    history = History([], [], [], [], 0)
    unread = 0
    for line in _lines(log):
        row = _row(line)
        if row is None:
            unread += 1
        elif row["event"] == "step":
            _rewind(history.steps, row["step"] - 1)
            _rewind(history.evaluations, row["step"])
            history.steps.append(row)
        elif row["event"] == "evaluation":
            _rewind(history.evaluations, row["step"] - 1)
            history.evaluations.append(row)
        elif row["event"] == "bad":
            history.bad.append(row)
        elif row["event"] in ("note", "damage"):
            history.notes.append(row)
    return history._replace(unread=unread)


def number(row: Row, *path: str) -> float | None:
    """Return the finite number under a key of a row, or of a table within it; None if there is none.

    >>> number({"x_to_y": {"1": 0.5}}, "x_to_y", "1")
    0.5
    """
    value: Any = row
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # An integer of a thousand digits is valid JSON, and too large for a float.
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _lines(log: Path) -> list[str]:
    # Bytes of an incomplete line need not be UTF-8.
    return log.read_text("utf-8", errors="replace").splitlines() if log.exists() else []


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("event"), str):
        return None
    if row["event"] in ("step", "evaluation") and not isinstance(row.get("step"), int):
        return None
    return row


def _rewind(rows: list[Row], step: int) -> None:
    """Drop the rows of later steps."""
    while rows and rows[-1]["step"] > step:
        rows.pop()
