"""Patch convolutions as matrix products: the same parameters and results, in kernels that use tensor cores.

cuDNN computes the patch embedding of a vision transformer (a convolution whose windows do not overlap, on three channels) without
tensor cores. Over patches that are laid out one after the other it is a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Model = TypeVar("Model", bound=nn.Module)
# Tensor cores load vectors of this many channels: cuDNN computes convolutions on fewer, such as those on images, without them.
VECTOR_WIDTH = 8


class PatchConv2d(nn.Conv2d):
    """A convolution whose windows do not overlap, computed as a linear layer. Its parameters are those of the convolution."""

    def forward(self, input: Tensor) -> Tensor:
        height, width = int(self.kernel_size[0]), int(self.kernel_size[1])
        rows, columns = input.shape[-2] // height, input.shape[-1] // width
        if not rows or not columns:
            # The convolution's own error: the image is smaller than a patch.
            return super().forward(input)
        # As in the convolution, pixels beyond the last whole patch have no effect.
        images = input[..., : rows * height, : columns * width]
        grid = images.unflatten(-1, (columns, width)).unflatten(-3, (rows, height))
        # (…, channels, rows, height, columns, width) to (…, rows, columns, channels, height, width), in one copy.
        patches = grid.movedim((-4, -2), (-5, -4)).to(product_dtype(input), memory_format=torch.contiguous_format)
        return F.linear(patches.flatten(-3), self.weight.flatten(1), self.bias).movedim(-1, -3)


def linear_patches(model: Model) -> Model:
    """Compute the patch convolutions of a model as linear layers, with the same parameters and results; return the model.

    These are the `torch.nn.Conv2d` of more than one pixel whose kernel and stride are equal, without padding, dilation and groups,
    as in the patch embedding of vision transformers. Names, values and the state dict do not change. Call it before `fully_shard`
    and `torch.compile`.

    >>> import torch, megabatch
    >>> embed = torch.nn.Conv2d(3, 64, kernel_size=16, stride=16)
    >>> megabatch.linear_patches(embed)(torch.randn(2, 3, 224, 224)).shape
    torch.Size([2, 64, 14, 14])
    """
    if not _convert(model, _is_patch_convolution):
        raise ValueError(
            f"the {type(model).__name__} has no patch convolution: linear_patches needs a torch.nn.Conv2d of more than one pixel "
            "whose kernel and stride are equal, without padding, dilation and groups; call it before fully_shard, or leave it out"
        )
    return model


def uses_linear_patches(choice: bool | None, device: str, precision: str) -> bool:
    """Return whether a run computes the patches of images as linear layers.

    choice: compute.linear_patches; None chooses where that is known to be faster, on CUDA in half precision. device: its type.

    >>> [uses_linear_patches(None, *where) for where in (("cuda", "bf16"), ("cuda", "fp32"), ("cpu", "bf16"))]
    [True, False, False]
    """
    return device == "cuda" and precision != "fp32" if choice is None else choice


def linear_image_patches(model: nn.Module) -> None:
    """Do what `linear_patches` does to the convolutions on images alone, if the model has any.

    Convolutions on many channels, as between the stages of ConvNeXt, have tensor-core kernels of their own.
    """
    _convert(model, lambda module: _is_patch_convolution(module) and module.weight.shape[1] < VECTOR_WIDTH)


def _convert(model: nn.Module, is_chosen: Callable[[Any], bool]) -> int:
    """Compute the chosen convolutions as linear layers, and return their number."""
    modules = [module for module in model.modules() if is_chosen(module)]
    for module in modules:
        module.__class__ = PatchConv2d
    return len(modules)


def _is_patch_convolution(module: nn.Module) -> bool:
    # Not subclasses of others, which may compute something else.
    return (
        type(module) in (nn.Conv2d, PatchConv2d)
        and isinstance(module, nn.Conv2d)
        and tuple(module.kernel_size) == tuple(module.stride) != (1, 1)
        and module.padding in ("valid", (0, 0))
        and tuple(module.dilation) == (1, 1)
        and module.groups == 1
    )


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which autocast, where it is enabled, computes a product of the tensor."""
    if tensor.dtype != torch.float32:
        return tensor.dtype
    return autocast_dtype(tensor.device) or torch.float32


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast on a device, or None where it is not enabled."""
    # Some devices have no autocast. torch.compile of PyTorch 2.11 breaks the graph at that question.
    has_autocast = device.type in ("cpu", "cuda") or torch.amp.is_autocast_available(device.type)
    return torch.get_autocast_dtype(device.type) if has_autocast and torch.is_autocast_enabled(device.type) else None
