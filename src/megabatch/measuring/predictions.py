"""Predicted time and memory of a run's step at other batches and chunks, to compare with what is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .. import config
from ..planning.calibration import how_of
from ..planning.planner import Planner, Tools
from ..planning.request import Question
from ..training.distributed import Ranks


class StepPrediction(NamedTuple):
    """One step: its seconds, the peak of its tensors, and what the allocator reserves of the device for them."""

    seconds: float
    peak_bytes: int
    reserved_bytes: int


Predict = Callable[[int, int, int], StepPrediction]


def predictions(run: config.Run, here: Ranks, samples: int, classes: int) -> Predict:
    """Return a function that predicts a step on this machine from its batch, chunk and number of kept chunks.

    Raises ValueError if the run's model cannot be predicted.
    """
    question = Question(
        run,
        data=samples,
        gpu="cpu" if here.device.type == "cpu" else None,
        gpus=here.size,
        precision=run.compute.precision,
        optimizer="sgd" if run.optimizer.name == "sgd" else "adamw",
        ema=None if run.optimizer.ema is None else (run.optimizer.ema, run.batch.size),
        classes=max(1, classes),
    )
    planner = Planner(question, Tools())

    def predict(batch: int, chunk: int, keep: int) -> StepPrediction:
        how = how_of(run, here.size, batch, chunk, keep)
        memory = planner.peaks.predict(how)
        return StepPrediction(planner.step(how).seconds, memory.peak_bytes, memory.reserved_bytes)

    return predict
