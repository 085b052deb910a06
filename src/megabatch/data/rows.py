"""Rows of a table, of JSON lines or of a saved dataset: which column is which side of a pair, and how a row becomes a sample."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megabatch.config import Data

from .decoding import as_label, as_text, as_texts, read_image
from .paths import path_inside, printable
from .source import BadSample, ImageRequest, ImageRequests, Kind, LoadedImage, Sample, Sides

# The usual names of columns, the likeliest first; case is ignored.
IMAGES = ("image", "picture", "jpg", "filepath", "file_path", "image_path", "path", "filename", "file_name", "file")
CAPTIONS = ("caption", "text", "title", "description", "alt_text")
QUERIES = ("query", "anchor", "question", "sentence1", "text1", "premise")
DOCUMENTS = ("positive", "document", "answer", "passage", "sentence2", "text2", "hypothesis")
# Hard negatives, in one column or in several (negative_1, negative_2, …).
NEGATIVES = re.compile(r"(hard_?)?neg(s|atives?)?(_passages?|_docs?|_documents?)?(_?\d+)?", re.IGNORECASE)


class Columns(NamedTuple):
    """The column of each side, the columns of the hard negatives and the column of the class."""

    x: str
    y: str
    negatives: tuple[str, ...]
    label: str | None

    def names(self) -> list[str]:
        """Return the name of every column in use, once."""
        return list(dict.fromkeys(name for name in (self.x, self.y, *self.negatives, self.label) if name is not None))


def choose_columns(data: Data, sides: Sides, existing: Sequence[str], where: str) -> Columns:
    """Return the columns to read: those that `data` names, otherwise those with usual names. ValueError if one does not exist.

    where: names the file in messages.
    """
    both_texts, listed = sides.x == sides.y == "text", _listed(existing)
    x = _choose("x", data.x, _usual_names(sides.x, QUERIES if both_texts else CAPTIONS), existing, where)
    y = _choose("y", data.y, _usual_names(sides.y, DOCUMENTS if both_texts else CAPTIONS), existing, where)
    if x == y:
        raise ValueError(f"{where}: data.x and data.y are both {x!r}; name two columns of {listed}")
    if data.label is not None and data.label not in existing:
        raise ValueError(f"{where}: data.label is {data.label!r}, but the columns are {listed}")
    return Columns(x, y, _choose_negatives(data, sides, existing, {x, y, data.label}, where), data.label)


def _choose_negatives(data: Data, sides: Sides, existing: Sequence[str], used: set[str | None], where: str) -> tuple[str, ...]:
    """Return the columns of hard negatives that `data` names. ValueError if there seem to be some and `data` does not decide."""
    if data.negatives is None and sides.y == "text":
        likely = [name for name in existing if NEGATIVES.fullmatch(name) and name not in used]
        if likely:
            columns = "a column" if len(likely) == 1 else "columns"
            raise ValueError(
                f"{where}: there is {columns} {_listed(likely)}, and data.negatives is not set: set"
                f' data.negatives="{printable(";".join(likely))[:500]}" to train with these hard negatives, or data.negatives=false'
                " to leave them out"
            )
    if not data.negatives:
        return ()
    if sides.y != "text":
        raise ValueError(f"{where}: data.negatives is {data.negatives!r}: negatives are texts, but y is an image; leave it out")
    # A column whose own name holds a semicolon takes precedence.
    names = [data.negatives] if data.negatives in existing else [name.strip() for name in data.negatives.split(";")]
    if any(name not in existing for name in names):
        raise ValueError(f"{where}: data.negatives is {data.negatives!r}, but the columns are {_listed(existing)}")
    return tuple(dict.fromkeys(names))


def _usual_names(kind: Kind, text_names: tuple[str, ...]) -> tuple[str, ...]:
    return IMAGES if kind == "image" else text_names


def _choose(side: str, given: str | None, usual: tuple[str, ...], existing: Sequence[str], where: str) -> str:
    column = _first_existing(usual, existing) if given is None else given
    if column is None:
        raise ValueError(
            f"{where}: data.{side} is not given, and none of the columns {_listed(existing)} has a usual name"
            f" ({', '.join(usual)}); name one"
        )
    if column not in existing:
        raise ValueError(f"{where}: data.{side} is {column!r}, but the columns are {_listed(existing)}; name one of them")
    return column


def _first_existing(usual: tuple[str, ...], existing: Sequence[str]) -> str | None:
    by_name = {name.lower(): name for name in reversed(existing)}
    return next((by_name[name] for name in usual if name in by_name), None)


def _listed(names: Sequence[str]) -> str:
    return printable(", ".join(names))[:500]


@dataclass(frozen=True)
class RowDecoder:
    """Converts a row to a sample.

    folder: the resolved folder that paths of images are relative to and must stay inside.
    """

    columns: Columns
    sides: Sides
    folder: Path
    max_pixels: int

    def sample(self, key: str, row: Mapping[str, Any], requests: ImageRequests) -> Sample:
        """Return the sample of a row's values; a missing column is None. BadSample if a value cannot be used."""
        columns = self.columns
        # Texts first: they are cheap to refuse.
        negatives = tuple(entry for name in columns.negatives for entry in as_texts(row.get(name), key, name))
        label = None if columns.label is None else as_label(row.get(columns.label), key)
        y, y_image = self._value(self.sides.y, row.get(columns.y), key, columns.y, requests.y)
        x, x_image = self._value(self.sides.x, row.get(columns.x), key, columns.x, requests.x)
        return Sample(key, x, y, negatives, label, x_image, y_image)

    def group(self, key: str, x: object) -> str:
        """Return the path or text of x, so that captions of one image, or documents of one query, are held out together."""
        return printable(x) if isinstance(x, str) else key

    def label(self, row: Mapping[str, Any]) -> str | None:
        """Return the row's class; None also if it holds no valid one, which makes the row a bad sample."""
        if self.columns.label is None:
            return None
        try:
            return as_label(row.get(self.columns.label), "")
        except BadSample:
            return None

    def _value(
        self, kind: Kind, value: Any, key: str, column: str, request: ImageRequest
    ) -> tuple[LoadedImage | str, Path | bytes | None]:
        """Return the value of a side and, of an image, its file or bytes, which other rows may have too."""
        if kind == "text":
            return as_text(value, key, column), None
        if isinstance(value, Mapping):
            # Hugging Face stores an image as the bytes of its file, or as its path.
            value = value.get("path") if value.get("bytes") is None else value["bytes"]
        data = value if isinstance(value, bytes) else path_inside(self.folder, as_text(value, key, column), key)
        return read_image(data, key, self.max_pixels, request), data
