"""The figure of the memory benchmark: errors of the prediction by case, and all estimates as a factor of the measured peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import picture
from benchmarks.memory_accuracy.report import OTHERS, WORST, Row, options_of
from benchmarks.report import device_name


def draw(rows: list[Row], path: Path) -> None:
    """Write two panels over the same cases: errors of peak and reserve in percent, and factors on a log scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if "error" in row]
    with plt.rc_context(picture.STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12.5, 1.4 + 0.24 * len(rows)), sharey=True)
        _draw_errors(left, rows)
        _draw_factors(right, rows)
        left.set_yticks(range(len(rows)), [f"{row['model']}, {row['rows']:,}, {options_of(row)}" for row in rows], fontsize=8)
        left.set_ylim(len(rows) - 0.4, -0.6)
        machine = rows[0]["machine"]
        figure.tight_layout(rect=(0, 0.03, 1, 1), w_pad=2)
        where = f"{device_name(machine)} · torch {machine['torch']} · {machine['date'][:10]}"
        figure.text(0.01, 0.008, where, fontsize=8, color="#666666")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, facecolor="white")
        plt.close(figure)


def _draw_errors(panel: Any, rows: list[Row]) -> None:
    places = range(len(rows))
    panel.axvspan(-100 * WORST, 100 * WORST, color=picture.OURS, alpha=0.07, lw=0)
    panel.axvline(0, color=picture.FAINT, lw=0.8)
    reserved = [100 * row["reserved_error"] for row in rows]
    panel.scatter(reserved, places, s=26, facecolors="none", edgecolors=picture.FAINT, label="reserved")
    panel.scatter([100 * row["error"] for row in rows], places, s=26, color=picture.OURS, label="peak", zorder=3)
    edge = 1.1 * max(100 * WORST, *map(abs, reserved))
    panel.set_xlim(-edge, edge)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:+.0f} %" if value else "0")
    panel.set_title("predicted against measured", loc="left", fontsize=11, fontweight="bold")
    panel.legend(loc="upper left", frameon=False, fontsize=9)


def _draw_factors(panel: Any, rows: list[Row]) -> None:
    places = range(len(rows))
    panel.axvline(1, color=picture.FAINT, lw=0.8)
    for number, (name, title) in enumerate(OTHERS.items()):
        factors = [row[f"others_{name}"] / row["measured"] for row in rows]
        panel.scatter(factors, places, s=24, color=picture.OTHERS[number], marker="sD^"[number], label=title)
    panel.scatter([1 + row["error"] for row in rows], places, s=26, color=picture.OURS, label="megabatch", zorder=3)
    panel.set_xscale("log")
    # Space on the right for the legend.
    panel.set_xlim(right=10 * panel.get_xlim()[1])
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    panel.tick_params(axis="y", length=0)
    panel.set_title("others too, as a factor of the measured peak", loc="left", fontsize=11, fontweight="bold")
    panel.legend(loc="upper right", frameon=False, fontsize=9)
