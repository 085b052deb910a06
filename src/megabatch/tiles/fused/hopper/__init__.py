"""Kernels for Hopper, in Gluon: the fast launches of the portable kernels in .., with fewer options (launch.SpecialisedKernels)."""

from .matryoshka import prefix_gradient, prefix_stats
from .softmax_backward import softmax_grads
from .softmax_forward import softmax_stats

__all__ = ["prefix_gradient", "prefix_stats", "softmax_grads", "softmax_stats"]
