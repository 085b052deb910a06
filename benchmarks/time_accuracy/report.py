"""Rows of the time benchmark as text: a line while they are measured, the table of the documents, what they come to."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.memory_accuracy.cases import Case, of_row
from benchmarks.memory_accuracy.report import how
from benchmarks.report import device_name
from benchmarks.time_accuracy.cases import held_back

# What the prediction is held to.
WORST = 0.20
Row = dict[str, Any]


def line(case: Case, row: Row) -> str:
    """A row while the program runs."""
    start = f"{case.model}, {case.rows} rows, {how(row)}"
    if "failed" in row:
        return f"{start}: failed, {row['failed']}"
    said = f", predicted {1e3 * row['predicted_s']:,.1f} ({row['error']:+.0%})" if "error" in row else ""
    return f"{start}: {1e3 * row['seconds']:,.1f} ms{said}"


def markdown(rows: list[Row]) -> str:
    """The table of all cases, and what it comes to."""
    lines = ["| model | rows | step | measured, ms | predicted | |", "| --- | ---: | --- | ---: | ---: | ---: |"]
    for row in _measured(rows):
        lines.append(
            f"| {row['model']}{' *' if held_back(of_row(row)) else ''} | {row['rows']:,} | {how(row)} "
            f"| {1e3 * row['seconds']:,.1f} | {1e3 * row['predicted_s']:,.1f} | **{row['error']:+.0%}** |"
        )
    return "\n".join([*lines, "", summary(rows)])


def summary(rows: list[Row]) -> str:
    """How far off the prediction is, apart for the models that it was found on and those that were held back."""
    measured = _measured(rows)
    machine = measured[0]["machine"]
    parts = []
    for title, chosen in (
        ("models that the shares were found on", [row for row in measured if not held_back(of_row(row))]),
        ("models with a star, held back until the shares stood", [row for row in measured if held_back(of_row(row))]),
    ):
        if chosen:
            off = sorted(abs(row["error"]) for row in chosen)
            within = sum(error <= WORST for error in off)
            worst = max(chosen, key=lambda row: abs(row["error"]))
            parts.append(
                f"{len(off)} steps of {title}: off by {statistics.median(off):.0%} in the median, {within} of them within "
                f"{WORST:.0%}, at worst {worst['error']:+.0%} ({worst['model']}, {worst['rows']:,} rows, {how(worst)})"
            )
    return f"{device_name(machine)}, torch {machine['torch']}, {machine['date'][:10]}. " + ". ".join(parts) + "."


def _measured(rows: list[Row]) -> list[Row]:
    found = [row for row in rows if "error" in row]
    if not found:
        raise ValueError("no row holds a prediction beside a measurement: run `python -m benchmarks.time_accuracy` on a GPU first")
    return found
