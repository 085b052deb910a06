"""Figures of the loss benchmark: time and memory against the batch size, a line per implementation, and the bars of the demo.

Rows with a share of a matrix product are drawn as times at one size, and shares against the batch size. The other benchmarks use
`canvas`, the style and the colors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.measure import USEFUL_FLOP, Row, largest_error
from benchmarks.report import TITLES, device_name, has_share, is_option, three_digits, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS = "#0b6e4f"
OTHERS = ("#c8553d", "#5b6c9e", "#a07c1e", "#8a4f9e", "#3b8ea5", "#9c5a6b", "#6b7d3a", "#777777")
INK, FAINT = "#222222", "#9a9a9a"
MIB = 2**20
BAR_INCHES = 0.34
STYLE = {
    "font.size": 10,
    "axes.edgecolor": "#bbbbbb",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "svg.fonttype": "none",
}


class Point(NamedTuple):
    """A point of a line: the implementation, its name in the figure, and the position."""

    name: str
    title: str
    batch: int
    value: float


class End(NamedTuple):
    """The end of a line, and how its name is written there."""

    batch: int
    value: float
    label: str
    color: str
    weight: str


def draw(rows: list[Row], path: Path) -> None:
    """Write the figure of measured rows: for each loss a panel of seconds and a panel of extra MiB, both log-log.

    Rows with a share of a matrix product are drawn by `draw_shares`.
    """
    if any("share" in row for row in rows):
        draw_shares(rows, path)
        return
    too_large = [row for row in rows if "needed_bytes" in row]
    rows = [row for row in rows if "total_s" in row]
    if not rows:
        raise ValueError("no row holds a measurement: run `python -m benchmarks.loss` first")
    losses = list(dict.fromkeys(row["loss"] for row in rows))
    names = [name for name in dict.fromkeys(row["implementation"] for row in rows) if name != "ours"]
    colors = {"ours": OURS} | {name: OTHERS[place % len(OTHERS)] for place, name in enumerate(names)}
    hollow = " · hollow: what it would need, not run" if too_large else ""
    with canvas(path, _where(rows[0]) + hollow) as plt:
        _, panels = plt.subplots(len(losses), 2, figsize=(11.5, 4.6 * len(losses) + 0.4), squeeze=False)
        for (time_panel, memory_panel), loss in zip(panels, losses, strict=True):
            of_loss = [row for row in rows if row["loss"] == loss]
            beyond = [row for row in too_large if row["loss"] == loss]
            # Lines of time stop where memory ends, close to other lines: their names go into the empty corner.
            ends = _lines(time_panel, _series(of_loss, "total_s", 1), [], colors)
            _axes(time_panel, of_loss, 0)
            _corner_names(time_panel, ends)
            ends = _lines(memory_panel, _series(of_loss, "extra_bytes", MIB), _series(beyond, "needed_bytes", MIB), colors)
            _axes(memory_panel, of_loss + beyond, max(len(end.label) for end in ends))
            _names(memory_panel, ends)
            time_panel.set_title(f"{loss}: forward + backward, seconds", loc="left", fontsize=11, fontweight="bold")
            memory_panel.set_title(f"{loss}: extra memory, MiB", loc="left", fontsize=11, fontweight="bold")
            _limit(memory_panel, of_loss[0]["machine"]["memory_bytes"] / MIB)


def draw_shares(rows: list[Row], path: Path) -> None:
    """Write for each loss the times of all implementations at one size, and megabatch's share of a matrix product at all sizes."""
    rows = [row for row in rows if "share" in row and not is_option(row)]
    losses = list(dict.fromkeys(row["loss"] for row in rows))
    compared = [_most_compared([row for row in rows if row["loss"] == loss]) for loss in losses]
    with canvas(path, _shares_note(rows, losses), rect=(0, 0.045, 1, 1)) as plt:
        heights = [1.3 + max(BAR_INCHES * len(bars), 2.6) for bars in compared]
        seconds = [row["total_s"] for bars in compared for row in bars]
        # Space on the right for the numbers beside the longest bar.
        limits = min(seconds) / 2, min(seconds) / 2 * (2 * max(seconds) / min(seconds)) ** 1.4
        layout = {"width_ratios": (1.35, 1), "height_ratios": heights}
        _, panels = plt.subplots(len(losses), 2, figsize=(12.5, sum(heights) + 0.3), squeeze=False, gridspec_kw=layout)
        for (time_panel, share_panel), loss, bars in zip(panels, losses, compared, strict=True):
            _times(time_panel, bars, limits)
            _shares(share_panel, [row for row in rows if row["loss"] == loss and has_share(row)], bars[0]["dim"])
            size = f"N = {bars[0]['batch']:,}, D = {bars[0]['dim']:,}"
            time_panel.set_title(f"{loss}: forward + backward, {size}", loc="left", fontsize=11, fontweight="bold")
            share_panel.set_title(f"{loss}: share of cuBLAS's rate", loc="left", fontsize=11, fontweight="bold")


