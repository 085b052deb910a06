"""Trainings at several batches, each at its own best rate: what a batch costs and what it is worth, measured."""

from .show import show
from .sweep_runs import sweep

__all__ = ["show", "sweep"]
