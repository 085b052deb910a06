"""Measure one case in a separate process: `run_case(case)` returns a row, `python -m benchmarks.measure JSON` prints one.
On a CPU, `run_in_turn(cases)` then times several cases of one size side by side in another process.

In that process, a first call (a tiny one on a CPU) warms up the libraries. One full forward and backward gives the peak memory.
Its value and the gradients of sampled rows are compared with the exact result, and only then it is timed. A wrong result of ours
becomes a row with `error` and no time; a wrong result of another package is timed, and its row has `"right": false`.
Extra memory is the peak during forward and backward minus the memory in use once the inputs exist: it includes the gradients of x
and y, which every implementation must return.

On CUDA the timed steps are enqueued one after the other, as in training. In half precision, matrix products are timed between them:
`share` is the rate of the useful operations of the loss relative to the rate of the products. A device that was idle is faster for
a moment: `rested_s` is the time of one step after a rest, and `rested_share` compares it with products of equally many operations
after a rest. Both are times of the device, whose work is enqueued before it starts; `host_s` is the time that the host takes to
enqueue a step, and `wall_s` the time until an idle device has computed it. The host is slower where it executes something else
between two steps, as in training: steps of several cases take turns there.

The batch contains at most DISTINCT different pairs, repeated as often as its size needs, in random order: this keeps the exact
result affordable at any size (see check.py).
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import check, memory, peers
from benchmarks.machine import describe

DISTINCT = 4096
SAMPLED_ROWS = 32
TINY = 128
# On CUDA a batch warms up at its own size, except one that takes seconds.
LARGEST_WARM_UP, LARGE_WARM_UP = 262_144, 32_768
# Seconds of the same work before anything is timed on CUDA: a device that was idle runs faster than it can sustain.
SUSTAINED_S = 0.5
# Seconds of rest before a step or products are timed on an idle device, the number of runs, and the longest step that is timed so.
REST_S, RESTED_RUNS, RESTED_BUDGET_S = 0.5, 5, 5.0
# Steps with fewer useful operations do not heat a device: they are not timed after a rest.
RESTED_LEAST_FLOP = 1e12
# The approximate clock of an idle device. It is held back for 20 ms while the host enqueues a step, which takes the host less.
CYCLES_A_SECOND = 2_000_000_000
HEAD_START_CYCLES = CYCLES_A_SECOND // 50
# Useful operations, in units of N² · D: clip needs the logits twice and two products for the gradients, siglip the logits once.
USEFUL_FLOP = {"clip": 8, "siglip": 6}
PRODUCT_SIZE, PRODUCTS_A_STEP = 8192, 2
# About as long as these products take: a step with them takes no less.
PRODUCTS_S = 3e-3
# Most seconds and runs for the timing of one case: few runs of a large batch, more of a small one.
BUDGET_S = {"cpu": 30.0, "cuda": 1.5}
MOST_RUNS = {"cpu": 10, "cuda": 50}

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What to measure. repeats: timed runs after the first full-size one, which then only warms up.

    `repeats=0` uses the time of that first run itself; None chooses the number by that time.
    """

    loss: str
    implementation: str
    batch: int
    dim: int = 512
    dtype: str = "float32"
    device: str = "cpu"
    scale: float = 20.0
    bias: float = -10.0
    repeats: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss not in check.LOSSES:
            raise ValueError(f"loss is {self.loss!r}: must be one of {', '.join(check.LOSSES)}")
        if self.batch < 2 or self.dim < 1:
            raise ValueError(f"batch {self.batch} and dim {self.dim}: batch must be at least 2 and dim at least 1")
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype is {self.dtype!r}: must be the name of a torch dtype, such as float32 or bfloat16")
        if self.device not in BUDGET_S:
            raise ValueError(f"device is {self.device!r}: must be one of {', '.join(BUDGET_S)}")
        if self.repeats is not None and self.repeats < 0:
            raise ValueError(f"repeats is {self.repeats}: must be 0 or more, or None")


