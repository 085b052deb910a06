"""Input features of the towers: counts of hashed byte trigrams and words of a text, or the pixels of an image."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.study.data import WIDTH, Arrays

# Hashed features of a text. A power of two.
TEXT_FEATURES = 2048
# Rows that are hashed at once: their counts take 512 MiB.
ROWS = 65_536
# Odd 64-bit multipliers, written as signed integers.
SPREAD, WORD = -7046029254386353131, 6364136223846793005


class Side(NamedTuple):
    """The features of one side of all pairs. values: (pairs, features) uint8. factor: (pairs, 1) that makes their mean square 1."""

    values: Tensor
    factor: Tensor


class Features(NamedTuple):
    """Both sides of a source on a device; training pairs first, then validation, then test."""

    x: Side
    y: Side
    train: int
    validation: int
    test: int


def load(arrays: Arrays, device: torch.device) -> Features:
    """Return the features of a source on a device."""
    return Features(_side(arrays.x, device), _side(arrays.y, device), arrays.train, arrays.validation, arrays.test)


def _side(values: object, device: torch.device) -> Side:
    stored = torch.tensor(values)
    if stored.shape[1] == WIDTH:
        stored = torch.cat([text_counts(part.to(device)) for part in stored.split(ROWS)])
    stored = stored.to(device)
    norm = torch.cat([part.float().square().mean(1, keepdim=True) for part in stored.split(ROWS)])
    return Side(stored, norm.clamp_min(1e-6).rsqrt())


def text_counts(text: Tensor, features: int = TEXT_FEATURES) -> Tensor:
    """Return how often each hashed trigram and word occurs in rows of bytes, as uint8.

    Letters count in lower case. A trigram is a byte with both neighbours; a word is a run of letters, digits and bytes above 127.
    """
    lower = text.long()
    lower = torch.where((lower >= 65) & (lower <= 90), lower + 32, lower)
    padded = torch.nn.functional.pad(lower, (1, 1))
    trigrams = (padded[:, :-2] << 16) + (padded[:, 1:-1] << 8) + padded[:, 2:]
    in_word = ((lower >= 97) & (lower <= 122)) | ((lower >= 48) & (lower <= 57)) | (lower >= 128)
    ends = in_word & ~torch.nn.functional.pad(in_word, (0, 1))[:, 1:]
    hashes, words = torch.zeros_like(lower[:, 0]), []
    for column in range(lower.shape[1]):
        hashes = torch.where(in_word[:, column], hashes * WORD + lower[:, column] + 1, 0)
        words.append(hashes)
    ids = torch.cat([trigrams * SPREAD, torch.stack(words, 1) * SPREAD + 1], 1)
    counts = torch.zeros(len(text), features, dtype=torch.int32, device=text.device)
    # The high bits of a product depend on all bits of its factors.
    counts.scatter_add_(1, (ids >> 40) & (features - 1), torch.cat([lower > 0, ends], 1).int())
    return counts.clamp(max=255).to(torch.uint8)
