"""Peak memory of a run: of tensors on an accelerator, of the whole process on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .. import host_memory


def peak(device: torch.device) -> int | None:
    """Return the peak since `reset_peak` in bytes: of tensors, or on a CPU the resident set of this process.

    None where the device (mps) or the system (Windows without psutil) does not report it.
    """
    if device.type == "cpu":
        return host_memory.peak_resident()
    read = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return None if read is None else int(read(device))


def reset_peak(device: torch.device) -> None:
    """Restart the peak at the present use, where the device or the system supports that."""
    if device.type == "cpu":
        host_memory.reset_peak()
        return
    reset = getattr(torch.get_device_module(device), "reset_peak_memory_stats", None)
    if reset is not None:
        reset(device)


def peak_of_tensors(work: Callable[[], object], held: Iterable[Tensor]) -> int:
    """Return the peak bytes of tensors on a CPU while `work` runs, including the `held` ones: what a plan predicts."""
    # By default the profiler library (Kineto) writes to the terminal when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in held)}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    current = highest = 0
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        current += change
        highest = max(highest, current)
    return highest + sum(storages.values())
