"""Reports, tables and sentences on standard output: with boxes and colors on a terminal, as plain aligned columns elsewhere.

Everything printed is data, not markup: square brackets stay as they are, and control characters cannot move the cursor.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from .report import Code, Column, Notes, Paragraph, Report, Table

if TYPE_CHECKING:
    from rich.console import Console

# What a terminal would obey instead of showing: C0 and C1 control characters, line separators, and changes of direction.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
BETWEEN = "  "
# The fewest columns of the terminal that a long text gets.
LEAST_TEXT = 16


def visible(text: str) -> str:
    r"""Return a text in one line with its control characters as escape sequences.

    >>> print(visible("a\tb\x1b[2Jc"))
    a b\x1b[2Jc
    """
    return CONTROL.sub(lambda match: " " if match[0] in "\t\n\r" else match[0].encode("unicode_escape").decode("ascii"), text)


def print_report(report: Report, console: Console | None = None, width: int | None = None) -> None:
    """Print headline, subject, tables and notes; figures and details are for a page.

    console: by default standard output. width: columns at which sentences are wrapped; None leaves that to the terminal.
    """
    if width is not None and console is None:
        for line in _wrapped(report, width):
            print(line)
        return
    for text, bold in ((report.headline, True), (report.subject, False), (report.warning, True)):
        if text:
            print_text(text, bold=bold, console=console)
    for section in report.sections:
        blocks = [block for block in section.blocks if not block.detail]
        if blocks:
            print_text("", console=console)
        if section.title and any(isinstance(block, Notes) for block in blocks):
            print_text(section.title, bold=True, console=console)
        for block in blocks:
            if isinstance(block, Table):
                print_table(block, console)
                if block.note:
                    print_text(block.note, console=console)
            elif isinstance(block, Notes):
                for item in block.items:
                    print_text(item, item=True, console=console)
            elif isinstance(block, (Paragraph, Code)):
                for line in block.text.rstrip().split("\n"):
                    print_text(line, console=console)


def _wrapped(report: Report, width: int) -> Iterator[str]:
    """Yield the lines of a report without boxes, its sentences wrapped at so many columns."""

    def wrap(text: str, first: str = "", following: str = "") -> list[str]:
        return textwrap.wrap(visible(text), width, initial_indent=first, subsequent_indent=following, break_on_hyphens=False)

    for text in (report.warning, report.headline, report.subject):
        yield from wrap(text)
    for index, section in enumerate(report.sections):
        blocks = [block for block in section.blocks if not block.detail]
        if blocks and (index or report.headline):
            yield ""
        if blocks and section.title:
            yield section.title
        for block in blocks:
            if isinstance(block, Table):
                columns = block.visible_columns(brief=True)
                cells = [[visible(column.text(row)) for column in columns] for row in block.rows]
                yield from (f"  {line}" for line in plain_table(columns, cells, block.title).splitlines())
            elif isinstance(block, Notes):
                for item in block.items:
                    yield from wrap(item, "  ", "    ")
            elif isinstance(block, (Paragraph, Code)):
                for line in block.text.rstrip().split("\n"):
                    yield from wrap(line, "", "  ")


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table without its details. console: where to print, by default standard output."""
    columns = table.visible_columns(brief=True)
    cells = [[visible(column.text(row)) for column in columns] for row in table.rows]
    console = console or _console()
    if console is None or not console.is_terminal:
        print(plain_table(columns, cells, table.title), file=sys.stdout if console is None else console.file)
        return
    from rich.box import HEAVY_HEAD, SIMPLE_HEAD
    from rich.table import Table as Grid
    from rich.text import Text

    wraps = any(column.kind == "text" for column in columns)
    # Long texts are easier to tell apart with a line between two rows; numbers need the width instead.
    grid = Grid(title=table.title or None, box=HEAVY_HEAD if wraps else SIMPLE_HEAD, padding=(0, 1), show_lines=wraps)
    for column in columns:
        grid.add_column(Text(column.name), justify=_justify(column), no_wrap=column.kind != "text")
    for row in cells:
        grid.add_row(*(Text(cell) for cell in row))
    # rich shortens cells that do not fit, and a line that the terminal wraps is better than a number that is cut.
    widths = [max(map(_width, texts)) for texts in zip([column.name for column in columns], *cells, strict=True)]
    fixed = [min(width, LEAST_TEXT) if column.kind == "text" else width for column, width in zip(columns, widths, strict=True)]
    console.width = max(console.width, sum(fixed) + 3 * len(columns) + 1)
    console.print(grid)


def print_text(text: str, *, bold: bool = False, item: bool = False, console: Console | None = None) -> None:
    """Print one line of text. item: as one of a list."""
    text = visible(text)
    console = console or _console()
    if console is None or not console.is_terminal:
        print(f"  - {text}" if item else text, file=sys.stdout if console is None else console.file)
        return
    from rich.text import Text

    console.print(Text(f"  · {text}" if item else text, style="bold" if bold else ""))


def plain_table(columns: Sequence[Column], cells: Sequence[Sequence[str]], title: str = "") -> str:
    """Return a table as aligned columns of text, a line for each row however long it is.

    >>> print(plain_table([Column("batch", "batch"), Column("step", "step", kind="word")], [["64", "1 s"], ["1,024", "12 s"]]))
    batch  step
    -----  ----
       64  1 s
    1,024  12 s
    """
    names = [column.name for column in columns]
    widths = [max(map(_width, column)) for column in zip(names, *cells, strict=True)]
    lines = [title] if title else []
    for row in (names, ["-" * width for width in widths], *cells):
        lines.append(BETWEEN.join(map(_padded, row, widths, map(_justify, columns))).rstrip())
    return "\n".join(lines)


def _justify(column: Column) -> Literal["left", "right"]:
    return "right" if column.kind == "number" else "left"


def _console() -> Console | None:
    """Return a console for a terminal; None where standard output is none, or one that asks for plain text."""
    if sys.stdout is None or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb" or os.environ.get("NO_COLOR"):
        return None
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        # The numbers are the same without boxes.
        return None
    return Console()


def _padded(cell: str, width: int, justify: str) -> str:
    spaces = " " * (width - _width(cell))
    return cell + spaces if justify == "left" else spaces + cell


def _width(text: str) -> int:
    """Return the columns that a text takes on a terminal: East Asian characters take two, combining ones none."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.combining(letter) > 0 for letter in text)