class Batch(NamedTuple):
    """Leaf tensors for one step, the distinct pairs in them, and which pair each row holds."""

    x: Tensor
    y: Tensor
    scale: Tensor
    bias: Tensor
    pairs: tuple[Tensor, Tensor]
    pair_of_row: Tensor


class Seconds(NamedTuple):
    forward: float
    backward: float


class Step(NamedTuple):
    """An implementation with its inputs, and how many of its steps are timed."""

    call: Callable[..., Tensor]
    batch: Batch
    runs: int


def run_case(case: Case, timeout_s: float = 3600.0) -> Row:
    """Return the row of a case, measured in a new process; a process that dies or takes too long gives a row with `error`."""
    row, error = _run_apart(asdict(case), timeout_s)
    return {**asdict(case), "error": error} if error else row


def run_in_turn(cases: Sequence[Case], timeout_s: float = 3600.0) -> tuple[list[Row], str]:
    """Return the times of CPU cases of one size and seed, measured in turn in a new process, and why there are none, or ""."""
    return _run_apart([asdict(case) for case in cases], timeout_s)


def _run_apart(document: Any, timeout_s: float) -> tuple[Any, str]:
    """Return what a new process measures for a document, and why it failed, or ""."""
    command = [sys.executable, "-m", "benchmarks.measure", json.dumps(document)]
    root = Path(__file__).resolve().parents[1]
    try:
        child = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None, f"stopped after {timeout_s:.0f} s"
    if child.returncode < 0:
        # Linux kills a process that runs out of memory with signal 9.
        reason = ": probably out of memory" if child.returncode == -9 else ""
        return None, f"ended by signal {-child.returncode}{reason}"
    if child.returncode:
        return None, (child.stderr.strip().splitlines() or ["no message"])[-1]
    return json.loads(child.stdout.strip().splitlines()[-1]), ""


def measure(case: Case) -> Row:
    """Return the row of a case, measured in this process: times and memory, or the reason why there are none.

    The reason is stored as `unavailable` (cannot run here at any size), `skipped` (would not fit) or `error`.
    """
    row, step = measure_device(case)
    return row | with_the_host([step])[0] if step else row


def measure_device(case: Case) -> tuple[Row, Step | None]:
    """Return the row of a case without the host's times, and on CUDA the step to be timed with the host if there are no errors."""
    row: Row = {**asdict(case), "machine": describe(case.device)}
    peer = peers.find(case.implementation, case.loss)
    reason = peers.unavailable(peer, case.device)
    if reason:
        return {**row, "unavailable": reason}, None
    available, needed = memory.available_bytes(case.device), needed_bytes(peer, case)
    if needed > available:
        free = f"{available / 2**30:,.0f} GiB are free"
        return {**row, "skipped": f"needs about {needed / 2**30:,.0f} GiB, {free}", "needed_bytes": needed}, None
    try:
        call = peer.load()
        if peer.timed_if_wrong:
            row["version"] = peers.version(peer)
        # Twice: the second call captures the graph of a graphed loss.
        for _ in range(2):
            _step(call, _inputs(case, _warm_up_batch(case)))
        batch = _inputs(case, case.batch)
        peak = memory.peak_of(lambda: _step(call, batch), case.device)
        found = _compare(case, peer.smoothing, batch, float(peak.result[1]))
        row |= found
        if not found["right"] and not peer.timed_if_wrong:
            return {**row, "error": f"wrong result: {worst(found)}"}, None
        row |= {"extra_bytes": peak.extra_bytes, "memory_method": peak.method}
        row |= _times(case, call, batch, peak.result[0])
        if case.device != "cuda":
            return row, None
        return row | (share(row) if batch.x.dtype in peers.HALF else {}), Step(call, batch, row["runs"])
    except peers.Unavailable as error:
        return {**row, "unavailable": str(error)}, None
    except Exception as error:  # a failure of an implementation must not end the run
        return {**row, "error": f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"}, None


def needed_bytes(peer: peers.Peer, case: Case) -> int:
    """Return an estimate of the bytes of a case: inputs, their gradients, and the entry's batch-by-batch matrices."""
    entry = getattr(torch, case.dtype).itemsize
    # Softmax and gradients of half-precision logits are still float32: at least four bytes per entry.
    return int(peer.matrices * case.batch**2 * max(4, entry)) + 4 * case.batch * case.dim * entry


def share(row: Row) -> Row:
    """Return the useful operations of a row, and their rate as a share of that of the matrix products timed with it."""
    useful = _useful_flop(row["loss"], row["batch"], row["dim"])
    found = {"useful_flop": useful, "share": useful / row["total_s"] / 1e12 / row["matrix_product_tflops"]}
    if "rested_s" in row:
        found["rested_share"] = useful / row["rested_s"] / 1e12 / row["rested_product_tflops"]
    return found


def _useful_flop(loss: str, batch: int, dim: int) -> int:
    return USEFUL_FLOP[loss] * batch**2 * dim


def worst(found: Row) -> str:
    """Return a text with the largest error of a row and the tolerance."""
    name, error = largest_error(found)
    return f"{name} off by {error:.1e}, {found['tolerance']:.1e} allowed"


def largest_error(found: Row) -> tuple[str, float]:
    """Return the name and size of a row's largest error."""
    return max(found["errors"].items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])