def _shares_note(rows: list[Row], losses: list[str]) -> str:
    rates = [row["matrix_product_tflops"] for row in rows]
    machine, flop = rows[0]["machine"], " and ".join(f"{USEFUL_FLOP[loss]}·N²·D for {loss}" for loss in losses)
    where = f"{device_name(machine)} · torch {machine['torch']} · {rows[0]['dtype']} · {machine['date'][:10]}"
    span = f"{min(rates):,.0f} to {max(rates):,.0f}"
    rate = f"100 %: a bfloat16 matrix product beside each row, {span} TFLOP/s, counting {flop}"
    hatched = " · hatched: wrong result" if any(not row["right"] for row in rows) else ""
    return f"{where} · {rate}{hatched}"


def draw_bars(rows: list[Row], path: Path, heading: str) -> None:
    """Write the figure of the demo: extra memory and time of each row as horizontal bars with their numbers."""
    style = {"axes.spines.bottom": False, "axes.spines.left": False}
    with canvas(path, _where(rows[0]), style, rect=(0, 0.06, 1, 0.98), w_pad=3) as plt:
        figure, panels = plt.subplots(1, 2, figsize=(10, 1.5 + 0.75 * len(rows)))
        for panel, name, values, unit in (
            (panels[0], "extra memory", [row["extra_bytes"] / MIB for row in rows], "MiB"),
            (panels[1], "forward + backward", [row["total_s"] for row in rows], "s"),
        ):
            places = range(len(rows) - 1, -1, -1)
            colors = [OURS if row["implementation"] == "ours" else OTHERS[0] for row in rows]
            panel.barh(places, values, color=colors, height=0.55)
            for place, value in zip(places, values, strict=True):
                panel.text(value + max(values) * 0.02, place, f"{three_digits(value)} {unit}", va="center")
            panel.set_yticks(places, [title(row) for row in rows])
            panel.tick_params(length=0, labelbottom=False)
            panel.set_xlim(0, max(values) * 1.3)
            panel.set_title(name, loc="left", fontsize=11)
        figure.suptitle(heading, x=0.02, ha="left", fontsize=12.5, fontweight="bold")


def _most_compared(rows: list[Row]) -> list[Row]:
    """Return the rows of the size at which most implementations were measured (the largest such size), the fastest row first."""
    sizes: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        sizes.setdefault((row["batch"], row["dim"]), []).append(row)
    size = max(sizes, key=lambda size: (len(sizes[size]), size))
    return sorted(sizes[size], key=lambda row: row["total_s"])


def _times(panel: Axes, rows: list[Row], limits: tuple[float, float]) -> None:
    """Draw horizontal bars of milliseconds on a logarithmic axis, since some are many times as long as others."""
    places = list(range(len(rows) - 1, -1, -1))
    values = [row["total_s"] * 1000 for row in rows]
    low, high = (1000 * seconds for seconds in limits)
    panel.set_xscale("log")
    panel.set_xlim(low, high)
    # Few bars are no thicker than many.
    thickness = 0.62 * min(1, BAR_INCHES * len(rows) / 2.6)
    for place, value, row in zip(places, values, rows, strict=True):
        ours = row["implementation"] == "ours"
        look = {"color": OURS if ours else OTHERS[1], "alpha": 1.0 if ours else 0.75}
        if not row["right"]:
            look = {"facecolor": "white", "edgecolor": OTHERS[1], "hatch": "////", "lw": 0.8}
        panel.barh(place, value - low, left=low, height=thickness, **look)
        name, error = largest_error(row)
        share = f", {row['share'] * 100:.0f} %" if has_share(row) else ""
        text = f"{three_digits(value)} ms{share}" if row["right"] else f"{three_digits(value)} ms, {name} off by {error:.0e}"
        style = {"fontweight": "bold" if ours else "normal", "color": OURS if ours else INK, "fontsize": 9}
        panel.annotate(text, (value, place), xytext=(5, 0), textcoords="offset points", va="center", **style)
    panel.set_yticks(places, [title(row) for row in rows])
    for label, row in zip(panel.get_yticklabels(), rows, strict=True):
        if row["implementation"] == "ours":
            label.set(fontweight="bold", color=OURS)
    panel.set_ylim(-0.6, len(rows) - 0.4)
    panel.tick_params(axis="y", length=0)
    from matplotlib.ticker import LogLocator

    panel.xaxis.set_major_locator(LogLocator(subs=(1.0,)))
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.12g}")
    panel.minorticks_off()
    panel.set_xlabel("ms, logarithmic")
    panel.grid(axis="x", color="#eeeeee", lw=0.8)
    panel.set_axisbelow(True)


