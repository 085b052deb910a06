"""What a source of pairs is: shards of known length whose samples can be read one by one, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from PIL.Image import Image

Kind = Literal["image", "text"]


class Sides(NamedTuple):
    """What the two sides of a pair are, which its towers decide: a column of texts may hold captions, or paths of images."""

    x: Kind = "image"
    y: Kind = "text"


class Sample(NamedTuple):
    """One pair as it was stored: images decoded, texts as they are.

    key: names the sample in logs and messages: file and line, shard and member, character and style.
    negatives: further texts that are wrong for x.
    label: its class, for a run that classifies.
    """

    key: str
    x: Image | str
    y: Image | str
    negatives: tuple[str, ...] = ()
    label: str | None = None


class BadSample(ValueError):
    """A sample that cannot be used, and why: it is skipped, counted and named in the log."""

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
    """Pairs in shards. Can be pickled, since worker processes read from it too.

    lengths: how many samples each shard holds; known from the beginning, so that order and position are arithmetic.
    damage: which files cannot be read completely. What they lost is not part of `lengths`.
    """

    @property
    def lengths(self) -> Sequence[int]: ...

    @property
    def damage(self) -> Sequence[Damage]: ...

    def read(self, shard: int, index: int) -> Sample:
        """The sample, or BadSample."""
        ...

    def group(self, shard: int, index: int) -> str:
        """What the sample has to share with others to be held out together with them (its image, its character).

        Cheap: nothing is decoded.
        """
        ...

    def label(self, shard: int, index: int) -> str | None:
        """The sample's class, if it has one. Cheap as well."""
        ...
