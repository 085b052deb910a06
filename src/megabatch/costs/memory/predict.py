"""Predict the memory of a training step: trace it on fake tensors, replay the allocations, report the peak and its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from ...optimizers import STATES
from .allocator import StepEvents, replay
from .contrastive import ComposedStep, ContrastiveStep
from .repeats import UnequalBlocksError
from .setup import Prediction, Setup, check_rows
from .step import Inputs, Loss, SupervisedStep, TracedStep, build_on_meta, recording
from .trace import PhasePeak

# What fake tensors raise where an operation needs the values of a tensor.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
# The phases of a step, in order.
PHASES = ("forward", "loss", "backward", "optimizer step")
RECURRENT_OPERATIONS = {
    "aten::lstm",
    "aten::gru",
    "aten::mkldnn_rnn_layer",
    "aten::_thnn_fused_lstm_cell",
    "aten::lstm_cell",
    "aten::gru_cell",
}


def predict_memory(
    build: Callable[[], Any],
    inputs: Inputs | Sequence[Inputs],
    rows: int,
    setup: Setup | None = None,
    *,
    loss: Loss | None = None,
) -> Prediction:
    """Return the memory that one training step needs on each rank, without the device.

    The step runs on fake tensors, which have shapes and no contents: it needs no GPU and takes seconds for models of any size.

    build: a function that returns the model. For a contrastive objective it returns a pair of towers (x, y), each of which returns
        embeddings (rows, dim); y is None if x encodes both sides.
    inputs: a function from a number of rows to example inputs: a tensor, a tuple of positional arguments, or a dict of arguments by
        name. Only shapes and dtypes matter. For two towers, a pair of such functions.
    rows: samples of this rank in one step, its shard of the batch.
    setup: optimizer, precision, ranks, chunk, objective and device; None: `Setup()`, AdamW in fp32 on one GPU.
    loss: a function from the output of a supervised model to a scalar. None: the output's own `loss`, or cross-entropy of logits
        (rows, classes).

    Raises a ValueError if the model's computation depends on the values of a tensor.

    >>> import torch
    >>> prediction = predict_memory(lambda: torch.nn.Linear(1024, 1024), lambda rows: torch.empty(rows, 1024), 4096)
    >>> prediction.parts["weights"], prediction.parts["optimizer"]
    (4198400, 8396800)
    """
    setup = setup or Setup()
    check_rows(rows)
    step = trace_step(build, inputs, rows, setup, loss)
    return summarize(step, whole_step(step, rows))


def trace_step(
    build: Callable[[], Any], inputs: Inputs | Sequence[Inputs], rows: int, setup: Setup, loss: Loss | None
) -> SupervisedStep | ContrastiveStep:
    """Return the traced step; a ValueError if what the model computes depends on values, which fake tensors do not have."""
    if setup.contrastive and loss is not None:
        raise ValueError(f"loss is given, but objective {setup.objective!r} has its own; leave it out")
    try:
        return _traced(build, inputs, rows, setup, loss, whole=False)
    # The model counts its blocks, or equal blocks do different things. Whatever else is wrong shows again.
    except (UnequalBlocksError, LookupError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError):
        pass
    try:
        return _traced(build, inputs, rows, setup, loss, whole=True)
    except NEEDS_VALUES as error:
        raise ValueError(
            f"{getattr(error, 'func', error)}: its output depends on the values of a tensor, which a prediction does not have; "
            "give the model inputs that do not need it (no padding mask, fixed lengths), or measure on the device"
        ) from error


def _traced(
    build: Callable[[], Any], inputs: Inputs | Sequence[Inputs], rows: int, setup: Setup, loss: Loss | None, *, whole: bool
) -> SupervisedStep | ContrastiveStep:
    """Trace the step with all blocks of the model, or with few of each run of equal ones."""
    modules = build_on_meta(build)
    with recording(setup) as recorder:
        if setup.contrastive:
            return ContrastiveStep(setup, recorder, modules, inputs, rows, whole=whole)
        return SupervisedStep(setup, recorder, _check_module(modules), _check_function(inputs), rows, loss, whole=whole)


def whole_step(step: SupervisedStep | ContrastiveStep, rows: int) -> SupervisedStep | ComposedStep:
    """Return the step over `rows` rows: a supervised one as it was traced, a contrastive one composed from its traced chunks."""
    return step if isinstance(step, SupervisedStep) else ComposedStep(step, rows, dict.fromkeys(step.modules, step.setup.keep))


def summarize(step: SupervisedStep | ContrastiveStep, whole: SupervisedStep | ComposedStep) -> Prediction:
    """Return the prediction for a whole step. step: the traced one."""
    peaks, reserved = peaks_and_reserved(step, whole)
    return prediction_from(peaks, reserved, tuple(_assumptions(step)))


def peaks_and_reserved(step: TracedStep, whole: SupervisedStep | ComposedStep) -> tuple[dict[str, PhasePeak], int]:
    """Return the peak of each phase, and the bytes that have to be reserved on the device for all of them."""
    trace = whole.trace
    if step.setup.device == "cpu":
        peaks = trace.peaks(step.begins)
        return peaks, max(peak.bytes for peak in peaks.values())
    setup_events = trace.events[step.state_begins : step.begins]
    temporary = {event.allocation for event in setup_events if not event.is_allocation}
    events = StepEvents(
        persistent=trace.events[: step.state_begins],
        state=[event for event in setup_events if event.is_allocation and event.allocation not in temporary],
        body=trace.events[step.begins : whole.update_begins],
        update=trace.events[whole.update_begins :],
    )
    replayed, reserved = replay(trace, events)
    return replayed.peaks(step.begins), reserved


def prediction_from(peaks: Mapping[str, PhasePeak], reserved: int, assumptions: tuple[str, ...]) -> Prediction:
    """Return the prediction for a step whose phases have these peaks."""
    peak = max(peaks.values(), key=lambda each: each.bytes)
    phases = {phase: peaks[phase].bytes for phase in PHASES if phase in peaks}
    return Prediction(peak.bytes, reserved, peak.parts, peak.moment, phases, assumptions)


def _assumptions(step: TracedStep) -> Iterator[str]:
    setup, recorder = step.setup, step.recorder
    if setup.device == "cpu":
        yield "what CPU kernels allocate while they run is not counted"
        return
    assert recorder.workspaces is not None
    size = recorder.workspaces.cublas_bytes / 2**20
    yield f"cuBLAS takes two workspaces of {size:.0f} MiB: one for forward's thread, one for backward's"
    yield "reserved: the caching allocator with default settings, on one stream; the CUDA context and NCCL's buffers come on top"
    if "aten::convolution" in recorder.operations:
        yield "cuDNN copies channels-first operands to channels last; its algorithms and workspaces were observed on an H200"
    if setup.autocast is not None:
        yield f"autocast to {setup.precision} by CUDA's lists of operations; weights are copied once per forward"
    if recorder.operations & RECURRENT_OPERATIONS:
        yield "recurrent layers are counted step by step; cuDNN's own reserve space for them differs"
    if isinstance(setup.optimizer, str) and STATES[setup.optimizer].assumption:
        yield STATES[setup.optimizer].assumption
    if setup.sharded:
        yield f"FSDP2 gathers one block while the next is in flight; shards are 1/{setup.ranks} of each tensor, rounded up"
    elif setup.ranks > 1:
        yield "DDP keeps buckets of the gradients' size (gradient_as_bucket_view is False)"


def _check_module(value: Any) -> nn.Module:
    if not isinstance(value, nn.Module):
        raise ValueError(
            f"build returns a {type(value).__name__}: a supervised step needs one nn.Module; for two towers set objective"
        )
    return value


def _check_function(value: Any) -> Inputs:
    if not callable(value):
        raise ValueError(f"inputs is a {type(value).__name__}: must be a function from a number of rows to example inputs")
    return value
