"""The memory of the contrastive losses: what `clip_loss` and `siglip_loss` allocate, in their order.

M rows of x and as many of y, D wide; the similarity matrix exists a tile at a time, within the working memory.
"""

from __future__ import annotations

from typing import Protocol

from ...objectives import BY_COST_NAME
from .setup import Setup

# What the backends take where nothing is given.
DEFAULT_WORKSPACE = {"cuda": 512 * 2**20, "cpu": 32 * 2**20}
# A tile's sums are two numbers of fp32 for each row or column of its 128 or more, of two kinds: a run also ranks each positive.
PART_BYTES, TILE_SIDE, KINDS = 8, 128, 2
FP32, INT64 = 4, 8
# Matrices of a tile that are there at once: kernels hold one, PyTorch's operations similarities, exponentials and masks beside it.
AT_ONCE = {"cuda": 1, "cpu": 4}
# From which width on kernels keep exponentials for the gradient, by bytes of an element.
KEPT_WIDTH = {2: 384, 4: 64}
# The part of the working memory that the sums then have beside it.
BESIDE_KEPT = 4


class Ledger(Protocol):
    def hold(self, size: int, kind: str) -> int: ...

    def release(self, number: int) -> None: ...


class LossMemory:
    """Holds and releases in a ledger what the loss does, whose embeddings are there."""

    def __init__(self, ledger: Ledger, setup: Setup, rows: int, width: int, element_bytes: int) -> None:
        self.ledger, self.setup = ledger, setup
        self.rows, self.element_bytes = rows, element_bytes
        self.block_bytes = rows * width * element_bytes
        self.gradient_bytes = rows * width * FP32
        self.workspace = setup.workspace if setup.workspace is not None else DEFAULT_WORKSPACE[setup.device]
        self.keeps = setup.device == "cuda" and width >= KEPT_WIDTH.get(element_bytes, width + 1)
        self._saved: list[int] = []
        self._kept: list[int] = []

    def forward(self) -> None:
        """The sums over the other pairs; the sigmoid loss has its gradients from the same pass."""
        sums = [self.ledger.hold(KINDS * self.rows * (2 * FP32 + INT64), "embeddings") for _ in ("rows", "columns")]
        if BY_COST_NAME[self.setup.objective].gradients_in_forward:
            self._saved = [*self._products(), self.ledger.hold(self.rows * FP32, "embeddings")]
        else:
            ring = self._ring(2 * self.block_bytes)
            room = self.workspace
            if self.keeps:
                # The first tile of the gradient begins here, with exponentials, and the sums have less.
                self._kept = [self.ledger.hold(self._gradient_tile(), "loss tiles")]
                room //= BESIDE_KEPT
            parts = self._within(room, 2 * KINDS * PART_BYTES * self.rows * self.rows // TILE_SIDE)
            self.ledger.release(self.ledger.hold(parts, "loss tiles"))
            self._release(ring)
            # Losses, gradients in the positives' logits, and four vectors for each side's softmax.
            self._saved = [self.ledger.hold(10 * self.rows * FP32, "embeddings")]
        self._release(sums)

    def backward(self) -> list[int]:
        """The gradients of the embeddings."""
        kept = BY_COST_NAME[self.setup.objective].gradients_in_forward
        found = [] if kept else self._products()
        # Half-precision embeddings get their gradients in fp32 first, and the sigmoid loss keeps its own for another backward.
        if kept or self.element_bytes != FP32:
            new = [self.ledger.hold(self.block_bytes, "embeddings") for _ in ("x", "y")]
            self._release(found)
            found = new
        self._release(self._saved)
        return found

    def _products(self) -> list[int]:
        """The gradients in fp32, from tiles of the gradient in the logits."""
        gradients = [self.ledger.hold(self.gradient_bytes, "embeddings") for _ in ("x", "y")]
        # The block that is visited and the one that arrives; what was found for them and for x's rows, here and on its way.
        ring = self._ring(2 * self.block_bytes + 3 * self.gradient_bytes)
        self._release(self._kept or [self.ledger.hold(self._gradient_tile(), "loss tiles")])
        self._kept = []
        self._release(ring)
        return gradients

    def _gradient_tile(self) -> int:
        return self._within(self.workspace, min(self.element_bytes, FP32) * self.rows * self.rows)

    def _within(self, room: int, wanted: int) -> int:
        return min(room, AT_ONCE[self.setup.device] * wanted)

    def _ring(self, travelling: int) -> list[int]:
        return [self.ledger.hold(travelling, "ring buffers")] if self.setup.ranks > 1 else []

    def _release(self, numbers: list[int]) -> None:
        for number in numbers:
            self.ledger.release(number)
