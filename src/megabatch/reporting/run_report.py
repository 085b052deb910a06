"""The report of a training run, from the files in its folder. The run may be unfinished, or someone else's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import config
from ..files import write_text
from ..recall import RECALL_AT, chance
from .contact import read_contact
from .figures import Axis, Chart, Figure, Points, Series
from .format import Format, bytes_text, change_text, count_text, percent_text, plural, seconds_text, whole
from .history import History, Row, number, read_history
from .html import as_html
from .limits import limit_sentence
from .report import Block, Code, Column, Gallery, KeyNumber, Notes, Paragraph, Question, Report, Section, Table, pairs_table

# Bad samples that are named one by one.
MOST_NAMED = 50
SIDES = (("image", "text"), ("query", "document"))


class Folder(NamedTuple):
    """The files of a run. run: None where run.toml, whose text is `toml`, is missing or invalid."""

    name: str
    toml: str
    run: config.Run | None
    environment: Row
    history: History
    result: Row
    questions: list[Question]

    def evaluation(self) -> Row:
        """Return the final evaluation, or the last one of the log; empty if there is none."""
        final = self.result.get("evaluation")
        if isinstance(final, Mapping):
            return final
        return self.history.evaluations[-1] if self.history.evaluations else {}

    def sides(self) -> tuple[str, str]:
        """Return the names of x and y."""
        names = self.evaluation().get("sides")
        return next((sides for sides in SIDES if names == list(sides)), ("x", "y"))


def write_run_report(run: Path) -> Path:
    """Write RUN/report.html from the files in the folder, and return its path. Parts that the folder lacks are left out."""
    if not run.is_dir():
        raise ValueError(f"{run}: there is no such folder; give the folder that `megabatch train` wrote to")
    path = run / "report.html"
    write_text(path, as_html(run_report(read_folder(run))))
    return path


def read_folder(run: Path) -> Folder:
    toml = run / "run.toml"
    try:
        settings = config.read(toml)
    except (ValueError, OSError):
        settings = None
    return Folder(
        name=run.resolve().name,
        toml=toml.read_text("utf-8", errors="replace") if toml.exists() else "",
        run=settings,
        environment=_read_json(run / "environment.json"),
        history=read_history(run / "log.jsonl"),
        result=_read_json(run / "result.json"),
        questions=read_contact(run),
    )


def run_report(folder: Folder) -> Report:
    """Return the report of a run."""
    evaluation = folder.evaluation()
    quality = quality_table(evaluation, folder.sides())
    charts = curve_charts(folder.history)
    curves: list[Block] = (
        [Figure(charts, "what was logged against the samples seen", size=(3.7, 2.6), separate=True)] if charts else []
    )
    sections: list[tuple[str, list[Block]]] = [
        ("Held-out recall", [quality] if quality else []),
        ("Training curves", curves),
        ("Questions and answers", list(_galleries(folder))),
        ("Memory and time", list(_memory(folder.result))),
        ("Configuration", list(_configuration(folder))),
        ("Machine", [pairs_table(_leaves(folder.environment))] if folder.environment else []),
        ("Bad samples", list(_bad_samples(folder))),
        ("Notes", list(_notes(folder))),
    ]
    return Report(
        title=f"{folder.name} · megabatch",
        subject=folder.name,
        headline=_headline(folder, evaluation),
        numbers=list(_key_numbers(folder)),
        sections=[Section(title, blocks) for title, blocks in sections if blocks],
        warning="" if folder.result else "This run has not finished: these are its last numbers.",
        footer=f"megabatch {folder.environment.get('megabatch', '')}",
    )


def quality_table(evaluation: Row, sides: tuple[str, str]) -> Table | None:
    """Return held-out recall in both directions beside chance; None where it was not measured."""
    x, y = sides
    directions = ((f"{y} → {x}", "y_to_x", "y_median_rank"), (f"{x} → {y}", "x_to_y", "x_median_rank"))
    rows = [
        {"direction": name, "rank": number(evaluation, rank), **{f"at_{k}": number(evaluation, side, str(k)) for k in RECALL_AT}}
        for name, side, rank in directions
        if number(evaluation, side, "1") is not None
    ]
    if not rows:
        return None
    pairs = number(evaluation, "pairs")
    if pairs:
        different = _different(evaluation, pairs)
        expected = chance(int(different))
        rows.append({"direction": "chance", "rank": (different + 1) / 2, **{f"at_{k}": expected[k] for k in RECALL_AT}})
    recalls = [Column(f"at_{k}", f"recall@{k}", percent_text, bar=True) for k in RECALL_AT]
    columns = [Column("direction", "direction", kind="word"), *recalls, Column("rank", "median rank", "{:,g}".format)]
    return Table(columns, rows, note=f"among {pairs:,.0f} pairs" if pairs else "")


def curves_figure(log: Path) -> Figure:
    """Return one figure of all that a run has logged against the samples seen."""
    charts = curve_charts(read_history(log))
    return Figure(charts, "no step has been logged yet", columns=3, size=(4, 3.1))


def curve_charts(history: History) -> list[Chart]:
    """Return a chart for each quantity that has values."""
    steps, tests = history.steps, history.evaluations
    charts = [
        _curve("loss", {"": _series(steps, "loss")}, "{:.3g}".format, from_zero=False),
        _curve("in-batch recall at 1", {"": _series(steps, "recall")}, percent_text),
        _curve("in-batch accuracy", {"": _series(steps, "accuracy")}, percent_text),
        _curve(
            "held-out recall, mean of both directions", {f"at {k}": _mean_recall(tests, str(k)) for k in RECALL_AT}, percent_text
        ),
        _curve("held-out accuracy", {"": _series(tests, "accuracy")}, percent_text),
        _curve("learning rate", {"": _series(steps, "lr")}, "{:.3g}".format),
        _curve("pairs per second", {"": _series(steps, "pairs_per_s")}, count_text),
        _curve("share of a step that waits for samples", {"": _series(steps, "waiting_for_data")}, percent_text),
        _curve("share of a step with an idle device", {"": _series(steps, "device_idle")}, percent_text),
        _curve("memory in use", {"": _series(steps, "memory_bytes")}, bytes_text),
    ]
    return [chart for chart in charts if chart is not None]


def memory_figure(points: Points) -> Figure:
    """Return peak memory against the pairs of a step at one chunk, beside what it would be if it grew with the pairs."""
    (first_pairs, first_peak), highest = points[0], max(peak for _, peak in points)
    series = [Series(points, "measured", texts=[bytes_text(peak) for _, peak in points], offset=(0, -18), size=6)]
    if len(points) > 1:
        # Up to the upper edge; many points, since the line is curved where the axis is logarithmic.
        factors = [1 + (2.2 * highest / first_peak - 1) * i / 200 for i in range(201)]
        proportional = [(first_pairs * factor, first_peak * factor) for factor in factors]
        series.append(Series(proportional, "in proportion to the pairs", "dotted", color=None))
    ticks = {pairs: whole(pairs) for pairs, _ in points}
    x = Axis("pairs of the step", scale="log2", ticks=ticks, low=points[0][0] / 1.5, high=points[-1][0] * 1.5)
    y = Axis(format=bytes_text, low=0, high=2.2 * highest)
    chart = Chart("peak memory of one step at the same chunk", series, x, y)
    return Figure([chart], "peak memory against the pairs of a step")


def memory_points(rows: Iterable[Row]) -> Points:
    """Return (pairs, peak in bytes) of the rows that have both, by pairs."""
    points = ((number(row, "pairs"), number(row, "peak_bytes")) for row in rows)
    return sorted((pairs, peak) for pairs, peak in points if pairs and peak and min(pairs, peak) > 0)


def _read_json(path: Path) -> Row:
    try:
        contents = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return contents if isinstance(contents, dict) else {}


def _different(evaluation: Row, pairs: float) -> float:
    """Return the different rows of the side with fewer, as far as the run counted them: what recall by chance depends on."""
    return number(evaluation, "different") or pairs


def _headline(folder: Folder, evaluation: Row) -> str:
    pairs, accuracy, recall = number(evaluation, "pairs"), number(evaluation, "accuracy"), number(evaluation, "y_to_x", "1")
    if accuracy is not None:
        samples = "the" if pairs is None else f"{pairs:,.0f}"
        expected = number(folder.result, "chance", "accuracy")
        beside = "" if expected is None else f"; chance would be {percent_text(expected)}"
        return f"{percent_text(accuracy)} of {samples} held-out samples are classified correctly{beside}."
    if recall is None or not pairs:
        return "Nothing has been evaluated on held-out data yet."
    x, y = folder.sides()
    expected = chance(int(_different(evaluation, pairs)))[1]
    found = f"{percent_text(recall)} of {pairs:,.0f} held-out {plural(y)} find their own {x} first"
    return f"{found}; chance would be {percent_text(expected)}."


def _key_numbers(folder: Folder) -> Iterator[KeyNumber]:
    """Yield the run in a few numbers: from its result or, if it has none, from its last step."""
    last = folder.history.steps[-1] if folder.history.steps else {}

    def first(*names: str) -> float | None:
        values = (number(row, name) for row in (folder.result, last) for name in names)
        return next((value for value in values if value is not None), None)

    candidates: list[tuple[str, float | None, Format]] = [
        ("samples seen", first("samples"), count_text),
        ("steps", first("steps", "step"), count_text),
        ("batch", folder.run.batch.size if folder.run else None, count_text),
        ("time", number(folder.result, "seconds"), seconds_text),
        ("pairs per second", first("pairs_per_s"), count_text),
        ("parameters", number(folder.result, "parameters"), count_text),
        ("peak memory", first("peak_bytes", "memory_bytes"), bytes_text),
    ]
    return (KeyNumber(name, value, format) for name, value, format in candidates if value is not None)


def _galleries(folder: Folder) -> Iterator[Block]:
    """Yield questions in both directions, each with its best answers."""
    groups: dict[str, list[Question]] = {}
    for question in folder.questions:
        kinds = (question.asked, question.answers[0] if question.answers else question.asked)
        groups.setdefault(" → ".join("text" if item.image is None else "image" for item in kinds), []).append(question)
    if groups:
        yield Paragraph("Held-out questions and the most similar answers, best first: ✓ is right, ✗ is wrong.")
    for direction, questions in groups.items():
        yield Gallery(questions, direction if len(groups) > 1 else "")


def _memory(result: Row) -> Iterator[Block]:
    """Yield peak and time beside the plan's, what limits the speed, and steps at larger batches with the same chunk."""
    steps, seconds = number(result, "steps"), number(result, "seconds")
    process, tensors = number(result, "peak_bytes"), number(result, "step_bytes")
    measured = {
        "peak_bytes": process if tensors is None else tensors,
        "seconds_per_step": seconds / steps if steps and seconds else None,
    }
    rows = []
    for name, key, format in (("peak memory", "peak_bytes", bytes_text), ("one step", "seconds_per_step", seconds_text)):
        planned, value = number(result, "planned", key), measured[key]
        if value is not None:
            change = change_text(value / planned - 1) if planned else None
            rows.append({"name": name, "planned": planned and format(planned), "measured": format(value), "difference": change})
    if rows:
        columns = [Column("name", "", kind="word"), *(Column(key, key) for key in ("planned", "measured", "difference"))]
        yield Table(columns, rows)
    if tensors is not None and process is not None:
        yield Paragraph(
            "Peak memory counts the tensors of one step; the process with interpreter, libraries and data took"
            f" {bytes_text(process)}."
        )
    limit = limit_sentence(number(result, "waiting_for_data"), number(result, "device_idle"))
    if limit is not None:
        yield Paragraph(limit)
    larger = result.get("flat")
    yield from _larger_batches([row for row in larger if isinstance(row, Mapping)] if isinstance(larger, list) else [])


