"""Which towers compute their convolutions with channels last."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megabatch import config
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
        (transformer, True, "cuda", "bf16", False),
    ],
)
def test_channels_last_where_it_was_chosen_or_is_faster(build, choice, device, precision, last):
    tower = build()
    images = torch.randn(2, 3, 16, 16)
    before, keys = tower(images), list(tower.state_dict())
    choose_memory_format(tower, config.Compute(channels_last=choice), device, precision, own_code=False)
    assert is_channels_last(tower) == last
    assert list(tower.state_dict()) == keys
    torch.testing.assert_close(tower(images), before)


class Flattening(nn.Module):
    """A tower that expects the usual memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.convolution(images)
        return features.view(len(features), -1)


def test_code_of_the_user_and_sharded_weights_keep_the_usual_format():
    tower, images = Flattening(), torch.randn(2, 8, 16, 16)
    choose_memory_format(tower, config.Compute(), "cuda", "bf16", own_code=True)
    assert tower(images).shape == (2, 8 * 14 * 14)
    for sharding in ("fsdp2", "hsdp"):
        choose_memory_format(tower, config.Compute(sharding=sharding), "cuda", "bf16", own_code=False)
        assert tower.convolution.weight.is_contiguous()
    choose_memory_format(tower, config.Compute(), "cuda", "bf16", own_code=False)
    with pytest.raises(RuntimeError, match="view"):
        tower(images)


def test_weights_of_other_convolutions_are_left_alone():
    tower = nn.ModuleDict({"images": network(), "video": nn.Conv3d(8, 8, 3)})
    choose_memory_format(tower, config.Compute(channels_last=True), "cuda", "bf16", own_code=False)
    assert is_channels_last(tower["images"]) and tower["video"].weight.is_contiguous()


def test_sharding_refuses_channels_last():
    with pytest.raises(ValueError, match=r'channels_last is True: must be left out with compute.sharding "fsdp2"'):
        config.check(config.Run(compute=config.Compute(channels_last=True, sharding="fsdp2")))
