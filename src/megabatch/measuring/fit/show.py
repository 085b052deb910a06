"""What fits, shown: a table and sentences on a terminal, and a picture of peak memory against the chunk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...measurements import Fit, Measured
from ...objectives import OBJECTIVES
from ...reporting.drawing import LIGHT, Theme, dress, save, sheet
from ...reporting.wording import bytes_text, seconds_text
from ...terminal import print_table, print_text
from .trial import REASONS, REFUSED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

# Of a picture's sides beyond the sizes in it, as a factor; and of its width between two sizes that are written below it.
WIDER, APART = 1.25, 0.08


def show(result: Measured, console: Console | None = None) -> None:
    """Prints the trials in their order, and what follows from them."""
    rows = []
    for trial in _fit(result).trials:
        seen = [_bytes(trial.get(name)) for name in ("peak_bytes", "predicted_bytes")]
        rows.append([f"{trial['size']:,}", trial["why"] or "ran", *seen, seconds_text(trial["seconds"])])
    print_table(["chunk", "", "peak memory", "predicted", "a step"], rows, console=console)
    for number, sentence in enumerate(sentences(result)):
        print_text(sentence, bold=not number, console=console)


def sentences(result: Measured) -> list[str]:
    """The answer, what it was held to, how far the prediction was off, and what it is good for."""
    found = _fit(result)
    ran = next(trial for trial in reversed(found.trials) if trial["size"] == found.chunk and trial["ran"])
    failed = min((trial["size"] for trial in found.trials if not trial["ran"]), default=None)
    took = "" if ran["peak_bytes"] is None else f" It took {bytes_text(ran['peak_bytes'])}"
    took += f" of {bytes_text(found.limit_bytes)} that may be used." if took and found.limit_bytes else "." if took else ""
    beyond = "and no larger one was asked for" if failed is None else f"{failed:,} did not"
    tried = "one trial" if len(found.trials) == 1 else f"{len(found.trials)} trials"
    said = [f"chunk {found.chunk:,} ran on {result.device}, {beyond}; {tried}.{took}"]
    if ran["peak_bytes"] and ran.get("predicted_bytes"):
        off = ran["predicted_bytes"] / ran["peak_bytes"] - 1
        said.append(f"{bytes_text(ran['predicted_bytes'])} were predicted for it ({off:+.1%}).")
    objective = result.run.get("loss", {}).get("objective")
    if objective is None or OBJECTIVES[objective].contrastive:
        said.append(f'Nothing was kept meanwhile: batch.chunk={found.chunk} with batch.keep="auto" fills what is left.')
    return said


def draw(result: Measured, out: Path, theme: Theme = LIGHT) -> None:
    """Draws peak memory against the chunk: what ran, what did not, the limit, the prediction."""
    found = _fit(result)
    figure = sheet(7.2, 3.8, theme)
    axes = figure.add_subplot()
    ran = [(trial["size"], trial["peak_bytes"]) for trial in found.trials if trial["ran"] and trial["peak_bytes"]]
    # One that was refused has come no further than the limit.
    failed = [
        (t["size"], t["peak_bytes"] if t["why"] != REASONS[REFUSED] else found.limit_bytes) for t in found.trials if not t["ran"]
    ]
    failed = [(size, peak) for size, peak in failed if peak]
    predicted = sorted({(t["size"], t["predicted_bytes"]) for t in found.trials if t.get("predicted_bytes")})
    levels = [peak for _, peak in (*ran, *failed, *predicted)] + ([found.limit_bytes] if found.limit_bytes else [])
    if len(predicted) > 1:
        axes.plot(*zip(*predicted, strict=True), color=theme.lines[2], lw=1.6, ls=(0, (1, 2)), label="predicted")
    for points, colour, marker, name in ((ran, theme.lines[0], "o", "ran"), (failed, theme.lines[1], "x", "did not run")):
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, ms=7, mew=2, lw=0, label=name)
    for size, peak in [point for point in ran if point[0] == found.chunk][-1:]:
        axes.plot([size], [peak], color=theme.lines[0], marker="o", ms=13, mfc="none", mew=2, lw=0)
        _note(axes, (size, peak), f"chunk {size:,}: {bytes_text(peak)}", (12, -12), theme)
    sizes = sorted({trial["size"] for trial in found.trials})
    if found.limit_bytes:
        axes.axhline(found.limit_bytes, color=theme.lines[1], lw=1.4, ls=(0, (4, 3)))
        # Left of everything that was tried.
        _note(axes, (sizes[0] / WIDER, found.limit_bytes), f"may be used: {bytes_text(found.limit_bytes)}", (4, 5), theme)
    if levels:
        axes.set_ylim(0.85 * min(levels), 1.08 * max(levels))
    _dress(axes, sizes, found.chunk, theme)
    save(figure, out)


def ticks(sizes: Sequence[int], chosen: int) -> list[int]:
    """The sizes to be written below the picture: the chosen one, and of the others those that have room.

    >>> ticks([16, 1792, 1884, 1920, 2048], 1884)
    [16, 1884]
    """
    apart = (sizes[-1] / sizes[0] * WIDER**2) ** APART
    kept = [chosen]
    for size in sizes:
        if all(max(size, other) / min(size, other) >= apart for other in kept):
            kept.append(size)
    return sorted(kept)


def _note(axes: Axes, place: tuple[float, float], text: str, beside: tuple[int, int], theme: Theme) -> None:
    axes.annotate(text, place, xytext=beside, textcoords="offset points", fontsize=9, color=theme.ink)


def _dress(axes: Axes, sizes: Sequence[int], chosen: int, theme: Theme) -> None:
    from matplotlib.ticker import MultipleLocator

    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xlim(sizes[0] / WIDER, sizes[-1] * WIDER)
    axes.set_xticks(ticks(sizes, chosen), [f"{size:,}" for size in ticks(sizes, chosen)])
    dress(axes, theme, "peak memory of a step, measured")
    axes.set_xlabel("chunk: rows that go through at once", color=theme.faint, fontsize=9)
    low, high = axes.get_ylim()
    # Round numbers of bytes are powers of two.
    axes.yaxis.set_major_locator(MultipleLocator(2 ** math.ceil(math.log2((high - low) / 6))))
    axes.yaxis.set_major_formatter(lambda value, _: bytes_text(value))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9, labelcolor=theme.ink, loc="upper left", bbox_to_anchor=(1, 1))


def _bytes(number: int | None) -> str:
    return "" if number is None else bytes_text(number)


def _fit(result: Measured) -> Fit:
    if not isinstance(result.found, Fit):
        raise ValueError(f"this is a measurement of {result.kind}, not of what fits; show it with its own verb")
    return result.found
