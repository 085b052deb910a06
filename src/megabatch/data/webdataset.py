"""Pairs in WebDataset shards: tar files whose members that share a name up to its first dot are one sample. Nothing is unpacked.

The headers of a shard are read once when the source is opened, and its data is skipped. Every sample is then a few offsets, and
can be read in any order.
"""

from __future__ import annotations

import json
import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import IO, Any, NamedTuple

from megabatch.config import Data

from .decoding import IMAGE_SUFFIXES, LONGEST_TEXT, as_label, as_text, as_texts, read_image
from .paths import find_files, has_suffix, printable
from .source import (
    ALL_PIXELS,
    BadSample,
    Damage,
    DataFormat,
    ImageRequest,
    ImageRequests,
    Kind,
    LoadedImage,
    Sample,
    Sides,
)

IMAGE_EXTENSIONS, CAPTION_EXTENSIONS = ";".join(IMAGE_SUFFIXES), "txt;caption;json:caption"
# A member is stored as three numbers: the index of its extension in its field, its offset and its size. MISSING: there is none.
NUMBERS, MISSING = 3, -1

# The tar format.
BLOCK = 512
EMPTY = bytes(BLOCK)
# Headers with long names are short; a longer one is damage, and would be read into memory.
LONGEST_HEADER = 1 << 20
# The magic word of POSIX and GNU headers, its offset in the header, and how many bytes are searched for it at a time.
MAGIC, MAGIC_OFFSET, SEARCHED = b"ustar", 257, 1 << 20
# Types of members: plain files, and those without data: links, devices, folders, pipes.
FILE_TYPES, TYPES_WITHOUT_DATA = (b"0", b"\0", b"7"), (b"1", b"2", b"3", b"4", b"5", b"6")
PAX, PAX_GLOBAL, GNU_NAME, GNU_LINK = b"x", b"g", b"L", b"K"
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Field(NamedTuple):
    """One field of a sample: extensions in order of preference, each with the key of its value if the member is JSON."""

    name: str
    kind: Kind
    extensions: tuple[tuple[str, str | None], ...]

    def __str__(self) -> str:
        return ";".join(extension + (f":{key}" if key else "") for extension, key in self.extensions)


class ShardIndex(NamedTuple):
    """Where the members of a shard lie.

    names: of the samples. places: for each sample and each field, NUMBERS numbers.
    problems: key and reason of members that cannot be read.
    broken: why the file cannot be read to its end, and how many samples are known to lie behind that; None if it can.
    """

    path: Path
    names: list[str]
    places: array[int]
    problems: list[tuple[str, str]]
    broken: tuple[str, int] | None = None


