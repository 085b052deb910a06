"""accelerate's `find_executable_batch_size` for a training step whose batch stays and whose chunk is found.

accelerate repeats a whole training with a smaller batch, which is another training, and each rank for itself, so that a rank that
runs out of memory leaves the others waiting. Here the function is one step, its first argument the chunk (rows that a cached
encoder, or one micro-batch, takes at once), and the ranks agree on it before the step is really taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..chunks.oom import is_out_of_memory, release
from ..measuring.fit.memory import Limit
from ..measuring.fit.snapshot import Snapshot
from ..measuring.fit.trial import Trials
from ..ring import Group, Ring

# What accelerate multiplies a size with that did not run.
REDUCTION = 0.9


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    state: Sequence[Any] = (),
    group: Group | None = ...,
) -> Any:
    """Return `function` without its first argument, a chunk that the first call finds: one that runs on every rank.

    function: one training step; it takes the chunk first, and must give the same update with every chunk: through
        `megabatch.cached`, `accumulate` or `micro_batches`. Without it, a decorator is returned, as in accelerate.
    starting_batch_size: the first chunk to try. reduce_batch_size_fn: returns the next smaller one; None takes 0.9 of the one
        before.
    state: what a step changes, in addition to the modules, optimizers and objects with a state_dict() among the arguments:
        restored bit for bit before the next chunk is tried.
    group: the ranks that step together; by default all of them. Several ranks try a chunk first without exchanging gradients.

    The function that is returned has the attribute `chunk`: None before the first call.

    >>> import torch, megabatch
    >>> model = torch.nn.Linear(16, 4)
    >>> @find_executable_batch_size(starting_batch_size=64, state=[model])
    ... def step(chunk, rows):
    ...     return megabatch.cached(model, chunk)(rows).square().mean().backward()
    >>> step(torch.randn(256, 16))
    >>> step.chunk
    64
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            state=state,
            group=group,
        )
    return ExecutableStep(function, starting_batch_size, reduce_batch_size_fn, state, group)


class ExecutableStep:
    """The step that `find_executable_batch_size` returns."""

    def __init__(
        self,
        function: Callable[..., Any],
        start: int,
        reduce: Callable[[], int] | None,
        state: Sequence[Any],
        group: Group | None,
    ) -> None:
        if start < 1:
            raise ValueError(f"starting_batch_size={start}: must be a number of rows, at least 1")
        self.chunk: int | None = None
        self._function, self._size, self._reduce, self._state, self._group = function, start, reduce, state, group
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.chunk is not None:
            return self._function(self.chunk, *args, **kwargs)
        ring = self._ring()
        snapshot = Snapshot([*self._state, *filter(_is_state, (*args, *kwargs.values()))])
        if ring.size > 1:
            # Beyond what the device has, there is no limit to keep to.
            trials = Trials(lambda size: self._function(size, *args, **kwargs), snapshot, Limit(None, "raised"), ring, steps=1)
            while not trials(self._size):
                self._size = min(sizes[0] for sizes in ring.gather([self._smaller()], snapshot.device))
            self.chunk = self._size
            return self._function(self.chunk, *args, **kwargs)
        while True:
            try:
                result = self._function(self._size, *args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            else:
                self.chunk = self._size
                return result
            # Not in the except clause: while the exception exists, its frames hold the tensors that have to be freed.
            snapshot.restore()
            release()
            self._size = self._smaller()

    def _smaller(self) -> int:
        size = int(self._size * REDUCTION) if self._reduce is None else self._reduce()
        if size < 1:
            raise RuntimeError("no executable chunk found: not even one row runs; use activation checkpointing or a smaller model")
        return size

    def _ring(self) -> Ring:
        if self._group is not ...:
            return Ring.of(self._group)
        return Ring(dist.group.WORLD) if dist.is_available() and dist.is_initialized() else Ring.of(None)


def _is_state(value: Any) -> bool:
    return isinstance(value, (nn.Module, Optimizer)) or (hasattr(value, "state_dict") and hasattr(value, "load_state_dict"))
