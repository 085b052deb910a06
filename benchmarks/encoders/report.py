"""Rows of the encoder benchmark as progress lines, tables and a figure."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.figures import OTHERS, OURS, canvas
from benchmarks.measure import Row
from benchmarks.report import TITLES, device_name, markdown_table, reason, three_digits

HEADERS = (
    "case",
    "contestant",
    "pairs",
    "chunk",
    "keep",
    "seconds",
    "pairs/s",
    "peak MiB",
    "reserved MiB",
    "useful",
    "hardware",
    "gradient error",
)


def table(rows: list[Row]) -> list[tuple[str, ...]]:
    """Return the cells under HEADERS, one tuple per measured row."""
    return [
        (
            row["case"],
            row["contestant"],
            f"{row['pairs']:,}",
            f"{row['chunk'] or ''}",
            keep_text(row),
            three_digits(row["seconds"]),
            three_digits(row["pairs"] / row["seconds"]),
            three_digits(row["peak_allocated_mib"]),
            "" if row["peak_reserved_mib"] is None else three_digits(row["peak_reserved_mib"]),
            f"{row['useful_share']:.1%}",
            f"{row['hardware_share']:.1%}",
            f"{next(iter(row['errors'].values())):.1e}",
        )
        for row in rows
    ]


def keep_text(row: Row) -> str:
    """Return `keep` of a row and, for "auto", how many chunks of images and of texts were kept."""
    if row["keep"] == "auto" and row.get("kept"):
        return f"auto: {row['kept']['image']} + {row['kept']['text']}"
    return "" if row["keep"] is None else str(row["keep"])


def markdown(rows: list[Row]) -> str:
    """Return a table with a line for each row, and its caption."""
    lines = []
    for row in rows:
        name = row["contestant"] + (", compiled" if row["compiled"] else "")
        name = f"**{name}**" if row["contestant"] == TITLES["ours"] else name
        numbers = [_short_reason(row), "", "", ""]
        if "seconds" in row:
            shares = [f"{row[f'{kind}_share']:.0%}" for kind in ("useful", "hardware")]
            numbers = [three_digits(row["seconds"]), three_digits(row["peak_allocated_mib"]), *shares]
        lines.append([name, f"{row['pairs']:,}", f"{row['chunk'] or ''}", keep_text(row), *numbers])
    headers = ("step", "pairs", "chunk", "keep", "seconds", "peak MiB", "useful", "hardware")
    return f"{markdown_table(headers, lines, left=('step',))}\n\n{caption(rows)}"


def caption(rows: list[Row]) -> str:
    """Return what a step is, the machine, the versions, the date, and what the numbers count."""
    measured = [row for row in rows if "seconds" in row]
    if not measured:
        raise ValueError("no row holds a measurement: run `python -m benchmarks.encoders` first")
    row, machine = measured[0], measured[0]["machine"]
    # Compiled towers are checked in bf16 only, at a batch that fits only in chunks.
    precision, exact = ("float32", "float64") if "float32" in row["errors"] else ("bfloat16", "a two-pass step in float32")
    worst = max(each["errors"][precision] for each in measured)
    # Rows of one contestant share the check, so the last of them represents all.
    factors = {each["contestant"]: each["scale_factor"] for each in measured if "float32" in each["errors"]}
    wrong = [f"{factor:.1f} times too large in {name}" for name, factor in factors.items() if factor and factor > 1.1]
    scale = f" The gradient of the scale was {', '.join(wrong)}." if wrong else ""
    return (
        f"A whole training step of {row['model']}, bf16 autocast, AdamW, inputs in host memory, on {device_name(machine)} with "
        f"torch {machine['torch']} and transformers {machine['transformers']}, {machine['date'][:10]}. The peak includes weights, "
        f"gradients and optimizer state. Shares are of the rate of a large matrix product ({row['matmul_flops_per_s'] / 1e12:,.3g} "
        f"TFLOP/s): useful counts forward and backward once, hardware also what is computed again. Before anything was timed, "
        f"encoder gradients in {precision}, of {row['check_pairs']} pairs, were off from {exact} by at most {worst:.0e}.{scale}"
    )


def what(row: Row) -> str:
    chunk = "" if row["chunk"] is None else f", chunk {row['chunk']}"
    keep = "" if row["keep"] is None else f", keep {keep_text(row)}"
    return f"{row['contestant']}{', compiled' if row['compiled'] else ''}, {row['pairs']:,} pairs{chunk}{keep}"


def outcome(row: Row) -> str:
    if "seconds" not in row:
        return reason(row)
    kept = f", {keep_text(row)} kept" if row["keep"] == "auto" else ""
    cost = f"{three_digits(row['seconds'])} s, {three_digits(row['peak_allocated_mib'])} MiB{kept}"
    shares = f"{row['useful_share']:.1%} useful, {row['hardware_share']:.1%} hardware"
    factor = "none" if row["scale_factor"] is None else f"{row['scale_factor']:.3f} of the true one"
    return f"{cost}, {shares}; gradient {off(row['errors'])}, of the scale {factor}"


def off(errors: dict[str, float]) -> str:
    return "off by " + ", ".join(f"{error:.0e} in {precision}" for precision, error in errors.items())


def _short_reason(row: Row) -> str:
    if row.get("right") is False:
        return "refused: wrong gradient"
    return "out of memory" if row.get("error") == "out of memory" else "failed"


def draw(rows: list[Row], path: Path) -> None:
    """Write the figure of measured rows: time and peak against keep on the left, the contestants as bars on the right."""
    machine = rows[0]["machine"]
    where = f"{device_name(machine)} · torch {machine['torch']} · {rows[0]['model']} · {machine['date'][:10]}"
    with canvas(path, where, w_pad=3) as plt:
        _, panels = plt.subplot_mosaic([["seconds", "bars"], ["peak", "bars"]], figsize=(12, 5.4), width_ratios=(1, 1.35))
        _draw_sweep(panels, [row for row in rows if row["case"] == "chunks"])
        _draw_bars(panels["bars"], [row for row in rows if row["case"] == "contestants"])


def _draw_sweep(panels: dict, rows: list[Row]) -> None:
    """Draw seconds and peak against keep, at the chunk that most rows have; plain PyTorch is a dashed line where it fits."""
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
        panel.plot(range(len(sweep)), values, color=OURS, marker="o", ms=5, lw=2.2)
        for place, value in enumerate(values):
            style = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 9}
            panel.annotate(three_digits(value), (place, value), **style)
        for row in plain:
            panel.axhline(row[field], color=OTHERS[0], lw=1.2, ls=(0, (6, 3)))
            panel.annotate("uncached", (0, row[field]), xytext=(0, 4), textcoords="offset points", color=OTHERS[0])
        panel.set_xticks(range(len(sweep)), [keep_text(row) for row in sweep])
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.12g}")
        panel.set_ylim(0, max([*values, *(row[field] for row in plain)]) * 1.25)
        panel.set_title(title, loc="left", fontsize=11, fontweight="bold")
    panels["peak"].set_xlabel("keep: image chunks whose graphs stay (auto: images + texts)")


def _draw_bars(panel: Any, rows: list[Row]) -> None:
    """Draw a bar of seconds for each contestant, with its peak beside it."""
    places = range(len(rows) - 1, -1, -1)
    colors = [OURS if row["contestant"] == "megabatch" else OTHERS[0] for row in rows]
    panel.barh(places, [row["seconds"] for row in rows], color=colors, height=0.55)
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
