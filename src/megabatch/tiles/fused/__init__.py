"""The tile contract in Triton: the only package that imports it. Contract and legend: ../contract.py.

A pass goes over panels of the similarity matrix. Forward, one launch computes the tiles of a panel and the sums of each tile, and
a second small launch adds these. Backward, one launch writes the gradient in the logits of a panel, and two GEMMs with it follow.
Each kernel is in one file with its launcher; architectures.py picks the kernels for a device.
"""

from __future__ import annotations

import torch

from .architectures import unsupported
from .per_row import finish, normalise, positives
from .sigmoid import sigmoid_sums
from .softmax_backward import softmax_grads
from .softmax_forward import softmax_stats

__all__ = [
    "default_workspace",
    "finish",
    "normalise",
    "positives",
    "sigmoid_sums",
    "softmax_grads",
    "softmax_stats",
    "unsupported",
]


def default_workspace(device: torch.device) -> int:
    """Return the default workspace in bytes: a panel whose products fill the device."""
    return 512 * 2**20
