"""The report of a plan, and the files that a plan can be written to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from .. import config
from ..files import check_file, write_text
from ..reporting.figures import Axis, Bars, Chart, Figure, Level, Points, Series
from ..reporting.format import Format, bytes_text, seconds_text, whole
from ..reporting.html import as_html
from ..reporting.markdown import as_markdown
from ..reporting.report import Code, Column, KeyNumber, Notes, Paragraph, Report, Section, Table
from .plan import Plan

# Parts below this share of the whole are drawn together.
SMALLEST_PART = 0.01


def headline(plan: Plan) -> str:
    """Return the answer in a sentence."""
    strategy = plan.strategy
    keep = "" if strategy.accumulate else f", keep {strategy.keep}"
    return (
        f"batch {plan.batch:,}: {strategy.ranks} × {strategy.shard:,}, in chunks of {strategy.chunk:,}{keep}, {strategy.precision};"
        f" {bytes_text(plan.peak_bytes)} of {bytes_text(plan.device_bytes)} per GPU, {seconds_text(plan.seconds_per_step)} per step"
    )


def plan_report(plan: Plan, currency: str | None = None) -> Report:
    """Return the report of a plan. currency: of costs; None is GPU-hours."""
    strategy, chosen = plan.strategy, plan.alternatives[0]
    file = [] if plan.run is None else [Section("The file that `megabatch train` runs", [Code(as_toml(plan), detail=True)])]
    return Report(
        title=f"batch {plan.batch:,} · {plan.machine} · megabatch plan",
        subject=plan.machine,
        headline=headline(plan),
        numbers=[
            KeyNumber("batch", plan.batch),
            KeyNumber("GPUs", strategy.ranks),
            KeyNumber("rows per GPU", strategy.shard),
            KeyNumber("chunk", strategy.chunk),
            KeyNumber("memory", plan.peak_bytes, bytes_text),
            KeyNumber("one step", plan.seconds_per_step, seconds_text),
            KeyNumber("updates", chosen.updates),
            KeyNumber("the run", 3600 * chosen.hours, seconds_text),
        ],
        sections=[
            Section("", [Paragraph(plan.numbers[0].why, detail=True)]),
            Section("Memory and time", _figures(plan)),
            Section("Every number, and why", [_numbers(plan)]),
            Section("Alternatives", [_alternatives(plan, currency)]),
            *(
                Section(title, [Notes(lines)])
                for title, lines in (("Notes", plan.notes), ("What would change the answer", plan.changes))
                if lines
            ),
            *file,
        ],
    )


def as_toml(plan: Plan) -> str:
    """Return the file that `megabatch train` runs."""
    if plan.run is None:
        raise ValueError(
            "this plan cannot be written as a run: `megabatch train` trains encoders and classifiers; use the numbers of the plan"
        )
    return config.as_toml(plan.run)


def write(plan: Plan, path: str | Path) -> Path:
    """Write the plan in the format that the suffix of `path` names: .toml (the run), .json (everything), .html or .md."""
    path = Path(path)
    text = _writer(path)(plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return path


def check_target(path: str | Path, name: str) -> None:
    """Raise ValueError where `write` could not write a plan to `path`; `name` is what the message calls the path."""
    _writer(Path(path))
    check_file(path, name, make_folder=True)


def _writer(path: Path) -> Callable[[Plan], str]:
    writers: dict[str, Callable[[Plan], str]] = {
        ".toml": as_toml,
        ".json": Plan.as_json,
        ".md": lambda plan: as_markdown(plan_report(plan), detail=False),
        ".html": lambda plan: as_html(plan_report(plan)),
    }
    if path.suffix not in writers:
        raise ValueError(f"{path}: the name must end in one of {', '.join(writers)}, which selects the format")
    return writers[path.suffix]


def _numbers(plan: Plan) -> Table:
    columns = [
        Column("name", "", kind="word"),
        Column("shown", "value", kind="text"),
        Column("why", "why", kind="text"),
        Column("source", "source", kind="text"),
        Column("confidence", "confidence", kind="word"),
    ]
    return Table(columns, [number._asdict() for number in plan.numbers])


def _alternatives(plan: Plan, currency: str | None) -> Table:
    columns = [
        Column("name", "", kind="text"),
        Column("batch", "batch", whole),
        Column("gpus", "GPUs", whole),
        Column("chunk", "chunk", whole),
        Column("keep", "keep", whole),
        Column("peak_bytes", "memory", bytes_text),
        Column("seconds_per_step", "one step", seconds_text),
        Column("updates", "updates", whole),
        Column("hours", "the run", lambda hours: seconds_text(3600 * hours)),
        Column("cost", "cost", lambda cost: f"{cost:,.3g} {currency or 'GPU-h'}"),
    ]
    return Table(columns, [alternative._asdict() for alternative in plan.alternatives])


def _figures(plan: Plan) -> list[Figure]:
    """Return memory and time against the batch, and what they are made of."""
    memory = _curve(
        plan,
        "peak memory of a GPU, with the best chunk at each batch",
        [(batch, peak) for batch, peak, _ in plan.curve],
        Axis(format=bytes_text, low=0, high=1.15 * plan.device_bytes),
        [
            Level(plan.device_bytes, f"memory of the device: {bytes_text(plan.device_bytes)}"),
            Level(plan.limit_bytes, f"usable: {bytes_text(plan.limit_bytes)}"),
        ],
    )
    seconds = [(batch, seconds) for batch, _, seconds in plan.curve]
    time = _curve(plan, "predicted time of a step", seconds, Axis(format=seconds_text, scale="log2"))
    parts = [Bars("memory", _largest(plan.memory), bytes_text), Bars("time of a step", _largest(plan.time), seconds_text)]
    return [
        Figure([memory], "peak memory against the batch, with the device's limit"),
        Figure([time], "seconds per step against the batch"),
        Figure(parts, "the parts of memory and time", size=(3.6, 3.4)),
    ]


def _curve(plan: Plan, title: str, points: Points, y: Axis, levels: list[Level] | None = None) -> Chart:
    chosen = next(point for point in points if point[0] == plan.batch)
    format: Format = y.format
    ring = Series([chosen], style="rings", texts=[format(chosen[1])], offset=(0, 12), size=11)
    x = Axis("batch", scale="log2", ticks={batch: whole(batch) for batch, _ in points})
    return Chart(title, [Series(points), ring], x, y, levels or [])


def _largest(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts, largest first, small ones together."""
    total = sum(parts.values())
    large = {name: part for name, part in parts.items() if part >= SMALLEST_PART * total}
    rest = total - sum(large.values())
    ordered = dict(sorted(large.items(), key=lambda item: -item[1]))
    return {**ordered, "the rest": rest} if rest > 0 else ordered
