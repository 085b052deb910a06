"""Follows every storage of a step on fake tensors, from its birth to its end."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .trace import Block, Event, Trace
from .workspaces import Scratch

# CUDA's allocator gives out multiples of this.
GRANULE = 512


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
        # The storage of a gradient that another was just added to, and the block of the sum.
        self._added: tuple[int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.operations.add(func._schema.name)
        copied = func is torch.ops.aten._to_copy.default and self.kind_of(args[0]) == "weights"
        results = tree_leaves(out)
        workspaces = self.scratch.of(func, args, out) if self.scratch is not None else []
        # Results come one after the other, each with what it takes to find it.
        for leaf, size in zip(results, [0] * (len(results) - len(workspaces)) + workspaces, strict=True):
            if isinstance(leaf, Tensor):
                self._follow(leaf, "weight copies" if copied else self.kind)
            if size:
                self.release(self.hold(size, "workspace"))
        if func is torch.ops.aten.add.Tensor and self.phase == "backward":
            self._note_sum(args[0], out)
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

    def _note_sum(self, first: Tensor, out: Tensor) -> None:
        found = self._living.get(out.untyped_storage()._cdata)
        if found is not None and first.shape == out.shape and first.dtype == out.dtype and _is_dense(first):
            self._added = first.untyped_storage()._cdata, found[1]

    def _end(self, key: int) -> None:
        number = self._living.pop(key)[1]
        events = self.trace.events
        self.release(number)
        # Autograd adds in place to a gradient that nothing else holds, if it is no fake one (InputBuffer::accumulate): a sum whose
        # first part ends with it had never both.
        if self._added is not None and self._added[0] == key and len(events) > 1 and events[-2][:2] == (self._added[1], True):
            events[-2:] = events[:-3:-1]


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie side by side, none of them twice."""
    return tensor.numel() == 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
