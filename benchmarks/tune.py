"""Tune the block sizes of the fused kernels on this device and write them into the package: `python -m benchmarks.tune`.

For the Hopper kernels it tunes the pipelines, and the size from which on they are faster than the portable kernels.

All candidates are compiled in parallel first, then timed. Correctness is left to the tests. Entries of other devices stay in the
file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import datetime, timezone
from itertools import pairwise, product
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from megabatch.tiles import fused
from megabatch.tiles.contract import ComputeOptions, NeedsGrad, Pairs, Softmax
from megabatch.tiles.fused import architectures, gradient_panels, launch, tuned_configs
from megabatch.tiles.fused.launch import Launch, Panel
from megabatch.tiles.fused.tuned_configs import Blocks, Pipeline, kind_of

# m, n, k, warps, stages, programs per multiprocessor, group, pieces. Candidates that do not fit the device fail to start and are
# left out.
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
Case = tuple[str, str, int, Blocks | Pipeline | None]
KERNELS = ("stats", "gradient", "sigmoid")
# group, x_slots, y_slots, lag, out_slots: what fits into shared memory.
PIPELINES = {
    "stats": [(8, 3, 7, 5, 0), (8, 3, 7, 4, 0), (16, 3, 7, 5, 0), (8, 2, 8, 5, 0)],
    "gradient": [
        *((16, 3, 6, 4, 2), (8, 3, 6, 4, 2), (16, 3, 6, 3, 2), (16, 3, 6, 2, 2), (8, 3, 6, 2, 2)),
        *((16, 3, 7, 5, 1), (16, 3, 7, 4, 1), (16, 2, 8, 5, 2)),
    ],
}
PIPELINE_KINDS = {"stats": ("bfloat16", "float16"), "gradient": ("bfloat16", "int8")}
PIPELINE_WIDTHS = (64, 256, 512, 768, 1024)
# Rows of square panels, from large to small. The Hopper kernels are used down to the smallest size at which they are still faster.
PIPELINE_ROWS = (16_384, 11_584, 8192, 5792, 4096, 2896, 2048, 1024)
# Candidates are timed in turns of so many seconds; during the first half of each the device settles its clock.
TURNS, TURN_S = 3, 0.15
# So many launches are captured in one graph, because the host would take longer to launch small kernels.
CAPTURED = 10


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32_768)
    parser.add_argument("--widths", default="512,768,1024")
    parser.add_argument(
        "--kinds", default=",".join(CANDIDATES), help="Kinds of products to tune: bfloat16, float16, tf32, ieee; or none."
    )
    parser.add_argument("--pipelines", action=argparse.BooleanOptionalAction, default=True, help="Tune the Hopper kernels too.")
    parser.add_argument("--processes", type=int, default=12, help="Number of processes that compile at the same time.")
    parser.add_argument("--dry-run", action="store_true", help="Print the results and do not write the file.")
    options = parser.parse_args(arguments)
    kinds = [] if options.kinds == "none" else options.kinds.split(",")
    unknown = [kind for kind in kinds if kind not in CANDIDATES]
    if unknown:
        parser.error(f"--kinds {', '.join(unknown)}: choose among {', '.join(CANDIDATES)}")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device to tune block sizes on")
    cases: list[Case] = [
        (kernel, kind, int(width), blocks)
        for kind in kinds
        for width in options.widths.split(",")
        for kernel in KERNELS
        for blocks in CANDIDATES[kind]
    ]
    pipeline_cases: list[Case] = []
    if options.pipelines and architectures.architecture_of(torch.device("cuda", 0)).load_kernels() is not None:
        pipeline_cases = [
            (kernel, kind, width, Pipeline(*pipeline, min_tile_pairs=0))
            for kernel in PIPELINES
            for kind in PIPELINE_KINDS[kernel]
            for width in PIPELINE_WIDTHS
            for pipeline in PIPELINES[kernel]
        ]
    portable = {(*case[:3], None) for case in pipeline_cases}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        pool.starmap(_compile, [*cases, *pipeline_cases, *portable], chunksize=1)
    blocks, pipelines = _best(cases, options.rows), _with_min_tile_pairs(_best(pipeline_cases, options.rows))
    best = {"blocks": list(blocks), "pipelines": list(pipelines)}
    if not options.dry_run:
        _write(best)
    return 0


def _with_min_tile_pairs(entries: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Add to the best pipeline of each kernel the size from which on it is faster than the best blocks; int8 is compared with the
    fastest bf16 kernel."""
    from megabatch.tiles.fused.hopper.pipeline import count_tile_pairs

    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    for entry in entries:
        case = kernel, kind, width = entry["kernel"], entry["kind"], entry["width"]
        pipeline = Pipeline(*(entry[name] for name in Pipeline._fields))
        min_tile_pairs = None
        for rows in PIPELINE_ROWS:
            hopper_s, portable_s = _timed([_work(*case, config, rows) for config in (pipeline, None)])
            pairs = count_tile_pairs(Panel(slice(0, rows), slice(0, rows))) / multiprocessors
            share = f"{hopper_s / portable_s:.3f} of the time of {'bfloat16' if kind == 'int8' else 'blocks'}"
            print(f"{kernel:9}{kind:9}{width:6}  {rows:,} rows, {pairs:.1f} pairs of tiles per multiprocessor: {share}", flush=True)
            if hopper_s > portable_s:
                break
            min_tile_pairs = round(pairs, 1)
        yield {**entry, "min_tile_pairs": min_tile_pairs}


