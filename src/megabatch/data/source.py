"""A source of pairs: shards of known length whose samples can be read one by one, in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from megabatch.config import Data
from megabatch.packages import Feature

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

Kind = Literal["image", "text"]
# sufficient(width, height): the size to which an image of this size, upright, may be reduced while it is decoded.
SufficientSize = Callable[[int, int], tuple[float, float]]


class Sides(NamedTuple):
    """The kinds of the two sides of a pair. The towers decide them: a column of texts may hold captions or paths of images."""

    x: Kind = "image"
    y: Kind = "text"


class EncodedJpeg(NamedTuple):
    """A JPEG that a CUDA device will decode; its header has been checked.

    width, height: upright. transposition: what makes the stored image upright, by Pillow's name. grey: whether it has no colours.
    """

    data: bytes
    width: int
    height: int
    transposition: str | None
    grey: bool


# An image, decoded by Pillow or to a uint8 tensor (height, width, channels), or left as it is stored.
LoadedImage: TypeAlias = "Image | Tensor | EncodedJpeg"


class ImageRequest(NamedTuple):
    """The forms in which an image may be returned besides all of its pixels, decoded by Pillow.

    sufficient: the size to which it may be reduced while it is decoded, None for none.
    tensor: whether it may be a tensor, to which some JPEGs are decoded faster.
    encoded: whether JPEGs that a CUDA device can decode are left as they are stored.
    """

    sufficient: SufficientSize | None = None
    tensor: bool = False
    encoded: bool = False


class ImageRequests(NamedTuple):
    """How the images of each side of a sample may be returned."""

    x: ImageRequest = ImageRequest()
    y: ImageRequest = ImageRequest()


ALL_PIXELS = ImageRequests()


class Sample(NamedTuple):
    """One pair as it is stored, with images in a form that was requested.

    key: names the sample in logs and messages: file and line, shard and member, character and style.
    negatives: further texts that do not match x.
    label: the class, for a run that classifies.
    x_image, y_image: the path or the stored bytes of an image that other samples may have too; None for texts and where every
        sample has an image of its own.
    """

    key: str
    x: LoadedImage | str
    y: LoadedImage | str
    negatives: tuple[str, ...] = ()
    label: str | None = None
    x_image: Path | bytes | None = None
    y_image: Path | bytes | None = None


class BadSample(ValueError):
    """A sample that cannot be used, and the reason: it is skipped, counted and named in the log."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


class Damage(NamedTuple):
    """A file of a source, or a part of one, that cannot be read, found when the source was opened.

    file: the name of the file. reason: what is wrong with it, and where.
    read: how many samples of the file can be read.
    lost: how many samples are known to be lost; there may be more. None if their number is unknown.
    usual: the median number of samples in the undamaged files of the source, from which the loss can be estimated. None if unknown.
    """

    file: str
    reason: str
    read: int
    lost: int | None = None
    usual: int | None = None

    @property
    def counted(self) -> int:
        """The number of samples that the damage counts for in `data.max_bad`: those known to be lost, or 1."""
        return 1 if self.lost is None else self.lost

    def __str__(self) -> str:
        lost = "an unknown number of samples is lost" if self.lost is None else f"at least {self.lost:,} are lost"
        usual = "" if self.usual is None else f" (the undamaged files hold {self.usual:,})"
        return f"{self.file}: {self.reason}; {self.read:,} samples can be read, {lost}{usual}"


class Source(Protocol):
    """Pairs in shards. Must be picklable, because worker processes read from it too.

    lengths: the number of samples of each shard. They are known from the start, so that order and position are arithmetic.
    damage: the files that cannot be read completely. Samples that they lost are not counted in `lengths`.
    """

    @property
    def lengths(self) -> Sequence[int]: ...

    @property
    def damage(self) -> Sequence[Damage]: ...

    def read(self, shard: int, index: int, requests: ImageRequests = ALL_PIXELS) -> Sample:
        """Return the sample. Raise BadSample if it cannot be used."""
        ...

    def group(self, shard: int, index: int) -> str:
        """Return what the sample shares with others that must be held out together with it (its image, its character).

        Cheap: nothing is decoded.
        """
        ...

    def label(self, shard: int, index: int) -> str | None:
        """Return the sample's class, if it has one. Cheap as well."""
        ...


@dataclass(frozen=True)
class DataFormat:
    """One way in which pairs are stored.

    form: how such a source is named, in errors.
    open: opens a source of this format.
    recognizes: whether a path, or a name that is no path, is a source of this format.
    needs: the optional packages that reading it takes.
    """

    form: str
    open: Callable[[Data, str, Sides], Source]
    recognizes: Callable[[str], bool]
    needs: Feature | None = None
