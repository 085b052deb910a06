"""Rows of the loss benchmark as JSON lines, and as tables on the terminal and in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import PRODUCT_SIZE, REST_S, USEFUL_FLOP, Row, largest_error, worst
from megabatch.reporting.markdown import table_markdown
from megabatch.reporting.report import Column, Table
from megabatch.reporting.terminal import print_table

GRAPHED = "ours, graphed"
VALUE_AND_GRAD = "ours, value_and_grad"
TITLES = {
    "ours": "megabatch",
    "ours, ids": "megabatch, ids",
    "ours, label smoothing": "megabatch, label smoothing",
    "ours, diagnostics": "megabatch, diagnostics",
    "ours, int8": "megabatch, int8 with a workspace of 512 MiB",
    "ours, 512 MiB": "megabatch, workspace of 512 MiB",
    GRAPHED: "megabatch, in a CUDA graph",
    VALUE_AND_GRAD: "megabatch, in a CUDA graph, without autograd",
    "full matrix compiled": "full matrix, compiled",
    "openclip": "OpenCLIP",
    "openclip chunked": "OpenCLIP, chunked",
    "openclip compiled": "OpenCLIP, compiled",
    "sentence-transformers": "Sentence Transformers",
    "sentence-transformers cached": "Sentence Transformers, cached",
    "inf-cl": "Inf-CL",
    "liger": "Liger",
    "cut-cross-entropy": "Cut Cross-Entropy",
    "cut-cross-entropy unfiltered": "Cut Cross-Entropy, unfiltered",
}
# Names of errors in tables.
ERRORS = {"scale": "scale's gradient", "bias": "bias's gradient"}
HEADERS = (
    "loss",
    "implementation",
    "N",
    "D",
    "dtype",
    "forward s",
    "backward s",
    "total s",
    "of cuBLAS",
    "speed",
    "after a rest s",
    "of cuBLAS rested",
    "speed rested",
    "extra MiB",
    "memory",
    "gradient error",
)


def in_order(rows: list[Row]) -> list[Row]:
    """Return the rows by loss, then by batch and width, otherwise in their order."""
    losses = list(dict.fromkeys(row["loss"] for row in rows))
    return sorted(rows, key=lambda row: (losses.index(row["loss"]), row["batch"], row["dim"]))


def title(row: Row) -> str:
    """Return the name of a row's implementation in tables."""
    return TITLES.get(row["implementation"], row["implementation"])


def is_ours(row: Row) -> bool:
    """Return whether a row is of megabatch, with options or without."""
    return row["implementation"].split(",")[0] == "ours"


def is_option(row: Row) -> bool:
    """Return whether a row is of megabatch with an option; tables of implementations leave such rows out."""
    return is_ours(row) and row["implementation"] != "ours"


def is_in_graph(row: Row) -> bool:
    """Return whether a row is of a graphed loss."""
    return row["implementation"] in (GRAPHED, VALUE_AND_GRAD)