def _best(cases: list[Case], rows: int) -> Iterator[dict[str, Any]]:
    """Yield the fastest candidate for each kernel, kind and width; print all."""
    name, capability = tuned_configs.device_kind(torch.device("cuda", 0))
    for kernel, kind, width in dict.fromkeys(case[:3] for case in cases):
        works = {}
        for blocks in (case[3] for case in cases if case[:3] == (kernel, kind, width)):
            try:
                work = _work(kernel, kind, width, blocks, rows if kind != "ieee" else rows // 4)
                work()
                works[blocks] = work
            except Exception as error:  # too much shared memory or too many registers: not a candidate on this device
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


def _write(best: dict[str, list[dict[str, Any]]]) -> None:
    """Replace the entries of the same kernel, kind, width and device."""
    stamp = {"date": datetime.now(timezone.utc).date().isoformat(), "torch": torch.__version__, "triton": triton.__version__}
    stored = json.loads(tuned_configs.TUNED.read_text())
    parts = []
    for what, entries in best.items():
        replaced = {_place(entry) for entry in entries}
        others = [entry for entry in stored[what] if _place(entry) not in replaced]
        lines = ",\n".join(json.dumps(entry) for entry in [*others, *({**entry, **stamp} for entry in entries)])
        parts.append(f'"{what}": [\n{lines}\n]')
    tuned_configs.TUNED.write_text(f"{{{', '.join(parts)}}}\n")


def _place(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["kernel"], entry["kind"], entry["width"], entry["device"]


def _compile(kernel: str, kind: str, width: int, config: Blocks | Pipeline | None) -> None:
    try:
        _work(kernel, kind, width, config, 1024)()
    except Exception:  # reported when it is timed
        return


def _timed(works: list[Callable[[], Any]]) -> list[float]:
    """Return the median seconds of each launch under sustained load."""
    graphs = [_captured(work) for work in works]
    turns: list[list[float]] = [[] for _ in works]
    for _, (graph, seconds) in product(range(TURNS), zip(graphs, turns, strict=True)):
        start = time.perf_counter()
        marks = []
        while time.perf_counter() - start < TURN_S:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
            graph.replay()
            # Keep one replay queued while another runs.
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


def _work(kernel: str, kind: str, width: int, config: Blocks | Pipeline | None, rows: int) -> Callable[[], Any]:
    """Return a function that launches a kernel alone: without the GEMMs that follow it, with the merging of its partial sums.

    config: a Pipeline for the Hopper kernel, Blocks for the portable one, or None for the portable one with its tuned blocks. The
    kind int8 is an option for bf16; with None it is bf16 with the fastest kernels known.
    """
    torch.manual_seed(0)
    is_int8 = kind == "int8"
    dtype = torch.bfloat16 if is_int8 else getattr(torch, kind, torch.float32)
    x, y = (torch.nn.functional.normalize(torch.randn(rows, width, device="cuda"), dim=1).to(dtype) for _ in range(2))
    scale, bias = torch.tensor(20.0, device="cuda"), torch.tensor(-10.0, device="cuda")
    pairs, needs_grad = Pairs(is_local=True), NeedsGrad(True, True)
    precision = kind if kind in ("tf32", "ieee") else "ieee"
    compute = ComputeOptions(2**33, precision, int8_similarities=is_int8 and config is not None)
    vectors: list[Tensor] = [torch.full((rows,), value, device="cuda") for value in (12.0, 1e-4)]

    def work() -> Any:
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(gradient_panels.GradientProducts, "add", lambda *_: None))
            if config is not None or not is_int8:
                patches.enter_context(_pipelines(config if isinstance(config, Pipeline) else None))
            if isinstance(config, Blocks):
                patches.enter_context(mock.patch.object(launch, "blocks_for", lambda *_: config))
            if kernel == "stats":
                return fused.softmax_stats(x, y, scale, pairs, columns=True, compute=compute)
            if kernel == "gradient":
                softmax = Softmax(*vectors)
                return fused.softmax_grads(
                    x, y, scale, pairs, softmax, softmax, needs_grad=needs_grad, compute=compute, dpos_M=vectors[0]
                )
            return fused.sigmoid_sums(x, y, scale, bias, pairs, None, needs_grad=needs_grad, compute=compute)

    assert is_int8 or kind == kind_of(dtype, precision)
    if isinstance(config, Pipeline):
        from megabatch.tiles.fused.hopper.pipeline import select_pipeline

        whole, architecture = Panel(slice(0, rows), slice(0, rows)), architectures.architecture_of(x.device)
        with _pipelines(config):
            if select_pipeline(Launch(architecture, kernel, x, y, compute), whole) is None:
                raise ValueError("the tiles of the safe launch are not those of the Hopper kernel")
    return work


def _pipelines(config: Pipeline | None) -> AbstractContextManager[Any]:
    """Make all Hopper kernels use one pipeline, or with None the portable kernels instead."""
    if architectures.architecture_of(torch.device("cuda", 0)).load_kernels() is None:
        return nullcontext()
    return mock.patch("megabatch.tiles.fused.hopper.pipeline.pipeline_for", lambda *_: config)


if __name__ == "__main__":
    raise SystemExit(main())
