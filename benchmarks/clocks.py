"""Measure how fast the loss is at different clocks of the device: `python -m benchmarks.clocks --help`.

At its power limit a device lowers its clock, which slows down products more than operations that wait for memory. So four
implementations are timed with rests between their steps, from none to twice the step, beside two products right after each rest:
the loss, the loss with the int8 backward, the four products of the loss alone, as cuBLAS computes them for the same panels, and
OpenCLIP's. Results are not compared here; `benchmarks.loss` does that.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure, peers, report
from benchmarks.machine import describe
from benchmarks.measure import Case, Row

RESULTS = Path(__file__).parent / "results"
# Rests, as multiples of the previous step.
RESTS = (0.0, 0.25, 0.5, 1.0, 2.0)
PANEL = 16_384
LEAST_BATCH = 1024
TITLES = {"ours, 512 MiB": "megabatch", "ours, int8": "with int8", "products": "its four products alone", "openclip": "OpenCLIP"}
HEADERS = ("rest", *(name for title in TITLES.values() for name in (title, "beside")), "speed", "with int8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clocks", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="Seconds for which each is timed, after a warm-up of half a second."
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "clocks-cuda.jsonl", help="Output file, one JSON row per line.")
    options = parser.parse_args(arguments)
    if options.batch < LEAST_BATCH:
        parser.error(f"--batch is {options.batch}: clocks are seen in steps that fill a device, of {LEAST_BATCH:,} pairs or more")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device to measure clocks on")
    rows = list(_rows(options.batch, options.dim, options.seconds))
    report.write_rows(options.out, rows)
    report.show(HEADERS, table(rows))
    print(f"rows: {options.out}")
    return 0


def markdown(rows: list[Row]) -> str:
    """Return the table for the docs, with a caption."""
    lines = [f"| {' | '.join(HEADERS)} |", f"|{' ---: |' * len(HEADERS)}", *(f"| {' | '.join(cells)} |" for cells in table(rows))]
    row, machine = rows[0], rows[0]["machine"]
    caption = (
        f"Forward and backward of {row['batch']:,} pairs, bfloat16, D = {row['dim']}, on {report.device_name(machine)} with torch "
        f"{machine['torch']}, {machine['date'][:10]}, in one run. Before each step the device rests for so many times the step, "
        f"and multiplies two matrices of {measure.PRODUCT_SIZE:,} × {measure.PRODUCT_SIZE:,} by cuBLAS, twice, at the rates beside."
    )
    return "\n".join([*lines, "", caption])


def table(rows: list[Row]) -> list[tuple[str, ...]]:
    """Return one line per rest: times, rates of the products beside, and the speed relative to OpenCLIP's loss."""
    lines = []
    for rest in dict.fromkeys(row["rest"] for row in rows):
        here = {row["implementation"]: row for row in rows if row["rest"] == rest}
        cells = [(f"{here[name]['total_s'] * 1e3:.1f} ms", f"{here[name]['matrix_product_tflops']:.0f} TFLOP/s") for name in TITLES]
        speeds = (f"{here['openclip']['total_s'] / here[name]['total_s']:.2f}×" for name in ("ours, 512 MiB", "ours, int8"))
        lines.append((f"{rest:g}", *(cell for pair in cells for cell in pair), *speeds))
    return lines


def _rows(batch: int, dim: int, seconds: float) -> Iterator[Row]:
    case = Case("clip", "ours, 512 MiB", batch, dim, "bfloat16", "cuda")
    inputs = measure._inputs(case, batch)
    calls = {name: peers.find(name, "clip").load() for name in ("ours, 512 MiB", "ours, int8", "openclip")} | {
        "products": _Products.apply
    }
    first = {}
    for name, call in calls.items():
        for _ in range(2):
            first[name] = sum(measure._step(call, inputs)[0])
    for rest in RESTS:
        for name, call in calls.items():
            rest_s = rest * first[name]
            runs = max(3, int(seconds / first[name]))
            times, tflops = measure._enqueued(call, inputs, runs, first[name] + rest_s, rest_s=rest_s)
            yield {
                "implementation": name,
                "batch": batch,
                "dim": dim,
                "rest": rest,
                "runs": runs,
                "total_s": median(sum(each) for each in times),
                "matrix_product_tflops": tflops,
                "machine": describe("cuda"),
            }


class _Products(torch.autograd.Function):
    """Only the products of the loss by cuBLAS: that of each panel forward, again backward, and the two of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        buffer = x.new_empty(PANEL, PANEL)
        for rows, columns in _panels(len(x)):
            torch.mm(x[rows], y[columns].T, out=buffer[: len(x[rows]), : len(y[columns])])
        return scale.detach() * 0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        buffer = x.new_empty(PANEL, PANEL)
        gx, gy = (torch.zeros_like(t, dtype=torch.float32) for t in (x, y))
        for rows, columns in _panels(len(x)):
            panel = torch.mm(x[rows], y[columns].T, out=buffer[: len(x[rows]), : len(y[columns])])
            torch.addmm(gx[rows], panel, y[columns], out_dtype=torch.float32, out=gx[rows])
            torch.addmm(gy[columns], panel.T, x[rows], out_dtype=torch.float32, out=gy[columns])
        return gx.to(x.dtype), gy.to(y.dtype), None, None


def _panels(length: int, side: int = PANEL) -> Iterator[tuple[slice, slice]]:
    slices = [slice(start, start + side) for start in range(0, length, side)]
    return ((rows, columns) for rows in slices for columns in slices)


if __name__ == "__main__":
    raise SystemExit(main())
