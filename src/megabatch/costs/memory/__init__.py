"""What a training step takes of a device's memory, predicted without the device.

The model is built of fake tensors, which have shapes and no contents; one step runs on them while every storage is followed from
its birth to its end, as CUDA's kernels save and allocate. That takes seconds for models of any size, on any machine.
"""

from .interpolate import MemoryCurve, MemoryPredictor, PeakMemory, memory_curve
from .predict import predict_memory
from .setup import Prediction, Setup

__all__ = ["MemoryCurve", "MemoryPredictor", "PeakMemory", "Prediction", "Setup", "memory_curve", "predict_memory"]
