"""Pairs to train on: files → source → sampler → loader → collate.

`FORMATS` holds one record for each way in which pairs can be stored. A new one is a file with its record and a line here.
"""

from __future__ import annotations

import os

from megabatch import packages
from megabatch.config import Data

from .arrow import SAVED_DATASET
from .folder import FOLDER
from .glyphs import GLYPHS
from .jsonl import JSON_LINES
from .source import BadSample, Damage, DataFormat, Kind, Sample, Sides, Source
from .table import TABLE
from .webdataset import WEBDATASET

__all__ = ["FORMATS", "BadSample", "Damage", "DataFormat", "Kind", "Sample", "Sides", "Source", "open_source"]

# By the value of data.kind. The first format that recognizes a source reads it.
FORMATS = {
    "glyphs": GLYPHS,
    "datasets": SAVED_DATASET,
    "folder": FOLDER,
    "webdataset": WEBDATASET,
    "table": TABLE,
    "jsonl": JSON_LINES,
}


def open_source(data: Data, source: str | None = None, *, x: Kind = "image", y: Kind = "text") -> Source:
    """Return the pairs of `data.source`, or of another `source` with the same settings.

    x, y: what the towers take. They decide whether a stored text is the text itself or the path of an image. ValueError if there
    are no pairs, or if their format is unknown.
    """
    source = data.source if source is None else source
    data_format = _find_format(data.kind, source)
    if "image" in (x, y):
        packages.require(packages.IMAGES)
    if data_format.needs is not None:
        packages.require(data_format.needs)
    try:
        opened = data_format.open(data, source, Sides(x, y))
    except OSError as error:
        raise ValueError(f"data.source is {source!r}: it cannot be read ({error})") from error
    if not any(opened.lengths):
        damaged = "".join(f" ({damage})" for damage in opened.damage[:1])
        raise ValueError(f"data.source is {source!r}: it holds no pair{damaged}; name a source that does")
    return opened


def _find_format(kind: str | None, source: str) -> DataFormat:
    if kind is not None:
        if kind not in FORMATS:
            raise ValueError(f"data.kind is {kind!r}: must be one of {', '.join(map(repr, FORMATS))}")
        return FORMATS[kind]
    data_format = next((data_format for data_format in FORMATS.values() if data_format.recognizes(source)), None)
    if data_format is None:
        missing = "" if os.path.exists(os.path.expanduser(source)) else "there is no such file or folder, and "
        forms = ", ".join(data_format.form for data_format in FORMATS.values())
        raise ValueError(
            f"data.source is {source!r}: {missing}its name does not show how the pairs are stored; sources are {forms};"
            " or give data.kind"
        )
    return data_format
