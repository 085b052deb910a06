"""Measures the block sizes of the fused kernels on this device: `python -m benchmarks.tune`, and writes them into the package.

Every candidate is compiled in parallel first, then timed; whether kernels are right is for the tests. What the file holds for other
devices stays.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from megabatch.tiles import fused
from megabatch.tiles.contract import Means, Pairs, Softmax, Wanted
from megabatch.tiles.fused import blocks as measured
from megabatch.tiles.fused.blocks import Blocks, kind_of

# m, n, k, warps, stages, programs a multiprocessor, group, pieces. One that does not fit the device fails to start and is left out.
BF16 = [
    Blocks(128, 128, 64, 4, 3, 2, 8, 1),
    Blocks(128, 128, 64, 4, 3, 2, 6, 1),
    Blocks(128, 128, 64, 4, 3, 2, 8, 2),
    Blocks(128, 128, 64, 4, 3, 2, 4, 2),
    Blocks(128, 128, 64, 4, 3, 2, 16, 2),
    Blocks(128, 256, 64, 8, 3, 1, 8, 1),
    Blocks(128, 256, 64, 8, 4, 1, 8, 2),
    Blocks(256, 128, 64, 8, 4, 1, 8, 2),
]
CANDIDATES = {
    "bfloat16": BF16,
    "float16": [*BF16, Blocks(128, 256, 64, 8, 3, 1, 8, 2), Blocks(128, 128, 64, 8, 3, 1, 8, 2)],
    "tf32": [
        Blocks(128, 128, 32, 4, 3, 2, 8, 1),
        Blocks(128, 128, 32, 4, 3, 1, 8, 2),
        Blocks(128, 128, 32, 8, 3, 1, 8, 2),
        Blocks(128, 256, 32, 8, 3, 1, 8, 1),
        Blocks(128, 256, 32, 8, 3, 1, 8, 2),
    ],
    "ieee": [
        Blocks(64, 64, 16, 4, 3, 2, 8, 1),
        Blocks(64, 64, 32, 4, 2, 2, 8, 1),
        Blocks(128, 64, 16, 8, 3, 1, 8, 1),
        Blocks(128, 128, 16, 8, 3, 1, 8, 1),
    ],
}
KERNELS = ("stats", "gradient", "sigmoid")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32_768)
    parser.add_argument("--widths", default="512,768,1024")
    parser.add_argument("--kinds", default=",".join(CANDIDATES), help="of products: bfloat16, float16, tf32, ieee")
    parser.add_argument("--processes", type=int, default=12, help="that compile at the same time")
    parser.add_argument("--dry-run", action="store_true", help="print, and leave the file as it is")
    options = parser.parse_args(arguments)
    unknown = [kind for kind in options.kinds.split(",") if kind not in CANDIDATES]
    if unknown:
        parser.error(f"kinds {', '.join(unknown)}: choose among {', '.join(CANDIDATES)}")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here, and block sizes are a device's own")
    cases = [
        (kernel, kind, int(width), blocks)
        for kind in options.kinds.split(",")
        for width in options.widths.split(",")
        for kernel in KERNELS
        for blocks in CANDIDATES[kind]
    ]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        pool.starmap(_compile, cases, chunksize=1)
    entries = list(_best(cases, options.rows))
    if not options.dry_run:
        _write(entries)
    return 0


def _best(cases: list[tuple[str, str, int, Blocks]], rows: int) -> Iterator[dict[str, Any]]:
    """The fastest candidate for each kernel, kind and width; prints all."""
    name, capability = measured.device_kind(torch.device("cuda", 0))
    for kernel, kind, width in dict.fromkeys(case[:3] for case in cases):
        times = {}
        for blocks in (case[3] for case in cases if case[:3] == (kernel, kind, width)):
            try:
                times[blocks] = _seconds(kernel, kind, width, blocks, rows if kind != "ieee" else rows // 4)
            except Exception as error:  # too much shared memory, too many registers: not a candidate here
                print(f"{kernel:9}{kind:9}{width:6}  {tuple(blocks)}: {str(error).strip().splitlines()[0][:90]}", flush=True)
        size = rows if kind != "ieee" else rows // 4
        for blocks, seconds in sorted(times.items(), key=lambda item: item[1]):
            rate = 2 * size**2 * width / seconds / 1e12
            print(f"{kernel:9}{kind:9}{width:6}  {tuple(blocks)}: {seconds * 1e3:.3f} ms, {rate:.0f} TFLOP/s", flush=True)
        blocks = min(times, key=lambda blocks: times[blocks])
        yield {"kernel": kernel, "kind": kind, "width": width, "device": name, "capability": capability, **blocks._asdict()}


def _write(entries: list[dict[str, Any]]) -> None:
    kept = json.loads(measured.MEASURED.read_text())
    replaced = {(entry["kernel"], entry["kind"], entry["width"], entry["device"]) for entry in entries}
    others = [e for e in kept["blocks"] if (e["kernel"], e["kind"], e["width"], e["device"]) not in replaced]
    stamp = {"date": datetime.now(timezone.utc).date().isoformat(), "torch": torch.__version__, "triton": triton.__version__}
    lines = ",\n".join(json.dumps(entry) for entry in [*others, *({**entry, **stamp} for entry in entries)])
    measured.MEASURED.write_text(f'{{"blocks": [\n{lines}\n]}}\n')


def _compile(kernel: str, kind: str, width: int, blocks: Blocks) -> None:
    try:
        _work(kernel, kind, width, blocks, 1024)()
    except Exception:  # said when it is timed
        return


def _seconds(kernel: str, kind: str, width: int, blocks: Blocks, rows: int) -> float:
    """The median time of a launch."""
    work = _work(kernel, kind, width, blocks, rows)
    for _ in range(3):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(16)]
    for mark in marks:
        mark.record()
        work()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) / 1e3


def _work(kernel: str, kind: str, width: int, blocks: Blocks, rows: int) -> Callable[[], Any]:
    """A launch of the kernel alone: without the products that follow it, with the merging that belongs to it."""
    torch.manual_seed(0)
    dtype = getattr(torch, kind, torch.float32)
    x, y = (torch.nn.functional.normalize(torch.randn(rows, width, device="cuda"), dim=1).to(dtype) for _ in range(2))
    scale, bias = torch.tensor(20.0, device="cuda"), torch.tensor(-10.0, device="cuda")
    means, pairs = Means(2**33, kind if kind in ("tf32", "ieee") else "ieee"), Pairs(home=True)
    vectors: list[Tensor] = [torch.full((rows,), value, device="cuda") for value in (12.0, 1e-4)]

    def work() -> Any:
        with (
            mock.patch.object(fused.launch, "blocks_for", lambda *_: blocks),
            mock.patch.object(fused.Products, "add", lambda *_: None),
        ):
            if kernel == "stats":
                return fused.softmax_stats(x, y, scale, pairs, columns=True, means=means)
            if kernel == "gradient":
                softmax = Softmax(*vectors)
                return fused.softmax_grads(x, y, scale, pairs, softmax, softmax, wanted=Wanted(True, True), means=means)
            return fused.sigmoid_sums(x, y, scale, bias, pairs, None, wanted=Wanted(True, True), means=means)

    assert kind == kind_of(dtype, means.precision)
    return work


if __name__ == "__main__":
    raise SystemExit(main())
