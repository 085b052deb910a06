"""The peak of memory that a run shows: of tensors on a device, of the whole process on a CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from ..chunks.memory import peak_bytes


def peak(device: torch.device) -> int:
    """The highest use so far, since the last `reset_peak`: bytes in tensors; on a CPU the resident set of this process."""
    if device.type != "cpu":
        return peak_bytes(device)
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    import resource
    import sys

    # macOS counts bytes, others KiB; there the mark cannot be reset.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak(device: torch.device) -> None:
    """Lets the peak begin anew at what is in use now, where that can be done."""
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        # "5" resets VmHWM to the present resident set (see proc_pid_clear_refs(5)).
        Path("/proc/self/clear_refs").write_text("5")


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
