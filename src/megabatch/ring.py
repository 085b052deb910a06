"""WHOSE rows: the ranks of a process group as a ring, in which each rank visits every rank's block once.

While a rank computes with one block, the next one is in flight. One process is a ring of one: the same code, no messages. Messages
are outside of autograd: only detached tensors are sent.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

# An argument that names the ranks: None is this process alone, `...` is "not given".
Group: TypeAlias = dist.ProcessGroup | DeviceMesh | EllipsisType | None

# Message tags. Blocks and results travel at the same time, and a backend that matches messages by tag must not confuse them.
BLOCK, RESULT = 1, 2


class Ring:
    """The ranks that share one batch. `group=None` is this process alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    @classmethod
    def of(cls, group: Group) -> Ring:
        """Return the ring of an argument `group`; raise a ValueError if it is not given and there are several processes."""
        if group is ...:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                raise ValueError(
                    f"group is not given, and this is one of {dist.get_world_size()} processes: pass "
                    "group=torch.distributed.group.WORLD for the batch of all ranks' rows, or group=None for this rank's rows alone"
                )
            return cls(None)
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"group is a device mesh of {group.ndim} dimensions {group.mesh_dim_names}, but the batch is sharded along "
                    "one: pass that dimension, for example mesh['data']"
                )
            return cls(group.get_group())
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"group={group!r}: must be None, a process group that this rank is in, or a device mesh of one dimension"
            )
        return cls(group)

    @classmethod
    def world(cls) -> Ring:
        """Return the ring of all processes; of this one alone if torch.distributed is not initialised."""
        return cls(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)

    @property
    def backends(self) -> dict[str, str]:
        """The backend for each type of device whose tensors the group exchanges, for example {"cpu": "gloo", "cuda": "nccl"}."""
        assert self.group is not None
        entries = (entry.split(":") for entry in dist.get_backend_config(self.group).split(","))
        return {device_type: backend for device_type, backend in entries}

    def meeting_device(self, device: torch.device) -> torch.device:
        """Return the device on which `gather` exchanges numbers: the CPU if a backend serves it, which avoids a synchronisation."""
        types = self.backends
        if "cpu" in types:
            return torch.device("cpu")
        return device if device.type in types else torch.device(next(iter(types)))

    def gather(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Return every rank's numbers, in the order of ranks. All ranks pass equally many; the host waits for the result."""
        if self.group is None:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.int64, device=self.meeting_device(device))
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(gathered, own, group=self.group)
        return [numbers.tolist() for numbers in gathered]

    def gather_objects(self, value: T, device: torch.device) -> list[T]:
        """Return every rank's value, in the order of ranks. Values are pickled and may differ in size."""
        if self.group is None:
            return [value]
        pickled = pickle.dumps(value)
        sizes = [size for (size,) in self.gather([len(pickled)], device)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.meeting_device(device))
        padded[: len(pickled)] = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded, group=self.group)
        # Through a list, since NumPy is not a dependency.
        return [pickle.loads(bytes(t[:size].tolist())) for t, size in zip(gathered, sizes, strict=True)]

    def raise_together(self, work: Callable[[], T], device: torch.device) -> T:
        """Return work(); raise the exception of any rank on all of them, so that no rank waits for one that failed."""
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        for other in self.gather_objects(error, device):
            if other is not None:
                raise other
        return result  # type: ignore[return-value]

    def sum(self, numbers: Tensor) -> Tensor:
        """Add up a tensor over ranks, in place, and return it."""
        if self.group is not None:
            dist.all_reduce(numbers, group=self.group)
        return numbers

    def tour(
        self,
        block: Any,
        lengths: Sequence[int | tuple[int, ...]],
        visit: Callable[[Any, int], tuple[Any, Any]],
        merge: Callable[[Any, Any], Any],
    ) -> tuple[Any, Any]:
        """Visit every rank's block once; return the merged results for this rank's rows, and those for this rank's block.

        block: nested tuples of tensors (or None), with a row for each of this rank's documents.
        lengths: the rows of every rank's block; a tuple if the parts of a block have different numbers of rows, with one number
            for each part of the outermost tuple. What a visit returns for the block has the same parts.
        visit(block, owner) -> (for_rows, for_block): `for_rows` belongs to this rank's rows; `for_block` has a row for each row
            of the block and travels on with it.
        merge(a, b): combines two results; a is None at first.

        While a block is visited, the next one arrives, together with the results that the ranks before have computed for it.
        Memory is that of a few blocks, whatever the size of the ring.
        """
        merged = for_rows = for_block = None
        wait_block = wait_result = None
        for hop in range(self.size):
            owner = (self.rank - hop) % self.size
            upstream = lengths[(owner - 1) % self.size]
            if hop + 1 < self.size:
                wait_block = self._pass_on(block, upstream, BLOCK)
            for_rows, for_block = visit(block, owner)
            merged = merge(merged, for_rows)
            if wait_result is not None:
                for_block = merge(wait_result(), for_block)
            if self.size > 1:
                wait_result = self._pass_on(for_block, upstream, RESULT)
                # Free what is merged or being sent before the next visit.
                for_rows = for_block = None
            if wait_block is not None:
                block, wait_block = wait_block(), None
        return merged, for_block if wait_result is None else wait_result()

    def _pass_on(self, tree: Any, length: int | tuple[int, ...], tag: int) -> Callable[[], Any]:
        """Start to send a tree to the next rank and to receive one of `length` rows from the one before; return the wait for it."""
        assert self.group is not None
        after = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        before = dist.get_global_rank(self.group, (self.rank - 1) % self.size)
        tree = _map(tree, lambda t: t.contiguous())
        home = next((t.device for t in _leaves(tree) if self._sends_from_host(t.device)), None)
        if home is not None:
            tree = _map(tree, lambda t: t.cpu())
        received = _with_rows(tree, length)
        operations = [dist.P2POp(dist.isend, t, after, self.group, tag) for t in _leaves(tree) if t.numel()]
        operations += [dist.P2POp(dist.irecv, t, before, self.group, tag) for t in _leaves(received) if t.numel()]
        works = list(dist.batch_isend_irecv(operations)) if operations else []

        def wait() -> Any:
            for work in works:
                work.wait()
            # Until now they kept alive the tensors that are being sent.
            operations.clear()
            works.clear()
            return received if home is None else _map(received, lambda t: t.to(home))

        return wait

    def _sends_from_host(self, device: torch.device) -> bool:
        """Return whether messages of this device go through host memory. Gloo, all that Windows has, sends from there alone."""
        return device.type != "cpu" and self.backends.get(device.type) == "gloo"


def _map(tree: Any, f: Callable[[Tensor], Tensor]) -> Any:
    if tree is None or isinstance(tree, Tensor):
        return None if tree is None else f(tree)
    branches = (_map(branch, f) for branch in tree)
    return tree._make(branches) if hasattr(tree, "_make") else tuple(branches)


def _with_rows(tree: Any, length: int | tuple[int, ...]) -> Any:
    """Allocate a tree like this one with other numbers of rows."""
    if isinstance(length, tuple):
        return tuple(_with_rows(part, rows) for part, rows in zip(tree, length, strict=True))
    return _map(tree, lambda t: t.new_empty(length, *t.shape[1:]))


def _leaves(tree: Any) -> list[Tensor]:
    if tree is None or isinstance(tree, Tensor):
        return [] if tree is None else [tree]
    return [leaf for branch in tree for leaf in _leaves(branch)]
