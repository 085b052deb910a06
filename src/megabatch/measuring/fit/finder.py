"""find_chunk: the largest micro-batch with which a training step really runs, for any loop."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ... import measurements
from ...chunks.ddp_fsdp import meeting_rings
from ...chunks.oom import release
from ...environment import device_name
from ...reporting.wording import bytes_text
from ...ring import Group, Ring
from . import search
from .memory import Limit, limit_of
from .snapshot import Snapshot
from .trial import Trial, Trials

# Where nothing is known, the search begins here.
START = 16
# The first step from a start that was given is this part of it.
NEARBY = 8
# A step that runs even at this size does not grow with it.
ENDLESS = 2**24
# Where a failure may not be survived, the first size is this part of the start.
CAREFUL = 4


@dataclass(frozen=True)
class ChunkResult:
    """The largest size that really ran. limit_bytes: what it was held to, None where only the device said no; trials: all that was
    tried, in order."""

    size: int
    limit_bytes: int | None
    trials: tuple[Trial, ...]

    def as_fit(self) -> measurements.Fit:
        return measurements.Fit(self.size, self.limit_bytes, tuple(trial._asdict() for trial in self.trials))


class SearchOptions(NamedTuple):
    """Where a search begins and ends."""

    start: int | None = None
    cap: int | None = None
    within: float = 0.0
    margin: float = 0.05


def find_chunk(
    step: Callable[[int], Any],
    *,
    state: Sequence[Any] = (),
    start: int | None = None,
    cap: int | None = None,
    within: float = 0.0,
    margin: float = 0.05,
    budget: int | None = None,
    group: Group = ...,
    file: str | Path | None = None,
) -> ChunkResult:
    """The largest micro-batch (or chunk) that runs: doubling, then bisection, on real steps.

    step: takes a number of rows and runs one step of training at it: forward, backward, optimizer. It must be able to take its data
        again: from tensors, or from a loader with state_dict() that is part of the state. Nor may it help itself when memory runs
        out, as what `retry_on_oom` returns does.
    state: what a step changes, put back to the bit after every trial: modules, optimizers, generators, and what has state_dict()
        and load_state_dict() (gradient scaler, scheduler, loader). The generators of PyTorch, NumPy and Python are put back anyway.
    start: the first size tried, best from a prediction (`predict_memory`). cap: neither tried nor returned beyond.
    within: share of the size by which a larger one may be missed, for fewer trials; 0 is exact.
    margin: share of the memory that is left free. Where the device does not tell its memory, it is taken off the size.
    budget: bytes that the step may take. On a CPU of the whole process, and measured; None is half of what the host has.
    group: the ranks that step together: one that fails makes the size fail on all. Inside the step they may meet through `cached`,
        `accumulate`, and DDP models that it refers to or that are part of the state, whose exchange of gradients is left out. With
        FSDP2 or SyncBatchNorm sizes grow carefully, since there one rank cannot fail alone.
    file: where the result is kept: found there, it is tried once and taken, for a run that goes on later.

    >>> import torch
    >>> model = torch.nn.Linear(64, 8)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> def step(rows):
    ...     model(torch.randn(rows, 64)).square().mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> find_chunk(step, state=[model, optimizer], cap=32).size
    32
    """
    ring, snapshot = Ring.of(group), Snapshot(state)
    limit = limit_of(snapshot.device, budget, margin, ring.size)
    asked = SearchOptions(start, cap, within, margin)
    return seek(step, snapshot, limit, ring, asked, None if file is None else ResultFile(Path(file), budget))


def seek(
    step: Callable[[int], Any], snapshot: Snapshot, limit: Limit, ring: Ring, asked: SearchOptions, stored: ResultFile | None = None
) -> ChunkResult:
    """As `find_chunk`, its parts made."""
    asked, limit = _agreed(asked, limit, ring, snapshot.device)
    release()
    meeting = ring.size > 1 and bool(meeting_rings(snapshot.modules))
    trials = Trials(step, snapshot, limit, ring, meeting=meeting)
    cap = asked.cap or ENDLESS
    kept, trusted = (None, False) if stored is None else stored.read(ring, snapshot.device, limit, cap)
    if kept is not None:
        asked = asked._replace(start=kept)
    if trusted and kept is not None and kept <= cap and trials(kept):
        return ChunkResult(kept, limit.bytes, tuple(trials.done))
    size = _carefully(trials, limit, asked, cap) if meeting else _search(trials, limit, asked, cap)
    if size is None:
        raise ValueError(_hopeless(trials, limit))
    if size >= ENDLESS:
        raise ValueError(
            f"cap is not given, and the step runs even at {size:,} rows: it does not seem to use its size; pass cap=…, the rows "
            "there are"
        )
    found = ChunkResult(size, limit.bytes, tuple(trials.done))
    if stored is not None and ring.rank == 0:
        stored.write(found.as_fit(), snapshot.device)
    return found


def _search(trials: Trials, limit: Limit, asked: SearchOptions, cap: int) -> int | None:
    def hint() -> int | None:
        return None if limit.bytes is None else search.on_the_line(trials.peaks(), limit.bytes)

    # Close to a start that was given, the limit should be near.
    begin, stride = (START, None) if asked.start is None else (asked.start, max(1, asked.start // NEARBY))
    size = search.lasting(trials, begin, cap=cap, stride=stride, within=asked.within, hint=hint)
    if size is None or not trials.refusals():
        return size
    less = search.with_margin(size, asked.margin)
    return size if less == size else search.lasting(trials, less, cap=less)


def _carefully(trials: Trials, limit: Limit, asked: SearchOptions, cap: int) -> int | None:
    if limit.bytes is None:
        raise ValueError("ranks meet inside the step, and the device does not tell its memory: a failure would not be survived")
    allowed = limit.bytes

    def ceiling() -> int:
        peaks = trials.peaks()
        return search.on_the_line(peaks, allowed) or search.in_proportion(peaks, allowed)

    return search.carefully(trials, max(1, (asked.start or START) // CAREFUL), cap, ceiling)


def _agreed(asked: SearchOptions, limit: Limit, ring: Ring, device: torch.device) -> tuple[SearchOptions, Limit]:
    """What was asked, checked, and the limit, both the same on all ranks: the smallest of any."""
    for name, value in (("start", asked.start), ("cap", asked.cap)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} is {value!r}: must be a number of rows from 1 up")
    if not 0 <= asked.within < 1:
        raise ValueError(f"within is {asked.within!r}: a share of the size, from 0 up and below 1")
    numbers = (asked.start, asked.cap, limit.bytes)
    facts = ring.gather([-1 if number is None else number for number in numbers], device)
    start, cap, allowed = (min((n for n in column if n >= 0), default=None) for column in zip(*facts, strict=True))
    return asked._replace(start=start, cap=cap), limit._replace(bytes=allowed)


def _hopeless(trials: Trials, limit: Limit) -> str:
    last = trials.done[-1]
    took = "" if last.peak_bytes is None else f", peak {bytes_text(last.peak_bytes)}"
    held = "" if limit.bytes is None else f" of {bytes_text(limit.bytes)} that may be used"
    words = f" ({trials.words})" if trials.words else ""
    return (
        f"not even one row fits: {last.why}{words}{took}{held}. Raise the budget or lower the margin; else recompute activations "
        "inside the model (checkpointing), use a lower precision, shard the weights over more ranks, or take a smaller model"
    )


class ResultFile(NamedTuple):
    """A result that is kept in a file. budget: what is asked for now; another one asks for another result."""

    path: Path
    budget: int | None

    def read(self, ring: Ring, device: torch.device, limit: Limit, cap: int) -> tuple[int | None, bool]:
        """The size in the file, None where there is none, and whether it still is the answer: found on such a device within this
        limit, and not at a lower cap. The first rank reads, since the others may not see its disk."""
        size, trusted = 0, False
        if ring.rank == 0 and self.path.exists():
            before = measurements.read(self.path)
            if not isinstance(before.found, measurements.Fit):
                raise ValueError(f"{self.path}: holds a measurement of {before.kind}, not of what fits; name another file")
            size = before.found.chunk
            same = before.device == device_name(device) and before.torch == str(torch.__version__)
            same = same and (self.budget is None or before.found.limit_bytes == limit.bytes)
            trusted = same and (size == cap or any(not trial["ran"] for trial in before.found.trials))
        first = ring.gather([size, int(trusted)], device)[0]
        return first[0] or None, bool(first[1])

    def write(self, fit: measurements.Fit, device: torch.device) -> None:
        measurements.write(as_measured(fit, {}, device), self.path)


def as_measured(fit: measurements.Fit, run: dict[str, Any], device: torch.device) -> measurements.Measured:
    """The result with where and when it was found; `run` is empty for a loop that is not ours."""
    return measurements.Measured(fit, run, device_name(device), str(torch.__version__), datetime.date.today().isoformat())
