"""The top of the report: the result in one sentence, in both directions, and the run in a few numbers."""

from __future__ import annotations

from ..recall import RECALL_AT, chance
from .folder import Folder
from .history import Row, number
from .markup import text
from .wording import bytes_text, count_text, percent_text, seconds_text

UNFINISHED = '<p class="warning">This run has not come to its end: these are its last numbers.</p>\n'


def opening(folder: Folder) -> str:
    found = folder.evaluation()
    x, y = folder.sides()
    directions = ((f"{y} → {x}", "y_to_x", "y_median_rank"), (f"{x} → {y}", "x_to_y", "x_median_rank"))
    cards = "".join(_card(found, *direction) for direction in directions if number(found, direction[1], "1") is not None)
    # The sign stays with its number.
    headline = _headline(folder, found).replace(" %", "&nbsp;%")
    return (
        f'<header>\n<h1 class="faint">{text(folder.name)}</h1>\n<p class="headline">{headline}</p>\n'
        + ("" if folder.result else UNFINISHED)
        + (f'<div class="cards">\n{cards}</div>\n' if cards else "")
        + f"{_facts(folder)}</header>\n"
    )


def _headline(folder: Folder, found: Row) -> str:
    pairs, accuracy, first = number(found, "pairs"), number(found, "accuracy"), number(found, "y_to_x", "1")
    if accuracy is not None:
        many = "the" if pairs is None else f"{pairs:,.0f}"
        return f"{percent_text(accuracy)} of {many} held-out samples are classified right{_beside(folder)}."
    if first is None or not pairs:
        return "Nothing has been evaluated on held-out data yet."
    x, y = folder.sides()
    luck = percent_text(chance(int(pairs))[1])
    return f"{percent_text(first)} of {pairs:,.0f} held-out {y}s find their own {x} first; chance would be {luck}."


def _beside(folder: Folder) -> str:
    luck = number(folder.result, "chance", "accuracy")
    return "" if luck is None else f"; chance would be {percent_text(luck)}"


def _card(found: Row, direction: str, side: str, rank: str) -> str:
    """Recall of one direction beside chance, and the median rank."""
    pairs, median, first = number(found, "pairs"), number(found, rank), number(found, side, "1")
    luck = chance(int(pairs)) if pairs else {}
    lines = ""
    for k in RECALL_AT:
        share = number(found, side, str(k))
        if share is not None:
            beside = f"chance {percent_text(luck[k])}" if luck else ""
            bar = f'<span style="width:{100 * min(max(share, 0), 1):.1f}%"></span>'
            cells = f'<td class="n">{percent_text(share)}</td><td class="bar">{bar}</td><td class="n faint">{beside}</td>'
            lines += f"<tr><th>at {k}</th>{cells}</tr>\n"
    middle = "" if median is None or not pairs else f'<p class="faint">median rank {median:,g} of {pairs:,.0f}</p>\n'
    return (
        f'<div class="card">\n<div>{direction}, recall at 1</div>\n<div class="number">{percent_text(first or 0)}</div>\n'
        f'<table class="shares">\n{lines}</table>\n{middle}</div>\n'
    )


def _facts(folder: Folder) -> str:
    """The run in a few numbers: from its result or, if it has none, from its last step."""
    last = folder.history.steps[-1] if folder.history.steps else {}
    rows = [folder.result, last]

    def first(*names: str) -> float | None:
        values = (number(row, name) for row in rows for name in names)
        return next((value for value in values if value is not None), None)

    facts = [
        ("samples seen", first("samples"), count_text),
        ("steps", first("steps", "step"), count_text),
        ("batch", folder.run.batch.size if folder.run else None, count_text),
        ("time", number(folder.result, "seconds"), seconds_text),
        ("pairs a second", first("pairs_per_s"), count_text),
        ("parameters", number(folder.result, "parameters"), count_text),
        ("peak memory", first("peak_bytes", "memory_bytes"), bytes_text),
    ]
    body = "".join(f"<div><dt>{name}</dt><dd>{words(value)}</dd></div>\n" for name, value, words in facts if value is not None)
    return f'<dl class="facts">\n{body}</dl>\n' if body else ""
