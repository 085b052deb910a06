"""Pairs as a Hugging Face dataset saved to disk: Arrow files, mapped into memory and read without the library `datasets`.

pyarrow trusts the offsets inside its buffers. A damaged offset makes it read outside of them, or fail a check in C++, and either
ends the process. Opening files, reading messages and validating arrays is safe, so offsets are validated before they are followed.
"""

from __future__ import annotations

import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megabatch import packages
from megabatch.config import Data

from .paths import find_folder, path_inside, printable
from .rows import RowDecoder, choose_columns
from .source import ALL_PIXELS, BadSample, Damage, DataFormat, ImageRequests, Sample, Sides

# Files that `save_to_disk` writes: the first two into the folder of a split, the third into a folder that holds several splits.
STATE, FEATURES, SEVERAL_SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
SPLIT = "train"


class SavedDataset:
    """Every row is a sample, every Arrow file a shard. Of several splits, "train" is read. Image paths start at the folder."""

    def __init__(self, data: Data, folder: Path, sides: Sides) -> None:
        folder = _folder_of_split(folder)
        self._files = _data_files(folder)
        columns = choose_columns(data, sides, _column_names(self._files[0]), str(folder))
        self._decoder = RowDecoder(columns, sides, folder.resolve(), data.max_pixels)
        self._tables: dict[int, ArrowFile] = {}
        self._lengths = [len(self._table(shard)) for shard in range(len(self._files))]
        self.damage = [damage for shard in range(len(self._files)) for damage in self._damage(shard)]
        self._class_names = _class_names(folder, columns.label)

    def __getstate__(self) -> dict[str, Any]:
        # Other processes map the files themselves.
        return self.__dict__ | {"_tables": {}}

    @property
    def lengths(self) -> Sequence[int]:
        return self._lengths

    def read(self, shard: int, index: int, requests: ImageRequests = ALL_PIXELS) -> Sample:
        key = self._key(shard, index)
        row = {name: self._value(name, shard, index) for name in self._decoder.columns.names()}
        return self._decoder.sample(key, row, requests)

    def group(self, shard: int, index: int) -> str:
        key = self._key(shard, index)
        # To find rows that share an image, every image would have to be read.
        if self._decoder.sides.x == "image":
            return key
        try:
            return self._decoder.group(key, self._value(self._decoder.columns.x, shard, index))
        except BadSample:
            return key

    def label(self, shard: int, index: int) -> str | None:
        column = self._decoder.columns.label
        try:
            return None if column is None else self._decoder.label({column: self._value(column, shard, index)})
        except BadSample:
            return None

    def _key(self, shard: int, index: int) -> str:
        return f"{printable(self._files[shard].name)}:{index + 1}"

    def _table(self, shard: int) -> ArrowFile:
        if shard not in self._tables:
            with _arrow_errors(self._files[shard]):
                self._tables[shard] = ArrowFile(self._files[shard], self._decoder.columns.names())
        return self._tables[shard]

    def _damage(self, shard: int) -> Iterator[Damage]:
        problems = self._table(shard).problems
        if problems:
            more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
            yield Damage(printable(self._files[shard].name), problems[0] + more, read=self._lengths[shard])

    def _value(self, column: str, shard: int, index: int) -> Any:
        import pyarrow

        try:
            value = self._table(shard).value(column, index)
        except UnicodeDecodeError:
            raise BadSample(self._key(shard, index), f"{column} is not valid UTF-8") from None
        except pyarrow.ArrowException as error:
            raise BadSample(self._key(shard, index), f"{column} is damaged ({error})") from None
        if column == self._decoder.columns.label and self._class_names and isinstance(value, int):
            return self._class_names[value] if 0 <= value < len(self._class_names) else None
        return value


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    """Turn the errors of a file that is not valid Arrow into a ValueError that names it."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: cannot be read as an Arrow file ({error}); save the dataset again") from None


def _column_names(path: Path) -> list[str]:
    import pyarrow
    from pyarrow import ipc

    with _arrow_errors(path), pyarrow.memory_map(str(path)) as file:
        return list(ipc.read_schema(file).names)


def _folder_of_split(folder: Path) -> Path:
    if not (folder / SEVERAL_SPLITS).is_file():
        return folder
    splits = sorted(path.parent.name for path in folder.glob(f"*/{STATE}"))
    if SPLIT not in splits:
        raise ValueError(
            f"data.source is {str(folder)!r}: it has no split {SPLIT!r}, but {', '.join(splits) or 'none at all'};"
            f" name the folder of one, as in {str(folder / (splits or ['test'])[0])!r}"
        )
    return folder / SPLIT


def _data_files(folder: Path) -> list[Path]:
    state = _read_json(folder / STATE)
    entries = state.get("_data_files")
    names = [entry.get("filename") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    if not names:
        raise ValueError(f"{folder / STATE}: names no data file; save the dataset again")
    try:
        return [path_inside(folder.resolve(), str(name), str(folder / STATE)) for name in names]
    except BadSample as error:
        # A data file outside the folder concerns the whole source, not one sample.
        raise ValueError(str(error)) from None


def _class_names(folder: Path, label: str | None) -> list[str]:
    """Return the names that the numbers of a ClassLabel column stand for."""
    features = _read_json(folder / FEATURES).get("features") if label is not None else None
    feature = features.get(label) if isinstance(features, dict) else None
    names = feature.get("names") if isinstance(feature, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); name a folder written by Dataset.save_to_disk") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: does not hold a JSON object; name a folder written by Dataset.save_to_disk")
    return content


class ArrowFile:
    """The record batches of an Arrow stream file, mapped into memory, with the columns of these names.

    Parts that cannot be read are left out, and `problems` names them with the reason. The offsets of a batch are checked when it is
    first read from, so that opening a large file does not read all of it.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        import pyarrow

        self.path = path
        self.problems: list[str] = []
        self._columns: list[dict[str, Any]] = []
        self._ends = array("q")
        self._valid: dict[tuple[int, str], bool] = {}
        stat = os.stat(path)
        self._identity = stat.st_dev, stat.st_ino, stat.st_size
        with pyarrow.memory_map(str(path)) as file:
            self._map(file, columns)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def value(self, column: str, index: int) -> Any:
        """Return the value of a row as a Python object. ArrowInvalid if the file is damaged there."""
        self._check_size()
        number = bisect_right(self._ends, index)
        values = self._columns[number][column]
        position = index - (self._ends[number - 1] if number else 0)
        if not self._is_valid(number, column, values):
            # Most rows of the batch may still be readable.
            check_buffers(values.slice(position, 1))
        return values[position].as_py()

    def _map(self, file: Any, columns: Sequence[str]) -> None:
        import pyarrow
        from pyarrow import ipc

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
        import pyarrow

        try:
            # Compares the number of rows with the sizes of the buffers, without reading the buffers.
            batch.validate()
        except pyarrow.ArrowException as error:
            self.problems.append(f"the record batch at byte {position} is damaged ({error})")
            return
        self._columns.append({name: batch.column(number) for number, name in enumerate(batch.schema.names)})
        self._ends.append(len(self) + batch.num_rows)

    def _is_valid(self, number: int, column: str, values: Any) -> bool:
        import pyarrow

        if (number, column) not in self._valid:
            try:
                check_buffers(values)
            except pyarrow.ArrowException:
                self._valid[number, column] = False
            else:
                self._valid[number, column] = True
        return self._valid[number, column]

    def _check_size(self) -> None:
        # Reading a mapped page behind the end of a truncated file ends the process. A file that was deleted or replaced stays
        # readable through the mapping.
        try:
            stat = os.stat(self.path)
        except OSError:
            return
        device, inode, size = self._identity
        if (stat.st_dev, stat.st_ino) == (device, inode) and stat.st_size < size:
            import pyarrow

            raise pyarrow.ArrowInvalid("the file has become shorter")


