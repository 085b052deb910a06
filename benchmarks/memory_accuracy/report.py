"""Rows of the memory benchmark as progress lines, tables, a summary and a figure."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.figures import FAINT, OURS, canvas
from benchmarks.figures import OTHERS as COLORS
from benchmarks.memory_accuracy.cases import GIB, HELD_OUT
from benchmarks.report import device_name, markdown_table

# Required accuracy: the worst and the median error of the peak, the worst of the reserve.
WORST, MEDIAN, WORST_RESERVED = 0.05, 0.015, 0.10
OTHERS = {"rule_of_thumb": "rule of thumb", "torchinfo": "torchinfo", "accelerate": "accelerate"}
Row = dict[str, Any]


def line(row: Row) -> str:
    """Return the progress line of a row."""
    start = f"{row['model']}, {row['rows']} rows, {step_text(row)}"
    if "failed" in row:
        return f"{start}: failed, {row['failed']}"
    if row.get("kind") == "limit":
        ran = "ran" if row.get("ran") else f"out of memory: {row.get('out_of_memory')}"
        return f"{start}: {row['predicted_reserved'] / GIB:.2f} of {row['limit'] / GIB:.0f} GiB predicted, {ran}"
    if "error" not in row:
        return f"{start}: predicted {row['predicted'] / GIB:.2f} GiB"
    return f"{start}: {row['measured'] / GIB:.2f} GiB, off by {row['error']:+.2%}; reserved off by {row['reserved_error']:+.2%}"


def step_text(row: Row) -> str:
    """Return the precision and the other options of a step."""
    parts = [row["precision"]]
    if row["objective"] != "supervised":
        parts.append(row["objective"])
    if row["checkpointing"]:
        parts.append("checkpointing")
    if row["chunk"] is not None:
        parts.append(f"chunks of {row['chunk']}")
    if row["keep"]:
        parts.append(f"keep {row['keep']}")
    if row.get("as_run"):
        parts.append("as in train")
    return ", ".join(parts)


def markdown(rows: list[Row]) -> str:
    """Return the table of all cases, and the summary."""
    lines = [
        [
            _marked(row),
            f"{row['rows']:,}",
            step_text(row),
            f"{row['measured'] / GIB:.2f}",
            f"**{row['error']:+.2%}**",
            f"{row['measured_reserved'] / GIB:.2f}",
            f"{row['reserved_error']:+.1%}",
            *(f"{row[f'others_{name}'] / row['measured'] - 1:+.0%}" for name in OTHERS),
        ]
        for row in _measured(rows)
    ]
    headers = ("model", "rows", "step", "peak, GiB", "predicted", "reserved, GiB", "predicted", *OTHERS.values())
    return f"{markdown_table(headers, lines, left=('model', 'step'))}\n\n{summary(rows)}"


def limits_markdown(rows: list[Row]) -> str:
    """Return the table of what ran within a limit."""
    lines = []
    for row in (row for row in rows if row.get("kind") == "limit"):
        size = f"{row['rows']:,} rows" if row["objective"] == "supervised" else f"chunks of {row['chunk']:,}"
        limit, predicted, measured = (f"{row[name] / GIB:.2f} GiB" for name in ("limit", "predicted_reserved", "measured_reserved"))
        outcome = "ran" if row["ran"] else "**out of memory**"
        lines.append([row["model"], step_text(row), limit, size, predicted, measured, outcome])
    headers = ("model", "step", "limit", "largest predicted to fit", "predicted", "reserved when it ran", "")
    return markdown_table(headers, lines, left=("model", "step", ""))


def summary(rows: list[Row]) -> str:
    """Return how accurate the prediction is over all cases, whether that is accurate enough, and how far off others are."""
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
    unseen = f"Models with a star, from which no rule was derived, are off by at most {max(held_out):.1%}. " if held_out else ""
    return (
        f"{len(measured)} cases on {device_name(machine)}, torch {machine['torch']}, {machine['date'][:10]}: the peak is off by "
        f"{statistics.median(peak):.2%} in the median and {peak[-1]:.1%} at worst ({_name(measured, 'error')}), the reserve by "
        f"{statistics.median(reserved):.1%} and {reserved[-1]:.1%} ({_name(measured, 'reserved_error')}). "
        f"Required are {WORST:.0%}, {MEDIAN:.1%} and, for the reserve, {WORST_RESERVED:.0%}: "
        f"{'missed by ' + ', '.join(missed) if missed else 'all met'}. {unseen}A prediction takes {seconds:.0f} s of one core. "
        f"Errors of other estimates: {others}."
    )


def _marked(row: Row) -> str:
    return f"{row['model']} *" if row["model"] in HELD_OUT else str(row["model"])


def _name(measured: list[Row], error: str) -> str:
    worst = max(measured, key=lambda row: abs(row[error]))
    return f"{worst['model']}, {worst['rows']} rows, {step_text(worst)}"


def _span(measured: list[Row], name: str) -> str:
    off = sorted(row[f"others_{name}"] / row["measured"] - 1 for row in measured)
    return f"{off[0]:+.0%} to {off[-1]:+.0%}"


def _measured(rows: list[Row]) -> list[Row]:
    measured = [row for row in rows if "error" in row]
    if not measured:
        raise ValueError("no row holds a measurement: run `python -m benchmarks.memory_accuracy` on a GPU first")
    return measured


def draw(rows: list[Row], path: Path) -> None:
    """Write two panels over the same cases: errors of peak and reserve in percent, and factors on a log scale."""
    rows = [row for row in rows if "error" in row]
    machine = rows[0]["machine"]
    with canvas(path, f"{device_name(machine)} · torch {machine['torch']} · {machine['date'][:10]}", rect=(0, 0.03, 1, 1)) as plt:
        _, (left, right) = plt.subplots(1, 2, figsize=(12.5, 1.4 + 0.24 * len(rows)), sharey=True)
        _draw_errors(left, rows)
        _draw_factors(right, rows)
        left.set_yticks(range(len(rows)), [f"{row['model']}, {row['rows']:,}, {step_text(row)}" for row in rows], fontsize=8)
        left.set_ylim(len(rows) - 0.4, -0.6)


def _draw_errors(panel: Any, rows: list[Row]) -> None:
    places = range(len(rows))
    panel.axvspan(-100 * WORST, 100 * WORST, color=OURS, alpha=0.07, lw=0)
    panel.axvline(0, color=FAINT, lw=0.8)
    reserved = [100 * row["reserved_error"] for row in rows]
    panel.scatter(reserved, places, s=26, facecolors="none", edgecolors=FAINT, label="reserved")
    panel.scatter([100 * row["error"] for row in rows], places, s=26, color=OURS, label="peak", zorder=3)
    edge = 1.1 * max(100 * WORST, *map(abs, reserved))
    panel.set_xlim(-edge, edge)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:+.0f} %" if value else "0")
    panel.set_title("predicted against measured", loc="left", fontsize=11, fontweight="bold")
    panel.legend(loc="upper left", frameon=False, fontsize=9)


def _draw_factors(panel: Any, rows: list[Row]) -> None:
    places = range(len(rows))
    panel.axvline(1, color=FAINT, lw=0.8)
    for number, (name, title) in enumerate(OTHERS.items()):
        factors = [row[f"others_{name}"] / row["measured"] for row in rows]
        panel.scatter(factors, places, s=24, color=COLORS[number], marker="sD^"[number], label=title)
    panel.scatter([1 + row["error"] for row in rows], places, s=26, color=OURS, label="megabatch", zorder=3)
    panel.set_xscale("log")
    # Space on the right for the names.
    panel.set_xlim(right=10 * panel.get_xlim()[1])
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    panel.tick_params(axis="y", length=0)
    panel.set_title("others too, as a factor of the measured peak", loc="left", fontsize=11, fontweight="bold")
    panel.legend(loc="upper right", frameon=False, fontsize=9)
