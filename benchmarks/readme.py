"""Write the tables of the README and of docs/ from the kept results: `python -m benchmarks.readme`.

A table stands between `<!-- table: FILE -->` and `<!-- end -->`. `FILE#summary` takes a few rows of `benchmarks.loss_small`,
`FILE#clip` and `FILE#siglip` take the rows of one loss, `FILE#options` those of megabatch's options, `FILE#errors` reads rows of
`benchmarks.errors`, and any other `FILE#CASE` takes the rows of that case of `benchmarks.encoders`. `FILE#steps`, `FILE#batches`,
`FILE#clocks`, `FILE#feeding`, `FILE#losses`, `FILE#other_losses`, `FILE#loss_small`, `FILE#ring`,
`FILE#trainers`, `FILE#open_clip_step` and `FILE#whole_steps` read rows of the programs of those names,
`FILE#memory` and `FILE#limits` those of `benchmarks.memory_accuracy`, `FILE#time` those of `benchmarks.time_accuracy`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks import (
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
# The loss and the batch of each row of the README's table.
SUMMARY = (("clip", 256), ("clip", 4096), ("clip", 16384), ("clip", 65536), ("siglip", 4096), ("siglip", 65536))
PLACE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """The text with every table as the rows that it names give it."""
    return PLACE.sub(lambda place: f"{place[1]}{_table(place[2])}\n{place[3]}", text)


def _table(name: str) -> str:
    file, _, case = name.partition("#")
    rows = report.read_rows(ROOT / file)
    if case == "summary":
        return summary_markdown(rows)
    if case == "options":
        return report.options_markdown(rows)
    if case in PROGRAMS:
        return PROGRAMS[case].markdown(rows)
    if case == "limits":
        return memory.limits_markdown(rows)
    if case in LOSSES:
        return report.markdown([row for row in rows if row["loss"] == case])
    return encoders.markdown([row for row in rows if row["case"] == case]) if case else report.markdown(rows)


def summary_markdown(rows: list[dict[str, Any]]) -> str:
    """Return a table of the time of megabatch's losses beside the plain formula, one line per loss and batch."""
    cells = {(row["loss"], row["batch"], row["implementation"]): row["wall_s"] for row in rows}
    lines = ["| loss | pairs | megabatch | plain formula | plain formula, compiled |", "| --- | ---: | ---: | ---: | ---: |"]
    for loss, batch in SUMMARY:
        ours, *others = (cells[loss, batch, name] for name in ("ours", "full matrix", "full matrix, compiled"))
        texts = (f"{report.three_digits(1e3 * each)} ms ({each / ours:.1f}×)" for each in others)
        lines.append(f"| {loss} | {batch:,} | **{report.three_digits(1e3 * ours)} ms** | {' | '.join(texts)} |")
    machine = rows[0]["machine"]
    caption = (
        f"Wall-clock time of forward and backward with the host, {rows[0]['dtype']} embeddings {rows[0]['dim']} wide: "
        f"{machine['gpu']}, torch {machine['torch']}, {machine['date'][:10]}."
    )
    return "\n".join([*lines, "", caption])


if __name__ == "__main__":
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        page.write_text(with_tables(page.read_text()))
