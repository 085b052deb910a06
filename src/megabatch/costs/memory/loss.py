"""The memory of the contrastive losses of a run: what they allocate, in order.

x has M rows of width D and y has M, and more with hard negatives; the similarity matrix exists one tile at a time, within the
workspace. `OneWidthLoss` is a loss of one width; `LossMemory` adds Matryoshka and the spread-out regulariser.
"""

from __future__ import annotations

import math
from typing import Protocol

from ...objectives import BY_COST_NAME, CROSS_DIRECTIONS
from ...tiles.panels import panel_size
from .setup import Setup

# The default workspace of the backends: on CUDA at least this, and more on devices with more memory.
MIN_WORKSPACE = {"cuda": 512 * 2**20, "cpu": 64 * 2**20}
WORKSPACE_SHARE = 17
# A tile has 128 rows or more. Its sums are two fp32 numbers per row or column, twice: a run also counts the rank of each positive.
PARTIAL_BYTES, TILE_SIDE, PARTIALS = 8, 128, 2
FP32, INT64, BOOL = 4, 8, 1
# The embedding width, by bytes per element, from which on kernels save exponentials for the gradient.
KEPT_WIDTH = {2: 384, 4: 64}
# The sums then have the workspace divided by this.
BESIDE_KEPT = 4
# PyTorch's operations on a CPU. A tile has two matrices; with masks or ranks it is cut as if it had four. Ranks compare its
# elements and count them as 64-bit numbers.
MATRICES, MATRICES_WITH_MASKS, RANK_BYTES = 2, 4, BOOL + INT64
# Matryoshka's kernels for all widths together: on devices of this capability, with every width a multiple of this.
PREFIX_CAPABILITY, PREFIX_STEP = (9, 0), 16
# The rows and columns of its tiles, in forward and in backward; a panel of forward has no more columns than these bytes hold.
PREFIX_STATS_TILE, PREFIX_GRADIENT_TILE, CACHED_BYTES = (128, 128), (64, 128), 24 * 2**20
# Widths up to this one have no panels in backward, except with fp16; the others share this much of the workspace.
NARROW_WIDTH, PANELS_WORKSPACE = 128, 2**30
# Its vectors for each width: what forward leaves of rows and of columns, and what backward adds.
PREFIX_SAVED, PREFIX_ADDED = (6, 4), 6
# Rows that are computed at once: when the positives' part is added to a gradient, when a gradient is multiplied with its
# embeddings for the scale, when hard negatives are compared with their own row, and of a side compared with itself.
FINISHED_ROWS, SLOPE_ROWS, OWN_ROWS = 4096, 8192, 8192
SYMMETRIC_ROWS = {"cpu": 1024, "cuda": 16384}


class MemoryLedger(Protocol):
    """Where allocations are written down: `contrastive.ComposedStep` is one."""

    def allocate(self, size: int, part: str) -> int: ...

    def free(self, index: int) -> None: ...


