"""`megabatch profile`: time and memory of a run's step at several batches or chunks, next to what was predicted."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from ... import config, packages, trust
from ...environment import device_name
from ...measurements import Measured, write
from ...planning.search import chunk_sizes
from ...reporting.html import write_report
from ...training import distributed
from ...training.distributed import Ranks
from ...training.run_folder import claimed_by_ranks
from ..predictions import Predict, predictions
from .curve import Size, judge, point
from .quantities import Timed
from .report import profile_report
from .steps import ProfileBench

# Batches to measure if none are given, as multiples of the run's batch.
MULTIPLES = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
# The smallest chunk to measure if none are given is 1/MOST_CHUNKS of the shard.
MOST_CHUNKS = 32


def profile(
    run: config.Run,
    *,
    batches: Sequence[int] | None = None,
    chunks: Sequence[int] | None = None,
    steps: int = 5,
    critical: float | None = None,
    out: Path,
    trust_code: bool = False,
) -> Measured:
    """Measure samples per second, seconds per step and peak memory at several sizes.

    batches: batch sizes, at the run's chunk. chunks: chunk sizes, at the run's batch; an empty list means a default selection.
        Without either: batches from an eighth to four times the run's.
    steps: timed steps at each size, after two warm-up steps. critical: the critical batch, if it is known.
    out: the folder for measured.json, profile.png and report.html.
    trust_code: whether code that the run names (`trust.callables`) may be imported and called.
    """
    config.require_filled(run)
    trust.require_trust(run, trust_code)
    _check(batches, chunks, steps, critical)
    packages.require(packages.HTML)
    against: Literal["batch", "chunk"] = "batch" if chunks is None else "chunk"
    with distributed.ranks(run.compute) as ranks, claimed_by_ranks(out, "profile", ranks.first):
        run = config.with_ranks(run, ranks.size)
        bench = ProfileBench(run, ranks, Path(out))
        sizes = sizes_of(run.batch, bench.length, ranks.size, batches, chunks)
        reading = bench.reading_per_s()
        timed = time_sizes(sizes, lambda size: bench.measure(size, steps))
        points, notes = _with_predictions(timed, run, ranks, bench)
        found = judge(points, against, critical, reading, notes, workers=run.data.workers)
        today = datetime.date.today().isoformat()
        measured = Measured(found, config.as_table(run), device_name(ranks.device), str(torch.__version__), today)
        if ranks.first:
            write(measured, Path(out) / "measured.json")
            write_report(profile_report(measured), Path(out))
    return measured


def sizes_of(
    batch: config.Batch, samples: int, ranks: int, batches: Sequence[int] | None, chunks: Sequence[int] | None
) -> list[Size]:
    """Return the sizes to measure, the smallest first."""
    if chunks is not None:
        shard = -(-batch.size // ranks)
        chosen = chunks or [size for size in chunk_sizes(shard) if size * MOST_CHUNKS >= shard]
        return [Size(batch.size, chunk) for chunk in sorted({min(chunk, shard) for chunk in chosen})]
    default = (max(1, round(times * batch.size / ranks)) * ranks for times in MULTIPLES)
    chosen = batches or [size for size in default if size <= max(samples, batch.size)]
    return [Size(size, min(batch.chunk, -(-size // ranks))) for size in sorted(set(chosen))]


def time_sizes(sizes: Iterable[Size], measure: Callable[[Size], Timed | None]) -> list[tuple[Size, Timed | None]]:
    """Measure the sizes in order, up to the first that runs out of memory (None)."""
    timed: list[tuple[Size, Timed | None]] = []
    for size in sizes:
        timed.append((size, measure(size)))
        if timed[-1][1] is None:
            break
    (batch, chunk), first = timed[0]
    if first is None:
        raise ValueError(f"batch {batch:,} in chunks of {chunk:,}, the smallest size, ran out of memory; start with smaller sizes")
    return timed


def _with_predictions(
    timed: Sequence[tuple[Size, Timed | None]], run: config.Run, ranks: Ranks, bench: ProfileBench
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the rows of the curve, and a note with the reason if nothing could be predicted."""
    predict, notes = _predict(run, ranks, bench)
    points = []
    for size, steps in timed:
        predicted = None if predict is None or steps is None else predict(size.batch, size.chunk, steps.keep)
        points.append(point(size, steps, ranks.size, predicted))
    return points, notes


def _predict(run: config.Run, ranks: Ranks, bench: ProfileBench) -> tuple[Predict | None, list[str]]:
    try:
        return predictions(run, ranks, bench.length, len(bench.parts.classes)), []
    except ValueError as error:
        return None, [f"No predictions: {error}"]


def _check(batches: Sequence[int] | None, chunks: Sequence[int] | None, steps: int, critical: float | None) -> None:
    if batches is not None and chunks is not None:
        raise ValueError("batches and chunks are both given: a profile varies one of them; omit the other")
    for name, sizes in (("batches", batches), ("chunks", chunks)):
        wrong = [size for size in sizes or () if size < 1]
        if wrong:
            raise ValueError(f"{name} has {wrong[0]}: every size must be at least 1")
    if steps < 1:
        raise ValueError(f"steps is {steps}: must be at least 1; 5 are enough to show a spread")
    if critical is not None and critical <= 0:
        raise ValueError(f"critical is {critical}: must be a batch size above 0")
