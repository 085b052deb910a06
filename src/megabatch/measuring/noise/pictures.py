"""Pictures of noise: the critical batch over training with its interval, and what branches to other batches lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...measurements import Measured
from ...reporting.drawing import LIGHT, Out, Theme, dress, save, sheet
from ...training.noise.estimator import number
from .branch import TOLERANCE, Branch
from .show import noise_of

if TYPE_CHECKING:
    pass

# Inches.
SIZE = 7.6, 3.8


def course_picture(result: Measured, out: Out, theme: Theme = LIGHT) -> None:
    """Draws the critical batch against the step, with its interval as a band and the run's batch as a line."""
    found = noise_of(result)
    figure = sheet(*SIZE, theme)
    axes = figure.add_subplot()
    steps = [point["step"] for point in found.course]
    bottom, top = _limits([point[key] for point in found.course for key in ("critical", "low", "high")], found.batch)
    low, high, critical = ([min(max(point[key], bottom), top) for point in found.course] for key in ("low", "high", "critical"))
    axes.fill_between(steps, low, high, color=theme.lines[0], alpha=0.18, lw=0)
    drawn = [value if bottom < value < top else math.nan for value in critical]
    axes.plot(steps, drawn, color=theme.lines[0], lw=2.2, marker="o" if len(steps) < 30 else "", ms=4)
    axes.axhline(found.batch, color=theme.lines[1], lw=1.6, ls=(0, (4, 3)))
    note: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "bbox": {"fc": theme.paper, "ec": "none", "pad": 1}}
    axes.annotate(f"the run's batch: {found.batch:,}", (steps[0], found.batch), xytext=(2, 5), color=theme.lines[1], **note)
    axes.set_yscale("log", base=2)
    axes.set_ylim(bottom, top)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    opened = any(math.isinf(point["high"]) for point in found.course)
    words = "step; a band that reaches the upper edge has no upper end" if opened else "step"
    axes.set_xlabel(words, color=theme.faint, fontsize=9)
    last = number(found.critical) if math.isfinite(found.critical) else f"above {number(found.low)}"
    axes.set_title(last, loc="right", fontsize=10, color=theme.lines[0])
    dress(axes, theme, "critical batch by the noise of the gradient, with its 95 % interval")
    save(figure, out)


def branch_picture(branches: Sequence[Branch], out: Out, theme: Theme = LIGHT) -> None:
    """Draws how much more held-out loss each batch ended with than the smallest."""
    figure = sheet(*SIZE, theme)
    axes = figure.add_subplot()
    ended = [branch for branch in branches if math.isfinite(branch.difference)]
    for colour, fine, name in ((theme.lines[0], True, "loses nothing"), (theme.lines[1], False, "loses")):
        some = [branch for branch in ended if branch.fine is fine]
        if some:
            batches, differences, errors = zip(*((b.batch, b.difference, b.noise) for b in some), strict=True)
            axes.errorbar(batches, differences, errors, color=colour, marker="o", ms=7, ls="none", capsize=5, label=name)
    axes.axhline(TOLERANCE, color=theme.faint, lw=1.2, ls=(0, (1, 2)))
    axes.annotate(
        f"tolerance {TOLERANCE:g}", (1, TOLERANCE), xycoords=axes.get_yaxis_transform(), xytext=(-4, 4), textcoords="offset points",
        ha="right", fontsize=9, color=theme.faint,
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    lost = [f"{branch.batch:,}" + ("" if branch in ended else "\ndiverged") for branch in branches]
    axes.set_xticks([branch.batch for branch in branches], lost)
    axes.set_xlim(branches[0].batch / 1.5, branches[-1].batch * 1.5)
    axes.minorticks_off()
    axes.set_xlabel("batch; the same samples, the rate following", color=theme.faint, fontsize=9)
    axes.legend(frameon=False, fontsize=9, labelcolor=theme.ink)
    dress(axes, theme, f"held-out loss above that of batch {branches[0].batch:,}")
    save(figure, out)


def _limits(values: Sequence[float], batch: int) -> tuple[float, float]:
    """A range that holds what is finite and above 0, and room for what is not."""
    shown = [value for value in values if math.isfinite(value) and value > 0] + [float(batch)]
    # An interval that is nearly open would press the rest together.
    middle = sorted(shown)[len(shown) // 2]
    return max(min(shown), middle / 64) / 2, min(max(shown), middle * 64) * 2
