"""From two blocks to kernel launches: the panels, what a kernel is given of each, and the sums that come out of all of them.

At small batches the host is the limit: what a step asks of it is kept short here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..contract import ComputeOptions, Pairs
from .capability import has_descriptors, processors
from .kernels.pairs import match_kernel
from .kernels.sums import merge_kernel
from .tuned_configs import Blocks, blocks_for

MERGED_ROWS, MERGED_TILES = 16, 128
MATCHED_TILES = 8
# The part of the working memory that forward's sums have beside a kept panel.
BESIDE_KEPT = 4


class Panel:
    """A rectangle of the similarity matrix: a slice of x's rows and one of y's."""

    def __init__(self, r: slice, c: slice) -> None:
        self.r, self.c = r, c
        self.rows, self.columns = r.stop - r.start, c.stop - c.start


class Launch:
    """One kernel over two blocks of embeddings, panel by panel."""

    def __init__(self, kernel: str, x_MD: Tensor, y_ND: Tensor, compute: ComputeOptions, pieces: int = 1) -> None:
        """pieces: into how many a tile has to be cut at least, because options need registers and shared memory too."""
        self.kernel = kernel
        self.described = has_descriptors(x_MD.device)
        self.x_MD, self.y_ND = (_aligned(x_MD), _aligned(y_ND)) if self.described else (x_MD, y_ND)
        width = self.x_MD.shape[1]
        self.blocks = blocks_for(kernel, x_MD.device, x_MD.dtype, compute.precision, width)
        self.blocks = self.blocks._replace(pieces=max(pieces, self.blocks.pieces))
        self.tile = compute.workspace
        self.piece = self.blocks.n // self.blocks.pieces
        self.most_programs = processors(x_MD.device) * self.blocks.programs
        self.product: dict[str, Any] = {
            "WIDTH": width,
            "K": self.blocks.k,
            "DESCRIBED": self.described,
            "PRECISION": compute.precision if x_MD.dtype == torch.float32 else "tf32",
            "num_warps": self.blocks.warps,
            "num_stages": self.blocks.stages,
        }
        shape = {"M": self.blocks.m, "N": self.blocks.n, "GROUP": self.blocks.group, "PIECES": self.blocks.pieces}
        self.constants = {**self.product, **shape}

    def cut(self, pieces: int) -> Launch:
        """The same launch with tiles in that many pieces at least."""
        if self.blocks.pieces >= pieces:
            return self
        other = copy.copy(self)
        other.blocks, other.piece = self.blocks._replace(pieces=pieces), self.blocks.n // pieces
        other.constants = {**self.constants, "PIECES": pieces}
        return other

    def panels(self, bytes_a_cell: float, widest: int | None = None, kept: Panel | None = None) -> Iterator[Panel]:
        """All pairs in panels; with a kept panel, those in it first, then those below it, then those beside it.

        What is kept has its working memory: panels get by on a part of as much.
        """
        rows, columns = slice(0, self.x_MD.shape[0]), slice(0, self.y_ND.shape[0])
        areas, tile = [Panel(rows, columns)], self.tile
        if kept is not None:
            below, beside = Panel(slice(kept.rows, rows.stop), kept.c), Panel(rows, slice(kept.columns, columns.stop))
            areas, tile = [kept, below, beside], self.tile // BESIDE_KEPT
        for area in areas:
            yield from _panels_of(area, self.blocks, tile, bytes_a_cell, widest)

    def parts(self, p: Panel) -> tuple[int, int]:
        """How many parts the sums of a panel have, for its columns and for its rows: one a tile."""
        return cdiv(p.rows, self.blocks.m), cdiv(p.columns, self.blocks.n)

    def grid(self, p: Panel) -> tuple[int]:
        """The programs for a panel: no more than there are tiles."""
        return (min(math.prod(self.parts(p)), self.most_programs),)

    def operands(self, p: Panel) -> tuple[Any, Any]:
        """What a kernel takes to read blocks of x and y."""
        m, n, k = self.blocks[:3]
        return self._operand(part(self.x_MD, p.r), m, k), self._operand(part(self.y_ND, p.c), n, k)

    def diagonal_operands(self) -> tuple[Any, Any]:
        """The same of the positives, for tiles that are square."""
        m, k, rows = self.blocks.m, self.blocks.k, slice(0, self.x_MD.shape[0])
        return self._operand(self.x_MD, m, k), self._operand(part(self.y_ND, rows), m, k)

    def target(self, panel: Tensor) -> Any:
        """What a kernel takes to write a piece of a tile of a panel."""
        return self._operand(panel, self.blocks.m, self.piece)

    def pairs(self, pairs: Pairs, p: Panel) -> tuple[Any, ...]:
        """What a kernel is told of a panel: which pairs count, its size, and by how many columns its rows' positives are ahead."""
        compared = pairs.positive_M if pairs.ranked or pairs.drop_above is not None else None
        margin = 0.0 if pairs.drop_above is None else float(pairs.drop_above)
        matches = ids_M = ids_N = None
        if pairs.ids_M is not None and pairs.ids_N is not None:
            ids_M, ids_N = (ids.to(torch.int64).view(torch.int32) for ids in (pairs.ids_M[p.r], pairs.ids_N[p.c]))
            down, across = self.parts(p)
            matches = ids_M.new_empty(down, across, dtype=torch.int8)
            grid = (cdiv(across, MATCHED_TILES), down)
            m, n = self.blocks[:2]
            match_kernel[grid](ids_M, ids_N, matches, p.rows, p.columns, across, M=m, N=n, TILES=MATCHED_TILES)
        compared_with = part(compared, p.r), part(pairs.positive_N, p.c)
        return matches, ids_M, ids_N, *compared_with, margin, p.rows, p.columns, p.r.start - p.c.start

    def _operand(self, t: Tensor | None, rows: int, columns: int) -> Any:
        """The descriptor of a matrix, or the matrix itself."""
        assert t is not None
        return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns]) if self.described else t


