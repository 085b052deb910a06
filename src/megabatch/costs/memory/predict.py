"""predict_memory: one step traced, its peak and parts, and what the allocator asks of the device for it."""

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
from .allocator import CachingAllocator, Piece
from .composition import Composition
from .contrastive import Contrastive
from .fake_params import built
from .setup import Prediction, Setup, check_rows
from .step import Inputs, Loss, Step, Supervised, tracing
from .trace import Block, Peak, Trace

IMPOSSIBLE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
# In this order a step goes through them.
PHASES = ("forward", "loss", "backward", "optimizer step")
RECURRENT = {
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
    """The memory that a training step takes, without the device.

    build: makes the model. For a contrastive objective a pair of towers, (x, y), y None where x serves both sides; each returns the
        embeddings that the loss takes.
    inputs: makes example inputs for a number of rows: a tensor, a tuple by position or a dict by name. Shapes and dtypes count,
        contents do not. For two towers a pair of such functions.
    rows: of this rank in one step: its shard of the batch.
    loss: takes what a supervised model returns to a number. None: the model's own `loss`, or cross-entropy of (rows, classes).

    >>> import torch
    >>> prediction = predict_memory(lambda: torch.nn.Linear(1024, 1024), lambda rows: torch.empty(rows, 1024), 4096)
    >>> prediction.parts["weights"], prediction.parts["optimizer"]
    (4198400, 8397824)
    """
    setup = setup or Setup()
    check_rows(rows)
    step = trace_step(build, inputs, rows, setup, loss)
    ran = step if isinstance(step, Supervised) else Composition(step, rows, dict.fromkeys(step.modules, setup.keep))
    return summary(step, ran)


def trace_step(
    build: Callable[[], Any], inputs: Inputs | Sequence[Inputs], rows: int, setup: Setup, loss: Loss | None
) -> Supervised | Contrastive:
    """The step, traced; a ValueError where what a model does follows from numbers that fake tensors do not have."""
    if setup.contrastive and loss is not None:
        raise ValueError(f"loss is given, and objective {setup.objective!r} has its own; leave it out")
    modules = built(build)
    try:
        with tracing(setup) as recorder:
            if setup.contrastive:
                return Contrastive(setup, recorder, modules, inputs, rows)
            return Supervised(setup, recorder, _module(modules), _function(inputs), rows, loss)
    except IMPOSSIBLE as error:
        raise ValueError(
            f"{getattr(error, 'func', error)}: what comes out depends on numbers in a tensor, which a prediction does not have; "
            "give the model inputs that do without it (no padding mask, fixed lengths), or measure on the device"
        ) from error


def summary(step: Supervised | Contrastive, ran: Supervised | Composition) -> Prediction:
    """The prediction of a step from what ran: the step itself, or one put together from its chunks."""
    peaks, reserved = peaks_and_reserve(step, ran)
    return of_peaks(peaks, reserved, tuple(_assumptions(step)))


def peaks_and_reserve(step: Step, ran: Supervised | Composition) -> tuple[dict[str, Peak], int]:
    """The peak of each phase, and what the device has to have for all of them."""
    if step.setup.device == "cpu":
        peaks = ran.trace.peaks(step.begins)
        return peaks, max(peak.bytes for peak in peaks.values())
    given, reserved = as_given_out(step, ran)
    return given.peaks(step.begins), reserved


def of_peaks(peaks: Mapping[str, Peak], reserved: int, assumptions: tuple[str, ...]) -> Prediction:
    """The prediction whose phases have these peaks."""
    peak = max(peaks.values(), key=lambda each: each.bytes)
    phases = {phase: peaks[phase].bytes for phase in PHASES if phase in peaks}
    return Prediction(peak.bytes, reserved, peak.parts, peak.moment, phases, assumptions)


def as_given_out(step: Step, ran: Supervised | Composition) -> tuple[Trace, int]:
    """The trace as the caching allocator serves it in a second step, and what it then has asked of the device.

    The first step creates the optimizer's state. A block may be larger than what was asked for: the allocator does not split off a
    rest of up to 1 MiB, and counts it as allocated.
    """
    trace = ran.trace
    lasting = trace.events[: step.state_begins]
    made = trace.events[step.state_begins : step.begins]
    gone = {event.block for event in made if not event.comes}
    state = [event for event in made if event.comes and event.block not in gone]
    body, update = trace.events[step.begins : ran.update_begins], trace.events[ran.update_begins :]
    allocator = CachingAllocator()
    pieces: dict[int, Piece] = {}
    blocks = list(trace.blocks)
    for event in [*lasting, *body, *state, *update, *body, *update]:
        asked = trace.blocks[event.block]
        if asked.bytes == 0:
            continue
        # What a step leaves behind goes when the next one makes it anew.
        if event.block in pieces:
            allocator.give(pieces.pop(event.block), asked.bytes)
        if event.comes:
            piece = pieces[event.block] = allocator.take(asked.bytes)
            blocks[event.block] = Block(asked.bytes, asked.kind, piece.size - asked.bytes)
    return Trace(blocks, trace.events), allocator.reserved


def _assumptions(step: Step) -> Iterator[str]:
    setup, recorder = step.setup, step.recorder
    if setup.device == "cpu":
        yield "what a CPU's kernels allocate for themselves while they run is not counted"
        return
    scratch = recorder.scratch
    assert scratch is not None
    yield f"cuBLAS takes two workspaces of {scratch.blas_bytes / 2**20:.0f} MiB: one for forward's thread, one for backward's"
    yield "reserved: the caching allocator with its default settings, on one stream; the CUDA context and NCCL's buffers add to it"
    if "aten::convolution" in recorder.operations:
        yield "cuDNN lays out operands anew where channels come first; which kernels run and what they need was seen on an H200"
    if setup.autocast is not None:
        yield f"autocast to {setup.precision} by CUDA's lists of operations; weights are copied once a forward"
    if recorder.operations & RECURRENT:
        yield "recurrent layers are counted step by step; cuDNN's own reserve for them differs"
    if isinstance(setup.optimizer, str) and STATES[setup.optimizer].assumption:
        yield STATES[setup.optimizer].assumption
    if setup.sharded:
        yield f"FSDP2 gathers one block at a time with the next on its way; shards are 1/{setup.ranks} of each tensor, rounded up"
    elif setup.ranks > 1:
        yield "DDP keeps buckets of the gradients' size (gradient_as_bucket_view is False)"


def _module(value: Any) -> nn.Module:
    if not isinstance(value, nn.Module):
        raise ValueError(
            f"build returns a {type(value).__name__}: a supervised step needs one nn.Module; two towers need an objective"
        )
    return value


def _function(value: Any) -> Inputs:
    if not callable(value):
        raise ValueError(f"inputs is a {type(value).__name__}: must be a function from a number of rows to example inputs")
    return value