def _warm_up_batch(case: Case) -> int:
    # On a GPU, kernels are compiled and tuned for a size, with their own buffers. On a CPU, memory freed by a large call would hide
    # a part of the peak.
    if case.device != "cuda":
        return TINY
    return case.batch if case.batch <= LARGEST_WARM_UP else LARGE_WARM_UP


def _inputs(case: Case, batch: int) -> Batch:
    # Generated on the CPU, so that a seed gives the same batch on every device.
    generator = torch.Generator().manual_seed(case.seed)
    distinct = min(batch, DISTINCT)
    pairs = _unit_pairs(distinct, case, generator)
    pair_of_row = (torch.arange(batch) % distinct)[torch.randperm(batch, generator=generator)].to(case.device)
    rows = (tensor[pair_of_row].requires_grad_() for tensor in pairs)
    scalars = (torch.tensor(float(value), device=case.device, requires_grad=True) for value in (case.scale, case.bias))
    return Batch(*rows, *scalars, pairs, pair_of_row)


def _unit_pairs(distinct: int, case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return pairs of unit vectors with an asymmetry: rows of x share a direction in unequal parts, rows of y equally.

    Without it, the losses over rows and over columns would nearly agree, and a missing one could go unnoticed.
    """

    def unit(rows: int) -> Tensor:
        return F.normalize(torch.randn(rows, case.dim, generator=generator), dim=1)

    shared = unit(1)
    x, y = (torch.empty(distinct, case.dim, dtype=getattr(torch, case.dtype), device=case.device) for _ in range(2))
    # A few rows at a time: memory freed here may stay in torch's allocator and hide a part of the later peak.
    for start in range(0, distinct, 64):
        rows = min(64, distinct - start)
        own, noise, part = unit(rows), unit(rows), torch.rand(rows, 1, generator=generator)
        x[start : start + rows] = F.normalize(own + part * shared, dim=1)
        y[start : start + rows] = F.normalize(own + noise + shared, dim=1)
    return x, y


def _step(call: Callable[..., Tensor], batch: Batch) -> tuple[Seconds, Tensor]:
    leaves = batch[:4]
    for leaf in leaves:
        leaf.grad = None
    if batch.x.is_cuda:
        marks = [_mark()]
        loss = call(*leaves)
        marks.append(_mark())
        loss.backward()
        marks.append(_mark())
        torch.cuda.synchronize()
        return Seconds(_seconds(*marks[:2]), _seconds(*marks[1:])), loss.detach()
    start = time.perf_counter()
    loss = call(*leaves)
    middle = time.perf_counter()
    loss.backward()
    return Seconds(middle - start, time.perf_counter() - middle), loss.detach()


def _enqueued(
    call: Callable[..., Tensor], batch: Batch, runs: int, first: float, size: int = PRODUCT_SIZE, rest_s: float = 0.0
) -> tuple[list[Seconds], float]:
    """Return the times of CUDA steps, and the TFLOP/s of bfloat16 products of random square matrices between them.

    Everything is enqueued without synchronisation, each step after two products, as in training after the encoders: the device has
    work while the host prepares the step, and the products run at the same clock as the steps. rest_s: seconds that the device is
    idle before each pair of products.
    """
    left, right = _factors(size, batch.x.device)
    # The first product loads the library, which would otherwise be timed if there is one step and no warm-up.
    torch.matmul(left, right)
    warm_up = int(SUSTAINED_S / max(first, PRODUCTS_S))
    marks = []
    for _ in range(warm_up + runs):
        for leaf in batch[:4]:
            leaf.grad = None
        if rest_s:
            torch.cuda._sleep(int(rest_s * CYCLES_A_SECOND))
        marks.append(_mark())
        for _ in range(PRODUCTS_A_STEP):
            torch.matmul(left, right)
        marks.append(_mark())
        loss = call(*batch[:4])
        marks.append(_mark())
        loss.backward()
        marks.append(_mark())
    torch.cuda.synchronize()
    steps = [marks[place : place + 4] for place in range(4 * warm_up, len(marks), 4)]
    product = statistics.median(_seconds(start, end) for start, end, *_ in steps) / PRODUCTS_A_STEP
    times = [Seconds(_seconds(start, middle), _seconds(middle, end)) for _, start, middle, end in steps]
    return times, 2 * size**3 / product / 1e12


def _factors(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return left, right


def _rested(work: Callable[[], object], runs: int) -> float:
    """Return the seconds that a device takes for some work after a rest: the median of several runs."""
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        time.sleep(REST_S)
        # One thread counts cycles while the rest of the device stays idle.
        torch.cuda._sleep(HEAD_START_CYCLES)
        start = _mark()
        work()
        end = _mark()
        torch.cuda.synchronize()
        times.append(_seconds(start, end))
    return statistics.median(times)


@functools.cache
def _rested_product_tflops(products: int, runs: int, size: int) -> float:
    """Return the TFLOP/s of this number of products after a rest; implementations with the same work share the result."""
    left, right = _factors(size, torch.device("cuda"))

    def work() -> None:
        for _ in range(products):
            torch.matmul(left, right)

    work()
    return products * 2 * size**3 / _rested(work, runs) / 1e12


def _after_a_rest(case: Case, call: Callable[..., Tensor], batch: Batch, runs: int) -> Row:
    """Return the time of a step after a rest, and the rate of about equally many operations in products."""
    products = max(1, round(_useful_flop(case.loss, case.batch, case.dim) / (2 * PRODUCT_SIZE**3)))
    seconds = _rested(lambda: _enqueue(call, batch), runs)
    return {"rested_s": seconds, "rested_runs": runs, "rested_product_tflops": _rested_product_tflops(products, runs, PRODUCT_SIZE)}


def _enqueue(call: Callable[..., Tensor], batch: Batch) -> None:
    for leaf in batch[:4]:
        leaf.grad = None
    call(*batch[:4]).backward()


def with_the_host(steps: Sequence[Step]) -> list[Row]:
    """Return, for each of several CUDA steps, the seconds until it is enqueued and until it is computed, on a device that is idle
    before. They run in turn, the first time to allocate their memory. A step that runs out of it has no times.

    The order changes from turn to turn, and steps with fewer runs sit out some turns all along: a device that has just computed a
    heavy step is slower in the next one.
    """
    times: dict[int, list[tuple[float, float]]] = {place: [] for place in range(len(steps))}
    order = random.Random(0)
    most = max(step.runs for step in steps)
    for turn in range(1 + most):
        places = [place for place in times if turn == 0 or _takes_part(turn, steps[place].runs, most)]
        for place in order.sample(places, len(places)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            try:
                _enqueue(steps[place].call, steps[place].batch)
            except torch.OutOfMemoryError:
                del times[place]
                continue
            enqueued = time.perf_counter()
            torch.cuda.synchronize()
            if turn:
                times[place].append((enqueued - start, time.perf_counter() - start))
    rows: list[Row] = [{} for _ in steps]
    for place, own in times.items():
        rows[place] = dict(zip(("host_s", "wall_s"), map(statistics.median, zip(*own, strict=True)), strict=True))
    return rows


def _takes_part(turn: int, runs: int, turns: int) -> bool:
    """Return whether a step with so many runs, spread evenly over the turns from 1 on, runs in this one."""
    return turn * runs // turns > (turn - 1) * runs // turns


def _mark() -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def _seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return start.elapsed_time(end) / 1000


def _compare(case: Case, smoothing: float, batch: Batch, value: float) -> Row:
    generator = torch.Generator().manual_seed(case.seed)
    rows = torch.randperm(case.batch, generator=generator)[:SAMPLED_ROWS].to(case.device)
    counts = torch.bincount(batch.pair_of_row, minlength=len(batch.pairs[0])).double()
    pairs = check.Pairs(batch.pairs[0].double(), batch.pairs[1].double(), counts)
    exact = check.answer(case.loss, pairs, batch.pair_of_row[rows], case.scale, case.bias, smoothing=smoothing)
    if batch.x.grad is None or batch.y.grad is None:
        return {"right": False, "errors": {"gradient": math.inf}, "tolerance": 0.0}
    scalars = [None if leaf.grad is None else float(leaf.grad) for leaf in (batch.scale, batch.bias)]
    errors = check.errors(check.Result(value, batch.x.grad[rows], batch.y.grad[rows], *scalars), exact)
    allowed = check.tolerance(batch.x.dtype, case.dim, exact.largest_logit)
    return {
        # Comparisons with NaN are false, so NaN is wrong.
        "right": all(error <= allowed for error in errors.values()),
        "errors": errors,
        "tolerance": allowed,
        "sampled_rows": len(rows),
        "distinct_pairs": len(counts),
    }


def _times(case: Case, call: Callable[..., Tensor], batch: Batch, first: Seconds) -> Row:
    runs = case.repeats
    if runs is None:
        runs = min(MOST_RUNS[case.device], int(BUDGET_S[case.device] / max(sum(first), 1e-6)))
    row: Row = {}
    if case.device == "cuda":
        seconds, tflops = _enqueued(call, batch, max(1, runs), sum(first))
        few = max(1, min(RESTED_RUNS, int(RESTED_BUDGET_S / max(sum(first), 1e-6))))
        row = {"matrix_product_tflops": tflops}
        if sum(first) <= RESTED_BUDGET_S and _useful_flop(case.loss, case.batch, case.dim) >= RESTED_LEAST_FLOP:
            row |= _after_a_rest(case, call, batch, few)
    else:
        seconds = [_step(call, batch)[0] for _ in range(runs)] or [first]
    return row | _medians(seconds, warm_up=runs > 0)


def in_turn(cases: Sequence[Case]) -> list[Row]:
    """Return the times of CPU cases of one size and seed, whose steps run in turn after a step of each, so that other load of the
    machine affects all of them."""
    case = cases[0]
    batch, calls = _inputs(case, case.batch), [peers.find(each.implementation, each.loss).load() for each in cases]
    first = sum(sum(_step(call, batch)[0]) for call in calls)
    runs = case.repeats
    if runs is None:
        runs = min(MOST_RUNS[case.device], int(BUDGET_S[case.device] * len(cases) / max(first, 1e-6)))
    turns = [[_step(call, batch)[0] for call in calls] for _ in range(max(1, runs))]
    return [{**_medians(seconds, warm_up=True), "in_turn": True} for seconds in zip(*turns, strict=True)]


def _medians(seconds: Sequence[Seconds], warm_up: bool) -> Row:
    """Return the times of a row from those of its runs."""
    row: Row = {"runs": len(seconds), "warm_up": warm_up, "load_average": os.getloadavg()[0]}
    for name, values in (
        ("forward", [each.forward for each in seconds]),
        ("backward", [each.backward for each in seconds]),
        ("total", [sum(each) for each in seconds]),
    ):
        row |= {f"{name}_s": statistics.median(values), f"{name}_min_s": min(values), f"{name}_max_s": max(values)}
    return row


if __name__ == "__main__":
    document = json.loads(sys.argv[1])
    print(json.dumps(in_turn([Case(**each) for each in document]) if isinstance(document, list) else measure(Case(**document))))
