"""Training at several batches, each at its best learning rate: what a batch costs and what it gains, measured."""

from .show import show
from .sweep_runs import sweep

__all__ = ["show", "sweep"]
