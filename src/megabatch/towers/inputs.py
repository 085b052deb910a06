"""Prepare one raw sample for an encoder: images become uint8 tensors, texts become byte tokens.

Preparation runs in worker processes. Images stay uint8 until they reach the module, which normalises them (`NormalizePixels`), so
that four times fewer bytes travel between processes and to the device.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Kind = Literal["image", "text"]
# prepare(raw, seed): a PIL image or a str becomes a tensor or a dict of tensors. seed is None for no augmentation.
Prepare = Callable[[Any, int | None], Any]

# The range of aspect ratios of random crops, as in torchvision and timm.
RATIOS = (3 / 4, 4 / 3)
# Attempts to find a crop of the drawn area and aspect ratio that fits into a narrow image.
TRIES = 10
# Left, top, right and bottom in pixels.
Box = tuple[int, int, int, int]

PADDING, END = 0, 1
FIRST_BYTE = 2
VOCABULARY = FIRST_BYTE + 256


@dataclass(frozen=True)
class PrepareImage:
    """Convert an image to a uint8 tensor (channels, size, size): its central square, resized with antialiasing.

    The image is PIL's, or a uint8 tensor (height, width, channels).

    channels: 1 for grey, 3 for RGB.
    crop: with a seed, a random rectangle of at least this fraction of the image's area replaces the central square. 1.0: no crop.
    flip: with a seed, half of the images are mirrored. Do not use it for text or glyphs.
    """

    size: int = 32
    channels: int = 3
    crop: float = 1.0
    flip: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"size is {self.size!r}: must be a number of pixels, at least 1")
        if self.channels not in (1, 3):
            raise ValueError(f"channels is {self.channels!r}: must be 1 (grey) or 3 (RGB)")
        if not isinstance(self.crop, (int, float)) or not 0 < self.crop <= 1:
            raise ValueError(f"crop is {self.crop!r}: must be a fraction of the area above 0 and at most 1.0, which does not crop")

    def __call__(self, raw: Any, seed: int | None) -> Tensor:
        rng = self._generator(seed)
        pixels = self._cropped(raw, rng).permute(2, 0, 1)[None]
        if pixels.shape[2:] != (self.size, self.size):
            # As Pillow's filter, to the last bit or two, in a third of the time on CPUs with AVX2.
            pixels = nn.functional.interpolate(pixels, (self.size, self.size), mode="bicubic", antialias=True)
        if self._is_mirrored(rng):
            pixels = pixels.flip(3)
        # Not contiguous: stacking copies the pixels anyway.
        return pixels[0]

    @property
    def takes_tensors(self) -> bool:
        """Whether images may be tensors. What a subclass puts in place of the call may expect PIL's methods."""
        return type(self).__call__ is PrepareImage.__call__

    def _cropped(self, raw: Any, rng: random.Random | None) -> Tensor:
        """Return what is cut out of the image, (height, width, channels)."""
        if isinstance(raw, Tensor) and raw.shape[2] != self.channels:
            raw = _as_image(raw)
        if isinstance(raw, Tensor):
            left, top, right, bottom = self._box((raw.shape[1], raw.shape[0]), rng)
            return raw[top:bottom, left:right]
        if not hasattr(raw, "convert"):
            raise ValueError(f"an image tower was given a {type(raw).__name__}: this side of the data does not hold images")
        mode = "L" if self.channels == 1 else "RGB"
        # Palette images must become colours before pixels are averaged.
        image = raw if raw.mode == mode else raw.convert(mode)
        box = self._box(image.size, rng)
        if box != (0, 0, *image.size):
            image = image.crop(box)
        width, height = image.size
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, self.channels)

    def sufficient_size(self, seed: int | None, width: int, height: int) -> tuple[float, float]:
        """Return the size to which an image can be reduced without enlarging what is cut out of it for this seed.

        >>> PrepareImage(224).sufficient_size(None, 640, 480)
        (298.66666666666663, 224.0)
        """
        left, top, right, bottom = self._box((width, height), self._generator(seed))
        scale = self.size / min(right - left, bottom - top)
        return width * scale, height * scale

    def choose_crop(self, seed: int | None, width: int, height: int) -> tuple[Box, bool]:
        """Return what is cut out of an image of this size for this seed, and whether it is mirrored, as when called."""
        rng = self._generator(seed)
        return self._box((width, height), rng), self._is_mirrored(rng)

    def _is_mirrored(self, rng: random.Random | None) -> bool:
        return self.flip and rng is not None and rng.random() < 0.5

    def _generator(self, seed: int | None) -> random.Random | None:
        """Return the generator of the augmentations, which draws the box first; None without augmentation."""
        return random.Random(seed) if seed is not None and (self.crop < 1 or self.flip) else None

    def _box(self, size: tuple[int, int], rng: random.Random | None) -> Box:
        return _central_square(*size) if rng is None or self.crop == 1 else _random_box(size, self.crop, rng)


