"""A text tower over bytes: hashed n-grams, and a transformer over stretches of them where wanted."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tokenizer import PADDING, ByteTokenizer
from .tower import Tower
from .transformer import Block, Perceptron, through

# Bytes that one position of the transformer holds.
STRETCH = 8
# A prime for rolling over tokens, and an odd number that spreads the result over all buckets; products stay below 2 ** 63.
PRIME, SPREAD, BITS = 1_000_003, 0x5BD1_E995, 0x7FFF_FFFF


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
) -> Tower:
    """Sequences of bytes, each with a vector of its own, averaged, then a perceptron: word by word, in any order.

    A word has the same n-grams wherever it stands, so what is learnt of it serves in captions never seen.
    length: bytes that are read, the end included; see `ByteTokenizer`. width: of the vectors. layers: of the perceptron.
    buckets: vectors that the n-grams share, by a hash. ngrams: their lengths in bytes.
    drop: share of the n-grams that training leaves out of a text, another one each time.
    depth, heads: with a depth, averages are taken over stretches of eight bytes, and a transformer lets them see each other first.
    """
    sizes = sorted(set(ngrams))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"ngrams is {ngrams!r}: lengths in bytes, at least one and each at least 1")
    if buckets < 2:
        raise ValueError(f"buckets is {buckets}: at least 2, one of them for padding")
    prepare = ByteTokenizer(length, drop)
    positions = -(-length // STRETCH) if depth else 1
    blocks = [Block(width, heads) for _ in range(depth)]
    perceptrons = [Perceptron(width, 4, nn.ReLU) for _ in range(layers)]
    module = TextTower(NGrams(sizes, buckets, width), positions, blocks, perceptrons, dim, checkpointing=checkpointing)
    return Tower(module, prepare, "text")


class NGrams(nn.Module):
    """(rows, length) tokens to (rows, positions, width): the mean vector of the n-grams that begin in each of equal stretches."""

    def __init__(self, sizes: list[int], buckets: int, width: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.vectors = nn.Parameter(0.1 * torch.randn(buckets, width))

    def forward(self, tokens: Tensor, positions: int) -> Tensor:
        tokens = F.pad(tokens, (0, -tokens.shape[1] % positions), value=PADDING)
        buckets = hashes(tokens, self.sizes, len(self.vectors))
        bags = buckets.view(len(tokens) * positions, -1)
        means = F.embedding_bag(bags, self.vectors, mode="mean", padding_idx=0)
        return means.view(len(tokens), positions, -1)


def hashes(tokens: Tensor, sizes: list[int], buckets: int) -> Tensor:
    """(rows, length, sizes): the bucket of the n-gram of each size that begins at each token.

    0 where none does: at padding, and at bytes that are dropped, which are negative.
    """
    length = tokens.shape[1]
    padded = F.pad(tokens.abs(), (0, sizes[-1] - 1), value=PADDING)
    rolling = torch.zeros_like(tokens)
    found = []
    for size in range(1, sizes[-1] + 1):
        rolling = (rolling * PRIME + padded[:, size - 1 : size - 1 + length] + 1) & BITS
        if size in sizes:
            spread = ((rolling ^ rolling >> 15) * SPREAD & BITS) >> 7
            found.append(1 + spread % (buckets - 1))
    return torch.stack(found, dim=-1) * (tokens > PADDING).unsqueeze(-1)


class TextTower(nn.Module):
    """(rows, length) tokens of `ByteTokenizer` to (rows, dim)."""

    def __init__(
        self, ngrams: NGrams, positions: int, blocks: list[Block], perceptrons: list[Perceptron], dim: int, *, checkpointing: bool
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
        x = through(self.perceptrons, x, checkpointing=self.checkpointing)
        return self.head(self.norm(x))

    def _attend(self, x: Tensor, tokens: Tensor) -> Tensor:
        """The mean over the stretches that hold text, after the transformer; the others are not seen."""
        stretch = -(-tokens.shape[1] // self.stretches)
        real = tokens[:, ::stretch] != PADDING
        x = through(self.blocks, x, real[:, None, None, :], checkpointing=self.checkpointing)
        share = real.to(x.dtype).unsqueeze(-1)
        return (share * x).sum(dim=1) / share.sum(dim=1)
