"""Tables and sentences on standard output: with boxes and colours on a terminal, as plain aligned columns everywhere else.

Whatever is printed is data, not markup: square brackets stay as they are, and control characters cannot move the cursor.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console

# What a terminal would obey instead of showing: C0 and C1 control characters, separators of lines, and changes of direction.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
BETWEEN = "  "


def visible(text: str) -> str:
    r"""Return a text in one line with its control characters as escape sequences.

    >>> print(visible("a\tb\x1b[2Jc"))
    a b\x1b[2Jc
    """
    return CONTROL.sub(lambda found: " " if found[0] in "\t\n\r" else found[0].encode("unicode_escape").decode("ascii"), text)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    justify: Literal["left", "right"] = "left",
    compact: bool = False,
    wrap: bool = True,
    lines: bool = False,
    console: Console | None = None,
) -> None:
    """Print a table.

    justify: of all columns. On a terminal, `compact` draws no box, `lines` draws a line between two rows, and `wrap` lets long
    cells take several lines. console: where to print, by default standard output.
    """
    cells = [[visible(cell) for cell in row] for row in rows]
    console = console or _console()
    if console is None or not console.is_terminal:
        print(plain_table(columns, cells, title, justify), file=sys.stdout if console is None else console.file)
        return
    from rich.box import HEAVY_HEAD, SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=SIMPLE if compact else HEAVY_HEAD, padding=0 if compact else (0, 1), show_lines=lines)
    for name in columns:
        table.add_column(name, justify=justify, no_wrap=not wrap)
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def print_text(text: str, *, bold: bool = False, item: bool = False, console: Console | None = None) -> None:
    """Print one line of text. item: as one of a list."""
    text = visible(text)
    console = console or _console()
    if console is None or not console.is_terminal:
        print(f"  - {text}" if item else text, file=sys.stdout if console is None else console.file)
        return
    from rich.text import Text

    console.print(Text(f"  · {text}" if item else text, style="bold" if bold else ""))


def plain_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None, justify: Literal["left", "right"] = "left"
) -> str:
    """Return a table as aligned columns of text, a line for each row however long it is.

    >>> print(plain_table(["batch", "a step"], [["64", "1 s"], ["1,024", "12 s"]]))
    batch  a step
    -----  ------
    64     1 s
    1,024  12 s
    """
    widths = [max(map(_width, column)) for column in zip(columns, *rows, strict=True)]
    head = [] if title is None else [title]
    for row in (columns, ["-" * width for width in widths], *rows):
        head.append(BETWEEN.join(map(_padded, row, widths, [justify] * len(widths))).rstrip())
    return "\n".join(head)


def _console() -> Console | None:
    """Return what draws on a terminal; None where standard output is none, or one that asks for plain text."""
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
