"""People's own loops: a step that is given a chunk which fits, whatever the batch, and a batch in micro-batches of that size."""

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
    """A decorator for a training step whose first argument is the chunk: it is called without it, and is given one that fits.

    The batch stays what it is; the chunk alone follows the memory, and with it the number of micro-batches. The first call finds
    the chunk with `find_chunk`, whose arguments these are, on the rows that it was given; the state is then as before, and the
    step is taken. Later calls use the chunk that was found.

    batch: rows of a step over all ranks, for a step that is not given its rows as tensors; None counts those of the arguments.

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
    """What `fitted` makes of a step. `found` is None until the first call."""

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
        """Rows that go through at once, once they are known."""
        return None if self.found is None else self.found.size

    def micro_batches(self, rows: int) -> int | None:
        """Into how many a batch of so many rows is split, once that is known."""
        return None if self.found is None else math.ceil(rows / self.found.size)

    def forget(self) -> None:
        """The next call searches anew, from where the first one did: for longer sequences, for example."""
        self.found = None
        if self._options["file"] is not None:
            Path(self._options["file"]).unlink(missing_ok=True)

    def _rows(self, args: Any, kwargs: Any) -> int:
        """The rows of this rank, beyond which no chunk is larger."""
        if self._batch is not None:
            return math.ceil(self._batch / Ring.of(self._options["group"]).size)
        return rows_of((args, kwargs))


def micro_batches(batch: Any, chunk: int) -> Iterator[tuple[Any, float]]:
    """The batch, a tree of tensors, in micro-batches of at most `chunk` rows, each with its share of the rows.

    There are no more of them than it takes, and they are no larger than that takes. Losses that are means over rows, each times its
    share, add up to the mean over the batch, also where the last one is smaller. (Over ranks whose rows differ in number, only
    `accumulate` gives the mean over all.)

    >>> import torch
    >>> [(len(x), share) for x, share in micro_batches(torch.zeros(10), 4)]
    [(4, 0.4), (4, 0.4), (2, 0.2)]
    """
    rows = rows_of(batch)
    count = max(1, math.ceil(rows / chunk))
    for piece in split(batch, max(1, math.ceil(rows / count))):
        yield piece, rows_of(piece) / max(1, rows)
