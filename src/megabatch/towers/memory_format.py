"""The memory format of convolutions: on tensor cores those of images with channels last need no copies of them."""

from __future__ import annotations

import torch
from torch import nn

from megabatch.config import Compute

from .patches import VECTOR_WIDTH, PatchConv2d


def choose_memory_format(tower: nn.Module, compute: Compute, device: str, precision: str, *, own_code: bool) -> None:
    """Let the convolutions of a tower compute with channels last, if they should. Names and values do not change.

    compute.channels_last decides. None chooses where that is known to be faster and to work: on CUDA in half precision, for towers
    of a library that convolve more than images. Code of the user (own_code) may expect images in the usual format, as `view` does.
    Sharding needs weights in the usual format. device: its type.
    """
    choice = compute.channels_last
    if choice is None:
        is_faster = device == "cuda" and precision != "fp32" and any(map(_is_wide_convolution, tower.modules()))
        choice = is_faster and not own_code and not compute.sharded
    if not choice:
        return
    for module in tower.modules():
        # A convolution's output takes the memory format of its weights: inputs need not change.
        if isinstance(module, nn.Conv2d) and not isinstance(module, PatchConv2d):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _is_wide_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and module.in_channels >= VECTOR_WIDTH
