"""The figure of the time benchmark: predicted against measured seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import picture
from benchmarks.memory_accuracy.cases import of_row
from benchmarks.report import device_name
from benchmarks.time_accuracy.cases import fresh_cases, held_back
from benchmarks.time_accuracy.report import WORST, Row

FITTED, LEARNT, FRESH = "used for the fit", "held out; misses were learnt from", "held out afterwards"
GROUPS: dict[str, dict[str, Any]] = {
    FITTED: {"s": 30, "facecolors": "none", "edgecolors": picture.OURS},
    LEARNT: {"s": 24, "marker": "x", "linewidths": 1.2, "color": picture.FAINT},
    FRESH: {"s": 30, "color": picture.OURS},
}


def draw(rows: list[Row], path: Path) -> None:
    """Write one panel with logarithmic axes, the accepted band of errors, and the models that were held out."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if "error" in row]
    with plt.rc_context(picture.STYLE):
        figure, panel = plt.subplots(figsize=(6.4, 5.6))
        span = [0.7e3 * min(row["seconds"] for row in rows), 1.4e3 * max(row["seconds"] for row in rows)]
        panel.fill_between(
            span, [(1 - WORST) * s for s in span], [(1 + WORST) * s for s in span], color=picture.OURS, alpha=0.08, lw=0
        )
        panel.plot(span, span, color=picture.FAINT, lw=0.8)
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
        machine = rows[0]["machine"]
        figure.tight_layout(rect=(0, 0.04, 1, 1))
        figure.text(
            0.01, 0.01, f"{device_name(machine)} · torch {machine['torch']} · {machine['date'][:10]}", fontsize=8, color="#666666"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, facecolor="white")
        plt.close(figure)


def _group(row: Row) -> str:
    case = of_row(row)
    if case in set(fresh_cases()):
        return FRESH
    return LEARNT if held_back(case) else FITTED
