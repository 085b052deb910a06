"""The picture of a sweep: quality against the batch with every rate tried, and quality against time with the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...measurements import Measured
from ...reporting.drawing import LIGHT, Out, Theme, dress, save, sheet
from ...reporting.wording import count_text, percent_text, seconds_text
from .show import LENGTH, quality_name, summaries_of, sweep_of
from .summary import Summary, pareto

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]
# Round times, in seconds.
TICKS = (
    *(unit * n for unit in (0.001, 0.01, 0.1) for n in (1, 2, 5)),
    *(unit * n for unit in (1, 60, 3600) for n in (1, 2, 5, 10, 20, 30)),
    *(86400 * n for n in (2, 4, 10)),
)


def picture(subject: tuple[Measured, Rows], out: Out, theme: Theme = LIGHT) -> None:
    """Draws a sweep and its rows, which are those of rows.jsonl."""
    result, rows = subject
    rows = [row for row in rows if row["quality"] is not None]
    figure = sheet(12, 4.6, theme)
    left, right = figure.subplots(1, 2, sharey=True)
    _against_batch(left, result, rows, theme)
    _against_cost(right, result, rows, theme)
    highest = max(row["quality"] for row in rows)
    left.set_ylim(0, 1.18 * max(0.01, highest))
    left.yaxis.set_major_formatter(lambda value, _: percent_text(max(0.0, value)))
    save(figure, out)


def _against_batch(axes: Axes, result: Measured, rows: Rows, theme: Theme) -> None:
    """Bars are the standard deviation over seeds; each run is a point, those of lower rates further left."""
    summaries = summaries_of(result)
    for each in summaries:
        runs = [row for row in rows if row["batch"] == each.batch]
        axes.plot(
            [each.batch * (row["lr"] / each.lr) ** 0.08 for row in runs],
            [row["quality"] for row in runs],
            color=theme.faint, marker="o", ms=3, lw=0, alpha=0.8,
        )  # fmt: skip
    batches, means = [each.batch for each in summaries], [each.mean for each in summaries]
    spreads = [each.spread or 0.0 for each in summaries]
    axes.errorbar(batches, means, spreads, color=theme.lines[0], marker="o", ms=7, lw=2.2, elinewidth=1.4, capsize=5)
    taken = next(each for each in summaries if each.batch == sweep_of(result).batch)
    axes.plot([taken.batch], [taken.mean], color=theme.lines[1], marker="o", ms=13, mfc="none", mew=1.8)
    for each in summaries:
        _label(axes, (each.batch, each.mean + (each.spread or 0.0)), percent_text(each.mean), theme)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{each.batch:,}\n{each.lr:g}\n{each.steps:,}" for each in summaries])
    axes.minorticks_off()
    axes.set_xlim(min(batches) / 1.6, max(batches) * 1.6)
    seeds = max(len(each.qualities) for each in summaries)
    spread = f", ± spread of {seeds} seeds" if seeds > 1 else ""
    dress(axes, theme, f"held-out {quality_name(result.run)}, {LENGTH[sweep_of(result).same]}")
    axes.set_xlabel(f"batch, its best rate, its updates{spread}; small: every run; ring: to take", color=theme.faint, fontsize=9)


def _against_cost(axes: Axes, result: Measured, rows: Rows, theme: Theme) -> None:
    """Against the time, with the front; where that is the same for all, against the samples that fitted into it."""
    summaries, timed = summaries_of(result), sweep_of(result).same != "time"
    front = pareto(summaries) if timed else []
    cost = "seconds" if timed else "samples"
    axes.plot([row[cost] for row in rows], [row["quality"] for row in rows], color=theme.faint, marker="o", ms=3, lw=0, alpha=0.8)
    axes.plot(*_stairs(front), color=theme.lines[2], lw=1.6, ls=(0, (4, 3)))
    for each in summaries:
        colour = theme.lines[0] if each in front or not timed else theme.faint
        axes.plot([getattr(each, cost)], [each.mean], color=colour, marker="o", ms=8, lw=0)
        _label(axes, (getattr(each, cost), each.mean), f"{each.batch:,}", theme)
    costs = [row[cost] for row in rows] + [getattr(each, cost) for each in summaries]
    low, high = min(costs) / 1.35, max(costs) * 1.35
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    ticks = TICKS if timed else [10**n * m for n in range(12) for m in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high] or [costs[-1]]
    axes.set_xticks(ticks, [_round_time(tick) if timed else count_text(tick) for tick in ticks])
    axes.minorticks_off()
    dress(axes, theme, "the same against time; dashed: the Pareto front" if timed else "the same against samples seen")
    axes.set_xlabel("time of training" if timed else "samples seen in the time", color=theme.faint, fontsize=9)


def _round_time(seconds: float) -> str:
    return seconds_text(seconds).removesuffix(" 0 s").removesuffix(" 0 min")


def _stairs(front: Sequence[Summary]) -> tuple[list[float], list[float]]:
    """The border of what the front beats: level to the next batch's time, then up."""
    xs = [each.seconds for each in front for _ in range(2)]
    ys = [each.mean for each in front for _ in range(2)]
    return xs[1:], ys[:-1]


def _label(axes: Axes, place: tuple[float, float], words: str, theme: Theme) -> None:
    axes.annotate(
        words,
        place,
        xytext=(0, 11),
        textcoords="offset points",
        ha="center",
        fontsize=9.5,
        color=theme.ink,
        bbox={"fc": theme.paper, "ec": "none", "pad": 0.5},
    )
