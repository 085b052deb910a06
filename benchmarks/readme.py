"""Writes the README's tables from the kept rows: `python -m benchmarks.readme`.

A table stands between `<!-- table: FILE -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import report

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """The text with every table as the rows that it names give it."""
    return PLACE.sub(lambda place: f"{place[1]}{report.markdown(report.read_rows(ROOT / place[2]))}\n{place[3]}", text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text()))
