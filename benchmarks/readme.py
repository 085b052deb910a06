"""Writes the tables of the README and of docs/ from the kept rows: `python -m benchmarks.readme`.

A table stands between `<!-- table: FILE -->` and `<!-- end -->`. `FILE#clip` and `FILE#siglip` take the rows of one loss,
`FILE#options` those of megabatch's options, `FILE#errors` reads rows of `benchmarks.errors`, and any other `FILE#CASE` takes the
rows of that case of `benchmarks.encoders`. `FILE#steps`, `FILE#batches` and `FILE#clocks` read rows of the programs of those names,
`FILE#memory` and `FILE#limits` those of `benchmarks.memory_accuracy`, `FILE#time` those of `benchmarks.time_accuracy`.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import batches, clocks, errors, report, steps
from benchmarks.check import LOSSES
from benchmarks.encoders import report as encoders
from benchmarks.memory_accuracy import report as memory
from benchmarks.time_accuracy import report as seconds

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = {"errors": errors, "steps": steps, "batches": batches, "clocks": clocks, "memory": memory, "time": seconds}
PLACE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """The text with every table as the rows that it names give it."""
    return PLACE.sub(lambda place: f"{place[1]}{_table(place[2])}\n{place[3]}", text)


def _table(name: str) -> str:
    file, _, case = name.partition("#")
    rows = report.read_rows(ROOT / file)
    if case == "options":
        return report.options_markdown(rows)
    if case in PROGRAMS:
        return PROGRAMS[case].markdown(rows)
    if case == "limits":
        return memory.limits_markdown(rows)
    if case in LOSSES:
        return report.markdown([row for row in rows if row["loss"] == case])
    return encoders.markdown([row for row in rows if row["case"] == case]) if case else report.markdown(rows)


if __name__ == "__main__":
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        page.write_text(with_tables(page.read_text()))
