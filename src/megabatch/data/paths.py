"""Which files a source names, and that none of them lies outside its folder."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

from .source import BadSample

BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\d+)\.\.(\d+)")


def files_of(source: str) -> list[Path]:
    """The files that a path, a glob or braces name, in that order; files of one glob sorted by name.

    "pairs-{000..012}.tar" and "{train,more}/*.tar" are such names. A file whose own name holds such signs is found too.
    """
    source = os.path.expanduser(source)
    found: list[str] = []
    # A file of that very name comes first.
    for name in [source] if os.path.exists(source) else spread(source):
        matches = _matches(name, source) if glob.has_magic(name) and not os.path.exists(name) else [name]
        # Braces may name thousands: the first that is missing ends the search.
        missing = next((match for match in matches or [name] if not os.path.isfile(match)), None)
        if missing is not None:
            raise ValueError(f"data.source is {source!r}: {missing!r} {_why_no_file(missing)}")
        found += matches
    return [Path(name) for name in found]


def _matches(pattern: str, source: str) -> list[str]:
    """The paths that a glob matches, sorted. ValueError where it would have to look into a folder that cannot be listed: `glob`
    leaves such a folder out without a word."""
    parts = Path(pattern).parts
    for number, part in enumerate(parts):
        if not glob.has_magic(part):
            continue
        # "**" lists all folders below as well.
        parents = os.path.join("", *parts[:number], "**" if part == "**" else "", "")
        for folder in glob.glob(parents or os.curdir, recursive=True) if glob.has_magic(parents) else [parents or os.curdir]:
            try:
                if os.path.isdir(folder):
                    os.scandir(folder).close()
            except OSError as error:
                raise ValueError(
                    f"data.source is {source!r}: the folder {folder!r} cannot be read ({error.strerror}), and its files would be"
                    " left out; make it readable, or name the files without it"
                ) from None
    return sorted(glob.glob(pattern, recursive=True))


def _why_no_file(path: str) -> str:
    try:
        os.stat(path)
    except OSError as error:
        # No such file is the usual reason, and the message below says it.
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return f"cannot be read ({error.strerror})"
    except ValueError as error:
        return f"is no name of a file ({error})"
    return f"is no file; relative paths start at {os.getcwd()!r}"


def spread(name: str) -> Iterator[str]:
    """Every name that braces stand for; {000..012} keeps its zeros.

    >>> list(spread("a-{08..10}.{tar,zip}"))[:3]
    ['a-08.tar', 'a-08.zip', 'a-09.tar']
    """
    # Without a comma or a range, braces are part of the name.
    group = next((match for match in BRACES.finditer(name) if "," in match[1] or RANGE.fullmatch(match[1])), None)
    if group is None:
        yield name
        return
    for choice in _choices(group[1]):
        yield from spread(name[: group.start()] + choice + name[group.end() :])


def _choices(inside: str) -> Iterator[str]:
    ends = RANGE.fullmatch(inside)
    if ends is None:
        yield from inside.split(",")
        return
    first, last = int(ends[1]), int(ends[2])
    width = len(ends[1]) if ends[1].startswith("0") else 0
    for number in range(first, last + 1) if first <= last else range(first, last - 1, -1):
        yield f"{number:0{width}d}"


def inside(folder: Path, name: str, key: str) -> Path:
    """The file `name` of the folder, symbolic links followed; BadSample where it lies elsewhere. `folder` is resolved already."""
    if "://" in name:
        raise BadSample(key, f"{name[:200]!r} is an address, not a file: download it into {str(folder)!r}")
    if not name.strip() or "\0" in name:
        raise BadSample(key, f"{name[:200]!r} is not the name of a file")
    path = Path(os.path.realpath(folder / name))
    if not path.is_relative_to(folder):
        raise BadSample(key, f"{name[:200]!r} lies outside {str(folder)!r}, which is not read: copy it into the folder")
    return path


def shown(name: str) -> str:
    """A name from outside as one line of plain text: what is not printable (control codes, bytes that are no UTF-8) is escaped."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)
