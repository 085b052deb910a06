"""A plan on a terminal, as Markdown, and as a file that runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import config
from ..training.report.wording import bytes_text, seconds_text
from .plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

NUMBERS = ("", "value", "why", "source", "confidence")
WAYS = ("", "batch", "GPUs", "chunk", "keep", "memory", "a step", "updates", "the run", "cost")


def headline(plan: Plan) -> str:
    """The answer in a sentence."""
    how = plan.how
    again = "" if how.accumulate else f", keep {how.keep}"
    return (
        f"batch {plan.batch:,}: {how.ranks} × {how.shard:,}, in chunks of {how.chunk:,}{again}, {how.precision};"
        f" {bytes_text(plan.peak_bytes)} of {bytes_text(plan.device_bytes)} a GPU, {seconds_text(plan.seconds_a_step)} a step"
    )


def number_rows(plan: Plan) -> list[list[str]]:
    return [[number.name, number.shown, number.why, number.source, number.confidence] for number in plan.numbers]


def way_rows(plan: Plan, currency: str | None = None) -> list[list[str]]:
    """The alternatives as texts. currency: what costs are in; None is GPU-hours."""
    return [
        [
            way.name,
            f"{way.batch:,}",
            f"{way.gpus:,}",
            f"{way.chunk:,}",
            f"{way.keep:,}",
            bytes_text(way.peak_bytes),
            seconds_text(way.seconds_a_step),
            f"{way.updates:,}",
            seconds_text(3600 * way.hours),
            f"{way.cost:,.3g} {currency or 'GPU-h'}",
        ]
        for way in plan.alternatives
    ]


def show(plan: Plan, console: Console | None = None, currency: str | None = None) -> None:
    """Prints the plan as tables."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        raise ValueError("plans on a terminal need rich: pip install 'megabatch[plan]', or print them as JSON") from None
    console = console or Console()
    # Names and reasons are data, not markup: Text is printed as it is.
    console.print(Text(headline(plan), style="bold"))
    console.print(Text(plan.machine))
    for columns, rows in ((NUMBERS, number_rows(plan)), (WAYS, way_rows(plan, currency))):
        table = Table(*columns, show_lines=columns is NUMBERS)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
    for title, lines in (("notes", plan.notes), ("what would change the answer", plan.changes)):
        if lines:
            console.print(Text(title, style="bold"))
            for line in lines:
                console.print(Text(f"  · {line}"))


def as_markdown(plan: Plan, currency: str | None = None) -> str:
    """The plan for documentation: its tables, notes and changes."""
    parts = [f"**{headline(plan)}** on {plan.machine}.", _table(NUMBERS, number_rows(plan)), _table(WAYS, way_rows(plan, currency))]
    for title, lines in (("Notes", plan.notes), ("What would change the answer", plan.changes)):
        if lines:
            parts.append(f"{title}:\n\n" + "\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def as_toml(plan: Plan) -> str:
    """The file that `megabatch train` runs."""
    if plan.run is None:
        raise ValueError("this plan has no file: `megabatch train` trains encoders and classifiers; take the numbers of the plan")
    return config.as_toml(plan.run)


def write(plan: Plan, path: str | Path) -> Path:
    """Writes the plan where `path` says: .toml the run, .json all of it, .html a page with pictures, .md tables."""
    path = Path(path)
    writers = {".toml": as_toml, ".json": Plan.as_json, ".md": as_markdown, ".html": _page}
    if path.suffix not in writers:
        raise ValueError(f"{path}: the name must end in one of {', '.join(writers)}, which says what to write")
    text = writers[path.suffix](plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _page(plan: Plan) -> str:
    from .page import page

    return page(plan)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *cells)]
    return "\n".join(lines)
