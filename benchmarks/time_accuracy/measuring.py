"""Real steps on the device, back to back: their seconds, and what the device does in them."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import describe
from benchmarks.memory_accuracy.cases import Case
from benchmarks.memory_accuracy.measuring import step_of

WARM_UP, ROUNDS = 2, 3
# A round has as many steps as take about this long.
ROUND_S = 0.5
# Kernels by their names, in this order.
KINDS = {
    "copies": "memcpy",
    "optimizer": "multi_tensor|adam",
    "convolutions": "conv|fprop|dgrad|wgrad|cudnn::",
    "attention": "flash|fmha|attention|sdpa",
    "products": "gemm|cutlass|nvjet|xmma|cublas",
}


def timed_row(case: Case, kinds: bool = False) -> dict[str, Any]:
    """The median over rounds of the mean seconds of a step, the spread, the host's part; with kinds, the device's by kernels."""
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
    """Seconds of the device's kernels in one step."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in seen.key_averages():
        kind = next((kind for kind, names in KINDS.items() if re.search(names, event.key, re.IGNORECASE)), "other")
        found[kind] = found.get(kind, 0.0) + event.self_device_time_total / 1e6
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