class Sums:
    """What the tiles find for each row of t: pairs of sums, merged over panels in a fixed order. Kinds: kernels/sums.py."""

    def __init__(self, t: Tensor, kinds: Sequence[int]) -> None:
        self.kinds = kinds
        self.length = t.shape[0]
        self.found = t.new_empty(len(kinds), 2, self.length, dtype=torch.float32)
        self.numbers = t.new_empty(len(kinds), self.length, dtype=torch.int64)
        self.code = sum(kind << 2 * place for place, kind in enumerate(kinds))

    def bytes_a_cell(self, tile: int) -> float:
        """The working memory for a cell of the panel, of which `tile` in a row share one part."""
        return 8 * len(self.kinds) / tile

    def parts(self, tiles: int, length: int) -> Tensor:
        """Room for the parts of a panel's tiles."""
        return self.found.new_empty(len(self.kinds), 2, tiles, length)


def merge_panel(p: Panel, mine: Sums, row_parts: Tensor, theirs: Sums | None, column_parts: Tensor | None) -> None:
    """Adds up the parts of a panel's tiles for its rows and columns, to what is there already unless this panel is the first."""
    rows = _sums_arguments(mine, row_parts, p.r)
    columns: Sequence[Any] = (None, None, None, 0, 0, 0)
    constants = {"OTHER_PAIRS": 0, "OTHER_KINDS": 0, "OTHER_FIRST": True}
    programs = cdiv(row_parts.shape[3], MERGED_ROWS)
    if theirs is not None and column_parts is not None:
        columns = _sums_arguments(theirs, column_parts, p.c)
        constants = {"OTHER_PAIRS": len(theirs.kinds), "OTHER_KINDS": theirs.code, "OTHER_FIRST": p.r.start == 0}
        programs += cdiv(column_parts.shape[3], MERGED_ROWS)
    if programs:
        merge_kernel[(programs,)](
            *rows,
            *columns,
            PAIRS=len(mine.kinds),
            KINDS=mine.code,
            FIRST=p.c.start == 0,
            **constants,
            T=MERGED_TILES,
            R=MERGED_ROWS,
        )


def first_panel(kernel: str, x_MD: Tensor, y_ND: Tensor, compute: ComputeOptions, bytes_a_cell: float) -> Panel:
    """The first of the panels that a launch of a kernel will have."""
    blocks = blocks_for(kernel, x_MD.device, x_MD.dtype, compute.precision, x_MD.shape[1])
    return next(_panels_of(Panel(slice(0, x_MD.shape[0]), slice(0, y_ND.shape[0])), blocks, compute.workspace, bytes_a_cell))


def _panels_of(area: Panel, blocks: Blocks, tile: int, bytes_a_cell: float, widest: int | None = None) -> Iterator[Panel]:
    """Panels of equal size, as large as the working memory allows and no wider than `widest`, row after row of them."""
    if not area.rows or not area.columns:
        return
    # Squares, or longer than a square along one side where the other is short.
    cells = tile / bytes_a_cell
    side = math.isqrt(max(1, int(cells)))
    most = min(area.columns, max(widest or area.columns, blocks.n))
    height = min(area.rows, max(side, int(cells / most)))
    width = min(most, max(side, int(cells / height)))
    for r in _slices(area.r, height, blocks.m):
        for c in _slices(area.c, width, blocks.n):
            yield Panel(r, c)


@overload
def part(t: Tensor, where: slice) -> Tensor: ...
@overload
def part(t: Tensor | None, where: slice) -> Tensor | None: ...
def part(t: Tensor | None, where: slice) -> Tensor | None:
    """A slice of the rows, which most often are all."""
    if t is None or (where.start == 0 and where.stop == t.shape[0]):
        return t
    return t[where]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _sums_arguments(sums: Sums, parts: Tensor, where: slice) -> tuple[Any, ...]:
    tiles, length = parts.shape[2:]
    return parts, sums.found[:, :, where], sums.numbers[:, where], tiles, length, sums.length


def _aligned(t: Tensor) -> Tensor:
    """The embeddings as a descriptor can read them: rows that are multiples of 16 bytes, beginning at one."""
    lacking = -t.shape[1] % (16 // t.element_size())
    if lacking:
        return torch.nn.functional.pad(t, (0, lacking))
    if t.data_ptr() % 16:
        t = t.clone()
    # One row alone may have any stride.
    return t if t.shape[0] > 1 else t.reshape(-1).view(t.shape)


def _slices(where: slice, most: int, block: int) -> Iterator[slice]:
    """Slices of about equal size, no longer than `most` and made of whole blocks except the last."""
    length = where.stop - where.start
    count = 1 if length <= most else cdiv(length, max(block, most // block * block))
    size = cdiv(cdiv(length, count), block) * block
    return (slice(start, min(start + size, where.stop)) for start in range(where.start, where.stop, size))
