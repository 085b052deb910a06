"""The memory format of convolutions: on tensor cores those of images with channels last need no copies of them."""

from __future__ import annotations

import torch
from torch import nn

from .patches import VECTOR_WIDTH


def choose_memory_format(tower: nn.Module, choice: bool | None, device: str, precision: str) -> None:
    """Let the convolutions of a tower compute with channels last, if they should. Names and values do not change.

    choice: compute.channels_last; None chooses where that is known to be faster: on CUDA in half precision, for towers that
        convolve more than images. device: its type.
    """
    if choice is None:
        choice = device == "cuda" and precision != "fp32" and any(map(_is_wide_convolution, tower.modules()))
    if choice:
        # A convolution's output takes the memory format of its weights: inputs need not change.
        tower.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _is_wide_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and module.in_channels >= VECTOR_WIDTH
