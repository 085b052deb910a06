"""Towers that train in milliseconds, and some that misbehave; runs name them as "small_towers:…"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megabatch.towers.inputs import PrepareImage
from megabatch.towers.tower import BuiltTower

WIDTH = 16


class Bytes(nn.Module):
    """The mean of the embeddings of a text's bytes, through a small network."""

    def __init__(self, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(256, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(WIDTH, dim))

    def forward(self, codes: Tensor) -> Tensor:
        return self.layers(self.table(codes.long()).mean(1))


class Greedy(Bytes):
    """Runs out of memory at more than `limit` rows."""

    def __init__(self, dim: int, limit: int) -> None:
        super().__init__(dim)
        self.limit = limit

    def forward(self, codes: Tensor) -> Tensor:
        if len(codes) > self.limit:
            raise torch.OutOfMemoryError(f"out of memory: {len(codes)} rows, the limit is {self.limit}")
        return super().forward(codes)


class Poisoned(Bytes):
    """Returns NaN for texts that begin with an X."""

    def forward(self, codes: Tensor) -> Tensor:
        embeddings = super().forward(codes)
        return torch.where((codes[:, :1] == ord("X")), torch.nan, embeddings)


class Normed(Bytes):
    """Has batch normalisation."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, codes: Tensor) -> Tensor:
        return self.norm(super().forward(codes))


class Patches(nn.Module):
    """Patches of an image, merged once, and their mean: a convolution on colours, and one on features."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.merge = nn.Conv2d(WIDTH, dim, 2, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.merge(self.embed(images / 255).relu()).mean((2, 3))


def prepare(text: str, seed: int | None) -> Tensor:
    codes = text.encode()[:WIDTH].ljust(WIDTH, b" ")
    return torch.tensor(list(codes), dtype=torch.uint8)


def text(dim: int = 8, **options: Any) -> BuiltTower:
    return BuiltTower(Bytes(dim, **options), prepare, "text")


def patches(dim: int = 8) -> BuiltTower:
    return BuiltTower(Patches(dim), PrepareImage(16), "image")


def greedy(dim: int = 8, limit: int = 8) -> BuiltTower:
    return BuiltTower(Greedy(dim, limit), prepare, "text")


def normed(dim: int = 8) -> BuiltTower:
    return BuiltTower(Normed(dim), prepare, "text")


def poisoned(dim: int = 8) -> BuiltTower:
    return BuiltTower(Poisoned(dim), prepare, "text")
