"""The work and the memory of the requested model. This is the only part of a plan that builds and traces a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import config
from ..costs.counting import Work, count_work
from ..costs.hardware import Machine
from ..costs.lora import add_adapters
from ..costs.memory import ChunkedMemoryCurve, MemoryCurve, MemoryPredictor, Prediction, Setup, memory_curve
from ..costs.memory.predict import summarize, trace_step
from ..costs.memory.step import SupervisedStep
from ..costs.models import EncoderWithInputs, SkipCompute, copy_modules, encoders_of, module_from_function
from ..costs.strategy import Precision, Strategy
from ..objectives import MEAN, OBJECTIVES, LossOptions
from ..optimizers import OPTIMIZERS, is_fused
from ..towers import BuiltTower, find_library, full_name, names_code
from ..towers.memory_format import choose_memory_format
from ..towers.model import Classifier
from ..towers.patches import linear_image_patches, uses_linear_patches
from ..towers.residuals import keep_residuals_in_bf16
from ..towers.transformers import PREFIX, language_model
from .request import Request


class Workload(NamedTuple):
    """The counted work of each tower, the modules, and functions that make inputs of so many rows for them.

    built: the towers that prepare samples; none for a language model.
    """

    towers: tuple[Work, ...]
    modules: tuple[nn.Module, ...]
    inputs: tuple[Callable[[int], Any], ...]
    precision: Precision = "fp32"
    built: tuple[BuiltTower, ...] = ()


def workload(request: Request, run: config.Run, precision: Precision, machine: Machine) -> Workload:
    """Build the requested model on fake tensors and count its operations."""
    modules, inputs, built = _build(request, run, precision, machine)
    loss = _next_token_loss if request.objective == "lm" else None
    work = tuple(
        count_work(*tower, precision, device=machine.device.type, loss=loss) for tower in zip(modules, inputs, strict=True)
    )
    return Workload(work, modules, inputs, precision, built)


def loss_options(run: config.Run, negatives: int) -> LossOptions:
    """Return the options of a run's loss that change its cost. negatives: hard negatives per query."""
    loss = run.loss
    return LossOptions(
        directions=loss.directions,
        dims=loss.dims,
        spread_out=loss.spread_out > 0,
        negatives=negatives,
        in_batch=loss.in_batch or not negatives,
        hardened=loss.hardness != 0 and loss.hardness_on != "hard",
        masked=loss.duplicates != "negative",
        weighted=bool(loss.hardness or loss.label_smoothing) or loss.drop_above is not None or loss.drop_ratio is not None,
    )


def update_is_fused(request: Request, run: config.Run, machine: Machine) -> bool:
    """Return whether the optimizer of the planned run uses a fused kernel. `train` does not train language models: they do not."""
    # As in the planned run: a class of the user's own is kept.
    name = request.optimizer if run.optimizer.name in OPTIMIZERS else run.optimizer.name
    return request.objective != "lm" and is_fused(name, run.optimizer.options, machine.device.type)


def traced(request: Request, run: config.Run, work: Workload, machine: Machine) -> MemoryPredictor:
    """Return a function that predicts the memory of a strategy.

    A trace takes seconds, so strategies that differ only in rows and kept chunks share one.
    """

    @functools.cache
    def prepared(checkpointing: bool) -> tuple[nn.Module, ...]:
        return _checkpointed(request, run, work, machine) if checkpointing else work.modules

    def setup_of(strategy: Strategy) -> Setup:
        return Setup(
            optimizer=OPTIMIZERS[request.optimizer].state,
            fused=update_is_fused(request, run, machine),
            precision=strategy.precision,
            ranks=strategy.ranks,
            sharding="ddp" if strategy.sharding == "ddp" else "fsdp2",
            gradient_exchange=strategy.gradient_exchange,
            chunk=strategy.chunk,
            keep=strategy.keep,
            objective=OBJECTIVES[run.loss.objective if request.pairs else MEAN].cost_name,
            loss_options=loss_options(run, request.negatives),
            workspace=run.compute.workspace,
            ema=request.ema is not None,
            capability=machine.device.capability,
            device=machine.device.type,
            device_memory=machine.device.memory,
        )

    first: dict[Strategy, MemoryCurve] = {}

    @functools.cache
    def chunked(strategy: Strategy) -> MemoryCurve:
        # Chunks of different sizes share what does not depend on their size: the weights and the optimizer's step.
        key = replace(strategy, shard=1, chunk=1)
        if isinstance(known := first.get(key), ChunkedMemoryCurve):
            return known.at_chunk(strategy.chunk)
        modules = prepared(strategy.checkpointing)
        pair = (modules[0], modules[1] if len(modules) > 1 else None)
        first[key] = memory_curve(lambda: copy_modules(pair), (work.inputs[0], work.inputs[-1]), setup_of(strategy))
        return first[key]

    first_step: dict[Strategy, SupervisedStep] = {}

    @functools.cache
    def accumulated(strategy: Strategy) -> Prediction:
        # As in `chunked`.
        key = replace(strategy, shard=1, chunk=1)
        again = first_step[key].at_chunk(strategy.shard, strategy.chunk) if key in first_step else None
        if again is not None:
            return summarize(again, again)
        loss = _next_token_loss if request.objective == "lm" else None
        # Prepared here, not where the trace puts what is built on the meta device.
        module = prepared(strategy.checkpointing)[0]
        step = trace_step(lambda: copy_modules(module), work.inputs[0], strategy.shard, setup_of(strategy), loss)
        assert isinstance(step, SupervisedStep)
        first_step[key] = step
        return summarize(step, step)

    def predict(strategy: Strategy) -> Prediction:
        strategy = strategy.on_fewest_ranks
        if request.pairs:
            return chunked(replace(strategy, shard=strategy.chunk, keep=0)).peak(strategy.shard, strategy.keep)
        # Memory does not change after the second chunk.
        return accumulated(replace(strategy, shard=min(strategy.shard, 2 * strategy.chunk), keep=0))

    return predict


