"""Estimates of a case's memory without the device: the prediction, and the formulas of other tools."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.memory_accuracy.cases import Case, Limit
from benchmarks.memory_accuracy.subjects import subject, subject_of
from megabatch.costs.memory import Prediction, predict_memory
from megabatch.costs.memory.setup import PRECISIONS
from megabatch.costs.memory.step import FakeParameters, build_on_meta, recording

MOST_ROWS = 4096
# Rule of thumb: 12 bytes per parameter, three times its 4.
THUMB, FP32 = 3, 4
# accelerate's estimate_training_usage: the largest figure that it lists for a precision, as a multiple of the fp32 weights.
ACCELERATE = {"fp32": 4, "bf16": 2}


def predict(case: Case) -> Prediction:
    model = subject_of(case)
    return predict_memory(model.build, model.inputs, case.rows, case.setup())


def predicted_row(case: Case) -> dict[str, Any]:
    """Return the prediction, its parts and the other estimates in bytes; predict_seconds is CPU time without imports."""
    subject(case.model)
    began = time.process_time()
    predicted = predict(case)
    return {
        **asdict(case),
        "predicted": predicted.peak_bytes,
        "predicted_reserved": predicted.reserved_bytes,
        "parts": predicted.parts,
        "moment": predicted.moment,
        "predict_seconds": round(time.process_time() - began, 2),
        "predicted_with": torch.__version__,
        **{f"others_{name}": size for name, size in others(case).items()},
    }


def fitting_row(limit: Limit) -> dict[str, Any]:
    """Return the largest rows or chunk whose predicted reserve keeps the limit, by doubling and then to a sixteenth."""
    predictions: dict[int, Prediction] = {}

    def fits(size: int) -> bool:
        predictions[size] = predict(limit.at(size))
        return predictions[size].reserved_bytes <= limit.bytes

    good = 1
    if not fits(good):
        raise ValueError(f"{limit.bytes} bytes are too few for one row of {limit.case.model}")
    while 2 * good <= MOST_ROWS and fits(2 * good):
        good *= 2
    step = good // 2
    while step >= max(1, good // 16):
        good, step = (good + step if fits(good + step) else good), step // 2
    return {
        "kind": "limit",
        **asdict(limit.at(good)),
        "limit": limit.bytes,
        "predicted": predictions[good].peak_bytes,
        "predicted_reserved": predictions[good].reserved_bytes,
    }


def others(case: Case) -> dict[str, int]:
    """Return the estimates of other tools, in bytes.

    rule_of_thumb: 12 bytes per parameter for weights, gradients and Adam's state, and rows × length × width × bytes for each layer,
        as if a layer kept nothing else.
    torchinfo: inputs, weights, and twice the outputs of innermost modules with weights, as its summary finds them in one forward.
    accelerate: a multiple of the weights, independent of the batch.
    """
    model = subject(case.model)
    modules = build_on_meta(model.build)
    inputs = model.inputs if isinstance(model.inputs, tuple) else (model.inputs,)
    sizes = {"weights": 0, "inputs": 0, "innermost": 0, "layers": 0}
    modules = modules if isinstance(modules, tuple) else (modules,)
    for module, make in zip(modules, inputs, strict=True):
        for name, size in _sizes(case, module, make).items():
            sizes[name] += size
    weights = sum(p.numel() * p.element_size() for module in modules for p in module.parameters())
    return {
        "rule_of_thumb": THUMB * weights + sizes["layers"],
        "torchinfo": sizes["inputs"] + sizes["weights"] + 2 * sizes["innermost"],
        "accelerate": ACCELERATE[case.precision] * weights,
    }


def _sizes(case: Case, module: nn.Module, make: Callable[[int], Any]) -> dict[str, int]:
    """Return the bytes of inputs, of weights and outputs of innermost modules, and of layers (members of lists of modules)."""
    innermost = {inner for inner in module.modules() if not any(True for _ in inner.children())}
    members = {member for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) for member in m}
    layers = {member for member in members if not any(inner in members for inner in member.modules() if inner is not member)}
    dtype = PRECISIONS[case.precision]
    element = FP32 if dtype is None else dtype.itemsize
    weights = sum(p.numel() * p.element_size() for inner in innermost for p in inner.parameters())
    sizes = {"weights": weights, "innermost": 0, "layers": 0}

    def note(inner: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor):
            return
        if inner in innermost and any(True for _ in inner.parameters()):
            sizes["innermost"] += first.numel() * first.element_size()
        if inner in layers:
            sizes["layers"] += first.numel() * element

    with recording(case.setup()) as recorder, torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
        fake = FakeParameters(recorder).replace_in(module).eval()
        hooks = [inner.register_forward_hook(note) for inner in fake.modules()]
        batch = make(case.rows)
        tensors = list(batch.values()) if isinstance(batch, dict) else [batch]
        fake(**batch) if isinstance(batch, dict) else fake(batch)
    for hook in hooks:
        hook.remove()
    return {**sizes, "inputs": sum(t.numel() * t.element_size() for t in tensors)}
