"""Figures as data, and their drawing with matplotlib in light or dark colors.

Only matplotlib's objects are used: its global state stays as it is, and no display is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from megabatch import packages
from megabatch.files import replacing

from .format import Format, bytes_text, whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

Points = Sequence[tuple[float, float]]
Out = Path | str | IO[bytes]
DPI = 160
# More points than this on a line are indistinguishable; from so many points on, a line has no markers.
MOST_POINTS, UNMARKED = 400, 30
LINE_STYLES = {"line": "-", "dashed": (0, (4, 3)), "dotted": (0, (1, 2))}


class Level(NamedTuple):
    """A horizontal line of a chart, with a text at its left end."""

    value: float
    text: str


@dataclass(frozen=True)
class Series:
    """Points of a chart. label: in the legend. color: index into the theme's colors; None is the faint color.

    band: low and high of each point, as an area. errors: distances down and up of each point, as bars.
    texts: beside the points, `offset` typographic points away. size: of the markers.
    """

    points: Points
    label: str = ""
    style: Literal["line", "dashed", "dotted", "points", "crosses", "rings"] = "line"
    color: int | None = 0
    band: Sequence[tuple[float, float]] = ()
    errors: Sequence[tuple[float, float]] = ()
    texts: Sequence[str] = ()
    offset: tuple[int, int] = (0, 9)
    size: float = 5


@dataclass(frozen=True)
class Axis:
    """An axis of a chart. scale: "log2" marks doublings. ticks: positions and their labels; None chooses round numbers."""

    label: str = ""
    format: Format = whole
    scale: Literal["linear", "log", "log2"] = "linear"
    ticks: Mapping[int, str] | Mapping[float, str] | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Chart:
    """Series over the same two axes. value: the most important number, beside the title."""

    title: str
    series: Sequence[Series]
    x: Axis
    y: Axis
    levels: Sequence[Level] = ()
    value: str = ""


@dataclass(frozen=True)
class Bars:
    """One horizontal bar for each part of a whole."""

    title: str
    parts: Mapping[str, float]
    format: Format


@dataclass(frozen=True)
class Figure:
    """Charts side by side. description: for readers who do not see it. file: name of its PNG file, if it is also written as one.

    size: inches of one chart. separate: charts are pages' own images, so that they can flow on a narrow screen.
    """

    kind: ClassVar[str] = "figure"
    charts: Sequence[Chart | Bars]
    description: str
    file: str = ""
    columns: int = 2
    size: tuple[float, float] = (7.2, 3.4)
    separate: bool = False
    detail: ClassVar[bool] = True


class Theme(NamedTuple):
    """The colors of a figure: of text, lesser text, grid, background, and of lines, the most important first."""

    ink: str
    faint: str
    grid: str
    paper: str
    lines: tuple[str, ...]


LIGHT = Theme("#26262b", "#6f6f78", "#e9e9ec", "#ffffff", ("#0b6e4f", "#c8553d", "#5b6c9e"))
DARK = Theme("#e6e6ea", "#9a9aa5", "#34343b", "#1d1d21", ("#4cc29a", "#ec8a72", "#96a7dc"))


def save(figure: Figure, out: Out, theme: Theme = LIGHT) -> None:
    """Write the figure as PNG to an open file, or to a path whose file is replaced atomically."""
    canvas = draw(figure, theme)
    if not isinstance(out, (str, Path)):
        canvas.savefig(out, format="png", dpi=DPI, facecolor=theme.paper)
        return
    with replacing(out) as temporary:
        canvas.savefig(temporary, format="png", dpi=DPI, facecolor=theme.paper)


def draw(figure: Figure, theme: Theme = LIGHT) -> Canvas:
    """Return the figure as matplotlib's."""
    packages.require(packages.FIGURES)
    from matplotlib.figure import Figure as Canvas

    columns = min(figure.columns, len(figure.charts) or figure.columns)
    rows = max(1, math.ceil(len(figure.charts) / columns))
    width, height = figure.size
    canvas = Canvas(figsize=(width * columns, height * rows), layout="constrained", facecolor=theme.paper)
    for place, chart in enumerate(figure.charts):
        axes = canvas.add_subplot(rows, columns, place + 1)
        if isinstance(chart, Bars):
            _draw_bars(axes, chart, theme)
        else:
            _draw_chart(axes, chart, theme)
    if not figure.charts:
        canvas.text(0.5, 0.5, figure.description, ha="center", va="center", color=theme.faint)
    return canvas


def thinned(points: Points) -> Points:
    """Return the points, or the means of as many neighbours as leave MOST_POINTS."""
    size = max(1, math.ceil(len(points) / MOST_POINTS))
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups]


