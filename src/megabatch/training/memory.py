"""The peak of memory that a run shows: of tensors on a device, of the whole process on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .. import host_memory


def peak(device: torch.device) -> int | None:
    """Return the highest use since `reset_peak`: bytes in tensors; on a CPU the resident set of this process.

    None where the device does not tell (mps), or the system (Windows without psutil).
    """
    if device.type == "cpu":
        return host_memory.peak_resident()
    read = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return None if read is None else int(read(device))


def reset_peak(device: torch.device) -> None:
    """Let the peak begin again at what is in use now, where the device or the system can do that."""
    if device.type == "cpu":
        host_memory.reset_peak()
        return
    reset = getattr(torch.get_device_module(device), "reset_peak_memory_stats", None)
    if reset is not None:
        reset(device)


def peak_of_tensors(work: Callable[[], object], held: Iterable[Tensor]) -> int:
    """The most bytes that tensors take on a CPU while work runs, with those that are held all the while: what a plan predicts."""
    # Unless told, its library writes to the terminal when it begins and ends.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in held)}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    live = highest = 0
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        live += change
        highest = max(highest, live)
    return highest + sum(storages.values())
