"""Time and memory of InfoNCE over several directions beside plain PyTorch: `python -m benchmarks.losses --device cuda`.

Every result is checked before anything is timed. The weights of the check select a few samples, so that the exact loss and all its
gradients follow from the few rows of logits that these samples have, at any batch size. Plain PyTorch is timed at every size that
it can hold. `share` is the rate of the operations that the loss needs relative to the rate of bfloat16 matrix products, which are
timed between its steps, at the same clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megabatch
from benchmarks import memory, report
from benchmarks.machine import describe

RESULTS = Path(__file__).parent / "results"
ALL = ("x_to_y", "y_to_x", "x_to_x", "y_to_y")
SCALE = 50.0
CHECKED = 16
# Warm-up and timing, in seconds, of one case; the size of the matrix products between steps.
WARM_UP_S, BUDGET_S, MOST_RUNS, PRODUCT = 0.5, 1.2, 20, 8192
# Float32 matrices of all candidates that plain PyTorch holds at its peak, rounded up: decides whether a case fits.
PLAIN_MATRICES = 3.5


@dataclass(frozen=True)
class Variant:
    """A loss: its options, its matrices of candidates, and the operations that it needs, in units of N² · D.

    A product of x with y costs 8 (forward, recomputed, two gradients); one of a side with itself half as many; hardness needs x
    with y twice. plain: whether it is compared with PyTorch, at every size. bound: of the errors of bfloat16 gradients.
    """

    name: str
    flop: float
    matrices: int
    options: dict[str, Any] = field(default_factory=dict)
    guide: bool = False
    queue: bool = False
    plain: bool = False
    bound: float = 1e-2


VARIANTS = (
    Variant("one direction", 8, 1, {"directions": ALL[:1]}, plain=True),
    Variant("two directions, joint", 8, 2, {"directions": ALL[:2]}, plain=True),
    Variant("four directions, joint", 16, 4, {"directions": ALL}, plain=True),
    Variant("four directions, hardness 9", 24, 4, {"directions": ALL, "hardness": 9.0}),
    Variant("four directions, drop_ratio 0.95", 16, 4, {"directions": ALL, "drop_ratio": 0.95}),
    Variant("one direction, queue of N", 14, 2, {"directions": ALL[:1]}, queue=True),
    Variant("one direction, guide (eager tiles)", 12, 1, {"directions": ALL[:1]}, guide=True),
)


@dataclass(frozen=True)
class Batch:
    """The tensors of one case."""

    x: Tensor
    y: Tensor
    scale: Tensor
    options: dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 1 if a result of ours is wrong or missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sizes", help="batch sizes, separated by commas (default: 16384,32768,65536 on CUDA, 1024 on a CPU)")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--only", default="", help="run the variants whose name contains this")
    parser.add_argument("--out", type=Path, help="file of rows (default: results/losses-DEVICE.jsonl)")
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    sizes = [int(size) for size in (options.sizes or ("16384,32768,65536" if on_gpu else "1024")).split(",")]
    out = options.out or RESULTS / f"losses-{options.device}.jsonl"
    warnings.filterwarnings("ignore", message="scale=")
    rows = []
    for row in _rows([v for v in VARIANTS if options.only in v.name], sizes, options.dim, options.device):
        rows.append({**row, "machine": describe(options.device)})
        print(_line(row), flush=True)
        out.write_text("".join(json.dumps(each) + "\n" for each in rows), "utf-8")
    return int(not rows or any("error" in row and row["implementation"] == "megabatch" for row in rows))


def _rows(variants: list[Variant], sizes: list[int], dim: int, device: str) -> Iterator[dict[str, Any]]:
    for variant in variants:
        for size in sizes if variant.plain else sizes[-1:]:
            implementations: dict[str, Callable[[Batch], Tensor]] = {"megabatch": _ours}
            if variant.plain:
                implementations["pytorch"] = _plain
            if variant.plain and device == "cuda":
                # Otherwise all variants and sizes together exceed the limit of recompilations of one function.
                torch._dynamo.reset()
                implementations["pytorch, compiled"] = torch.compile(_plain, dynamic=False)
            for name, loss in implementations.items():
                row = {"variant": variant.name, "implementation": name, "batch": size, "dim": dim, "device": device}
                needed = 0 if name == "megabatch" else PLAIN_MATRICES * variant.matrices * 4 * size**2
                if needed > memory.available_bytes(device):
                    yield {**row, "skipped": f"needs about {needed / 2**30:.0f} GiB"}
                    continue
                try:
                    yield {**row, **_measure(variant, loss, size, dim, device, is_ours=name == "megabatch")}
                except torch.cuda.OutOfMemoryError:
                    yield {**row, "error": "out of memory"}
                gc.collect()
                if device == "cuda":
                    torch.cuda.empty_cache()


def _measure(
    variant: Variant, loss: Callable[[Batch], Tensor], size: int, dim: int, device: str, *, is_ours: bool
) -> dict[str, Any]:
    batch = _batch(variant, size, dim, device)
    errors = _errors(variant, batch) if is_ours else {}
    if errors and max(errors.values()) > variant.bound:
        return {"error": f"wrong result: {errors}"}
    first = _step(loss, batch)
    del first
    peak = memory.peak_of(lambda: _step(loss, batch), device)
    seconds, tflops = _times(loss, batch, device)
    flop = variant.flop * size**2 * dim
    row = {"seconds": seconds, "extra_bytes": peak.extra_bytes, "errors": errors, "flop": flop}
    return {**row, "product_tflops": tflops, "share": flop / seconds / 1e12 / tflops} if tflops else row


def _batch(variant: Variant, size: int, dim: int, device: str) -> Batch:
    generator = torch.Generator(device).manual_seed(0)

    def unit(rows: int, width: int = dim) -> Tensor:
        return F.normalize(torch.randn(rows, width, generator=generator, device=device), dim=1)

    own, dtype = unit(size), torch.bfloat16 if device == "cuda" else torch.float32
    x, y = (F.normalize(own + unit(size), dim=1).to(dtype).requires_grad_() for _ in range(2))
    options = dict(variant.options)
    if variant.queue:
        options["queue"] = unit(size).to(dtype)
    if variant.guide:
        options["guide"] = megabatch.Guide(x.detach().clone(), y.detach().clone(), margin=0.05)
    return Batch(x, y, torch.tensor(SCALE, device=device, requires_grad=True), options)


def _ours(batch: Batch) -> Tensor:
    return megabatch.infonce_loss(batch.x, batch.y, batch.scale, **batch.options)


def _plain(batch: Batch) -> Tensor:
    """Return the loss as one would write it, with products in the dtype of the embeddings and logits in float32."""
    x, y = batch.x, batch.y
    itself = torch.eye(len(x), dtype=torch.bool, device=x.device)
    tables = {
        "x_to_y": lambda: x @ y.T,
        "y_to_x": lambda: y @ x.T,
        "x_to_x": lambda: (x @ x.T).masked_fill(itself, -torch.inf),
        "y_to_y": lambda: (y @ y.T).masked_fill(itself, -torch.inf),
    }
    logits = torch.cat([batch.scale * tables[direction]().float() for direction in batch.options["directions"]], 1)
    return F.cross_entropy(logits, torch.arange(len(x), device=x.device))


def _errors(variant: Variant, batch: Batch) -> dict[str, float]:
    """Return the relative errors of value and gradients of ours, for a loss that CHECKED samples have a weight in."""
    size = len(batch.x)
    chosen = torch.linspace(0, size - 1, min(CHECKED, size), device=batch.x.device).long()
    weights = torch.zeros(size, device=batch.x.device)
    weights[chosen] = 1
    found = _gradients(lambda: megabatch.infonce_loss(batch.x, batch.y, batch.scale, weights=weights, **batch.options), batch)
    x, y, scale = (t.detach().double().requires_grad_() for t in (batch.x, batch.y, batch.scale))
    exact = Batch(x, y, scale, batch.options)
    true = _gradients(lambda: _exact(exact, chosen), exact)
    return {name: ((a - b).norm() / b.norm()).item() for name, a, b in zip(("value", "x", "y", "scale"), found, true, strict=True)}


def _gradients(loss: Callable[[], Tensor], batch: Batch) -> list[Tensor]:
    value = loss()
    gradients = torch.autograd.grad(value, (batch.x, batch.y, batch.scale))
    return [t.detach().double() for t in (value, *gradients)]


def _exact(batch: Batch, chosen: Tensor) -> Tensor:
    """Return the mean loss of the chosen samples, from their rows of logits alone."""
    x, y, options = batch.x, batch.y, batch.options
    positive = (x[chosen] * y[chosen]).sum(1)
    itself = chosen[:, None] == torch.arange(len(x), device=x.device)
    logits = []
    for direction in options["directions"]:
        anchors, candidates = (x if direction[0] == "x" else y)[chosen], y if direction[-1] == "y" else x
        z = anchors @ candidates.T
        cross = direction in ("x_to_y", "y_to_x")
        s = batch.scale * z
        if direction == "x_to_y":
            s = s + options.get("hardness", 0.0) * (z * ~itself).detach()
        out = torch.zeros_like(itself)
        if "drop_ratio" in options:
            out = z > options["drop_ratio"] * positive[:, None]
        if "guide" in options:
            guide = options["guide"]
            similarity = guide.x[chosen].double() @ guide.y.double().T
            own = (guide.x[chosen].double() * guide.y[chosen].double()).sum(1, keepdim=True)
            out = out | (similarity > own - guide.margin)
        out = out & ~itself if cross else out | itself
        logits.append(s.masked_fill(out, -torch.inf))
    if "queue" in options:
        logits.append(batch.scale * x[chosen] @ options["queue"].double().T)
    return (torch.cat(logits, 1).logsumexp(1) - batch.scale * positive).mean()


def _step(loss: Callable[[Batch], Tensor], batch: Batch) -> None:
    batch.x.grad = batch.y.grad = batch.scale.grad = None
    loss(batch).backward()


def _times(loss: Callable[[Batch], Tensor], batch: Batch, device: str) -> tuple[float, float | None]:
    """Return the median seconds of a step and, on CUDA, the TFLOP/s of the products between steps."""
    start = time.perf_counter()
    _step(loss, batch)
    if device == "cpu":
        return time.perf_counter() - start, None
    torch.cuda.synchronize()
    once = time.perf_counter() - start
    left, right = (torch.randn(PRODUCT, PRODUCT, device=device).bfloat16() for _ in range(2))
    torch.matmul(left, right)
    warm_up, runs = int(WARM_UP_S / once) + 1, min(MOST_RUNS, max(3, int(BUDGET_S / once)))
    marks: list[list[Any]] = []
    for _ in range(warm_up + runs):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        torch.matmul(left, right)
        torch.matmul(left, right)
        events[1].record()
        _step(loss, batch)
        events[2].record()
        marks.append(events)
    torch.cuda.synchronize()
    product = statistics.median(a.elapsed_time(b) for a, b, _ in marks[warm_up:]) / 2e3
    return statistics.median(b.elapsed_time(c) for _, b, c in marks[warm_up:]) / 1e3, 2 * PRODUCT**3 / product / 1e12


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table of the docs."""
    machine = rows[0]["machine"]
    header = ("loss", "rows", "implementation", "forward + backward", "extra memory", "share", "error")
    lines = [(row["variant"], f"{row['batch']:,}", row["implementation"], *_cells(row)) for row in rows]
    caption = (
        f"bfloat16, width {rows[0]['dim']}, on {machine.get('gpu', machine['cpu'])} with torch {machine['torch']}, "
        f"{machine['date'][:10]}. The share is the rate of the operations that the loss needs, counted as above, relative to that "
        "of matrix products between its steps; it exceeds 100 % where exponentials are saved and a product less is computed. "
        "The error is the largest of value and gradients, relative to float64."
    )
    return f"{report.markdown_table(header, lines, left=('loss', 'implementation'))}\n\n{caption}"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "seconds" not in row:
        return row.get("skipped") or row["error"], "", "", ""
    worst = f"{max(row['errors'].values()):.0e}" if row["errors"] else ""
    return f"{1e3 * row['seconds']:,.1f} ms", f"{row['extra_bytes'] / 2**30:.2f} GiB", f"{row['share']:.0%}", worst


def _line(row: dict[str, Any]) -> str:
    name = f"{row['variant']:36} {row['implementation']:18} {row['batch']:7,}"
    if "seconds" not in row:
        return f"{name}  {row.get('skipped') or row.get('error')}"
    share = f"{row['share']:5.0%} of {row['product_tflops']:.0f} TFLOP/s" if "share" in row else ""
    worst = f"error {max(row['errors'].values()):.1e}" if row["errors"] else ""
    return f"{name} {row['seconds'] * 1e3:9.2f} ms {row['extra_bytes'] / 2**30:7.2f} GiB {share:24} {worst}"


if __name__ == "__main__":
    raise SystemExit(main())