def _as_image(pixels: Tensor) -> Any:
    """Return pixels (height, width, channels) as an image of PIL, which has its own way of making colours grey."""
    from PIL import Image

    height, width, channels = pixels.shape
    return Image.frombytes("L" if channels == 1 else "RGB", (width, height), pixels.numpy().tobytes())


def _central_square(width: int, height: int) -> Box:
    edge = min(width, height)
    left, top = (width - edge) // 2, (height - edge) // 2
    return left, top, left + edge, top + edge


def _random_box(size: tuple[int, int], smallest: float, rng: random.Random) -> Box:
    width, height = size
    for _ in range(TRIES):
        area = width * height * rng.uniform(smallest, 1)
        ratio = rng.uniform(*RATIOS)
        crop_width, crop_height = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 1 <= crop_width <= width and 1 <= crop_height <= height:
            left, top = round(rng.uniform(0, width - crop_width)), round(rng.uniform(0, height - crop_height))
            return left, top, left + crop_width, top + crop_height
    return _central_square(width, height)


class NormalizePixels(nn.Module):
    """Convert uint8 pixels to floats, normalised by a mean and a standard deviation that are given for the range [0, 1]."""

    scale: Tensor
    offset: Tensor

    def __init__(self, mean: Sequence[float] = (0.5,), std: Sequence[float] = (0.5,)) -> None:
        super().__init__()
        means, stds = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
        # Not persistent: the options of the tower decide them, not a file of weights.
        self.register_buffer("scale", 1 / (255 * stds), persistent=False)
        self.register_buffer("offset", -means / stds, persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.to(self.scale.dtype) * self.scale + self.offset


@dataclass(frozen=True)
class ByteTokenizer:
    """Convert a text to `length` int16 tokens: its UTF-8 bytes, an end token, padding. Needs no vocabulary and no download.

    A longer text is cut between two characters, and also gets an end token.
    drop: with a seed, this fraction of the bytes is negated, and `built_in.NGrams` skips the n-grams that begin there. The seed of
        the sample decides here, and not the module, so that the choice does not depend on the chunk or the number of ranks.

    >>> ByteTokenizer(6)("né", None)
    tensor([112, 197, 171,   1,   0,   0], dtype=torch.int16)
    """

    length: int = 80
    drop: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.length, int) or self.length < 2:
            raise ValueError(f"length is {self.length!r}: must be at least 2 bytes, one of them for the end token")
        if not 0 <= self.drop < 1:
            raise ValueError(f"drop is {self.drop}: must be a fraction of the bytes in [0, 1)")

    def __call__(self, raw: Any, seed: int | None) -> Tensor:
        check_is_text(raw)
        # Every character takes at least one byte. Lone surrogates become "?".
        data = raw[: self.length].encode("utf-8", "replace")
        if len(data) >= self.length:
            data = data[: self.length - 1].decode("utf-8", "ignore").encode("utf-8")
        tokens = [byte + FIRST_BYTE for byte in data]
        if self.drop and seed is not None:
            # Hashing the seed is faster than seeding a generator.
            random_bytes = hashlib.shake_128(str(seed).encode()).digest(len(tokens))
            limit = 256 * self.drop
            tokens = [-token if byte < limit else token for token, byte in zip(tokens, random_bytes, strict=True)]
        padding = [PADDING] * (self.length - len(tokens) - 1)
        return torch.frombuffer(array("h", [*tokens, END, *padding]), dtype=torch.int16)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text that the tokens encode."""
        return bytes(abs(int(token)) - FIRST_BYTE for token in tokens if abs(token) >= FIRST_BYTE).decode("utf-8")


@dataclass(frozen=True)
class ShapeTokens:
    """Stand for the tokenizer of a model of which only shapes are of interest: `length` tokens, whatever the text.

    masked: with an attention mask, as transformers' models take them.
    """

    length: int
    masked: bool = False

    def __call__(self, raw: Any, seed: int | None) -> Any:
        tokens = torch.ones(self.length, dtype=torch.int64)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)} if self.masked else tokens


def check_is_text(raw: Any) -> None:
    """Raise ValueError if a sample for a text tower is not a str."""
    if not isinstance(raw, str):
        raise ValueError(f"a text tower was given a {type(raw).__name__}: this side of the data does not hold texts")
