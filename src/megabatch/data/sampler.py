"""Which samples are trained on, and in which order.

The order is arithmetic on positions in an endless stream, so that one number is enough to resume a run exactly.
"""

from __future__ import annotations

import functools
import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

from .source import ALL_PIXELS, Damage, ImageRequests, Sample, Source


def stable_hash(*parts: str | int) -> int:
    """Return 63 bits of a hash that is the same in every process, on every machine, in every version of Python.

    >>> stable_hash("a caption")
    6990820347259226789
    """
    # Texts from files may hold lone surrogates, which strict UTF-8 refuses.
    text = "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class InOrder:
    """Samples in the order in which they are stored, shard after shard, then again from the start: for evaluation."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = _check_lengths(lengths)
        self.total = sum(self.lengths)
        self._ends = array("q", accumulate(self.lengths))

    def epoch(self, position: int) -> int:
        """Return how many times all samples were seen before this position."""
        return position // self.total

    def at(self, position: int) -> tuple[int, int]:
        """Return the shard, and the index in it, of the sample at this position."""
        assert position >= 0
        return _locate(position % self.total, range(len(self.lengths)), self._ends, self.lengths)


class Order:
    """Samples shuffled anew in each epoch: a pure function of lengths, window, seed and position.

    An epoch shuffles the shards, and shuffles the samples within consecutive windows of the resulting sequence, so that a reader
    needs few shards at a time. Every epoch is a permutation of all samples. Memory: two windows and two permutations of the shards.

    lengths: samples of each shard. window: samples shuffled together; 1 only shuffles shards, the total shuffles everything.

    >>> order = Order([2, 3], window=5, seed=0)
    >>> sorted(order.at(position) for position in range(order.total))
    [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    """

    def __init__(self, lengths: Sequence[int], window: int, seed: int) -> None:
        if window < 1:
            raise ValueError(f"window is {window}: must be at least 1, which shuffles shards and not the samples within them")
        self.lengths = _check_lengths(lengths)
        self.total = sum(self.lengths)
        self.window = min(window, self.total)
        self.seed = seed
        # A batch is a range of positions, which can straddle two windows or two epochs.
        self._shuffled_window = functools.lru_cache(maxsize=2)(self._shuffle_window)
        self._shuffled_shards = functools.lru_cache(maxsize=2)(self._shuffle_shards)

    def __reduce__(self) -> tuple[type[Order], tuple[Sequence[int], int, int]]:
        # The caches are not pickled: they can be computed again.
        return Order, (self.lengths, self.window, self.seed)

    def epoch(self, position: int) -> int:
        """Return how many times all samples were seen before this position."""
        return position // self.total

    def at(self, position: int) -> tuple[int, int]:
        """Return the shard, and the index in it, of the sample at this position."""
        assert position >= 0
        epoch, offset = divmod(position, self.total)
        number, index = divmod(offset, self.window)
        shards, ends = self._shuffled_shards(epoch)
        return _locate(number * self.window + self._shuffled_window(epoch, number)[index], shards, ends, self.lengths)

    def _shuffle_window(self, epoch: int, number: int) -> array[int]:
        size = min(self.window, self.total - number * self.window)
        if size == 1:
            return array("q", [0])
        return _permutation(size, stable_hash("window", self.seed, epoch, number))

    def _shuffle_shards(self, epoch: int) -> tuple[array[int], array[int]]:
        shards = _permutation(len(self.lengths), stable_hash("shards", self.seed, epoch))
        return shards, array("q", accumulate(self.lengths[shard] for shard in shards))


class Subset:
    """Some samples of a source, as a source with the same shards; a shard may be empty.

    indices: for each shard, the indices of its samples in the whole source.
    """

    def __init__(self, source: Source, indices: Sequence[array[int]]) -> None:
        self.source = source
        self.indices = indices
        self.lengths = [len(shard) for shard in indices]

    @property
    def damage(self) -> Sequence[Damage]:
        """The damage of the whole source: which subset the lost samples would have belonged to is unknown."""
        return self.source.damage

    def read(self, shard: int, index: int, requests: ImageRequests = ALL_PIXELS) -> Sample:
        return self.source.read(shard, self.indices[shard][index], requests)

    def group(self, shard: int, index: int) -> str:
        return self.source.group(shard, self.indices[shard][index])

    def label(self, shard: int, index: int) -> str | None:
        return self.source.label(shard, self.indices[shard][index])


def split(source: Source, fraction: float) -> tuple[Source, Source]:
    """Return the training samples and the held-out samples, which are about this fraction of the groups.

    A hash of its name decides whether a group is held out: in every process, with every seed, whatever else the source holds. So a
    source of few groups may have nothing held out; the training samples are never empty.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"the held-out fraction is {fraction}: must be in [0, 1); 0 holds nothing out")
    limit = fraction * 2**63
    training, held_out = [array("q") for _ in source.lengths], [array("q") for _ in source.lengths]
    for shard, length in enumerate(source.lengths):
        for index in range(length):
            indices = held_out if limit and stable_hash(source.group(shard, index)) < limit else training
            indices[shard].append(index)
    if not any(training):
        raise ValueError(
            f"nothing is left to train on: all {sum(map(len, held_out))} samples are held out by the fraction {fraction}; "
            "lower it, or check that the source has samples in more than one group"
        )
    return Subset(source, training), Subset(source, held_out)


def _check_lengths(lengths: Sequence[int]) -> array[int]:
    negative = next((shard for shard, length in enumerate(lengths) if length < 0), None)
    if negative is not None:
        raise ValueError(f"shard {negative} has length {lengths[negative]}: a number of samples must not be negative")
    if not sum(lengths):
        raise ValueError(
            f"there are 0 samples in {len(lengths)} shards: at least one is needed; check the source and the held-out fraction"
        )
    return array("q", lengths)


def _locate(offset: int, shards: Sequence[int], ends: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    # The first end beyond the offset. An empty shard ends where the one before it does, and is never chosen.
    slot = bisect_right(ends, offset)
    shard = shards[slot]
    return shard, offset - ends[slot] + lengths[shard]


def _permutation(size: int, seed: int) -> array[int]:
    """Return 0 … size-1, shuffled, as an array: as compact as a tensor, and its items are read many times faster."""
    numbers = array("q", bytes(8 * size))
    generator = torch.Generator().manual_seed(seed)
    torch.randperm(size, generator=generator, out=torch.frombuffer(numbers, dtype=torch.int64))
    return numbers