def check_buffers(values: Any) -> None:
    """Raise ArrowInvalid if reading an element of this array could reach outside of its buffers.

    Reads all offsets. Texts that are not valid UTF-8 pass: reading one raises UnicodeDecodeError, and the others can be read.
    """
    plain = _without_texts(values.type)
    if plain != values.type:
        values = values.view(plain)
    values.validate(full=True)


def _without_texts(kind: Any) -> Any:
    """Return the type with bytes in place of texts, at any depth."""
    import pyarrow

    if kind == pyarrow.string():
        return pyarrow.binary()
    if kind == pyarrow.large_string():
        return pyarrow.large_binary()
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([field.with_type(_without_texts(field.type)) for field in kind])
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_without_texts(kind.value_type)))
    if pyarrow.types.is_large_list(kind):
        return pyarrow.large_list(kind.value_field.with_type(_without_texts(kind.value_type)))
    return kind


def _is_saved_dataset(source: str) -> bool:
    folder = os.path.expanduser(source)
    return os.path.isdir(folder) and any(os.path.exists(os.path.join(folder, name)) for name in (STATE, SEVERAL_SPLITS))


SAVED_DATASET = DataFormat(
    form="a folder that Dataset.save_to_disk wrote",
    open=lambda data, source, sides: SavedDataset(data, find_folder(source), sides),
    recognizes=_is_saved_dataset,
    needs=packages.ARROW,
)
