"""`fitted` and `micro_batches`, for your own training loop: the batch stays, the chunk follows the available memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from ...chunks.rows import rows_of, split
from ...ring import Group, Ring
from .finder import ChunkResult, find_chunk

Args = ParamSpec("Args")
Result = TypeVar("Result")
# BatchNorm in training mode cannot normalise a single row. `cached` and `accumulate` avoid such chunks in the same way.
LEAST_ROWS = 2


def fitted(
    state: Sequence[Any],
    *,
    batch: int | None = None,
    start: int | None = None,
    margin: float = 0.05,
    budget: int | None = None,
    group: Group = ...,
    file: str | Path | None = None,
) -> Callable[[Callable[Concatenate[int, Args], Result]], FittedStep[Args, Result]]:
    """Return a decorator for a training step whose first argument is the chunk: callers omit it, and it is one that fits.

    The batch stays as it is; only the chunk, and with it the number of micro-batches, follows the available memory. The first call
    finds the chunk with `find_chunk`, which documents the other arguments, on the rows that it was given. The state is then
    restored, and the step is taken. Later calls use the chunk that was found.

    batch: rows of a step over all ranks, for a step that does not receive its rows as tensors; None counts those of the arguments.

    >>> import torch
    >>> model = torch.nn.Linear(64, 8)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> @fitted([model, optimizer])
    ... def step(chunk, inputs, labels):
    ...     for (x, y), share in micro_batches((inputs, labels), chunk):
    ...         (share * torch.nn.functional.cross_entropy(model(x), y)).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> step(torch.randn(100, 64), torch.randint(8, (100,)))
    >>> step.chunk
    100
    """
    options: dict[str, Any] = {"start": start, "margin": margin, "budget": budget, "group": group, "file": file}
    if batch is not None and batch < 1:
        raise ValueError(f"batch is {batch!r}: must be at least 1, the rows of a step over all ranks")
    return lambda step: FittedStep(step, state, batch, options)


class FittedStep(Generic[Args, Result]):
    """A step decorated with `fitted`. `found` is the result of the search, None before the first call."""

    def __init__(
        self, step: Callable[Concatenate[int, Args], Result], state: Sequence[Any], batch: int | None, options: dict[str, Any]
    ) -> None:
        functools.update_wrapper(self, step)
        self.found: ChunkResult | None = None
        self._step, self._state, self._batch, self._options = step, state, batch, options

    def __call__(self, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        if self.found is None:
            cap = self._rows(args, kwargs)
            self.found = find_chunk(lambda size: self._step(size, *args, **kwargs), state=self._state, cap=cap, **self._options)
        return self._step(self.found.size, *args, **kwargs)

    @property
    def chunk(self) -> int | None:
        """The rows that are processed at once; None before the first call."""
        return None if self.found is None else self.found.size

    def micro_batches(self, rows: int) -> int | None:
        """Return the number of micro-batches that so many rows are split into; None before the first call."""
        return None if self.found is None else math.ceil(rows / self.found.size)

    def forget(self) -> None:
        """Make the next call search again, from the same start as the first one: for longer sequences, for example."""
        self.found = None
        if self._options["file"] is not None:
            Path(self._options["file"]).unlink(missing_ok=True)

    def _rows(self, args: Any, kwargs: Any) -> int:
        """Return the rows of this rank, the largest chunk that makes sense."""
        if self._batch is not None:
            return math.ceil(self._batch / Ring.of(self._options["group"]).size)
        return rows_of((args, kwargs))


def micro_batches(batch: Any, chunk: int) -> Iterator[tuple[Any, float]]:
    """Yield the batch, a tree of tensors, in micro-batches of at most `chunk` rows, each with its share of the rows.

    There are as few micro-batches as possible, of nearly equal size, and none of a single row where that can be avoided, because
    BatchNorm needs two. Losses that are means over rows, each multiplied by its share, add up to the mean over the batch, also when
    the last micro-batch is smaller. (If ranks have different numbers of rows, only `accumulate` gives the mean over all of them.)

    >>> import torch
    >>> [(len(x), share) for x, share in micro_batches(torch.zeros(10), 4)]
    [(4, 0.4), (4, 0.4), (2, 0.2)]
    """
    rows = rows_of(batch)
    count = max(1, math.ceil(rows / chunk))
    for piece in split(batch, max(1, math.ceil(rows / count)), LEAST_ROWS):
        yield piece, rows_of(piece) / max(1, rows)