def _larger_batches(rows: list[Row]) -> Iterator[Block]:
    points = memory_points(rows)
    if not points:
        return
    (few, least), (many, most) = points[0], points[-1]
    growth = f"{many / few:,.3g} times the pairs take {most / least:,.3g} times the memory. " if many > few else ""
    columns = [
        Column("pairs", "pairs", whole),
        Column("chunk", "chunk", whole),
        Column("seconds", "time", seconds_text),
        Column("peak_bytes", "peak memory", bytes_text),
    ]
    values = [{column.key: number(row, column.key) for column in columns} for row in rows]
    yield Paragraph(f"{growth}One step each at the run's chunk: only embeddings and inputs grow with the batch.")
    yield Table(columns, values, title="Larger batches")
    yield memory_figure(points)


def _configuration(folder: Folder) -> Iterator[Block]:
    run = folder.run
    if run is not None:
        optimizer = run.optimizer
        yield pairs_table(
            [
                ("data", run.data.source),
                ("towers", f"{run.x.name} and {run.y.name}, {run.loss.dim} dimensions"),
                ("objective", run.loss.objective),
                ("batch", f"{run.batch.size:,}, in chunks of {run.batch.chunk:,}"),
                ("optimizer", f"{optimizer.name}, learning rate {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}"),
                ("seed", run.seed),
            ]
        )
    if folder.toml:
        yield Code(folder.toml, "The whole configuration, run.toml")


