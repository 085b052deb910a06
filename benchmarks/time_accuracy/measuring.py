"""Time real steps on the device, back to back, and profile the operators of one step."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import describe
from benchmarks.memory_accuracy.cases import Case
from benchmarks.memory_accuracy.measuring import step_of

WARM_UP, PROFILER_WARM_UP, ROUNDS = 2, 3, 3
# A round has as many steps as fit into about this many seconds.
ROUND_S = 0.5
# Kinds of kernels by a pattern of their names; the first match counts.
KERNEL_KINDS = {
    "copies": "memcpy",
    "optimizer": "multi_tensor|adam",
    "convolutions": "conv|fprop|dgrad|wgrad|cudnn::",
    "attention": "flash|fmha|attention|sdpa",
    "products": "gemm|cutlass|nvjet|xmma|cublas",
}


def timed_row(case: Case, kinds: bool = False) -> dict[str, Any]:
    """Return the median over rounds of the mean seconds per step, the spread and the host's part; with kinds, kernel times."""
    step = step_of(case)
    for _ in range(WARM_UP):
        step()
    _wait(case.device)
    began = time.perf_counter()
    step()
    host_s = time.perf_counter() - began
    _wait(case.device)
    steps = max(1, round(ROUND_S / (time.perf_counter() - began)))
    rounds = [_round(step, steps, case.device) for _ in range(ROUNDS)]
    row = {
        "seconds": statistics.median(rounds),
        "fastest_s": min(rounds),
        "slowest_s": max(rounds),
        "steps": ROUNDS * steps,
        "host_s": host_s,
        **({"busy_s": _busy(step)} if kinds else {}),
        "machine": describe(case.device),
    }
    del step
    gc.collect()
    if case.device == "cuda":
        torch.cuda.empty_cache()
    return row


def _round(step: Callable[[], None], steps: int, device: str) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    return (time.perf_counter() - began) / steps


def _busy(step: Callable[[], None]) -> dict[str, float]:
    """Return the seconds of the device's kernels in one step, by kind."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    seconds: dict[str, float] = {}
    for event in profiler.key_averages():
        kind = next((kind for kind, names in KERNEL_KINDS.items() if re.search(names, event.key, re.IGNORECASE)), "other")
        seconds[kind] = seconds.get(kind, 0.0) + event.self_device_time_total / 1e6
    return seconds


def operations_row(case: Case) -> dict[str, Any]:
    """Return, for every operator with the same shapes: name, calls, device microseconds in one step, shapes.

    The efficiencies of operation classes are fitted to these times, from PyTorch's profiler.
    """
    step = step_of(case)
    for _ in range(PROFILER_WARM_UP):
        step()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (case.device == "cuda")
    with profile(activities=activities, record_shapes=True) as profiler:
        step()
        if case.device == "cuda":
            torch.cuda.synchronize()
    # On a CPU, which is only used to test the program, the operator's own time is the device's.
    events = [event for event in profiler.key_averages(group_by_input_shape=True) if event.device_type == DeviceType.CPU]
    spent = [e.self_device_time_total if case.device == "cuda" else e.self_cpu_time_total for e in events]
    operations = [
        (event.key, event.count, round(us, 3), event.input_shapes)
        for event, us in zip(events, spent, strict=True)
        if us > 0 and event.key.startswith("aten::")
    ]
    del step, profiler, events
    gc.collect()
    if case.device == "cuda":
        torch.cuda.empty_cache()
    return {"operations": sorted(operations, key=lambda operation: -operation[2]), "machine": describe(case.device)}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