def _checkpointed(request: Request, run: config.Run, work: Workload, machine: Machine) -> tuple[nn.Module, ...]:
    """Return the modules with activation checkpointing as the run switches it on, or unchanged if they do not support it."""
    if request.objective == "lm":
        modules = _build(request, run, work.precision, machine).modules
        for module in modules:
            switch = getattr(module, "gradient_checkpointing_enable", None)
            if switch is not None:
                switch({"use_reentrant": False})
        return modules
    recomputing = replace(run, x=replace(run.x, checkpointing=True), y=replace(run.y, checkpointing=run.y.name != "x"))
    try:
        return _build(request, recomputing, work.precision, machine).modules
    except ValueError:
        return work.modules


class _Parts(NamedTuple):
    modules: tuple[nn.Module, ...]
    inputs: tuple[Callable[[int], Any], ...]
    built: tuple[BuiltTower, ...] = ()


def _build(request: Request, run: config.Run, precision: Precision, machine: Machine) -> _Parts:
    """Return the modules of a request, with adapters if it asks for them, and the functions that make their inputs."""
    parts = _build_trainable(request, run)
    if request.objective != "lm" and uses_linear_patches(run.compute.linear_patches, machine.device.type, precision):
        for module in parts.modules:
            linear_image_patches(module)
    with SkipCompute():
        names = (str(request.model),) if request.objective == "lm" else (run.x.name, run.y.name)
        for module, name in zip(parts.modules, names, strict=False):
            choose_memory_format(module, run.compute, machine.device.type, precision, own_code=names_code(name))
    if request.objective != "lm" and run.compute.bf16_residuals:
        for module in parts.modules:
            keep_residuals_in_bf16(module)
    if request.lora is not None:
        with SkipCompute():
            parts = parts._replace(modules=tuple(add_adapters(module, request.lora, precision) for module in parts.modules))
    return parts


def _build_trainable(request: Request, run: config.Run) -> _Parts:
    if request.objective == "lm":
        if not isinstance(request.model, str):
            raise ValueError(
                f"model is {request.model!r}: a language model must be named, as gpt2, transformers:FOLDER or"
                " package.module:function"
            )
        return _Parts((_language_model(request.model),), (_token_inputs(request),))
    encoders = encoders_of(run)
    built = tuple(encoder.tower for encoder in encoders)
    if not request.pairs:
        return _Parts((_classifier(encoders[0], run, request.classes),), (encoders[0].inputs,), built)
    return _Parts(tuple(encoder.module for encoder in encoders), tuple(encoder.inputs for encoder in encoders), built)


def _language_model(name: str) -> nn.Module:
    """Return a language model by the name of a known one, of a folder, or of a function that builds it."""
    full = full_name(name)
    if full.startswith(PREFIX):
        with SkipCompute():
            return language_model(full.removeprefix(PREFIX))
    if not names_code(full):
        # Raises, with similar names.
        find_library(full)
        raise ValueError(f"model is {name!r}: it is not a language model; name one as gpt2 or package.module:function")
    return module_from_function(name)


def _next_token_loss(out: Any) -> torch.Tensor:
    """Return the cross-entropy of a language model's logits, (rows, length, vocabulary); the target tokens do not matter here."""
    logits = getattr(out, "logits", out).flatten(0, -2)
    return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))


def _classifier(encoder: EncoderWithInputs, run: config.Run, classes: int) -> nn.Module:
    return Classifier(encoder.module.tower, run.loss.dim, classes, locked=run.x.locked)


def _token_inputs(request: Request) -> Callable[[int], torch.Tensor]:
    return lambda rows: torch.zeros(rows, request.length, dtype=torch.int64)
