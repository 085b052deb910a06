"""Pairs as a Hugging Face dataset saved to disk: Arrow files, mapped into memory. Reading them does not take that library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import ipc

from megabatch.config import Data

from .arrow import ArrowFile
from .paths import inside, shown
from .rows import Rows, columns_of
from .source import BadSample, Damage, Sample, Sides

# What `save_to_disk` leaves in a folder: of one split, its files and its features; of several, this and a folder for each.
STATE, FEATURES, SEVERAL = "state.json", "dataset_info.json", "dataset_dict.json"
SPLIT = "train"


class SavedDataset:
    """Every row is a sample, every Arrow file a shard; of several splits, "train". Paths of images start at the folder."""

    def __init__(self, data: Data, folder: Path, sides: Sides) -> None:
        folder = _split_of(folder)
        self._files = _files(folder)
        columns = columns_of(data, sides, _column_names(self._files[0]), str(folder))
        self._rows = Rows(columns, sides, folder.resolve(), data.max_pixels)
        self._tables: dict[int, ArrowFile] = {}
        self._lengths = [len(self._table(shard)) for shard in range(len(self._files))]
        self.damage = [damage for shard in range(len(self._files)) for damage in self._damage(shard)]
        self._names = _class_names(folder, columns.label)

    def __getstate__(self) -> dict[str, Any]:
        # Other processes map the files themselves.
        return self.__dict__ | {"_tables": {}}

    @property
    def lengths(self) -> Sequence[int]:
        return self._lengths

    def read(self, shard: int, index: int) -> Sample:
        key = self._key(shard, index)
        return self._rows.sample(key, {name: self._value(name, shard, index) for name in self._rows.columns.used()})

    def group(self, shard: int, index: int) -> str:
        key = self._key(shard, index)
        # An image would have to be read to tell whether it is another row's as well.
        if self._rows.sides.x == "image":
            return key
        try:
            return self._rows.group(key, self._value(self._rows.columns.x, shard, index))
        except BadSample:
            return key

    def label(self, shard: int, index: int) -> str | None:
        column = self._rows.columns.label
        try:
            return None if column is None else self._rows.label({column: self._value(column, shard, index)})
        except BadSample:
            return None

    def _key(self, shard: int, index: int) -> str:
        return f"{shown(self._files[shard].name)}:{index + 1}"

    def _table(self, shard: int) -> ArrowFile:
        if shard not in self._tables:
            with _readable(self._files[shard]):
                self._tables[shard] = ArrowFile(self._files[shard], self._rows.columns.used())
        return self._tables[shard]

    def _damage(self, shard: int) -> Iterator[Damage]:
        problems = self._table(shard).problems
        if problems:
            more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
            yield Damage(shown(self._files[shard].name), problems[0] + more, read=self._lengths[shard])

    def _value(self, column: str, shard: int, index: int) -> Any:
        try:
            value = self._table(shard).value(column, index)
        except UnicodeDecodeError:
            raise BadSample(self._key(shard, index), f"{column} is not valid UTF-8") from None
        except pyarrow.ArrowException as error:
            raise BadSample(self._key(shard, index), f"{column} is damaged ({error})") from None
        if column == self._rows.columns.label and self._names and isinstance(value, int):
            return self._names[value] if 0 <= value < len(self._names) else None
        return value


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: cannot be read as an Arrow file ({error}); save the dataset again") from None


def _column_names(path: Path) -> list[str]:
    with _readable(path), pyarrow.memory_map(str(path)) as file:
        return list(ipc.read_schema(file).names)


def _split_of(folder: Path) -> Path:
    if not (folder / SEVERAL).is_file():
        return folder
    splits = sorted(path.parent.name for path in folder.glob(f"*/{STATE}"))
    if SPLIT not in splits:
        raise ValueError(
            f"data.source is {str(folder)!r}: it has no split {SPLIT!r}, but {', '.join(splits) or 'none at all'};"
            f" name the folder of one, as in {str(folder / (splits or ['test'])[0])!r}"
        )
    return folder / SPLIT


def _files(folder: Path) -> list[Path]:
    state = _json(folder / STATE)
    entries = state.get("_data_files")
    names = [entry.get("filename") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    if not names:
        raise ValueError(f"{folder / STATE}: names no file of data; save the dataset again")
    try:
        return [inside(folder.resolve(), str(name), str(folder / STATE)) for name in names]
    except BadSample as error:
        # A file of data that lies elsewhere is not one sample's mistake.
        raise ValueError(str(error)) from None


def _class_names(folder: Path, label: str | None) -> list[str]:
    """The names that the numbers of a ClassLabel stand for."""
    features = _json(folder / FEATURES).get("features") if label is not None else None
    feature = features.get(label) if isinstance(features, dict) else None
    names = feature.get("names") if isinstance(feature, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); name a folder written by Dataset.save_to_disk") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds no JSON object; name a folder written by Dataset.save_to_disk")
    return found
