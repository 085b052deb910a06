"""The memory of a training step, predicted without the device.

The model is built of fake tensors, which have shapes and no contents. One step runs on them while every storage is followed from
its allocation to its end, with the workspaces of CUDA's kernels, and the allocations are replayed through a model of CUDA's
caching allocator. That takes seconds for models of any size, on any machine.

    step.py, contrastive.py  one step is traced: `SupervisedStep`, `ContrastiveStep`
    trace.py                 records allocations; workspaces.py, sharding.py, optimizers.py, loss.py add what no tensor shows
    allocator.py             what the allocator reserves for them
    predict.py               `predict_memory`: the peak, its parts, the assumptions
    interpolate.py           any number of rows, any strategy, from a few traces
"""

from .interpolate import ChunkedMemoryCurve, MemoryCurve, MemoryPredictor, PeakMemory, memory_curve
from .predict import predict_memory
from .setup import Prediction, Setup

__all__ = [
    "ChunkedMemoryCurve",
    "MemoryCurve",
    "MemoryPredictor",
    "PeakMemory",
    "Prediction",
    "Setup",
    "memory_curve",
    "predict_memory",
]