def style_axes(axes: Axes, theme: Theme, title: str, *, grid: bool = True) -> None:
    """Set title and colors; keep only the lines that values are read at."""
    axes.set_facecolor(theme.paper)
    axes.set_title(title, loc="left", fontsize=10.5, color=theme.ink, fontweight="bold")
    if grid:
        axes.grid(axis="y", color=theme.grid, lw=0.8)
        axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=theme.faint, labelsize=8.5, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.grid)


def _draw_chart(axes: Axes, chart: Chart, theme: Theme) -> None:
    for set_scale, axis in ((axes.set_xscale, chart.x), (axes.set_yscale, chart.y)):
        if axis.scale != "linear":
            set_scale("log", base=2 if axis.scale == "log2" else 10)
    for series in chart.series:
        if series.points:
            _draw_series(axes, series, theme)
    for level in chart.levels:
        axes.axhline(level.value, color=theme.lines[1], lw=1.4, ls=LINE_STYLES["dashed"])
        _annotate(axes, level.text, (0, level.value), (4, 5), theme, xycoords=axes.get_yaxis_transform(), ha="left")
    axes.set_xlim(chart.x.low, chart.x.high)
    axes.set_ylim(chart.y.low, chart.y.high)
    style_axes(axes, theme, chart.title)
    axes.set_title(chart.value, loc="right", fontsize=10, color=theme.lines[0])
    _set_ticks(axes.xaxis, chart.x, axes.get_xlim())
    _set_ticks(axes.yaxis, chart.y, axes.get_ylim())
    axes.set_xlabel(chart.x.label, color=theme.faint, fontsize=9)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(frameon=False, fontsize=8.5, labelcolor=theme.ink, loc="best")


def _draw_series(axes: Axes, series: Series, theme: Theme) -> None:
    color = theme.faint if series.color is None else theme.lines[series.color]
    look: dict[str, Any] = {"color": color, "ms": series.size, "label": series.label or None}
    if series.style in LINE_STYLES:
        marked = series.style == "line" and len(series.points) < UNMARKED
        look |= {"ls": LINE_STYLES[series.style], "lw": 2.2 if series.style == "line" else 1.6, "marker": "o" if marked else ""}
    else:
        look |= {"ls": "none", "marker": "x" if series.style == "crosses" else "o", "mew": 2 if series.style != "points" else 0}
        look |= {"mfc": "none"} if series.style == "rings" else {}
    points = series.points if series.errors or series.band or series.texts else thinned(series.points)
    x, y = zip(*points, strict=True)
    if series.band:
        low, high = zip(*series.band, strict=True)
        axes.fill_between(x, low, high, color=color, alpha=0.16, lw=0)
    if series.errors:
        axes.errorbar(x, y, tuple(zip(*series.errors, strict=True)), elinewidth=1.4, capsize=5, **look)
    else:
        axes.plot(x, y, **look)
    for place, text in zip(points, series.texts, strict=False):
        if text:
            _annotate(axes, text, place, series.offset, theme)


def _annotate(
    axes: Axes, text: str, place: tuple[float, float], offset: tuple[int, int], theme: Theme, *, ha: str = "center", **where: Any
) -> None:
    box = {"fc": theme.paper, "ec": "none", "pad": 0.5, "alpha": 0.7}
    axes.annotate(text, place, xytext=offset, textcoords="offset points", ha=ha, fontsize=9, color=theme.ink, bbox=box, **where)


def _set_ticks(axis: Any, described: Axis, limits: tuple[float, float]) -> None:
    if described.ticks is not None:
        axis.set_ticks(list(described.ticks), list(described.ticks.values()))
        axis.axes.minorticks_off()
        return
    if described.scale == "linear":
        axis.set_major_locator(_locator(limits, described.format))
    # "80.0 %" is "80 %" on an axis.
    axis.set_major_formatter(lambda value, _: described.format(value).replace(".0 ", " "))
    if described.scale == "log2":
        axis.axes.minorticks_off()


def _locator(limits: tuple[float, float], format: Format) -> Any:
    """Return about four ticks at round numbers; round numbers of bytes are powers of two."""
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    span = limits[1] - limits[0]
    return MultipleLocator(2 ** math.ceil(math.log2(span / 5))) if format is bytes_text and span > 0 else MaxNLocator(4)


def _draw_bars(axes: Axes, bars: Bars, theme: Theme) -> None:
    names = list(bars.parts)[::-1]
    values: Sequence[float] = [bars.parts[name] for name in names]
    axes.barh(names, values, color=theme.lines[0], height=0.6)
    for row, value in enumerate(values):
        text = bars.format(value)
        axes.annotate(text, (value, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5, color=theme.ink)
    axes.set_xlim(0, 1.35 * max(values, default=1.0))
    axes.set_xticks([])
    style_axes(axes, theme, bars.title, grid=False)
