"""Rows as JSON lines, as a table on the terminal and as markdown."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.measure import Row

TITLES = {
    "ours": "megabatch",
    "openclip": "OpenCLIP",
    "openclip chunked": "OpenCLIP, chunked",
    "sentence-transformers": "Sentence Transformers",
    "inf-cl": "Inf-CL",
    "cut-cross-entropy": "Cut Cross-Entropy",
}
HEADERS = (
    "loss",
    "implementation",
    "N",
    "D",
    "dtype",
    "forward s",
    "backward s",
    "total s",
    "speed",
    "extra MiB",
    "memory",
    "gradient error",
)


def in_order(rows: list[Row]) -> list[Row]:
    """The rows by loss, then by batch, and otherwise as they came."""
    losses = list(dict.fromkeys(row["loss"] for row in rows))
    return sorted(rows, key=lambda row: (losses.index(row["loss"]), row["batch"]))


def title(row: Row) -> str:
    """The name under which an implementation is shown."""
    return TITLES.get(row["implementation"], row["implementation"])


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSON-lines file, in its order."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a file that `python -m benchmarks.loss --out FILE` wrote")
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes rows as JSON lines in place of what the file held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def three_digits(value: float) -> str:
    """A number with three significant digits and no exponent.

    >>> three_digits(0.012345), three_digits(1234.5)
    ('0.0123', '1,234')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def table(rows: list[Row]) -> list[tuple[str, ...]]:
    """The cells under HEADERS, one tuple a measured row; speed and memory are relative to OpenCLIP in the same rows."""
    cells = []
    for row in _measured(in_order(rows)):
        peer = _openclip(rows, row)
        speed = f"{peer['total_s'] / row['total_s']:.2f}×" if peer else ""
        share = f"{row['extra_bytes'] / max(1, peer['extra_bytes']):.1%}" if peer else ""
        cells.append(
            (
                row["loss"],
                title(row),
                f"{row['batch']:,}",
                f"{row['dim']:,}",
                row["dtype"],
                *(three_digits(row[f"{part}_s"]) for part in ("forward", "backward", "total")),
                speed,
                three_digits(row["extra_bytes"] / 2**20),
                share,
                f"{row['errors']['gradient']:.1e}",
            )
        )
    return cells


def notes(rows: list[Row]) -> list[str]:
    """One line for each row that has no time, with the reason."""
    lines = []
    for row in rows:
        if "total_s" not in row:
            lines.append(f"{row['loss']}, {title(row)}, N = {row['batch']:,}: {reason(row)}")
    return lines


def reason(row: Row) -> str:
    """Why a row holds no time."""
    return row.get("error") or row.get("skipped") or row["unavailable"]


def markdown(rows: list[Row]) -> str:
    """The table of the README: a line for each loss and batch, a column for each implementation, and where it was run."""
    rows = in_order(rows)
    names = list(dict.fromkeys(title(row) for row in rows))
    cell = {(row["loss"], row["batch"], title(row)): _markdown_cell(row) for row in rows}
    lines = [f"| loss | batch | {' | '.join(names)} |", f"| --- | ---: |{' ---: |' * len(names)}"]
    for loss, batch in dict.fromkeys((row["loss"], row["batch"]) for row in rows):
        cells = " | ".join(cell.get((loss, batch, name), "") for name in names)
        lines.append(f"| {loss} | {batch:,} | {cells} |")
    return "\n".join([*lines, "", caption(rows)])


def caption(rows: list[Row]) -> str:
    """One sentence: the machine, the versions, the date, and what the numbers count."""
    row = next(iter(_measured(rows)), None)
    if row is None:
        raise ValueError("no row holds a measurement: run `python -m benchmarks.loss` first")
    machine = row["machine"]
    worst: dict[str, float] = {}
    for each in _measured(rows):
        worst[title(each)] = max(worst.get(title(each), 0.0), each["errors"]["gradient"])
    off = ", ".join(f"{error:.0e} ({name})" for name, error in worst.items())
    return (
        f"Forward and backward, {row['dtype']}, D = {row['dim']}, on {device_name(machine)} with torch {machine['torch']}, "
        f"{machine['date'][:10]}. Memory is the peak above the inputs, gradients of both included. Every result agreed with "
        f"the formula in float64 before it was timed; gradients are off by at most {off} of their largest entry."
    )


def device_name(machine: dict[str, Any]) -> str:
    """The GPU, or the processor with the threads that torch used."""
    return machine.get("gpu") or f"{machine['cpu']} ({machine['threads']} threads)"


def show(headers: tuple[str, ...], cells: list[tuple[str, ...]]) -> None:
    """Prints a table, with rich where it is installed and as plain text where not; text left, numbers right."""
    numeric = [all(_is_number(line[column]) for line in cells) for column in range(len(headers))]
    if importlib.util.find_spec("rich") is None:
        lines = [headers, *cells]
        widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
        for line in lines:
            parts = zip(line, widths, numeric, strict=True)
            print("  ".join(f"{text:>{width}}" if right else f"{text:<{width}}" for text, width, right in parts))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for header, right in zip(headers, numeric, strict=True):
        drawn.add_column(header, justify="right" if right else "left", no_wrap=True)
    for line in cells:
        drawn.add_row(*line, style="bold green" if TITLES["ours"] in line else None)
    # A cut number is worse than a wrapped line: rich would shorten cells to fit a narrow terminal.
    Console(width=max(Console().width, 160)).print(drawn)


def _measured(rows: list[Row]) -> list[Row]:
    return [row for row in rows if "total_s" in row]


def _openclip(rows: list[Row], row: Row) -> Row | None:
    same = ("loss", "batch", "dim", "dtype", "device")
    for other in _measured(rows):
        if other["implementation"] == "openclip" and all(other[key] == row[key] for key in same):
            return other
    return None


def _markdown_cell(row: Row) -> str:
    if "needed_bytes" in row:
        return f"needs {row['needed_bytes'] / 2**30:,.0f} GiB"
    if "total_s" not in row:
        return "refused: wrong result" if row.get("right") is False else "failed"
    text = f"{three_digits(row['total_s'])} s, {three_digits(row['extra_bytes'] / 2**20)} MiB"
    return f"**{text}**" if row["implementation"] == "ours" else text


def _is_number(text: str) -> bool:
    return text == "" or text[0].isdigit()
