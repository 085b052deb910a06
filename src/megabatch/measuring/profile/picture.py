"""The picture of a profile: rate and memory against the size, what was predicted dashed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...measurements import Measured, Profile
from ...reporting.drawing import LIGHT, Out, Theme, dress, save, sheet
from ...reporting.wording import bytes_text, count_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = Sequence[tuple[int, float]]
# From so many sizes on, every second one is named.
CROWDED = 10


def picture(measured: Measured, out: Out, theme: Theme = LIGHT) -> None:
    """Draws samples a second, with the knee, the size that is enough and the best one marked, and peak memory."""
    found = measured.found
    assert isinstance(found, Profile)
    figure = sheet(10.5, 3.7, theme)
    rates, memory = figure.subplots(1, 2)
    _draw(rates, found, theme, "samples a second", "pairs_per_s", count_text)
    predicted = [(row[found.against], row["batch"] / row["predicted_seconds"]) for row in _ran(found) if "predicted_seconds" in row]
    _dashed(rates, predicted, theme)
    _mark(rates, found, theme)
    held = "reserved_bytes" if all("reserved_bytes" in row for row in _ran(found)) else "peak_bytes"
    title = "memory reserved of the device" if held == "reserved_bytes" else "peak memory of tensors"
    if not all(held in row for row in _ran(found)):
        # Some devices, such as mps, do not tell it.
        memory.set_axis_off()
        memory.set_title("memory is not known on this device", loc="left", fontsize=10.5, color=theme.faint)
        _dress(rates, found, theme, count_text)
        save(figure, out)
        return
    _draw(memory, found, theme, title, held, bytes_text)
    key = "predicted_reserved" if held == "reserved_bytes" else "predicted_bytes"
    _dashed(memory, [(row[found.against], row[key]) for row in _ran(found) if key in row], theme)
    for axes, words in ((rates, count_text), (memory, bytes_text)):
        _dress(axes, found, theme, words)
    save(figure, out)


def _ran(found: Profile) -> list[Any]:
    return [row for row in found.points if "seconds" in row]


def _draw(axes: Axes, found: Profile, theme: Theme, title: str, key: str, words: Callable[[float], str]) -> None:
    points = [(row[found.against], row[key]) for row in _ran(found)]
    axes.plot(*zip(*points, strict=True), color=theme.lines[0], marker="o", ms=5, lw=2.2, label="measured")
    if key == "pairs_per_s":
        # The spread is of seconds: the rate at either end of it.
        low, high = ([row["batch"] / (row["seconds"] + side * row["spread"]) for row in _ran(found)] for side in (1, -0.999))
        axes.fill_between([size for size, _ in points], low, high, color=theme.lines[0], alpha=0.15, lw=0)
    dress(axes, theme, title)
    axes.set_title(words(max(value for _, value in points)), loc="right", fontsize=10, color=theme.lines[0])


def _dashed(axes: Axes, points: Line, theme: Theme) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), color=theme.lines[2], lw=1.6, ls=(0, (4, 3)), label="predicted")


def _mark(axes: Axes, found: Profile, theme: Theme) -> None:
    """A name at each size that stands out; sizes that are several things have several names."""
    names: dict[int, list[str]] = {}
    enough = None if found.enough == found.best else found.enough
    marks = (("knee", found.knee), ("within 5 %", enough), ("best", found.best), ("soonest", found.soonest))
    for name, size in marks:
        if size is not None:
            names.setdefault(size, []).append(name)
    rates = {row[found.against]: row["pairs_per_s"] for row in _ran(found)}
    for size, words in names.items():
        axes.plot([size], [rates[size]], color=theme.lines[1], marker="o", ms=10, mfc="none", mew=2)
        axes.annotate(
            ",\n".join(words), (size, rates[size]), xytext=(0, 9), textcoords="offset points",
            ha="center", va="bottom", fontsize=8.5, color=theme.ink,
        )  # fmt: skip


def _dress(axes: Axes, found: Profile, theme: Theme, words: Callable[[float], str]) -> None:
    from matplotlib.ticker import MultipleLocator

    sizes = [row[found.against] for row in _ran(found)]
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" if len(sizes) < CROWDED or place % 2 == 0 else "" for place, size in enumerate(sizes)])
    axes.minorticks_off()
    axes.set_xlim(min(sizes) / 1.4, max(sizes) * 1.4)
    lost = next((row[found.against] for row in found.points if row.get("out_of_memory")), None)
    ends = "" if lost is None else f"; at {lost:,} memory ran out"
    axes.set_xlabel(f"{found.against}{ends}", color=theme.faint, fontsize=9)
    if words is bytes_text:
        # Round numbers of bytes are powers of two.
        axes.yaxis.set_major_locator(MultipleLocator(2 ** math.ceil(math.log2(axes.get_ylim()[1] / 5))))
    axes.yaxis.set_major_formatter(lambda value, _: words(value))
    if len(axes.get_lines()) > 1 and axes.get_legend_handles_labels()[1][1:]:
        axes.legend(frameon=False, fontsize=8.5, labelcolor=theme.ink, loc="best")