def has_share(row: Row) -> bool:
    """Return whether a row has a share of a matrix product under the same load.

    A step that takes seconds is timed once, and the products beside it run on a device that was idle: their rate is no measure.
    """
    return "share" in row and row.get("warm_up", True)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a JSON-lines file, in its order."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a file that `python -m benchmarks.loss --out FILE` wrote")
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON lines; an existing file is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def three_digits(value: float) -> str:
    """Return a number with three significant digits and no exponent.

    >>> three_digits(0.012345), three_digits(1234.5)
    ('0.0123', '1,234')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def table(rows: list[Row]) -> list[tuple[str, ...]]:
    """Return the cells under HEADERS, one tuple per measured row; speed and memory are relative to OpenCLIP in the same rows."""
    cells = []
    for row in _measured(in_order(rows)):
        peer = _openclip(rows, row)
        share = f"{row['extra_bytes'] / max(1, peer['extra_bytes']):.1%}" if peer else ""
        cells.append(
            (
                row["loss"],
                title(row),
                f"{row['batch']:,}",
                f"{row['dim']:,}",
                row["dtype"],
                *(three_digits(row[f"{part}_s"]) for part in ("forward", "backward", "total")),
                f"{row['share']:.1%}" if has_share(row) else "",
                _speed(peer, row, "total_s"),
                three_digits(row["rested_s"]) if "rested_s" in row else "",
                f"{row['rested_share']:.1%}" if "rested_share" in row else "",
                _speed(peer, row, "rested_s"),
                three_digits(row["extra_bytes"] / 2**20),
                share,
                f"{row['errors']['gradient']:.1e}" + ("" if _right(row) else " (wrong)"),
            )
        )
    return cells


def notes(rows: list[Row]) -> list[str]:
    """Return one line for each row that has no time, with the reason."""
    lines = []
    for row in rows:
        if "total_s" not in row:
            lines.append(f"{row['loss']}, {title(row)}, N = {row['batch']:,}: {reason(row)}")
    return lines


def wrong(rows: list[Row]) -> list[str]:
    """Return one line for each row that was timed although its result is wrong."""
    return [f"{row['loss']}, {title(row)}, N = {row['batch']:,}: {worst(row)}" for row in _measured(rows) if not _right(row)]


def reason(row: Row) -> str:
    """Return why a row has no time."""
    return row.get("error") or row.get("skipped") or row["unavailable"]


def markdown(rows: list[Row]) -> str:
    """Return a table with a line for each loss and batch and a column for each implementation, and its caption.

    Rows of several widths have a column for it. Rows with a share of a matrix product are shown by `shares_markdown`. Rows of
    megabatch with an option are left out: `options_markdown` shows them.
    """
    rows = in_order([row for row in rows if not is_option(row)])
    if _shared(rows):
        return shares_markdown(rows)
    names = list(dict.fromkeys(title(row) for row in rows))
    cell = {(*_place(row), title(row)): _markdown_cell(row) for row in rows}
    width = ["D"] if len({row["dim"] for row in rows}) > 1 else []
    lines = []
    for loss, batch, dim in dict.fromkeys(_place(row) for row in rows):
        size = [loss, f"{batch:,}", *([f"{dim:,}"] if width else [])]
        lines.append([*size, *(cell.get((loss, batch, dim, name), "") for name in names)])
    return f"{markdown_table(['loss', 'batch', *width, *names], lines, left=('loss',))}\n\n{caption(rows)}"


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()) -> str:
    """Return a Markdown table of texts. left: the headers of columns that are not right-aligned."""
    columns = [Column(str(place), name, kind="text" if name in left else "number") for place, name in enumerate(headers)]
    return table_markdown(Table(columns, [{str(place): cell for place, cell in enumerate(row)} for row in rows]))


SHARES_HEADERS = (
    "batch",
    "D",
    "implementation",
    "sustained",
    "of cuBLAS",
    "speed",
    "after a rest",
    "of cuBLAS",
    "speed",
    "memory",
)


def shares_markdown(rows: list[Row]) -> str:
    """Return a table with a line for each size and implementation, megabatch first: times under load and after a rest, shares of
    the rate of a matrix product under the same conditions, speeds relative to OpenCLIP, and memory."""
    # Rows that were collected from several runs come in any order.
    rows = sorted(in_order(rows), key=lambda row: (row["loss"], row["batch"], row["dim"], not is_ours(row)))
    lines = [_shares_line(row, _openclip(rows, row)) for row in rows]
    return f"{markdown_table(SHARES_HEADERS, lines, left=('implementation',))}\n\n{caption(rows)}"


def _shares_line(row: Row, peer: Row | None) -> list[str]:
    size = [f"{row['batch']:,}", f"{row['dim']:,}"]
    if "total_s" not in row:
        return [*size, title(row), _without_time(row), *[""] * (len(SHARES_HEADERS) - 4)]
    cells = [
        _milliseconds(row["total_s"]),
        _percent(row["share"]) if has_share(row) else "",
        _speed(peer, row, "total_s"),
        _milliseconds(row["rested_s"]) if "rested_s" in row else "",
        _percent(row["rested_share"]) if "rested_share" in row else "",
        _speed(peer, row, "rested_s"),
        f"{three_digits(row['extra_bytes'] / 2**20)} MiB",
    ]
    name = title(row)
    if not _right(row):
        what, error = largest_error(row)
        name += f" ({ERRORS.get(what, what)} off by {error:.0e})"
    if is_ours(row):
        name, cells[0], cells[3] = f"**{name}**", f"**{cells[0]}**", f"**{cells[3]}**" if cells[3] else ""
    return [*size, name, *cells]


def times_markdown(rows: list[Row]) -> str:
    """Return a table of the times of steps with the host, one line per loss and implementation and one column per batch.

    Of several widths it shows the one with most rows, of megabatch's options the graphed losses alone, and only batches at which
    at least two implementations were timed. The fastest of a loss and batch is bold.
    """
    widths = [row["dim"] for row in rows]
    width = max(widths, key=widths.count)
    shown = [row for row in in_order(rows) if row["dim"] == width and (not is_option(row) or is_in_graph(row))]
    timed = [row for row in shown if "wall_s" in row]
    if not timed:
        raise ValueError("no row holds a time with the host: run `python -m benchmarks.loss --device cuda --in-process`")
    timed_at = [(row["loss"], row["batch"]) for row in timed]
    sizes = sorted({size for loss, size in timed_at if timed_at.count((loss, size)) > 1})
    fastest = {(loss, size): _fastest(timed, loss, size) for loss in USEFUL_FLOP for size in sizes}
    cells = {
        (row["loss"], title(row), row["batch"]): _times_cell(row, row is fastest[row["loss"], row["batch"]])
        for row in shown
        if row["batch"] in sizes
    }
    lines = [
        [loss, name, *(cells.get((loss, name, size), "") for size in sizes)]
        for loss, name in dict.fromkeys((row["loss"], title(row)) for row in timed)
    ]
    headers = ("loss", "implementation", *(f"{size:,}" for size in sizes))
    return (
        f"{markdown_table(headers, lines, left=headers[:2])}\n\n{_start(timed)} Milliseconds of the clock by number of pairs; in "
        "parentheses those until the host has enqueued the step, and those that the step takes on the device under sustained load. "
        "Medians, implementations in turn; an asterisk marks gradients that are off."
    )


def _fastest(rows: list[Row], loss: str, size: int) -> Row | None:
    right = (row for row in rows if (row["loss"], row["batch"]) == (loss, size) and _right(row))
    return min(right, key=lambda row: row["wall_s"], default=None)


def _times_cell(row: Row, is_fastest: bool) -> str:
    if "wall_s" not in row:
        return _without_time(row)
    times = (1e3 * row[field] for field in ("wall_s", "host_s", "total_s"))
    wall, host, device = (f"{ms:.3f}" if ms < 1 else three_digits(ms) for ms in times)
    wall = f"**{wall}**" if is_fastest else wall
    return f"{wall}{'' if _right(row) else '*'} ({host}, {device})"


def options_markdown(rows: list[Row]) -> str:
    """Return the table of megabatch's options: the time of each, and relative to the same loss without it."""
    plain = {_place(row): row for row in _measured(rows) if row["implementation"] == "ours"}
    with_option = [row for row in in_order(rows) if is_option(row) and not is_in_graph(row)]
    if not with_option:
        raise ValueError("no row holds an option: run `python -m benchmarks.loss --only` with names such as 'ours, ids'")
    lines = []
    for row in with_option:
        other = plain.get(_place(row))
        relative = f"{row['total_s'] / other['total_s']:.2f}×" if other and "total_s" in row else ""
        option = title(row).partition(", ")[2]
        time = _milliseconds(row["total_s"]) if "total_s" in row else _without_time(row)
        lines.append([row["loss"], f"{row['batch']:,}", f"{row['dim']:,}", option, time, relative])
    headers = ("loss", "batch", "D", "option", "time", "relative")
    table = markdown_table(headers, lines, left=("loss", "option"))
    return f"{table}\n\n{_start(with_option)} Times are relative to the same loss without options."


