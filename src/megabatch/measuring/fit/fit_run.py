"""`megabatch fit`: find the largest chunk at which the steps of a run fit, starting from the predicted one."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ... import config, measurements, packages, trust
from ...data.loader import RankBatch
from ...reporting.html import write_report
from ...ring import Ring
from ...training import distributed
from ...training.build import assemble
from ...training.distributed import Ranks
from ...training.loop import Training
from ...training.run_folder import claimed_by_ranks
from ...training.schedules import Step
from ...training.signals import Stopped
from ..predictions import Predict, StepPrediction, predictions
from . import search
from .finder import ChunkResult, SearchOptions, as_measured, search_chunk
from .memory import Limit, limit_of, resident_bytes
from .report import fit_report
from .snapshot import Snapshot

# How exact the result is, and how exact the prediction that the search starts from, as fractions of the size.
WITHIN, ROUGH = 1 / 32, 1 / 8


def fit(
    run: config.Run,
    *,
    budget: int | None = None,
    margin: float = 0.05,
    cap: int | None = None,
    start: int | None = None,
    out: Path,
    trust_code: bool = False,
) -> measurements.Measured:
    """Return the largest chunk at which a run's steps fit, measured at its own batch on its own data.

    Writes measured.json, fit.png and report.html into `out`. The run itself is not changed. No chunk is kept during the search:
    afterwards `keep="auto"` uses the memory that is left.

    budget: bytes that may be used; on a CPU by the whole process. margin: fraction of the budget that stays free. cap: as in
    `find_chunk`; the rows of a rank are always a cap. start: the first chunk to try; None is the one that is predicted to fit.
    trust_code: whether code that the run names (`trust.callables`) may be imported and called.
    """
    config.require_filled(run)
    trust.require_trust(run, trust_code)
    packages.require(packages.HTML)
    with distributed.ranks(run.compute) as ranks, claimed_by_ranks(out, "fit", ranks.first):
        run = config.with_ranks(run, ranks.size)
        bench = FitBench(run, ranks, out)
        limit = limit_of(ranks.device, budget, margin, ranks.size)
        cap = bench.rows if cap is None else min(cap, bench.rows)
        predicted = PredictedPeaks(run, bench)
        first = predicted.start(cap, limit) if start is None else start
        options = SearchOptions(first or run.batch.chunk, cap, WITHIN, margin)
        found = search_chunk(bench.step, Snapshot(bench.state), limit, Ring(ranks.group), options)
        result = as_measured(_as_fit(found, predicted), config.as_table(run), ranks.device)
        if ranks.first:
            measurements.write(result, out / "measured.json")
            write_report(fit_report(result), out)
    return result


class FitBench:
    """A run that is prepared for trials of its largest step at any chunk."""

    def __init__(self, run: config.Run, ranks: Ranks, folder: Path) -> None:
        # Kept chunks would fill the memory whatever the chunk size is.
        self.training = Training(assemble(replace(run, batch=replace(run.batch, keep=0)), ranks), folder)
        # A trial must fail when memory runs out, and not continue in smaller chunks.
        self.training.step_fn = self.training.parts.objective.step
        self.ranks = ranks
        self.largest: Step = self.training.schedule.largest()
        self.rows = -(-self.largest.pairs // ranks.size)
        self.training.parts.model.train()
        with contextlib.closing(self.training.parts.shuffled().batches([(self.largest.first, self.largest.pairs)])) as batches:
            self.batch: RankBatch = next(batches)

    @property
    def state(self) -> list[Any]:
        parts = self.training.parts
        return [parts.model, self.training.optimizer, parts.objective.scaler]

    def step(self, chunk: int) -> None:
        """Take one training step; a step that continues in smaller chunks raises OutOfMemoryError."""
        chunked = self.training.parts.objective.chunked
        for each in chunked:
            each.chunk = chunk
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "out of memory", UserWarning)
            try:
                self.training.step(self.largest, self.batch)
            except Stopped as stopped:
                raise ValueError(str(stopped)) from None
        if any(each.chunk < chunk for each in chunked):
            smallest = min(each.chunk for each in chunked)
            raise torch.OutOfMemoryError(f"out of memory: the step continued in chunks of {smallest}")


class PredictedPeaks:
    """Predicted memory of a run's chunks. If its model cannot be predicted, every prediction is None and one warning says why."""

    def __init__(self, run: config.Run, bench: FitBench) -> None:
        parts = bench.training.parts
        # _beyond_tensors: what the process uses beside tensors; only on a CPU, where the whole process is measured.
        self._pairs, self._beyond_tensors = bench.largest.pairs, 0
        self._by_chunk: dict[int, StepPrediction] = {}
        self._predict: Predict | None = None
        try:
            self._predict = predictions(run, bench.ranks, sum(parts.training.lengths), len(parts.classes))
        # A user's model can fail to be traced in any way; the search works without a prediction.
        except Exception as error:
            self._give_up(error)
        if self._at(1) is not None and bench.ranks.device.type == "cpu":
            # The weights are part of both numbers.
            weights = (*parts.model.parameters(), *parts.model.buffers())
            self._beyond_tensors = resident_bytes() - sum(t.numel() * t.element_size() for t in weights)

    def peak(self, chunk: int) -> int | None:
        """Return the predicted peak in bytes at a chunk, comparable with a measured one."""
        predicted = self._at(chunk)
        return None if predicted is None else predicted.peak_bytes + self._beyond_tensors

    def start(self, cap: int, limit: Limit) -> int | None:
        """Return the largest chunk that is predicted to fit, roughly; None if there is none or nothing can be predicted."""
        if self._predict is None or limit.bytes is None:
            return None
        allowed = limit.bytes - self._beyond_tensors

        def hint() -> int | None:
            return search.extrapolated({chunk: each.reserved_bytes for chunk, each in self._by_chunk.items()}, allowed)

        def fits(chunk: int) -> bool:
            predicted = self._at(chunk)
            return predicted is not None and predicted.reserved_bytes <= allowed

        chunk = search.largest(fits, cap, cap=cap, within=ROUGH, hint=hint)
        return None if self._predict is None else chunk

    def _at(self, chunk: int) -> StepPrediction | None:
        if self._predict is not None and chunk not in self._by_chunk:
            try:
                self._by_chunk[chunk] = self._predict(self._pairs, chunk, 0)
            except Exception as error:
                self._give_up(error)
        return self._by_chunk.get(chunk)

    def _give_up(self, error: Exception) -> None:
        self._predict = None
        self._by_chunk.clear()
        warnings.warn(f"Memory prediction failed; starting the search at batch.chunk: {error}", stacklevel=2)


def _as_fit(found: ChunkResult, predicted: PredictedPeaks) -> measurements.Fit:
    """Return the result, with predictions for the smallest, the largest and the chosen size."""
    sizes = sorted(trial.size for trial in found.trials)
    peaks = {size: predicted.peak(size) for size in (sizes[0], found.size, sizes[-1])}
    trials = [trial._asdict() | {"predicted_bytes": peaks.get(trial.size)} for trial in found.trials]
    return measurements.Fit(found.size, found.limit_bytes, tuple(trials))
