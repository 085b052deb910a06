"""Runs the cells of the study within a time limit: `python -m benchmarks.study run --minutes 7 --data build/study --out FILE`.

For every cell the rate is tuned with seed 0 on a grid of factor 2 that goes on past an edge; the mean reciprocal rank on the
validation pairs chooses it. Where pairs repeat often there can be two optima, a rate too low to memorise the pairs and a high one;
plain cells with such repeats also try rates a factor of 4 apart over the whole range. The chosen rate also runs with two further
seeds; with small batches, whose steps take the same time for more runs, all rates do. A run is one JSON line, written when it is
done, and lines that are there are not run again.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing as processes

from benchmarks.machine import describe
from benchmarks.study import data, stack
from benchmarks.study.features import TEXT_FEATURES, Features, load
from benchmarks.study.stack import SIZES, Cell, Kind, Quality, Trained, Weights

SEEDS = (0, 1, 2)
# Plain cells that see a pair more often than this try every rate of COARSE, or one beside it.
REPEATED = 8
# Rates are RATE * 2^k. The first grid of a source has 5 rates around RATE, later ones 3 around the best of the nearest cell.
RATE, FIRST_GRID, GRID, BEYOND, MOST_RATES = 2e-3, 2, 1, 2, 12
COARSE = tuple(RATE * 4.0**k for k in range(-2, 3))
BUDGETS = {"0.25M": 250_000, "1M": 1_000_000, "4M": 4_000_000, "16M": 16_000_000}
# Fewer steps than this are not a training.
FEWEST_STEPS = 12
# The sources of the fit. The others are predicted before they are run.
FITTED = ("german", "glyphs", "packages", "dictionaries", "wordnet", "code", "names")
HELD_BACK = ("japanese", "sounds", "cjk")
# Added after the rules of plans were fixed, and predicted before they are run. Nothing is ever fitted to them.
CONFIRMATION = ("functions", "fields", "synonyms", "messages")
# The run whose towers other cells start from.
PRETRAINING, PRETRAINING_RATE, PRETRAINING_SEED = Cell("code", "small", "scratch", "clip", 0.0, 1024, 4_000_000), 2e-3, 100
# The run whose towers mine the hard negatives of a source, once. The largest batch that has them: its matrices are stored.
MINING_RATE, MINING_SEED, MINING_BATCH, MINING_SAMPLES, MOST_HARD = 2e-3, 100, 1024, 1_000_000, 4096
# Plain cells with this many samples measure the noise of their gradients.
NOISE_SAMPLES = 1_000_000
PLAIN = Kind("small", "scratch", "clip", 0.0)
# Shares of warm-up beside the usual one.
WARM_UPS = (0.02, 0.3)
# Seconds of a job on an H200, before any was measured: a launch of a step, bytes and FLOPs per second, and what a job costs itself.
STEP_SECONDS, BYTES_PER_SECOND, FLOPS, JOB_SECONDS = 2.5e-4, 2.5e12, 1.5e14, 1.0
# A gradient outside a graph.
EAGER_SECONDS = 4e-3
# How float32 products of the towers are computed on CUDA: in TF32.
PRODUCTS = "high"
# Left for writing the last rows before the time limit.
MARGIN_SECONDS = 3.0


class Job(NamedTuple):
    """Runs of one cell that are trained together."""

    cell: Cell
    rates: list[float]
    seeds: list[int]


def cells(sources: Mapping[str, int], names: Sequence[str]) -> list[Cell]:
    """Return the cells of the named sources, the most informative first. sources: training pairs of each."""
    plain = [(name, PLAIN) for name in names if name not in CONFIRMATION]
    confirmation = [(name, PLAIN) for name in names if name in CONFIRMATION]
    few = [name for name in names if name in ("german", "glyphs", "packages", *HELD_BACK)]
    others = [
        PLAIN._replace(loss="siglip"),
        PLAIN._replace(size="large"),
        PLAIN._replace(smoothing=0.1),
        PLAIN._replace(start="pretrained"),
    ]
    # All kinds of one source before the next source.
    variants = [(name, kind) for name in few for kind in others]
    some = (1024, 4096, 256, 16384)
    small_budget, four_million = (256, 64, 1024, 4096, 16384), (*some, 32768)
    blocks: list[tuple[Sequence[tuple[str, Kind]], str, Sequence[int]]] = [
        (plain, "1M", (*some, 64)),
        (plain[:3], "4M", four_million),
        (plain[:4], "0.25M", small_budget),
        (plain[:1], "16M", (4096, 1024, 16384, 32768)),
        (confirmation, "1M", (*some, 64)),
        (confirmation, "0.25M", small_budget),
        (confirmation, "4M", (*four_million, 8192)),
        # Without batches below 1,024, as above: they take the most time.
        (confirmation, "16M", (16384, 32768, 4096, 65536, 1024)),
    ]
    for name in few:
        blocks += [
            ([(name, kind) for kind in others], "1M", some),
            ([(name, PLAIN._replace(negatives=1))], "1M", (1024, 256, 4096, 64)),
        ]
        if name in few[:2]:
            blocks.append(([(name, PLAIN._replace(warm_up=share)) for share in WARM_UPS], "1M", some))
        if name == few[0]:
            blocks += [(plain[4:], "0.25M", small_budget), (plain[3:4], "4M", four_million)]
    blocks += [
        (plain[1:2], "16M", (4096, 1024, 16384)),
        (plain[4:], "4M", four_million),
        (plain, "16M", (4096, 1024, 16384, 32768, 256)),
        (plain, "1M", (32768, 512, 2048, 8192)),
        (plain, "4M", (64, 512, 2048, 8192)),
        (variants, "4M", some),
        (plain, "16M", (64,)),
    ]
    found = [
        cell_for(source, kind, batch, BUDGETS[budget])
        for kinds, budget, batches in blocks
        for (source, kind), batch in itertools.product(kinds, batches)
    ]
    return [c for c in dict.fromkeys(found) if _possible(c, sources)]


def training_pairs(records: Mapping[str, Any], folder: Path) -> dict[str, int]:
    """Return the training pairs of each source whose file is in a folder."""
    return {name: record["train"] for name, record in records.items() if (folder / f"{name}.npz.xz").exists()}


def cell_for(source: str, kind: Kind, batch: int, samples: int) -> Cell:
    """Return the cell of a kind of training."""
    return Cell(source=source, batch=batch, samples=samples, **kind._asdict())


def _possible(cell: Cell, sources: Mapping[str, int]) -> bool:
    fits = cell.source in sources and cell.batch <= sources[cell.source] and cell.steps >= FEWEST_STEPS
    fits = fits and not (cell.negatives and cell.batch > MOST_HARD)
    fits = fits and (cell.source not in CONFIRMATION or cell.samples <= REPEATED * sources[cell.source])
    return fits and (cell.start == "scratch" or (PRETRAINING.source in sources and cell.source != PRETRAINING.source))


def cell_of(row: Mapping[str, Any]) -> Cell:
    """Return the cell that a row belongs to."""
    return Cell(**{field: row[field] for field in Cell._fields if field in row})


def best_rate(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the rate with the best validation rank with the first seed, from the rows of one cell."""
    tuned = [(row["validation_mrr"], -row["rate"]) for row in rows if row["seed"] == SEEDS[0]]
    return -max(tuned)[1] if tuned else None


