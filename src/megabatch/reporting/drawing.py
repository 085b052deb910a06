"""How every picture looks, whatever it shows: its colours, its paper, axes without ornaments.

Drawn with matplotlib's objects alone: its global state stays as it is, and no display is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from megabatch import packages
from megabatch.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Out = Path | str | IO[bytes]
DPI = 160


class Theme(NamedTuple):
    """The colours of a picture: of text, lesser text, grid, background, and of lines, the most important first."""

    ink: str
    faint: str
    grid: str
    paper: str
    lines: tuple[str, ...]


LIGHT = Theme("#26262b", "#6f6f78", "#e9e9ec", "#ffffff", ("#0b6e4f", "#c8553d", "#5b6c9e"))
DARK = Theme("#e6e6ea", "#9a9aa5", "#34343b", "#1d1d21", ("#4cc29a", "#ec8a72", "#96a7dc"))


def sheet(width: float, height: float, theme: Theme) -> Figure:
    """An empty figure of so many inches."""
    packages.require(packages.FIGURES)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor=theme.paper)


def dress(axes: Axes, theme: Theme, title: str, *, grid: bool = True) -> None:
    """Title and colours; of lines around and behind it, those that one reads values at."""
    axes.set_facecolor(theme.paper)
    axes.set_title(title, loc="left", fontsize=10.5, color=theme.ink, fontweight="bold")
    if grid:
        axes.grid(axis="y", color=theme.grid, lw=0.8)
        axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=theme.faint, labelsize=8.5, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.grid)


def save(figure: Figure, out: Out) -> None:
    """Write the figure as PNG to an open file, or to a path whose file is replaced whole."""
    if not isinstance(out, (str, Path)):
        figure.savefig(out, format="png", dpi=DPI, facecolor=figure.get_facecolor())
        return
    with replacing(out) as temporary:
        figure.savefig(temporary, format="png", dpi=DPI, facecolor=figure.get_facecolor())
