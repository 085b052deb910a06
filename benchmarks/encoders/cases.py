"""The cases to measure, and their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Sizes(NamedTuple):
    """The pairs and chunks of each case."""

    pairs: int
    chunk: int
    sweep_pairs: int
    sweep_chunks: tuple[int, ...]
    sweep_chunk: int
    large: int
    check_pairs: int
    check_chunk: int


FULL = Sizes(2048, 256, 512, (256, 128, 64), 64, 65_536, 32, 8)
SMALL = Sizes(16, 4, 8, (1, 2), 1, 32, 8, 2)


@dataclass(frozen=True)
class Case:
    """What to measure: `runs` steps, after `warm_up` steps with `warm_up_pairs` pairs (None: with all pairs)."""

    case: str
    contestant: str
    pairs: int
    chunk: int | None
    keep: int | str | None
    device: str
    compiled: bool = False
    warm_up: int = 2
    warm_up_pairs: int | None = None
    runs: int = 3


def contestants(sizes: Sizes) -> Iterator[dict]:
    """Yield all contestants at one batch, and ours with several values of keep."""
    for keep in (0, 1, "auto"):
        # "auto" learns in the first step and decides in the second.
        warm_up = 2 if keep == "auto" else 1
        yield {"contestant": "megabatch", "pairs": sizes.pairs, "chunk": sizes.chunk, "keep": keep, "warm_up": warm_up}
    for name in ("two-pass", "OpenCLIP accumulation", "sentence-transformers"):
        yield {"contestant": name, "pairs": sizes.pairs, "chunk": sizes.chunk, "keep": None, "warm_up": 1}


def chunks(sizes: Sizes) -> Iterator[dict]:
    """Yield values of chunk and keep at a batch that nearly fits, and plain PyTorch at this batch and at that of one chunk."""
    sweep = [(chunk, keep) for chunk in sizes.sweep_chunks for keep in (0, "auto")]
    sweep += [(sizes.sweep_chunk, keep) for keep in (1, 2, 4)]
    for chunk, keep in sweep:
        yield {"contestant": "megabatch", "pairs": sizes.sweep_pairs, "chunk": chunk, "keep": keep}
    for pairs in (sizes.chunk, sizes.sweep_pairs):
        yield {"contestant": "uncached", "pairs": pairs, "chunk": None, "keep": None}


def large(sizes: Sizes) -> Iterator[dict]:
    """Yield a very large batch. One step takes minutes, so the warm-up uses a small one."""
    once = {"warm_up": 1, "warm_up_pairs": 2 * sizes.chunk, "runs": 1}
    yield {"contestant": "megabatch", "pairs": sizes.large, "chunk": sizes.chunk, "keep": 0, **once}


def compiled(sizes: Sizes) -> Iterator[dict]:
    """Yield a case with towers compiled by torch.compile."""
    yield {"contestant": "megabatch", "pairs": sizes.pairs, "chunk": sizes.chunk, "keep": 0, "compiled": True}


CASES = {"contestants": contestants, "chunks": chunks, "large": large, "compiled": compiled}
