"""Rows of the time benchmark as text: a line per case, the table of the documentation, a summary."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.memory_accuracy.cases import Case, of_row
from benchmarks.memory_accuracy.report import options_of
from benchmarks.report import device_name
from benchmarks.time_accuracy.cases import fresh_cases

# The accepted error.
WORST = 0.20
Row = dict[str, Any]


def line(case: Case, row: Row) -> str:
    """Return the line that is printed while the program runs."""
    start = f"{case.model}, {case.rows} rows, {options_of(row)}"
    if "failed" in row:
        return f"{start}: failed, {row['failed']}"
    if "operations" in row:
        return f"{start}: {sum(us for _, _, us, _ in row['operations']) / 1e3:,.1f} ms of the device"
    predicted = f", predicted {1e3 * row['predicted_s']:,.1f} ({row['error']:+.0%})" if "error" in row else ""
    return f"{start}: {1e3 * row['seconds']:,.1f} ms{predicted}"


def markdown(rows: list[Row]) -> str:
    """Return the table of all cases and its summary."""
    lines = ["| model | rows | step | measured, ms | predicted | | held back |", "| --- | ---: | --- | ---: | ---: | ---: | ---: |"]
    for row in _measured(rows):
        blind = f"{_blind_error(row):+.0%}" if "blind_s" in row else ""
        lines.append(
            f"| {row['model']} | {row['rows']:,} | {options_of(row)} | {1e3 * row['seconds']:,.1f} "
            f"| {1e3 * row['predicted_s']:,.1f} | **{row['error']:+.0%}** | {blind} |"
        )
    return "\n".join([*lines, "", summary(rows)])


def summary(rows: list[Row]) -> str:
    """Return the errors of the prediction, and those of the first prediction for models that were held out of the fit."""
    measured = _measured(rows)
    machine = measured[0]["machine"]
    sentences = [
        f"{len(measured)} steps on {device_name(machine)}, torch {machine['torch']}, {machine['date'][:10]}: {_off(measured)}."
    ]
    held = [row | {"error": _blind_error(row)} for row in measured if "blind_s" in row]
    fresh = set(fresh_cases())
    before, after = ([row for row in held if (of_row(row) in fresh) == late] for late in (False, True))
    if held:
        sentences.append("The last column is what was said of models on which no share had been found, before they were looked at.")
    if before:
        sentences.append(f"Of those whose misses were learnt from: {_off(before)}.")
    if after:
        sentences.append(f"Of those that came after: {_off(after)}.")
    return " ".join(sentences)


def _off(rows: list[Row]) -> str:
    off = [abs(row["error"]) for row in rows]
    beyond = [row for row in rows if abs(row["error"]) > WORST]
    named = "".join(f", {row['model']} in {row['precision']} {row['error']:+.0%}" for row in beyond)
    return f"off by {statistics.median(off):.0%} in the median, {len(rows) - len(beyond)} of {len(rows)} within {WORST:.0%}{named}"


def _blind_error(row: Row) -> float:
    return float(row["blind_s"] / row["seconds"] - 1)


def _measured(rows: list[Row]) -> list[Row]:
    measured = [row for row in rows if "error" in row]
    if not measured:
        raise ValueError("no row holds a prediction beside a measurement: run `python -m benchmarks.time_accuracy` on a GPU first")
    return measured
