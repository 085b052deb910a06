"""A batch that doubles when the noise of the gradient allows it: the decisions, and the state that repeats them on resume."""

from __future__ import annotations

from typing import Any

from ..config import Run
from .noise.estimator import sentence
from .objective import Classification
from .schedules import StepSchedule, size_after, step_schedule

# Steps that a decision rests on, at least. They are counted anew after each doubling.
LEAST = 20


class NoiseRamp:
    """Doubles the batch once it is certainly below the critical batch, up to batch.size.

    length: samples of the training data. `doubled` holds the steps from which on the batch was twice as large. All ranks see the
    same noise and decide alike.
    """

    def __init__(self, run: Run, objective: Classification, length: int) -> None:
        self.run = run
        self.objective = objective
        self.length = length
        self.noise = objective.measure_noise()
        self.doubled: list[int] = []

    @property
    def size(self) -> int:
        """The pairs of the next step."""
        return size_after(self.run.batch, len(self.doubled))

    def decide(self, step: int) -> str | None:
        """Double the batch from `step` on if the noise allows it; return the reason, or None where the batch stays."""
        before = self.size
        if before >= self.run.batch.size or len(self.noise.steps) < LEAST:
            return None
        estimate = self.noise.estimate()
        if estimate.low <= before:
            return None
        self.doubled.append(step)
        # The next steps have another batch and another learning rate, so that earlier ones say nothing about them.
        self.noise.steps.clear()
        self._stop_at_full_size()
        critical = sentence(estimate.critical, estimate.low, estimate.high)
        return f"after step {step} the batch grows from {before:,} to {self.size:,}: {critical}"

    def schedule(self) -> StepSchedule:
        """Return the steps of the run with all doublings so far."""
        return step_schedule(self.run, self.length, self.doubled)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores, as values that JSON has."""
        return {"doubled": self.doubled, "noise": self.noise.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.doubled = list(state["doubled"])
        self.noise.load(state["noise"])
        self._stop_at_full_size()

    def _stop_at_full_size(self) -> None:
        # Nothing is left to decide then, and small micro-batches cost time.
        if self.size >= self.run.batch.size:
            self.objective.stop_measuring_noise()
