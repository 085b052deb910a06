"""Pairs as rows of a table: CSV and TSV by Python's own reader, Parquet by pyarrow. Only the columns in use are kept in memory."""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.config import Data

from .paths import shown
from .rows import Rows, columns_of
from .source import BadSample, Damage, Sample, Sides

DELIMITERS = {".csv": ",", ".tsv": "\t"}
# csv's own limit (131,072 characters) is below some documents; this is what every platform's C long holds.
LONGEST_FIELD = 2**31 - 1


@dataclass(frozen=True)
class Stored:
    """The columns in use of one file; row i is line lines[i] of it. problems: what is wrong with a row as a whole.

    gaps: lines that belong to no row, because a quote among them opens or ends a field at the wrong place: their number and why.
    """

    name: str
    rows: Rows
    values: Mapping[str, Sequence[Any]]
    lines: Sequence[int]
    problems: Mapping[int, str]
    gaps: Sequence[tuple[int, str]] = ()

    def key(self, index: int) -> str:
        return f"{self.name}:{self.lines[index]}"

    def value(self, column: str, index: int) -> Any:
        try:
            value = self.values[column][index]
            # Arrow's cells are texts, lists, bytes only once they are asked.
            return value.as_py() if hasattr(value, "as_py") else value
        except UnicodeDecodeError:
            raise BadSample(self.key(index), f"{column} is not valid UTF-8") from None


class Table:
    """Every row is a sample, every file a shard; relative paths of images start at their table's folder.

    In a CSV file, a list of hard negatives is written as JSON: ["one", "two"]; any other cell is one text.
    """

    def __init__(self, data: Data, files: Sequence[Path], sides: Sides) -> None:
        self._stored = [_stored(data, path, sides) for path in files]
        if not any(self.lengths):
            raise ValueError(f"{files[0]}: there is no row below the names of the columns; a row for each pair is wanted")

    @property
    def lengths(self) -> Sequence[int]:
        return [len(stored.lines) for stored in self._stored]

    @property
    def damage(self) -> Sequence[Damage]:
        return [
            Damage(stored.name, reason, len(stored.lines) - len(stored.problems), lines)
            for stored in self._stored
            for lines, reason in stored.gaps
        ]

    def read(self, shard: int, index: int) -> Sample:
        stored = self._stored[shard]
        if index in stored.problems:
            raise BadSample(stored.key(index), stored.problems[index])
        return stored.rows.sample(stored.key(index), {name: stored.value(name, index) for name in stored.values})

    def group(self, shard: int, index: int) -> str:
        stored = self._stored[shard]
        try:
            return stored.rows.group(stored.key(index), stored.value(stored.rows.columns.x, index))
        except BadSample:
            return stored.key(index)

    def label(self, shard: int, index: int) -> str | None:
        stored = self._stored[shard]
        if stored.rows.columns.label is None or index in stored.problems:
            return None
        try:
            return stored.rows.label({stored.rows.columns.label: stored.value(stored.rows.columns.label, index)})
        except BadSample:
            return None


def _stored(data: Data, path: Path, sides: Sides) -> Stored:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(data, path, sides)
    if suffix in DELIMITERS:
        return _read_csv(data, path, sides, DELIMITERS[suffix])
    raise ValueError(f"{path}: is not known as a table; its name must end in {', '.join(DELIMITERS)} or .parquet")


def _read_parquet(data: Data, path: Path, sides: Sides) -> Stored:
    import pyarrow
    from pyarrow import parquet

    from .arrow import check

    try:
        columns = columns_of(data, sides, parquet.read_schema(path).names, str(path))
        table = parquet.read_table(path, columns=columns.used(), page_checksum_verification=True)
        # What a damaged file decodes to may point outside of its buffers, and would end the process when it is read.
        for column in table.columns:
            for chunk in column.chunks:
                check(chunk)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: cannot be read as Parquet (the name of a column is no UTF-8: {error}); write it again") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as Parquet ({error}); write it again") from None
    rows = Rows(columns, sides, path.parent.resolve(), data.max_pixels)
    return Stored(shown(path.name), rows, {name: table[name] for name in table.column_names}, range(1, len(table) + 1), {})


def _read_csv(data: Data, path: Path, sides: Sides, delimiter: str) -> Stored:
    # What is not UTF-8 is kept apart, and makes one sample bad, not the file.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file, _long_fields():
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header = _header(reader, path)
        columns = columns_of(data, sides, header, str(path))
        places = {name: header.index(name) for name in columns.used()}
        values: dict[str, list[Any]] = {name: [] for name in places}
        lines, problems, gaps = array("q"), {}, []
        for line, row, problem in _rows(reader, len(header)):
            if problem is not None and reader.line_num > line and not row:
                gaps.append((reader.line_num - line + 1, problem))
                continue
            if problem is not None:
                problems[len(lines)] = problem
            lines.append(line)
            for name, place in places.items():
                values[name].append(row[place] if place < len(row) else None)
    for name in columns.negatives:
        values[name] = [_listed(cell) for cell in values[name]]
    return Stored(shown(path.name), Rows(columns, sides, path.parent.resolve(), data.max_pixels), values, lines, problems, gaps)


def _header(reader: Any, path: Path) -> list[str]:
    try:
        header = next(reader, None)
    except csv.Error as error:
        raise ValueError(f"{path}: the first line, which names the columns, is not valid CSV ({error})") from None
    if not header:
        raise ValueError(f"{path}: the file is empty, or its first line is; it names the columns")
    return list(header)


def _rows(reader: Any, width: int) -> Iterator[tuple[int, list[str], str | None]]:
    """Each row with the line it begins on, and what is wrong with it."""
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # A quote that is never closed takes everything up to the end of the file: say how much.
            yield line, [], f"lines {line} to {reader.line_num} are not valid CSV ({error}): is a quote missing?"
            continue
        if not row:
            continue
        counts = f"has {len(row)} fields, the first line {width}: quote fields that hold the delimiter"
        yield line, row, None if len(row) == width else counts


def _listed(cell: str | None) -> Any:
    if cell is None or not cell.lstrip().startswith("["):
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        return cell


@contextmanager
def _long_fields() -> Iterator[None]:
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)