def next_job(cell: Cell, rows: Mapping[Cell, Sequence[Mapping[str, Any]]]) -> Job | None:
    """Return what a cell needs next, given the rows of all cells; None: nothing."""
    own = rows.get(cell, ())
    best = best_rate(own)
    if best is None:
        guess, around = guess_rate(cell, rows)
        return _grid(cell, [guess * 2.0**k for k in range(-around, around + 1)])
    tried = sorted({row["rate"] for row in own if row["seed"] == SEEDS[0]})
    factor = {tried[0]: 0.5, tried[-1]: 2.0}.get(best)
    if factor is not None and len(tried) < MOST_RATES:
        return _grid(cell, [best * factor ** (k + 1) for k in range(BEYOND)])
    if cell.kind == PLAIN and cell.samples > REPEATED * own[0]["pairs"]:
        beside = [best * f for f in (0.5, 2.0) if not any(_near(best * f, other, 1.0) for other in tried)]
        more = uncovered(tried) or (beside if factor is None else [])
        if more:
            return _grid(cell, more)
    missing = [seed for seed in SEEDS if not any(row["rate"] == best and row["seed"] == seed for row in own)]
    return Job(cell, [best] * len(missing), missing) if missing else None


def uncovered(tried: Sequence[float]) -> list[float]:
    """Return the rates of COARSE that are more than a factor of 2 from all that were tried."""
    return [rate for rate in COARSE if not any(_near(rate, other, 2.0) for other in tried)]