def _bad_samples(folder: Folder) -> Iterator[Block]:
    """Yield which samples were skipped and why; one that occurred in several epochs is named once."""
    counts = Counter((str(row.get("key")), str(row.get("reason"))) for row in folder.history.bad)
    held_out = {(str(row.get("key")), str(row.get("reason"))) for row in folder.history.bad if row.get("split") == "held-out"}
    total = max(number(folder.result, "bad") or 0, len(counts) - len(held_out))
    if not total and not held_out:
        return
    samples = "1 sample was" if total == 1 else f"{total:,.0f} samples were"
    untested = f" {len(held_out):,} held-out samples could not be read and were not evaluated." if held_out else ""
    yield Paragraph(f"{samples} skipped.{untested}")
    named = [pair for pair, _ in counts.most_common(MOST_NAMED)]
    if named:
        yield pairs_table(named, note=f"and {len(counts) - len(named):,} more in log.jsonl" if len(counts) > len(named) else "")


def _notes(folder: Folder) -> Iterator[Block]:
    # A run that was resumed has logged some of them several times.
    texts = list(dict.fromkeys(str(row.get("text", "")) for row in folder.history.notes))
    if folder.history.unread:
        texts.append(f"{folder.history.unread:,} lines of log.jsonl could not be read, as after a run that was killed.")
    if texts:
        yield Notes(texts)


