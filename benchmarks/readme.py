"""Write the tables of the README and of docs/ from the kept results: `python -m benchmarks.readme`.

A table stands between `<!-- table: FILE -->` and `<!-- end -->`. `FILE#summary` compares megabatch with OpenCLIP in a few rows,
`FILE#clip` and `FILE#siglip` take the rows of one loss, `FILE#options` those of megabatch's options, `FILE#errors` reads rows of
`benchmarks.errors`, and any other `FILE#CASE` takes the rows of that case of `benchmarks.encoders`. `FILE#steps`, `FILE#batches`,
`FILE#clocks`, `FILE#feeding`, `FILE#other_losses` and `FILE#loss_small` read rows of the programs of those names, `FILE#memory` and
`FILE#limits` those of `benchmarks.memory_accuracy`, `FILE#time` those of `benchmarks.time_accuracy`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks import batches, clocks, errors, feeding, loss_small, other_losses, report, steps
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
    "other_losses": other_losses,
    "loss_small": loss_small,
    "memory": memory,
    "time": seconds,
}
# The loss and the batch of each row of the README's table; the embeddings are 768 wide.
SUMMARY = (("clip", 8192), ("clip", 16384), ("clip", 65536), ("clip", 1048576), ("siglip", 16384), ("siglip", 65536))
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
    """Return a table of time and memory of megabatch's losses beside OpenCLIP's, one line per loss and batch."""
    cells = {(row["loss"], row["batch"], row["implementation"]): row for row in rows if row["dim"] == 768}
    lines = ["| loss | pairs | megabatch | OpenCLIP | speed-up |", "| --- | ---: | ---: | ---: | ---: |"]
    for loss, batch in SUMMARY:
        ours, theirs = (cells[loss, batch, name] for name in ("ours", "openclip"))
        ran = "total_s" in theirs
        other = _cost(theirs) if ran else f"needs {theirs['needed_bytes'] / 2**30:,.0f} GiB"
        speed_up = f"{theirs['total_s'] / ours['total_s']:.1f}×" if ran else ""
        lines.append(f"| {loss} | {batch:,} | **{_cost(ours)}** | {other} | {speed_up} |")
    machine = ours["machine"]
    where = f"{machine['gpu']}, torch {machine['torch']}, OpenCLIP {machine['open_clip']}, {machine['date'][:10]}"
    caption = (
        f"GPU time of forward and backward under sustained load, and peak memory above the inputs: bf16 embeddings 768 wide, "
        f"{where}. Below about 16,384 pairs the host takes longer to launch the kernels "
        "than the GPU takes to run them; these times leave that out."
    )
    return "\n".join([*lines, "", caption])


def _cost(row: dict[str, Any]) -> str:
    seconds = row["total_s"]
    time = f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
    return f"{time}, {row['extra_bytes'] / 2**30:.2g} GiB"


if __name__ == "__main__":
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        page.write_text(with_tables(page.read_text()))
