"""What towers are stacked of: transformer blocks and perceptrons, normalised before each part."""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Perceptron(nn.Module):
    """x + a perceptron of it, `ratio` times as wide inside."""

    def __init__(self, width: int, ratio: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, ratio * width)
        self.activation = activation()
        self.narrow = nn.Linear(ratio * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.activation(self.widen(self.norm(x))))


class Block(nn.Module):
    """Attention of every position to every other, and a perceptron. `mask` is True where a position may be looked at."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ValueError(f"width is {width} and heads is {heads}: each head takes an equal share of the width")
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


def through(blocks: Iterable[nn.Module], x: Tensor, *context: Tensor | None, checkpointing: bool) -> Tensor:
    """x after one block after the other; with checkpointing, each is computed again in the backward pass."""
    for block in blocks:
        x = checkpoint(block, x, *context, use_reentrant=False) if checkpointing else block(x, *context)
    return x
