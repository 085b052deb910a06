"""The report of `megabatch sweep`: each batch at its best rate, the verdict, and every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ... import config
from ...measurements import Measured, Sweep
from ...objectives import OBJECTIVES
from ...reporting.figures import Axis, Chart, Figure, Series
from ...reporting.format import bytes_text, count_text, percent_text, seconds_text, whole
from ...reporting.report import Block, Code, Column, KeyNumber, Notes, Report, Section, Table
from .cases import rule_in_words
from .summary import Summary, difference, from_row, pareto
from .verdict import Verdict, best_of, quality_text, verdict

Rows = Sequence[Mapping[str, Any]]
EDGES = {"lowest": "≤", "highest": "≥"}
LENGTH = {"samples": "the same samples", "updates": "the same updates", "time": "the same time"}
# Round times, in seconds.
TICKS = (
    *(unit * n for unit in (0.001, 0.01, 0.1) for n in (1, 2, 5)),
    *(unit * n for unit in (1, 60, 3600) for n in (1, 2, 5, 10, 20, 30)),
    *(86400 * n for n in (2, 4, 10)),
)


def sweep_report(result: Measured, rows: Rows = ()) -> Report:
    """Return the report of a sweep. rows: of all runs, as in rows.jsonl; without them the report has no figure."""
    sweep, answer = sweep_of(result), verdict_of(result)
    taken = next(each for each in summaries_of(result) if each.batch == sweep.batch)
    figure = [_figure(result, rows)] if any(row["quality"] is not None for row in rows) else []
    return Report(
        title=f"batch {answer.batch:,} · megabatch sweep",
        subject=f"{result.device} · {result.date}",
        headline=answer.headline,
        numbers=[
            KeyNumber("batch", answer.batch),
            KeyNumber("learning rate", answer.lr, "{:g}".format),
            KeyNumber(f"held-out {quality_name(result.run)}", taken.mean, percent_text),
        ],
        sections=[
            Section("", figure),
            Section("Each batch at its best rate", [_batches(result)]),
            Section("", [Notes(answer.sentences)]),
            *([Section("Every run", _runs(rows))] if rows else []),
            Section("The run that was swept", [Code(config.as_toml(config.build(result.run)), detail=True)]),
        ],
    )


def sweep_of(result: Measured) -> Sweep:
    if not isinstance(result.found, Sweep):
        raise ValueError(f"this is a measurement of {result.kind!r}, not of 'sweep'; give the measured.json of `megabatch sweep`")
    return result.found


def summaries_of(result: Measured) -> list[Summary]:
    return [from_row(row) for row in sweep_of(result).rows]


def quality_name(run: Mapping[str, Any]) -> str:
    """Return the name of what a run is measured by; `run` as a measurement holds it."""
    return OBJECTIVES[run["loss"]["objective"]].held_out_metric


def verdict_of(result: Measured) -> Verdict:
    """Return the verdict, and how the rates follow the batch."""
    summaries = summaries_of(result)
    answer = verdict(summaries, sweep_of(result).same, quality_name(result.run))
    rule = rule_in_words(config.build(result.run), tuple(each.batch for each in summaries))
    return answer._replace(sentences=(*answer.sentences, rule))


def _batches(result: Measured) -> Table:
    """Return each batch at its best rate. ≤ and ≥: the rate is the lowest or highest that was tried."""
    summaries = summaries_of(result)
    best, front = best_of(summaries), pareto(summaries)
    decays = len({each.weight_decay for each in summaries}) > 1
    columns = [
        Column("batch", "batch", whole),
        Column("rate", "rate"),
        Column("weight_decay", "weight decay", "{:g}".format),
        Column("steps", "updates", whole),
        Column("quality", f"{quality_name(result.run)}, %"),
        Column("difference", "to the best"),
        Column("gap", "gap", lambda gap: f"{100 * gap:.1f}"),
        Column("seconds", "time", seconds_text),
        Column("pairs_per_s", "pairs/s", count_text),
        Column("front", "Pareto front", kind="word"),
    ]
    rows = [
        {
            "batch": each.batch,
            "rate": ("" if each.edge is None else EDGES[each.edge]) + f"{each.lr:g}",
            "weight_decay": each.weight_decay if decays else None,
            "steps": each.steps,
            "quality": quality_text(each).removesuffix(" %"),
            "difference": None if each is best else _difference_text(each, best),
            "gap": each.gap,
            "seconds": each.seconds,
            "pairs_per_s": each.pairs_per_s,
            "front": "✓" if each in front else "",
        }
        for each in summaries
    ]
    note = (
        f"{LENGTH[sweep_of(result).same].capitalize()} at every batch. Differences and gap in points; the gap is by how much the"
        " quality on pairs of the training set is higher, among equally many."
    )
    return Table(columns, rows, note=note)


def _runs(rows: Rows) -> list[Block]:
    columns = [
        Column("batch", "batch", whole),
        Column("lr", "rate", "{:g}".format),
        Column("weight_decay", "decay", "{:g}".format),
        Column("seed", "seed"),
        Column("choosing", "chosen by", percent_text),
        Column("quality", "reported", percent_text),
        Column("training", "trained on", percent_text),
        Column("loss", "loss", "{:.3f}".format),
        Column("steps", "updates", whole),
        Column("seconds", "time", seconds_text),
        Column("pairs_per_s", "pairs/s", whole),
        Column("peak_bytes", "memory", bytes_text),
    ]
    blocks: list[Block] = [Table(columns, [row for row in rows if row["error"] is None], detail=True)]
    failed = [
        f"batch {row['batch']:,}, rate {row['lr']:g}, seed {row['seed']} failed: {row['error']}" for row in rows if row["error"]
    ]
    return [*blocks, Notes(failed, detail=True)] if failed else blocks


def _figure(result: Measured, rows: Rows) -> Figure:
    """Return quality against the batch with every rate tried, and against time with the Pareto front."""
    rows = [row for row in rows if row["quality"] is not None]
    y = Axis(format=lambda share: percent_text(max(0.0, share)), low=0, high=1.18 * max(0.01, *(row["quality"] for row in rows)))
    charts = [_against_batch(result, rows, y), _against_cost(result, rows, y)]
    return Figure(charts, "held-out quality against the batch and against training time", "sweep.png", size=(6, 4.6))


def _against_batch(result: Measured, rows: Rows, y: Axis) -> Chart:
    """Bars are the standard deviation over seeds; each run is a point, those of lower rates further left."""
    summaries = summaries_of(result)
    at = {each.batch: each for each in summaries}
    runs = [(row["batch"] * (row["lr"] / at[row["batch"]].lr) ** 0.08, row["quality"]) for row in rows if row["batch"] in at]
    means = Series(
        [(each.batch, each.mean) for each in summaries],
        errors=[(each.spread or 0.0, each.spread or 0.0) for each in summaries],
        size=7,
    )
    # Above the error bars.
    tops = [(each.batch, each.mean + (each.spread or 0.0)) for each in summaries]
    labels = Series(tops, style="points", texts=[percent_text(each.mean) for each in summaries], offset=(0, 11), size=0)
    chosen = at[sweep_of(result).batch]
    seeds = max(len(each.qualities) for each in summaries)
    spread = f", ± spread of {seeds} seeds" if seeds > 1 else ""
    x = Axis(
        f"batch, its best rate, its updates{spread}; small: every run; ring: recommended",
        scale="log2",
        ticks={each.batch: f"{each.batch:,}\n{each.lr:g}\n{each.steps:,}" for each in summaries},
        low=min(at) / 1.6,
        high=max(at) * 1.6,
    )
    ring = Series([(chosen.batch, chosen.mean)], style="rings", color=1, size=13)
    title = f"held-out {quality_name(result.run)}, {LENGTH[sweep_of(result).same]}"
    return Chart(title, [Series(runs, style="points", color=None, size=3), means, ring, labels], x, y)


def _against_cost(result: Measured, rows: Rows, y: Axis) -> Chart:
    """Against time, with the front; where that is the same for all, against the samples seen in it."""
    summaries, timed = summaries_of(result), sweep_of(result).same != "time"
    front = pareto(summaries) if timed else []
    cost = "seconds" if timed else "samples"
    highlighted = front if timed else summaries
    series = [
        Series([(row[cost], row["quality"]) for row in rows], style="points", color=None, size=3),
        Series(_stairs(front), style="dashed", color=2),
    ]
    for color, group in ((0, highlighted), (None, [each for each in summaries if each not in highlighted])):
        points = [(getattr(each, cost), each.mean) for each in group]
        series.append(
            Series(points, style="points", color=color, texts=[whole(each.batch) for each in group], offset=(0, 11), size=8)
        )
    costs = [row[cost] for row in rows] + [getattr(each, cost) for each in summaries]
    low, high = min(costs) / 1.35, max(costs) * 1.35
    candidates = TICKS if timed else [10**n * m for n in range(12) for m in (1, 2, 5)]
    ticks = [tick for tick in candidates if low <= tick <= high] or [costs[-1]]
    labels = {tick: _round_time(tick) if timed else count_text(tick) for tick in ticks}
    x = Axis("training time" if timed else "samples seen in the time", scale="log", ticks=labels, low=low, high=high)
    title = "the same against time; dashed: the Pareto front" if timed else "the same against samples seen"
    return Chart(title, series, x, y)


def _difference_text(each: Summary, best: Summary) -> str:
    apart = difference(each.qualities, best.qualities)
    return f"{100 * apart.mean:+.1f}" + ("" if apart.half is None else f" ± {100 * apart.half:.1f}")


def _round_time(seconds: float) -> str:
    return seconds_text(seconds).removesuffix(" 0 s").removesuffix(" 0 min")


def _stairs(front: Sequence[Summary]) -> list[tuple[float, float]]:
    """Return the border of what the front beats: level to the next batch's time, then up."""
    xs = [each.seconds for each in front for _ in range(2)]
    ys = [each.mean for each in front for _ in range(2)]
    return list(zip(xs[1:], ys[:-1], strict=True))
