"""A batch that doubles when the noise of the gradient allows it: the decisions, and what has to be kept to repeat them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .noise.estimator import sentence
from .objective import Classification
from .run_logger import Watch
from .schedules import course, size_after

if TYPE_CHECKING:
    from .loop import Training

# Steps that a decision rests on, at least; they are counted anew after each doubling.
LEAST = 20


class Ramp:
    """A callback of a run: doubles its batch once that is below the critical one for certain, up to batch.size.

    `doubled` holds the steps from which on the batch was twice as large. All ranks see the same noise and decide alike.
    """

    def __init__(self, training: Training) -> None:
        # Other objectives were refused with the configuration.
        assert isinstance(training.parts.objective, Classification)
        self.training = training
        self.objective = training.parts.objective
        self.noise = self.objective.watch_noise()
        self.doubled: list[int] = []

    @property
    def size(self) -> int:
        """The pairs of the next step."""
        return size_after(self.training.run.batch, len(self.doubled))

    def __call__(self, watch: Watch) -> None:
        """Decides after a step; from the next one on, batch and learning rate follow."""
        before = self.size
        if before >= self.training.run.batch.size or len(self.noise.steps) < LEAST:
            return
        found = self.noise.estimate()
        if found.low <= before:
            return
        self.doubled.append(self.training.number)
        # What follows is another regime: another batch, another learning rate.
        self.noise.steps.clear()
        self._plan()
        why = sentence(found.critical, found.low, found.high)
        watch.note(f"after step {self.training.number} the batch grows from {before:,} to {self.size:,}: {why}")

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON can say it."""
        return {"doubled": self.doubled, "noise": self.noise.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.doubled = list(state["doubled"])
        self.noise.load(state["noise"])
        self._plan()

    def _plan(self) -> None:
        run = self.training.run
        self.training.course = course(run, sum(self.training.parts.training.lengths), self.doubled)
        if self.size >= run.batch.size:
            # Nothing is left to decide, and small micro-batches cost time.
            self.objective.ignore_noise()
