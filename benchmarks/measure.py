"""One case, measured in a process of its own: `run_case(case)` returns a row, `python -m benchmarks.measure JSON` prints one.

Inside that process: a call warms the libraries, a tiny one on a CPU; one full forward and backward gives the peak
memory; its value and the gradients of sampled rows are compared with the exact answer; only then it is timed. A wrong
result of ours becomes a row with `error` and no time; one of another package is timed and its row says `"right": false`.
Extra memory is the peak during forward and backward above what was in use once the inputs existed: it includes the
gradients of x and y, which every implementation must return.

On CUDA the timed steps are enqueued one after the other, as in training, and in half precision matrix products are timed
between them: `share` is the rate at which the loss does its useful operations, relative to that of the products. A device that
has rested is faster for a moment: `rested_s` is the time of one step after a rest, and `rested_share` compares it with products
of as many operations after a rest. Both are times of the device, which has its work before it starts; what the host takes is
`host_s`.

The batch holds at most DISTINCT different pairs, each as often as the size asks, in random order: that keeps the
exact answer affordable at any size (see check.py).
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
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
# A device that has been idle runs faster than it can for long: what is timed on CUDA comes after so many seconds of the same work.
SUSTAINED_S = 0.5
# Before a step or products are timed from a standstill, and how often, within how many seconds; longer steps are not.
REST_S, RESTED_RUNS, RESTED_BUDGET_S = 0.5, 5, 5.0
# The clock of a device that rests, about. For 20 ms the rested device is held back while the host enqueues: a step takes it less.
CYCLES_A_SECOND = 2_000_000_000
HEAD_START_CYCLES = CYCLES_A_SECOND // 50
# Operations for N² pairs of width D: clip needs the logits twice and two products for the gradients, siglip the logits once.
USEFUL_FLOP = {"clip": 8, "siglip": 6}
PRODUCT_SIZE, PRODUCTS_A_STEP = 8192, 2
# Seconds and runs that the timing of one case may take: few runs of a large batch, more of a small one.
BUDGET_S = {"cpu": 30.0, "cuda": 1.5}
MOST_RUNS = {"cpu": 10, "cuda": 50}

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What to measure; `repeats` are the timed runs after the first full-size one, which then only warms up.

    `repeats=0` takes the time of that first run itself, and None decides by it.
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
            raise ValueError(f"loss is {self.loss!r}: choose one of {', '.join(check.LOSSES)}")
        if self.batch < 2 or self.dim < 1:
            raise ValueError(f"batch {self.batch} and dim {self.dim}: a batch has 2 rows or more, a row 1 entry or more")
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype is {self.dtype!r}: give the name of a torch dtype, such as float32 or bfloat16")
        if self.device not in BUDGET_S:
            raise ValueError(f"device is {self.device!r}: choose one of {', '.join(BUDGET_S)}")
        if self.repeats is not None and self.repeats < 0:
            raise ValueError(f"repeats is {self.repeats}: give 0 or more, or leave it out")


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


def run_case(case: Case, timeout_s: float = 3600.0) -> Row:
    """The row of a case, measured in a fresh process; a process that dies or takes too long is a row with `error`."""
    command = [sys.executable, "-m", "benchmarks.measure", json.dumps(asdict(case))]
    root = Path(__file__).resolve().parents[1]
    try:
        child = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {**asdict(case), "error": f"stopped after {timeout_s:.0f} s"}
    if child.returncode < 0:
        # Linux ends a process that takes more memory than there is with signal 9.
        why = ": probably out of memory" if child.returncode == -9 else ""
        return {**asdict(case), "error": f"ended by signal {-child.returncode}{why}"}
    if child.returncode:
        return {**asdict(case), "error": (child.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(child.stdout.strip().splitlines()[-1])


def measure(case: Case) -> Row:
    """The row of a case, measured in this process: times and memory, or the reason for none.

    The reason is under `unavailable` (cannot run here at any size), `skipped` (would not fit) or `error`.
    """
    row: Row = {**asdict(case), "machine": describe(case.device)}
    peer = peers.find(case.implementation, case.loss)
    reason = peers.unavailable(peer, case.device)
    if reason:
        return {**row, "unavailable": reason}
    available, needed = memory.available_bytes(case.device), needed_bytes(peer, case)
    if needed > available:
        free = f"{available / 2**30:,.0f} GiB are free"
        return {**row, "skipped": f"needs about {needed / 2**30:,.0f} GiB, {free}", "needed_bytes": needed}
    try:
        call = peer.load()
        if peer.timed_if_wrong:
            row["version"] = peers.version(peer)
        _step(call, _inputs(case, _warm_up_batch(case)))
        batch = _inputs(case, case.batch)
        peak = memory.peak_of(lambda: _step(call, batch), case.device)
        found = _compare(case, peer.smoothing, batch, float(peak.result[1]))
        row |= found
        if not found["right"] and not peer.timed_if_wrong:
            return {**row, "error": f"wrong result: {worst(found)}"}
        row |= {"extra_bytes": peak.extra_bytes, "memory_method": peak.method}
        row |= _times(case, call, batch, peak.result[0])
        return row | share(row) if case.device == "cuda" and batch.x.dtype in peers.HALF else row
    except peers.Unavailable as error:
        return {**row, "unavailable": str(error)}
    except Exception as error:  # any failure of an implementation is a row, not the end of the run
        return {**row, "error": f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"}


def needed_bytes(peer: peers.Peer, case: Case) -> int:
    """About the bytes that a case will take: inputs, their gradients, and the entry's batch-by-batch matrices."""
    entry = getattr(torch, case.dtype).itemsize
    # Half-precision logits still meet float32 softmax and gradients: four bytes an entry at least.
    return int(peer.matrices * case.batch**2 * max(4, entry)) + 4 * case.batch * case.dim * entry


