"""How many chunks' graphs are kept instead of recomputed: as many as asked for, or as many as memory has room for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .memory import GraphSize, allocated_bytes, peak_bytes, room_bytes


class Keep:
    """A fixed number of chunks."""

    def __init__(self, asked: int) -> None:
        self.asked = asked

    def begin(self, device: torch.device, sizes: Sequence[int]) -> int:
        """At the start of a call over chunks of so many rows: how many of the last to keep."""
        return self.asked

    def look(self, device: torch.device) -> None:
        """At the start of every chunk, in forward and in backward: a moment to read the peak of memory."""

    @contextmanager
    def keeping(self, rows: int, known: Iterable[Tensor]) -> Iterator[None]:
        """Around the forward of a chunk that is kept, the last of those with the most rows."""
        yield

    def stop(self) -> bool:
        """From now on nothing is kept; returns whether anything was."""
        asked, self.asked = self.asked, 0
        return asked > 0


class KeepAuto(Keep):
    """As many as fit.

    The first step keeps one chunk, the last: the first that backward needs, so that its graph is there only while no other is.
    (Where the last ones are smaller than the others, the one before them too.) That step shows what a graph takes, and how far
    memory rises above where the step began. From then on every call keeps what has room on top of that, so the peak is at most
    the first step's plus those graphs.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self.graph: GraphSize | None = None
        self.row_bytes = 0.0
        self.base = 0
        self.rise = 0
        self.learned = False

    def begin(self, device: torch.device, sizes: Sequence[int]) -> int:
        if self.asked == 0:
            return 0
        if not self.learned:
            self.look(device)
            self.learned = self.graph is not None and self.graph.in_backward
        if not self.learned:
            if self.graph is None:
                # Where free memory cannot be read, this raises in the first step rather than in the second.
                room_bytes(device)
                self.base = allocated_bytes(device)
            self.asked = 1 + list(reversed(sizes)).index(sizes[0])
            return self.asked
        return self.asked + int(max(0, room_bytes(device) - self.rise) / max(1.0, self.row_bytes * sizes[0]))

    def look(self, device: torch.device) -> None:
        if not self.learned and self.graph is not None:
            self.rise = max(self.rise, peak_bytes(device) - self.base)

    @contextmanager
    def keeping(self, rows: int, known: Iterable[Tensor]) -> Iterator[None]:
        self.graph = GraphSize(known)
        with self.graph.counting():
            yield
        self.row_bytes = max(self.row_bytes, self.graph.bytes / max(1, rows))
