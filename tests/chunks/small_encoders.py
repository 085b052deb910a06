"""Towers and batches for tests of encoders, and a chunk loop as one would write it by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 4
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def tower(width: int = 6, *, dropout: float = 0.3, seed: int = 0, out: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 16), nn.Dropout(dropout), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, out))


def batch(rows: int = 10, width: int = 6, seed: int = 1) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def in_chunks(encoder: Callable[..., Any]) -> Callable[..., Any]:
    """Return the encoder over chunks, without recomputation, as one would write it by hand."""

    def call(x: Tensor) -> Tensor:
        pieces = []
        for piece in x.split(CHUNK):
            torch.clear_autocast_cache()
            pieces.append(encoder(piece))
        return torch.cat(pieces)

    return call


def gradients(module: nn.Module) -> list[Tensor]:
    return [torch.zeros(0) if p.grad is None else p.grad for p in module.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
