"""The memory of a device: what a graph holds, what is free, and what running out of it looks like."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import host_memory
from .rng_state import current_accelerator

# What allocators and libraries say that have no exception type of their own for it.
EXHAUSTED = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")
# Accelerators whose free and allocated memory PyTorch can read.
TELLING = ("cuda", "xpu")
# Allocators cannot use every byte: blocks of different sizes leave gaps.
SPARE = 0.05


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in EXHAUSTED)


def release() -> None:
    """Gives back what a failed attempt has left: unreachable graphs, and the blocks that the allocator keeps."""
    gc.collect()
    for device in current_accelerator():
        torch.get_device_module(device).empty_cache()


def allocated_bytes(device: torch.device) -> int:
    """The bytes in tensors on the device; 0 on a CPU, which does not count them."""
    return 0 if device.type == "cpu" else _module(device).memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """The highest number of bytes in tensors so far, as far as it is known; 0 on a CPU."""
    return 0 if device.type == "cpu" else _module(device).max_memory_allocated(device)


def room_bytes(device: torch.device) -> int:
    """The bytes that tensors on the device may take beyond those there are, with some to spare."""
    if device.type == "cpu":
        free = host_memory.available()
        if free is None:
            raise ValueError(
                f'keep="auto" on a CPU: free memory cannot be read, since {host_memory.REMEDY}, or pass a number of chunks to keep'
            )
        # Others live on this memory too, and what the rest of the step will take is not counted here: half of it.
        return free // 2
    module = _module(device)
    free, total = module.mem_get_info(device)
    limit = free + module.memory_reserved(device)
    if hasattr(module, "get_per_process_memory_fraction"):
        limit = min(limit, int(total * module.get_per_process_memory_fraction(device)))
    return max(0, int(limit - SPARE * total) - module.memory_allocated(device))


def is_room_known(device: torch.device) -> bool:
    """Return whether `room_bytes` can tell how much memory of the device is free."""
    return host_memory.available() is not None if device.type == "cpu" else device.type in TELLING


def _module(device: torch.device) -> Any:
    if device.type not in TELLING:
        raise ValueError(f'keep="auto" on {device.type}: its free memory cannot be read; pass a number of chunks to keep')
    return torch.get_device_module(device)


def _local(tensor: Tensor) -> torch.UntypedStorage:
    """The memory behind a tensor, of a distributed one its part on this rank."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


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
