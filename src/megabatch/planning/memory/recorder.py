"""Every storage of a traced step, from its birth to its end, with what it is for and the moment it was made."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .scratch import Scratch

# CUDA's allocator gives out multiples of this.
GRANULE = 512
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
)


@dataclass
class Block:
    """A piece of memory: its size, and what it is for, which may turn out later."""

    bytes: int
    kind: str


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
            change = block.bytes if event.comes else -block.bytes
            live += change
            parts[block.kind] += change
            if number >= start and (event.phase not in highest or live > highest[event.phase].bytes):
                highest[event.phase] = Peak(live, {kind: size for kind, size in parts.items() if size}, event.moment)
        return highest


class Recorder(TorchDispatchMode):
    """Follows every storage that operations return.

    kind: what new storages are for; phase and moment: when this is. A weak reference tells when a storage ends.
    """

    def __init__(self, scratch: Scratch | None) -> None:
        super().__init__()
        self.trace = Trace()
        self.scratch = scratch
        self.kind = "activations"
        self.phase = "setup"
        self.moment = "setup"
        self.operations: set[str] = set()
        self.granule = 1 if scratch is None else GRANULE
        self._living: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.operations.add(func._schema.name)
        copied = func is torch.ops.aten._to_copy.default and self.kind_of(args[0]) == "weights"
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._follow(leaf, "weight copies" if copied else self.kind)
        if self.scratch is not None:
            for size in self.scratch.of(func, args, out):
                self.release(self.hold(size, "workspace"))
        return out

    def hold(self, size: int, kind: str) -> int:
        """Memory that no tensor of the trace stands for; `release` gives it back."""
        return self.trace.hold(-(-size // self.granule) * self.granule, kind, self.phase, self.moment)

    def release(self, number: int) -> None:
        self.trace.release(number, self.phase, self.moment)

    @contextmanager
    def apart(self) -> Iterator[list[Event]]:
        """The events of what runs inside, which do not join the others'."""
        before, self.trace.events = self.trace.events, []
        try:
            yield self.trace.events
        finally:
            self.trace.events = before

    def block(self, tensor: Tensor) -> Block | None:
        """The block behind a tensor, if it was made during the trace."""
        found = self._living.get(tensor.untyped_storage()._cdata)
        return None if found is None else self.trace.blocks[found[1]]

    def kind_of(self, tensor: Tensor) -> str | None:
        block = self.block(tensor)
        return None if block is None else block.kind

    def label(self, tensor: Tensor | None, kind: str) -> None:
        """Says what a tensor's memory is for, from its beginning on."""
        block = None if tensor is None else self.block(tensor)
        if block is not None:
            block.kind = kind

    @contextmanager
    def during(self, phase: str, kind: str, moment: str | None = None) -> Iterator[None]:
        """A phase, in which new storages are for `kind`."""
        before = self.phase, self.kind, self.moment
        self.phase, self.kind, self.moment = phase, kind, moment or phase
        try:
            yield
        finally:
            self.phase, self.kind, self.moment = before

    def _follow(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._living or size == 0:
            return
        number = self.hold(size, kind)
        # The reference is kept here: one that is let go of calls nobody.
        self._living[key] = weakref.ref(storage, lambda _: self._end(key)), number

    def _end(self, key: int) -> None:
        self.release(self._living.pop(key)[1])
