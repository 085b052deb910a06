"""A plan on a terminal, as Markdown, and as a file that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import config
from ..files import check_file, write_text
from ..reporting.wording import bytes_text, seconds_text
from ..terminal import print_table, print_text
from .plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

NUMBERS = ("", "value", "why", "source", "confidence")
WAYS = ("", "batch", "GPUs", "chunk", "keep", "memory", "a step", "updates", "the run", "cost")


def headline(plan: Plan) -> str:
    """The answer in a sentence."""
    strategy = plan.strategy
    again = "" if strategy.accumulate else f", keep {strategy.keep}"
    return (
        f"batch {plan.batch:,}: {strategy.ranks} × {strategy.shard:,}, in chunks of {strategy.chunk:,}{again}, "
        f"{strategy.precision};"
        f" {bytes_text(plan.peak_bytes)} of {bytes_text(plan.device_bytes)} a GPU, {seconds_text(plan.seconds_per_step)} a step"
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
            seconds_text(way.seconds_per_step),
            f"{way.updates:,}",
            seconds_text(3600 * way.hours),
            f"{way.cost:,.3g} {currency or 'GPU-h'}",
        ]
        for way in plan.alternatives
    ]


def show(plan: Plan, console: Console | None = None, currency: str | None = None) -> None:
    """Prints the plan as tables."""
    print_text(headline(plan), bold=True, console=console)
    print_text(plan.machine, console=console)
    for columns, rows in ((NUMBERS, number_rows(plan)), (WAYS, way_rows(plan, currency))):
        print_table(columns, rows, lines=columns is NUMBERS, console=console)
    for title, lines in (("notes", plan.notes), ("what would change the answer", plan.changes)):
        if lines:
            print_text(title, bold=True, console=console)
            for line in lines:
                print_text(line, item=True, console=console)


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
    writers = _writers(path)
    text = writers[path.suffix](plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return path


def check_target(path: str | Path, name: str) -> None:
    """Raise ValueError where `write` could not write a plan to `path`; `name` is what the path is called in the message."""
    _writers(Path(path))
    check_file(path, name, make_folder=True)


def _writers(path: Path) -> dict[str, Callable[[Plan], str]]:
    writers: dict[str, Callable[[Plan], str]] = {".toml": as_toml, ".json": Plan.as_json, ".md": as_markdown, ".html": _page}
    if path.suffix not in writers:
        raise ValueError(f"{path}: the name must end in one of {', '.join(writers)}, which says what to write")
    return writers


def _page(plan: Plan) -> str:
    from .page import page

    return page(plan)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *cells)]
    return "\n".join(lines)
