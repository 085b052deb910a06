"""Writes the tables of the README and of docs/ from the kept rows: `python -m benchmarks.readme`.

A table stands between `<!-- table: FILE -->` and `<!-- end -->`; `FILE#CASE` takes the rows of one case of `benchmarks.encoders`.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import report
from benchmarks.encoders import report as encoders

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """The text with every table as the rows that it names give it."""
    return PLACE.sub(lambda place: f"{place[1]}{_table(place[2])}\n{place[3]}", text)


def _table(name: str) -> str:
    file, _, case = name.partition("#")
    rows = report.read_rows(ROOT / file)
    return encoders.markdown([row for row in rows if row["case"] == case]) if case else report.markdown(rows)


if __name__ == "__main__":
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        page.write_text(with_tables(page.read_text()))
