"""Which sample is next: arithmetic on positions in an endless stream, so that a run remembers one number and nothing else."""

from __future__ import annotations

import functools
import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch


def stable_hash(*parts: str | int) -> int:
    """63 bits of a hash that is the same in every process, on every machine, in every version of Python.

    >>> stable_hash("a caption")
    6990820347259226789
    """
    # Texts from files may hold lone surrogates, which plain UTF-8 refuses.
    text = "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class InOrder:
    """Samples as they are stored, shard after shard, and again from the beginning: for evaluation."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = _checked(lengths)
        self.total = sum(self.lengths)
        self._ends = array("q", accumulate(self.lengths))

    def epoch(self, position: int) -> int:
        """How many times all samples were seen before this position."""
        return position // self.total

    def at(self, position: int) -> tuple[int, int]:
        """The shard, and the index in it, of the sample at this position."""
        assert position >= 0
        return _locate(position % self.total, range(len(self.lengths)), self._ends, self.lengths)


class Order:
    """Samples shuffled anew each epoch: a pure function of lengths, window, seed and position.

    An epoch goes through the shards in a shuffled sequence, and shuffles samples within consecutive windows of that sequence, so
    that a reader meets few shards at a time. Every epoch is a permutation of all samples. Memory: two windows, two sequences of
    shards.

    lengths: samples of each shard. window: samples shuffled together; 1 only shuffles shards, the total shuffles everything.

    >>> order = Order([2, 3], window=5, seed=0)
    >>> sorted(order.at(position) for position in range(order.total))
    [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    """

    def __init__(self, lengths: Sequence[int], window: int, seed: int) -> None:
        if window < 1:
            raise ValueError(f"window is {window}: must be at least 1, which shuffles shards and not the samples within them")
        self.lengths = _checked(lengths)
        self.total = sum(self.lengths)
        self.window = min(window, self.total)
        self.seed = seed
        # Batches are runs of positions, which straddle two windows, or two epochs, at a time.
        self._shuffled_window = functools.lru_cache(maxsize=2)(self._shuffle_window)
        self._shuffled_shards = functools.lru_cache(maxsize=2)(self._shuffle_shards)

    def __reduce__(self) -> tuple[type[Order], tuple[Sequence[int], int, int]]:
        # What is cached can be computed again, and does not travel between processes.
        return Order, (self.lengths, self.window, self.seed)

    def epoch(self, position: int) -> int:
        """How many times all samples were seen before this position."""
        return position // self.total

    def at(self, position: int) -> tuple[int, int]:
        """The shard, and the index in it, of the sample at this position."""
        assert position >= 0
        epoch, offset = divmod(position, self.total)
        number, place = divmod(offset, self.window)
        shards, ends = self._shuffled_shards(epoch)
        return _locate(number * self.window + self._shuffled_window(epoch, number)[place], shards, ends, self.lengths)

    def _shuffle_window(self, epoch: int, number: int) -> array[int]:
        size = min(self.window, self.total - number * self.window)
        if size == 1:
            return array("q", [0])
        return _permutation(size, stable_hash("window", self.seed, epoch, number))

    def _shuffle_shards(self, epoch: int) -> tuple[array[int], array[int]]:
        shards = _permutation(len(self.lengths), stable_hash("shards", self.seed, epoch))
        return shards, array("q", accumulate(self.lengths[shard] for shard in shards))


def _checked(lengths: Sequence[int]) -> array[int]:
    wrong = next((shard for shard, length in enumerate(lengths) if length < 0), None)
    if wrong is not None:
        raise ValueError(f"shard {wrong} has length {lengths[wrong]}: a number of samples must not be negative")
    if not sum(lengths):
        raise ValueError(
            f"there are 0 samples in {len(lengths)} shards: at least one is needed; check the source and what is held out"
        )
    return array("q", lengths)


def _locate(offset: int, shards: Sequence[int], ends: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    # The first end beyond the offset; a shard without samples ends where the one before it does, and is never met.
    slot = bisect_right(ends, offset)
    shard = shards[slot]
    return shard, offset - ends[slot] + lengths[shard]


def _permutation(size: int, seed: int) -> array[int]:
    """0 … size-1, shuffled. An array: as compact as a tensor, and its items are read many times faster."""
    numbers = array("q", bytes(8 * size))
    generator = torch.Generator().manual_seed(seed)
    torch.randperm(size, generator=generator, out=torch.frombuffer(numbers, dtype=torch.int64))
    return numbers
