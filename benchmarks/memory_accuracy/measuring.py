"""Run real steps on the device and read its memory counters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import megabatch
from benchmarks.machine import describe
from benchmarks.memory_accuracy.cases import Case
from benchmarks.memory_accuracy.subjects import subject_of
from megabatch.costs.memory.setup import PRECISIONS
from megabatch.costs.memory.step import default_loss, enable_checkpointing

# The first step creates the optimizer's state and is not counted.
STEPS = 3


def measured_row(case: Case, limit: int | None = None) -> dict[str, Any]:
    """Return the measured memory and the machine. limit: in bytes; the row then says whether the steps ran within it."""
    if limit is not None:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        _run_steps(case)
        ran = {} if limit is None else {"ran": True}
    except torch.OutOfMemoryError as error:
        if limit is None:
            raise
        ran = {"ran": False, "out_of_memory": str(error).splitlines()[0]}
    return _counters(case.device) | ran | {"machine": describe(case.device)}


def _counters(device: str) -> dict[str, int | None]:
    """Return the peak bytes of tensors, and of what the allocator reserved."""
    if device != "cuda":
        return {"measured": None, "measured_reserved": None}
    return {"measured": torch.cuda.max_memory_allocated(), "measured_reserved": torch.cuda.max_memory_reserved()}


def _run_steps(case: Case) -> None:
    step = step_of(case)
    for number in range(STEPS):
        if number == 1 and case.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step()


def step_of(case: Case) -> Callable[[], None]:
    """Return a function that runs one training step of the case's model."""
    model = subject_of(case)
    with torch.device(case.device):
        towers = model.build()
    modules = list(towers) if isinstance(towers, tuple) else [towers]
    if case.checkpointing:
        for module in modules:
            enable_checkpointing(module, case.model)
    # None is PyTorch's default: lists of tensors (foreach) on CUDA.
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], fused=case.as_run or None)
    backward = _supervised(case, modules[0], model.inputs) if case.supervised else _contrastive(case, modules, model.inputs)

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _autocast(case: Case) -> Any:
    dtype = PRECISIONS[case.precision]
    return nullcontext() if dtype is None else torch.autocast(case.device, dtype)


def _supervised(case: Case, module: nn.Module, inputs: Callable[[int], Any]) -> Callable[[], None]:
    def step() -> None:
        # New inputs in every step, as from a data loader.
        with torch.device(case.device):
            batch = inputs(case.rows)
            with _autocast(case):
                output = module(**batch) if isinstance(batch, dict) else module(batch)
                loss = default_loss(output)
        loss.backward()

    return step


def _contrastive(case: Case, towers: list[nn.Module], inputs: Any) -> Callable[[], None]:
    chunk = case.chunk or case.rows
    keep = case.keep if case.chunk else 1
    encode_x, encode_y = (megabatch.cached(tower, chunk=chunk, keep=keep, device=case.device) for tower in towers)
    scale = torch.tensor(10.0, device=case.device, requires_grad=True)
    bias = torch.tensor(-10.0, device=case.device, requires_grad=True)
    x_rows, y_rows = (make(case.rows) for make in inputs)
    if case.device == "cuda":
        # As the data loader of a run does.
        x_rows, y_rows = x_rows.pin_memory(), y_rows.pin_memory()

    def step() -> None:
        with _autocast(case):
            y, x = encode_y(y_rows), encode_x(x_rows)
        # With ranks, as a run computes it.
        if case.objective == "siglip":
            loss, _ = megabatch.siglip_loss(x, y, scale, bias, group=None, diagnostics=True)
        else:
            loss, _ = megabatch.clip_loss(x, y, scale, group=None, diagnostics=True)
        loss.backward()

    return step
