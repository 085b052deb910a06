"""The built-in towers, small enough to train on a CPU and without any dependency: `vit`, `cnn` and `text`.

No layer mixes rows (no batch norm), so that results do not depend on the chunk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .inputs import PADDING, ByteTokenizer, Kind, NormalizePixels, PrepareImage
from .library import TowerLibrary, TowerRequest
from .tower import BuiltTower

# Options that count layers and may be 0.
MAY_BE_ZERO = ("depth", "layers")
POOLS = ("mean", "class", "flat")
# The convolutions stop at feature maps of this edge, which are then flattened.
SMALLEST_MAP = 7
# Bytes that one position of the text transformer covers.
STRETCH = 8
# A prime for the rolling hash over tokens, and an odd number that spreads the hash over all buckets; products stay below 2 ** 63.
PRIME, SPREAD, BITS = 1_000_003, 0x5BD1_E995, 0x7FFF_FFFF


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
) -> BuiltTower:
    """Return a vision transformer for images of size × size pixels.

    patch: edge of a patch in pixels. width, depth, heads: of the transformer.
    pool: "mean" over all patches; "class" for a class token; "flat" for all patches concatenated, which keeps positions: good for
        few patches, too wide for many.
    channels, crop, flip: see `PrepareImage`.
    """
    if patch < 1 or size % patch:
        raise ValueError(f"size is {size} and patch is {patch}: patch must divide size")
    if pool not in POOLS:
        raise ValueError(f"pool is {pool!r}: must be one of {', '.join(POOLS)}")
    prepare = PrepareImage(size, channels, crop, flip)
    embed = nn.Linear(channels * patch**2, width)
    blocks = [TransformerBlock(width, heads) for _ in range(depth)]
    module = VisionTransformer(embed, (size // patch) ** 2, blocks, pool, dim, checkpointing=checkpointing)
    return BuiltTower(module, prepare, "image")


class VisionTransformer(nn.Module):
    """(rows, channels, size, size) uint8 to (rows, dim), over `patches` positions."""

    def __init__(
        self, embed: nn.Linear, patches: int, blocks: list[TransformerBlock], pool: str, dim: int, *, checkpointing: bool
    ) -> None:
        super().__init__()
        width = embed.out_features
        self.pool = pool
        self.checkpointing = checkpointing
        self.edge = int(patches**0.5)
        self.pixels = NormalizePixels()
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
        x = apply_blocks(self.blocks, x, checkpointing=self.checkpointing)
        x = {"mean": x.mean(1), "class": x[:, 0], "flat": x.flatten(1)}[self.pool]
        return self.head(self.norm(x))


def _patches(images: Tensor, edge: int) -> Tensor:
    """Return (rows, edge², values of a patch), for edge × edge patches."""
    rows, channels, size, _ = images.shape
    patch = size // edge
    grid = images.view(rows, channels, edge, patch, edge, patch)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(rows, edge**2, channels * patch**2)


def cnn(
    dim: int,
    *,
    size: int = 32,
    channels: int = 3,
    width: int = 32,
    depth: int = 0,
    hidden: int = 256,
    patch: int = 4,
    crop: float = 1.0,
    flip: bool = False,
    checkpointing: bool = False,
) -> BuiltTower:
    """Return convolutions for images of size × size pixels, with a perceptron over the flattened feature map.

    The first convolution maps overlapping patches, `patch` pixels apart, to `width` features; each further one halves the edge and
    doubles the features, until the map is no larger than 7 × 7. depth: residual convolutions at each size. hidden: width of the
    perceptron. channels, crop, flip: see `PrepareImage`.
    """
    if patch < 2 or patch % 2 or size % patch:
        raise ValueError(f"size is {size} and patch is {patch}: patch must be even and divide size")
    prepare = PrepareImage(size, channels, crop, flip)
    edge = size // patch
    stages = [_stage(nn.Conv2d(channels, width, 2 * patch, patch, patch // 2), depth)]
    while edge > SMALLEST_MAP:
        stages.append(_stage(nn.Conv2d(width, 2 * width, 3, 2, 1), depth))
        edge, width = (edge + 1) // 2, 2 * width
    module = ConvolutionalNetwork(stages, width * edge**2, hidden, dim, checkpointing=checkpointing)
    return BuiltTower(module, prepare, "image")


class ConvolutionalNetwork(nn.Module):
    """(rows, channels, size, size) uint8 to (rows, dim)."""

    def __init__(self, stages: list[nn.Sequential], flat: int, hidden: int, dim: int, *, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.pixels = NormalizePixels()
        self.stages = nn.ModuleList(stages)
        self.perceptron = nn.Sequential(nn.Linear(flat, hidden), Perceptron(hidden, 2, nn.ReLU), nn.LayerNorm(hidden))
        self.head = nn.Linear(hidden, dim, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        x = apply_blocks(self.stages, self.pixels(images), checkpointing=self.checkpointing)
        return self.head(self.perceptron(x.flatten(1)))


class ResidualConvolution(nn.Module):
    """x + relu(convolution(norm(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width)
        self.convolution = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolution(self.norm(x)).relu()


def _stage(convolution: nn.Conv2d, depth: int) -> nn.Sequential:
    features = convolution.out_channels
    return nn.Sequential(convolution, nn.GroupNorm(1, features), nn.ReLU(), *[ResidualConvolution(features) for _ in range(depth)])


def text(
    dim: int,
    *,
    length: int = 80,
    width: int = 128,
    depth: int = 0,
    heads: int = 4,
    layers: int = 1,
    buckets: int = 8192,
    ngrams: tuple[int, ...] = (2, 4),
    drop: float = 0.2,
    checkpointing: bool = False,
) -> BuiltTower:
    """Return a text tower over bytes: the mean of hashed n-gram embeddings, then a perceptron.

    A word has the same n-grams wherever it stands, so that what is learnt of it also serves in captions never seen.
    length: bytes that are read, the end token included; see `ByteTokenizer`. width: of the embeddings. layers: of the perceptron.
    buckets: embeddings that the n-grams share, by a hash. ngrams: their lengths in bytes.
    drop: fraction of the n-grams of a text that training leaves out, drawn anew each time.
    depth, heads: with a depth, means are taken over stretches of eight bytes, and a transformer attends over these stretches.
    """
    sizes = sorted(set(ngrams))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"ngrams is {ngrams!r}: must hold at least one length in bytes, each at least 1")
    if buckets < 2:
        raise ValueError(f"buckets is {buckets}: must be at least 2, one of them for padding")
    prepare = ByteTokenizer(length, drop)
    positions = -(-length // STRETCH) if depth else 1
    blocks = [TransformerBlock(width, heads) for _ in range(depth)]
    perceptrons = [Perceptron(width, 4, nn.ReLU) for _ in range(layers)]
    module = TextTower(NGrams(sizes, buckets, width), positions, blocks, perceptrons, dim, checkpointing=checkpointing)
    return BuiltTower(module, prepare, "text")


class NGrams(nn.Module):
    """(rows, length) tokens to (rows, positions, width): the mean embedding of the n-grams that begin in each stretch."""

    def __init__(self, sizes: list[int], buckets: int, width: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.vectors = nn.Parameter(0.1 * torch.randn(buckets, width))

    def forward(self, tokens: Tensor, positions: int) -> Tensor:
        tokens = F.pad(tokens, (0, -tokens.shape[1] % positions), value=PADDING)
        buckets = ngram_buckets(tokens, self.sizes, len(self.vectors))
        bags = buckets.view(len(tokens) * positions, -1)
        means = F.embedding_bag(bags, self.vectors, mode="mean", padding_idx=0)
        return means.view(len(tokens), positions, -1)


def ngram_buckets(tokens: Tensor, sizes: list[int], buckets: int) -> Tensor:
    """Return (rows, length, sizes): the bucket of the n-gram of each size that begins at each token.

    0 if none begins there: at padding, and at dropped bytes, which are negative.
    """
    length = tokens.shape[1]
    padded = F.pad(tokens.abs(), (0, sizes[-1] - 1), value=PADDING)
    rolling = torch.zeros_like(tokens)
    columns = []
    for size in range(1, sizes[-1] + 1):
        rolling = (rolling * PRIME + padded[:, size - 1 : size - 1 + length] + 1) & BITS
        if size in sizes:
            spread = ((rolling ^ rolling >> 15) * SPREAD & BITS) >> 7
            columns.append(1 + spread % (buckets - 1))
    return torch.stack(columns, dim=-1) * (tokens > PADDING).unsqueeze(-1)


class TextTower(nn.Module):
    """(rows, length) tokens of `ByteTokenizer` to (rows, dim)."""

    def __init__(
        self,
        ngrams: NGrams,
        positions: int,
        blocks: list[TransformerBlock],
        perceptrons: list[Perceptron],
        dim: int,
        *,
        checkpointing: bool,
    ) -> None:
        super().__init__()
        width = ngrams.vectors.shape[1]
        self.checkpointing = checkpointing
        self.stretches = positions
        self.ngrams = ngrams
        self.positions = nn.Parameter(0.02 * torch.randn(positions, width)) if blocks else None
        self.blocks = nn.ModuleList(blocks)
        self.perceptrons = nn.ModuleList(perceptrons)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, dim, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.long()
        x = self.ngrams(tokens, self.stretches)
        x = x[:, 0] if self.positions is None else self._attend(x + self.positions, tokens)
        x = apply_blocks(self.perceptrons, x, checkpointing=self.checkpointing)
        return self.head(self.norm(x))

    def _attend(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the mean over the stretches that hold text, after the transformer; the others are masked."""
        stretch = -(-tokens.shape[1] // self.stretches)
        mask = tokens[:, ::stretch] != PADDING
        x = apply_blocks(self.blocks, x, mask[:, None, None, :], checkpointing=self.checkpointing)
        weights = mask.to(x.dtype).unsqueeze(-1)
        return (weights * x).sum(dim=1) / weights.sum(dim=1)


class Perceptron(nn.Module):
    """x + MLP(norm(x)), with a hidden layer `ratio` times as wide."""

    def __init__(self, width: int, ratio: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, ratio * width)
        self.activation = activation()
        self.narrow = nn.Linear(ratio * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.activation(self.widen(self.norm(x))))


class TransformerBlock(nn.Module):
    """A pre-norm transformer block. `mask` is True at positions that may be attended to."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ValueError(f"width is {width} and heads is {heads}: heads must be at least 1 and divide width")
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.projections = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.perceptron = Perceptron(width, 4, nn.GELU)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, positions, width = x.shape
        projected = self.projections(self.norm(x)).view(rows, positions, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.perceptron(x + self.out(mixed.transpose(1, 2).reshape(rows, positions, width)))


def apply_blocks(blocks: Iterable[nn.Module], x: Tensor, *context: Tensor | None, checkpointing: bool) -> Tensor:
    """Apply the blocks one after another; with checkpointing, each is recomputed in the backward pass."""
    for block in blocks:
        x = checkpoint(block, x, *context, use_reentrant=False) if checkpointing else block(x, *context)
    return x


def built_in_tower(builder: Callable[..., BuiltTower], *, partner: str | None = None) -> TowerLibrary:
    """Return the record of one built-in tower, whose options are the keyword arguments of its builder."""
    name = builder.__name__
    kind: Kind = "text" if builder is text else "image"

    def build(request: TowerRequest) -> BuiltTower:
        return builder(request.dim, **_check_options(name, builder, request.options), checkpointing=request.checkpointing)

    return TowerLibrary(
        name, build, takes_model=False, partner=partner, plan_dim=128, independent_rows=True, kind_of=lambda model, side: kind
    )


def _check_options(name: str, builder: Callable[..., BuiltTower], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, each converted to the type of its default. ValueError if one is unknown or of another type."""
    defaults = {key: entry.default for key, entry in inspect.signature(builder).parameters.items()}
    del defaults["dim"], defaults["checkpointing"]
    checked = {}
    for key, value in options.items():
        if key not in defaults:
            raise ValueError(f"{name} has no option {key!r}; its options are {', '.join(defaults)}")
        checked[key] = _as_default(key, value, defaults[key])
        least = 0 if key in MAY_BE_ZERO else 1
        if type(defaults[key]) is int and value < least:
            raise ValueError(f"option {key} is {value!r}: must be at least {least}")
    return checked


def _as_default(key: str, value: Any, default: Any) -> Any:
    if isinstance(default, tuple) and isinstance(value, (list, tuple)):
        return tuple(_as_default(key, entry, default[0]) for entry in value)
    # `type`, not isinstance: to Python, True is an int.
    if type(value) is type(default) or (isinstance(default, float) and type(value) is int):
        return type(default)(value)
    raise ValueError(f"option {key} is {value!r}: must be of the type of its default, {default!r}")


VIT = built_in_tower(vit, partner="text")
CNN = built_in_tower(cnn, partner="text")
TEXT = built_in_tower(text, partner="x")
