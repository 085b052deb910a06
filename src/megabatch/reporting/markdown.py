"""A report as Markdown, for documentation, and as JSON, for programs."""

from __future__ import annotations

import json
import math
from typing import Any

from .figures import Bars, Figure
from .format import plain
from .report import Block, Code, Gallery, Notes, Paragraph, Question, Report, Table

# Characters of a cell, a note or a paragraph.
MOST_CHARACTERS = 1000
RIGHT = {True: "✓ ", False: "✗ ", None: ""}


def as_markdown(report: Report, *, detail: bool = True) -> str:
    """Return the report as Markdown, without figures. detail: with the blocks that a terminal leaves out."""
    parts = [f"**{_line(report.headline)}**", _line(report.subject), f"> {_line(report.warning)}" if report.warning else ""]
    for section in report.sections:
        blocks = [text for text in (_block(block) for block in section.blocks if detail or not block.detail) if text]
        parts += [f"### {_line(section.title)}" if section.title and blocks else "", *blocks]
    return "\n\n".join(part for part in parts if part) + "\n"


def table_markdown(table: Table) -> str:
    """Return a table as Markdown, numbers right-aligned.

    >>> from .report import Column
    >>> print(table_markdown(Table([Column("name", "", kind="text"), Column("size", "size")], [{"name": "a|b", "size": 1}])))
    |  | size |
    | --- | ---: |
    | a\\|b | 1 |
    """
    columns = table.visible_columns()
    lines = [[column.name for column in columns], ["---:" if column.kind == "number" else "---" for column in columns]]
    lines += [[_line(column.text(row)).replace("|", "\\|") for column in columns] for row in table.rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def as_json(report: Report) -> str:
    """Return the report as strict JSON: its values unformatted, and the points of its figures."""
    sections = [{"title": section.title, "blocks": [_values(block) for block in section.blocks]} for section in report.sections]
    values = {
        "title": report.title,
        "subject": report.subject,
        "headline": report.headline,
        "warning": report.warning,
        "numbers": {number.name: number.value for number in report.numbers},
        "sections": sections,
    }
    return json.dumps(_strict(values), indent=1, ensure_ascii=False, allow_nan=False)


def _block(block: Block) -> str:
    if isinstance(block, Table):
        parts = (block.title and f"{_line(block.title)}:", table_markdown(block) if block.rows else "", _line(block.note))
        return "\n\n".join(part for part in parts if part)
    if isinstance(block, Notes):
        return "\n".join(f"- {_line(item)}" for item in block.items)
    if isinstance(block, Paragraph):
        return f"> {_line(block.text)}" if block.warning else _line(block.text)
    if isinstance(block, Code):
        # A fence that is longer than any run of backticks inside cannot be closed by the text.
        fence = "`" * max(3, 1 + max((len(run) for run in block.text.split() if set(run) == {"`"}), default=0))
        return f"{fence}\n{block.text.rstrip()}\n{fence}"
    if isinstance(block, Gallery):
        return "\n".join(_question(question) for question in block.questions)
    return ""


def _question(question: Question) -> str:
    answers = [f"  - {RIGHT[answer.right]}{_line(answer.text)}" for answer in question.answers]
    return "\n".join([f"- {_line(question.asked.text)}", *answers])


def _line(text: str) -> str:
    """Return a text from outside on one line, without HTML that Markdown would pass on."""
    return plain(text, MOST_CHARACTERS).replace("<", "&lt;")


def _values(block: Block) -> dict[str, Any]:
    if isinstance(block, Table):
        keys = [column.key for column in block.columns]
        rows = [{key: row[key] for key in keys if row.get(key) is not None} for row in block.rows]
        return {"kind": block.kind, "title": block.title, "rows": rows, "note": block.note}
    if isinstance(block, Figure):
        charts = [
            {"title": chart.title, "parts": dict(chart.parts)}
            if isinstance(chart, Bars)
            else {"title": chart.title, "series": [{"label": each.label, "points": each.points} for each in chart.series]}
            for chart in block.charts
        ]
        return {"kind": block.kind, "description": block.description, "charts": charts}
    if isinstance(block, Gallery):
        questions = [
            {
                "text": question.asked.text,
                "answers": [{"text": a.text, "right": a.right, "score": a.score} for a in question.answers],
            }
            for question in block.questions
        ]
        return {"kind": block.kind, "questions": questions}
    return {"kind": block.kind, **({"items": list(block.items)} if isinstance(block, Notes) else {"text": block.text})}


def _strict(value: Any) -> Any:
    """Return the value with infinity and NaN, which JSON does not have, as their names."""
    if isinstance(value, dict):
        return {str(key): _strict(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
