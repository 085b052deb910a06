"""Time and memory of whole CLIP training steps, by ways to take a large batch through: `python -m benchmarks.encoders --help`.

One run writes one file of rows, a table on the terminal and a picture beside the file. On CUDA the model is ViT-L/14, on a CPU a
tiny one that only shows that everything works. A step is zero_grad, both encoders, loss, backward and AdamW, in bf16 autocast,
with pictures and texts in host memory. A contestant whose gradients are wrong is not timed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import encoder_check, encoder_model, encoder_peers, encoder_picture, memory, report
from benchmarks.encoder_check import Truth
from benchmarks.encoder_model import Batch, Clip
from benchmarks.encoder_peers import Scheme
from benchmarks.machine import describe
from benchmarks.measure import Row
from benchmarks.peers import Unavailable

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MIB = 2**20


class Sizes(NamedTuple):
    """How many pairs each case takes, and in which chunks."""

    pairs: int
    chunk: int
    sweep_pairs: int
    sweep_chunks: tuple[int, ...]
    sweep_chunk: int
    large: int
    check_pairs: int
    check_chunk: int


FULL = Sizes(2048, 256, 512, (256, 128, 64), 64, 65_536, 32, 8)
SMALL = Sizes(16, 4, 8, (1, 2), 1, 32, 8, 2)


@dataclass(frozen=True)
class Case:
    """What to measure: `runs` steps after `warm_up` others, which have `warm_up_pairs` pairs where it is given."""

    case: str
    contestant: str
    pairs: int
    chunk: int | None
    keep: int | str | None
    device: str
    compiled: bool = False
    warm_up: int = 2
    warm_up_pairs: int | None = None
    runs: int = 3


def contestants(sizes: Sizes) -> Iterator[dict]:
    """The contestants beside each other; keep as a way to spend what memory is left."""
    for keep in (0, 1, "auto"):
        # "auto" learns in the first step and decides in the second.
        warm_up = 2 if keep == "auto" else 1
        yield {"contestant": "megabatch", "pairs": sizes.pairs, "chunk": sizes.chunk, "keep": keep, "warm_up": warm_up}
    for name in ("two-pass", "OpenCLIP accumulation", "sentence-transformers"):
        yield {"contestant": name, "pairs": sizes.pairs, "chunk": sizes.chunk, "keep": None, "warm_up": 1}


def chunks(sizes: Sizes) -> Iterator[dict]:
    """Chunk and keep at a batch that nearly fits, beside plain PyTorch at this batch and at that of one chunk."""
    sweep = [(chunk, keep) for chunk in sizes.sweep_chunks for keep in (0, "auto")]
    sweep += [(sizes.sweep_chunk, keep) for keep in (1, 2, 4)]
    for chunk, keep in sweep:
        yield {"contestant": "megabatch", "pairs": sizes.sweep_pairs, "chunk": chunk, "keep": keep}
    for pairs in (sizes.chunk, sizes.sweep_pairs):
        yield {"contestant": "uncached", "pairs": pairs, "chunk": None, "keep": None}


def large(sizes: Sizes) -> Iterator[dict]:
    """A batch whose embeddings alone may grow; one step takes minutes, so that a small one has to warm up for it."""
    once = {"warm_up": 1, "warm_up_pairs": 2 * sizes.chunk, "runs": 1}
    yield {"contestant": "megabatch", "pairs": sizes.large, "chunk": sizes.chunk, "keep": 0, **once}


def compiled(sizes: Sizes) -> Iterator[dict]:
    """Towers through torch.compile."""
    yield {"contestant": "megabatch", "pairs": sizes.pairs, "chunk": sizes.chunk, "keep": 0, "compiled": True}


CASES = {"contestants": contestants, "chunks": chunks, "large": large, "compiled": compiled}


class Bench:
    """A CLIP on a device, its optimizer, and what its rows are measured against."""

    def __init__(self, device: str, small: bool) -> None:
        torch.manual_seed(0)
        self.device, self.small = device, small
        self.sizes = SMALL if small else FULL
        self.clip = Clip(encoder_model.TINY if small else encoder_model.VIT_L_14, device)
        # Without a learning rate weights stay those that gradients were checked for; the work is the same.
        self.optimizer = torch.optim.AdamW(self.clip.parameters(), lr=0.0, fused=True)
        self.rate = matmul_rate(device)
        self.flops = {"image": _flops(self.clip, "image"), "text": _flops(self.clip, "text")}
        self.truth: Truth | None = None
        self.checked: dict[tuple[str, int | str | None], Row] = {}

    def row(self, case: Case) -> Row:
        """The row of a case: times, memory and rates, or the reason for none."""
        row = {**asdict(case), "model": "tiny CLIP" if self.small else "CLIP ViT-L/14", "machine": _machine(self.device)}
        self._release()
        try:
            row |= self._check(case)
            if not row["right"]:
                return {**row, "error": f"wrong gradient: {_off(row['errors'])}; plain steps: {_off(row['own_errors'])}"}
            return row | self._measured(case)
        except Exception as error:  # any failure of a contestant is a row, not the end of the run
            return row | _failure(error, case)
        finally:
            self.clip.use("bfloat16")

    def _check(self, case: Case) -> Row:
        """How a scheme's gradients compare, at sizes that do not depend on the case: once for each way to keep."""
        key = case.contestant, case.keep
        if key not in self.checked:
            self.truth = self.truth or self._truth(case.compiled)
            chunk = self.sizes.chunk if case.compiled else self.sizes.check_chunk
            self.checked[key] = encoder_check.check(self.clip, lambda: self._scheme(case, chunk), self.truth)
            self._release()
        return self.checked[key]

    def _truth(self, compiled: bool) -> Truth:
        """What all cases of this process have to meet; compiles the towers for those that want it."""
        if not compiled:
            return encoder_check.truth(self.clip, self.clip.batch(self.sizes.check_pairs, seed=1))
        # At the size that is timed, since another one would be compiled on its own; in float32 a whole chunk does not fit.
        truth = encoder_check.truth_in_chunks(self.clip, self.clip.batch(2 * self.sizes.chunk, seed=1), self.sizes.chunk // 4)
        for tower in (self.clip.image, self.clip.text):
            # Inductor takes a minute, which a small model gains nothing from.
            tower.compile(backend="aot_eager" if self.small else "inductor", dynamic=False)
        return truth

    def _scheme(self, case: Case, chunk: int) -> Scheme:
        return encoder_peers.SCHEMES[case.contestant](self.clip, chunk, case.keep or 0)

    def _measured(self, case: Case) -> Row:
        scheme = self._scheme(case, case.chunk or case.pairs)
        batch = self.clip.batch(case.pairs)
        first = batch if case.warm_up_pairs is None else batch.first(case.warm_up_pairs)
        for _ in range(case.warm_up):
            self._step(scheme, first)
        self.optimizer.zero_grad()
        peak = memory.peak_of(lambda: [self._step(scheme, batch) for _ in range(case.runs)], self.device)
        seconds = [step[0] for step in peak.result]
        loss = peak.result[-1][1]
        if not math.isfinite(loss):
            return {"error": f"the loss is {loss}"}
        on_cuda = self.device == "cuda"
        return {
            "seconds": statistics.median(seconds),
            "seconds_min": min(seconds),
            "seconds_max": max(seconds),
            "loss": loss,
            "peak_allocated_mib": torch.cuda.max_memory_allocated() / MIB if on_cuda else peak.extra_bytes / MIB,
            "peak_reserved_mib": torch.cuda.max_memory_reserved() / MIB if on_cuda else None,
            # Above weights and optimizer state.
            "extra_mib": peak.extra_bytes / MIB,
            "memory_method": peak.method,
            "chunk_done": scheme.chunk_done(),
            **self._rates(case, scheme, statistics.median(seconds)),
        }

    def _step(self, scheme: Scheme, batch: Batch) -> tuple[float, float]:
        _synchronize(self.device)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = scheme.step(batch)
        self.optimizer.step()
        _synchronize(self.device)
        return time.perf_counter() - start, float(loss)

    def _rates(self, case: Case, scheme: Scheme, seconds: float) -> Row:
        kept = scheme.kept()
        count = math.ceil(case.pairs / (scheme.chunk_done() or case.pairs))
        again = {tower: (1 - (kept[tower] / count if kept else 0)) * scheme.recomputes for tower in self.flops}
        useful = case.pairs * sum(flops.both for flops in self.flops.values())
        done = useful + case.pairs * sum(flops.forward * again[tower] for tower, flops in self.flops.items())
        return {
            "kept": kept,
            "useful_flops": useful,
            "hardware_flops": done,
            "matmul_flops_per_s": self.rate,
            "useful_share": useful / seconds / self.rate,
            "hardware_share": done / seconds / self.rate,
        }

    def _release(self) -> None:
        """Leaves nothing of one row to the next: no gradient, no block of the allocator, no peak."""
        self.optimizer.zero_grad()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


class Flops(NamedTuple):
    """Floating-point operations for one row of a tower: forward, and forward with backward."""

    forward: float
    both: float


def _flops(clip: Clip, tower: str) -> Flops:
    # Attention as plain products: fused kernels recompute in backward, which is no use to the step.
    rows = getattr(clip.batch(2), "images" if tower == "image" else "texts").to(clip.device)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        embeddings = getattr(clip, tower)(rows)
        forward = counter.get_total_flops()
        embeddings.sum().backward()
    clip.zero_grad()
    return Flops(forward / len(rows), counter.get_total_flops() / len(rows))


def matmul_rate(device: str, runs: int = 10) -> float:
    """Operations a second of a large product of random matrices: bf16 on CUDA, a small float32 one on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    x, y = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for count in (3, runs):
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            torch.matmul(x, y)
        _synchronize(device)
        seconds = time.perf_counter() - start
    return runs * 2 * size**3 / seconds


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _failure(error: Exception, case: Case) -> Row:
    if isinstance(error, Unavailable):
        return {"unavailable": str(error)}
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return {"error": "out of memory"}
    text = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
    return {"skipped": f"torch.compile: {text}"} if case.compiled else {"error": text}


def _machine(device: str) -> dict[str, object]:
    record = describe(device)
    for package in ("transformers", "sentence_transformers"):
        try:
            record[package] = version(package)
        except PackageNotFoundError:
            record[package] = None
    return record


def measure_group(group: list[Case], small: bool, out: Path) -> None:
    """Adds a row to the file for each case, measured in this process one after the other."""
    # On a CPU without bf16 products every first one says so.
    warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)
    start = time.perf_counter()
    bench = Bench(group[0].device, small)
    rate = f"{bench.rate / 1e12:,.0f} TFLOP/s" if bench.rate > 1e12 else f"{bench.rate / 1e9:,.0f} GFLOP/s"
    print(f"{group[0].case}: model made in {time.perf_counter() - start:.1f} s, large products run at {rate}", flush=True)
    for place, case in enumerate(group, start=1):
        print(f"[{place}/{len(group)}, {time.perf_counter() - start:.0f} s] {_what(asdict(case))}", flush=True)
        row = bench.row(case)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"    {_outcome(row)}", flush=True)


def _run_group(group: list[Case], small: bool, timeout_s: float, out: Path) -> None:
    """Measures cases in a process of their own; where it dies, the case it was at is a row with `error`, and a new one goes on."""
    while group:
        before = len(report.read_rows(out))
        work = json.dumps({"group": [asdict(case) for case in group], "small": small})
        command = [sys.executable, "-m", "benchmarks.encoders", "--measure", work, "--output", str(out.resolve())]
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=timeout_s).returncode
            why = f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
        except subprocess.TimeoutExpired:
            why = f"stopped after {timeout_s:.0f} s"
        rows = report.read_rows(out)
        group = group[len(rows) - before :]
        if group:
            rows.append({**asdict(group[0]), "error": why})
            report.write_rows(out, rows)
            print(f"    {why}", flush=True)
            group = group[1:]


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 1 when a row of ours has an error or nothing was measured."""
    parser = _parser()
    options = parser.parse_args(arguments)
    name = f"encoders-{options.device}{'-quick' if options.quick else ''}.jsonl"
    out = options.redraw or options.output or RESULTS / name
    if options.measure:
        work = json.loads(options.measure)
        measure_group([Case(**case) for case in work["group"]], work["small"], out)
        return 0
    try:
        groups = {} if options.redraw else {name: list(_cases(name, options)) for name in options.cases.split(",")}
        rows = report.read_rows(out) if options.redraw or out.exists() else []
    except ValueError as error:
        parser.error(str(error))
    if groups:
        # Rows of other cases stay: one command on a borrowed machine may be too short for all of them.
        report.write_rows(out, [row for row in rows if row["case"] not in groups])
        for group in groups.values():
            _run_group(group, _small(options), options.timeout, out)
        rows = report.read_rows(out)
        print(f"rows: {out}")
    _show(rows, out.with_suffix(".png"))
    failed = any(row["contestant"] == "megabatch" and "error" in row for row in rows)
    return int(failed or not any("seconds" in row for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoders", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--cases", default=",".join(CASES), help=f"with commas ({','.join(CASES)}); others in the file stay")
    parser.add_argument("--only", help="contestants, with commas")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one timed step: does everything work?")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a case may take with all its contestants")
    parser.add_argument("--output", type=Path, help="file of rows (results/encoders-DEVICE[-quick].jsonl), beside it the picture")
    parser.add_argument("--redraw", type=Path, metavar="FILE", help="table and picture again, from kept rows")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser


def _small(options: argparse.Namespace) -> bool:
    return options.quick or options.device == "cpu"


def _cases(name: str, options: argparse.Namespace) -> Iterator[Case]:
    """The cases of one name; contestants that cannot run here are printed with the reason."""
    if name not in CASES:
        raise ValueError(f"case is {name!r}: choose among {', '.join(CASES)}")
    only = options.only.split(",") if options.only else list(encoder_peers.SCHEMES)
    missing = {contestant: encoder_peers.unavailable(contestant) for contestant in only}
    for choice in CASES[name](SMALL if _small(options) else FULL):
        reason = missing.get(choice["contestant"], "")
        if reason:
            print(f"{name}, {choice['contestant']}: not run, {reason}", flush=True)
        elif reason is None:
            runs = {"runs": 1} if options.quick else {}
            yield Case(case=name, device=options.device, **{**choice, **runs})


def _show(rows: list[Row], path: Path) -> None:
    measured = [row for row in rows if "seconds" in row]
    if measured:
        report.show(report.ENCODER_HEADERS, report.encoder_table(measured))
    for row in rows:
        if "seconds" not in row:
            print(f"not measured: {row['case']}, {_what(row)}: {report.reason(row)}")
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed")
    elif any(row["case"] in ("contestants", "chunks") for row in measured):
        encoder_picture.draw(measured, path)
        print(f"picture: {path}")


def _what(row: Row) -> str:
    chunk = "" if row["chunk"] is None else f", chunk {row['chunk']}"
    keep = "" if row["keep"] is None else f", keep {report.keep_text(row)}"
    return f"{row['contestant']}{', compiled' if row['compiled'] else ''}, {row['pairs']:,} pairs{chunk}{keep}"


def _outcome(row: Row) -> str:
    if "seconds" not in row:
        return report.reason(row)
    kept = f", {report.keep_text(row)} kept" if row["keep"] == "auto" else ""
    cost = f"{report.three_digits(row['seconds'])} s, {report.three_digits(row['peak_allocated_mib'])} MiB{kept}"
    shares = f"{row['useful_share']:.1%} useful, {row['hardware_share']:.1%} hardware"
    factor = "none" if row["scale_factor"] is None else f"{row['scale_factor']:.3f} of the true one"
    return f"{cost}, {shares}; gradient {_off(row['errors'])}, of the scale {factor}"


def _off(errors: dict[str, float]) -> str:
    return "off by " + ", ".join(f"{error:.0e} in {precision}" for precision, error in errors.items())


if __name__ == "__main__":
    raise SystemExit(main())
