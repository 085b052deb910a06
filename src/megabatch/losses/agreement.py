"""What the ranks of a group must agree on before they exchange embeddings, and the error that all of them raise if they do not.

One exchange of a few integers, of the same size whatever a rank passes, compares a digest of what was asked for. Only if it shows a
difference does a second exchange carry the values themselves, so that every rank can name them in the same sentence.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist

from ..ring import Ring

# Room for an error message, or for all facts of a rank in JSON; longer messages are cut, and so is a fact of more characters.
TEXT_BYTES, FACT_CHARACTERS = 4096, 100
# Ranks, and different values of them, that a message lists at most.
LISTED = 8
# Learnable scalars are equal up to rounding: exp() of the same parameter may differ between devices by a few ulp of fp32.
SCALAR_TOLERANCE = 1e-5
# Sent in the place of a digest, which is never negative, by a rank whose input is wrong.
PROBLEM = -1

_groups: WeakSet[dist.ProcessGroup] = WeakSet()
_alone = False


class Shard(NamedTuple):
    """What one rank brings to a call of a loss.

    rows, documents: the rows of its x and of its y.
    wants: which of x, y and the scalars need a gradient; inference: which of them were made in inference mode.
    values: of the scalars; None for one that was not read, since reading it would wait for the device.
    """

    rows: int
    documents: int
    wants: Sequence[bool]
    inference: Sequence[bool]
    values: Sequence[float | None]


def is_first_call(ring: Ring) -> bool:
    """Return whether no loss was called before on the ring's group (by a process alone: in this process), and remember this call.

    All ranks get the same answer, because every call of a loss on a group is a call on all of its ranks.
    """
    global _alone
    if ring.group is None:
        first, _alone = not _alone, True
        return first
    first = ring.group not in _groups
    _groups.add(ring.group)
    return first


def agree(ring: Ring, device: torch.device, shard: Shard, facts: dict[str, object], problem: ValueError | None) -> list[Shard]:
    """Return every rank's shard. Raise the same ValueError on every rank if a rank has a problem or if the ranks' facts differ."""
    every = [_decode(numbers, shard) for numbers in ring.gather(_encode(shard, facts, problem), device)]
    digests = {digest for digest, _ in every}
    if len(digests) > 1 or PROBLEM in digests:
        raise ValueError(_explain(ring, device, facts, problem)) from problem
    return [shard for _, shard in every]


def check_values(names: Iterable[str], shards: Sequence[Shard]) -> None:
    """Raise a ValueError if the ranks passed different values of a scalar, among those that were read."""
    for index, name in enumerate(names):
        values = {rank: value for rank, shard in enumerate(shards) if (value := shard.values[index]) is not None}
        first = next(iter(values.values()), 0.0)
        if any(not _close(value, first) for value in values.values()):
            raise ValueError(
                f"{_by_rank(name, values)}: it must have one value on every rank, since all ranks compute one loss; let DDP or "
                "FSDP hold a learnable one, or broadcast it before the first step"
            )


def _close(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=SCALAR_TOLERANCE)


def _encode(shard: Shard, facts: dict[str, object], problem: ValueError | None) -> list[int]:
    # Two scalars and four tensors at most: a loss with fewer sends as many numbers, so that different losses can meet here.
    values = [*shard.values, None, None][:2]
    bits = [0 if value is None else struct.unpack("q", struct.pack("d", value))[0] for value in values]
    digest = PROBLEM if problem is not None else zlib.crc32(_text(facts))
    masks = [sum(flag << bit for bit, flag in enumerate(flags)) for flags in (shard.wants, shard.inference)]
    return [digest, shard.rows, shard.documents, *masks, *(value is not None for value in values), *bits]


def _decode(numbers: Sequence[int], mine: Shard) -> tuple[int, Shard]:
    digest, rows, documents, *masks = numbers[:5]
    scalars = numbers[5:]
    values = [
        struct.unpack("d", struct.pack("q", bits))[0] if known else None
        for known, bits in zip(scalars[:2], scalars[2:], strict=True)
    ]
    wants, inference = ([bool(mask >> bit & 1) for bit in range(len(mine.wants))] for mask in masks)
    return digest, Shard(rows, documents, wants, inference, values[: len(mine.values)])


def _text(facts: dict[str, object]) -> bytes:
    return json.dumps({name: str(value)[:FACT_CHARACTERS] for name, value in facts.items()}).encode()


def _explain(ring: Ring, device: torch.device, facts: dict[str, object], problem: ValueError | None) -> str:
    """Return the sentence that every rank raises: the ranks' own errors, or the facts in which they differ."""
    mine = b"!" + str(problem).encode() if problem is not None else b"=" + _text(facts)
    padded = mine[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    gathered = ring.gather(struct.unpack(f"{TEXT_BYTES // 8}q", padded), device)
    texts = [struct.pack(f"{TEXT_BYTES // 8}q", *numbers).rstrip(b"\0").decode(errors="ignore") for numbers in gathered]
    problems = {rank: text[1:] for rank, text in enumerate(texts) if text.startswith("!")}
    if problems:
        return "; ".join(f"{ranks}: {text}" for text, ranks in _grouped(problems))
    every = [json.loads(text[1:]) for text in texts]
    # Different losses have different options, and only a statement of equal shards has row counts to compare.
    common = [name for name in every[0] if all(name in other for other in every)]
    differing = [name for name in common if len({other[name] for other in every}) > 1]
    sentences = [_by_rank(name, dict(enumerate(other[name] for other in every))) for name in differing]
    return f"{', '.join(sentences)}: must be equal on every rank of the group"


def _by_rank(name: str, values: Mapping[int, object]) -> str:
    return f"{name} is " + " and ".join(f"{value} on {ranks}" for value, ranks in _grouped(values))


def _grouped(values: Mapping[int, object]) -> list[tuple[object, str]]:
    """Return the different values, each with the ranks that have it in words; of very many, the first ones."""
    groups: dict[object, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    words = []
    for value, ranks in list(groups.items())[:LISTED]:
        more = f" and {len(ranks) - LISTED} more" if len(ranks) > LISTED else ""
        words.append((value, f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:LISTED]))}{more}"))
    return words
