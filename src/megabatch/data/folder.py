"""Pairs as files of a folder: images, and beside each a text file of the same name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megabatch.config import Data

from .images import SUFFIXES, decode
from .paths import inside, shown
from .source import BadSample, Damage, Sample, Sides
from .texts import text_of


class Folder:
    """Every image is a sample, in one shard sorted by path; a/1.png goes with a/1.txt. Hidden files are passed over.

    Links that lead out of the folder are not followed: a file behind one is a bad sample, a folder behind one is reported as
    damage. A subfolder that cannot be listed is an error.
    """

    def __init__(self, data: Data, folder: Path, sides: Sides) -> None:
        if sides != Sides("image", "text"):
            raise ValueError(f"data.source is {str(folder)!r}: a folder holds images (x) and texts (y); for others, write a table")
        if data.label is not None or data.negatives:
            raise ValueError(f"data.source is {str(folder)!r}: a folder has no data.label and no data.negatives; write a table")
        self._folder = folder.resolve()
        self._max_pixels = data.max_pixels
        self._texts = _suffixes(data.y or "txt;caption")
        images = _suffixes(data.x or ";".join(SUFFIXES))
        self.damage: list[Damage] = []
        names = list(_names(self._folder, self.damage))
        self._images = sorted(name for name in names if name.lower().endswith(images))
        if not self._images:
            raise ValueError(
                f"data.source is {str(folder)!r}: it holds no image ({', '.join(images)}); name a folder of images,"
                f" or files, as in {str(folder / '*.tar')!r}" + (f" ({self.damage[0]})" if self.damage else "")
            )

    @property
    def lengths(self) -> Sequence[int]:
        return [len(self._images)]

    def read(self, shard: int, index: int) -> Sample:
        name = self._images[index]
        key, stem = shown(name), os.path.splitext(name)[0]
        there = [stem + suffix for suffix in self._texts if os.path.lexists(self._folder / (stem + suffix))]
        if not there:
            raise BadSample(key, f"there is no text beside it ({' or '.join(shown(stem) + suffix for suffix in self._texts)})")
        caption = text_of(inside(self._folder, there[0], key), key, "text")
        return Sample(key, decode(inside(self._folder, name, key), key, self._max_pixels), caption)

    def group(self, shard: int, index: int) -> str:
        return shown(os.path.splitext(self._images[index])[0])

    def label(self, shard: int, index: int) -> str | None:
        return None


def _suffixes(extensions: str) -> tuple[str, ...]:
    return tuple("." + extension.strip().lstrip(".").lower() for extension in extensions.split(";") if extension.strip())


def _names(folder: Path, damage: list[Damage]) -> Iterator[str]:
    """Every file below the folder, relative to it, with slashes. Linked folders outside of it are added to `damage`."""
    for where, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        base = Path(where).relative_to(folder)
        for name in folders:
            path = Path(where, name)
            # What a link to a place inside the folder holds is found at that place.
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(folder):
                reason = f"is a link to a folder outside {str(folder)!r}, which is not read: copy it into the folder"
                damage.append(Damage(shown((base / name).as_posix()), reason, read=0))
        yield from ((base / name).as_posix() for name in names if not name.startswith("."))


def _refuse(error: OSError) -> None:
    """Raise ValueError for a folder that `os.walk` cannot list; by default it would be left out without a word."""
    raise ValueError(
        f"data.source: the folder {error.filename!r} cannot be read ({error.strerror}), and its images would be left out;"
        " make it readable, or move it away"
    )
