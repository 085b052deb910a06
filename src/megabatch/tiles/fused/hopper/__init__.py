"""Kernels for Hopper, in Gluon: the fast launches of the portable kernels in .., with fewer options, and products with saved
exponentials (launch.SpecialisedKernels)."""

from .softmax_backward import softmax_grads
from .softmax_forward import softmax_stats

__all__ = ["softmax_grads", "softmax_stats"]
