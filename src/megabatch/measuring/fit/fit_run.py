"""`megabatch fit`: the largest chunk with which the steps of a run really fit, searched from where it is predicted."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ... import config, measurements, packages
from ...data.loader import Batch
from ...ring import Ring
from ...training.build import assemble
from ...training.distributed import Ranks, ranks
from ...training.loop import Training
from ...training.run_folder import claimed_by_ranks
from ...training.schedules import Step
from ...training.signals import Stopped
from ..predictions import Predict, StepPrediction, predictions
from . import search
from .finder import ChunkResult, SearchOptions, as_measured, seek
from .memory import Limit, limit_of, resident_bytes
from .show import draw
from .snapshot import Snapshot

# Shares of the size: how exact the answer is, and how exact the prediction that it starts from.
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
    """The largest chunk with which a run's steps fit: measured, at its own batch, on its own data; measured.json and fit.png in
    `out` say so. The run itself is not touched.

    budget: bytes that may be used; on a CPU by the whole process. margin: share of them that is left free. cap: as in
    `find_chunk`; the rows of a rank are one anyway. start: the first chunk tried; None is what is predicted to fit.
    No chunk is kept while it is searched: `keep="auto"` fills what is left.
    trust_code: whether code that the run names (`config.callables`) may be imported and called.
    """
    config.require_trust(run, trust_code)
    packages.require(packages.FIGURES)
    with ranks(run.compute) as here, claimed_by_ranks(out, "fit", here.first):
        bench = FitBench(run, here, out)
        limit = limit_of(here.device, budget, margin, here.size)
        cap = bench.rows if cap is None else min(cap, bench.rows)
        foresight = PredictedPeaks(run, bench)
        first = foresight.start(cap, limit) if start is None else start
        asked = SearchOptions(first or run.batch.chunk, cap, WITHIN, margin)
        found = seek(bench.step, Snapshot(bench.state), limit, Ring(here.group), asked)
        result = as_measured(_as_fit(found, foresight), config.as_table(run), here.device)
        if here.first:
            measurements.write(result, out / "measured.json")
            draw(result, out / "fit.png")
    return result


class FitBench:
    """A run set up for trials: its largest step, at any chunk."""

    def __init__(self, run: config.Run, here: Ranks, folder: Path) -> None:
        # What is kept instead of recomputed fills memory whatever the chunk.
        self.training = Training(assemble(replace(run, batch=replace(run.batch, keep=0)), here), folder)
        # A trial that runs out of memory has its answer: it does not go on in smaller chunks.
        self.training.step_fn = self.training.parts.objective.step
        self.here = here
        self.at: Step = self.training.schedule.largest()
        self.rows = -(-self.at.pairs // here.size)
        self.training.parts.model.train()
        with contextlib.closing(self.training.parts.shuffled().batches([(self.at.first, self.at.pairs)])) as batches:
            self.batch: Batch = next(batches)

    @property
    def state(self) -> list[Any]:
        parts = self.training.parts
        return [parts.model, self.training.optimizer, parts.objective.scaler]

    def step(self, chunk: int) -> None:
        """One step as training takes it; where that has to go on in smaller chunks, it has run out of memory."""
        chunked = self.training.parts.objective.chunked
        for each in chunked:
            each.chunk = chunk
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "out of memory", UserWarning)
            try:
                self.training.step(self.at, self.batch)
            except Stopped as stopped:
                raise ValueError(str(stopped)) from None
        if any(each.chunk < chunk for each in chunked):
            raise torch.OutOfMemoryError(f"out of memory: the step went on in chunks of {min(each.chunk for each in chunked)}")


class PredictedPeaks:
    """What is predicted for the chunks of a run; nothing where its model cannot be predicted, which is said once."""

    def __init__(self, run: config.Run, bench: FitBench) -> None:
        parts = bench.training.parts
        self._pairs, self._rest = bench.at.pairs, 0
        self._known: dict[int, StepPrediction] = {}
        self._predict: Predict | None = None
        try:
            self._predict = predictions(run, bench.here, sum(parts.training.lengths), len(parts.classes))
        # The models are anyone's, and can fail to be traced in any way; a search does without.
        except Exception as error:
            self._give_up(error)
        if self._at(1) is not None and bench.here.device.type == "cpu":
            # A process takes more than its tensors; the weights are in both numbers.
            weights = (*parts.model.parameters(), *parts.model.buffers())
            self._rest = resident_bytes() - sum(t.numel() * t.element_size() for t in weights)

    def peak(self, chunk: int) -> int | None:
        """Bytes at a chunk, as they are measured."""
        predicted = self._at(chunk)
        return None if predicted is None else predicted.peak_bytes + self._rest

    def start(self, cap: int, limit: Limit) -> int | None:
        """The largest chunk that is predicted to fit, roughly; None where none is, or nothing is known."""
        if self._predict is None or limit.bytes is None:
            return None
        room = limit.bytes - self._rest

        def hint() -> int | None:
            return search.on_the_line({chunk: each.reserved_bytes for chunk, each in self._known.items()}, room)

        def fits(chunk: int) -> bool:
            predicted = self._at(chunk)
            return predicted is not None and predicted.reserved_bytes <= room

        found = search.largest(fits, cap, cap=cap, within=ROUGH, hint=hint)
        return None if self._predict is None else found

    def _at(self, chunk: int) -> StepPrediction | None:
        if self._predict is not None and chunk not in self._known:
            try:
                self._known[chunk] = self._predict(self._pairs, chunk, 0)
            except Exception as error:
                self._give_up(error)
        return self._known.get(chunk)

    def _give_up(self, error: Exception) -> None:
        self._predict = None
        self._known.clear()
        warnings.warn(f"nothing is predicted, so that the search begins at batch.chunk: {error}", stacklevel=2)


def _as_fit(found: ChunkResult, foresight: PredictedPeaks) -> measurements.Fit:
    """The result; the smallest, the largest and the chosen size have what was predicted for them."""
    sizes = sorted(trial.size for trial in found.trials)
    beside = {size: foresight.peak(size) for size in (sizes[0], found.size, sizes[-1])}
    trials = [trial._asdict() | {"predicted_bytes": beside.get(trial.size)} for trial in found.trials]
    return measurements.Fit(found.size, found.limit_bytes, tuple(trials))
