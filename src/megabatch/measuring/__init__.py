"""Choose a batch by running: the largest chunk, the fastest size, the gradient noise, and trainings at several batches."""

from ..training.noise.collect import NoiseScale
from .fit import find_chunk, fitted, micro_batches

__all__ = ["NoiseScale", "find_chunk", "fitted", "micro_batches"]
