"""WHOSE rows: the ranks of a process group in a ring, each visiting every rank's block once, the next block in flight.

One process is a ring of one: the same code, no messages. Hops are outside autograd; what is sent are detached tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# An argument that names the ranks: None is this process alone, `...` is "not stated".
Group: TypeAlias = dist.ProcessGroup | DeviceMesh | EllipsisType | None

# Blocks and results travel at the same time; where a backend matches messages by tag, they must not be mistaken for each other.
BLOCK, RESULT = 1, 2


class Ring:
    """The ranks that share one batch. `group=None` is this process alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    @classmethod
    def of(cls, group: Group) -> Ring:
        """The ranks that an argument names; a ValueError where it names none and there are several processes."""
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
                    f"group is a device mesh of {group.ndim} dimensions {group.mesh_dim_names}: the batch is sharded along one; "
                    "pass that one, for example mesh['data']"
                )
            return cls(group.get_group())
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"group={group!r}: must be None, a process group that this rank is in, or a device mesh of one dimension"
            )
        return cls(group)

    @property
    def device_types(self) -> list[str]:
        """The types of devices whose tensors the group's backends exchange, for example ["cpu", "cuda"]."""
        assert self.group is not None
        return [entry.split(":")[0] for entry in dist.get_backend_config(self.group).split(",")]

    def meeting_device(self, device: torch.device) -> torch.device:
        """Return where `gather` exchanges its numbers: the CPU if the group serves it, which needs no wait for the device."""
        types = self.device_types
        if "cpu" in types:
            return torch.device("cpu")
        return device if device.type in types else torch.device(types[0])

    def gather(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Every rank's numbers, in the order of ranks: the one exchange that the host waits for."""
        if self.group is None:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.meeting_device(device))
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine, group=self.group)
        return [numbers.tolist() for numbers in every]

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.group is not None:
            dist.all_reduce(numbers, group=self.group)
        return numbers

    def tour(
        self,
        block: Any,
        lengths: Sequence[int],
        visit: Callable[[Any, int], tuple[Any, Any]],
        merge: Callable[[Any, Any], Any],
    ) -> tuple[Any, Any]:
        """What all visits found for this rank's rows, and what all ranks found for this rank's block.

        block: nested tuples of tensors (or None) with a row for each of this rank's documents; `lengths` are every rank's rows.
        visit(block, owner) -> (mine, theirs), theirs with a row for each row of the block; results are combined with merge(a, b),
        of which a is None at first.

        While a block is visited, the next one arrives, and so does what the ranks before have found for this one.
        Memory is that of a few blocks, whatever the size of the ring.
        """
        mine = here = theirs = None
        wait_block = wait_result = None
        for hop in range(self.size):
            owner = (self.rank - hop) % self.size
            upstream = lengths[(owner - 1) % self.size]
            if hop + 1 < self.size:
                wait_block = self._pass_on(block, upstream, BLOCK)
            here, theirs = visit(block, owner)
            mine = merge(mine, here)
            if wait_result is not None:
                theirs = merge(wait_result(), theirs)
            if self.size > 1:
                wait_result = self._pass_on(theirs, upstream, RESULT)
                # What is merged or on its way must not live through the next visit.
                here = theirs = None
            if wait_block is not None:
                block, wait_block = wait_block(), None
        return mine, theirs if wait_result is None else wait_result()

    def _pass_on(self, tree: Any, length: int, tag: int) -> Callable[[], Any]:
        """Starts sending to the next rank and receiving the like of it, `length` rows, from the one before; returns the wait."""
        assert self.group is not None
        after = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        before = dist.get_global_rank(self.group, (self.rank - 1) % self.size)
        tree = _map(tree, lambda t: t.contiguous())
        coming = _map(tree, lambda t: t.new_empty(length, *t.shape[1:]))
        operations = [dist.P2POp(dist.isend, t, after, self.group, tag) for t in _leaves(tree) if t.numel()]
        operations += [dist.P2POp(dist.irecv, t, before, self.group, tag) for t in _leaves(coming) if t.numel()]
        works = list(dist.batch_isend_irecv(operations)) if operations else []

        def wait() -> Any:
            for work in works:
                work.wait()
            # Until here they keep alive what is being sent.
            operations.clear()
            works.clear()
            return coming

        return wait


def _map(tree: Any, f: Callable[[Tensor], Tensor]) -> Any:
    if tree is None or isinstance(tree, Tensor):
        return None if tree is None else f(tree)
    branches = (_map(branch, f) for branch in tree)
    return tree._make(branches) if hasattr(tree, "_make") else tuple(branches)


def _leaves(tree: Any) -> list[Tensor]:
    if tree is None or isinstance(tree, Tensor):
        return [] if tree is None else [tree]
    return [leaf for branch in tree for leaf in _leaves(branch)]
