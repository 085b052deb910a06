"""How many chunks keep their graphs instead of being recomputed: a fixed number, or as many as fit in the free memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import host_memory

# Accelerators whose free and allocated memory PyTorch can read.
MEASURABLE = ("cuda", "xpu")
# Share of the device that is left free: allocators cannot use every byte, since blocks of different sizes leave gaps.
SPARE = 0.05


def last_full(costs: Sequence[int]) -> int:
    """Return the index of the last chunk that costs nearly as much as the largest: its graph shows what one takes.

    Chunks of a token budget are full up to one row; what is left over at the end of a batch is smaller.
    """
    return max(index for index, cost in enumerate(costs) if 4 * cost >= 3 * max(costs))


class Keep:
    """Keeps a fixed number of chunks."""

    def __init__(self, requested: int) -> None:
        self.requested = requested

    def begin(self, device: torch.device, costs: Sequence[int]) -> int:
        """Return how many of the last chunks to keep, at the start of a call. costs: of its chunks, in rows or tokens."""
        return self.requested

    def record_peak(self, device: torch.device) -> None:
        """Read the peak of the memory; called at the start of every chunk, in forward and in backward."""

    @contextmanager
    def measuring(self, cost: int, known: Iterable[Tensor]) -> Iterator[None]:
        """Context around the forward of a chunk that is kept: the last full one.

        known: tensors that exist whether or not the graph is kept.
        """
        yield

    def stop(self) -> bool:
        """Keep nothing from now on, and return whether anything was kept before."""
        requested, self.requested = self.requested, 0
        return requested > 0


class KeepAuto(Keep):
    """Keeps as many chunks as fit.

    The first step keeps one chunk, the last: backward needs it first, so that its graph exists only while no other does.
    (If the last chunks are smaller than the others, the one before them is kept too.) That step shows how much memory a graph
    takes, and how far memory rises above where the step began. From then on every call keeps what fits on top of that, so the peak
    is at most that of the first step plus those graphs. The first step begins by resetting PyTorch's peak of allocated memory: a
    higher one from before would hide how far this step rises.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self.graph: GraphSize | None = None
        # Bytes of a graph for each row or token.
        self.unit_bytes = 0.0
        self.base = 0
        self.rise = 0
        self.learned = False

    def begin(self, device: torch.device, costs: Sequence[int]) -> int:
        if self.requested == 0:
            return 0
        if not self.learned:
            self.record_peak(device)
            self.learned = self.graph is not None and self.graph.in_backward
        if not self.learned:
            if self.graph is None:
                # If free memory cannot be read, this raises in the first step rather than in the second.
                free_bytes(device)
                reset_peak(device)
                self.base = allocated_bytes(device)
            self.requested = len(costs) - last_full(costs)
            return self.requested
        # All as large as the largest: tensors of many different sizes leave gaps in the allocator's memory.
        return self.requested + int(max(0, free_bytes(device) - self.rise) / max(1.0, self.unit_bytes * max(costs)))

    def record_peak(self, device: torch.device) -> None:
        if not self.learned and self.graph is not None:
            self.rise = max(self.rise, peak_bytes(device) - self.base)

    @contextmanager
    def measuring(self, cost: int, known: Iterable[Tensor]) -> Iterator[None]:
        self.graph = GraphSize(known)
        with self.graph.counting():
            yield
        self.unit_bytes = max(self.unit_bytes, self.graph.bytes / max(1, cost))


class GraphSize:
    """Counts the bytes that the graph of what runs inside `counting()` keeps alive, apart from the tensors in `known`."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._seen = {_local(tensor).data_ptr() for tensor in known}
        self.bytes = 0
        self.in_backward = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = _local(tensor)
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor

    def _unpack(self, tensor: Tensor) -> Tensor:
        self.in_backward = True
        return tensor


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes in tensors on the device; 0 on a CPU, where they are not counted."""
    return 0 if device.type == "cpu" else _module(device).memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """Return the highest number of bytes in tensors so far; 0 on a CPU, where it is not known."""
    return 0 if device.type == "cpu" else _module(device).max_memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    """Let `peak_bytes` count from now on."""
    if device.type != "cpu":
        _module(device).reset_peak_memory_stats(device)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that new tensors on the device may take, with a margin."""
    if device.type == "cpu":
        free = host_memory.available()
        if free is None:
            raise ValueError(
                f'keep="auto" on a CPU: free memory cannot be read, since {host_memory.REMEDY}, or pass a number of chunks to keep'
            )
        # Half of it: other processes use this memory too, and what the rest of the step takes is not counted on a CPU.
        return free // 2
    module = _module(device)
    free, total = module.mem_get_info(device)
    limit = free + module.memory_reserved(device)
    if hasattr(module, "get_per_process_memory_fraction"):
        limit = min(limit, int(total * module.get_per_process_memory_fraction(device)))
    return max(0, int(limit - SPARE * total) - module.memory_allocated(device))


def can_read_free_bytes(device: torch.device) -> bool:
    """Return whether `free_bytes` can read the free memory of the device."""
    return host_memory.available() is not None if device.type == "cpu" else device.type in MEASURABLE


def _module(device: torch.device) -> Any:
    if device.type not in MEASURABLE:
        raise ValueError(f'keep="auto" on {device.type}: its free memory cannot be read; pass a number of chunks to keep')
    return torch.get_device_module(device)


def _local(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor; of a distributed tensor, the storage of this rank's part."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()
