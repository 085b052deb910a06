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
# What a header holds at this place, in the layouts of POSIX and GNU; and how many bytes are searched for it at a time.
MAGIC, MAGIC_AT, SEARCHED = b"ustar", 257, 1 << 20
# Kinds of members: plain files, and those that are followed by no data of their own: links, devices, folders, pipes.
FILES, WITHOUT_DATA = (b"0", b"\0", b"7"), (b"1", b"2", b"3", b"4", b"5", b"6")
PAX, PAX_FOR_ALL, GNU_NAME, GNU_LINK = b"x", b"g", b"L", b"K"
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """A plain file of an archive: its data are `size` bytes from `offset`."""

    name: str
    offset: int
    size: int


class BrokenArchive(Exception):
    """What keeps the rest of an archive from being read.

    position: the byte from which on it is not read. member: the name of the file whose header is there, if it can be told.
    """

    def __init__(self, reason: str, position: int, member: str | None = None) -> None:
        super().__init__(reason)
        self.position = position
        self.member = member


def members(path: Path) -> Iterator[Member]:
    """The plain files of an uncompressed archive, in order; BrokenArchive where it does not go on as it should.

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
            raise BrokenArchive("the file is empty", 0)
        yield from _walk(file, end)


def names_after(path: Path, position: int) -> Iterator[str]:
    """The names of the plain files whose headers can still be found from this byte on: what a broken archive has lost.

    Headers begin at multiples of 512 bytes, with a magic word and a checksum of their own. Data is searched for the next header
    only where the one before does not lead to it, so all but the broken parts are skipped.
    """
    with path.open("rb") as file:
        end = file.seek(0, 2)
        while (found := _next_header(file, position, end)) is not None:
            position = found + BLOCK
            try:
                for member in _walk(file, end, found):
                    position = member.offset + -(-member.size // BLOCK) * BLOCK
                    yield member.name
                return
            except BrokenArchive as broken:
                if broken.member is not None:
                    yield broken.member
                position = max(position, broken.position + BLOCK)


def _next_header(file: IO[bytes], position: int, end: int) -> int | None:
    """Where the next valid header begins, at `position` or after it; None if there is none."""
    while position < end:
        file.seek(position)
        piece = file.read(SEARCHED)
        at = piece.find(MAGIC)
        while at >= 0:
            start = at - MAGIC_AT
            if start >= 0 and start % BLOCK == 0 and _is_header(piece[start : start + BLOCK]):
                return position + start
            at = piece.find(MAGIC, at + 1)
        position += len(piece)
    return None


def _walk(file: IO[bytes], end: int, position: int = 0) -> Iterator[Member]:
    said = dict[str, str]()
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
            reason = f"{name[:200]!r} at byte {position} does not end within the file: is it cut off?"
            raise BrokenArchive(reason, position, name)
        position = start + -(-size // BLOCK) * BLOCK
        if kind in (PAX, GNU_NAME):
            if size > LONGEST_HEADER:
                raise BrokenArchive(f"the header at byte {start - BLOCK} has {size} bytes", start - BLOCK)
            told = file.read(size)
            said |= _records(told, start) if kind == PAX else {"path": _text(told)}
        elif kind not in (PAX_FOR_ALL, GNU_LINK):
            if kind in FILES and not any(key.startswith("GNU.sparse") for key in said):
                yield Member(name, start, size)
            elif kind not in WITHOUT_DATA:
                reason = f"{name[:200]!r} is of kind {kind!r}, which is not known here; write the archive without --sparse"
                raise BrokenArchive(reason, start - BLOCK, name)
            said = {}


def _check(block: bytes, position: int) -> None:
    if not block:
        raise BrokenArchive(f"the end mark is missing at byte {position}: is the file cut off?", position)
    if not _is_header(block):
        raise BrokenArchive("is not a tar file" if position == 0 else f"the header at byte {position} is broken", position)


def _is_header(block: bytes) -> bool:
    # A header holds the sum of its bytes, taken with eight spaces in the sum's own place. The lower half of Adler's checksum is
    # that sum plus one, modulo 65521, and takes no loop in Python.
    total = zlib.adler32(block[:148] + b" " * 8 + block[156:]) & 0xFFFF
    said = _number(block[148:156])
    return len(block) == BLOCK and said is not None and (said + 1) % 65521 == total


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
            raise BrokenArchive(f"the header at byte {position} is broken", position)
        said[_text(key)] = value.decode("utf-8", "surrogateescape")
        told = told[count:]
    return said


def _nothing_follows(file: IO[bytes], position: int) -> None:
    """Archives that were joined end to end would lose all but the first, silently."""
    while rest := file.read(1 << 16):
        if rest.strip(b"\0"):
            reason = f"more data follows the end mark at byte {position}: were archives joined? keep them apart"
            raise BrokenArchive(reason, position)
