"""The memory of the contrastive losses: what `clip_loss`, `siglip_loss` and `infonce_loss` allocate, in order.

x and y have M rows each, of width D; the similarity matrix exists one tile at a time, within the workspace.
"""

from __future__ import annotations

from typing import Protocol

from ...objectives import BY_COST_NAME
from .setup import Setup

# The default workspace of the backends.
DEFAULT_WORKSPACE = {"cuda": 512 * 2**20, "cpu": 32 * 2**20}
# A tile has 128 rows or more. Its sums are two fp32 numbers per row or column, twice: a run also counts the rank of each positive.
PARTIAL_BYTES, TILE_SIDE, PARTIALS = 8, 128, 2
FP32, INT64 = 4, 8
# Matrices per tile that exist at once: kernels keep one; PyTorch's operations similarities, exponentials and masks besides.
TILE_MATRICES = {"cuda": 1, "cpu": 4}
# The embedding width, by bytes per element, from which on kernels save exponentials for the gradient.
KEPT_WIDTH = {2: 384, 4: 64}
# The sums then have the workspace divided by this.
BESIDE_KEPT = 4


class MemoryLedger(Protocol):
    """Where allocations are written down: `contrastive.ComposedStep` is one."""

    def allocate(self, size: int, part: str) -> int: ...

    def free(self, index: int) -> None: ...


class LossMemory:
    """Allocates and frees in a ledger what the loss does; the embeddings are already there."""

    def __init__(self, ledger: MemoryLedger, setup: Setup, rows: int, width: int, element_bytes: int) -> None:
        self.ledger, self.setup = ledger, setup
        self.rows, self.element_bytes = rows, element_bytes
        self.block_bytes = rows * width * element_bytes
        self.gradient_bytes = rows * width * FP32
        self.workspace = setup.workspace if setup.workspace is not None else DEFAULT_WORKSPACE[setup.device]
        self.saves_exponentials = setup.device == "cuda" and width >= KEPT_WIDTH.get(element_bytes, width + 1)
        objective = BY_COST_NAME[setup.objective]
        self.gradients_in_forward = objective.gradients_in_forward
        self.compares_sides = objective.same_sides(setup.directions) > 0
        self._saved: list[int] = []
        self._saved_exponentials: list[int] = []

    def forward(self) -> None:
        """The sums over the other pairs; the sigmoid loss computes its gradients in the same pass."""
        sums = [self.ledger.allocate(PARTIALS * self.rows * (2 * FP32 + INT64), "embeddings") for _ in ("rows", "columns")]
        if self.gradients_in_forward:
            self._saved = [*self._gradients(), self.ledger.allocate(self.rows * FP32, "embeddings")]
        else:
            ring = self._ring(2 * self.block_bytes)
            workspace = self.workspace
            if self.saves_exponentials:
                # The first tile of the gradient is allocated here, for its exponentials, and the sums have less workspace.
                self._saved_exponentials = [self.ledger.allocate(self._gradient_tile(), "loss tiles")]
                workspace //= BESIDE_KEPT
            partials = self._within(workspace, 2 * PARTIALS * PARTIAL_BYTES * self.rows * self.rows // TILE_SIDE)
            self.ledger.free(self.ledger.allocate(partials, "loss tiles"))
            self._free_all(ring)
            # Losses, gradients with respect to the positives' logits, and four vectors for each side's softmax.
            self._saved = [self.ledger.allocate(10 * self.rows * FP32, "embeddings")]
        self._free_all(sums)

    def backward(self) -> list[int]:
        """Return the allocations of the embeddings' gradients."""
        gradients = [] if self.gradients_in_forward else self._gradients()
        # Half-precision embeddings get their gradients in fp32 first; the sigmoid loss keeps its gradients for another backward.
        if self.gradients_in_forward or self.element_bytes != FP32:
            results = [self.ledger.allocate(self.block_bytes, "embeddings") for _ in ("x", "y")]
            self._free_all(gradients)
            gradients = results
        self._free_all(self._saved)
        return gradients

    def _gradients(self) -> list[int]:
        """Return the allocations of the gradients in fp32, computed from tiles of the gradient with respect to the logits."""
        gradients = [self.ledger.allocate(self.gradient_bytes, "embeddings") for _ in ("x", "y")]
        # The visited block and the arriving one; the gradients of both and of x's rows, computed here and in flight. Where a side
        # is compared with itself, x travels too.
        ring = self._ring((2 * self.block_bytes + 3 * self.gradient_bytes) * (2 if self.compares_sides else 1))
        self._free_all(self._saved_exponentials or [self.ledger.allocate(self._gradient_tile(), "loss tiles")])
        self._saved_exponentials = []
        if self.compares_sides:
            # The gradient of a side compared with itself is computed apart, and then added.
            apart = [
                self.ledger.allocate(self.gradient_bytes, "embeddings"),
                self.ledger.allocate(self._gradient_tile(), "loss tiles"),
            ]
            self._free_all(apart)
        self._free_all(ring)
        return gradients

    def _gradient_tile(self) -> int:
        return self._within(self.workspace, min(self.element_bytes, FP32) * self.rows * self.rows)

    def _within(self, workspace: int, needed: int) -> int:
        return min(workspace, TILE_MATRICES[self.setup.device] * needed)

    def _ring(self, in_flight: int) -> list[int]:
        return [self.ledger.allocate(in_flight, "ring buffers")] if self.setup.ranks > 1 else []

    def _free_all(self, indices: list[int]) -> None:
        for index in indices:
            self.ledger.free(index)
