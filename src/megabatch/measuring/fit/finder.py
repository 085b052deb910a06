"""find_chunk: search for the largest micro-batch at which a training step really runs, in any training loop."""

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
from ...reporting.format import bytes_text
from ...ring import Group, Ring
from . import search
from .memory import Limit, limit_of
from .snapshot import Snapshot
from .trial import Trial, Trials

# The first size to try if none is given.
START = 16
# The first step away from a given start is 1/NEARBY of it.
NEARBY = 8
# A step that runs even at this size does not depend on its size.
ENDLESS = 2**24
# If a failure could be fatal, the first size is 1/CAREFUL of the start.
CAREFUL = 4


@dataclass(frozen=True)
class ChunkResult:
    """The largest size that really ran.

    limit_bytes: the memory limit, None if the device reports no memory. trials: all trials, in order.
    """

    size: int
    limit_bytes: int | None
    trials: tuple[Trial, ...]

    def as_fit(self) -> measurements.Fit:
        return measurements.Fit(self.size, self.limit_bytes, tuple(trial._asdict() for trial in self.trials))


class SearchOptions(NamedTuple):
    """Where a search starts and ends; see `find_chunk`."""

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
    """Return the largest micro-batch (or chunk) that runs, found by doubling and bisection with real steps.

    step: takes a number of rows and runs one training step with them: forward, backward, optimizer. It must be able to read its
        data again: from tensors, or from a loader with state_dict() that is part of `state`. It must not handle out-of-memory
        errors itself, as a step wrapped in `retry_on_oom` does.
    state: everything that a step changes. It is restored bit for bit after every trial: modules, optimizers, generators, and
        objects with state_dict() and load_state_dict() (gradient scaler, scheduler, loader). The global generators of PyTorch,
        NumPy and Python are always restored.
    start: the first size to try, best taken from a prediction (`predict_memory`). cap: the largest size to try or return.
    within: how far the result may lie below the largest size that runs, as a fraction, for fewer trials; 0 is exact.
    margin: fraction of the memory that stays free. If the device reports no memory, it is subtracted from the size instead.
    budget: bytes that the step may use; on a CPU the whole process counts, and it is measured. None is half of the host's memory.
    group: the ranks that step together: a size that fails on one rank fails on all. Inside the step they may communicate through
        `cached`, `accumulate`, and DDP models that the step refers to or that are part of `state`, whose gradient exchange is
        skipped. With FSDP2 or SyncBatchNorm one rank cannot fail alone, so sizes grow only as far as they are expected to run.
    file: stores the result. If the file already has one, that size is tried once and returned, so that a resumed run is quick.

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
    options = SearchOptions(start, cap, within, margin)
    return search_chunk(step, snapshot, limit, ring, options, None if file is None else ResultFile(Path(file), budget))


def search_chunk(
    step: Callable[[int], Any],
    snapshot: Snapshot,
    limit: Limit,
    ring: Ring,
    options: SearchOptions,
    stored: ResultFile | None = None,
) -> ChunkResult:
    """Do the work of `find_chunk`, from its prepared parts."""
    options, limit = _agreed(options, limit, ring, snapshot.device)
    release()
    meeting = ring.size > 1 and bool(meeting_rings(snapshot.modules))
    trials = Trials(step, snapshot, limit, ring, meeting=meeting)
    cap = options.cap or ENDLESS
    earlier = EarlierResult(None, False) if stored is None else stored.read(ring, snapshot.device, limit, cap)
    if earlier.size is not None:
        options = options._replace(start=earlier.size)
        if earlier.still_valid and earlier.size <= cap and trials(earlier.size):
            return ChunkResult(earlier.size, limit.bytes, tuple(trials.done))
    size = _search_without_failing(trials, limit, options, cap) if meeting else _search(trials, limit, options, cap)
    if size is None:
        raise ValueError(_nothing_fits(trials, limit))
    if size >= ENDLESS:
        raise ValueError(
            f"cap is not given, and the step runs even at {size:,} rows, so it does not seem to use its argument; "
            "pass the number of rows that exist as cap"
        )
    result = ChunkResult(size, limit.bytes, tuple(trials.done))
    if stored is not None and ring.rank == 0:
        stored.write(result.as_fit(), snapshot.device)
    return result


class EarlierResult(NamedTuple):
    """The size in a result file, None if there is no file.

    still_valid: whether it was found on the same kind of device within the same limit, and not at a lower cap.
    """

    size: int | None
    still_valid: bool


class ResultFile(NamedTuple):
    """A file that stores the result of a search, for a run that is resumed later and for a plan.

    budget: that of the present search. A result that was found with another budget is not valid.
    """

    path: Path
    budget: int | None

    def read(self, ring: Ring, device: torch.device, limit: Limit, cap: int) -> EarlierResult:
        """Return the result in the file. Only the first rank reads, because the others may not have access to its disk."""
        size, valid = 0, False
        if ring.rank == 0 and self.path.exists():
            before = measurements.read(self.path)
            if not isinstance(before.found, measurements.Fit):
                raise ValueError(f"{self.path} holds a measurement of {before.kind}, not of fit; choose another file")
            size = before.found.chunk
            same_device = before.device == device_name(device) and before.torch == str(torch.__version__)
            same_limit = self.budget is None or before.found.limit_bytes == limit.bytes
            reached_end = size == cap or any(not trial["ran"] for trial in before.found.trials)
            valid = same_device and same_limit and reached_end
        first = ring.gather([size, int(valid)], device)[0]
        return EarlierResult(first[0] or None, bool(first[1]))

    def write(self, fit: measurements.Fit, device: torch.device) -> None:
        measurements.write(as_measured(fit, {}, device), self.path)


def as_measured(fit: measurements.Fit, run: dict[str, Any], device: torch.device) -> measurements.Measured:
    """Return the result with its device and date. `run` is the table of a run, empty for a loop that is not a megabatch run."""
    return measurements.Measured(fit, run, device_name(device), str(torch.__version__), datetime.date.today().isoformat())


def _search(trials: Trials, limit: Limit, options: SearchOptions, cap: int) -> int | None:
    def hint() -> int | None:
        return None if limit.bytes is None else search.extrapolated(trials.peaks(), limit.bytes)

    # A given start is expected to be near the limit.
    start, stride = (START, None) if options.start is None else (options.start, max(1, options.start // NEARBY))
    size = search.largest_confirmed(trials, start, cap=cap, stride=stride, within=options.within, hint=hint)
    if size is None or not trials.has_refusals():
        return size
    smaller = search.with_margin(size, options.margin)
    return size if smaller == size else search.largest_confirmed(trials, smaller, cap=smaller)


def _search_without_failing(trials: Trials, limit: Limit, options: SearchOptions, cap: int) -> int | None:
    if limit.bytes is None:
        raise ValueError(
            "ranks communicate inside the step (FSDP2 or SyncBatchNorm), where running out of memory is fatal, and this device "
            "reports no memory to predict it from; choose a chunk by hand"
        )
    allowed = limit.bytes

    def ceiling() -> int:
        peaks = trials.peaks()
        return search.extrapolated(peaks, allowed) or search.in_proportion(peaks, allowed)

    return search.largest_without_failing(trials, max(1, (options.start or START) // CAREFUL), cap, ceiling)


def _agreed(options: SearchOptions, limit: Limit, ring: Ring, device: torch.device) -> tuple[SearchOptions, Limit]:
    """Check the options; return them and the limit with the smallest values of all ranks."""
    for name, value in (("start", options.start), ("cap", options.cap)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} is {value!r}: must be a number of rows, at least 1")
    if not 0 <= options.within < 1:
        raise ValueError(f"within is {options.within!r}: must be a fraction of the size, at least 0 and below 1")
    numbers = (options.start, options.cap, limit.bytes)
    gathered = ring.gather([-1 if number is None else number for number in numbers], device)
    start, cap, allowed = (min((n for n in column if n >= 0), default=None) for column in zip(*gathered, strict=True))
    return options._replace(start=start, cap=cap), limit._replace(bytes=allowed)


def _nothing_fits(trials: Trials, limit: Limit) -> str:
    last = trials.done[-1]
    peak = "" if last.peak_bytes is None else f", peak {bytes_text(last.peak_bytes)}"
    allowed = "" if limit.bytes is None else f", limit {bytes_text(limit.bytes)}"
    error = f" ({trials.last_error})" if trials.last_error else ""
    return (
        f"not even one row fits: {last.why}{error}{peak}{allowed}. Raise the budget or lower the margin; otherwise use activation "
        "checkpointing inside the model, a lower precision, weights sharded over more ranks, or a smaller model"
    )
