"""The report of `megabatch noise`: the critical batch over training, and the losses of branches to other batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ... import config
from ...measurements import Measured, Noise
from ...reporting.figures import Axis, Chart, Figure, Level, Series
from ...reporting.format import whole
from ...reporting.report import Block, Code, Column, KeyNumber, Notes, Paragraph, Report, Section, Table
from ...training.noise.estimator import number, sentence
from .branch import TOLERANCE, Branch

MOST_POINTS = 12
SIZE = 7.6, 3.8
COUPLED = (
    "Samples are compared with each other, so the number is valid for this batch only: another batch is another loss, with other"
    " negatives. It tells where averaging more samples stops paying, and nothing about what more negatives would gain.",
    "It is estimated from the gradients of whole batches at the same weights, which are independent; those of parts of a batch are"
    " not.",
)
PROXY = (
    "Noise is a proxy for the critical batch, and a disputed one (arXiv 2505.23971). Branching tries batches directly:"
    " megabatch noise --branch."
)


def noise_report(result: Measured, branches: Sequence[Branch] = ()) -> Report:
    """Return the report of a measurement of noise. branches: of the same run, if there were any."""
    noise = noise_of(result)
    return Report(
        title=f"batch {noise.batch:,} · megabatch noise",
        subject=f"{result.device} · {result.date}",
        headline=headline(result),
        numbers=[
            KeyNumber("critical batch", noise.critical, number),
            KeyNumber("from", noise.low, number),
            KeyNumber("to", noise.high, number),
            KeyNumber("the run's batch", noise.batch),
        ],
        sections=[
            Section("Over training", [_table(noise), _course_figure(noise)]),
            Section("", [Notes(sentences(result))]),
            *([Section("Branches", list(_branches(branches)))] if branches else []),
            Section("The run that was measured", [Code(config.as_toml(config.build(result.run)), detail=True)]),
        ],
    )


def noise_of(result: Measured) -> Noise:
    """Return the noise of a measurement of it."""
    if not isinstance(result.found, Noise):
        raise ValueError(f"this is a measurement of {result.kind!r}, not of 'noise'; give the measured.json of `megabatch noise`")
    return result.found


def headline(result: Measured) -> str:
    noise = noise_of(result)
    words = sentence(noise.critical, noise.low, noise.high)
    return f"{words[0].upper()}{words[1:]}."


def sentences(result: Measured) -> list[str]:
    """Return what follows from the noise, and what does not."""
    noise = noise_of(result)
    lines = [_position(noise)]
    if math.isfinite(noise.critical) and noise.critical > 0:
        steps, samples = 1 + noise.critical / noise.batch, 1 + noise.batch / noise.critical
        lines.append(
            f"If noise were the only limit, batch {noise.batch:,} would reach a target in {number(steps)} times the fewest possible"
            f" steps and with {number(samples)} times the fewest possible samples (arXiv 1812.06162); at the critical batch both"
            " are 2."
        )
    if noise.branch is not None:
        lines.append(f"In branches from the last step, {noise.branch:,} was the largest batch that lost nothing.")
    return lines + list(COUPLED if noise.coupled else ()) + ([PROXY] if noise.branch is None else [])


def _position(noise: Noise) -> str:
    """Return where the run's batch lies."""
    batch = f"The run's batch, {noise.batch:,},"
    if noise.batch < noise.low:
        return f"{batch} is below the whole interval: a larger one needs fewer steps, nearly in proportion while it stays below."
    if noise.batch > noise.high:
        return f"{batch} is above the whole interval: a smaller one would need hardly more steps, and fewer samples."
    return f"{batch} lies within the interval: the noise does not show that it is too small or too large."


def _table(noise: Noise) -> Table:
    """Return at most MOST_POINTS estimates, the last one among them."""
    stride = max(1, -(-len(noise.course) // MOST_POINTS))
    columns = [
        Column("step", "step", whole),
        Column("critical", "critical batch", number),
        Column("low", "from", number),
        Column("high", "to", number),
    ]
    return Table(columns, noise.course[::-stride][::-1])


def _course_figure(noise: Noise) -> Figure:
    """Return the critical batch against the step, with its interval as a band and the run's batch as a line."""
    bottom, top = _limits([point[key] for point in noise.course for key in ("critical", "low", "high")], noise.batch)
    band = [(min(max(point["low"], bottom), top), min(max(point["high"], bottom), top)) for point in noise.course]
    critical = [(point["step"], point["critical"] if bottom < point["critical"] < top else math.nan) for point in noise.course]
    unbounded = any(math.isinf(point["high"]) for point in noise.course)
    x = Axis("step; a band that reaches the upper edge has no upper end" if unbounded else "step")
    chart = Chart(
        "critical batch by the noise of the gradient, with its 95 % interval",
        [Series(critical, band=band)],
        x,
        Axis(format="{:,g}".format, scale="log2", low=bottom, high=top),
        [Level(noise.batch, f"the run's batch: {noise.batch:,}")],
        value=number(noise.critical) if math.isfinite(noise.critical) else f"above {number(noise.low)}",
    )
    description = "the critical batch against the step, with its interval and the run's batch"
    return Figure([chart], description, "noise.png", size=SIZE)


def _branches(branches: Sequence[Branch]) -> Iterator[Block]:
    yield Paragraph(
        "From one checkpoint, each batch was trained on the same samples with its rate scaled, in proportion for SGD and by the"
        f" root for others. A batch loses if it ends above the smallest by more than {TOLERANCE:g} and the noise of the comparison:"
        " half of its 95 % interval, by repeats on other samples.",
        detail=True,
    )
    if branches[-1].noise > TOLERANCE:
        yield Paragraph("Here the noise is the larger of the two: longer branches or more of them would tell more.", warning=True)
    columns = [
        Column("batch", "batch", whole),
        Column("loss", "held-out loss", _loss_text),
        Column("difference", "above the smallest", _loss_text),
        Column("noise", "noise of that", _loss_text),
        Column("verdict", "", kind="word"),
    ]
    yield Table(columns, [{**branch._asdict(), "verdict": "" if branch.fine else "loses"} for branch in branches])
    ended = [branch for branch in branches if math.isfinite(branch.difference)]
    series = [
        Series(
            [(branch.batch, branch.difference) for branch in ended if branch.fine is fine],
            label,
            "points",
            color,
            errors=[(branch.noise, branch.noise) for branch in ended if branch.fine is fine],
            size=7,
        )
        for label, fine, color in (("loses nothing", True, 0), ("loses", False, 1))
    ]
    labels = {branch.batch: whole(branch.batch) + ("" if branch in ended else "\ndiverged") for branch in branches}
    low, high = branches[0].batch / 1.5, branches[-1].batch * 1.5
    chart = Chart(
        f"held-out loss above that of batch {branches[0].batch:,}",
        series,
        Axis("batch, on the same samples at a scaled rate", scale="log2", ticks=labels, low=low, high=high),
        Axis(format="{:.3g}".format),
        [Level(TOLERANCE, f"tolerance {TOLERANCE:g}")],
    )
    yield Figure([chart], "held-out loss of branches against their batch", "branches.png", size=SIZE)


def _loss_text(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "diverged"


def _limits(values: Sequence[float], batch: int) -> tuple[float, float]:
    """Return a range around all finite positive values, with space for those that are not."""
    finite = [value for value in values if math.isfinite(value) and value > 0] + [float(batch)]
    # An interval that is nearly unbounded would squeeze the rest.
    middle = sorted(finite)[len(finite) // 2]
    return max(min(finite), middle / 64) / 2, min(max(finite), middle * 64) * 2
