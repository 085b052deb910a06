"""How many chunks' graphs are kept instead of recomputed: as many as asked for, or as many as memory has room for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .memory import GraphSize, allocated_bytes, peak_bytes, room_bytes


class Keep:
    """A fixed number of chunks."""

    def __init__(self, asked: int) -> None:
        self.asked = asked

    def begin(self, device: torch.device) -> int:
        """At the start of a call: how many chunks to keep."""
        return self.asked

    def look(self, device: torch.device) -> None:
        """At the start of every chunk, in forward and in backward: a moment to read the peak of memory."""

    @contextmanager
    def keeping(self, known: Iterable[Tensor]) -> Iterator[None]:
        """Around the forward of the last chunk, if it is kept."""
        yield

    def stop(self) -> bool:
        """From now on nothing is kept; returns whether anything was."""
        asked, self.asked = self.asked, 0
        return asked > 0


class KeepAuto(Keep):
    """As many as fit.

    The first step keeps one chunk, the last: the first that backward needs, so that its graph is there only while no other is.
    That step shows what a graph takes, and how far memory rises above where the step began. From then on every call keeps what
    has room on top of that, so the peak is at most the first step's plus those graphs.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self.graph: GraphSize | None = None
        self.graph_bytes = 0
        self.base = 0
        self.rise = 0
        self.learned = False

    def begin(self, device: torch.device) -> int:
        if self.asked == 0:
            return 0
        if not self.learned:
            self.look(device)
            self.learned = self.graph is not None and self.graph.in_backward
        if not self.learned:
            if self.graph is None:
                self.base = allocated_bytes(device)
            return 1
        return 1 + max(0, room_bytes(device) - self.rise) // max(1, self.graph_bytes)

    def look(self, device: torch.device) -> None:
        if not self.learned and self.graph is not None:
            self.rise = max(self.rise, peak_bytes(device) - self.base)

    @contextmanager
    def keeping(self, known: Iterable[Tensor]) -> Iterator[None]:
        self.graph = GraphSize(known)
        with self.graph.counting():
            yield
        self.graph_bytes = max(self.graph_bytes, self.graph.bytes)
