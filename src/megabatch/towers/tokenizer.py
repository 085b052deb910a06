"""Texts as bytes: every text of every language, nothing to learn and nothing to download."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PADDING, END = 0, 1
FIRST_BYTE = 2
VOCABULARY = FIRST_BYTE + 256


@dataclass(frozen=True)
class ByteTokenizer:
    """Makes of a text a tensor of `length` tokens: its bytes in UTF-8, an end, padding.

    A longer text is cut between two characters, and has an end too. Tokens are 16 bits, to travel small.
    drop: with a seed, this share of the bytes is negated: `text.NGrams` leaves out what begins there. Chosen here, by the sample's
        seed, and not in the module, it is the same whatever the chunk and the number of ranks.

    >>> ByteTokenizer(6)("né", None)
    tensor([112, 197, 171,   1,   0,   0], dtype=torch.int16)
    """

    length: int = 80
    drop: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.length, int) or self.length < 2:
            raise ValueError(f"length is {self.length!r}: at least 2 bytes, one of them for the end")
        if not 0 <= self.drop < 1:
            raise ValueError(f"drop is {self.drop}: a share of the bytes lies in [0, 1)")

    def __call__(self, raw: Any, seed: int | None) -> Tensor:
        if not isinstance(raw, str):
            raise ValueError(f"a tower for texts was given a {type(raw).__name__}: this side of the data is no text")
        # A character takes a byte or more, so that nothing after this many can fit. Half a character (a surrogate) becomes "?".
        data = raw[: self.length].encode("utf-8", "replace")
        if len(data) >= self.length:
            data = data[: self.length - 1].decode("utf-8", "ignore").encode("utf-8")
        tokens = [byte + FIRST_BYTE for byte in data]
        if self.drop and seed is not None:
            # A hash gives random bytes of a seed sooner than a generator is seeded.
            chances = hashlib.shake_128(str(seed).encode()).digest(len(tokens))
            tokens = [-token if chance < 256 * self.drop else token for token, chance in zip(tokens, chances, strict=True)]
        padding = [PADDING] * (self.length - len(tokens) - 1)
        return torch.frombuffer(array("h", [*tokens, END, *padding]), dtype=torch.int16)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text that the tokens hold."""
        return bytes(abs(int(token)) - FIRST_BYTE for token in tokens if abs(token) >= FIRST_BYTE).decode("utf-8")
