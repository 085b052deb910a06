"""The report of `megabatch fit`: the trials, what follows from them, and peak memory against the chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...measurements import Fit, Measured
from ...objectives import OBJECTIVES
from ...reporting.figures import Axis, Chart, Figure, Level, Series
from ...reporting.format import bytes_text, seconds_text, whole
from ...reporting.report import Column, KeyNumber, Notes, Report, Section, Table
from .trial import REASONS, REFUSED

# Factor by which the x-axis extends beyond the sizes, and share of its width between two sizes that are written below it.
WIDER, APART = 1.25, 0.08

COLUMNS = (
    Column("size", "chunk", whole),
    Column("outcome", "", kind="word"),
    Column("peak_bytes", "peak memory", bytes_text),
    Column("predicted_bytes", "predicted", bytes_text),
    Column("seconds", "one step", seconds_text),
)


def fit_report(result: Measured) -> Report:
    """Return the report of a measurement of what fits."""
    fit = _fit(result)
    headline, *notes = sentences(result)
    rows = [{**trial, "outcome": trial["why"] or "ran"} for trial in fit.trials]
    peak = _largest_that_ran(fit)["peak_bytes"]
    return Report(
        title=f"chunk {fit.chunk:,} · megabatch fit",
        subject=" · ".join(part for part in (result.device, f"PyTorch {result.torch}", result.date) if part),
        headline=headline,
        numbers=[KeyNumber("chunk", fit.chunk), *([KeyNumber("peak memory", peak, bytes_text)] if peak else [])],
        sections=[Section("Trials", [Table(COLUMNS, rows), _figure(fit)]), *([Section("", [Notes(notes)])] if notes else [])],
    )


def sentences(result: Measured) -> list[str]:
    """Return the answer, the limit that it was held to, the error of the prediction, and how to use it."""
    fit = _fit(result)
    ran = _largest_that_ran(fit)
    failed = min((trial["size"] for trial in fit.trials if not trial["ran"]), default=None)
    peak = "" if ran["peak_bytes"] is None else f" It took {bytes_text(ran['peak_bytes'])}"
    peak += f" of {bytes_text(fit.limit_bytes)} that may be used." if peak and fit.limit_bytes else "." if peak else ""
    beyond = "and no larger one was requested" if failed is None else f"{failed:,} did not"
    trials = "one trial" if len(fit.trials) == 1 else f"{len(fit.trials)} trials"
    lines = [f"chunk {fit.chunk:,} ran on {result.device}, {beyond}; {trials}.{peak}"]
    if ran["peak_bytes"] and ran.get("predicted_bytes"):
        error = ran["predicted_bytes"] / ran["peak_bytes"] - 1
        lines.append(f"The prediction for it was {bytes_text(ran['predicted_bytes'])} ({error:+.1%}).")
    objective = result.run.get("loss", {}).get("objective")
    if objective is None or OBJECTIVES[objective].contrastive:
        lines.append(
            f'No chunk\'s graph was kept during the search: batch.chunk={fit.chunk} with batch.keep="auto" fills the memory that'
            " is left."
        )
    return lines


def ticks(sizes: Sequence[int], chosen: int) -> list[int]:
    """Return the sizes to write below the chart: the chosen one, and those of the others that do not overlap.

    >>> ticks([16, 1792, 1884, 1920, 2048], 1884)
    [16, 1884]
    """
    apart = (sizes[-1] / sizes[0] * WIDER**2) ** APART
    kept = [chosen]
    for size in sizes:
        if all(max(size, other) / min(size, other) >= apart for other in kept):
            kept.append(size)
    return sorted(kept)


def _figure(fit: Fit) -> Figure:
    ran = [(trial["size"], trial["peak_bytes"]) for trial in fit.trials if trial["ran"] and trial["peak_bytes"]]
    # A trial that was refused has reached no more than the limit.
    reached = [
        (t["size"], t["peak_bytes"] if t["why"] != REASONS[REFUSED] else fit.limit_bytes) for t in fit.trials if not t["ran"]
    ]
    failed = [(size, peak) for size, peak in reached if peak]
    predicted = sorted({(t["size"], t["predicted_bytes"]) for t in fit.trials if t.get("predicted_bytes")})
    chosen = [point for point in ran if point[0] == fit.chunk][-1:]
    series = [
        Series(predicted if len(predicted) > 1 else [], "predicted", "dotted", color=2),
        Series(ran, "ran", "points", size=7),
        Series(failed, "did not run", "crosses", color=1, size=7),
        Series(
            chosen, style="rings", texts=[f"chunk {size:,}: {bytes_text(peak)}" for size, peak in chosen], offset=(0, -20), size=13
        ),
    ]
    limit = [] if not fit.limit_bytes else [Level(fit.limit_bytes, f"may be used: {bytes_text(fit.limit_bytes)}")]
    peaks = [peak for _, peak in (*ran, *failed, *predicted)] + [level.value for level in limit]
    sizes = sorted({trial["size"] for trial in fit.trials})
    x = Axis(
        "chunk: rows that go through an encoder at once",
        scale="log2",
        ticks={size: whole(size) for size in ticks(sizes, fit.chunk)},
        low=sizes[0] / WIDER,
        high=sizes[-1] * WIDER,
    )
    y = Axis(format=bytes_text, low=0.85 * min(peaks) if peaks else None, high=1.08 * max(peaks) if peaks else None)
    chart = Chart("measured peak memory of a step", series, x, y, limit)
    return Figure([chart], "peak memory against the chunk: what ran, what did not, the limit, the prediction", "fit.png")


def _largest_that_ran(fit: Fit) -> Mapping[str, Any]:
    return next(trial for trial in reversed(fit.trials) if trial["size"] == fit.chunk and trial["ran"])


def _fit(result: Measured) -> Fit:
    if not isinstance(result.found, Fit):
        raise ValueError(f"this is a measurement of {result.kind!r}, not of 'fit'; give the measured.json of `megabatch fit`")
    return result.found
