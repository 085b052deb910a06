"""One batch of 16,384 pairs on this machine, with and without the similarity matrix: `python -m benchmarks.demo`.

Both run in separate processes and are checked against the formula in float64. The numbers are measured on this machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import figures, report
from benchmarks.measure import Case, Row, run_case

HEADERS = ("implementation", "forward s", "backward s", "total s", "extra MiB", "gradient error", "allowed")


def main(arguments: list[str] | None = None) -> int:
    """Run the demo and return the exit code: 0 if every result agrees with the formula, 1 otherwise or if ours has no result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=16_384)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of the figure")
    options = parser.parse_args(arguments)
    try:
        cases = {name: Case("clip", name, options.batch, options.dim, repeats=0) for name in ("ours", "full matrix")}
    except ValueError as error:
        parser.error(str(error))

    heading = f"The CLIP loss of {options.batch:,} pairs, D = {options.dim}, float32"
    print(f"{heading}, forward and backward, each in a separate process")
    rows = []
    for name, words in (("ours", "megabatch, tile by tile"), ("full matrix", "the full similarity matrix")):
        with _working(words):
            rows.append(run_case(cases[name]))
    measured = [row for row in rows if "total_s" in row]
    if measured:
        report.show(HEADERS, [_cells(row) for row in measured])
        path = options.out / "demo.png"
        figures.draw_bars(measured, path, heading)
        print(f"figure: {path.resolve()}")
    print(_sentence(*rows))
    wrong = any(row.get("right") is False for row in rows)
    return int(wrong or "total_s" not in rows[0])


def _cells(row: Row) -> tuple[str, ...]:
    seconds = (report.three_digits(row[f"{part}_s"]) for part in ("forward", "backward", "total"))
    memory = report.three_digits(row["extra_bytes"] / 2**20)
    return (report.title(row), *seconds, memory, f"{row['errors']['gradient']:.1e}", f"{row['tolerance']:.1e}")


def _sentence(ours: Row, full: Row) -> str:
    """Return the result as one sentence with the measured numbers."""
    if "total_s" not in ours:
        return f"megabatch has no result: {report.reason(ours)}."
    mib, seconds = report.three_digits(ours["extra_bytes"] / 2**20), report.three_digits(ours["total_s"])
    start = f"At a batch of {ours['batch']:,}, megabatch took {mib} MiB in addition to the inputs and {seconds} s"
    exact = f"equal to the formula up to {ours['errors']['gradient']:.0e} of the largest gradient entry"
    if "total_s" not in full:
        return f"{start}, {exact}; the full matrix was not measured: {report.reason(full)}."
    less = full["extra_bytes"] / max(1, ours["extra_bytes"])
    times = full["total_s"] / ours["total_s"]
    pace = f"{times:.1f} times as fast" if times >= 1 else f"{1 / times:.1f} times as long"
    full_mib, full_s = report.three_digits(full["extra_bytes"] / 2**20), report.three_digits(full["total_s"])
    return f"{start}, the full matrix {full_mib} MiB and {full_s} s: {less:,.0f} times less memory and {pace}, {exact}."


@contextmanager
def _working(words: str) -> Iterator[None]:
    """Show that a measurement is running, and print how long it took."""
    start = time.monotonic()
    if importlib.util.find_spec("rich") is None or not sys.stdout.isatty():
        print(f"  {words} …", flush=True)
        yield
    else:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), transient=True) as bar:
            bar.add_task(words, total=None)
            yield
    print(f"  {words}: measured and checked, {time.monotonic() - start:.0f} s in all", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