def _curve(title: str, lines: Mapping[str, Points], format: Format, *, from_zero: bool = True) -> Chart | None:
    """Return a chart of one quantity with its last value; None where a line has no points."""
    if not all(lines.values()):
        return None
    series = [
        Series(points, f"{name}: {format(points[-1][1])}" if name else "", color=place, size=4)
        for place, (name, points) in enumerate(lines.items())
    ]
    last = format(series[0].points[-1][1]) if len(series) == 1 else ""
    x = Axis("samples seen", count_text, low=0)
    return Chart(title, series, x, Axis(format=format, low=0 if from_zero else None), value=last)


def _series(rows: Iterable[Row], *path: str) -> Points:
    points = ((number(row, "samples"), number(row, *path)) for row in rows)
    return [(samples, value) for samples, value in points if samples is not None and value is not None]


def _mean_recall(rows: Iterable[Row], k: str) -> Points:
    forward, backward = (_series(rows, side, k) for side in ("x_to_y", "y_to_x"))
    return [(samples, (a + b) / 2) for (samples, a), (_, b) in zip(forward, backward, strict=False)]


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested tables and lists as names and plain values; None is left out."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _leaves(entry, f"{name} · {key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        for place, entry in enumerate(value):
            yield from _leaves(entry, f"{name} {place}")
    elif isinstance(value, list):
        if value:
            yield name, ", ".join(map(str, value))
    elif value is not None:
        yield name, bytes_text(value) if name.endswith("memory") and isinstance(value, int) else value