def caption(rows: list[Row]) -> str:
    """Return what was run where and when, and what the numbers count."""
    start = f"{_start(rows)}{_shares(rows)} Memory is the peak above the inputs, gradients of both included."
    worst_of: dict[str, float] = {}
    for row in _measured(rows):
        if _right(row):
            worst_of[title(row)] = max(worst_of.get(title(row), 0.0), row["errors"]["gradient"])
    off = ", ".join(f"{error:.0e} ({name})" for name, error in worst_of.items())
    which = "Every result"
    if not all(_right(row) for row in _measured(rows)):
        start += " Results marked as off disagree with the formula and are shown only for their time."
        which = "Every other result"
    return (
        f"{start} {which} agreed with the formula in float64 before it was timed; gradients are off by at most {off} of their "
        f"largest entry."
    )


def _start(rows: list[Row]) -> str:
    """Return one sentence with precision, width, machine, versions and date."""
    row = next(iter(_measured(rows)), None)
    if row is None:
        raise ValueError("no row holds a measurement: run `python -m benchmarks.loss` first")
    machine = row["machine"]
    width = f", D = {row['dim']}" if len({each["dim"] for each in rows}) == 1 else ""
    # Entries of one package share its title up to the comma.
    versions = {title(each).split(",")[0]: each["version"] for each in rows if each.get("version")}
    others = "".join(f", {name} {version}" for name, version in versions.items()) if _shared(rows) else ""
    return (
        f"Forward and backward, {row['dtype']}{width}, on {device_name(machine)} with torch {machine['torch']}{others}, "
        f"{machine['date'][:10]}."
    )


