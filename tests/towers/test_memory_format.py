"""Which towers compute their convolutions with channels last."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megabatch.towers.memory_format import choose_memory_format
from megabatch.towers.patches import linear_patches


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def transformer() -> nn.Module:
    return nn.Sequential(linear_patches(nn.Conv2d(3, 16, 4, stride=4)), nn.Flatten(2), nn.Linear(16, 16))


def is_channels_last(tower: nn.Module) -> bool:
    weights = [weight for weight in tower.parameters() if weight.ndim == 4]
    return all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


@pytest.mark.parametrize(
    ("build", "choice", "device", "precision", "last"),
    [
        (network, None, "cuda", "bf16", True),
        (network, None, "cuda", "fp16", True),
        (network, None, "cuda", "fp32", False),
        (network, None, "cpu", "bf16", False),
        (network, False, "cuda", "bf16", False),
        (network, True, "cpu", "fp32", True),
        # A linear layer over patches reads the weights of their convolution as they were.
        (transformer, None, "cuda", "bf16", False),
    ],
)
def test_channels_last_where_it_was_chosen_or_is_faster(build, choice, device, precision, last):
    tower = build()
    images = torch.randn(2, 3, 16, 16)
    before, keys = tower(images), list(tower.state_dict())
    choose_memory_format(tower, choice, device, precision)
    assert is_channels_last(tower) == last
    assert list(tower.state_dict()) == keys
    torch.testing.assert_close(tower(images), before)
