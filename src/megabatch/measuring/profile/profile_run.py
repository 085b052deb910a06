"""`megabatch profile`: time and memory of a step against the batch or the chunk, beside what was predicted."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from ... import config, packages, trust
from ...environment import device_name
from ...files import write_text
from ...measurements import Measured, Profile, write
from ...planning.search import chunk_sizes
from ...training.distributed import Ranks, ranks
from ...training.run_folder import claimed_by_ranks
from ..predictions import Predict, StepPrediction, predictions
from . import curve as knee
from .page import page
from .picture import picture
from .steps import ProfileBench, Timed, median_and_spread

# Sizes that are tried where none are named, as multiples of the run's batch.
MULTIPLES = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
# Chunks are tried down to this part of the batch.
FEWEST = 32

Point = Mapping[str, Any]


class Size(NamedTuple):
    batch: int
    chunk: int


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
    """Samples a second, seconds a step and peak memory at several sizes.

    batches: sizes of the batch, the chunk being the run's; chunks: of the chunk, the batch being the run's, and an empty list tries
        the usual ones. Without either: batches from an eighth to four times the run's.
    steps: timed at each size, after two that warm up. critical: the critical batch, where it is known.
    out: the folder of measured.json, profile.png and report.html.
    trust_code: whether code that the run names (`trust.callables`) may be imported and called.
    """
    trust.require_trust(run, trust_code)
    _check(batches, chunks, steps, critical)
    packages.require(packages.FIGURES)
    against: Literal["batch", "chunk"] = "batch" if chunks is None else "chunk"
    with ranks(run.compute) as here, claimed_by_ranks(out, "profile", here.first):
        bench = ProfileBench(run, here, Path(out))
        sizes = sizes_of(run.batch, bench.length, here.size, batches, chunks)
        reading = bench.reading_per_s()
        timed = curve(sizes, lambda size: bench.measure(size.batch, size.chunk, steps))
        points, notes = _with_predictions(timed, run, here, bench)
        found = judge(points, against, critical, reading, notes, workers=run.data.workers)
        today = datetime.date.today().isoformat()
        measured = Measured(found, config.as_table(run), device_name(here.device), str(torch.__version__), today)
        if here.first:
            write(measured, Path(out) / "measured.json")
            picture(measured, Path(out) / "profile.png")
            write_text(Path(out) / "report.html", page(measured))
    return measured


def sizes_of(
    batch: config.Batch, samples: int, ranks: int, batches: Sequence[int] | None, chunks: Sequence[int] | None
) -> list[Size]:
    """The sizes to measure, smallest first."""
    if chunks is not None:
        shard = -(-batch.size // ranks)
        tried = chunks or [size for size in chunk_sizes(shard) if size * FEWEST >= shard]
        return [Size(batch.size, chunk) for chunk in sorted({min(chunk, shard) for chunk in tried})]
    usual = (max(1, round(times * batch.size / ranks)) * ranks for times in MULTIPLES)
    tried = batches or [size for size in usual if size <= max(samples, batch.size)]
    return [Size(size, min(batch.chunk, -(-size // ranks))) for size in sorted(set(tried))]


def curve(sizes: Iterable[Size], measure: Callable[[Size], Timed | None]) -> list[tuple[Size, Timed | None]]:
    """What was measured at each size, up to the first at which memory ran out."""
    found: list[tuple[Size, Timed | None]] = []
    for size in sizes:
        found.append((size, measure(size)))
        if found[-1][1] is None:
            break
    (batch, chunk), first = found[0]
    if first is None:
        raise ValueError(f"batch is {batch:,}, in chunks of {chunk:,}: even that ran out of memory; start with smaller sizes")
    return found


def point(size: Size, timed: Timed | None, ranks: int, predicted: StepPrediction | None) -> Point:
    """A row of the curve."""
    row: dict[str, Any] = {"batch": size.batch, "chunk": size.chunk, "ranks": ranks}
    if timed is None:
        return {**row, "out_of_memory": True}
    seconds, spread = median_and_spread(timed.seconds)
    row |= {"keep": timed.keep, "seconds": seconds, "spread": spread, "pairs_per_s": size.batch / seconds}
    row |= {"peak_bytes": timed.peak_bytes, "reserved_bytes": timed.reserved_bytes}
    if predicted is not None:
        row |= {"predicted_seconds": predicted.seconds, "predicted_bytes": predicted.peak_bytes}
        row |= {"predicted_reserved": None if timed.reserved_bytes is None else predicted.reserved_bytes}
    return {name: value for name, value in row.items() if value is not None}


def judge(
    points: Sequence[Point],
    against: Literal["batch", "chunk"],
    critical: float | None,
    reading: float | None,
    notes: Sequence[str] = (),
    *,
    workers: int = 0,
) -> Profile:
    """What a curve says: the best size, the smallest that is as good, its knee, the batch that is done soonest."""
    ran = [row for row in points if "seconds" in row]
    rates = [(row[against], row["pairs_per_s"]) for row in ran]
    soonest = None
    if critical is not None and against == "batch":
        soonest = knee.soonest([(row["batch"], row["seconds"]) for row in ran], critical)
    if reading is not None:
        notes = (*notes, *_reading_notes(reading, max(rate for _, rate in rates), workers))
    return Profile(
        points=tuple(points),
        best=knee.best(rates),
        enough=knee.enough(rates),
        knee=knee.knee(rates),
        against=against,
        soonest=soonest,
        critical=critical,
        reading_per_s=reading,
        notes=tuple(notes),
    )


def _reading_notes(reading: float, rate: float, workers: int) -> Iterable[str]:
    if reading < rate:
        remedy = f"more than {workers} workers" if workers else "workers that read ahead"
        yield (
            f"reading is the bottleneck: {reading:,.0f} samples/s are read and {rate:,.0f} could be trained on;"
            f" give it {remedy} (data.workers), smaller files, or a faster disk"
        )
    elif not workers:
        both = 1 / (1 / reading + 1 / rate)
        yield f"without workers a step waits for its batch: {both:,.0f} samples/s with reading (data.workers=1 reads ahead)"


def _with_predictions(
    timed: Sequence[tuple[Size, Timed | None]], run: config.Run, here: Ranks, bench: ProfileBench
) -> tuple[list[Point], list[str]]:
    """The rows of the curve; where nothing can be predicted, without predictions and with the reason."""
    predict, notes = _predict(run, here, bench)
    points = []
    for size, steps in timed:
        predicted = None if predict is None or steps is None else predict(size.batch, size.chunk, steps.keep)
        points.append(point(size, steps, here.size, predicted))
    return points, notes


def _predict(run: config.Run, here: Ranks, bench: ProfileBench) -> tuple[Predict | None, list[str]]:
    try:
        return predictions(run, here, bench.length, len(bench.parts.classes)), []
    except ValueError as error:
        return None, [f"nothing is predicted: {error}"]


def _check(batches: Sequence[int] | None, chunks: Sequence[int] | None, steps: int, critical: float | None) -> None:
    if batches is not None and chunks is not None:
        raise ValueError("batches and chunks are given: one size varies while the other one stays; give one of them")
    for name, sizes in (("batches", batches), ("chunks", chunks)):
        wrong = [size for size in sizes or () if size < 1]
        if wrong:
            raise ValueError(f"{name} has {wrong[0]}: sizes are at least 1")
    if steps < 1:
        raise ValueError(f"steps is {steps}: must be at least 1; 5 show a spread")
    if critical is not None and critical <= 0:
        raise ValueError(f"critical is {critical}: a batch, above 0")