def default_workspace(device: str, memory: int | None) -> int:
    """Return the workspace that a loss takes by default on a device with that memory; None: the least."""
    if device != "cuda" or memory is None:
        return MIN_WORKSPACE[device]
    # The largest power of two within its share.
    return max(MIN_WORKSPACE[device], 1 << (memory // WORKSPACE_SHARE).bit_length() >> 1)


class OneWidthLoss:
    """Allocates and frees in a ledger what a loss of one width does; the embeddings are already there."""

    def __init__(self, ledger: MemoryLedger, setup: Setup, rows: int, width: int, element_bytes: int) -> None:
        self.ledger, self.setup, self.options = ledger, setup, setup.loss_options
        self.rows, self.documents = rows, rows * (1 + self.options.negatives)
        self.width, self.element_bytes = width, element_bytes
        self.workspace = setup.workspace or default_workspace(setup.device, setup.device_memory)
        self.saves_exponentials = (
            setup.device == "cuda" and self.options.in_batch and width >= KEPT_WIDTH.get(element_bytes, width + 1)
        )
        objective = BY_COST_NAME[setup.objective]
        self.gradients_in_forward = objective.gradients_in_forward
        # Without saved exponentials a larger workspace would bring nothing.
        self.unsaved_workspace = min(self.workspace, MIN_WORKSPACE[setup.device]) if setup.device == "cuda" else self.workspace
        if not self.saves_exponentials or self.gradients_in_forward:
            self.workspace = self.unsaved_workspace
        self.has_directions = bool(objective.directions)
        # A loss over directions compares the positives and the hard negatives one after the other.
        self.columns = max(rows, self.documents - rows) if self.has_directions else self.documents
        self.two_products = set(CROSS_DIRECTIONS) <= set(self.options.directions or objective.directions)
        self.compares_sides = objective.same_sides(self.options.directions) > 0
        self._saved: list[int] = []
        self._saved_exponentials: list[int] = []
        # The gradients in fp32, if forward computes them.
        self._computed: list[int] = []

    def forward(self) -> None:
        """The sums over the other pairs; the sigmoid loss computes its gradients in the same pass."""
        sums = [self._allocate(PARTIALS * rows * (2 * FP32 + INT64)) for rows in (self.rows, self.documents)]
        if self.gradients_in_forward:
            self._saved = [*self._gradients(ranked=True), self._allocate(self.rows * FP32)]
        else:
            ring = self._ring(2 * self.documents * self.width * self.element_bytes)
            workspace = self.workspace
            if self.saves_exponentials:
                # The first tile of the gradient is allocated here, for its exponentials, and the sums have less workspace.
                self._saved_exponentials = [self._allocate(self._gradient_tile(), "loss tiles")]
                workspace //= BESIDE_KEPT
            self._touch(self.sums_tile(workspace), "loss tiles")
            if self.compares_sides:
                self._touch(self._side_tile(), "loss tiles")
            self._free_all(ring)
            # Losses, gradients with respect to the positives' logits, and four vectors for each side's softmax.
            self._saved = [self._allocate(5 * (self.rows + self.documents) * FP32)]
        self._free_all(sums)
        if self._saved_exponentials and self.setup.ranks == 1:
            # Without other ranks, forward uses the exponentials itself.
            self._computed = self._gradients()

    def backward(self) -> list[int]:
        """Return the allocations of the embeddings' gradients."""
        gradients = [] if self.gradients_in_forward else self._computed or self._gradients()
        results = []
        for side, rows in enumerate((self.rows, self.documents)):
            # Gradients are finished in place, except for those that are in fp32 first, that another backward needs, or that are
            # computed apart for the hard negatives.
            in_place = self.element_bytes == FP32 and not self.gradients_in_forward
            in_place &= not self.has_directions or rows == self.rows
            results.append(gradients[side] if in_place else self._allocate(rows * self.width * self.element_bytes))
            if self.setup.device == "cpu":
                matrices = 2 if self.element_bytes == FP32 else 3
                finished = self.rows if self.has_directions else rows
                self._touch(matrices * min(finished, FINISHED_ROWS) * self.width * FP32)
            if gradients and not in_place and not self.has_directions:
                self.ledger.free(gradients[side])
        if self.has_directions:
            self._free_all([gradient for gradient in gradients if gradient not in results])
        self._free_all(self._saved)
        return results

    def _gradients(self, *, ranked: bool = False) -> list[int]:
        """Return the allocations of the gradients in fp32, computed from tiles of the gradient with respect to the logits."""
        row_bytes = self.width * FP32
        gradients = [self._allocate(rows * row_bytes) for rows in (self.rows, self.documents)]
        # The visited block and the arriving one; the gradients of both and of x's rows, computed here and in flight. Where a side
        # is compared with itself, x travels too.
        block, gradient = self.documents * self.width * self.element_bytes, self.documents * row_bytes
        in_flight = 2 * block + 2 * gradient + self.rows * row_bytes
        ring = self._ring(in_flight * (2 if self.compares_sides else 1))
        if self._saved_exponentials:
            self._free_all(self._saved_exponentials)
            self._saved_exponentials = []
        else:
            self._touch(self._gradient_tile(ranked=ranked), "loss tiles")
        if self.has_directions:
            copies = 1 if self.element_bytes == FP32 else 2
            # Hardness weights one direction between x and y, and the gradients of the other are computed apart.
            slope = copies * min(self.rows, SLOPE_ROWS) * row_bytes
            if self.options.hardened and self.two_products:
                slope = 2 * self.rows * row_bytes + max(slope, self._gradient_tile())
            self._touch(slope)
        if self.compares_sides:
            # The gradient of a side compared with itself is computed apart, piece by piece, and then added.
            pieces = max(1, self.rows // SYMMETRIC_ROWS[self.setup.device])
            piece = 2 * -(-self.rows // pieces) * row_bytes if pieces > 1 else 0
            apart = [self._allocate(self.rows * row_bytes + piece), self._allocate(self._side_tile(), "loss tiles")]
            self._free_all(apart)
        self._free_all(ring)
        return gradients

    def _own_negatives(self) -> int:
        """Return the bytes of some hard negatives' rows of x and their gradients, less those of the positives, which follow."""
        own_rows = (2 if self.element_bytes == FP32 else 3) * min(self.documents - self.rows, OWN_ROWS)
        return max(0, own_rows - self.rows) * self.width * FP32

    def sums_tile(self, workspace: int) -> int:
        """Return the bytes of a tile whose sums and ranks are computed."""
        if not self.options.in_batch:
            return self._own_negatives()
        if self.setup.device == "cpu":
            return self._cpu_tile(self.columns, ranked=True)
        return min(workspace, 2 * PARTIALS * PARTIAL_BYTES * self.rows * self.columns // TILE_SIDE)

    def _gradient_tile(self, *, ranked: bool = False) -> int:
        """Return the bytes of a tile of the gradient. ranked: the ranks come from the same pass."""
        if not self.options.in_batch:
            return self._own_negatives()
        if self.setup.device == "cpu":
            return self._cpu_tile(self.columns, ranked=ranked)
        return min(self.workspace, min(self.element_bytes, FP32) * self.rows * self.columns)

    def _side_tile(self) -> int:
        """Return the bytes of a tile of a side compared with itself, which is not ranked."""
        if self.setup.device == "cpu":
            piece = min(self.rows, 2 * SYMMETRIC_ROWS["cpu"])
            return self._cpu_tile(piece, ranked=False, matrices=MATRICES_WITH_MASKS if self.options.masked else MATRICES)
        return min(self.unsaved_workspace, min(self.element_bytes, FP32) * self.rows * self.rows)

    def _cpu_tile(self, columns: int, *, ranked: bool, matrices: int = MATRICES_WITH_MASKS) -> int:
        """Return the bytes of PyTorch's operations on a tile, with a transposed copy of its columns."""
        cells = max(1, self.workspace // (matrices * FP32))
        height = min(self.rows, columns, math.isqrt(cells))
        breadth = min(columns, cells // height)
        # While a mask is computed, that of the tile before it exists.
        masks = BOOL * self.options.masked
        bytes_per_cell = MATRICES * FP32 + masks + max(masks, RANK_BYTES * ranked)
        panel = breadth * self.width * FP32
        copies = 0 if self.element_bytes == FP32 else panel + height * self.width * FP32
        # Two panels exist while the next one is copied, when nothing is ranked.
        matrices = height * breadth * MATRICES * FP32
        return copies + max(height * breadth * bytes_per_cell + panel, matrices + (2 * panel if breadth < columns else 0))

    def _allocate(self, size: int, part: str = "embeddings") -> int:
        return self.ledger.allocate(size, part)

    def _touch(self, size: int, part: str = "embeddings") -> None:
        """Allocate and free at once."""
        self.ledger.free(self._allocate(size, part))

    def _ring(self, in_flight: int) -> list[int]:
        meets = self.setup.ranks > 1 and self.options.in_batch
        return [self._allocate(in_flight, "ring buffers")] if meets else []

    def _free_all(self, indices: list[int]) -> None:
        for index in indices:
            self.ledger.free(index)


class LossMemory:
    """Allocates and frees in a ledger what a run's loss does; the embeddings are already there."""

    def __init__(self, ledger: MemoryLedger, setup: Setup, rows: int, width: int, element_bytes: int) -> None:
        self.ledger, self.setup, self.options = ledger, setup, setup.loss_options
        self.rows, self.width, self.element_bytes = rows, width, element_bytes
        # Of x and y.
        self.elements = [count * width for count in (rows, rows * (1 + self.options.negatives))]
        self.loss = OneWidthLoss(ledger, setup, rows, width, element_bytes)
        # The gradients that Matryoshka computes in forward, and what the regulariser saves.
        self._totals: list[int] = []
        self._grams: list[int] = []

    def forward(self) -> None:
        """Forward of the loss, and the gradients of all widths if there are several and each is computed by itself."""
        if self.prefixes_together:
            self._prefix_stats()
        elif self.options.dims:
            self._matryoshka()
        else:
            self.loss.forward()
        if self.options.spread_out:
            gram = self.width**2 * FP32
            for _ in ("x", "y"):
                self._grams.append(self._allocate(gram + self.rows * FP32))
                self._touch(gram + self.rows * self.width * FP32)

    def backward(self) -> list[int]:
        """Return the allocations of the embeddings' gradients."""
        spread_out = self._spread_out_gradients() if self.options.spread_out else []
        if not self.options.dims:
            gradients = self.loss.backward()
        elif self.prefixes_together:
            gradients = self._prefix_gradients()
        else:
            gradients = [self._allocate(count * self.element_bytes) for count in self.elements]
            if self.element_bytes != FP32:
                self._touch(max(self.elements) * FP32)
            self._free_all(self._totals)
        # They are added to the first ones in place.
        self._free_all([*spread_out, *self._grams])
        return gradients

    def _matryoshka(self) -> None:
        """Value and gradients width by width; after the second widest, no width takes more."""
        for dim in sorted(self.options.dims, reverse=True)[:2]:
            shares = [count * dim // self.width for count in self.elements]
            prefixes = [self._allocate(share * self.element_bytes) for share in shares]
            if self.element_bytes != FP32:
                self._touch(2 * max(shares) * FP32)
            loss = OneWidthLoss(self.ledger, self.setup, self.rows, dim, self.element_bytes)
            loss.forward()
            gradients = loss.backward()
            self._free_all(prefixes)
            if not self._totals:
                self._totals = [self._allocate(count * FP32) for count in self.elements]
            self._free_all(gradients)

    @property
    def prefixes_together(self) -> bool:
        """Whether one product serves all widths (losses/matryoshka.py)."""
        options, setup = self.options, self.setup
        objective = BY_COST_NAME[setup.objective]
        plain = objective.prefixes and options.directions in ((), CROSS_DIRECTIONS[:1]) and options.in_batch
        plain &= not (options.masked or options.weighted or (options.negatives and objective.takes_owners))
        fits = all(dim % PREFIX_STEP == 0 for dim in options.dims) and self.element_bytes < FP32 and setup.ranks == 1
        return bool(options.dims) and plain and fits and setup.device == "cuda" and setup.capability == PREFIX_CAPABILITY

    def _prefix_stats(self) -> None:
        """The sums of all widths; the ranks of positives come from another pass, of the widest."""
        widths, documents = len(self.options.dims), self.elements[1] // self.width
        vectors = [count * rows for count, rows in zip(PREFIX_SAVED, (self.rows, documents), strict=True)]
        self._totals = [self._allocate(widths * sum(vectors) * FP32)]
        sums = self._allocate(widths * (self.rows + documents) * (2 * FP32 + INT64))
        columns = min(documents, CACHED_BYTES // (self.width * self.element_bytes))
        parts = int(self._parts_per_cell(widths, PREFIX_STATS_TILE) * self.rows * columns)
        self._touch(min(self.loss.unsaved_workspace, parts), "loss tiles")
        self._free_all([sums])
        widest = max(self.options.dims)
        prefixes = [self._allocate(count // self.width * widest * self.element_bytes) for count in self.elements]
        self._touch(2 * self.rows * widest * FP32)
        self._touch(self.loss.sums_tile(self.loss.unsaved_workspace), "loss tiles")
        self._free_all(prefixes)

    def _prefix_gradients(self) -> list[int]:
        widths, widest, documents = len(self.options.dims), max(self.options.dims), self.elements[1] // self.width
        added = self._allocate(PREFIX_ADDED * widths * (self.rows + documents) * FP32)
        totals = [self._allocate(count // self.width * widest * FP32) for count in self.elements]
        # Of fp16 embeddings, panels are fp32, with copies of the embeddings in fp32, and all widths have one.
        fp16 = self.setup.precision == "fp16"
        totals += [self._allocate(count // self.width * widest * FP32) for count in self.elements if fp16]
        wide = widths if fp16 else sum(dim > NARROW_WIDTH or dim == widest for dim in self.options.dims)
        per_cell = wide * (FP32 if fp16 else self.element_bytes) + self._parts_per_cell(-(-wide // 2), PREFIX_GRADIENT_TILE)
        workspace = self.setup.workspace or default_workspace(self.setup.device, self.setup.device_memory)
        panel = panel_size(self.rows, documents, PREFIX_GRADIENT_TILE, min(workspace, PANELS_WORKSPACE) / per_cell)
        self._touch(int(per_cell * math.prod(panel)), "loss tiles")
        gradients = [self._allocate(count * self.element_bytes) for count in self.elements]
        self._free_all([*totals, added, *self._totals])
        return gradients

    @staticmethod
    def _parts_per_cell(pairs: int, tile: tuple[int, int]) -> float:
        """Return the bytes of partial sums for each cell of a panel: two numbers for each row and column of a tile."""
        return PARTIAL_BYTES * pairs * (1 / tile[0] + 1 / tile[1])

    def _spread_out_gradients(self) -> list[int]:
        gradients = []
        for count in self.elements[::-1]:
            matrix = self.rows * self.width * FP32
            self._touch((2 if self.element_bytes == FP32 else 3) * matrix)
            gradients.append(self._allocate(count * self.element_bytes))
        return gradients

    def _allocate(self, size: int, part: str = "embeddings") -> int:
        return self.ledger.allocate(size, part)

    def _touch(self, size: int, part: str = "embeddings") -> None:
        self.ledger.free(self._allocate(size, part))

    def _free_all(self, indices: list[int]) -> None:
        for index in indices:
            self.ledger.free(index)
