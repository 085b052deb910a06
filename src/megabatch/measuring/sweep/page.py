"""A sweep as one HTML page that loads nothing and runs nothing, in the style of a run's report."""

from __future__ import annotations

from ... import config
from ...measurements import Measured
from ...reporting.markup import LONG, block, document, figure, section, table, text
from ...reporting.wording import bytes_text, percent_text, seconds_text
from .picture import Rows, picture
from .show import batch_rows, columns, verdict_of

RUNS = ("batch", "rate", "decay", "seed", "chosen by", "reported", "trained on", "loss", "updates", "time", "pairs/s", "memory")


def page(result: Measured, rows: Rows) -> str:
    """The page of a sweep and of its rows, which are those of rows.jsonl. Names and errors come from outside, and are escaped."""
    told = verdict_of(result)
    body = f"""<h1 class="faint">{text(result.device)} · {text(result.date)}</h1>
<p class="headline">{text(told.headline, LONG)}</p>
{_drawn(result, rows)}{_batches(result)}{_words(told.sentences)}{_runs(rows)}{_settings(result)}"""
    return document(f"batch {told.batch:,} · megabatch sweep", body)


def _drawn(result: Measured, rows: Rows) -> str:
    words = "held-out quality against the batch and against the time of training"
    return figure(picture, (result, rows), words)


def _batches(result: Measured) -> str:
    shown = table(map(text, columns(result)), [[text(cell) for cell in row] for row in batch_rows(result)])
    gap = "<p>The gap: by how many points the quality on pairs that were trained on is higher, among equally many.</p>\n"
    return section("Each batch at its best rate", shown, gap)


def _words(sentences: tuple[str, ...]) -> str:
    return section("In words", "<ul>\n", *(f"<li>{text(sentence, LONG)}</li>\n" for sentence in sentences), "</ul>\n")


def _runs(rows: Rows) -> str:
    ended = [row for row in rows if row["error"] is None]
    cells = [
        [
            # The first column would give way to all others, letter by letter.
            f'<span style="white-space:nowrap">{row["batch"]:,}</span>',
            f"{row['lr']:g}",
            f"{row['weight_decay']:g}",
            f"{row['seed']}",
            *(_share(row[key]) for key in ("choosing", "quality", "training")),
            f"{row['loss']:.3f}" if row["loss"] is not None else "",
            f"{row['steps']:,}",
            seconds_text(row["seconds"]),
            f"{row['pairs_per_s']:,.0f}",
            bytes_text(row["peak_bytes"]) if row["peak_bytes"] else "",
        ]
        for row in ended
    ]
    failed = [f"batch {row['batch']:,}, rate {row['lr']:g}, seed {row['seed']}: {row['error']}" for row in rows if row["error"]]
    lines = ["<h3>Failed</h3>\n<ul>\n", *(f"<li>{text(line, LONG)}</li>\n" for line in failed), "</ul>\n"] if failed else []
    return section("Every run", table(RUNS, cells), *lines)


def _share(value: float | None) -> str:
    return "" if value is None else percent_text(value)


def _settings(result: Measured) -> str:
    return section("The run that was swept", block(config.as_toml(config.build(result.run))))
