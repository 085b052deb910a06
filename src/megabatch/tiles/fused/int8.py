"""Backward's similarities in eight bits: what the kernels of kernels/eight.py are given, and make. Legend: ../contract.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .kernels.backward_from_saved_exp import GRAIN
from .kernels.int8 import BLOCK, correct_kernel, round_kernel
from .launch import Launch, Panel, cdiv, part

ROUNDED_ROWS = 64
CORRECTED_ROWS, CORRECTED_TILES = 32, 8
# Gradients in logits are large from this part of a typical gradient in a positive's logit on.
LARGE = 1 / 128


class Rounded(NamedTuple):
    """Rows of embeddings, turned and in eight bits, and the step of each, readable some rows beyond their end."""

    values: Tensor
    steps: Tensor


class Operands(NamedTuple):
    """The embeddings of a panel, and above which limit a gradient is computed again."""

    x: Rounded
    y: Rounded
    limit: Tensor


class Eight:
    """What panels are multiplied from, one after another. y is rounded once for all, x once for a row of panels."""

    def __init__(self, launch: Launch, dpos_M: Tensor, beyond: int) -> None:
        """dpos_M: the gradients in the positives' logits; beyond: how many rows."""
        self.launch, self.beyond = launch, beyond
        # A mean in which each counts by its size: pairs that are learnt already, however many, do not lower it.
        self.limit = dpos_M.square().sum() / dpos_M.abs().sum() * LARGE
        self.r: slice | None = None
        self.y: Rounded | None = None

    def operands(self, p: Panel) -> Operands:
        if self.r != p.r:
            self.r, self.x = p.r, rounded(part(self.launch.x_MD, p.r), self.beyond)
        if self.y is None:
            self.y = rounded(self.launch.y_ND, self.beyond)
        return Operands(self.x, Rounded(part(self.y.values, p.c), self.y.steps[p.c.start :]), self.limit)


def rounded(t: Tensor, beyond: int) -> Rounded:
    rows, width = t.shape
    values = t.new_empty(rows, cdiv(width, BLOCK.value) * BLOCK.value, dtype=torch.int8)
    steps = t.new_zeros(rows + beyond, dtype=torch.float32)
    round_kernel[(cdiv(rows, ROUNDED_ROWS),)](t, values, steps, rows, WIDTH=width, R=ROUNDED_ROWS)
    return Rounded(values, steps)


def correct(
    launch: Launch,
    p: Panel,
    scale: Tensor,
    panel: Tensor,
    large: Tensor,
    tile: int,
    limit: Tensor,
    gains: tuple[Tensor, Tensor | None],
) -> None:
    """Computes large gradients of a panel again. large: marks of tiles, so wide, for their rows (tile, row); gains: lifted."""
    width, grid = launch.x_MD.shape[1], (cdiv(p.rows, CORRECTED_ROWS), cdiv(large.shape[0], CORRECTED_TILES))
    correct_kernel[grid](
        part(launch.x_MD, p.r), part(launch.y_ND, p.c), scale, panel, large, limit, *gains, p.rows, p.columns,
        panel.stride(0) // GRAIN.value, WIDTH=width, WIDE=1 << (width - 1).bit_length(), N=tile, R=CORRECTED_ROWS,
        TILES=CORRECTED_TILES, num_warps=1,
    )  # fmt: skip
