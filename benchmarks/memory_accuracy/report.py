"""Rows of the memory benchmark as text: a line per case, the tables of the documentation, a summary."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.memory_accuracy.cases import GIB, HELD_OUT
from benchmarks.report import device_name

# Accepted errors: worst and median of the peak, worst of the reserve.
WORST, MEDIAN, WORST_RESERVED = 0.05, 0.015, 0.10
OTHERS = {"rule_of_thumb": "rule of thumb", "torchinfo": "torchinfo", "accelerate": "accelerate"}
Row = dict[str, Any]


def line(row: Row) -> str:
    """Return the line that is printed while the program runs."""
    start = f"{row['model']}, {row['rows']} rows, {options_of(row)}"
    if "failed" in row:
        return f"{start}: failed, {row['failed']}"
    if row.get("kind") == "limit":
        ran = "ran" if row.get("ran") else f"out of memory: {row.get('out_of_memory')}"
        return f"{start}: {row['predicted_reserved'] / GIB:.2f} of {row['limit'] / GIB:.0f} GiB predicted, {ran}"
    if "error" not in row:
        return f"{start}: predicted {row['predicted'] / GIB:.2f} GiB"
    return f"{start}: {row['measured'] / GIB:.2f} GiB, off by {row['error']:+.2%}; reserved off by {row['reserved_error']:+.2%}"


def options_of(row: Row) -> str:
    """Return the precision and the other options of a step."""
    options = [row["precision"]]
    if row["objective"] != "supervised":
        options.append(row["objective"])
    if row["checkpointing"]:
        options.append("checkpointing")
    if row["chunk"] is not None:
        options.append(f"chunks of {row['chunk']}")
    if row["keep"]:
        options.append(f"keep {row['keep']}")
    return ", ".join(options)


def markdown(rows: list[Row]) -> str:
    """Return the table of all cases and its summary."""
    lines = [
        f"| model | rows | step | peak, GiB | predicted | reserved, GiB | predicted | {' | '.join(OTHERS.values())} |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in _measured(rows):
        others = " | ".join(f"{row[f'others_{name}'] / row['measured'] - 1:+.0%}" for name in OTHERS)
        lines.append(
            f"| {_marked(row)} | {row['rows']:,} | {options_of(row)} | {row['measured'] / GIB:.2f} | **{row['error']:+.2%}** "
            f"| {row['measured_reserved'] / GIB:.2f} | {row['reserved_error']:+.1%} | {others} |"
        )
    return "\n".join([*lines, "", summary(rows)])


def limits_markdown(rows: list[Row]) -> str:
    """Return the table of the steps that ran within a limit."""
    lines = [
        "| model | step | limit | largest said to fit | predicted | reserved when it ran | |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in (row for row in rows if row.get("kind") == "limit"):
        size = f"{row['rows']:,} rows" if row["objective"] == "supervised" else f"chunks of {row['chunk']:,}"
        numbers = [f"{row[name] / GIB:.2f} GiB" for name in ("limit", "predicted_reserved", "measured_reserved")]
        outcome = "ran" if row["ran"] else "**out of memory**"
        lines.append(f"| {row['model']} | {options_of(row)} | {numbers[0]} | {size} | {numbers[1]} | {numbers[2]} | {outcome} |")
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    """Return the errors over all cases, whether they are accepted, and the errors of other estimates."""
    measured = _measured(rows)
    machine = measured[0]["machine"]
    peak, reserved = (sorted(abs(row[name]) for row in measured) for name in ("error", "reserved_error"))
    seconds = statistics.median(row["predict_seconds"] for row in measured)
    missed = [
        f"{what} ({bound:.1%})"
        for what, value, bound in (
            ("the worst peak", peak[-1], WORST),
            ("the median peak", statistics.median(peak), MEDIAN),
            ("the worst reserve", reserved[-1], WORST_RESERVED),
        )
        if value > bound
    ]
    others = ", ".join(f"{title} {_span(measured, name)}" for name, title in OTHERS.items())
    held_out = [abs(row["error"]) for row in measured if row["model"] in HELD_OUT]
    unseen = f"Models with a star, on which no rule was found, are off by at most {max(held_out):.1%}. " if held_out else ""
    return (
        f"{len(measured)} cases on {device_name(machine)}, torch {machine['torch']}, {machine['date'][:10]}: the peak is off by "
        f"{statistics.median(peak):.2%} in the median and {peak[-1]:.1%} at worst ({_name(measured, 'error')}), the reserve by "
        f"{statistics.median(reserved):.1%} and {reserved[-1]:.1%} ({_name(measured, 'reserved_error')}). "
        f"Held to {WORST:.0%}, {MEDIAN:.1%} and, for the reserve, {WORST_RESERVED:.0%}: "
        f"{'missed by ' + ', '.join(missed) if missed else 'all met'}. {unseen}A prediction takes {seconds:.0f} s of one core. "
        f"Of the same peaks others say: {others}."
    )


def _marked(row: Row) -> str:
    return f"{row['model']} *" if row["model"] in HELD_OUT else str(row["model"])


def _name(measured: list[Row], error: str) -> str:
    worst = max(measured, key=lambda row: abs(row[error]))
    return f"{worst['model']}, {worst['rows']} rows, {options_of(worst)}"


def _span(measured: list[Row], name: str) -> str:
    off = sorted(row[f"others_{name}"] / row["measured"] - 1 for row in measured)
    return f"{off[0]:+.0%} to {off[-1]:+.0%}"


def _measured(rows: list[Row]) -> list[Row]:
    measured = [row for row in rows if "error" in row]
    if not measured:
        raise ValueError("no row holds a measurement: run `python -m benchmarks.memory_accuracy` on a GPU first")
    return measured
