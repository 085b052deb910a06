"""Time attention over short sequences beside PyTorch's kernels: `python -m benchmarks.attention --help`.

For the sequences of known towers, forward and backward in bf16. Errors are the largest ones of the output and of the three
gradients, relative to the largest entry, from the formula in float64 of the first and last samples. Times are those of the device.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import report
from benchmarks.machine import describe
from megabatch.towers import attention

FILE = Path(__file__).parent / "results" / "attention-cuda.jsonl"
PYTORCH = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
OURS, DEFAULT = "megabatch", "PyTorch's choice"
WARM_UP, RUNS, CHECKED = 5, 20, 4
# Of the largest entry: bf16 rounds the probabilities and the results.
TOLERANCE = 2e-2
# Cycles for which the device waits while the host enqueues a run.
HEAD_START = 2_000_000


class Shape(NamedTuple):
    title: str
    batch: int
    heads: int
    length: int
    causal: bool = False


SHAPES = (
    Shape("ViT-B/32, 50 positions", 2048, 12, 50),
    Shape("CLIP's texts, 77 positions, causal", 2048, 8, 77, True),
    Shape("texts of 128 tokens", 512, 12, 128),
    Shape("ViT-B/16, 197 positions", 512, 12, 197),
    Shape("ViT-L/14, 257 positions", 256, 16, 257),
)

Attention = Callable[..., Tensor]


def implementations() -> dict[str, Attention]:
    def with_backend(backend: SDPBackend) -> Attention:
        def call(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

        return call

    pytorchs = {name: with_backend(backend) for name, backend in PYTORCH.items()}
    return {OURS: attention._attention, DEFAULT: F.scaled_dot_product_attention} | pytorchs


def inputs(shape: Shape) -> list[Tensor]:
    """Return q, k, v and the gradient of the output, as transformers have them: views of (B, S, H, D) memory."""
    generator = torch.Generator("cuda").manual_seed(0)
    size = shape.batch, shape.length, shape.heads, attention.WIDTH
    made = (torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator).transpose(1, 2) for _ in range(4))
    return [t.requires_grad_(place < 3) for place, t in enumerate(made)]


def step(call: Attention, tensors: list[Tensor], causal: bool) -> list[Tensor]:
    output = call(*tensors[:3], is_causal=causal)
    return [output, *torch.autograd.grad(output, tensors[:3], tensors[3])]


def error(call: Attention, tensors: list[Tensor], causal: bool) -> float:
    found = step(call, tensors, causal)
    worst = 0.0
    for some in (slice(0, CHECKED), slice(len(found[0]) - CHECKED, None)):
        exact = step(F.scaled_dot_product_attention, [t[some].detach().double().requires_grad_() for t in tensors], causal)
        errors = [float((a[some].double() - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True)]
        worst = max(worst, *errors)
    return worst


def seconds(call: Attention, tensors: list[Tensor], causal: bool) -> tuple[float, float]:
    """Return the median seconds of forward and of backward."""
    times = []
    for _ in range(WARM_UP + RUNS):
        torch.cuda._sleep(HEAD_START)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        output = call(*tensors[:3], is_causal=causal)
        marks[1].record()
        torch.autograd.grad(output, tensors[:3], tensors[3])
        marks[2].record()
        torch.cuda.synchronize()
        times.append([marks[k].elapsed_time(marks[k + 1]) / 1e3 for k in range(2)])
    forward, backward = (statistics.median(values) for values in zip(*times[WARM_UP:], strict=True))
    return forward, backward


def rows() -> list[dict[str, Any]]:
    found = []
    for shape in SHAPES:
        tensors = inputs(shape)
        for name, call in implementations().items():
            row: dict[str, Any] = {**shape._asdict(), "implementation": name, "machine": describe("cuda")}
            try:
                row["error"] = error(call, tensors, shape.causal)
                if name == OURS and not row["error"] <= TOLERANCE:
                    raise SystemExit(f"{shape.title}: the results are off by {row['error']:.1e}, nothing was timed")
                row["forward_s"], row["backward_s"] = seconds(call, tensors, shape.causal)
                print(
                    f"{shape.title}, {name}: {1e3 * (row['forward_s'] + row['backward_s']):.3f} ms, off by {row['error']:.1e}",
                    flush=True,
                )
            except RuntimeError as failure:
                row["failed"] = str(failure).splitlines()[0]
            found.append(row)
    return found


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table: milliseconds of forward and backward, and how much faster megabatch is."""
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    lines = []
    for title in dict.fromkeys(row["title"] for row in rows):
        here = {row["implementation"]: row for row in rows if row["title"] == title}
        times = {name: row["forward_s"] + row["backward_s"] for name, row in here.items() if "forward_s" in row}
        ratio = f"{times[DEFAULT] / times[OURS]:.2f}×"
        cells = (report.three_digits(1e3 * times[name]) if name in times else "" for name in names)
        lines.append([title, f"{here[OURS]['batch']:,}", str(here[OURS]["heads"]), *cells, ratio])
    table = report.markdown_table(("sequence", "samples", "heads", *names, "speed"), lines, left=("sequence",))
    machine = rows[0]["machine"]
    worst = {
        name: max(row["error"] for row in rows if row["implementation"] == name and "error" in row) for name in (OURS, DEFAULT)
    }
    return table + (
        f"\n\nMilliseconds of forward and backward, bf16, heads of {attention.WIDTH}, on {report.device_name(machine)} with torch "
        f"{machine['torch']}, {machine['date'][:10]}; speed relative to PyTorch's choice. Results are off by at most "
        f"{worst[OURS]:.0e} ({OURS}) and {worst[DEFAULT]:.0e} ({DEFAULT}) of their largest entry."
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FILE, help="file of rows")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or not attention.has_kernels(torch.device("cuda", 0)):
        parser.error("the kernels need a Hopper GPU and Triton")
    found = rows()
    report.write_rows(options.out, found)
    print(markdown(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