def share(row: Row) -> Row:
    """What a row that was timed beside a matrix product adds: the operations that count, and their rate as a share of its rate."""
    useful = _useful_flop(row["loss"], row["batch"], row["dim"])
    found = {"useful_flop": useful, "share": useful / row["total_s"] / 1e12 / row["matrix_product_tflops"]}
    if "rested_s" in row:
        found["rested_share"] = useful / row["rested_s"] / 1e12 / row["rested_product_tflops"]
    return found


def _useful_flop(loss: str, batch: int, dim: int) -> int:
    return USEFUL_FLOP[loss] * batch**2 * dim


def worst(found: Row) -> str:
    """The largest error of a row, and what was allowed."""
    name, error = largest_error(found)
    return f"{name} off by {error:.1e}, {found['tolerance']:.1e} allowed"


def largest_error(found: Row) -> tuple[str, float]:
    """The name and size of the largest of a row's errors."""
    return max(found["errors"].items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])


def _warm_up_batch(case: Case) -> int:
    # On a GPU kernels compile and tune themselves for the size they meet, with buffers of their own. On a CPU memory
    # freed by a large call would hide a part of the peak.
    if case.device != "cuda":
        return TINY
    return case.batch if case.batch <= LARGEST_WARM_UP else LARGE_WARM_UP


def _inputs(case: Case, batch: int) -> Batch:
    # Generated on the CPU, so that a seed means the same batch on every device.
    generator = torch.Generator().manual_seed(case.seed)
    distinct = min(batch, DISTINCT)
    pairs = _unit_pairs(distinct, case, generator)
    pair_of_row = (torch.arange(batch) % distinct)[torch.randperm(batch, generator=generator)].to(case.device)
    rows = (tensor[pair_of_row].requires_grad_() for tensor in pairs)
    scalars = (torch.tensor(float(value), device=case.device, requires_grad=True) for value in (case.scale, case.bias))
    return Batch(*rows, *scalars, pairs, pair_of_row)


def _unit_pairs(distinct: int, case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pairs of unit vectors whose two directions differ: rows of x share a direction in unequal parts, those of y equally.

    Without that the loss over rows and the loss over columns would nearly agree, and a missing one could go unseen.
    """

    def unit(rows: int) -> Tensor:
        return F.normalize(torch.randn(rows, case.dim, generator=generator), dim=1)

    shared = unit(1)
    x, y = (torch.empty(distinct, case.dim, dtype=getattr(torch, case.dtype), device=case.device) for _ in range(2))
    # A few rows at a time: memory freed here may stay with torch's allocator and hide a part of the peak to come.
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
    """The times of CUDA steps, and the TFLOP/s of the bfloat16 products of random square matrices between them.

    Everything is enqueued without a wait, and each step after two products, as in training after the encoders: the device has
    work while the host prepares the step, and the products meet the clock that the steps meet. rest_s: of the device, before
    each product.
    """
    left, right = _factors(size, batch.x.device)
    # The first product loads the library: where there is one step and no warm-up, its time would be that.
    torch.matmul(left, right)
    warm_up = int(SUSTAINED_S / max(first, 1e-3))
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
    """The seconds that a device takes for some work after a rest: the median of several runs."""
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        time.sleep(REST_S)
        # One thread counts cycles, and the rest of the device goes on resting.
        torch.cuda._sleep(HEAD_START_CYCLES)
        start = _mark()
        work()
        end = _mark()
        torch.cuda.synchronize()
        times.append(_seconds(start, end))
    return statistics.median(times)


@functools.cache
def _rested_product_tflops(products: int, runs: int, size: int) -> float:
    """The rate of so many products after a rest; contestants with the same work to do share it."""
    left, right = _factors(size, torch.device("cuda"))

    def work() -> None:
        for _ in range(products):
            torch.matmul(left, right)

    work()
    return products * 2 * size**3 / _rested(work, runs) / 1e12


def _after_a_rest(case: Case, call: Callable[..., Tensor], batch: Batch, runs: int) -> Row:
    """The time of a step after a rest, and the rate of about as many operations in products."""
    products = max(1, round(_useful_flop(case.loss, case.batch, case.dim) / (2 * PRODUCT_SIZE**3)))
    seconds = _rested(lambda: _enqueue(call, batch), runs)
    return {"rested_s": seconds, "rested_runs": runs, "rested_product_tflops": _rested_product_tflops(products, runs, PRODUCT_SIZE)}


def _enqueue(call: Callable[..., Tensor], batch: Batch) -> None:
    for leaf in batch[:4]:
        leaf.grad = None
    call(*batch[:4]).backward()


def _host_seconds(call: Callable[..., Tensor], batch: Batch, runs: int) -> float:
    """How long the host takes to enqueue a step, while the device is idle."""
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        _enqueue(call, batch)
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times)


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
        # A comparison with NaN is false: NaN is refused.
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
        row = {"matrix_product_tflops": tflops, "host_s": _host_seconds(call, batch, few)}
        if sum(first) <= RESTED_BUDGET_S:
            row |= _after_a_rest(case, call, batch, few)
    else:
        seconds = [_step(call, batch)[0] for _ in range(runs)] or [first]
    row |= {"runs": len(seconds), "warm_up": runs > 0, "load_average": os.getloadavg()[0]}
    for name, values in (
        ("forward", [each.forward for each in seconds]),
        ("backward", [each.backward for each in seconds]),
        ("total", [sum(each) for each in seconds]),
    ):
        row |= {f"{name}_s": statistics.median(values), f"{name}_min_s": min(values), f"{name}_max_s": max(values)}
    return row


if __name__ == "__main__":
    print(json.dumps(measure(Case(**json.loads(sys.argv[1])))))
