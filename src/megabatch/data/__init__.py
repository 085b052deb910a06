"""What is read: a source of pairs for every way in which they are stored, told by its name."""

from __future__ import annotations

import os
from pathlib import Path

from megabatch import packages
from megabatch.config import Data

from .paths import files_of
from .source import BadSample, Damage, Kind, Sample, Sides, Source

__all__ = ["BadSample", "Damage", "Kind", "Sample", "Sides", "Source", "open_source"]

GLYPHS = "glyphs"
SUFFIXES = {".tar": "webdataset", ".csv": "table", ".tsv": "table", ".parquet": "table", ".jsonl": "jsonl", ".ndjson": "jsonl"}
# Compressed shards are left to their reader, which says what to do about them.
PACKED = (".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
# What Hugging Face's `save_to_disk` leaves in a folder, for one split and for several.
SAVED = ("state.json", "dataset_dict.json")


def open_source(data: Data, source: str | None = None, *, x: Kind = "image", y: Kind = "text") -> Source:
    """The pairs of `data.source`, or of another `source` of that kind.

    x, y: what the towers take, and so whether a stored text is the text itself or the path of an image. ValueError where there are
    no pairs, or where they are stored in a way that is not known.
    """
    source = data.source if source is None else source
    kind = data.kind or _kind(source)
    if "image" in (x, y):
        packages.require(packages.IMAGES)
    try:
        opened = _open(kind, data, source, Sides(x, y))
    except ModuleNotFoundError as error:
        extra = "data" if error.name == "pyarrow" else "train"
        raise ValueError(f"data.source {source!r} needs {error.name}: pip install 'megabatch[{extra}]'") from error
    except OSError as error:
        raise ValueError(f"data.source is {source!r}: it cannot be read ({error})") from error
    if not any(opened.lengths):
        damaged = "".join(f" ({damage})" for damage in opened.damage[:1])
        raise ValueError(f"data.source is {source!r}: it holds no pair{damaged}; name one that does")
    return opened


def _kind(source: str) -> str:
    path = os.path.expanduser(source)
    if source == GLYPHS:
        return GLYPHS
    if os.path.isdir(path):
        return "datasets" if any(os.path.exists(os.path.join(path, name)) for name in SAVED) else "folder"
    suffix = os.path.splitext(path)[1].lower()
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    if path.lower().endswith(PACKED):
        return "webdataset"
    there = "" if os.path.exists(path) else "there is no such file or folder, and "
    raise ValueError(
        f"data.source is {source!r}: {there}its name does not tell how the pairs are stored; known are {GLYPHS!r}, a folder, and"
        f" files that end in {', '.join(SUFFIXES)}; or give data.kind"
    )


def _open(kind: str, data: Data, source: str, sides: Sides) -> Source:
    """Readers are imported where they are needed: not everything that they need has to be installed."""
    if kind == GLYPHS:
        from .glyphs import Glyphs

        if sides != Sides():
            raise ValueError(f"data.source is {GLYPHS!r}: x is an image and y a text, but the towers take {sides.x} and {sides.y}")
        return Glyphs()
    if kind in ("folder", "datasets"):
        return _open_folder(kind, data, Path(os.path.expanduser(source)), sides)
    files = files_of(source)
    if kind == "webdataset":
        from .webdataset import WebDataset

        return WebDataset(data, files, sides)
    if kind == "jsonl":
        from .jsonl import JsonLines

        return JsonLines(data, files, sides)
    from .table import Table

    return Table(data, files, sides)


def _open_folder(kind: str, data: Data, folder: Path, sides: Sides) -> Source:
    if not folder.is_dir():
        raise ValueError(f"data.source is {str(folder)!r}: there is no such folder; relative paths start at {os.getcwd()!r}")
    if kind == "folder":
        from .folder import Folder

        return Folder(data, folder, sides)
    from .datasets import SavedDataset

    return SavedDataset(data, folder, sides)
