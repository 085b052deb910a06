"""Pairs as rows of a table: CSV, TSV and Parquet. Only the columns in use are kept in memory."""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch import packages
from megabatch.config import Data

from .arrow import check_buffers
from .paths import find_files, has_suffix, printable
from .rows import RowDecoder, choose_columns
from .source import ALL_PIXELS, BadSample, Damage, DataFormat, ImageRequests, Sample, Sides

DELIMITERS = {".csv": ",", ".tsv": "\t"}
# The default limit of the csv module (131,072 characters) is too small for some documents; this fits the C long of every platform.
LONGEST_FIELD = 2**31 - 1


@dataclass(frozen=True)
class TableFile:
    """The columns in use of one file; row i is line lines[i] of it. problems: what is wrong with a row as a whole.

    gaps: stretches of lines that belong to no row, because a quote opens or ends a field at the wrong place: their number and why.
    """

    name: str
    decoder: RowDecoder
    values: Mapping[str, Sequence[Any]]
    lines: Sequence[int]
    problems: Mapping[int, str]
    gaps: Sequence[tuple[int, str]] = ()

    def key(self, index: int) -> str:
        return f"{self.name}:{self.lines[index]}"

    def value(self, column: str, index: int) -> Any:
        try:
            value = self.values[column][index]
            # Arrow scalars are converted to Python objects only here.
            return value.as_py() if hasattr(value, "as_py") else value
        except UnicodeDecodeError:
            raise BadSample(self.key(index), f"{column} is not valid UTF-8") from None


class TableSource:
    """Every row is a sample, every file a shard; paths of images are relative to the folder of their table.

    In a CSV file, a list of hard negatives is written as JSON: ["one", "two"]; any other cell is one text.
    """

    def __init__(self, data: Data, files: Sequence[Path], sides: Sides) -> None:
        self._files = [_read_file(data, path, sides) for path in files]
        if not any(self.lengths):
            raise ValueError(f"{files[0]}: there is no row below the column names; write one row per pair")

    @property
    def lengths(self) -> Sequence[int]:
        return [len(file.lines) for file in self._files]

    @property
    def damage(self) -> Sequence[Damage]:
        return [
            Damage(file.name, reason, len(file.lines) - len(file.problems), lines)
            for file in self._files
            for lines, reason in file.gaps
        ]

    def read(self, shard: int, index: int, requests: ImageRequests = ALL_PIXELS) -> Sample:
        file = self._files[shard]
        if index in file.problems:
            raise BadSample(file.key(index), file.problems[index])
        return file.decoder.sample(file.key(index), {name: file.value(name, index) for name in file.values}, requests)

    def group(self, shard: int, index: int) -> str:
        file = self._files[shard]
        try:
            return file.decoder.group(file.key(index), file.value(file.decoder.columns.x, index))
        except BadSample:
            return file.key(index)

    def label(self, shard: int, index: int) -> str | None:
        file = self._files[shard]
        if file.decoder.columns.label is None or index in file.problems:
            return None
        try:
            return file.decoder.label({file.decoder.columns.label: file.value(file.decoder.columns.label, index)})
        except BadSample:
            return None


def _read_file(data: Data, path: Path, sides: Sides) -> TableFile:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(data, path, sides)
    if suffix in DELIMITERS:
        return _read_csv(data, path, sides, DELIMITERS[suffix])
    raise ValueError(f"{path}: is not a known table format; its name must end in {', '.join(DELIMITERS)} or .parquet")


def _read_parquet(data: Data, path: Path, sides: Sides) -> TableFile:
    packages.require(packages.ARROW)
    import pyarrow
    from pyarrow import parquet

    try:
        columns = choose_columns(data, sides, parquet.read_schema(path).names, str(path))
        table = parquet.read_table(path, columns=columns.names(), page_checksum_verification=True)
        # Offsets from a damaged file may point outside of the buffers, and would crash the process when they are followed.
        for column in table.columns:
            for chunk in column.chunks:
                check_buffers(chunk)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: cannot be read as Parquet (the name of a column is not UTF-8: {error}); write it again"
        ) from None
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as Parquet ({error}); write it again") from None
    decoder = RowDecoder(columns, sides, path.parent.resolve(), data.max_pixels)
    return TableFile(
        printable(path.name), decoder, {name: table[name] for name in table.column_names}, range(1, len(table) + 1), {}
    )


def _read_csv(data: Data, path: Path, sides: Sides, delimiter: str) -> TableFile:
    # Bytes that are not UTF-8 become surrogates: they make one sample bad, not the whole file.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file, _long_fields():
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header = _header(reader, path)
        columns = choose_columns(data, sides, header, str(path))
        positions = {name: header.index(name) for name in columns.names()}
        values: dict[str, list[Any]] = {name: [] for name in positions}
        lines, problems, gaps = array("q"), {}, []
        for line, row, problem in _rows(reader, len(header)):
            if problem is not None and reader.line_num > line and not row:
                gaps.append((reader.line_num - line + 1, problem))
                continue
            if problem is not None:
                problems[len(lines)] = problem
            lines.append(line)
            for name, position in positions.items():
                values[name].append(row[position] if position < len(row) else None)
    for name in columns.negatives:
        values[name] = [_parse_list(cell) for cell in values[name]]
    decoder = RowDecoder(columns, sides, path.parent.resolve(), data.max_pixels)
    return TableFile(printable(path.name), decoder, values, lines, problems, gaps)


def _header(reader: Any, path: Path) -> list[str]:
    try:
        header = next(reader, None)
    except csv.Error as error:
        raise ValueError(f"{path}: the first line, which names the columns, is not valid CSV ({error})") from None
    if not header:
        raise ValueError(f"{path}: the file or its first line is empty; the first line must name the columns")
    return list(header)


def _rows(reader: Any, width: int) -> Iterator[tuple[int, list[str], str | None]]:
    """Yield the line on which each row begins, the row, and what is wrong with it."""
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # A quote that is never closed swallows everything up to the end of the file: say how much.
            yield line, [], f"lines {line} to {reader.line_num} are not valid CSV ({error}): is a quote missing?"
            continue
        if not row:
            continue
        problem = f"has {len(row)} fields, the first line {width}: quote fields that hold the delimiter"
        yield line, row, None if len(row) == width else problem


def _parse_list(cell: str | None) -> Any:
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


TABLE = DataFormat(
    form=".csv, .tsv and .parquet files",
    open=lambda data, source, sides: TableSource(data, find_files(source), sides),
    recognizes=has_suffix(*DELIMITERS, ".parquet"),
)
