"""Every piece of memory of a traced step, from when it comes to when it goes, with what it is for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

# In this order the parts are shown.
PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "averages",
    "gradient buckets",
    "gathered weights",
    "weight copies",
    "inputs",
    "activations",
    "embeddings",
    "loss tiles",
    "ring buffers",
    "temporaries",
    "workspace",
    "rests",
)


@dataclass
class Block:
    """A piece of memory: its size, and what it is for, which may turn out later.

    rest: what the allocator leaves with it beyond that, a part of its own.
    """

    bytes: int
    kind: str
    rest: int = 0


class Event(NamedTuple):
    """A block comes (or goes), at a moment of a phase."""

    block: int
    comes: bool
    phase: str
    moment: str


class Peak(NamedTuple):
    """The most bytes at one moment, and what they are for."""

    bytes: int
    parts: dict[str, int]
    moment: str


@dataclass
class Trace:
    """What happened, in order."""

    blocks: list[Block] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def hold(self, size: int, kind: str, phase: str, moment: str) -> int:
        """Memory from now on; the number that `release` takes."""
        self.blocks.append(Block(size, kind))
        self.events.append(Event(len(self.blocks) - 1, True, phase, moment))
        return len(self.blocks) - 1

    def release(self, number: int, phase: str, moment: str) -> None:
        self.events.append(Event(number, False, phase, moment))

    def peaks(self, start: int) -> dict[str, Peak]:
        """The highest point of each phase at or after event number `start`."""
        live = 0
        parts = dict.fromkeys(PARTS, 0)
        highest: dict[str, Peak] = {}
        for number, event in enumerate(self.events):
            block = self.blocks[event.block]
            sign = 1 if event.comes else -1
            live += sign * (block.bytes + block.rest)
            parts[block.kind] += sign * block.bytes
            parts["rests"] += sign * block.rest
            if number >= start and (event.phase not in highest or live > highest[event.phase].bytes):
                highest[event.phase] = Peak(live, {kind: size for kind, size in parts.items() if size}, event.moment)
        return highest
