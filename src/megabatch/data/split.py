"""What is kept from training to be evaluated on: whole groups, chosen by their names alone."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from .sampler import stable_hash
from .source import Damage, Sample, Source


class Part:
    """Some samples of a source, as a source with the same shards; a shard may hold none of them.

    indices: for each shard, which of its samples.
    """

    def __init__(self, source: Source, indices: Sequence[array[int]]) -> None:
        self.source = source
        self.indices = indices
        self.lengths = [len(shard) for shard in indices]

    @property
    def damage(self) -> Sequence[Damage]:
        """The damage of the whole source: which part the lost samples would have belonged to is unknown."""
        return self.source.damage

    def read(self, shard: int, index: int) -> Sample:
        return self.source.read(shard, self.indices[shard][index])

    def group(self, shard: int, index: int) -> str:
        return self.source.group(shard, self.indices[shard][index])

    def label(self, shard: int, index: int) -> str | None:
        return self.source.label(shard, self.indices[shard][index])


def split(source: Source, fraction: float) -> tuple[Source, Source]:
    """The training part and the held-out part, which takes about this fraction of the groups.

    A group is held out because of a hash of its name: in every process, with every seed, whatever else the source holds. So a
    source of few groups may have nothing held out; the training part is never empty.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"the held-out fraction is {fraction}: must lie in [0, 1); 0 holds nothing out")
    limit = fraction * 2**63
    training, held_out = [array("q") for _ in source.lengths], [array("q") for _ in source.lengths]
    for shard, length in enumerate(source.lengths):
        for index in range(length):
            part = held_out if limit and stable_hash(source.group(shard, index)) < limit else training
            part[shard].append(index)
    if not any(training):
        raise ValueError(
            f"nothing is left to train on: of {sum(map(len, held_out))} samples all are held out by the fraction {fraction}; "
            "lower it, or check that the source has samples in more than one group"
        )
    return Part(source, training), Part(source, held_out)
