"""Time the losses at small batches on a CPU, implementations in turn: `python -m benchmarks.loss_small --help`.

In one process every implementation runs one step after the other, forward and backward, many times over and in random order, so
that other load of the machine affects all of them. `wall_s` is the clock's time of a step, `thread_s` the processor time of the
thread that runs it; both are medians. With one thread the table shows the latter, which other processes affect less.
`benchmarks.loss` does the same on CUDA.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import peers, report
from benchmarks.machine import describe
from megabatch import reference

RESULTS = Path(__file__).parent / "results"
SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
# Seconds for one implementation at one size, and the fewest and most runs.
BUDGET_S, RUNS = 2.0, (5, 300)
TITLES = {
    "ours": "megabatch",
    "full matrix": "plain formula",
    "full matrix, compiled": "plain formula, compiled",
}
# Of the largest entry. The products' own rounding is some 1e-6 at these widths.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}
DEVICE = "cpu"

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def implementations(loss: str, compiled: bool) -> dict[str, Loss]:
    """Return the losses by name: ours, and the formula with the whole matrix, as it is and compiled."""
    plain = peers.find("full matrix", loss).load()
    calls = {"ours": peers.find("ours", loss).load(), "full matrix": plain}
    if compiled:
        calls["full matrix, compiled"] = torch.compile(plain, dynamic=False)
    return calls


def inputs(batch: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (F.normalize(torch.randn(batch, dim, generator=generator), dim=-1).to(dtype) for _ in range(2))
    return [t.requires_grad_() for t in (x, y, torch.tensor(20.0), torch.tensor(-10.0))]


def error(loss: str, call: Loss, leaves: list[Tensor]) -> float:
    """Return the largest error of the value and of the gradients of x and y, relative to their largest entries."""
    results = []
    for f, tensors in ((call, leaves), (_formula(loss), [t.detach().double().requires_grad_() for t in leaves])):
        value = f(*tensors)
        x, y = torch.autograd.grad(value, tensors[:2])
        results.append([t.detach().double() for t in (value, x, y)])
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))


def _formula(loss: str) -> Loss:
    if loss == "clip":
        return lambda x, y, scale, bias: reference.clip_loss(x, y, scale)
    return reference.siglip_loss


def step(call: Loss, leaves: list[Tensor]) -> tuple[float, float]:
    """Run a step and return the seconds of the clock and of the thread."""
    for leaf in leaves:
        leaf.grad = None
    wall, thread = time.perf_counter(), time.thread_time()
    call(*leaves).backward()
    return time.perf_counter() - wall, time.thread_time() - thread


def measure(options: argparse.Namespace, loss: str, batch: int) -> list[report.Row]:
    """Return one row for each implementation."""
    leaves = inputs(batch, options.dim, getattr(torch, options.dtype))
    calls = implementations(loss, not options.no_compile)
    errors = {name: error(loss, call, leaves) for name, call in calls.items()} if batch <= options.checked_to else {}
    if errors.get("ours", 0.0) > TOLERANCE[options.dtype]:
        raise SystemExit(f"{loss} of {batch} pairs: the gradient is off by {errors['ours']:.1e}, nothing was timed")
    first = max(step(call, leaves)[0] for call in calls.values())
    runs = options.runs or min(RUNS[1], max(RUNS[0], int(BUDGET_S / first)))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(runs):
        # The code of a step is colder after one that shares little of it.
        for name in order.sample(list(calls), len(calls)):
            times[name].append(step(calls[name], leaves))
    case: report.Row = {"loss": loss, "batch": batch, "dim": options.dim, "dtype": options.dtype, "device": DEVICE}
    rows = []
    for name, seconds in times.items():
        wall, thread = (statistics.median(values) for values in zip(*seconds, strict=True))
        row = {**case, "implementation": name, "runs": runs, "wall_s": wall, "thread_s": thread, "error": errors.get(name)}
        row |= {"wall_min_s": min(seconds)[0], "thread_min_s": min(each[1] for each in seconds)}
        rows.append({**row, "load_average": os.getloadavg()[0], "machine": describe(DEVICE)})
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table, and a line that describes it."""
    first = rows[0]
    machine = first["machine"]
    threads = machine["threads"]
    time_s = "thread_s" if threads == 1 else "wall_s"
    seconds = {(row["loss"], row["batch"], row["implementation"]): row[time_s] for row in rows}
    names = [name for name in TITLES if any(row["implementation"] == name for row in rows)]
    others = names[1:]
    header = ["loss", "pairs", *(f"{TITLES[name]}, ms" for name in names), *(f"{TITLES[name]} ÷ megabatch" for name in others)]
    lines = [f"| {' | '.join(header)} |", "| --- |" + " ---: |" * (len(header) - 1)]
    for loss, batch in dict.fromkeys((row["loss"], row["batch"]) for row in rows):
        times = [seconds[loss, batch, name] for name in names]
        texts = [report.three_digits(1e3 * each) for each in times] + [f"{each / times[0]:.2f}" for each in times[1:]]
        lines.append(f"| {loss} | {batch:,} | {' | '.join(texts)} |")
    fewest, most = min(row["runs"] for row in rows), max(row["runs"] for row in rows)
    steps = f"{fewest} to {most}" if fewest < most else f"{most}"
    what = "Processor time on one thread" if threads == 1 else f"Wall-clock time on {threads} threads"
    return "\n".join(lines) + (
        f"\n\n{what} of forward and backward, {first['dtype']}, D = {first['dim']}, on {machine['cpu']} with "
        f"torch {machine['torch']}, {machine['date'][:10]}: medians of {steps} steps, implementations in turn."
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss_small", description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", choices=tuple(TOLERANCE))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="batch sizes, separated by commas")
    parser.add_argument("--dim", default=512, type=int, help="embedding width")
    parser.add_argument("--threads", default=1, type=int, help="number of threads that PyTorch uses")
    parser.add_argument("--runs", type=int, help="timed steps; by default as many as the time budget allows")
    parser.add_argument("--checked-to", type=int, default=2048, help="largest batch that is compared with the formula in float64")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled formula out")
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has")
    parser.add_argument("--out", type=Path, help="file of rows (default: results/loss-small-cpu.jsonl, …-N-threads.jsonl)")
    options = parser.parse_args(arguments)
    suffix = "" if options.threads == 1 else f"-{options.threads}-threads"
    out = options.out or RESULTS / f"loss-small-cpu{suffix}.jsonl"
    torch.set_num_threads(options.threads)
    rows = report.read_rows(out) if options.append and out.exists() else []
    for batch in map(int, options.sizes.split(",")):
        for loss in ("clip", "siglip"):
            torch.compiler.reset()
            measured = measure(options, loss, batch)
            rows += measured
            report.write_rows(out, rows)
            texts = (f"{row['implementation']} {1e3 * row['wall_s']:.3f} ms ({1e3 * row['thread_s']:.3f})" for row in measured)
            print(f"{loss}, {batch:,}: {', '.join(texts)}", flush=True)
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
