"""Retry a step that ran out of memory, with smaller chunks, on all ranks alike.

`retry_on_oom` runs the step as an `Attempt`. The chunked callables inside (`cached`, `accumulate`) join the attempt: they register
the state to restore before a retry, and the exchanges between ranks to run once every rank has succeeded.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..ring import Group, Ring
from . import rows
from .ddp_fsdp import exchange_gradients
from .rng_state import ForwardState, current_accelerator, host_sources, states_of

Args = ParamSpec("Args")
Result = TypeVar("Result")

# Messages of allocators and libraries that raise no exception type of their own for it.
MESSAGES = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")


def retry_on_oom(step: Callable[Args, Result], *optimizers: torch.optim.Optimizer, group: Group = ...) -> Callable[Args, Result]:
    """Return the step, repeated with smaller chunks if memory runs out on any rank; the batch and its gradients stay the same.

    step: encodes with `cached` encoders (or calls what `accumulate` returned) and runs backward. It must not update weights, change
        its inputs in place or fetch the batch itself, because a retry starts from the same values.
    optimizers: the gradients of their parameters are restored before a retry. Gradients that exist when the step begins are copied
        for that: call zero_grad() after the update, not inside the step.
    group: the ranks that step together, as in the losses.

    The first measure is to keep no graphs, the next to halve the chunks. Both stay for the rest of the run, with one warning each.
    With DDP the gradients are exchanged after the step, once all ranks have succeeded, and not during its backward.

    >>> import torch, megabatch
    >>> tower = torch.nn.Linear(8, 4)
    >>> optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
    >>> encode = megabatch.cached(tower, chunk=64)
    >>> def step(x, y):
    ...     loss = megabatch.clip_loss(encode(x), encode(y), 10.0)
    ...     loss.backward()
    ...     return loss.detach()
    >>> step = megabatch.retry_on_oom(step, optimizer)
    >>> loss = step(torch.randn(256, 8), torch.randn(256, 8))
    """
    if not optimizers:
        raise ValueError("no optimizer is given: pass those whose parameters the step computes gradients for")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"{optimizer!r} is a {type(optimizer).__name__}: must be an optimizer")

    @functools.wraps(step)
    def retrying(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        ring = Ring.of(group)
        start = _StepState(optimizers, rows.named_tensors(args, kwargs))
        changes = _Changes()
        while True:
            attempt = Attempt(ring)
            token = current_attempt.set(attempt)
            failure: str | None = None
            try:
                result = step(*args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = str(error)
            finally:
                current_attempt.reset(token)
            if not _failed_anywhere(attempt, failure, start.device, changes):
                for action in attempt.on_success.values():
                    action()
                changes.warn(ring)
                return result
            start.check(ring)
            release()
            for state in reversed(attempt.states):
                state.restore()
            start.restore()

    return retrying


class Shrinkable(Protocol):
    """Runs a batch in chunks and can switch to smaller ones.

    chunk: the limit of a chunk. unit: the option that it is the value of.
    """

    chunk: int
    unit: str

    def stop_keeping(self) -> bool:
        """Keep no graphs from now on, and return whether any were kept before."""


class Attempt:
    """What the chunked callables inside a step register for its end.

    chunked: the callables themselves; states: what to restore before a retry; on_success: exchanges between ranks, by the id of the
    object that they concern, to run once every rank has succeeded.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.chunked: list[Shrinkable] = []
        self.states: list[ForwardState] = []
        self.on_success: dict[int, Callable[[], object]] = {}

    def join(self, chunked: Shrinkable, meeting: list[Ring], ddp: DistributedDataParallel | None) -> None:
        """Register a callable. The gradients of `ddp` are exchanged once every rank is known to have them.

        meeting: the ranks that exchange something inside the callable's forward.
        """
        if meeting:
            raise ValueError(
                "ranks meet inside this model's forward (FSDP2 gathers weights, SyncBatchNorm statistics), so that one of them "
                "cannot drop out of it alone: retry_on_oom() works with DDP or one process; choose a chunk that fits, with a margin"
            )
        active = DistributedDataParallel._active_ddp_module
        if active is not None and active is not ddp and active.require_backward_grad_sync and self.ring.size > 1:
            raise ValueError(
                "retry_on_oom() around a DDP model that calls the cached encoder: it would exchange gradients while another "
                "rank may have run out of memory; cache the DDP model itself, cached(ddp, chunk=…)"
            )
        if ddp is not None and ddp.static_graph:
            raise ValueError(
                "retry_on_oom() with DDP(static_graph=True): DDP would exchange gradients in the first backward, but the exchange "
                "has to wait until every rank has finished it; leave static_graph out"
            )
        if all(chunked is not other for other in self.chunked):
            self.chunked.append(chunked)
        if ddp is not None:
            self.on_success[id(ddp)] = functools.partial(exchange_gradients, ddp)


current_attempt: ContextVar[Attempt | None] = ContextVar("attempt", default=None)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


