"""A plan as one HTML page that loads nothing and runs nothing, in the style of a run's report."""

from __future__ import annotations

from ..reporting.markup import LONG, block, document, figure, section, table, text
from ..reporting.wording import bytes_text, seconds_text
from .pictures import breakdown, memory_curve, time_curve
from .plan import Plan
from .show import NUMBERS, WAYS, as_toml, headline, number_rows, way_rows


def page(plan: Plan, currency: str | None = None) -> str:
    """The page. Names, paths and reasons may come from outside: all of them are escaped."""
    parts = (_opening(plan), _pictures(plan), _reasons(plan), _ways(plan, currency), _lists(plan), _file(plan))
    return document(f"batch {plan.batch:,} · {plan.machine} · megabatch plan", "".join(parts))


def _opening(plan: Plan) -> str:
    strategy = plan.strategy
    facts = [
        ("batch", f"{plan.batch:,}"),
        ("GPUs", f"{strategy.ranks:,}"),
        ("rows a GPU", f"{strategy.shard:,}"),
        ("chunk", f"{strategy.chunk:,}"),
        ("memory", bytes_text(plan.peak_bytes)),
        ("a step", seconds_text(plan.seconds_per_step)),
        ("updates", f"{plan.alternatives[0].updates:,}"),
        ("the run", seconds_text(3600 * plan.alternatives[0].hours)),
    ]
    body = "".join(f"<div><dt>{name}</dt><dd>{text(value)}</dd></div>\n" for name, value in facts)
    return (
        f'<h1>{text(plan.machine)}</h1>\n<p class="headline">{text(headline(plan))}</p>\n'
        f"<p>{text(plan.numbers[0].why, LONG)}</p>\n"
        f'<dl class="facts">\n{body}</dl>\n'
    )


def _pictures(plan: Plan) -> str:
    drawn = [
        figure(memory_curve, plan, "peak memory against the batch, with the device's limit"),
        figure(time_curve, plan, "seconds of a step against the batch"),
        figure(breakdown, plan, "what memory and time are made of"),
    ]
    return section("Memory and time", *(f'<div class="wide">{picture}</div>\n' for picture in drawn))


def _reasons(plan: Plan) -> str:
    rows = [[text(cell, LONG) for cell in row] for row in number_rows(plan)]
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    head = "".join(f"<th>{name}</th>" for name in NUMBERS)
    return section("Every number, and why", f'<div class="scroll"><table>\n<tr>{head}</tr>\n{lines}</table></div>\n')


def _ways(plan: Plan, currency: str | None) -> str:
    return section("Beside it", table(WAYS, [[text(cell) for cell in row] for row in way_rows(plan, currency)]))


def _lists(plan: Plan) -> str:
    parts = ""
    for title, lines in (("Notes", plan.notes), ("What would change the answer", plan.changes)):
        if lines:
            parts += section(title, "<ul>\n" + "".join(f"<li>{text(line, LONG)}</li>\n" for line in lines) + "</ul>\n")
    return parts


def _file(plan: Plan) -> str:
    return "" if plan.run is None else section("The file that runs", block(as_toml(plan)))
