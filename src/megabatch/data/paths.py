"""Find the files that a source names, and make sure that none of them lies outside its folder."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from .source import BadSample

BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\d+)\.\.(\d+)")


def find_files(source: str) -> list[Path]:
    """Return the files that a path, a glob or braces name, in that order; files of one glob sorted by name.

    "pairs-{000..012}.tar" and "{train,more}/*.tar" are such names. A file whose own name contains such characters is found too.
    """
    source = os.path.expanduser(source)
    files: list[str] = []
    # A file of exactly that name takes precedence.
    for name in [source] if os.path.exists(source) else expand_braces(source):
        matches = _glob(name, source) if glob.has_magic(name) and not os.path.exists(name) else [name]
        # Braces may name thousands of files: the first missing one ends the search.
        missing = next((match for match in matches or [name] if not os.path.isfile(match)), None)
        if missing is not None:
            raise ValueError(f"data.source is {source!r}: {missing!r} {_why_missing(missing)}")
        files += matches
    return [Path(name) for name in files]


def find_folder(source: str) -> Path:
    """Return the folder that a source names. ValueError if there is none."""
    folder = Path(os.path.expanduser(source))
    if not folder.is_dir():
        raise ValueError(f"data.source is {str(folder)!r}: there is no such folder; relative paths start at {os.getcwd()!r}")
    return folder


def has_suffix(*suffixes: str) -> Callable[[str], bool]:
    """Return a function that tells whether a path ends in one of these suffixes and is not a folder.

    >>> has_suffix(".csv", ".tsv")("pairs.CSV")
    True
    """

    def matches(path: str) -> bool:
        path = os.path.expanduser(path)
        # A file called ".csv" has no suffix.
        name = os.path.basename(path).lower()
        return name.endswith(suffixes) and name not in suffixes and not os.path.isdir(path)

    return matches


def _glob(pattern: str, source: str) -> list[str]:
    """Return the paths that a glob matches, sorted.

    ValueError if it would have to look into a folder that cannot be listed: `glob` leaves such a folder out silently.
    """
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


def _why_missing(path: str) -> str:
    try:
        os.stat(path)
    except OSError as error:
        # A missing file is the usual reason, and the message below covers it.
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return f"cannot be read ({error.strerror})"
    except ValueError as error:
        return f"is not the name of a file ({error})"
    return f"is not a file; relative paths start at {os.getcwd()!r}"


def expand_braces(name: str) -> Iterator[str]:
    """Yield every name that braces stand for; {000..012} keeps its zeros.

    >>> list(expand_braces("a-{08..10}.{tar,zip}"))[:3]
    ['a-08.tar', 'a-08.zip', 'a-09.tar']
    """
    # Without a comma or a range, braces are part of the name.
    group = next((match for match in BRACES.finditer(name) if "," in match[1] or RANGE.fullmatch(match[1])), None)
    if group is None:
        yield name
        return
    for choice in _choices(group[1]):
        yield from expand_braces(name[: group.start()] + choice + name[group.end() :])


def _choices(inside: str) -> Iterator[str]:
    ends = RANGE.fullmatch(inside)
    if ends is None:
        yield from inside.split(",")
        return
    first, last = int(ends[1]), int(ends[2])
    width = len(ends[1]) if ends[1].startswith("0") else 0
    for number in range(first, last + 1) if first <= last else range(first, last - 1, -1):
        yield f"{number:0{width}d}"


def path_inside(folder: Path, name: str, key: str) -> Path:
    """Return the file `name` of the folder, symbolic links followed. BadSample if it lies elsewhere. `folder` must be resolved."""
    if "://" in name:
        raise BadSample(key, f"{name[:200]!r} is a URL, not a file: download it into {str(folder)!r}")
    if not name.strip() or "\0" in name:
        raise BadSample(key, f"{name[:200]!r} is not the name of a file")
    path = Path(os.path.realpath(folder / name))
    if not path.is_relative_to(folder):
        raise BadSample(key, f"{name[:200]!r} lies outside {str(folder)!r}, which is not read: copy it into the folder")
    return path


def printable(name: str) -> str:
    """Return an untrusted name as one line of plain text: control codes and bytes that are not UTF-8 are escaped."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)
