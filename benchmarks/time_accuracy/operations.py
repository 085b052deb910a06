"""The device's microseconds in one step by operator and shapes, from PyTorch's profiler: what the shares of kinds are found on."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import describe
from benchmarks.memory_accuracy.cases import Case
from benchmarks.memory_accuracy.measuring import step_of

WARM_UP = 3


def operations_row(case: Case) -> dict[str, Any]:
    """Of every operator with the same shapes: its name, how often it was called, the device's microseconds, the shapes."""
    step = step_of(case)
    for _ in range(WARM_UP):
        step()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (case.device == "cuda")
    with profile(activities=activities, record_shapes=True) as seen:
        step()
        if case.device == "cuda":
            torch.cuda.synchronize()
    # On a CPU, where the program is tried, the operator's own time stands for the device's.
    events = [event for event in seen.key_averages(group_by_input_shape=True) if event.device_type == DeviceType.CPU]
    spent = [e.self_device_time_total if case.device == "cuda" else e.self_cpu_time_total for e in events]
    operations = [
        (event.key, event.count, round(us, 3), event.input_shapes)
        for event, us in zip(events, spent, strict=True)
        if us > 0 and event.key.startswith("aten::")
    ]
    del step, seen, events
    gc.collect()
    if case.device == "cuda":
        torch.cuda.empty_cache()
    return {"operations": sorted(operations, key=lambda operation: -operation[2]), "machine": describe(case.device)}
