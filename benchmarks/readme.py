"""Write the tables of the README and of docs/ from the kept results: `python -m benchmarks.readme`.

A table stands between `<!-- table: FILE -->` and `<!-- end -->`. Of rows of `benchmarks.loss`, `FILE#summary` takes a few,
`FILE#times` those that were timed with the host, `FILE#clip` and `FILE#siglip` the large batches of one loss, `FILE#options` those
of megabatch's options. `FILE#attention`, `FILE#errors`, `FILE#steps`, `FILE#batches`, `FILE#clocks`, `FILE#feeding`,
`FILE#losses`, `FILE#other_losses`, `FILE#loss_small`, `FILE#ring`, `FILE#trainers`, `FILE#open_clip_step` and `FILE#whole_steps`
read rows of the programs of those names, `FILE#memory` and `FILE#limits` those of `benchmarks.memory_accuracy`, `FILE#time` those
of `benchmarks.time_accuracy`. Any other `FILE#CASE` takes the rows of that case of `benchmarks.encoders`.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import (
    attention,
    batches,
    clocks,
    errors,
    feeding,
    loss_small,
    losses,
    open_clip_step,
    other_losses,
    report,
    ring,
    steps,
    trainers,
    whole_steps,
)
from benchmarks.check import LOSSES
from benchmarks.encoders import report as encoders
from benchmarks.memory_accuracy import report as memory
from benchmarks.time_accuracy import report as seconds

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = {
    "attention": attention,
    "errors": errors,
    "steps": steps,
    "batches": batches,
    "clocks": clocks,
    "feeding": feeding,
    "losses": losses,
    "other_losses": other_losses,
    "loss_small": loss_small,
    "ring": ring,
    "trainers": trainers,
    "open_clip_step": open_clip_step,
    "whole_steps": whole_steps,
    "memory": memory,
    "time": seconds,
}
# The width, the batches and the implementations of the README's table.
WIDTH = 768
SUMMARY = (256, 4096, 16_384, 65_536)
SUMMARY_NAMES = {
    "ours": "megabatch",
    report.GRAPHED: "`megabatch.graphed`",
    "full matrix": "plain formula",
    "full matrix compiled": "plain formula, compiled",
}
# The fewest pairs of the tables of one loss, whose times leave the host out.
LARGE = 16_384
PLACE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """The text with every table as the rows that it names give it."""
    return PLACE.sub(lambda place: f"{place[1]}{_table(place[2])}\n{place[3]}", text)


def _table(name: str) -> str:
    file, _, case = name.partition("#")
    rows = report.read_rows(ROOT / file)
    if case == "summary":
        return summary_markdown(rows)
    if case == "times":
        return report.times_markdown(rows)
    if case == "options":
        return report.options_markdown(rows)
    if case in PROGRAMS:
        return PROGRAMS[case].markdown(rows)
    if case == "limits":
        return memory.limits_markdown(rows)
    if case in LOSSES:
        return report.markdown([row for row in rows if row["loss"] == case and row["batch"] >= LARGE])
    return encoders.markdown([row for row in rows if row["case"] == case]) if case else report.markdown(rows)


def summary_markdown(rows: list[dict[str, Any]]) -> str:
    """Return a table of the time of megabatch's losses beside the plain formula, one line per loss and batch. The least is bold."""
    timed = [row for row in rows if "wall_s" in row and row["dim"] == WIDTH]
    cells = {(row["loss"], row["batch"], row["implementation"]): row["wall_s"] for row in timed}
    lines = []
    for loss, batch in product(LOSSES, SUMMARY):
        times = [cells[loss, batch, name] for name in SUMMARY_NAMES]
        texts = [f"{report.three_digits(1e3 * each)} ms" for each in times]
        texts = [f"**{text}**" if each == min(times) else text for text, each in zip(texts, times, strict=True)]
        texts[2:] = (f"{text} ({each / times[0]:.1f}×)" for text, each in zip(texts[2:], times[2:], strict=True))
        lines.append([loss, f"{batch:,}", *texts])
    machine = timed[0]["machine"]
    headers = ("loss", "pairs", *SUMMARY_NAMES.values())
    return (
        f"{report.markdown_table(headers, lines, left=('loss',))}\n\n"
        f"Wall-clock time of forward and backward with the host, {timed[0]['dtype']} embeddings {WIDTH} wide; in parentheses, "
        f"relative to megabatch. {machine['gpu']}, torch {machine['torch']}, {machine['date'][:10]}."
    )


if __name__ == "__main__":
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        page.write_text(with_tables(page.read_text()))
