"""Pictures of a plan: memory and time against the batch, and what they are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING

from ..reporting.drawing import LIGHT, Theme, dress, save, sheet
from ..reporting.wording import bytes_text, seconds_text
from .plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Inches.
SIZE = 7.2, 3.4
# Parts below this share of the whole are drawn together.
LEAST = 0.01


def memory_curve(plan: Plan, out: IO[bytes], theme: Theme = LIGHT) -> None:
    """Draws peak memory against the batch, the device's memory and the part of it that may be used."""
    figure = sheet(*SIZE, theme)
    axes = figure.add_subplot()
    points = [(batch, peak) for batch, peak, _ in plan.curve]
    _line(axes, plan, points, theme, bytes_text)
    for level, name in ((plan.device_bytes, "the device has"), (plan.limit_bytes, "may be used")):
        axes.axhline(level, color=theme.lines[1], lw=1.4, ls=(0, (4, 3)))
        axes.annotate(
            f"{name}: {bytes_text(level)}",
            (points[0][0], level),
            xytext=(0, 4),
            textcoords="offset points",
            fontsize=9,
            color=theme.ink,
        )
    axes.set_ylim(0, 1.15 * plan.device_bytes)
    # Round numbers of bytes are powers of two.
    axes.set_yticks(range(0, round(1.15 * plan.device_bytes), 2 ** math.ceil(math.log2(plan.device_bytes / 5))))
    _dress(axes, theme, "peak memory of a GPU; the chunk is chosen anew at each batch", bytes_text)
    save(figure, out)


def time_curve(plan: Plan, out: IO[bytes], theme: Theme = LIGHT) -> None:
    """Draws the seconds of a step against the batch."""
    figure = sheet(*SIZE, theme)
    axes = figure.add_subplot()
    _line(axes, plan, [(batch, seconds) for batch, _, seconds in plan.curve], theme, seconds_text)
    axes.set_yscale("log", base=2)
    _dress(axes, theme, "time of a step, predicted", seconds_text)
    save(figure, out)


def breakdown(plan: Plan, out: IO[bytes], theme: Theme = LIGHT) -> None:
    """Draws what the peak and a step are made of, as two bars of parts."""
    figure = sheet(*SIZE, theme)
    bars: tuple[tuple[str, Mapping[str, float], Callable[[float], str]], ...] = (
        ("memory", plan.memory, bytes_text),
        ("time of a step", plan.time, seconds_text),
    )
    for place, (title, parts, words) in enumerate(bars):
        axes = figure.add_subplot(1, 2, place + 1)
        shown = _gathered(parts)
        names = list(shown)[::-1]
        axes.barh(names, [shown[name] for name in names], color=theme.lines[0], height=0.6)
        for row, name in enumerate(names):
            axes.annotate(
                words(shown[name]), (shown[name], row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5,
                color=theme.ink,
            )  # fmt: skip
        axes.set_xlim(0, 1.35 * max(shown.values()))
        axes.set_xticks([])
        dress(axes, theme, title, grid=False)
    save(figure, out)


def _gathered(parts: Mapping[str, float]) -> dict[str, float]:
    """The parts, largest first, small ones together."""
    whole = sum(parts.values())
    large = {name: part for name, part in parts.items() if part >= LEAST * whole}
    rest = whole - sum(large.values())
    ordered = dict(sorted(large.items(), key=lambda item: -item[1]))
    return {**ordered, "the rest": rest} if rest > 0 else ordered


def _line(axes: Axes, plan: Plan, points: Sequence[tuple[int, float]], theme: Theme, words: Callable[[float], str]) -> None:
    batches, values = zip(*points, strict=True)
    axes.plot(batches, values, color=theme.lines[0], marker="o", ms=5, lw=2.2)
    chosen = next(value for batch, value in points if batch == plan.batch)
    axes.plot([plan.batch], [chosen], color=theme.lines[0], marker="o", ms=11, mfc=theme.paper, mew=2.4)
    axes.annotate(
        words(chosen), (plan.batch, chosen), xytext=(0, -18), textcoords="offset points", ha="center", fontsize=9, color=theme.ink
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.minorticks_off()
    axes.set_xlabel("batch", color=theme.faint, fontsize=9)


def _dress(axes: Axes, theme: Theme, title: str, words: Callable[[float], str]) -> None:
    dress(axes, theme, title)
    axes.yaxis.set_major_formatter(lambda value, _: words(value))
