"""What a verb reports, independent of the medium: headline, key numbers, tables, figures and notes.

Every verb fills one `Report`; terminal.py, html.py and markdown.py render it. Values stay numbers until a renderer formats them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from .figures import Figure
from .format import Format, whole

if TYPE_CHECKING:
    from PIL.Image import Image

Row = Mapping[str, Any]
MISSING = "–"


@dataclass(frozen=True)
class Column:
    """A column of a table. key: of the rows' values, and in JSON. name: the heading.

    kind: "number" is right-aligned, "word" left-aligned, and neither is ever broken over lines; "text" may be.
    detail: not shown on a terminal, which is narrow. bar: draw the value, a share in [0, 1], as a bar too where that is possible.
    """

    key: str
    name: str
    format: Format = str
    kind: Literal["number", "word", "text"] = "number"
    detail: bool = False
    bar: bool = False

    def text(self, row: Row) -> str:
        """Return the text of this column's cell. Strings are not formatted; a missing number is a dash."""
        value = row.get(self.key)
        if value is None:
            return MISSING if self.kind == "number" else ""
        return value if isinstance(value, str) else self.format(value)

    def share(self, row: Row) -> float | None:
        """Return the length of the cell's bar, in [0, 1]; None where it has none."""
        value = row.get(self.key)
        return min(max(float(value), 0.0), 1.0) if self.bar and isinstance(value, (int, float)) else None


@dataclass(frozen=True)
class Table:
    """Rows by the keys of the columns. note: printed below. detail: not shown on a terminal."""

    kind: ClassVar[str] = "table"
    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""
    note: str = ""
    detail: bool = False

    def visible_columns(self, *, brief: bool = False) -> list[Column]:
        """Return the columns that have a value in any row. brief: without those that are a detail."""
        filled = [column for column in self.columns if not self.rows or any(row.get(column.key) is not None for row in self.rows)]
        return [column for column in filled if not (brief and column.detail)]


@dataclass(frozen=True)
class Notes:
    """Sentences as a list."""

    kind: ClassVar[str] = "notes"
    items: Sequence[str]
    detail: bool = False


@dataclass(frozen=True)
class Paragraph:
    """One paragraph. warning: the reader should not miss it."""

    kind: ClassVar[str] = "paragraph"
    text: str
    warning: bool = False
    detail: bool = False


@dataclass(frozen=True)
class Code:
    """Text shown line by line, such as a configuration file or a diff. summary: fold it under this line where that is possible."""

    kind: ClassVar[str] = "code"
    text: str
    summary: str = ""
    detail: bool = False


class Exhibit(NamedTuple):
    """A question or an answer: a text, or an image and the text that belongs to it.

    right: whether it is a correct answer; None where that is unknown.
    """

    text: str
    image: Image | None = None
    right: bool | None = None
    score: float | None = None


class Question(NamedTuple):
    """A query and its answers, best first."""

    asked: Exhibit
    answers: list[Exhibit]


@dataclass(frozen=True)
class Gallery:
    """Queries with their answers, marked as right or wrong."""

    kind: ClassVar[str] = "gallery"
    questions: Sequence[Question]
    title: str = ""
    detail: ClassVar[bool] = True


Block = Table | Figure | Notes | Paragraph | Code | Gallery


@dataclass(frozen=True)
class Section:
    """Blocks under a heading; a section without a title continues the one before."""

    title: str
    blocks: Sequence[Block]


class KeyNumber(NamedTuple):
    """One of the few numbers that a reader looks for first."""

    name: str
    value: float
    format: Format = whole

    @property
    def text(self) -> str:
        return self.format(self.value)


@dataclass(frozen=True)
class Report:
    """What a verb found. title: of the page and its window. subject: machine and date, or the name of a run.

    warning: what makes the whole report preliminary. footer: the version that wrote it.
    """

    title: str
    subject: str
    headline: str
    numbers: Sequence[KeyNumber] = ()
    sections: Sequence[Section] = ()
    warning: str = ""
    footer: str = ""

    def blocks(self) -> Iterator[Block]:
        for section in self.sections:
            yield from section.blocks

    def figures(self) -> Iterator[Figure]:
        return (block for block in self.blocks() if isinstance(block, Figure))

    def tables(self) -> Iterator[Table]:
        return (block for block in self.blocks() if isinstance(block, Table))

    def notes(self) -> list[str]:
        """Return the sentences of all lists."""
        return [item for block in self.blocks() if isinstance(block, Notes) for item in block.items]


def pairs_table(pairs: Iterable[tuple[Any, Any]], names: tuple[str, str] = ("", ""), **options: Any) -> Table:
    """Return a table of names and values that come from outside."""
    rows = [{"name": str(name), "value": str(value)} for name, value in pairs]
    return Table((Column("name", names[0], kind="text"), Column("value", names[1], kind="text")), rows, **options)


def text_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of texts."""
    return Table([Column(name, name, kind="text") for name in names], [dict(zip(names, row, strict=True)) for row in rows])
