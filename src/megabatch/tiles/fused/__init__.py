"""The tile contract in Triton. Contract and legend: ../contract.py.

A pass goes over panels of the similarity matrix. Forward, one launch computes the tiles of a panel and the sums of each tile, and
a second small launch adds these. Backward, one launch writes the gradient in the logits of a panel, and two GEMMs with it follow.
Each kernel is in one file with its launcher; architectures.py picks the kernels for a device.
"""

from __future__ import annotations

import functools

import torch

from .architectures import unsupported
from .launch import UNSAVED_WORKSPACE
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


# The part of a device's memory that saved exponentials may take: a little less than a sixteenth, so that a device with somewhat
# less memory than it is sold with has the same workspace.
WORKSPACE_SHARE = 17


@functools.cache
def default_workspace(device: torch.device) -> int:
    """Return the default workspace in bytes, by the memory of the device."""
    return workspace_for(torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0)


def workspace_for(device_memory: int) -> int:
    """Return the largest power of two within a seventeenth of the memory, but at least UNSAVED_WORKSPACE.

    A loss allocates as much of it as its batch needs, and frees it at the end of forward, or in backward if there are other ranks.

    >>> [workspace_for(gib * 2**30) // 2**20 for gib in (16, 24, 40, 80, 140)]
    [512, 1024, 2048, 4096, 8192]
    """
    return max(UNSAVED_WORKSPACE, 1 << (device_memory // WORKSPACE_SHARE).bit_length() >> 1)
