"""The work and the memory of a question's model: the only place of a plan where a model is built and traced."""

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
from ..costs.memory import MemoryCurve, MemoryPredictor, Prediction, Setup, memory_curve, predict_memory
from ..costs.models import EncoderWithInputs, copy_modules, encoders_of, module_from_function
from ..costs.strategy import Precision, Strategy
from ..objectives import MEAN, OBJECTIVES
from ..optimizers import OPTIMIZERS
from ..towers.model import Classifier
from .request import Request


class Workload(NamedTuple):
    """The towers' forwards, the modules, and functions that make inputs for them."""

    towers: tuple[Work, ...]
    modules: tuple[nn.Module, ...]
    inputs: tuple[Callable[[int], Any], ...]


def workload(question: Request, run: config.Run, precision: Precision, machine: Machine) -> Workload:
    """Builds what the question names, without filling or computing anything, and counts it."""
    modules, inputs = _built(question, run)
    loss = _next_token if question.objective == "lm" else None
    work = tuple(
        count_work(*tower, precision, device=machine.device.type, loss=loss) for tower in zip(modules, inputs, strict=True)
    )
    return Workload(work, modules, inputs)


def traced(question: Request, run: config.Run, work: Workload, machine: Machine) -> MemoryPredictor:
    """Predictions of memory. A trace takes seconds: those that differ only in rows and kept chunks share one."""

    @functools.cache
    def prepared(checkpointing: bool) -> tuple[nn.Module, ...]:
        return _checkpointed(question, run, work) if checkpointing else work.modules

    def setup_of(strategy: Strategy) -> Setup:
        return Setup(
            optimizer=OPTIMIZERS[question.optimizer].state,
            precision=strategy.precision,
            ranks=strategy.ranks,
            sharding=strategy.sharding,
            chunk=strategy.chunk,
            keep=strategy.keep,
            objective=OBJECTIVES[run.loss.objective if question.pairs else MEAN].cost_name,
            workspace=run.compute.workspace,
            ema=question.ema is not None,
            capability=machine.device.capability,
            device=machine.device.type,
        )

    @functools.cache
    def chunked(strategy: Strategy) -> MemoryCurve:
        modules = prepared(strategy.checkpointing)
        pair = (modules[0], modules[1] if len(modules) > 1 else None)
        return memory_curve(lambda: copy_modules(pair), (work.inputs[0], work.inputs[-1]), setup_of(strategy))

    @functools.cache
    def accumulated(strategy: Strategy) -> Prediction:
        loss = _next_token if question.objective == "lm" else None
        return predict_memory(
            lambda: copy_modules(prepared(strategy.checkpointing)[0]), work.inputs[0], strategy.shard, setup_of(strategy), loss=loss
        )

    def predict(strategy: Strategy) -> Prediction:
        if question.pairs:
            return chunked(replace(strategy, shard=strategy.chunk, keep=0)).peak(strategy.shard, strategy.keep)
        # From the second chunk on nothing changes.
        return accumulated(replace(strategy, shard=min(strategy.shard, 2 * strategy.chunk), keep=0))

    return predict


def _checkpointed(question: Request, run: config.Run, work: Workload) -> tuple[nn.Module, ...]:
    """The modules with checkpointing, as the run's own switch turns it on; those that have none stay as they are."""
    if question.objective == "lm":
        return work.modules
    again = replace(run, x=replace(run.x, checkpointing=True), y=replace(run.y, checkpointing=run.y.name != "x"))
    try:
        return _built(question, again)[0]
    except ValueError:
        return work.modules


def _built(question: Request, run: config.Run) -> tuple[tuple[nn.Module, ...], tuple[Callable[[int], Any], ...]]:
    """The modules of a question, and what makes inputs for each."""
    if question.objective == "lm":
        if not isinstance(question.model, str):
            raise ValueError(f"model is {question.model!r}: a language model is named as package.module:function")
        return (module_from_function(question.model),), (_tokens(question),)
    built = encoders_of(run)
    if not question.pairs:
        return (_classifier(built[0], run, question.classes),), (built[0].inputs,)
    return tuple(side.module for side in built), tuple(side.inputs for side in built)


def _next_token(out: Any) -> torch.Tensor:
    """Cross-entropy of a language model's logits, (rows, length, vocabulary), with whatever tokens."""
    logits = getattr(out, "logits", out).flatten(0, -2)
    return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))


def _classifier(side: EncoderWithInputs, run: config.Run, classes: int) -> nn.Module:
    return Classifier(side.module.tower, run.loss.dim, classes, locked=run.x.locked)


def _tokens(question: Request) -> Callable[[int], torch.Tensor]:
    return lambda rows: torch.zeros(rows, question.length, dtype=torch.int64)