def _near(rate: float, other: float, factor: float) -> bool:
    """Return whether two rates differ by at most a factor, but for rounding."""
    return abs(math.log2(rate / other)) <= math.log2(factor) + 1e-6


def _grid(cell: Cell, rates: Sequence[float]) -> Job:
    """Return a job with all rates: with all seeds where a step's time hardly depends on the number of runs, else with the first."""
    runs = list(itertools.product(rates, SEEDS if cell.batch <= stack.STACKED else SEEDS[:1]))
    return Job(cell, [rate for rate, _ in runs], [seed for _, seed in runs])


def guess_rate(cell: Cell, rows: Mapping[Cell, Sequence[Mapping[str, Any]]]) -> tuple[float, int]:
    """Return the best rate of the nearest cell that has one, and how many rates to try on either side of it."""

    def distance(other: Cell) -> float:
        changed = sum(a != b for a, b in zip(cell.kind, other.kind, strict=True)) + 2 * (cell.source != other.source)
        return 4 * changed + abs(math.log2(cell.batch / other.batch)) + 0.5 * abs(math.log2(cell.samples / other.samples))

    near = sorted((distance(other), best) for other, own in rows.items() if (best := best_rate(own)) is not None)
    if not near:
        return RATE, FIRST_GRID
    return near[0][1], GRID if near[0][0] < 8 else FIRST_GRID


def estimate(job: Job, x_inputs: int, y_inputs: int) -> float:
    """Return the seconds of a job on an H200, roughly. x_inputs, y_inputs: features of both sides.

    What a process prepares once, pretrained towers and hard negatives, is not included.
    """
    cell, runs, size = job.cell, len(job.rates), SIZES[job.cell.size]
    towers = [n * size.hidden + size.blocks * size.hidden**2 + size.hidden * size.width for n in (x_inputs, y_inputs)]
    step = STEP_SECONDS + runs * 28 * sum(towers) / BYTES_PER_SECOND
    # Features are read as bytes, written as floats and read by two products. A hard negative is one more row of y.
    rows = 1, 1 + cell.negatives
    sample = sum(
        n * (14 * inputs / BYTES_PER_SECOND + 4 * weights / FLOPS)
        for n, inputs, weights in zip(rows, (x_inputs, y_inputs), towers, strict=True)
    )
    pairs = 8 * size.width * cell.batch * rows[1] / FLOPS
    noise = 0.0
    if measures_noise(cell):
        gradients = len(stack.NOISE_SHARES) * stack.noise_batches(cell)
        noise = gradients * (EAGER_SECONDS + runs * cell.batch * (sample + pairs))
    return JOB_SECONDS + cell.steps * step + runs * cell.samples * (sample + pairs) + noise


def measures_noise(cell: Cell) -> bool:
    """Return whether the runs of a cell measure the noise of their gradients."""
    return cell.kind == PLAIN and cell.samples == NOISE_SAMPLES


