"""Predicted time and memory of a run's step at other batches and chunks, to compare with what is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .. import config
from ..optimizers import closest
from ..planning.calibration import strategy_of
from ..planning.estimator import estimator_for
from ..planning.problem import problem_of
from ..planning.request import Request
from ..training.distributed import Ranks


class StepPrediction(NamedTuple):
    """One step: its seconds, the peak of its tensors, and what the allocator reserves of the device for them."""

    seconds: float
    peak_bytes: int
    reserved_bytes: int


Predict = Callable[[int, int, int], StepPrediction]


def predictions(run: config.Run, ranks: Ranks, samples: int, classes: int) -> Predict:
    """Return a function that predicts a step on this machine from its batch, chunk and number of kept chunks.

    Raises ValueError if the run's model cannot be predicted.
    """
    request = Request(
        run,
        data=samples,
        gpu="cpu" if ranks.device.type == "cpu" else None,
        gpus=ranks.size,
        precision=run.compute.precision,
        optimizer=closest(run.optimizer.name).name,
        ema=None if run.optimizer.ema is None else (run.optimizer.ema, run.batch.size),
        classes=max(1, classes),
    )
    estimator = estimator_for(problem_of(request))

    def predict(batch: int, chunk: int, keep: int) -> StepPrediction:
        strategy = strategy_of(run, ranks.size, batch, chunk, keep)
        memory = estimator.peaks.predict(strategy)
        return StepPrediction(estimator.seconds(strategy), memory.peak_bytes, memory.reserved_bytes)

    return predict