def _shares(panel: Axes, rows: list[Row], dim: int) -> None:
    """Draw shares of a matrix product against the batch: a line for the compared width, points for others, and OpenCLIP's line."""
    if not rows:
        panel.set_axis_off()
        return
    sizes = sorted({row["batch"] for row in rows})
    panel.set_xscale("log", base=2)
    span = max(sizes[-1] / sizes[0], 4)
    panel.set_xlim(sizes[0] / span**0.08, sizes[-1] * span**0.4)
    # A label takes less than a tenth of the axis, which is 1.48 times as long as the span.
    named = _apart(sizes, span ** (0.1 * 1.48))
    panel.set_xticks(sizes, [_short(size) if size in named else "" for size in sizes], fontsize=9)
    panel.minorticks_off()
    panel.set_ylim(0, max(1.08, 1.08 * max(row["share"] for row in rows)))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.0f} %")
    panel.set_xlabel("batch")
    panel.grid(axis="y", color="#eeeeee", lw=0.8)
    panel.set_axisbelow(True)
    panel.axhline(1, color=INK, lw=1, ls=(0, (6, 3)), zorder=1)
    # On the side where shares are small, so that no curve crosses it.
    panel.annotate("matrix product by cuBLAS", (0, 1), (4, 4), ("axes fraction", "data"), "offset points", fontsize=8.5)
    for name, color in (("openclip", OTHERS[0]), ("ours", OURS)):
        line = sorted((row["batch"], row["share"]) for row in rows if row["implementation"] == name and row["dim"] == dim)
        if not line:
            continue
        bold = name == "ours"
        panel.plot(*zip(*line, strict=True), color=color, marker="o", ms=5, lw=2.6 if bold else 1.6, zorder=4 if bold else 3)
        style = {"color": color, "fontweight": "bold" if bold else "normal", "va": "center", "textcoords": "offset points"}
        panel.annotate(TITLES[name], line[-1], xytext=(9, 0), **style)
    widths = sorted({row["dim"] for row in rows if row["implementation"] == "ours"} | {dim})
    for place, width in enumerate(widths):
        points = [(row["batch"], row["share"]) for row in rows if row["implementation"] == "ours" and row["dim"] == width]
        look = {"marker": "^sDv"[place % 4], "ms": 7, "mfc": "white", "mew": 1.4, "ls": "none", "zorder": 5}
        if width == dim:
            # Its line exists already: this one is for the legend.
            points, look = [(math.nan, math.nan)], {"marker": "o", "ms": 5, "lw": 2.6}
        panel.plot(*zip(*points, strict=True), color=OURS, label=f"D = {width:,}", **look)
    if len(widths) > 1:
        panel.legend(loc="center left", frameon=False, fontsize=8.5)


def _apart(sizes: list[int], factor: float) -> list[int]:
    """Return the largest of some rising sizes, and those below it that are smaller by at least a factor, each than the next.

    >>> _apart([64, 4096, 8192, 16384], 3)
    [16384, 4096, 64]
    """
    kept = sizes[-1:]
    for size in reversed(sizes[:-1]):
        if size * factor <= kept[-1]:
            kept.append(size)
    return kept


def _short(size: int) -> str:
    """Return a batch size as a short label of a tick.

    >>> _short(1000), _short(65536), _short(1048576)
    ('1,000', '64 Ki', '1 Mi')
    """
    for power, unit in ((20, "Mi"), (10, "Ki")):
        if size % 2**power == 0:
            return f"{size >> power} {unit}"
    return f"{size:,}"


