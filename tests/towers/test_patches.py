"""Patch convolutions computed as linear layers: the values, gradients, dtypes and state dict of the convolution."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import megabatch
from megabatch.towers.patches import PatchConv2d


def pair(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Conv2d, nn.Conv2d]:
    """Return a convolution and its copy as a linear layer."""
    torch.manual_seed(0)
    conv = nn.Conv2d(**{"in_channels": 3, "out_channels": 5, "kernel_size": 4, "stride": 4} | options).to(dtype)
    return conv, megabatch.linear_patches(copy.deepcopy(conv))


def outcome(module: nn.Module, images: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the images and the parameters."""
    images = images.detach().requires_grad_()
    output = module(images)
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
    (output * weights).sum().backward()
    return [output.detach(), images.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize(
    "options, shape",
    [
        ({}, (2, 3, 16, 16)),
        ({"bias": False}, (2, 3, 16, 16)),
        ({"kernel_size": (2, 3), "stride": (2, 3)}, (2, 3, 8, 12)),
        ({"padding": "valid"}, (2, 3, 8, 8)),
        # Rows and columns of pixels that are left over.
        ({}, (2, 3, 19, 14)),
        # One image without a batch dimension, and no image.
        ({}, (3, 8, 8)),
        ({}, (0, 3, 8, 8)),
    ],
)
def test_values_and_gradients_are_those_of_the_convolution(options, shape):
    images = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    conv, linear = pair(**options)
    for found, true in zip(outcome(linear, images), outcome(conv, images), strict=True):
        assert found.shape == true.shape and found.dtype == true.dtype
        assert torch.allclose(found, true, rtol=0, atol=1e-12)


def test_memory_formats_have_no_effect_on_the_values():
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    conv, linear = pair()
    expected = conv(images)
    linear.to(memory_format=torch.channels_last)
    assert torch.allclose(linear(images.contiguous(memory_format=torch.channels_last)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast_has_the_convolutions_dtypes_and_error(dtype):
    images = torch.randn(8, 3, 16, 16).to(dtype)
    exact = pair()[0](images.double())
    conv, linear = pair(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found, rounded = linear(images), conv(images)
    assert found.dtype == rounded.dtype
    # Sums in another order may round another way: by half a unit in the last place of bf16, of a value of at most 4.
    assert (found - exact).abs().max() <= (rounded - exact).abs().max() + 4 * torch.finfo(torch.bfloat16).eps


def test_the_state_dict_and_the_parameters_are_the_convolutions_own():
    conv, _ = pair(torch.float32)
    model = nn.Sequential(conv, nn.ReLU(), nn.Conv2d(5, 5, 3))
    before, parameters = model.state_dict(), list(model.parameters())
    assert megabatch.linear_patches(model) is model
    assert isinstance(model[0], PatchConv2d) and type(model[2]) is nn.Conv2d
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    fresh = megabatch.linear_patches(nn.Sequential(nn.Conv2d(3, 5, 4, 4), nn.ReLU(), nn.Conv2d(5, 5, 3)))
    fresh.load_state_dict(before)
    images = torch.randn(2, 3, 16, 16)
    for other in (fresh, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), megabatch.linear_patches(model)):
        assert torch.equal(other(images), model(images))


class Scaled(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(3, 4, 1, 1),
        nn.Conv2d(3, 4, 4, 2),
        nn.Conv2d(3, 4, 4, 4, padding=1),
        nn.Conv2d(3, 4, 4, 4, dilation=2),
        nn.Conv2d(4, 4, 4, 4, groups=2),
        Scaled(3, 4, 4, 4),
        nn.Linear(3, 4),
    ],
    ids=["one pixel", "overlap", "padding", "dilation", "groups", "subclass", "linear"],
)
def test_other_modules_are_left_alone_and_a_model_without_patches_is_refused(module):
    kind = type(module)
    with pytest.raises(ValueError, match="no patch convolution"):
        megabatch.linear_patches(module)
    both = megabatch.linear_patches(nn.ModuleList([module, nn.Conv2d(3, 4, 4, 4)]))
    assert type(both[0]) is kind and type(both[1]) is PatchConv2d


def test_images_smaller_than_a_patch_raise_the_convolutions_error():
    conv, linear = pair()
    errors = []
    for module in (conv, linear):
        with pytest.raises(RuntimeError) as error:
            module(torch.zeros(2, 3, 3, 8, dtype=torch.float64))
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@pytest.mark.slow
def test_it_compiles_without_a_graph_break():
    _, linear = pair(torch.float32)
    images = torch.randn(2, 3, 16, 16)
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(images), linear(images))


def wrapped_gradients(rank: int, size: int) -> list[float]:
    """Return the largest difference of a gradient on two ranks from that of the convolution, under DDP and under FSDP2."""
    images = torch.randn(2 * size, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (conv, linear), (_, sharded) = pair(), pair()
    true = conv(images).square().mean()
    true.backward()
    differences = []
    mesh = torch.distributed.init_device_mesh("cpu", (size,))
    for model in (DistributedDataParallel(linear), fully_shard(sharded, mesh=mesh)):
        model(images.chunk(size)[rank]).square().mean().backward()
        for parameter, expected in zip(model.parameters(), conv.parameters(), strict=True):
            gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            differences.append((gradient - expected.grad).abs().max().item())
    return differences


@pytest.mark.slow
def test_ddp_and_fsdp_give_the_gradients_of_the_convolution(world):
    for differences in world.run(2, wrapped_gradients):
        assert max(differences) < 1e-12
