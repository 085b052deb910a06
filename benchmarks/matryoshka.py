"""Time Matryoshka beside one width of the same loss: `python -m benchmarks.matryoshka --device cuda`.

Value and gradients are first compared with the formula in float64. Then one width of clip_loss, the plain loop in PyTorch where its
matrices fit, megabatch's loop over widths, and all widths together take turns, forward and backward; `ratio` is the median of a
step's time divided by that of the step of one width before it. A last step is profiled by kernel. About 40 seconds on an H200.
`--tune` instead checks and times all widths together with other configurations, to choose the constants of the kernels.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch
from benchmarks import report
from benchmarks.machine import describe
from benchmarks.memory import available_bytes, peak_of
from megabatch import reference

RESULTS = Path(__file__).parent / "results"
DIMS = (768, 512, 256, 128, 64)
SCALE = 20.0
SIZES = {"cpu": (512,), "cuda": (16_384, 65_536)}
# Rows at which results are compared with the formula, and the largest relative error: rounding of products and of the gradient.
CHECKED, LARGEST_ERROR = 2048, {torch.bfloat16: 2e-2, torch.float16: 1e-2, torch.float32: 1e-4}
# Seconds of turns at each size, and the least number of turns; seconds of work before the first.
BUDGET_S, LEAST_TURNS, WARM_UP_S = 6.0, 5, 0.5
# Float32 matrices that the plain loop holds at its peak: autograd keeps those of all widths until backward.
PLAIN_MATRICES = 4 * len(DIMS)
LISTED_KERNELS = 16
# A configuration that has not compiled and run by then is left out.
COMPILE_LIMIT_S = 90

ONE_WIDTH, TOGETHER = "one width", "megabatch, all widths together"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def one_width(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return megabatch.clip_loss(x, y, scale)


def plain_loop(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Return the loss as one would write it, with products in the dtype of the embeddings and logits in float32."""
    total = scale.new_zeros(())
    labels = torch.arange(len(x), device=x.device)
    for dim in DIMS:
        logits = scale * (F.normalize(x[:, :dim], dim=1) @ F.normalize(y[:, :dim], dim=1).T).float()
        total = total + (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    return total


def loop(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    # A function of its own, not clip_loss itself, so that each width is computed by itself.
    return megabatch.matryoshka(lambda *inputs: megabatch.clip_loss(*inputs), DIMS)(x, y, scale)


def together(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    # On a CPU, which has no such kernels, the same as `loop`.
    return megabatch.matryoshka(megabatch.clip_loss, DIMS)(x, y, scale)


IMPLEMENTATIONS: dict[str, Loss] = {
    ONE_WIDTH: one_width,
    "plain PyTorch, loop": plain_loop,
    "megabatch, loop": loop,
    TOGETHER: together,
}


def inputs(rows: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    x = F.normalize(torch.randn(rows, DIMS[0], device=device), dim=1)
    y = F.normalize(x + 0.05 * torch.randn(rows, DIMS[0], device=device), dim=1)
    return [x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_(), torch.tensor(SCALE, device=device, requires_grad=True)]


def gradients(loss: Loss, leaves: list[Tensor]) -> list[Tensor]:
    value = loss(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def worst_error(loss: Loss, dtype: torch.dtype, device: str) -> float:
    """Return the largest relative error of value and gradients."""
    leaves = inputs(min(CHECKED, max(SIZES[device])), dtype, device)
    found = gradients(loss, leaves)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    true = gradients(lambda *t: reference.matryoshka_loss(reference.clip_loss, *t, dims=DIMS), exact)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, true, strict=True))


def seconds_of(loss: Loss, leaves: list[Tensor], device: str) -> Callable[[], float]:
    """Start a step; return a function that waits for its end and returns its seconds."""
    if device == "cpu":
        start = time.perf_counter()
        gradients(loss, leaves)
        seconds = time.perf_counter() - start
        return lambda: seconds
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    gradients(loss, leaves)
    events[1].record()
    return lambda: (torch.cuda.synchronize(), events[0].elapsed_time(events[1]) / 1e3)[1]


def measure(rows: int, dtype: torch.dtype, device: str) -> Iterator[dict[str, Any]]:
    """Yield time and memory of every implementation that fits."""
    leaves = inputs(rows, dtype, device)
    fits = PLAIN_MATRICES * 4 * rows**2 <= available_bytes(device)
    losses = {name: loss for name, loss in IMPLEMENTATIONS.items() if fits or loss is not plain_loop}
    peaks = {}
    for name, loss in losses.items():
        gradients(loss, leaves)
        peaks[name] = peak_of(lambda loss=loss: gradients(loss, leaves), device).extra_bytes  # type: ignore[misc]
    for name in losses:
        start = time.perf_counter()
        while time.perf_counter() - start < WARM_UP_S / len(losses):
            seconds_of(losses[name], leaves, device)()
    turns: list[dict[str, Callable[[], float]]] = []
    start = time.perf_counter()
    while len(turns) < LEAST_TURNS or time.perf_counter() - start < BUDGET_S:
        turns.append({name: seconds_of(loss, leaves, device) for name, loss in losses.items()})
        if device == "cuda":
            torch.cuda.synchronize()
    seconds = {name: [turn[name]() for turn in turns] for name in losses}
    for name in losses:
        ratios = [own / one for own, one in zip(seconds[name], seconds[ONE_WIDTH], strict=True)]
        yield {
            "implementation": name,
            "rows": rows,
            "dtype": str(dtype).removeprefix("torch."),
            "seconds": statistics.median(seconds[name]),
            "min_s": min(seconds[name]),
            "max_s": max(seconds[name]),
            "turns": len(turns),
            "ratio": statistics.median(ratios),
            "extra_bytes": peaks[name],
        }


def kernel_times(loss: Loss, leaves: list[Tensor]) -> list[tuple[str, int, float]]:
    """Return name, number of launches and seconds of the kernels of one step, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        gradients(loss, leaves)
        torch.cuda.synchronize()
    events = [(e.key, e.count, e.self_device_time_total / 1e6) for e in profiler.key_averages()]
    return sorted(events, key=lambda event: -event[2])


def print_kernels(rows: int, dtype: torch.dtype) -> None:
    leaves = inputs(rows, dtype, "cuda")
    for name in (ONE_WIDTH, TOGETHER):
        events = kernel_times(IMPLEMENTATIONS[name], leaves)
        print(f"\n{name}, {rows:,} rows: {1e3 * sum(seconds for *_, seconds in events):.2f} ms of kernels")
        for key, count, seconds in events[:LISTED_KERNELS]:
            print(f"{1e3 * seconds:9.3f} ms {count:5} × {key[:110]}")


class Variant(NamedTuple):
    """Configuration of the kernels: Blocks of forward, backward and narrow widths, MAX_KEPT_TILES and LARGEST_NARROW_WIDTH."""

    stats: tuple[int, ...]
    gradient: tuple[int, ...]
    kept: int
    narrow: int = 0
    narrow_blocks: tuple[int, ...] = (64, 64, 64, 4, 3)


VARIANTS = (
    Variant((128, 128, 64, 4, 3, 2, 8, 4), (64, 128, 64, 4, 4, 2, 16, 4), 2, narrow=128),
    Variant((128, 128, 64, 4, 3, 2, 8, 4), (64, 128, 64, 4, 4, 2, 16, 4), 2),
    Variant((128, 128, 64, 4, 3, 2, 8, 4), (128, 64, 64, 4, 4, 2, 8, 2), 3),
    Variant((128, 256, 64, 8, 3, 1, 8, 4), (64, 128, 64, 4, 3, 3, 16, 4), 2, narrow=128, narrow_blocks=(64, 64, 64, 4, 4)),
    Variant((128, 128, 64, 8, 3, 2, 8, 4), (64, 128, 64, 4, 4, 3, 16, 4), 1),
    Variant((64, 128, 64, 4, 4, 3, 16, 4), (64, 128, 64, 4, 3, 3, 16, 4), 2),
)
# Kernels whose time is listed, by a part of their name.
TIMED = {
    "stats": "prefix_stats",
    "gradient": "prefix_gradient",
    "narrow": "narrow_gradient",
    "products": "nvjet",
    "merge": "merge_kernel",
}


def configure(variant: Variant) -> None:
    """Make the kernels use a configuration."""
    from megabatch.tiles.fused import matryoshka as kernels
    from megabatch.tiles.fused.tuned_configs import Blocks

    kernels.STATS_BLOCKS, kernels.GRADIENT_BLOCKS = Blocks(*variant.stats), Blocks(*variant.gradient)
    kernels.NARROW_BLOCKS = Blocks(*variant.narrow_blocks)
    kernels.MAX_KEPT_TILES, kernels.LARGEST_NARROW_WIDTH = variant.kept, variant.narrow


def tune(rows: int, dtype: torch.dtype, only: int | None) -> None:
    """Print error and times of all widths together with each variant of the kernels.

    Processes of their own compile all variants at the same time first; this one reads their cache.
    """
    if only is not None:
        configure(VARIANTS[only])
        gradients(together, inputs(CHECKED, dtype, "cuda"))
        return
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.matryoshka", "--device", "cuda", "--tune", "--variant"]
    compiling = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for i in range(len(VARIANTS))
    ]
    hanging = set()
    for i, process in enumerate(compiling):
        try:
            process.wait(max(0.1, COMPILE_LIMIT_S - (time.perf_counter() - start)))
        except subprocess.TimeoutExpired:
            process.kill()
            hanging.add(i)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    leaves = inputs(rows, dtype, "cuda")
    one = min(seconds_of(one_width, leaves, "cuda")() for _ in range(6))
    print(f"one width, {rows:,} rows: forward and backward {1e3 * one:.2f} ms", flush=True)
    for i, variant in enumerate(VARIANTS):
        try:
            line = f"no result after {COMPILE_LIMIT_S} s" if i in hanging else _timed(variant, leaves, dtype)
        except Exception as error:  # A configuration that does not compile or launch is a result too.
            line = f"{type(error).__name__}: {str(error)[:120]}"
        narrow = f" narrow {variant.narrow} {variant.narrow_blocks}" if variant.narrow else ""
        print(f"{variant.stats} {variant.gradient} kept {variant.kept}{narrow}: {line}", flush=True)


def _timed(variant: Variant, leaves: list[Tensor], dtype: torch.dtype) -> str:
    configure(variant)
    error = worst_error(together, dtype, "cuda")
    forward, backward = [], []
    for _ in range(6):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        loss = together(*leaves)
        events[1].record()
        torch.autograd.grad(loss, leaves)
        events[2].record()
        torch.cuda.synchronize()
        forward.append(events[0].elapsed_time(events[1]))
        backward.append(events[1].elapsed_time(events[2]))
    events = kernel_times(together, leaves)
    kernels = {name: 1e3 * sum(seconds for key, _, seconds in events if part in key) for name, part in TIMED.items()}
    listed = ", ".join(f"{name} {milliseconds:.2f}" for name, milliseconds in kernels.items())
    return f"error {error:.1e}, forward {min(forward):.2f} ms, backward {min(backward):.2f} ms; kernels: {listed}"


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table of the docs."""
    machine = rows[0]["machine"]
    lines = [
        (
            f"{row['rows']:,}",
            row["implementation"],
            f"{1e3 * row['seconds']:,.1f} ms",
            f"{row['ratio']:.2f}",
            f"{row['extra_bytes'] / 2**20:,.0f} MiB",
        )
        for row in rows
    ]
    header = ("rows", "implementation", "forward + backward", "times one width", "extra memory")
    caption = (
        f"{rows[0]['dtype']}, widths {', '.join(map(str, DIMS))}, on {machine.get('gpu', machine['cpu'])} with torch "
        f"{machine['torch']}, {machine['date'][:10]}."
    )
    return f"{report.markdown_table(header, lines, left=('implementation',))}\n\n{caption}"


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 1 if a result of ours is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matryoshka", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sizes", help="batch sizes, separated by commas (default: 16384,65536 on CUDA, 512 on a CPU)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16 on CUDA, else float32")
    parser.add_argument("--tune", action="store_true", help="time other configurations of the kernels instead, at the last size")
    parser.add_argument("--variant", type=int, help="with --tune: only compile this configuration")
    parser.add_argument("--out", type=Path, help="file of rows (default: results/matryoshka-DEVICE.jsonl)")
    options = parser.parse_args(arguments)
    dtype = getattr(torch, options.dtype or ("bfloat16" if options.device == "cuda" else "float32"))
    sizes = [int(size) for size in options.sizes.split(",")] if options.sizes else list(SIZES[options.device])
    if options.tune:
        tune(sizes[-1], dtype, options.variant)
        return 0
    machine, rows, wrong = describe(options.device), [], False
    errors = {name: worst_error(loss, dtype, options.device) for name, loss in IMPLEMENTATIONS.items() if name != ONE_WIDTH}
    for name, error in errors.items():
        print(f"{name:34} error {error:.1e}", flush=True)
        wrong |= name.startswith("megabatch") and not error < LARGEST_ERROR[dtype]
    for size in sizes:
        for row in measure(size, dtype, options.device):
            rows.append({**row, "error": errors.get(row["implementation"]), "machine": machine})
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    report.write_rows(options.out or RESULTS / f"matryoshka-{options.device}.jsonl", rows)
    print(markdown(rows))
    if options.device == "cuda":
        print_kernels(sizes[-1], dtype)
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
