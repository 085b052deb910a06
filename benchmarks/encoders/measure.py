"""Measure one row: check a contestant, warm it up and time it, with its memory and its rates."""

from __future__ import annotations

import gc
import math
import statistics
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import memory
from benchmarks.encoders import check, model, schemes
from benchmarks.encoders.cases import FULL, SMALL, Case
from benchmarks.encoders.check import Truth
from benchmarks.encoders.model import Batch, Clip
from benchmarks.encoders.report import off
from benchmarks.encoders.schemes import Scheme
from benchmarks.machine import describe
from benchmarks.measure import Row
from benchmarks.peers import Unavailable

MIB = 2**20


class Bench:
    """A CLIP on a device, its optimizer, and the exact gradients and rates that rows are compared with."""

    def __init__(self, device: str, small: bool) -> None:
        torch.manual_seed(0)
        self.device, self.small = device, small
        self.sizes = SMALL if small else FULL
        self.clip = Clip(model.TINY if small else model.VIT_L_14, device)
        # With a learning rate of 0 the weights stay those that gradients were checked for; the work is the same.
        self.optimizer = torch.optim.AdamW(self.clip.parameters(), lr=0.0, fused=True)
        self.rate = matmul_rate(device)
        self.flops = {"image": flops_of(self.clip, "image"), "text": flops_of(self.clip, "text")}
        self.truth: Truth | None = None
        self.checked: dict[tuple[str, int | str | None], Row] = {}

    def row(self, case: Case) -> Row:
        """Return the row of a case: times, memory and rates, or the reason why there are none."""
        row = {**asdict(case), "model": "tiny CLIP" if self.small else "CLIP ViT-L/14", "machine": _machine(self.device)}
        self._release()
        try:
            row |= self._check(case)
            if not row["right"]:
                return {**row, "error": f"wrong gradient: {off(row['errors'])}; plain steps: {off(row['own_errors'])}"}
            return row | self._measured(case)
        except Exception as error:  # a failure of a contestant must not end the run
            return row | _failure(error, case)
        finally:
            self.clip.use("bfloat16")

    def _check(self, case: Case) -> Row:
        """Return the result of the check of a scheme's gradients, at sizes independent of the case; once per value of keep."""
        key = case.contestant, case.keep
        if key not in self.checked:
            self.truth = self.truth or self._truth(case.compiled)
            chunk = self.sizes.chunk if case.compiled else self.sizes.check_chunk
            self.checked[key] = check.check(self.clip, lambda: self._scheme(case, chunk), self.truth)
            self._release()
        return self.checked[key]

    def _truth(self, compiled: bool) -> Truth:
        """Return the exact gradients for all cases of this process; compile the towers if `compiled`."""
        if not compiled:
            return check.truth(self.clip, self.clip.batch(self.sizes.check_pairs, seed=1))
        # At the size that is timed, since another size would be compiled separately; in float32 a whole chunk does not fit.
        truth = check.truth_in_chunks(self.clip, self.clip.batch(2 * self.sizes.chunk, seed=1), self.sizes.chunk // 4)
        for tower in (self.clip.image, self.clip.text):
            # Inductor takes a minute, which is not worth it for a small model.
            tower.compile(backend="aot_eager" if self.small else "inductor", dynamic=False)
        return truth

    def _scheme(self, case: Case, chunk: int) -> Scheme:
        return schemes.SCHEMES[case.contestant](self.clip, chunk, case.keep or 0)

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
        synchronize(self.device)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = scheme.step(batch)
        self.optimizer.step()
        synchronize(self.device)
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
        """Free gradients and cached blocks and reset the peak, so that rows do not affect each other."""
        self.optimizer.zero_grad()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


class Flops(NamedTuple):
    """Floating-point operations for one row of a tower: forward, and forward with backward."""

    forward: float
    both: float


def flops_of(clip: Clip, tower: str) -> Flops:
    # Attention as plain products: fused kernels recompute in backward, which does not count as useful.
    rows = getattr(clip.batch(2), "images" if tower == "image" else "texts").to(clip.device)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        embeddings = getattr(clip, tower)(rows)
        forward = counter.get_total_flops()
        embeddings.sum().backward()
    clip.zero_grad()
    return Flops(forward / len(rows), counter.get_total_flops() / len(rows))


def matmul_rate(device: str, runs: int = 10) -> float:
    """Return the operations per second of a large product of random matrices: bf16 on CUDA, a small float32 one on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    x, y = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for count in (3, runs):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            torch.matmul(x, y)
        synchronize(device)
        seconds = time.perf_counter() - start
    return runs * 2 * size**3 / seconds


def synchronize(device: str) -> None:
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