def rows_of(job: Job, trained: Trained) -> Iterator[dict[str, Any]]:
    """Yield the row of every run of a job."""
    for number, (rate, seed) in enumerate(zip(job.rates, job.seeds, strict=True)):
        test = trained.test[number]
        yield {
            **job.cell._asdict(),
            "rate": rate,
            "seed": seed,
            "steps": job.cell.steps,
            "schedule": "linear warm-up, cosine to 0",
            "optimizer": {"name": "adamw", "betas": stack.BETAS, "eps": stack.EPSILON, "weight_decay": stack.WEIGHT_DECAY},
            **_summary("validation", trained.validation[number]),
            **_summary("test", test),
            "x_to_y_1": float((test.ranks[0] < 1).double().mean()),
            "y_to_x_1": float((test.ranks[1] < 1).double().mean()),
            "hits": pack(test.ranks < 1),
            "queries": test.ranks.shape[1],
            "scale": trained.scale[number],
            "stack_runs": len(job.rates),
            "stack_seconds": trained.seconds,
            "not_captured": trained.not_captured,
            **({"noise_scale": [point.row() for point in trained.noise[number]]} if trained.noise[number] else {}),
        }


def _summary(part: str, quality: Quality) -> dict[str, float]:
    return {f"{part}_1": quality.recall(1), f"{part}_10": quality.recall(10), f"{part}_mrr": quality.reciprocal_rank()}


def pack(hits: torch.Tensor) -> str:
    """Return flags (2, queries) as text: eight to a byte, in base64."""
    return base64.b64encode(np.packbits(hits.numpy().reshape(-1)).tobytes()).decode()


def unpack(text: str, queries: int) -> np.ndarray:
    """Return the flags (2, queries) that `pack` packed."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8))[: 2 * queries].reshape(2, queries).astype(bool)


class Trainer:
    """Trains jobs on a device; keeps the sources, the pretrained towers and the hard negatives that it has prepared."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._features: dict[str, Features] = {}
        self._starts: dict[str, Weights] = {}
        self._negatives: dict[str, torch.Tensor] = {}

    def features(self, source: str) -> Features:
        if source not in self._features:
            self._features[source] = load(data.read(self._folder / f"{source}.npz.xz"), self._device)
        return self._features[source]

    def train(self, job: Job) -> Trained:
        start = None if job.cell.start == "scratch" else self._pretrained(job.cell.size)
        negatives = self._mined(job.cell.source) if job.cell.negatives else None
        features = self.features(job.cell.source)
        return stack.train(job.cell, job.rates, job.seeds, features, start, negatives, measures_noise(job.cell))

    def _mined(self, source: str) -> torch.Tensor:
        """Return the hard negative of each training pair: the nearest wrong y, by the towers of a plain run with a fixed rate."""
        if source not in self._negatives:
            features = self.features(source)
            cell = cell_for(source, PLAIN, min(MINING_BATCH, features.train), MINING_SAMPLES)
            weights = stack.train(cell, [MINING_RATE], [MINING_SEED], features).weights
            self._negatives[source] = stack.mine(weights, features)
        return self._negatives[source]

    def _pretrained(self, size: str) -> Weights:
        if size not in self._starts:
            cell = PRETRAINING._replace(size=size)
            features = self.features(cell.source)
            self._starts[size] = stack.train(cell, [PRETRAINING_RATE], [PRETRAINING_SEED], features).weights
        return self._starts[size]