@contextmanager
def canvas(path: Path, note: str, style: Mapping[str, Any] | None = None, **layout: Any) -> Iterator[Any]:
    """Yield pyplot in the style of all benchmarks; on exit, write its current figure to `path` with a note below.

    style: further settings of matplotlib. layout: arguments of `tight_layout`.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({**STYLE, **(style or {})}):
        yield plt
        figure = plt.gcf()
        figure.tight_layout(**{"rect": (0, 0.04, 1, 1), "w_pad": 2.5, "h_pad": 2.0, **layout})
        figure.text(0.01, 0.01, note, fontsize=8, color="#666666")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, facecolor="white")
        plt.close(figure)


def _series(rows: list[Row], field: str, unit: float) -> list[Point]:
    return [Point(row["implementation"], title(row), row["batch"], max(row[field] / unit, 1e-6)) for row in rows]


def _lines(panel: Axes, points: list[Point], beyond: list[Point], colors: dict[str, str]) -> list[End]:
    """Draw a line for each implementation, hollow where it would need more memory than there is, and return their ends."""
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    values = [point.value for point in points + beyond]
    panel.set_ylim(min(values) / 6, max(values) * 2)
    ends = []
    for name, color in colors.items():
        line = sorted((point.batch, point.value) for point in points if point.name == name)
        more = sorted((point.batch, point.value) for point in beyond if point.name == name)
        if not line:
            continue
        ours = name == "ours"
        panel.plot(*zip(*line, strict=True), color=color, marker="o", ms=5, lw=2.6 if ours else 1.6, zorder=4 if ours else 3)
        if more:
            panel.plot(*zip(line[-1], *more, strict=True), color=color, lw=1.2, ls=(0, (1, 2)), zorder=2)
            panel.plot(*zip(*more, strict=True), color=color, marker="o", ms=5, mfc="white", ls="none", zorder=3)
        label = next(point.title for point in points if point.name == name)
        ends.append(End(*(line + more)[-1], label, color, "bold" if ours else "normal"))
    return ends


def _axes(panel: Axes, rows: list[Row], letters: int) -> None:
    """Set ticks, grid and limits, with space on the right for names of so many letters."""
    sizes = sorted({row["batch"] for row in rows})
    panel.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=7.5 if len(sizes) > 4 else 9)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.12g}")
    panel.minorticks_off()
    panel.set_xlabel("batch")
    panel.grid(axis="y", color="#eeeeee", lw=0.8)
    panel.set_axisbelow(True)
    # A letter is about 0.08 inch wide, a panel 4.8.
    share = (0.3 + 0.08 * letters) / 4.8
    span = max(sizes[-1] / sizes[0], 2)
    panel.set_xlim(sizes[0] / span**0.04, sizes[-1] * span ** (share / (1 - share)))
    _slopes(panel)


def _slopes(panel: Axes) -> None:
    """Draw the slopes of N and of N² in the lower right corner, which growing lines leave empty."""
    low, high = panel.get_xlim()
    left, right = low * (high / low) ** 0.83, low * (high / low) ** 0.92
    base = panel.get_ylim()[0] * 1.3
    for power, label, lift in ((1, "∝ N", -3), (2, "∝ N²", 3)):
        top = base * (right / left) ** power
        panel.plot([left, right], [base, top], color=FAINT, lw=1.2, zorder=1)
        panel.annotate(label, (right, top), xytext=(4, lift), textcoords="offset points", va="center", color=FAINT, fontsize=8.5)


def _corner_names(panel: Axes, ends: list[End]) -> None:
    """Write the names in the upper left corner, which growing lines leave empty, the highest line first."""
    for place, end in enumerate(sorted(ends, key=lambda end: (-end.batch, -end.value))):
        style = {"color": end.color, "fontweight": end.weight, "va": "top", "textcoords": "offset points"}
        panel.annotate(f"● {end.label}", (0, 1), xytext=(12, -6 - 15 * place), xycoords="axes fraction", **style)


def _names(panel: Axes, ends: list[End]) -> None:
    """Write each line's name beside its end, moved apart where two would overlap."""
    low, high = (math.log(limit) for limit in panel.get_ylim())
    gap = (high - low) * 0.055
    ends = sorted(ends, key=lambda end: end.value)
    places = [math.log(end.value) for end in ends]
    for _ in range(200):
        for lower in range(len(places) - 1):
            short = gap - (places[lower + 1] - places[lower])
            if short > 0:
                places[lower] -= short / 2
                places[lower + 1] += short / 2
    for place, end in zip(places, ends, strict=True):
        style = {"color": end.color, "fontweight": end.weight, "va": "center"}
        panel.annotate(end.label, (end.batch, math.exp(place)), xytext=(9, 0), textcoords="offset points", **style)


def _limit(panel: Axes, mib: float) -> None:
    low, high = panel.get_ylim()
    # Far above every line it would only squeeze them.
    if mib > high * 8:
        return
    panel.set_ylim(low, max(high, mib * 2.5))
    panel.axhline(mib, color=INK, lw=1, ls=(0, (6, 3)), zorder=1)
    text = f"all memory of this machine, {mib / 1024:,.0f} GiB"
    panel.annotate(text, (panel.get_xlim()[0], mib), xytext=(6, 4), textcoords="offset points", fontsize=8.5)


def _where(row: Row) -> str:
    machine = row["machine"]
    return f"{device_name(machine)} · torch {machine['torch']} · {row['dtype']} · D = {row['dim']} · {machine['date'][:10]}"
