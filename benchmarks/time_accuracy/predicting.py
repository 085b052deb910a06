"""Predict the seconds of a case's step without the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from benchmarks.memory_accuracy.cases import Case, of_row
from benchmarks.memory_accuracy.subjects import subject_of
from megabatch.costs.counting import Work, count_work
from megabatch.costs.hardware import find_machine
from megabatch.costs.memory.step import default_loss
from megabatch.costs.models import SkipCompute
from megabatch.costs.strategy import Strategy
from megabatch.costs.time import StepTime, StepWork, step_time

DIM = {"clip-vit-l-14": 768, "clip-vit-l-14-336": 768, "clip-vit-l-16": 768, "clip-vit-h-14": 1024, "clip-vit-s-16": 384}
# Seconds for what these steps do once, whatever their batch.
BARE_S = 1.5e-3
Row = dict[str, Any]


def predicted_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield measured rows with their predictions; each model is counted once."""
    counted: dict[tuple[Any, ...], tuple[Work, ...]] = {}
    for row in rows:
        if "failed" in row:
            yield row
            continue
        case = of_row(row)
        key = case.model, case.precision, case.supervised, case.as_run
        if key not in counted:
            counted[key] = work_of(case)
        predicted = predict(case, counted[key])
        prediction = {"predicted_s": predicted.seconds, "parts": predicted.parts, "error": predicted.seconds / row["seconds"] - 1}
        yield row | prediction


def work_of(case: Case) -> tuple[Work, ...]:
    """Return the counted work of each tower of a case's model."""
    described = subject_of(case)
    with SkipCompute():
        model = described.build()
    towers = model if isinstance(model, tuple) else (model,)
    inputs = described.inputs if isinstance(described.inputs, tuple) else (described.inputs,)
    return tuple(_counted(tower, make, case) for tower, make in zip(towers, inputs, strict=True))


def predict(case: Case, work: tuple[Work, ...], host_s: float | None = None) -> StepTime:
    """Return the seconds of a case's step. host_s: the host's seconds per operation; None: the default."""
    machine = find_machine("cpu" if case.device == "cpu" else "H200")
    # The steps of the cases do less than those of a run: no clipping, no weight average, no loss read back.
    efficiency = replace(machine.device.efficiency, step_s=BARE_S)
    if host_s is not None:
        efficiency = replace(efficiency, host_s=host_s)
    machine = replace(machine, device=replace(machine.device, efficiency=efficiency))
    options: dict[str, Any] = {"precision": case.precision, "checkpointing": case.checkpointing}
    if case.supervised:
        task = StepWork(work, "supervised", fused=case.as_run)
        return step_time(task, Strategy(1, case.rows, case.rows, accumulate=True, **options), machine)
    task = StepWork(work, case.objective, DIM.get(case.model, 512), fused=case.as_run)  # type: ignore[arg-type]
    chunk = case.chunk or case.rows
    keep = case.keep if case.chunk else 1
    return step_time(task, Strategy(1, case.rows, chunk, keep, **options), machine)


def _counted(tower: nn.Module, inputs: Any, case: Case) -> Work:
    loss = default_loss if case.supervised else None
    work = count_work(tower, inputs, case.precision, device=case.device, loss=loss)  # type: ignore[arg-type]
    # Supervised inputs are made on the device; contrastive ones are copied to it.
    return work._replace(inputs=0.0) if case.supervised else work
