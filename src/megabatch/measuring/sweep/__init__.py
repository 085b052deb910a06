"""Training at several batches, each at its best learning rate: what a batch costs and what it gains, measured."""

from .report import sweep_report
from .sweep_runs import sweep

__all__ = ["sweep", "sweep_report"]
