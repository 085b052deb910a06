"""Pairs in WebDataset shards: tar files whose members of one name, up to its first dot, are one sample. Nothing is unpacked."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from megabatch.config import Data

from .images import SUFFIXES, decode
from .paths import shown
from .source import BadSample, Damage, Kind, Sample, Sides
from .tar import BrokenArchive, members, names_after
from .texts import LONGEST, label, text, texts

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGES, CAPTIONS = ";".join(SUFFIXES), "txt;caption;json:caption"
# A member of a sample as three numbers: which choice of its part it is, where it begins, how long it is. No choice: it is missing.
FIELDS, MISSING = 3, -1


class Part(NamedTuple):
    """One part of a sample: extensions in order of preference, each with the key of its value where the member is JSON."""

    name: str
    kind: Kind
    choices: tuple[tuple[str, str | None], ...]

    def __str__(self) -> str:
        return ";".join(extension + (f":{key}" if key else "") for extension, key in self.choices)


class Shard(NamedTuple):
    """What lies where. places: of each sample, of each part, FIELDS numbers. problems: key and reason of what cannot be read.

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
        self._parts = _parts(data, sides)
        self._max_pixels = data.max_pixels
        self._shards = [_index(path, self._parts) for path in files]
        if not any(shard.names for shard in self._shards):
            problems = [*map(str, self.damage), *(": ".join(problem) for shard in self._shards for problem in shard.problems)]
            raise ValueError(
                f"{files[0]}: no member ends in {self._parts[0]} or {self._parts[1]}; name the extensions as data.x and data.y"
                + (f" ({problems[0]})" if problems else "")
            )

    @property
    def lengths(self) -> Sequence[int]:
        return [len(shard.names) + len(shard.problems) for shard in self._shards]

    @property
    def damage(self) -> Sequence[Damage]:
        whole = [len(shard.names) for shard in self._shards if shard.broken is None]
        usual = round(median(whole)) if whole else None
        return [
            Damage(shown(shard.path.name), shard.broken[0], len(shard.names), shard.broken[1] or None, usual)
            for shard in self._shards
            if shard.broken is not None
        ]

    def read(self, shard: int, index: int) -> Sample:
        names, problems = self._shards[shard].names, self._shards[shard].problems
        if index >= len(names):
            raise BadSample(*problems[index - len(names)])
        key = self._key(shard, index)
        x, y, *others = [self._value(shard, index, part, key) for part in range(len(self._parts))]
        named = {part.name: value for part, value in zip(self._parts[2:], others, strict=True)}
        return Sample(
            key,
            self._side(self._parts[0], x, key),
            self._side(self._parts[1], y, key),
            texts(named.get("negatives"), key, "negatives"),
            label(named["label"], key) if "label" in named else None,
        )

    def group(self, shard: int, index: int) -> str:
        return self._key(shard, index)

    def label(self, shard: int, index: int) -> str | None:
        part = next((number for number, part in enumerate(self._parts) if part.name == "label"), None)
        if part is None or index >= len(self._shards[shard].names):
            return None
        try:
            return label(self._value(shard, index, part, ""), "")
        except BadSample:
            return None

    def _key(self, shard: int, index: int) -> str:
        path, names, problems = self._shards[shard].path, self._shards[shard].names, self._shards[shard].problems
        return f"{shown(path.name)}/{shown(names[index])}" if index < len(names) else problems[index - len(names)][0]

    def _value(self, shard: int, index: int, part: int, key: str) -> Any:
        """What a member holds: bytes, or the value of its key where it is JSON."""
        name, kind, choices = self._parts[part]
        at = (index * len(self._parts) + part) * FIELDS
        choice, offset, size = self._shards[shard].places[at : at + FIELDS]
        if choice == MISSING:
            raise BadSample(key, f"{name}: there is no member {self._parts[part]}")
        if kind == "text" and size > LONGEST:
            raise BadSample(key, f"{name} has {size} bytes, a text at most {LONGEST}")
        try:
            # Opened for each: an offset shared between worker processes would be moved under their feet.
            with self._shards[shard].path.open("rb") as file:
                file.seek(offset)
                data = file.read(size)
        except OSError as error:
            raise BadSample(key, f"{name}: the shard cannot be read ({error.strerror})") from None
        if len(data) < size:
            raise BadSample(key, f"{name}: the shard has become shorter")
        wanted = choices[choice][1]
        return data if wanted is None else _entry(data, wanted, key, name)

    def _side(self, part: Part, value: Any, key: str) -> Image | str:
        if part.kind == "text":
            return text(value, key, part.name)
        return decode(value, key, self._max_pixels)


