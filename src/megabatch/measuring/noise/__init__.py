"""The noise of the gradient measured while a run trains, the critical batch that it implies, and that batch tried directly.

For loops of one's own there is `NoiseScale`; how it estimates is in training/noise/.
"""

from ...training.noise.collect import NoiseScale
from .noise_run import noise
from .report import noise_report

__all__ = ["NoiseScale", "noise", "noise_report"]
