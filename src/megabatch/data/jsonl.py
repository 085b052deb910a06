"""Pairs as JSON lines: one object per line, found by its byte offset and read on demand."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megabatch.config import Data

from .paths import find_files, has_suffix, printable
from .rows import RowDecoder, choose_columns
from .source import ALL_PIXELS, BadSample, Damage, DataFormat, ImageRequests, Sample, Sides

# The keys of this many objects at the start count as columns.
LINES_FOR_KEYS = 1000


class JsonLines:
    """Every line that is not blank is a sample, every file a shard; paths of images are relative to the folder of their file.

    A file that is empty, or whose last line is cut off, is reported as damage; the cut line is a bad sample.
    """

    def __init__(self, data: Data, files: Sequence[Path], sides: Sides) -> None:
        self._files = list(files)
        self._lines = [_lines(path) for path in files]
        columns = choose_columns(data, sides, self._keys(), str(files[0]))
        self._decoders = [RowDecoder(columns, sides, path.parent.resolve(), data.max_pixels) for path in files]
        self.damage = [damage for shard in range(len(files)) for damage in self._damage(shard)]

    @property
    def lengths(self) -> Sequence[int]:
        return [len(starts) for starts, _ in self._lines]

    def read(self, shard: int, index: int, requests: ImageRequests = ALL_PIXELS) -> Sample:
        return self._decoders[shard].sample(self._key(shard, index), self._object(shard, index), requests)

    def group(self, shard: int, index: int) -> str:
        decoder, key = self._decoders[shard], self._key(shard, index)
        try:
            return decoder.group(key, self._object(shard, index).get(decoder.columns.x))
        except BadSample:
            return key

    def label(self, shard: int, index: int) -> str | None:
        try:
            return self._decoders[shard].label(self._object(shard, index))
        except BadSample:
            return None

    def _key(self, shard: int, index: int) -> str:
        return f"{printable(self._files[shard].name)}:{self._lines[shard][1][index]}"

    def _object(self, shard: int, index: int) -> dict[Any, Any]:
        key = self._key(shard, index)
        try:
            # Opened for each line: forked worker processes would share, and move, one file offset.
            with self._files[shard].open("rb") as file:
                file.seek(self._lines[shard][0][index])
                entry = json.loads(file.readline().decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise BadSample(key, f"line is not valid UTF-8 at byte {error.start}") from None
        except (ValueError, RecursionError) as error:
            raise BadSample(key, f"line is not valid JSON ({error})") from None
        except OSError as error:
            raise BadSample(key, f"file cannot be read ({error.strerror})") from None
        if not isinstance(entry, dict):
            raise BadSample(key, f"line holds a {type(entry).__name__}, not an object {{…}}")
        return entry

    def _damage(self, shard: int) -> Iterator[Damage]:
        path, count = self._files[shard], len(self._lines[shard][0])
        if not count:
            yield Damage(printable(path.name), "the file is empty", read=0)
            return
        with path.open("rb") as file:
            file.seek(self._lines[shard][0][-1])
            if file.readline().endswith(b"\n"):
                return
        try:
            self._object(shard, count - 1)
        except BadSample as bad:
            # The line itself is a bad sample, which is counted when it is read; what followed it is lost.
            reason = f"line {self._lines[shard][1][-1]} has no end, and the {bad.reason}: is the file cut off?"
            yield Damage(printable(path.name), reason, read=count - 1)

    def _objects(self) -> Iterator[dict[Any, Any]]:
        for shard, (starts, _) in enumerate(self._lines):
            for index in range(len(starts)):
                try:
                    yield self._object(shard, index)
                except BadSample:
                    continue

    def _keys(self) -> list[str]:
        keys = dict.fromkeys(key for entry in itertools.islice(self._objects(), LINES_FOR_KEYS) for key in entry)
        if not keys:
            raise ValueError(f"{self._files[0]}: no line holds a JSON object with keys; write one object per line")
        return list(keys)


def _lines(path: Path) -> tuple[array[int], array[int]]:
    """Return the byte offset of each line that is not blank, and its number, counted from 1."""
    starts, numbers, position = array("q"), array("q"), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                starts.append(position)
                numbers.append(number)
            position += len(line)
    return starts, numbers


JSON_LINES = DataFormat(
    form=".jsonl and .ndjson files",
    open=lambda data, source, sides: JsonLines(data, find_files(source), sides),
    recognizes=has_suffix(".jsonl", ".ndjson"),
)