def _parts(data: Data, sides: Sides) -> list[Part]:
    if sides.x == sides.y and (data.x is None or data.y is None):
        raise ValueError(f"both sides are {sides.x}s: name the extensions of each in the shards, as data.x and data.y")
    usual = {"image": IMAGES, "text": CAPTIONS}
    parts = [_part("x", sides.x, data.x or usual[sides.x]), _part("y", sides.y, data.y or usual[sides.y])]
    if data.negatives:
        parts.append(_part("negatives", "text", data.negatives))
    if data.label is not None:
        parts.append(_part("label", "text", data.label))
    return parts


def _part(name: str, kind: Kind, extensions: str) -> Part:
    choices = []
    for entry in filter(None, (entry.strip() for entry in extensions.split(";"))):
        extension, _, key = entry.partition(":")
        extension = extension.lstrip(".").lower()
        if (extension == "json") != bool(key) or (key and kind == "image"):
            raise ValueError(
                f'data.{name} is {extensions!r}: a JSON member needs the key of a text, as in "json:caption", others none'
            )
        choices.append((extension, key or None))
    if not choices:
        raise ValueError(f'data.{name} is {extensions!r}: must name extensions, as in "jpg;png"')
    return Part(name, kind, tuple(choices))


def _index(path: Path, parts: Sequence[Part]) -> Shard:
    """Every sample of a shard, by one walk over its headers."""
    shard = Shard(path, [], array("q"), [])
    preferred = [{extension: choice for choice, (extension, _) in reversed(list(enumerate(part.choices)))} for part in parts]
    empty = array("q", [MISSING, 0, 0] * len(parts))
    numbers: dict[str, int] = {}
    try:
        for name, offset, size in members(path):
            stem, extension = _split(name)
            if _leaves(name):
                shard.problems.append((f"{shown(path.name)}/{shown(name)}", "the member's name leaves its folder"))
                continue
            found = [(part, choices[extension]) for part, choices in enumerate(preferred) if extension in choices]
            if found and _taken(shard, numbers.get(stem), found, len(parts)):
                # Shards made of several parts may use a name twice: that begins another sample.
                del numbers[stem]
            for part, choice in found:
                if stem not in numbers:
                    numbers[stem] = len(shard.names)
                    shard.names.append(stem)
                    shard.places.extend(empty)
                at = (numbers[stem] * len(parts) + part) * FIELDS
                if not 0 <= shard.places[at] < choice:
                    shard.places[at : at + FIELDS] = array("q", [choice, offset, size])
    except BrokenArchive as broken:
        known = {extension for choices in preferred for extension in choices}
        return shard._replace(broken=_broken(path, broken, {*shard.names}, known))
    return shard


def _broken(path: Path, broken: BrokenArchive, read: set[str], known: set[str]) -> tuple[str, int]:
    """Why a shard ends before its time, with the share of it that is not read, and how many samples are known to be lost."""
    lost = {stem for stem, extension in map(_split, names_after(path, broken.position)) if extension in known and stem not in read}
    size = os.path.getsize(path)
    share = (size - broken.position) / size if size else 0.0
    return str(broken) + (f"; {share:.1%} of the file is not read" if share >= 0.001 else ""), len(lost)


def _leaves(name: str) -> bool:
    """Whether the name is absolute or goes up, on any system."""
    plain = name.replace("\\", "/")
    return plain.startswith("/") or plain[1:3] == ":/" or "/../" in f"/{plain}/"


def _taken(shard: Shard, number: int | None, found: Sequence[tuple[int, int]], parts: int) -> bool:
    """Whether the sample has such a member already."""
    return number is not None and any(shard.places[(number * parts + part) * FIELDS] == choice for part, choice in found)


def _split(name: str) -> tuple[str, str]:
    """Name and extension, apart at the first dot of the last part: "a.b/1.seg.png" is "a.b/1" and "seg.png"."""
    folder, slash, base = name.removeprefix("./").rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower()


def _entry(data: bytes, wanted: str, key: str, name: str) -> Any:
    try:
        entry = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadSample(key, f"{name}: the member is not valid JSON ({error})") from None
    if not isinstance(entry, dict):
        raise BadSample(key, f"{name}: the JSON member holds a {type(entry).__name__}, an object {{…}} is wanted")
    return entry.get(wanted)
