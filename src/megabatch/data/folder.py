"""Pairs as files of a folder: images, and beside each a text file of the same name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megabatch.config import Data

from .decoding import IMAGE_SUFFIXES, read_image, read_text
from .paths import find_folder, path_inside, printable
from .source import ALL_PIXELS, BadSample, Damage, DataFormat, ImageRequests, Sample, Sides


class ImageFolder:
    """Every image is a sample, in one shard sorted by path; a/1.png belongs to a/1.txt. Hidden files are skipped.

    Links that lead out of the folder are not followed: a file behind one is a bad sample, a folder behind one is reported as
    damage. A subfolder that cannot be listed is an error.
    """

    def __init__(self, data: Data, folder: Path, sides: Sides) -> None:
        if sides != Sides("image", "text"):
            raise ValueError(
                f"data.source is {str(folder)!r}: a folder holds images (x) and texts (y); write a table for other pairs"
            )
        if data.label is not None or data.negatives:
            raise ValueError(
                f"data.source is {str(folder)!r}: a folder cannot hold data.label or data.negatives; write a table instead"
            )
        self._folder = folder.resolve()
        self._max_pixels = data.max_pixels
        self._text_suffixes = _suffixes(data.y or "txt;caption")
        image_suffixes = _suffixes(data.x or ";".join(IMAGE_SUFFIXES))
        self.damage: list[Damage] = []
        names = list(_file_names(self._folder, self.damage))
        self._images = sorted(name for name in names if name.lower().endswith(image_suffixes))
        if not self._images:
            raise ValueError(
                f"data.source is {str(folder)!r}: it holds no image ({', '.join(image_suffixes)}); name a folder of images,"
                f" or files, as in {str(folder / '*.tar')!r}" + (f" ({self.damage[0]})" if self.damage else "")
            )

    @property
    def lengths(self) -> Sequence[int]:
        return [len(self._images)]

    def read(self, shard: int, index: int, requests: ImageRequests = ALL_PIXELS) -> Sample:
        name = self._images[index]
        key, stem = printable(name), os.path.splitext(name)[0]
        texts = [stem + suffix for suffix in self._text_suffixes if os.path.lexists(self._folder / (stem + suffix))]
        if not texts:
            expected = " or ".join(printable(stem) + suffix for suffix in self._text_suffixes)
            raise BadSample(key, f"there is no text beside it ({expected})")
        caption = read_text(path_inside(self._folder, texts[0], key), key, "text")
        image = read_image(path_inside(self._folder, name, key), key, self._max_pixels, requests.x)
        return Sample(key, image, caption)

    def group(self, shard: int, index: int) -> str:
        return printable(os.path.splitext(self._images[index])[0])

    def label(self, shard: int, index: int) -> str | None:
        return None


def _suffixes(extensions: str) -> tuple[str, ...]:
    return tuple("." + extension.strip().lstrip(".").lower() for extension in extensions.split(";") if extension.strip())


def _file_names(folder: Path, damage: list[Damage]) -> Iterator[str]:
    """Yield every file below the folder, relative to it, with slashes. Linked folders outside of it are added to `damage`."""
    for where, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        base = Path(where).relative_to(folder)
        for name in folders:
            path = Path(where, name)
            # Files behind a link to a place inside the folder are found at that place.
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(folder):
                reason = f"is a link to a folder outside {str(folder)!r}, which is not read: copy it into the folder"
                damage.append(Damage(printable((base / name).as_posix()), reason, read=0))
        yield from ((base / name).as_posix() for name in names if not name.startswith("."))


def _refuse(error: OSError) -> None:
    """Raise ValueError for a folder that `os.walk` cannot list; by default it would be left out silently."""
    raise ValueError(
        f"data.source: the folder {error.filename!r} cannot be read ({error.strerror}), and its images would be left out;"
        " make it readable, or move it away"
    )


FOLDER = DataFormat(
    form="a folder of images and text files",
    open=lambda data, source, sides: ImageFolder(data, find_folder(source), sides),
    recognizes=lambda path: os.path.isdir(os.path.expanduser(path)),
)
