"""Images on their way into an encoder: bytes of one size while they travel, normalised numbers inside the module."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# The widest and the tallest crop, as torchvision and timm have them.
RATIOS = (3 / 4, 4 / 3)
# A crop of the wanted area and shape may not fit into a narrow image; so many are tried.
TRIES = 10
# Pillow's own numbers, so that a tower can be built where there is no Pillow. Its filters antialias when they make smaller.
BICUBIC, MIRROR = 3, 0
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class PrepareImage:
    """Makes of an image (PIL) a tensor of bytes, (channels, size, size): the square in its middle, resized with antialiasing.

    channels: 1 is grey, 3 is red, green, blue.
    crop: with a seed, a random rectangle takes the place of the middle: at least this share of the image's area. 1.0: none.
    flip: with a seed, every other image is mirrored. Writing and glyphs are not to be.
    """

    size: int = 32
    channels: int = 3
    crop: float = 1.0
    flip: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"size is {self.size!r}: a number of pixels, at least 1")
        if self.channels not in (1, 3):
            raise ValueError(f"channels is {self.channels!r}: must be 1 (grey) or 3 (colours)")
        if not isinstance(self.crop, (int, float)) or not 0 < self.crop <= 1:
            raise ValueError(f"crop is {self.crop!r}: the smallest share of the area lies above 0, up to 1.0, which crops nothing")

    def __call__(self, raw: Any, seed: int | None) -> Tensor:
        if not hasattr(raw, "convert"):
            raise ValueError(f"a tower for images was given a {type(raw).__name__}: this side of the data is no image")
        mode = "L" if self.channels == 1 else "RGB"
        # Palettes have to become colours before pixels are averaged.
        image = raw if raw.mode == mode else raw.convert(mode)
        chance = random.Random(seed) if seed is not None and (self.crop < 1 or self.flip) else None
        box = _middle(*image.size) if chance is None or self.crop == 1 else _random_box(image.size, self.crop, chance)
        if image.size != (self.size, self.size) or box != (0, 0, self.size, self.size):
            image = image.resize((self.size, self.size), BICUBIC, box=box)
        if self.flip and chance is not None and chance.random() < 0.5:
            image = image.transpose(MIRROR)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        if self.channels == 1:
            return pixels.view(1, self.size, self.size)
        return pixels.view(self.size, self.size, self.channels).permute(2, 0, 1).contiguous()


def _middle(width: int, height: int) -> Box:
    edge = min(width, height)
    left, top = (width - edge) / 2, (height - edge) / 2
    return left, top, left + edge, top + edge


def _random_box(edges: tuple[int, int], smallest: float, chance: random.Random) -> Box:
    width, height = edges
    for _ in range(TRIES):
        area = width * height * chance.uniform(smallest, 1)
        ratio = chance.uniform(*RATIOS)
        wide, tall = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if wide <= width and tall <= height:
            left, top = chance.uniform(0, width - wide), chance.uniform(0, height - tall)
            # Sums of fractions may reach past the edge by a rounding.
            return left, top, min(left + wide, width), min(top + tall, height)
    return _middle(width, height)


class Pixels(nn.Module):
    """Bytes, 0 to 255, as numbers of the given mean and standard deviation, each of the range 0 to 1."""

    scale: Tensor
    offset: Tensor

    def __init__(self, mean: Sequence[float] = (0.5,), std: Sequence[float] = (0.5,)) -> None:
        super().__init__()
        means, stds = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
        # Options decide them, a file of weights has no say.
        self.register_buffer("scale", 1 / (255 * stds), persistent=False)
        self.register_buffer("offset", -means / stds, persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.to(self.scale.dtype) * self.scale + self.offset
