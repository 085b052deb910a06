"""Rows of the time benchmark as progress lines, a table, a summary and a figure."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.figures import FAINT, OURS, canvas
from benchmarks.memory_accuracy.cases import Case, of_row
from benchmarks.memory_accuracy.report import step_text
from benchmarks.report import device_name, markdown_table
from benchmarks.time_accuracy.cases import fresh_cases, held_out

# Required accuracy.
WORST = 0.20
Row = dict[str, Any]
# Groups of models in the figure; for those that were held out, it shows the first prediction.
FITTED, LEARNT, FRESH = "used for the fit", "held out at first, then learnt from", "held out"
GROUPS: dict[str, dict[str, Any]] = {
    FITTED: {"s": 30, "facecolors": "none", "edgecolors": OURS},
    LEARNT: {"s": 24, "marker": "x", "linewidths": 1.2, "color": FAINT},
    FRESH: {"s": 30, "color": OURS},
}


def line(case: Case, row: Row) -> str:
    """Return the progress line of a row."""
    start = f"{case.model}, {case.rows} rows, {step_text(row)}"
    if "failed" in row:
        return f"{start}: failed, {row['failed']}"
    if "operations" in row:
        return f"{start}: {sum(us for _, _, us, _ in row['operations']) / 1e3:,.1f} ms of the device"
    predicted = f", predicted {1e3 * row['predicted_s']:,.1f} ({row['error']:+.0%})" if "error" in row else ""
    return f"{start}: {1e3 * row['seconds']:,.1f} ms{predicted}"


def markdown(rows: list[Row]) -> str:
    """Return the table of all cases, and the summary."""
    lines = [
        [
            row["model"],
            f"{row['rows']:,}",
            step_text(row),
            f"{1e3 * row['seconds']:,.1f}",
            f"{1e3 * row['predicted_s']:,.1f}",
            f"**{row['error']:+.0%}**",
            f"{_blind_error(row):+.0%}" if "blind_s" in row else "",
        ]
        for row in _measured(rows)
    ]
    headers = ("model", "rows", "step", "measured, ms", "predicted", "", "held out")
    return f"{markdown_table(headers, lines, left=('model', 'step'))}\n\n{summary(rows)}"


def summary(rows: list[Row]) -> str:
    """Return the errors of the prediction, and of the first prediction for models that were held out of the fit."""
    measured = _measured(rows)
    machine = measured[0]["machine"]
    sentences = [
        f"{len(measured)} steps on {device_name(machine)}, torch {machine['torch']}, {machine['date'][:10]}: {_off(measured)}."
    ]
    held = [row | {"error": _blind_error(row)} for row in measured if "blind_s" in row]
    fresh = set(fresh_cases())
    before, after = ([row for row in held if (of_row(row) in fresh) == late] for late in (False, True))
    if held:
        sentences.append("The last column is the error of the first prediction for models that were not used for the fit.")
    if before:
        sentences.append(f"Models whose errors then improved the classes: {_off(before)}.")
    if after:
        sentences.append(f"Models that were added afterwards: {_off(after)}.")
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


def draw(rows: list[Row], path: Path) -> None:
    """Write one panel with two logarithmic axes, the required accuracy as a band, and the models that were held out."""
    rows = [row for row in rows if "error" in row]
    machine = rows[0]["machine"]
    with canvas(path, f"{device_name(machine)} · torch {machine['torch']} · {machine['date'][:10]}") as plt:
        _, panel = plt.subplots(figsize=(6.4, 5.6))
        span = [0.7e3 * min(row["seconds"] for row in rows), 1.4e3 * max(row["seconds"] for row in rows)]
        panel.fill_between(span, [(1 - WORST) * s for s in span], [(1 + WORST) * s for s in span], color=OURS, alpha=0.08, lw=0)
        panel.plot(span, span, color=FAINT, lw=0.8)
        for title, style in GROUPS.items():
            chosen = [row for row in rows if _group(row) == title]
            x, y = [1e3 * row["seconds"] for row in chosen], [1e3 * row.get("blind_s", row["predicted_s"]) for row in chosen]
            panel.scatter(x, y, label=title, zorder=3, **style)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlim(*span)
        panel.set_ylim(*span)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        panel.set_xlabel("measured, ms per step")
        panel.set_ylabel("predicted, ms")
        panel.set_title(f"a step, predicted and measured; band: {WORST:.0%}", loc="left", fontsize=11, fontweight="bold")
        panel.legend(loc="upper left", frameon=False, fontsize=9)


def _group(row: Row) -> str:
    case = of_row(row)
    if case in set(fresh_cases()):
        return FRESH
    return LEARNT if held_out(case) else FITTED
