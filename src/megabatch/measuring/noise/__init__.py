"""The gradient noise of a run, the critical batch that it implies, and that batch measured directly by branching.

`NoiseScale` is for your own training loop; training/noise/ has the estimator.
"""

from ...training.noise.collect import NoiseScale
from .noise_run import noise
from .report import noise_report

__all__ = ["NoiseScale", "noise", "noise_report"]