def release() -> None:
    """Free what a failed attempt has left: unreachable graphs, and the blocks that the allocator caches."""
    gc.collect()
    for device in current_accelerator():
        torch.get_device_module(device).empty_cache()


def oom_warning(requested: int, chunk: int, stopped: bool, unit: str = "chunk") -> str:
    """Return the warning for the user after memory ran out.

    requested, chunk: the limit of a chunk before and after, which is the value of the option `unit`; stopped: whether graphs are no
    longer kept.
    """
    parts = ["graphs are no longer kept"] if stopped else []
    parts += [f"{unit} {chunk} instead of {requested}"] if chunk < requested else []
    return (
        f"out of memory; from here on {' and '.join(parts)}. The batch and the result stay the same. "
        f"Pass {f'{unit}={chunk}' if chunk < requested else 'a smaller keep'} to avoid the failed attempt"
    )


class _StepState:
    """The gradients, generators, weights and inputs that a step begins with."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], inputs: Sequence[tuple[str, Tensor]]) -> None:
        self.parameters: list[Tensor] = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        self.grads = [p.grad for p in self.parameters]
        self.values = [None if grad is None else grad.clone() for grad in self.grads]
        devices = dict.fromkeys([torch.device("cpu"), *current_accelerator(), *(p.device for p in self.parameters)])
        self.generators = ForwardState(devices, [], sources=states_of(host_sources()))
        # Without scalars: a scale that the step clamps before use is clamped again in the retry, which does no harm.
        weights = [("a weight", p) for p in self.parameters if p.numel() > 1]
        named = [*weights, *((f"its input {name}", tensor) for name, tensor in inputs)]
        self.versions = [(name, tensor, tensor._version) for name, tensor in named if not tensor.is_inference()]

    def check(self, ring: Ring) -> None:
        """Raise on all ranks if the step has changed, on any of them, a value that a retry starts from and cannot restore."""
        changed = next((name for name, tensor, version in self.versions if tensor._version != version), None)
        everywhere = [each[0] for each in ring.gather([changed is not None], self.device)]
        if any(everywhere):
            what = changed or f"what it starts from on rank {everywhere.index(1)}"
            raise RuntimeError(
                f"memory did not suffice for a step that has changed {what} in place, so it cannot be repeated in smaller chunks: "
                "update weights after the step, let it work on copies of its inputs, or choose a chunk that fits"
            )

    def restore(self) -> None:
        for p, grad, value in zip(self.parameters, self.grads, self.values, strict=True):
            # Into the same tensors: they may be views of DDP's buckets.
            p.grad = None if grad is None or value is None else grad.copy_(value)
        self.generators.restore()


class _Changes:
    """What the failures of a step have changed, for one warning at its end."""

    def __init__(self) -> None:
        self.stopped = False
        self.requested: dict[int, tuple[Shrinkable, int]] = {}

    def note(self, chunked: Sequence[Shrinkable]) -> None:
        for each in chunked:
            self.requested.setdefault(id(each), (each, each.chunk))

    def warn(self, ring: Ring) -> None:
        smaller = [(requested, each.chunk, each.unit) for each, requested in self.requested.values() if each.chunk < requested]
        if ring.rank == 0 and (smaller or self.stopped):
            requested, chunk, unit = max(smaller, default=(0, 0, "chunk"))
            warnings.warn(oom_warning(requested, chunk, self.stopped, unit), stacklevel=3)


def _failed_anywhere(attempt: Attempt, failure: str | None, device: torch.device, changes: _Changes) -> bool:
    """Return whether any rank ran out of memory; if so, stop keeping graphs or shrink the chunks, equally on all ranks."""
    ring, chunked = attempt.ring, attempt.chunked
    reports = ring.gather([failure is not None, len(chunked), sum(each.chunk for each in chunked)], device)
    failed = any(each[0] for each in reports)
    if not failed and len({each[2] for each in reports}) == 1:
        return False
    # A rank that failed early has not reached its later encoders yet.
    width = max(each[1] for each in reports)
    if width == 0:
        raise torch.OutOfMemoryError(failure or "another rank ran out of memory, and nothing in the step runs in chunks")
    if failed:
        changes.note(chunked)
        stopped = any([each.stop_keeping() for each in chunked])
        if any(each[0] for each in ring.gather([stopped], device)):
            changes.stopped = True
            return True
    chunks_by_rank = ring.gather([each.chunk for each in chunked] + [0] * (width - len(chunked)), device)
    smallest = [min(chunk for chunk in column if chunk) for column in zip(*chunks_by_rank, strict=True)]
    if failed and all(chunk == 1 for chunk in smallest):
        raise torch.OutOfMemoryError(failure or "another rank ran out of memory, and there is no smaller chunk than one row")
    for each, chunk in zip(chunked, smallest, strict=False):
        each.chunk = max(1, chunk // 2) if failed else chunk
    return failed