class WebDataset:
    """Every sample of every shard.

    data.x, y, label and negatives name extensions, "jpg;png"; "json:caption" is the value of a key of a JSON member. A damaged
    shard is read up to the damage; `damage` counts the samples behind it whose headers can still be found.
    """

    def __init__(self, data: Data, files: Sequence[Path], sides: Sides) -> None:
        self._fields = _parse_fields(data, sides)
        self._max_pixels = data.max_pixels
        self._shards = [_index(path, self._fields) for path in files]
        if not any(shard.names for shard in self._shards):
            problems = [*map(str, self.damage), *(": ".join(problem) for shard in self._shards for problem in shard.problems)]
            raise ValueError(
                f"{files[0]}: no member ends in {self._fields[0]} or {self._fields[1]}; name the extensions as data.x and data.y"
                + (f" ({problems[0]})" if problems else "")
            )

    @property
    def lengths(self) -> Sequence[int]:
        return [len(shard.names) + len(shard.problems) for shard in self._shards]

    @property
    def damage(self) -> Sequence[Damage]:
        undamaged = [len(shard.names) for shard in self._shards if shard.broken is None]
        usual = round(median(undamaged)) if undamaged else None
        return [
            Damage(printable(shard.path.name), shard.broken[0], len(shard.names), shard.broken[1] or None, usual)
            for shard in self._shards
            if shard.broken is not None
        ]

    def read(self, shard: int, index: int, requests: ImageRequests = ALL_PIXELS) -> Sample:
        names, problems = self._shards[shard].names, self._shards[shard].problems
        if index >= len(names):
            raise BadSample(*problems[index - len(names)])
        key = self._key(shard, index)
        x, y, *others = [self._value(shard, index, field, key) for field in range(len(self._fields))]
        by_name = {field.name: value for field, value in zip(self._fields[2:], others, strict=True)}
        return Sample(
            key,
            self._side(self._fields[0], x, key, requests.x),
            self._side(self._fields[1], y, key, requests.y),
            as_texts(by_name.get("negatives"), key, "negatives"),
            as_label(by_name["label"], key) if "label" in by_name else None,
        )

    def group(self, shard: int, index: int) -> str:
        return self._key(shard, index)

    def label(self, shard: int, index: int) -> str | None:
        field = next((number for number, field in enumerate(self._fields) if field.name == "label"), None)
        if field is None or index >= len(self._shards[shard].names):
            return None
        try:
            return as_label(self._value(shard, index, field, ""), "")
        except BadSample:
            return None

    def _key(self, shard: int, index: int) -> str:
        path, names, problems = self._shards[shard].path, self._shards[shard].names, self._shards[shard].problems
        return f"{printable(path.name)}/{printable(names[index])}" if index < len(names) else problems[index - len(names)][0]

    def _value(self, shard: int, index: int, field: int, key: str) -> Any:
        """Return the content of a member: bytes, or the value of its key if it is JSON."""
        name, kind, extensions = self._fields[field]
        start = (index * len(self._fields) + field) * NUMBERS
        choice, offset, size = self._shards[shard].places[start : start + NUMBERS]
        if choice == MISSING:
            raise BadSample(key, f"{name}: there is no member {self._fields[field]}")
        if kind == "text" and size > LONGEST_TEXT:
            raise BadSample(key, f"{name} has {size} bytes; a text may have at most {LONGEST_TEXT}")
        try:
            # Opened for each member: forked worker processes would share, and move, one file offset.
            with self._shards[shard].path.open("rb") as file:
                file.seek(offset)
                data = file.read(size)
        except OSError as error:
            raise BadSample(key, f"{name}: the shard cannot be read ({error.strerror})") from None
        if len(data) < size:
            raise BadSample(key, f"{name}: the shard has become shorter")
        json_key = extensions[choice][1]
        return data if json_key is None else _json_value(data, json_key, key, name)

    def _side(self, field: Field, value: Any, key: str, request: ImageRequest) -> LoadedImage | str:
        if field.kind == "text":
            return as_text(value, key, field.name)
        return read_image(value, key, self._max_pixels, request)


def _parse_fields(data: Data, sides: Sides) -> list[Field]:
    if sides.x == sides.y and (data.x is None or data.y is None):
        raise ValueError(f"both sides are {sides.x}s: name the extensions of each in the shards, as data.x and data.y")
    usual = {"image": IMAGE_EXTENSIONS, "text": CAPTION_EXTENSIONS}
    fields = [_parse_field("x", sides.x, data.x or usual[sides.x]), _parse_field("y", sides.y, data.y or usual[sides.y])]
    if data.negatives:
        fields.append(_parse_field("negatives", "text", data.negatives))
    if data.label is not None:
        fields.append(_parse_field("label", "text", data.label))
    return fields


def _parse_field(name: str, kind: Kind, extensions: str) -> Field:
    choices = []
    for entry in filter(None, (entry.strip() for entry in extensions.split(";"))):
        extension, _, key = entry.partition(":")
        extension = extension.lstrip(".").lower()
        if (extension == "json") != bool(key) or (key and kind == "image"):
            raise ValueError(
                f'data.{name} is {extensions!r}: a JSON member needs the key of a text, as in "json:caption"; others have none'
            )
        choices.append((extension, key or None))
    if not choices:
        raise ValueError(f'data.{name} is {extensions!r}: must name extensions, as in "jpg;png"')
    return Field(name, kind, tuple(choices))


def _index(path: Path, fields: Sequence[Field]) -> ShardIndex:
    """Find every sample of a shard in one pass over its headers."""
    shard = ShardIndex(path, [], array("q"), [])
    preferences = [
        {extension: choice for choice, (extension, _) in reversed(list(enumerate(field.extensions)))} for field in fields
    ]
    empty = array("q", [MISSING, 0, 0] * len(fields))
    numbers: dict[str, int] = {}
    try:
        for name, offset, size in tar_members(path):
            stem, extension = _split_name(name)
            if _leaves_folder(name):
                shard.problems.append((f"{printable(path.name)}/{printable(name)}", "the member's name leaves its folder"))
                continue
            matches = [(field, choices[extension]) for field, choices in enumerate(preferences) if extension in choices]
            if matches and _has_member(shard, numbers.get(stem), matches, len(fields)):
                # Shards that were joined may use a name twice: the second use begins another sample.
                del numbers[stem]
            for field, choice in matches:
                if stem not in numbers:
                    numbers[stem] = len(shard.names)
                    shard.names.append(stem)
                    shard.places.extend(empty)
                start = (numbers[stem] * len(fields) + field) * NUMBERS
                if not 0 <= shard.places[start] < choice:
                    shard.places[start : start + NUMBERS] = array("q", [choice, offset, size])
    except BrokenArchive as broken:
        extensions = {extension for choices in preferences for extension in choices}
        return shard._replace(broken=_describe_loss(path, broken, {*shard.names}, extensions))
    return shard