def _shares(rows: list[Row]) -> str:
    """Return what the shares are relative to, where rows have them."""
    if not _shared(rows):
        return ""
    counted = " and ".join(
        f"{flop}·N²·D ({loss})" for loss, flop in USEFUL_FLOP.items() if any(row["loss"] == loss for row in rows)
    )
    size = f"{PRODUCT_SIZE:,} × {PRODUCT_SIZE:,}"
    text = (
        f" Sustained: after half a second of the same work, with two bfloat16 products of {size} matrices by cuBLAS before each "
        f"step, which ran at {_span(rows, 'matrix_product_tflops')} TFLOP/s; percentages are shares of their rate, counting "
        f"{counted} operations."
    )
    if any("rested_s" in row for row in _measured(rows)):
        text += (
            f" After a rest: one step, enqueued before it starts, on a device that was idle for {REST_S:g} s, beside such products "
            f"of as many operations after the same rest, which ran at {_span(rows, 'rested_product_tflops')} TFLOP/s."
        )
    return f"{text} Speeds are relative to OpenCLIP."


def _span(rows: list[Row], field: str) -> str:
    values = [row[field] for row in _measured(rows) if field in row]
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return low if low == high else f"{low} to {high}"


def device_name(machine: dict[str, Any]) -> str:
    """Return the GPU, or the processor with the number of threads that torch used."""
    return machine.get("gpu") or f"{machine['cpu']} ({machine['threads']} threads)"


def show(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print a table. Columns of numbers are right-aligned; empty columns are left out."""
    filled = [place for place in range(len(headers)) if any(line[place] for line in cells)]
    columns = [
        Column(str(place), headers[place], kind="number" if all(_is_number(line[place]) for line in cells) else "word")
        for place in filled
    ]
    print_table(Table(columns, [{str(place): line[place] for place in filled} for line in cells]))


def _measured(rows: list[Row]) -> list[Row]:
    return [row for row in rows if "total_s" in row]


def _right(row: Row) -> bool:
    return row.get("right", True)


def _shared(rows: list[Row]) -> bool:
    return any("share" in row for row in rows)


def _place(row: Row) -> tuple[str, int, int]:
    return row["loss"], row["batch"], row["dim"]


def _openclip(rows: list[Row], row: Row) -> Row | None:
    same = ("loss", "batch", "dim", "dtype", "device")
    for other in _measured(rows):
        if other["implementation"] == "openclip" and all(other[key] == row[key] for key in same):
            return other
    return None


def _markdown_cell(row: Row) -> str:
    if "total_s" not in row:
        return _without_time(row)
    text = f"{three_digits(row['total_s'])} s, {three_digits(row['extra_bytes'] / 2**20)} MiB"
    if not _right(row):
        name, error = largest_error(row)
        text += f", {ERRORS.get(name, name)} off by {error:.0e}"
    return f"**{text}**" if row["implementation"] == "ours" else text


def _without_time(row: Row) -> str:
    if "needed_bytes" in row:
        return f"needs {row['needed_bytes'] / 2**30:,.0f} GiB"
    return "refused: wrong result" if row.get("right") is False else "failed"


def _milliseconds(seconds: float) -> str:
    return f"{three_digits(seconds * 1000)} ms" if seconds < 1 else f"{three_digits(seconds)} s"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _speed(peer: Row | None, row: Row, field: str) -> str:
    """Return the speed relative to a peer."""
    return f"{peer[field] / row[field]:.2f}×" if peer and field in peer and field in row else ""


def _is_number(text: str) -> bool:
    return text == "" or text[0].isdigit()
