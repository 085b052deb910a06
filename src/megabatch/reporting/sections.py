"""The sections of the report, each empty where the run has nothing for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from .contact import Question, Shown
from .figures import curve, curve_panels, flat_memory, flat_points
from .folder import Folder
from .history import Row, number
from .markup import block, figure, image, pairs, section, table, text
from .wording import bytes_text, percent_text, seconds_text

# Bad samples that are named one by one.
MOST_NAMED = 50
NONE = "–"
MARKS = {True: ("right", "✓ "), False: ("wrong", "✗ "), None: ("", "")}


def _whole(value: float) -> str:
    return f"{value:,.0f}"


# The columns of the table of steps at larger batches.
FLAT = {
    "pairs": ("pairs", _whole),
    "chunk": ("chunk", _whole),
    "time": ("seconds", seconds_text),
    "peak memory": ("peak_bytes", bytes_text),
}


def curves(folder: Folder) -> str:
    panels = curve_panels(folder.history)
    drawn = "".join(figure(curve, panel, f"{panel.title} against the samples seen") for panel in panels)
    return section("How it learned", f'<div class="curves">\n{drawn}</div>\n') if drawn else ""


def answers(folder: Folder) -> str:
    """Questions in both directions, each with its best answers."""
    groups: dict[str, list[Question]] = {}
    for question in folder.questions:
        kinds = (question.asked, question.answers[0] if question.answers else question.asked)
        groups.setdefault(" → ".join("text" if one.image is None else "image" for one in kinds), []).append(question)
    parts = []
    for direction, questions in groups.items():
        title = f"<h3>{direction}</h3>\n" if len(groups) > 1 else ""
        parts.append(title + "".join(map(_question, questions)))
    intro = '<p class="faint">Held-out questions and the most similar answers, best first: ✓ is right, ✗ is not.</p>\n'
    return section("Questions and answers", intro, *parts) if parts else ""


def memory(folder: Folder) -> str:
    """Peak and time beside what was planned, and steps at larger batches with the same chunk."""
    result = folder.result
    steps, seconds = number(result, "steps"), number(result, "seconds")
    process, tensors = number(result, "peak_bytes"), number(result, "step_bytes")
    measured = {
        "peak_bytes": process if tensors is None else tensors,
        "seconds_per_step": seconds / steps if steps and seconds else None,
    }
    rows = [
        (name, _words(planned, words), _words(measured[key], words), _change(planned, measured[key]))
        for name, key, words in (("peak memory", "peak_bytes", bytes_text), ("a step", "seconds_per_step", seconds_text))
        for planned in (number(result, "planned", key),)
        if measured[key] is not None
    ]
    numbers = table(("", "planned", "measured", "difference"), rows) if rows else ""
    words = f"of tensors in one step; the process with interpreter, libraries and data took {_words(process, bytes_text)}"
    beside = "" if tensors is None else f'<p class="faint">Peak memory: {words}.</p>\n'
    parts = (numbers, beside, _flat(result))
    return section("Memory and time", *parts) if any(parts) else ""


def settings(folder: Folder) -> str:
    if not folder.toml:
        return ""
    run = folder.run
    rows: list[tuple[str, Any]] = []
    if run is not None:
        rows = [
            ("data", run.data.source),
            ("towers", f"{run.x.name} and {run.y.name}, {run.loss.dim} dimensions"),
            ("objective", run.loss.objective),
            ("batch", f"{run.batch.size:,}, in chunks of {run.batch.chunk:,}"),
            ("optimizer", f"{run.optimizer.name}, learning rate {run.optimizer.lr:g}, weight decay {run.optimizer.weight_decay:g}"),
            ("seed", run.seed),
        ]
    whole = f"<details><summary>The whole configuration, run.toml</summary>\n{block(folder.toml)}</details>\n"
    return section("Configuration", pairs(rows) if rows else "", whole)


def machine(folder: Folder) -> str:
    rows = list(_leaves(folder.environment))
    return section("Machine", pairs(rows)) if rows else ""


def bad_samples(folder: Folder) -> str:
    """Which samples were skipped and why; one that was met in several epochs is named once."""
    found = Counter((str(row.get("key")), str(row.get("reason"))) for row in folder.history.bad)
    held_out = {(str(row.get("key")), str(row.get("reason"))) for row in folder.history.bad if row.get("split") == "held-out"}
    total = max(number(folder.result, "bad") or 0, len(found) - len(held_out))
    if not total and not held_out:
        return ""
    named = [(key, reason) for (key, reason), _ in found.most_common(MOST_NAMED)]
    more = f'<p class="faint">and {len(found) - len(named):,} more in log.jsonl</p>\n' if len(found) > len(named) else ""
    count = "1 sample was" if total == 1 else f"{total:,.0f} samples were"
    tested = f" {len(held_out):,} held-out samples could not be read and were not evaluated." if held_out else ""
    return section("Bad samples", f"<p>{count} skipped.{tested}</p>\n", pairs(named) if named else "", more)


def notes(folder: Folder) -> str:
    # A run that was resumed has said some of it several times.
    texts = list(dict.fromkeys(text(row.get("text", "")) for row in folder.history.notes))
    if folder.history.unread:
        texts.append(f"{folder.history.unread:,} lines of log.jsonl could not be read, as after a run that was killed.")
    return section("Notes", "<ul>\n" + "".join(f"<li>{note}</li>\n" for note in texts) + "</ul>\n") if texts else ""


def _question(question: Question) -> str:
    pictured = any(answer.image is not None for answer in question.answers)
    asked = question.asked
    said = "" if asked.image is not None else " said"
    listed = "".join(f'<li class="{MARKS[answer.right][0]}">{_shown(answer)}</li>\n' for answer in question.answers)
    return (
        f'<article class="question">\n<div class="asked{said}">{_shown(asked)}</div>\n'
        f'<ol class="answers {"pictured" if pictured else "written"}">\n{listed}</ol>\n</article>\n'
    )


def _shown(shown: Shown) -> str:
    picture = "" if shown.image is None else image(shown.image, shown.text)
    score = "" if shown.score is None else f' <span class="faint">{shown.score:.2f}</span>'
    return f'{picture}<span class="mark">{MARKS[shown.right][1]}</span><bdi>{text(shown.text)}</bdi>{score}'


def _flat(result: Row) -> str:
    """Steps at larger batches: memory stays, while the pairs grow."""
    rows = [row for row in result.get("flat") or [] if isinstance(row, Mapping)] if isinstance(result.get("flat"), list) else []
    points = flat_points(rows)
    if not points:
        return ""
    (few, least), (many, most) = points[0], points[-1]
    growth = f"{many / few:,.3g} times the pairs take {most / least:,.3g} times the memory. " if many > few else ""
    intro = f"<p>{growth}One step each, with the chunk of the run: what grows is the embeddings and the inputs.</p>\n"
    cells = ([_words(number(row, key), words) for key, words in FLAT.values()] for row in rows)
    drawn = figure(flat_memory, rows, "peak memory against the pairs of a step")
    numbers = table(FLAT, cells)
    return f'<h3>Larger batches</h3>\n{intro}{numbers}<div class="wide">{drawn}</div>\n'


def _words(value: float | None, words: Any) -> str:
    return NONE if value is None else words(value)


def _change(planned: float | None, measured: float | None) -> str:
    if not planned or measured is None:
        return NONE
    return ("+" if measured >= planned else "−") + percent_text(abs(measured / planned - 1))


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables and lists as names and plain values; what is absent is left out."""
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
