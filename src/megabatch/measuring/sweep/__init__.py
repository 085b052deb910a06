"""Trainings at several batches, each at its own best rate: what a batch costs and what it is worth, measured."""

from .report import sweep_report
from .sweep_runs import sweep

__all__ = ["sweep", "sweep_report"]
