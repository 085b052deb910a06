"""Where the files of a tar archive lie: its headers are read once, its data is skipped, and what is wrong with it is said."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

BLOCK = 512
EMPTY = bytes(BLOCK)
# Headers that hold names are short; a longer one is damage, and would be read into memory.
LONGEST_HEADER = 1 << 20
# Kinds of members: plain files, and those that are followed by no data of their own: links, devices, folders, pipes.
FILES, WITHOUT_DATA = (b"0", b"\0", b"7"), (b"1", b"2", b"3", b"4", b"5", b"6")
PAX, PAX_FOR_ALL, GNU_NAME, GNU_LINK = b"x", b"g", b"L", b"K"
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """A plain file of an archive: its data are `size` bytes from `offset`."""

    name: str
    offset: int
    size: int


class Damage(Exception):
    """What keeps the rest of an archive from being read."""


def members(path: Path) -> Iterator[Member]:
    """The plain files of an uncompressed archive, in order; Damage where it does not go on as it should.

    ValueError where the archive is compressed: members of such a one cannot be read in any order.
    """
    with path.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(0)
        start = file.read(8)
        for mark, how in COMPRESSED.items():
            if start.startswith(mark):
                raise ValueError(f"{path}: is compressed ({how}), but samples are read in any order; unpack it to a plain .tar")
        if not end:
            raise Damage("the file is empty")
        yield from _walk(file, end)


def _walk(file: IO[bytes], end: int) -> Iterator[Member]:
    position, said = 0, dict[str, str]()
    while True:
        file.seek(position)
        block = file.read(BLOCK)
        if block == EMPTY:
            return _nothing_follows(file, position)
        _check(block, position)
        kind = block[156:157]
        size = 0 if kind in WITHOUT_DATA else _size(block, said)
        name, start = said.get("path") or _name(block), position + BLOCK
        if size is None or start + size > end:
            raise Damage(f"{name[:200]!r} at byte {position} does not end within the file: is it cut off?")
        position = start + -(-size // BLOCK) * BLOCK
        if kind in (PAX, GNU_NAME):
            if size > LONGEST_HEADER:
                raise Damage(f"the header at byte {start - BLOCK} has {size} bytes")
            told = file.read(size)
            said |= _records(told, start) if kind == PAX else {"path": _text(told)}
        elif kind not in (PAX_FOR_ALL, GNU_LINK):
            if kind in FILES and not any(key.startswith("GNU.sparse") for key in said):
                yield Member(name, start, size)
            elif kind not in WITHOUT_DATA:
                raise Damage(f"{name[:200]!r} is of kind {kind!r}, which is not known here; write the archive without --sparse")
            said = {}


def _check(block: bytes, position: int) -> None:
    if not block:
        raise Damage(f"the end mark is missing at byte {position}: is the file cut off?")
    # A header holds the sum of its bytes, taken with eight spaces in the sum's own place. The lower half of Adler's checksum is
    # that sum plus one, modulo 65521, and takes no loop in Python.
    total = zlib.adler32(block[:148] + b" " * 8 + block[156:]) & 0xFFFF
    said = _number(block[148:156])
    if len(block) < BLOCK or said is None or (said + 1) % 65521 != total:
        raise Damage("is not a tar file" if position == 0 else f"the header at byte {position} is broken")


def _size(block: bytes, said: dict[str, str]) -> int | None:
    """How long a member is: as its PAX header says, where its own cannot."""
    if "size" not in said:
        return _number(block[124:136])
    return int(said["size"]) if said["size"].isdecimal() and len(said["size"]) < 20 else None


def _number(digits: bytes) -> int | None:
    """A field of octal digits, or, where they would not do, of bytes; None where it is neither, or negative."""
    if digits[:1] == b"\x80":
        return int.from_bytes(digits[1:], "big")
    text = digits.split(b"\0")[0].strip()
    try:
        return int(text or b"0", 8) if not text.startswith((b"-", b"+")) else None
    except ValueError:
        return None


def _name(block: bytes) -> str:
    name = _text(block[:100])
    # GNU's own headers, marked "ustar  ", keep other things where POSIX keeps the beginning of a long name.
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _records(told: bytes, position: int) -> dict[str, str]:
    """What a PAX header says: records "LENGTH KEY=VALUE\\n"."""
    said = {}
    while told.strip(b"\0"):
        length = told.split(b" ")[0]
        count = int(length) if length.isdigit() and len(length) < 9 else 0
        key, equals, value = told[len(length) + 1 : count - 1].partition(b"=")
        if not equals or told[count - 1 : count] != b"\n":
            raise Damage(f"the header at byte {position} is broken")
        said[_text(key)] = value.decode("utf-8", "surrogateescape")
        told = told[count:]
    return said


def _nothing_follows(file: IO[bytes], position: int) -> None:
    """Archives that were joined end to end would lose all but the first, silently."""
    while rest := file.read(1 << 16):
        if rest.strip(b"\0"):
            raise Damage(f"more data follows the end mark at byte {position}: were archives joined? keep them apart")
