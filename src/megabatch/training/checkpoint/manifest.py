"""The manifest of a checkpoint as JSON: metadata ("facts"), files with checksums, tensors with the place of their bytes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NAME = "checkpoint.json"
FORMAT = 1
# Bytes that a checksum reads at once: large enough for full memory bandwidth, small compared with a tensor.
PIECE = 1 << 24
FILE = re.compile(r"rank-\d{5,}\.safetensors")
# The dtypes of safetensors by their names there.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor, and the offset `at` of its bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor, and the boxes that it was written in."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class File:
    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    facts: dict[str, Any]
    files: dict[str, File]
    tensors: dict[str, SavedTensor]


def nbytes(dtype: str, sizes: Iterable[int]) -> int:
    return math.prod(sizes) * DTYPES[dtype].itemsize


def as_json(manifest: Manifest) -> str:
    """Return the manifest as JSON, with a checksum of its content."""
    content = dataclasses.asdict(manifest)
    return json.dumps({"format": FORMAT, "crc32": _sum(content), "content": content}, allow_nan=False)


def read(path: Path) -> Manifest:
    """Return the manifest of the checkpoint at `path`. The message of a ValueError continues "checkpoint PATH"."""
    if not (path / NAME).is_file():
        reason = f"it has no file {NAME}" if path.is_dir() else "there is no such folder"
        raise ValueError(f"is not a checkpoint of megabatch: {reason}")
    try:
        table = json.loads((path / NAME).read_text("utf-8"))
        number = table["format"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"is altered or not a checkpoint of megabatch: {NAME} cannot be read") from None
    if number != FORMAT:
        raise ValueError(f"has format {number!r}, and this megabatch reads format {FORMAT}: read it with the version that wrote it")
    try:
        if table["crc32"] != _sum(table["content"]):
            raise ValueError("its checksum differs")
        return _manifest(table["content"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"is altered: {NAME} does not describe a checkpoint ({error})") from None


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Raise ValueError where a file is missing, is not a regular file, or has another size."""
    for name, file in manifest.files.items():
        try:
            status = os.lstat(path / name)
        except FileNotFoundError:
            raise ValueError(f"is truncated: file {name} is missing") from None
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"is altered: {name} is not a regular file")
        if status.st_size != file.bytes:
            word = "truncated" if status.st_size < file.bytes else "altered"
            raise ValueError(f"is {word}: file {name} has {status.st_size} bytes, and {file.bytes} were written")


def check_sum(path: Path, name: str, file: File) -> None:
    """Raise ValueError where the checksum of a file differs from the one that was written."""
    checksum = 0
    with open(path / name, "rb") as stream:
        while piece := stream.read(PIECE):
            checksum = zlib.crc32(piece, checksum)
    if checksum != file.crc32:
        raise ValueError(f"is altered: file {name} has the checksum {checksum:08x}, and {file.crc32:08x} was written")


def _sum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _manifest(content: dict[str, Any]) -> Manifest:
    """Return the manifest after checking every value: no path may lead outside the folder, no part of a tensor may be missing."""
    files = {name: File(_count(f["bytes"]), _count(f["crc32"])) for name, f in content["files"].items()}
    for name in files:
        if not FILE.fullmatch(name):
            raise ValueError(f"file {name!r} does not belong to a checkpoint")
    tensors = {name: _entry(name, entry, files) for name, entry in content["tensors"].items()}
    if not isinstance(content["facts"], dict):
        raise ValueError("facts are not a table")
    return Manifest(content["facts"], files, tensors)


def _entry(name: str, table: dict[str, Any], files: dict[str, File]) -> SavedTensor:
    if table["dtype"] not in DTYPES:
        raise ValueError(f"{name!r} is {table['dtype']!r}, not a tensor of numbers")
    boxes = tuple(Box(_counts(c["offsets"]), _counts(c["sizes"]), str(c["file"]), _count(c["at"])) for c in table["boxes"])
    entry = SavedTensor(table["dtype"], _counts(table["shape"]), boxes)
    for box in boxes:
        within = len(box.offsets) == len(box.sizes) == len(entry.shape) and all(
            offset + size <= whole for offset, size, whole in zip(box.offsets, box.sizes, entry.shape, strict=True)
        )
        if not within or box.at + nbytes(entry.dtype, box.sizes) > files[box.file].bytes:
            raise ValueError(f"a box of {name!r} is outside of its tensor or its file")
    if sum(math.prod(box.sizes) for box in boxes) != math.prod(entry.shape):
        raise ValueError(f"the boxes of {name!r} do not fill it")
    return entry


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(_count(value) for value in values)