def work(connection: Connection, folder: Path, device: str) -> None:
    """Train the jobs that come through a connection until it is closed. Runs in a process of its own."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(PRODUCTS)
    trainer = Trainer(folder, torch.device(device))
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        try:
            connection.send(list(rows_of(job, trainer.train(job))))
        except Exception as error:
            connection.send([{**job.cell._asdict(), "rates": job.rates, "seeds": job.seeds, "error": repr(error)[:500]}])
            if "CUDA error" in repr(error):
                # The context is lost; the parent starts another process.
                return
        if device == "cuda":
            torch.cuda.empty_cache()


class Worker:
    """A process that trains, its connection, and the job it is at with the time it began."""

    def __init__(self, folder: Path, device: str) -> None:
        context = processes.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, folder, device), daemon=True)
        self.process.start()
        other.close()
        self.job: Job | None = None
        self.began, self.jobs = 0.0, 0

    def begin(self, job: Job) -> None:
        self.job, self.began, self.jobs = job, time.perf_counter(), self.jobs + 1
        self.connection.send(job)


class Ledger:
    """The rows of a results file: read at the start, appended one by one."""

    def __init__(self, file: Path) -> None:
        self.rows: dict[Cell, list[dict[str, Any]]] = {}
        self.failed: set[Cell] = set()
        if file.exists():
            for line in file.read_text().splitlines():
                # A killed process leaves half a line.
                try:
                    self._take(json.loads(line))
                except json.JSONDecodeError:
                    continue
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("a")
        if file.stat().st_size:
            self._file.write("\n" if not file.read_bytes().endswith(b"\n") else "")

    def add(self, row: dict[str, Any]) -> None:
        print(json.dumps(row), file=self._file, flush=True)
        self._take(row)

    def close(self) -> None:
        self._file.close()

    def _take(self, row: dict[str, Any]) -> None:
        if "error" in row:
            self.failed.add(cell_of(row))
        else:
            self.rows.setdefault(cell_of(row), []).append(row)


def run(
    folder: Path, out: Path, minutes: float, device: str, count: int, work_list: Sequence[Cell], records: Mapping[str, Any]
) -> None:
    """Train the cells in their order with several processes until the time is over; append the rows to a file."""
    began = time.perf_counter()
    ledger, machine = Ledger(out), describe(device) | {"float32_products": PRODUCTS}
    workers = [Worker(folder, device) for _ in range(count)]
    # Seconds measured over seconds estimated, of the jobs so far.
    ratios: list[float] = []
    while True:
        left = minutes * 60 - MARGIN_SECONDS - (time.perf_counter() - began)
        for number, worker in enumerate(workers):
            if worker.job is None and left > 0:
                if not worker.process.is_alive():
                    workers[number] = worker = Worker(folder, device)
                busy = {w.job.cell for w in workers if w.job is not None}
                job = _pick(work_list, ledger, busy, left, median(ratios[-20:]) if ratios else 1.0, records)
                if job is not None:
                    worker.begin(job)
        active = [w for w in workers if w.job is not None]
        if not active or left <= 0:
            break
        for connection in wait([w.connection for w in active], timeout=max(0.1, left)):
            worker = next(w for w in active if w.connection is connection)
            assert worker.job is not None
            seconds = time.perf_counter() - worker.began
            try:
                rows = worker.connection.recv()
            except (EOFError, OSError):
                worker.process.join()
                rows = [{**worker.job.cell._asdict(), "error": f"the process ended with code {worker.process.exitcode}"}]
            for row in rows:
                digest = records[worker.job.cell.source]["sha256"]
                ledger.add({**row, "source_sha256": digest, "pairs": records[worker.job.cell.source]["train"], **machine})
            # The first job of a process has its imports and compilations in it.
            if worker.jobs > 1:
                ratios.append(seconds / _estimate(worker.job, records))
            if "CUDA error" in rows[0].get("error", ""):
                worker.process.join()
            shown = {key: rows[0][key] for key in ("test_1", "rate", "not_captured", "error") if rows[0].get(key) is not None}
            print(
                f"[{time.perf_counter() - began:.0f} s] {seconds:.1f} s {tuple(worker.job.cell)} {len(rows)} runs {shown}",
                flush=True,
            )
            worker.job = None
    for worker in workers:
        worker.process.terminate()
        worker.process.join()
        worker.connection.close()
    ledger.close()
    done = sum(next_job(cell, ledger.rows) is None for cell in work_list)
    print(
        f"{sum(map(len, ledger.rows.values()))} runs, {done} of {len(work_list)} cells finished, {len(ledger.failed)} failed",
        flush=True,
    )


def _pick(
    work_list: Sequence[Cell], ledger: Ledger, busy: set[Cell], left: float, ratio: float, records: Mapping[str, Any]
) -> Job | None:
    for cell in work_list:
        if cell in busy or cell in ledger.failed:
            continue
        job = next_job(cell, ledger.rows)
        if job is not None and ratio * _estimate(job, records) < left:
            return job
    return None


def _estimate(job: Job, records: Mapping[str, Any]) -> float:
    pixels = records[job.cell.source]["pixels"]
    return estimate(job, pixels**2 if pixels else TEXT_FEATURES, TEXT_FEATURES)
