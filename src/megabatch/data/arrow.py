"""Arrow data from outside: what a damaged file points to is checked before it is read.

pyarrow trusts the offsets inside its buffers. One that was damaged makes it read outside of them, or fail a check in C++, and
either ends the process. Opening files, reading messages and validating arrays is safe.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import ipc

# The types of texts, and of bytes stored the same way.
AS_BYTES = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}


def check(values: Any) -> None:
    """Raise ArrowInvalid where reading an element of this array could reach outside of its buffers.

    Takes the time to read its offsets. Texts that are not valid UTF-8 pass: reading one raises UnicodeDecodeError, and the others
    can be read.
    """
    plain = _without_texts(values.type)
    if plain != values.type:
        values = values.view(plain)
    values.validate(full=True)


class ArrowFile:
    """The record batches of a stream in a file, mapped into memory, with the columns of these names.

    What cannot be read is left out: `problems` says what and why. The offsets of a batch are checked when it is first read from, so
    that a large file is not read as a whole when it is opened.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.problems: list[str] = []
        self._columns: list[dict[str, Any]] = []
        self._ends = array("q")
        self._sound: dict[tuple[int, str], bool] = {}
        found = os.stat(path)
        self._stored = found.st_dev, found.st_ino, found.st_size
        with pyarrow.memory_map(str(path)) as file:
            self._map(file, columns)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def value(self, column: str, index: int) -> Any:
        """The value of a row as a Python object. ArrowInvalid where the file is damaged there."""
        self._check_size()
        number = bisect_right(self._ends, index)
        values = self._columns[number][column]
        place = index - (self._ends[number - 1] if number else 0)
        if not self._is_sound(number, column, values):
            # Most rows of a batch may still be in order.
            check(values.slice(place, 1))
        return values[place].as_py()

    def _map(self, file: Any, columns: Sequence[str]) -> None:
        names = ipc.read_schema(file).names
        missing = [name for name in columns if name not in names]
        if missing:
            raise ValueError(f"{self.path}: there is no column {missing[0]!r}, which other files of the dataset have")
        file.seek(0)
        options = ipc.IpcReadOptions(included_fields=[names.index(name) for name in columns])
        reader = ipc.open_stream(file, options=options)
        while True:
            before = file.tell()
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                break
            except (pyarrow.ArrowException, OSError) as error:
                self.problems.append(f"it cannot be read from byte {before} on ({error}): is the file cut off?")
                return
            self._add(batch, before)
        if file.tell() == before:
            self.problems.append(f"the end mark is missing at byte {before}: is the file cut off?")
        elif file.tell() < file.size():
            self.problems.append(f"more data follows the end mark at byte {before}: were files joined? keep them apart")

    def _add(self, batch: Any, position: int) -> None:
        try:
            # Compares the number of rows with the sizes of the buffers, and reads none of them.
            batch.validate()
        except pyarrow.ArrowException as error:
            self.problems.append(f"the record batch at byte {position} is damaged ({error})")
            return
        self._columns.append({name: batch.column(number) for number, name in enumerate(batch.schema.names)})
        self._ends.append(len(self) + batch.num_rows)

    def _is_sound(self, number: int, column: str, values: Any) -> bool:
        if (number, column) not in self._sound:
            try:
                check(values)
            except pyarrow.ArrowException:
                self._sound[number, column] = False
            else:
                self._sound[number, column] = True
        return self._sound[number, column]

    def _check_size(self) -> None:
        # Reading a mapped page behind the end of a file that was cut short ends the process. A file that was deleted or replaced is
        # still there for those who have mapped it.
        try:
            found = os.stat(self.path)
        except OSError:
            return
        device, inode, size = self._stored
        if (found.st_dev, found.st_ino) == (device, inode) and found.st_size < size:
            raise pyarrow.ArrowInvalid("the file has become shorter")


def _without_texts(kind: Any) -> Any:
    """The type with bytes in the place of texts, at any depth."""
    if kind in AS_BYTES:
        return AS_BYTES[kind]
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([field.with_type(_without_texts(field.type)) for field in kind])
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_without_texts(kind.value_type)))
    if pyarrow.types.is_large_list(kind):
        return pyarrow.large_list(kind.value_field.with_type(_without_texts(kind.value_type)))
    return kind