def _describe_loss(path: Path, broken: BrokenArchive, read: set[str], extensions: set[str]) -> tuple[str, int]:
    """Return why a shard ends early, with the fraction of it that is not read, and how many samples are known to be lost."""
    names = map(_split_name, names_after(path, broken.position))
    lost = {stem for stem, extension in names if extension in extensions and stem not in read}
    size = os.path.getsize(path)
    fraction = (size - broken.position) / size if size else 0.0
    return str(broken) + (f"; {fraction:.1%} of the file is not read" if fraction >= 0.001 else ""), len(lost)


def _leaves_folder(name: str) -> bool:
    """Return whether the name is absolute or contains "..", on any system."""
    plain = name.replace("\\", "/")
    return plain.startswith("/") or plain[1:3] == ":/" or "/../" in f"/{plain}/"


def _has_member(shard: ShardIndex, number: int | None, matches: Sequence[tuple[int, int]], fields: int) -> bool:
    """Return whether the sample already has a member with this extension."""
    return number is not None and any(shard.places[(number * fields + field) * NUMBERS] == choice for field, choice in matches)


def _split_name(name: str) -> tuple[str, str]:
    """Split a member's name at the first dot of its last part: "a.b/1.seg.png" is "a.b/1" and "seg.png"."""
    folder, slash, base = name.removeprefix("./").rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower()


def _json_value(data: bytes, json_key: str, key: str, name: str) -> Any:
    try:
        entry = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadSample(key, f"{name}: the member is not valid JSON ({error})") from None
    if not isinstance(entry, dict):
        raise BadSample(key, f"{name}: the JSON member holds a {type(entry).__name__}, not an object {{…}}")
    return entry.get(json_key)


class TarMember(NamedTuple):
    """A plain file of an archive: `size` bytes of data at `offset`."""

    name: str
    offset: int
    size: int


class BrokenArchive(Exception):
    """Why the rest of an archive cannot be read.

    position: the byte from which on it is not read. member: the name of the file whose header is there, if it is known.
    """

    def __init__(self, reason: str, position: int, member: str | None = None) -> None:
        super().__init__(reason)
        self.position = position
        self.member = member


def tar_members(path: Path) -> Iterator[TarMember]:
    """Yield the plain files of an uncompressed archive, in order. BrokenArchive if it is damaged.

    ValueError if the archive is compressed: its members cannot be read in any order.
    """
    with path.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(0)
        start = file.read(8)
        for mark, compression in COMPRESSIONS.items():
            if start.startswith(mark):
                raise ValueError(
                    f"{path}: is compressed ({compression}), but samples are read in any order; unpack it to a plain .tar"
                )
        if not end:
            raise BrokenArchive("the file is empty", 0)
        yield from _walk(file, end)


