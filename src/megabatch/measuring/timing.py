"""Timing of work on a device: the clock stops only when the device has finished."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    """Block until the device has finished its work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def time_steps(
    step: Callable[[], object], steps: int, *, wait: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> tuple[float, ...]:
    """Return the seconds of each of so many steps. `wait` blocks until the device has finished its work."""
    seconds = []
    wait()
    for _ in range(steps):
        began = clock()
        step()
        wait()
        seconds.append(clock() - began)
    return tuple(seconds)


def seconds_of(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Return the mean seconds of so many calls, which the device may overlap."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return (time.perf_counter() - began) / times


def seconds_each(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the mean seconds of one call, from as many calls as take about `seconds`, after a warm-up."""
    once = seconds_of(work, device, 2)
    return seconds_of(work, device, max(2, min(1000, round(seconds / max(once, 1e-6)))))
