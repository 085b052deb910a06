"""What an encoder is to a run: a module, and how samples are made ready for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import nn


class Tower(NamedTuple):
    """One encoder.

    module: takes what `prepare` made, stacked along a new first dimension, and returns (rows, dim) embeddings, not normalised.
        Images arrive as bytes (uint8, channels first) and are scaled and normalised inside, so that they travel small.
    prepare: prepare(raw, seed) makes one sample ready, in a worker process: an image or a text becomes a tensor, or a dict of
        tensors, of one fixed shape. `seed` is an integer that decides every random choice of an augmentation; None: no augmentation
        (evaluation). Can be pickled.
    kind: what `prepare` takes.
    """

    module: nn.Module
    prepare: Callable[[Any, int | None], Any]
    kind: Literal["image", "text"]
