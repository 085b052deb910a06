"""The figure of the encoders' rows: time and peak against keep, and the contestants side by side."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks import picture
from benchmarks.encoders.report import keep_text
from benchmarks.measure import Row
from benchmarks.report import device_name, three_digits


def draw(rows: list[Row], path: Path) -> None:
    """Write the figure of measured rows: time and peak against keep on the left, the contestants as bars on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(picture.STYLE):
        figure, panels = plt.subplot_mosaic([["seconds", "bars"], ["peak", "bars"]], figsize=(12, 5.4), width_ratios=(1, 1.35))
        _draw_sweep(panels, [row for row in rows if row["case"] == "chunks"])
        _draw_bars(panels["bars"], [row for row in rows if row["case"] == "contestants"])
        machine = rows[0]["machine"]
        figure.tight_layout(rect=(0, 0.04, 1, 1), w_pad=3, h_pad=2)
        where = f"{device_name(machine)} · torch {machine['torch']} · {rows[0]['model']} · {machine['date'][:10]}"
        figure.text(0.01, 0.012, where, fontsize=8, color="#666666")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, facecolor="white")
        plt.close(figure)


def _draw_sweep(panels: dict, rows: list[Row]) -> None:
    """Draw seconds and peak against keep, at the chunk of most rows; plain PyTorch is a dashed line if it fits."""
    cached = [row for row in rows if row["contestant"] == "megabatch"]
    if not cached:
        return
    chunk = statistics.mode(row["chunk"] for row in cached)
    sweep = sorted((row for row in cached if row["chunk"] == chunk), key=lambda row: (row["keep"] == "auto", row["keep"]))
    plain = [row for row in rows if row["contestant"] == "uncached" and row["pairs"] == sweep[0]["pairs"]]
    heading = f"{sweep[0]['pairs']:,} pairs in chunks of {chunk}"
    for name, field, title in (
        ("seconds", "seconds", f"{heading}: seconds per step"),
        ("peak", "peak_allocated_mib", f"{heading}: peak memory, MiB"),
    ):
        panel, values = panels[name], [row[field] for row in sweep]
        panel.plot(range(len(sweep)), values, color=picture.OURS, marker="o", ms=5, lw=2.2)
        for place, value in enumerate(values):
            style = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 9}
            panel.annotate(three_digits(value), (place, value), **style)
        for row in plain:
            panel.axhline(row[field], color=picture.OTHERS[0], lw=1.2, ls=(0, (6, 3)))
            panel.annotate("uncached", (0, row[field]), xytext=(0, 4), textcoords="offset points", color=picture.OTHERS[0])
        panel.set_xticks(range(len(sweep)), [keep_text(row) for row in sweep])
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.12g}")
        panel.set_ylim(0, max([*values, *(row[field] for row in plain)]) * 1.25)
        panel.set_title(title, loc="left", fontsize=11, fontweight="bold")
    panels["peak"].set_xlabel("keep: image chunks whose graphs stay (auto: images + texts)")


def _draw_bars(panel: Any, rows: list[Row]) -> None:
    """Draw a bar of seconds for each contestant, labelled with its peak."""
    places = range(len(rows) - 1, -1, -1)
    colours = [picture.OURS if row["contestant"] == "megabatch" else picture.OTHERS[0] for row in rows]
    panel.barh(places, [row["seconds"] for row in rows], color=colours, height=0.55)
    for place, row in zip(places, rows, strict=True):
        text = f"{three_digits(row['seconds'])} s, {three_digits(row['peak_allocated_mib'])} MiB"
        panel.text(row["seconds"] * 1.02, place, text, va="center", fontsize=9)
    names = [f"{row['contestant']}" + (f"\nkeep {keep_text(row)}" if row["keep"] is not None else "") for row in rows]
    panel.set_yticks(places, names)
    panel.tick_params(length=0, labelbottom=False)
    if rows:
        panel.set_xlim(0, max(row["seconds"] for row in rows) * 1.45)
        title = f"{rows[0]['pairs']:,} pairs in chunks of {rows[0]['chunk']}: a step and its peak"
        panel.set_title(title, loc="left", fontsize=11, fontweight="bold")
