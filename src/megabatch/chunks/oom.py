"""Out of memory, and on with the run: a step that did not fit is repeated with smaller chunks, on all ranks alike."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from ..ring import Group, Ring
from . import rows
from .attempt import Attempt, Shrinkable, current
from .cached import what_changed
from .generators import host_sources
from .memory import is_out_of_memory, release
from .rng_state import Replay, current_accelerator, states_of

Args = ParamSpec("Args")
Result = TypeVar("Result")


def retry_on_oom(step: Callable[Args, Result], *optimizers: torch.optim.Optimizer, group: Group = ...) -> Callable[Args, Result]:
    """The step, repeated with smaller chunks if memory runs out on any rank; the batch and its gradients stay the same.

    step: encodes with `cached` encoders (or calls what `accumulate` returned) and runs backward. It neither updates weights nor
        changes its inputs in place nor fetches the batch itself: a repetition has to start from the same.
    optimizers: their parameters' gradients are put back to what they were before a repetition. Gradients that exist when the step
        begins are copied for that: call zero_grad() after the update, not inside the step.
    group: the ranks that step together, as in the losses.

    The first measure is to keep no graphs, the next to halve the chunks; both are said once and stay for the run. With DDP the
    gradients are exchanged after the step, once all ranks are through it, and not during its backward.

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
    def repeating(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        ring = Ring.of(group)
        start = _Start(optimizers, rows.named_tensors(args, kwargs))
        changes = _Changes()
        while True:
            attempt = Attempt(ring)
            token = current.set(attempt)
            failure: str | None = None
            try:
                result = step(*args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = str(error)
            finally:
                current.reset(token)
            if not _failed_anywhere(attempt, failure, start.device, changes):
                for action in attempt.afterwards.values():
                    action()
                changes.say(ring)
                return result
            start.check(ring)
            release()
            for before in reversed(attempt.starts):
                before.restore()
            start.restore()

    return repeating


class _Start:
    """The gradients, generators, weights and inputs that a step begins with."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], inputs: Sequence[tuple[str, Tensor]]) -> None:
        self.parameters: list[Tensor] = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        self.grads = [p.grad for p in self.parameters]
        self.values = [None if grad is None else grad.clone() for grad in self.grads]
        devices = dict.fromkeys([torch.device("cpu"), *current_accelerator(), *(p.device for p in self.parameters)])
        self.replay = Replay(devices, [], sources=states_of(host_sources()))
        # A scale that the step clamps before it uses it is clamped again: no harm.
        weights = [("a weight", p) for p in self.parameters if p.numel() > 1]
        named = [*weights, *((f"its input {name}", tensor) for name, tensor in inputs)]
        self.versions = [(name, tensor, tensor._version) for name, tensor in named if not tensor.is_inference()]

    def check(self, ring: Ring) -> None:
        """Raise on all ranks if the step has changed on any of them what a repetition would start from and cannot be put back."""
        changed = next((name for name, tensor, version in self.versions if tensor._version != version), None)
        everywhere = [each[0] for each in ring.gather([changed is not None], self.device)]
        if any(everywhere):
            what = changed or f"what it starts from on rank {everywhere.index(1)}"
            raise RuntimeError(
                f"memory did not suffice for a step that has changed {what} in place, so it cannot be repeated in smaller chunks: "
                "update weights after the step, have it work on copies of its inputs, or choose a chunk that fits"
            )

    def restore(self) -> None:
        for p, grad, value in zip(self.parameters, self.grads, self.values, strict=True):
            # Into the same tensors: DDP may have its buckets there.
            p.grad = None if grad is None or value is None else grad.copy_(value)
        self.replay.restore()


class _Changes:
    """What a step's failures have changed, to be said once."""

    def __init__(self) -> None:
        self.stopped = False
        self.asked: dict[int, tuple[Shrinkable, int]] = {}

    def note(self, chunked: Sequence[Shrinkable]) -> None:
        for each in chunked:
            self.asked.setdefault(id(each), (each, each.chunk))

    def say(self, ring: Ring) -> None:
        smaller = [(asked, each.chunk) for each, asked in self.asked.values() if each.chunk < asked]
        if ring.rank == 0 and (smaller or self.stopped):
            warnings.warn(what_changed(*max(smaller, default=(0, 0)), self.stopped), stacklevel=3)


def _failed_anywhere(attempt: Attempt, failure: str | None, device: torch.device, changes: _Changes) -> bool:
    """Whether some rank ran out of memory; less is then kept, or chunks are smaller, and they are equal on all ranks."""
    ring, chunked = attempt.ring, attempt.chunked
    facts = ring.gather([failure is not None, len(chunked), sum(each.chunk for each in chunked)], device)
    failed = any(each[0] for each in facts)
    if not failed and len({each[2] for each in facts}) == 1:
        return False
    # A rank that failed early has not come to its later encoders yet.
    width = max(each[1] for each in facts)
    if width == 0:
        raise torch.OutOfMemoryError(failure or "another rank ran out of memory, and nothing in the step runs in chunks")
    if failed:
        changes.note(chunked)
        stopped = any([each.stop_keeping() for each in chunked])
        if any(each[0] for each in ring.gather([stopped], device)):
            changes.stopped = True
            return True
    every = ring.gather([each.chunk for each in chunked] + [0] * (width - len(chunked)), device)
    smallest = [min(chunk for chunk in column if chunk) for column in zip(*every, strict=True)]
    if failed and all(chunk == 1 for chunk in smallest):
        raise torch.OutOfMemoryError(failure or "another rank ran out of memory, and there is no smaller chunk than one row")
    for each, chunk in zip(chunked, smallest, strict=False):
        each.chunk = max(1, chunk // 2) if failed else chunk
    return failed
