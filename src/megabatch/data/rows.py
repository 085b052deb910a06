"""Rows from outside, of a table or of JSON lines: which column is which side of a pair, and what its values become."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megabatch.config import Data

from .images import decode
from .paths import inside, shown
from .source import BadSample, Kind, Sample, Sides
from .texts import label, text, texts

if TYPE_CHECKING:
    from PIL.Image import Image

# The usual names of columns, the likeliest first; upper and lower case are the same.
IMAGES = ("image", "picture", "jpg", "filepath", "file_path", "image_path", "path", "filename", "file_name", "file")
CAPTIONS = ("caption", "text", "title", "description", "alt_text")
QUERIES = ("query", "anchor", "question", "sentence1", "text1", "premise")
DOCUMENTS = ("positive", "document", "answer", "passage", "sentence2", "text2", "hypothesis")
# Hard negatives, in one column or in several (negative_1, negative_2, …).
NEGATIVES = re.compile(r"(hard_?)?neg(s|atives?)?(_passages?|_docs?|_documents?)?(_?\d+)?", re.IGNORECASE)


class Columns(NamedTuple):
    """The column of each side, the columns of the hard negatives and that of the class."""

    x: str
    y: str
    negatives: tuple[str, ...]
    label: str | None

    def used(self) -> list[str]:
        return list(dict.fromkeys(name for name in (self.x, self.y, *self.negatives, self.label) if name is not None))


def columns_of(data: Data, sides: Sides, known: Sequence[str], where: str) -> Columns:
    """The columns to read: those that `data` names, otherwise those with usual names. ValueError where one is not `known`."""
    pair, there = sides.x == sides.y == "text", shown(", ".join(known))[:500]
    x = _column("x", data.x, _usual(sides.x, QUERIES if pair else CAPTIONS), known, where)
    y = _column("y", data.y, _usual(sides.y, DOCUMENTS if pair else CAPTIONS), known, where)
    if x == y:
        raise ValueError(f"{where}: data.x and data.y are both {x!r}; name two columns of {there}")
    if data.label is not None and data.label not in known:
        raise ValueError(f"{where}: data.label is {data.label!r}, but the columns are {there}")
    return Columns(x, y, _negatives(data, sides, known, {x, y, data.label}, where), data.label)


def _negatives(data: Data, sides: Sides, known: Sequence[str], used: set[str | None], where: str) -> tuple[str, ...]:
    """The columns of hard negatives that `data` names. ValueError where there seem to be some and it does not say what to do."""
    if data.negatives is None and sides.y == "text":
        usual = [name for name in known if NEGATIVES.fullmatch(name) and name not in used]
        if usual:
            columns = "a column" if len(usual) == 1 else "columns"
            raise ValueError(
                f"{where}: there is {columns} {shown(', '.join(usual))[:500]}, and data.negatives is not set: set"
                f' data.negatives="{shown(";".join(usual))[:500]}" to train with these hard negatives, or data.negatives=false to'
                " leave them out"
            )
    if not data.negatives:
        return ()
    if sides.y != "text":
        raise ValueError(f"{where}: data.negatives is {data.negatives!r}: they are texts, but y is an image; leave it out")
    # A column whose own name holds a semicolon is meant first.
    names = [data.negatives] if data.negatives in known else [name.strip() for name in data.negatives.split(";")]
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(f"{where}: data.negatives is {data.negatives!r}, but the columns are {shown(', '.join(known))[:500]}")
    return tuple(dict.fromkeys(names))


def _usual(kind: Kind, names: tuple[str, ...]) -> tuple[str, ...]:
    return IMAGES if kind == "image" else names


def _column(side: str, given: str | None, usual: tuple[str, ...], known: Sequence[str], where: str) -> str:
    column, there = _first(usual, known) if given is None else given, shown(", ".join(known))[:500]
    if column is None:
        raise ValueError(
            f"{where}: data.{side} is not given, and none of the columns {there} has a usual name ({', '.join(usual)}); name one"
        )
    if column not in known:
        raise ValueError(f"{where}: data.{side} is {column!r}, but the columns are {there}; name one of them")
    return column


def _first(usual: tuple[str, ...], known: Sequence[str]) -> str | None:
    by_name = {name.lower(): name for name in reversed(known)}
    return next((by_name[name] for name in usual if name in by_name), None)


@dataclass(frozen=True)
class Rows:
    """How a row becomes a sample.

    folder: where paths of images start and must end, resolved.
    """

    columns: Columns
    sides: Sides
    folder: Path
    max_pixels: int

    def sample(self, key: str, row: Mapping[str, Any]) -> Sample:
        """The sample of a row's values; a column that is missing is None. BadSample where a value does not serve."""
        columns = self.columns
        # Texts first: they are cheap to refuse.
        negatives = tuple(entry for name in columns.negatives for entry in texts(row.get(name), key, name))
        named = None if columns.label is None else label(row.get(columns.label), key)
        y = self._value(self.sides.y, row.get(columns.y), key, columns.y)
        x = self._value(self.sides.x, row.get(columns.x), key, columns.x)
        return Sample(key, x, y, negatives, named)

    def group(self, key: str, x: object) -> str:
        """Captions of one image, or documents of one query, are held out together: its path or its text says so."""
        return shown(x) if isinstance(x, str) else key

    def label(self, row: Mapping[str, Any]) -> str | None:
        """The row's class; None also where it holds none that serves, which makes it a bad sample."""
        if self.columns.label is None:
            return None
        try:
            return label(row.get(self.columns.label), "")
        except BadSample:
            return None

    def _value(self, kind: Kind, value: Any, key: str, column: str) -> Image | str:
        if kind == "text":
            return text(value, key, column)
        if isinstance(value, Mapping):
            # As Hugging Face stores images: the file itself, or where it lies.
            value = value.get("path") if value.get("bytes") is None else value["bytes"]
        if isinstance(value, bytes):
            return decode(value, key, self.max_pixels)
        return decode(inside(self.folder, text(value, key, column), key), key, self.max_pixels)
