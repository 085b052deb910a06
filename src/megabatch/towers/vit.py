"""A vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .image_transform import Pixels, PrepareImage
from .tower import Tower
from .transformer import Block, through

POOLS = ("mean", "class", "flat")


def vit(
    dim: int,
    *,
    size: int = 32,
    patch: int = 8,
    channels: int = 3,
    width: int = 96,
    depth: int = 2,
    heads: int = 3,
    pool: str = "mean",
    crop: float = 1.0,
    flip: bool = False,
    checkpointing: bool = False,
) -> Tower:
    """A transformer over patches, for images of size × size pixels.

    patch: pixels of a patch's edge. width, depth, heads: of the transformer.
    pool: "mean" of all patches; a "class" token beside them; "flat" is all patches side by side, which keeps where things are: good
        for a few patches, too wide for many.
    channels, crop, flip: see `PrepareImage`.
    """
    if patch < 1 or size % patch:
        raise ValueError(f"size is {size} and patch is {patch}: an image is a whole number of patches wide")
    if pool not in POOLS:
        raise ValueError(f"pool is {pool!r}: must be one of {', '.join(POOLS)}")
    prepare = PrepareImage(size, channels, crop, flip)
    embed = nn.Linear(channels * patch**2, width)
    blocks = [Block(width, heads) for _ in range(depth)]
    module = VisionTransformer(embed, (size // patch) ** 2, blocks, pool, dim, checkpointing=checkpointing)
    return Tower(module, prepare, "image")


class VisionTransformer(nn.Module):
    """(rows, channels, size, size) bytes to (rows, dim), by way of `patches` positions."""

    def __init__(self, embed: nn.Linear, patches: int, blocks: list[Block], pool: str, dim: int, *, checkpointing: bool) -> None:
        super().__init__()
        width = embed.out_features
        self.pool = pool
        self.checkpointing = checkpointing
        self.edge = int(patches**0.5)
        self.pixels = Pixels()
        self.embed = embed
        self.positions = nn.Parameter(0.02 * torch.randn(patches, width))
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width)) if pool == "class" else None
        self.blocks = nn.ModuleList(blocks)
        pooled = patches * width if pool == "flat" else width
        self.norm = nn.LayerNorm(pooled)
        self.head = nn.Linear(pooled, dim, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(_patches(self.pixels(images), self.edge)) + self.positions
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x = through(self.blocks, x, checkpointing=self.checkpointing)
        x = {"mean": x.mean(1), "class": x[:, 0], "flat": x.flatten(1)}[self.pool]
        return self.head(self.norm(x))


def _patches(images: Tensor, edge: int) -> Tensor:
    """(rows, edge², values of a patch), for edge × edge patches."""
    rows, channels, size, _ = images.shape
    patch = size // edge
    grid = images.view(rows, channels, edge, patch, edge, patch)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(rows, edge**2, channels * patch**2)
