"""Measures the block sizes of the fused kernels on this device: `python -m benchmarks.tune`, and writes them into the package.

Of the kernels for Hopper it measures the rings, and from which size on they are faster than the others.

Every candidate is compiled in parallel first, then timed; whether kernels are right is for the tests. What the file holds for other
devices stays.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from itertools import pairwise, product
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from megabatch.tiles import fused
from megabatch.tiles.contract import ComputeOptions, NeedsGrad, Pairs, Softmax
from megabatch.tiles.fused import hopper
from megabatch.tiles.fused import tuned_configs as measured
from megabatch.tiles.fused.launch import Launch, Panel
from megabatch.tiles.fused.tuned_configs import Blocks, Rings, kind_of

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
Case = tuple[str, str, int, Blocks | Rings | None]
KERNELS = ("stats", "gradient", "sigmoid")
# group, slots for x, slots for y, behind, places: what shared memory has room for.
RINGS = {
    "stats": [(8, 3, 7, 5, 0), (8, 3, 7, 4, 0), (16, 3, 7, 5, 0), (8, 2, 8, 5, 0)],
    "gradient": [
        *((16, 3, 6, 4, 2), (8, 3, 6, 4, 2), (16, 3, 6, 3, 2), (16, 3, 6, 2, 2), (8, 3, 6, 2, 2)),
        *((16, 3, 7, 5, 1), (16, 3, 7, 4, 1), (16, 2, 8, 5, 2)),
    ],
    "sigmoid": [(16, 3, 6, 4, 2), (8, 3, 6, 4, 2), (16, 3, 7, 5, 1), (16, 2, 8, 5, 2)],
}
RING_KINDS = {"stats": ("bfloat16", "float16"), "gradient": ("bfloat16", "int8"), "sigmoid": ("bfloat16",)}
RING_WIDTHS = (64, 256, 512, 768, 1024)
# Rows of square panels, from large to small: as long as the kernels for Hopper are faster, they serve.
RING_ROWS = (16_384, 11_584, 8192, 5792, 4096, 2896, 2048, 1024)
# Contestants are timed in turns of so many seconds, of which the first half is for the device to find its clock.
TURNS, TURN_S = 3, 0.15
# So many launches are captured at a time: the host would take longer to start small ones.
CAPTURED = 10


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32_768)
    parser.add_argument("--widths", default="512,768,1024")
    parser.add_argument("--kinds", default=",".join(CANDIDATES), help="of products: bfloat16, float16, tf32, ieee; or none")
    parser.add_argument("--rings", action=argparse.BooleanOptionalAction, default=True, help="of the kernels for Hopper too")
    parser.add_argument("--processes", type=int, default=12, help="that compile at the same time")
    parser.add_argument("--dry-run", action="store_true", help="print, and leave the file as it is")
    options = parser.parse_args(arguments)
    kinds = [] if options.kinds == "none" else options.kinds.split(",")
    unknown = [kind for kind in kinds if kind not in CANDIDATES]
    if unknown:
        parser.error(f"kinds {', '.join(unknown)}: choose among {', '.join(CANDIDATES)}")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here, and block sizes are a device's own")
    cases: list[Case] = [
        (kernel, kind, int(width), blocks)
        for kind in kinds
        for width in options.widths.split(",")
        for kernel in KERNELS
        for blocks in CANDIDATES[kind]
    ]
    ring_cases: list[Case] = []
    if options.rings and hopper._available(torch.device("cuda", 0)):
        ring_cases = [
            (kernel, kind, width, Rings(*rings, least_pairs=0))
            for kernel in RINGS
            for kind in RING_KINDS[kernel]
            for width in RING_WIDTHS
            for rings in RINGS[kernel]
        ]
    others = {(*case[:3], None) for case in ring_cases}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        pool.starmap(_compile, [*cases, *ring_cases, *others], chunksize=1)
    found = {"blocks": list(_best(cases, options.rows)), "rings": list(_with_least_pairs(_best(ring_cases, options.rows)))}
    if not options.dry_run:
        _write(found)
    return 0


def _with_least_pairs(entries: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The best rings of each kernel, with the size from which on they are faster than the best blocks; in eight bits, than any way
    in bf16."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for entry in entries:
        case = kernel, kind, width = entry["kernel"], entry["kind"], entry["width"]
        rings = Rings(*(entry[name] for name in Rings._fields))
        least = None
        for rows in RING_ROWS:
            ours, others = _timed([_work(*case, way, rows) for way in (rings, None)])
            pairs = hopper._pairs(Panel(slice(0, rows), slice(0, rows))) / processors
            share = f"{ours / others:.3f} of the time of {'bfloat16' if kind == 'int8' else 'blocks'}"
            print(f"{kernel:9}{kind:9}{width:6}  {rows:,} rows, {pairs:.1f} pairs of tiles a multiprocessor: {share}", flush=True)
            if ours > others:
                break
            least = round(pairs, 1)
        yield {**entry, "least_pairs": least}


def _best(cases: list[Case], rows: int) -> Iterator[dict[str, Any]]:
    """The fastest candidate for each kernel, kind and width; prints all."""
    name, capability = measured.device_kind(torch.device("cuda", 0))
    for kernel, kind, width in dict.fromkeys(case[:3] for case in cases):
        works = {}
        for blocks in (case[3] for case in cases if case[:3] == (kernel, kind, width)):
            try:
                work = _work(kernel, kind, width, blocks, rows if kind != "ieee" else rows // 4)
                work()
                works[blocks] = work
            except Exception as error:  # too much shared memory, too many registers: not a candidate here
                print(f"{kernel:9}{kind:9}{width:6}  {tuple(blocks)}: {str(error).strip().splitlines()[0][:90]}", flush=True)
        times = dict(zip(works, _timed(list(works.values())), strict=True))
        size = rows if kind != "ieee" else rows // 4
        for blocks, seconds in sorted(times.items(), key=lambda item: item[1]):
            rate = 2 * size**2 * width / seconds / 1e12
            print(f"{kernel:9}{kind:9}{width:6}  {tuple(blocks)}: {seconds * 1e3:.3f} ms, {rate:.0f} TFLOP/s", flush=True)
        if not times:
            continue
        blocks = min(times, key=lambda blocks: times[blocks])
        yield {"kernel": kernel, "kind": kind, "width": width, "device": name, "capability": capability, **blocks._asdict()}


def _write(found: dict[str, list[dict[str, Any]]]) -> None:
    """Puts entries in the place of those for the same kernel, kind, width and device."""
    stamp = {"date": datetime.now(timezone.utc).date().isoformat(), "torch": torch.__version__, "triton": triton.__version__}
    kept = json.loads(measured.MEASURED.read_text())
    parts = []
    for what, entries in found.items():
        replaced = {_place(entry) for entry in entries}
        others = [entry for entry in kept[what] if _place(entry) not in replaced]
        lines = ",\n".join(json.dumps(entry) for entry in [*others, *({**entry, **stamp} for entry in entries)])
        parts.append(f'"{what}": [\n{lines}\n]')
    measured.MEASURED.write_text(f"{{{', '.join(parts)}}}\n")


def _place(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["kernel"], entry["kind"], entry["width"], entry["device"]


def _compile(kernel: str, kind: str, width: int, way: Blocks | Rings | None) -> None:
    try:
        _work(kernel, kind, width, way, 1024)()
    except Exception:  # said when it is timed
        return


def _timed(works: list[Callable[[], Any]]) -> list[float]:
    """The median seconds of each launch, sustained."""
    graphs = [_captured(work) for work in works]
    turns: list[list[float]] = [[] for _ in works]
    for _, (graph, seconds) in product(range(TURNS), zip(graphs, turns, strict=True)):
        start = time.perf_counter()
        marks = []
        while time.perf_counter() - start < TURN_S:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
            graph.replay()
            # One replay waits while another runs.
            if len(marks) > 2:
                marks[-2].synchronize()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) / 1e3 / CAPTURED for a, b in pairwise(marks)]
        seconds += times[len(times) // 2 :]
    return [statistics.median(seconds) for seconds in turns]


def _captured(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CAPTURED):
            work()
    return graph


def _work(kernel: str, kind: str, width: int, way: Blocks | Rings | None, rows: int) -> Callable[[], Any]:
    """A launch of the kernel alone: without the products that follow it, with the merging that belongs to it.

    way: rings, for the kernel for Hopper; or blocks for the other one, None for those that are known. int8 is a way for bf16, and
    None there all ways that are known in bf16.
    """
    torch.manual_seed(0)
    int8_similarities = kind == "int8"
    dtype = torch.bfloat16 if int8_similarities else getattr(torch, kind, torch.float32)
    x, y = (torch.nn.functional.normalize(torch.randn(rows, width, device="cuda"), dim=1).to(dtype) for _ in range(2))
    scale, bias = torch.tensor(20.0, device="cuda"), torch.tensor(-10.0, device="cuda")
    pairs = Pairs(is_local=True)
    compute = ComputeOptions(
        2**33, kind if kind in ("tf32", "ieee") else "ieee", int8_similarities=int8_similarities and way is not None
    )
    vectors: list[Tensor] = [torch.full((rows,), value, device="cuda") for value in (12.0, 1e-4)]

    def work() -> Any:
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(fused.Products, "add", lambda *_: None))
            if way is not None or not int8_similarities:
                patches.enter_context(mock.patch.object(hopper, "rings_for", lambda *_: way if isinstance(way, Rings) else None))
            if isinstance(way, Blocks):
                patches.enter_context(mock.patch.object(fused.launch, "blocks_for", lambda *_: way))
            if kernel == "stats":
                return fused.softmax_stats(x, y, scale, pairs, columns=True, compute=compute)
            if kernel == "gradient":
                softmax = Softmax(*vectors)
                needs_grad, dpos_M = NeedsGrad(True, True), vectors[0]
                return fused.softmax_grads(
                    x, y, scale, pairs, softmax, softmax, needs_grad=needs_grad, compute=compute, dpos_M=dpos_M
                )
            return fused.sigmoid_sums(x, y, scale, bias, pairs, None, needs_grad=NeedsGrad(True, True), compute=compute)

    assert int8_similarities or kind == kind_of(dtype, compute.precision)
    whole = Panel(slice(0, rows), slice(0, rows))
    with mock.patch.object(hopper, "rings_for", lambda *_: way):
        if isinstance(way, Rings) and hopper.serves(Launch(kernel, x, y, compute), whole) is None:
            raise ValueError("the blocks of the careful launch are no tiles of the kernel for Hopper")
    return work


if __name__ == "__main__":
    raise SystemExit(main())