def names_after(path: Path, position: int) -> Iterator[str]:
    """Yield the names of the plain files whose headers can still be found from this byte on: what a broken archive has lost.

    Headers begin at multiples of 512 bytes, with a magic word and a checksum. Data is searched for the next header only if the
    previous one does not lead to it, so that everything but the broken parts is skipped.
    """
    with path.open("rb") as file:
        end = file.seek(0, 2)
        while (header := _next_header(file, position, end)) is not None:
            position = header + BLOCK
            try:
                for member in _walk(file, end, header):
                    position = member.offset + -(-member.size // BLOCK) * BLOCK
                    yield member.name
                return
            except BrokenArchive as broken:
                if broken.member is not None:
                    yield broken.member
                position = max(position, broken.position + BLOCK)


def _next_header(file: IO[bytes], position: int, end: int) -> int | None:
    """Return where the next valid header begins, at `position` or after it; None if there is none."""
    while position < end:
        file.seek(position)
        piece = file.read(SEARCHED)
        magic = piece.find(MAGIC)
        while magic >= 0:
            start = magic - MAGIC_OFFSET
            if start >= 0 and start % BLOCK == 0 and _is_header(piece[start : start + BLOCK]):
                return position + start
            magic = piece.find(MAGIC, magic + 1)
        position += len(piece)
    return None


def _walk(file: IO[bytes], end: int, position: int = 0) -> Iterator[TarMember]:
    # What PAX and GNU headers say about the member that follows them.
    extended = dict[str, str]()
    while True:
        file.seek(position)
        block = file.read(BLOCK)
        if block == EMPTY:
            return _check_nothing_follows(file, position)
        _check_header(block, position)
        member_type = block[156:157]
        size = 0 if member_type in TYPES_WITHOUT_DATA else _member_size(block, extended)
        name, start = extended.get("path") or _member_name(block), position + BLOCK
        if size is None or start + size > end:
            reason = f"{name[:200]!r} at byte {position} does not end within the file: is it cut off?"
            raise BrokenArchive(reason, position, name)
        position = start + -(-size // BLOCK) * BLOCK
        if member_type in (PAX, GNU_NAME):
            if size > LONGEST_HEADER:
                raise BrokenArchive(f"the header at byte {start - BLOCK} has {size} bytes", start - BLOCK)
            data = file.read(size)
            extended |= _pax_records(data, start) if member_type == PAX else {"path": _decode_name(data)}
        elif member_type not in (PAX_GLOBAL, GNU_LINK):
            if member_type in FILE_TYPES and not any(key.startswith("GNU.sparse") for key in extended):
                yield TarMember(name, start, size)
            elif member_type not in TYPES_WITHOUT_DATA:
                reason = f"{name[:200]!r} is of type {member_type!r}, which is not supported; write the archive without --sparse"
                raise BrokenArchive(reason, start - BLOCK, name)
            extended = {}


def _check_header(block: bytes, position: int) -> None:
    if not block:
        raise BrokenArchive(f"the end mark is missing at byte {position}: is the file cut off?", position)
    if not _is_header(block):
        raise BrokenArchive("is not a tar file" if position == 0 else f"the header at byte {position} is broken", position)


def _is_header(block: bytes) -> bool:
    # A header stores the sum of its bytes, computed with eight spaces in place of the sum. The lower half of Adler-32 is that sum
    # plus one, modulo 65521, and takes no loop in Python.
    total = zlib.adler32(block[:148] + b" " * 8 + block[156:]) & 0xFFFF
    stored = _parse_number(block[148:156])
    return len(block) == BLOCK and stored is not None and (stored + 1) % 65521 == total


def _member_size(block: bytes, extended: dict[str, str]) -> int | None:
    """Return the size of a member, from its PAX header if that has one."""
    if "size" not in extended:
        return _parse_number(block[124:136])
    return int(extended["size"]) if extended["size"].isdecimal() and len(extended["size"]) < 20 else None


def _parse_number(digits: bytes) -> int | None:
    """Return the number in a field of octal digits, or of bytes if octal digits do not suffice; None if invalid or negative."""
    if digits[:1] == b"\x80":
        return int.from_bytes(digits[1:], "big")
    text = digits.split(b"\0")[0].strip()
    try:
        return int(text or b"0", 8) if not text.startswith((b"-", b"+")) else None
    except ValueError:
        return None


def _member_name(block: bytes) -> str:
    name = _decode_name(block[:100])
    # GNU headers, marked "ustar  ", keep other values where POSIX headers keep the beginning of a long name.
    prefix = _decode_name(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _decode_name(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _pax_records(data: bytes, position: int) -> dict[str, str]:
    """Return the records "LENGTH KEY=VALUE\\n" of a PAX header."""
    records = {}
    while data.strip(b"\0"):
        length = data.split(b" ")[0]
        count = int(length) if length.isdigit() and len(length) < 9 else 0
        key, equals, value = data[len(length) + 1 : count - 1].partition(b"=")
        if not equals or data[count - 1 : count] != b"\n":
            raise BrokenArchive(f"the header at byte {position} is broken", position)
        records[_decode_name(key)] = value.decode("utf-8", "surrogateescape")
        data = data[count:]
    return records


def _check_nothing_follows(file: IO[bytes], position: int) -> None:
    """Raise BrokenArchive if archives were joined end to end: all but the first would be lost silently."""
    while rest := file.read(1 << 16):
        if rest.strip(b"\0"):
            reason = f"more data follows the end mark at byte {position}: were archives joined? keep them apart"
            raise BrokenArchive(reason, position)


WEBDATASET = DataFormat(
    form=".tar files",
    open=lambda data, source, sides: WebDataset(data, find_files(source), sides),
    # The reader refuses compressed shards and says what to do.
    recognizes=has_suffix(".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"),
)
