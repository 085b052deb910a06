"""CHOOSE, by running: the largest chunk, the throughput curve, the noise of the gradient, the sweep over batches."""

from ..training.noise.collect import NoiseScale
from .fit import find_chunk, fitted, micro_batches

__all__ = ["NoiseScale", "find_chunk", "fitted", "micro_batches"]
