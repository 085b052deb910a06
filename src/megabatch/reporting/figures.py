"""Pictures of a run and of a study: curves, memory, recall against the batch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from .drawing import LIGHT, Out, Theme, dress, save, sheet
from .history import History, Row, number, read_history
from .wording import bytes_text, count_text, percent_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = list[tuple[float, float]]
# More points than this on a curve cannot be told apart.
MOST_POINTS = 400


class Panel(NamedTuple):
    """One drawing of a figure: its title, its lines by name, how a value is written, and whether zero belongs in the picture."""

    title: str
    lines: dict[str, Points]
    words: Callable[[float], str]
    from_zero: bool = True


def curves(log: Path, out: Out, theme: Theme = LIGHT) -> None:
    """Draws what a run has logged against the samples seen: loss, recall, held-out recall, learning rate, speed, memory."""
    panels = curve_panels(read_history(log))
    rows = max(1, math.ceil(len(panels) / 3))
    figure = sheet(12, 3.1 * rows, theme)
    for place, panel in enumerate(panels):
        draw_panel(figure.add_subplot(rows, 3, place + 1), panel, theme)
    if not panels:
        figure.text(0.5, 0.5, "no step has been logged yet", ha="center", va="center", color=theme.faint)
    save(figure, out)


def curve(panel: Panel, out: Out, theme: Theme = LIGHT) -> None:
    """Draws one of the panels alone, with letters that can be read at a third of a page or on a phone."""
    figure = sheet(3.7, 2.6, theme)
    draw_panel(figure.add_subplot(), panel, theme)
    save(figure, out)


def curve_panels(history: History) -> list[Panel]:
    """The panels that there are values for."""
    steps, tests = history.steps, history.evaluations
    panels = [
        Panel("loss", {"": _series(steps, "loss")}, _short, from_zero=False),
        Panel("in-batch recall at 1", {"": _series(steps, "recall")}, percent_text),
        Panel("in-batch accuracy", {"": _series(steps, "accuracy")}, percent_text),
        Panel("held-out recall, mean of both ways", {f"at {k}": _both_ways(tests, k) for k in ("1", "5", "10")}, percent_text),
        Panel("held-out accuracy", {"": _series(tests, "accuracy")}, percent_text),
        Panel("learning rate", {"": _series(steps, "lr")}, _short),
        Panel("pairs a second", {"": _series(steps, "pairs_per_s")}, count_text),
        Panel("memory in use", {"": _series(steps, "memory_bytes")}, bytes_text),
    ]
    return [panel for panel in panels if all(panel.lines.values())]


def flat_memory(flat: Iterable[Row], out: Out, theme: Theme = LIGHT) -> None:
    """Draws peak memory against the pairs of a step at one chunk, beside what it would be if it grew with the pairs.

    flat: rows with pairs, chunk and peak_bytes, as in result.json.
    """
    points = flat_points(flat)
    if not points:
        raise ValueError("flat memory: no row has both pairs and peak_bytes; take a step at one batch at least")
    figure = sheet(7.2, 3.4, theme)
    axes = figure.add_subplot()
    words: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "bbox": {"fc": theme.paper, "ec": "none", "pad": 1}}
    (first_pairs, first_peak), highest = points[0], max(peak for _, peak in points)
    if len(points) > 1:
        # Up to where it leaves the picture; many points, since it is curved where the axis is logarithmic.
        times = [1 + (2.2 * highest / first_peak - 1) * i / 200 for i in range(201)]
        proportional = [(first_pairs * t, first_peak * t) for t in times]
        axes.plot(*zip(*proportional, strict=True), color=theme.faint, lw=1.2, ls=(0, (1, 2)))
        place = (first_pairs * 2 * highest / first_peak, 2 * highest)
        axes.annotate("in proportion\nto the pairs", place, xytext=(12, 0), va="center", color=theme.faint, **words)
    axes.plot(*zip(*points, strict=True), color=theme.lines[0], marker="o", ms=6, lw=2.4)
    for pairs, peak in points:
        axes.annotate(bytes_text(peak), (pairs, peak), xytext=(0, -18), ha="center", color=theme.ink, **words)
    axes.set_ylim(0, 2.2 * highest)
    _doublings(axes, [pairs for pairs, _ in points], [f"{pairs:,.0f}" for pairs, _ in points])
    _dress(axes, theme, "peak memory of one step, the chunk being the same", bytes_text)
    axes.set_xlabel("pairs of the step", color=theme.faint, fontsize=9)
    save(figure, out)


def flat_points(flat: Iterable[Row]) -> Points:
    """(pairs, peak in bytes) of the rows that have both, by pairs."""
    points = ((number(row, "pairs"), number(row, "peak_bytes")) for row in flat)
    return sorted((pairs, peak) for pairs, peak in points if pairs and peak and min(pairs, peak) > 0)


class Best(NamedTuple):
    """What a batch reaches at its best learning rate: held-out recall at 1 of each seed, mean of both directions."""

    batch: int
    lr: float
    steps: int
    recalls: list[float]


def best_rates(rows: Iterable[Row]) -> list[Best]:
    """For each batch, the learning rate whose mean over seeds is highest. A run without a recall (it diverged) counts as zero.

    The mean of choosing_1 where rows have one (recall on other held-out pairs than those reported), else that of the recall itself.

    >>> rows = [{"batch": 64, "lr": lr, "steps": 10, "x_to_y_1": r, "y_to_x_1": r} for lr, r in ((1e-3, 0.25), (1e-2, None))]
    >>> best_rates(rows)
    [Best(batch=64, lr=0.001, steps=10, recalls=[0.25])]
    """
    cases: dict[int, dict[float, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        cases[int(row["batch"])][float(row["lr"])].append(row)
    found = []
    for batch, rates in sorted(cases.items()):
        lr, runs = max(sorted(rates.items()), key=lambda case: fmean(_choosing(run) for run in case[1]))
        found.append(Best(batch, lr, int(runs[0]["steps"]), [_recall(run) for run in runs]))
    return found


def batch_study(rows: Sequence[Row], out: Out, theme: Theme = LIGHT) -> None:
    """Draws held-out recall at 1 against the batch at an equal number of samples, each batch at its best learning rate.

    rows: one for each run: batch, lr, seed, samples, steps, x_to_y_1, y_to_x_1. The line is the mean over seeds, the bar reaches
    from the worst seed to the best. The number of updates is written above.
    """
    best = best_rates(rows)
    if not best:
        raise ValueError("batch study: there are no rows; run the study first")
    means, batches = [fmean(case.recalls) for case in best], [case.batch for case in best]
    low = [mean - min(case.recalls) for mean, case in zip(means, best, strict=True)]
    high = [max(case.recalls) - mean for mean, case in zip(means, best, strict=True)]
    figure = sheet(7.6, 4.4, theme)
    axes = figure.add_subplot()
    axes.errorbar(batches, means, (low, high), color=theme.lines[0], marker="o", ms=7, lw=2.4, elinewidth=1.4, capsize=6)
    for case, mean in zip(best, means, strict=True):
        place = (case.batch, max(case.recalls))
        axes.annotate(
            percent_text(mean), place, xytext=(0, 9), textcoords="offset points", ha="center", fontsize=10, color=theme.ink
        )
    axes.set_ylim(0, 1.15 * max(0.01, *means, *(max(case.recalls) for case in best)))
    _doublings(axes, batches, [f"{case.batch:,}\nlr {case.lr:g}" for case in best])
    samples = max(number(row, "samples") or 0 for row in rows)
    _dress(axes, theme, f"held-out recall at 1 after {count_text(samples)} samples, mean of both ways", percent_text)
    seeds = max(len(case.recalls) for case in best)
    label = f"batch, at its best learning rate; mean, worst and best of {seeds} seed{'s' * (seeds > 1)}"
    axes.set_xlabel(label, color=theme.faint, fontsize=9)
    updates = axes.secondary_xaxis("top")
    updates.set_xticks(batches, [f"{case.steps:,}\nupdates" for case in best])
    updates.minorticks_off()
    updates.tick_params(colors=theme.faint, labelsize=8.5, length=0)
    updates.spines["top"].set_visible(False)
    save(figure, out)


def draw_panel(axes: Axes, panel: Panel, theme: Theme) -> None:
    """Draws the lines of a panel, with the last value of each."""
    for colour, (name, points) in zip(theme.lines, panel.lines.items(), strict=False):
        marker = "o" if len(points) < 30 else ""
        last = panel.words(points[-1][1])
        axes.plot(*zip(*_thinned(points), strict=True), color=colour, lw=1.8, marker=marker, ms=4, label=f"{name}: {last}")
    if len(panel.lines) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor=theme.ink)
    else:
        axes.set_title(last, loc="right", fontsize=10, color=colour)
    axes.set_xlim(left=0)
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    _dress(axes, theme, panel.title, panel.words)
    axes.xaxis.set_major_locator(_ticks(axes.get_xlim(), count_text))
    axes.xaxis.set_major_formatter(lambda value, _: count_text(value))
    axes.set_xlabel("samples seen", color=theme.faint, fontsize=9)


def _series(rows: Iterable[Row], *path: str) -> Points:
    points = ((number(row, "samples"), number(row, *path)) for row in rows)
    return [(samples, value) for samples, value in points if samples is not None and value is not None]


def _both_ways(rows: Iterable[Row], k: str) -> Points:
    there, back = (_series(rows, side, k) for side in ("x_to_y", "y_to_x"))
    return [(samples, (a + b) / 2) for (samples, a), (_, b) in zip(there, back, strict=False)]


def _choosing(row: Row) -> float:
    return number(row, "choosing_1") or 0.0 if "choosing_1" in row else _recall(row)


def _recall(row: Row) -> float:
    return fmean(number(row, side) or 0.0 for side in ("x_to_y_1", "y_to_x_1"))


def _thinned(points: Points) -> Points:
    """The points, or the means of as many neighbours as leave MOST_POINTS."""
    size = math.ceil(len(points) / MOST_POINTS)
    pieces = (points[start : start + size] for start in range(0, len(points), size))
    return [(fmean(x for x, _ in piece), fmean(y for _, y in piece)) for piece in pieces]


def _short(value: float) -> str:
    return f"{value:.3g}"


def _ticks(limits: tuple[float, float], words: Callable[[float], str]) -> Any:
    """About four ticks, at round numbers: of bytes, those are powers of two."""
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    span = limits[1] - limits[0]
    return MultipleLocator(2 ** math.ceil(math.log2(span / 5))) if words is bytes_text and span > 0 else MaxNLocator(4)


def _dress(axes: Axes, theme: Theme, title: str, words: Callable[[float], str]) -> None:
    """As every picture, and how values are written; to be called when the limits are set."""
    dress(axes, theme, title)
    axes.yaxis.set_major_locator(_ticks(axes.get_ylim(), words))
    axes.yaxis.set_major_formatter(lambda value, _: words(value).replace(".0 ", " "))


def _doublings(axes: Axes, values: Sequence[float], labels: Sequence[str]) -> None:
    """A logarithmic axis with a tick at each of the values."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, labels)
    axes.minorticks_off()
    axes.set_xlim(min(values) / 1.5, max(values) * 1.5)
