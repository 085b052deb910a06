"""From two blocks to kernel launches: the panels, what a kernel is given of each, and the sums that come out of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..contract import Means, Pairs
from .blocks import blocks_for
from .kernels.pairs import match_kernel
from .kernels.sums import merge_kernel
from .support import has_descriptors, processors


class Launch:
    """One kernel over two blocks of embeddings, panel by panel. A panel is a pair of slices, rows of x and rows of y."""

    def __init__(self, kernel: str, x_MD: Tensor, y_ND: Tensor, means: Means, *, crowded: bool = False) -> None:
        self.described = has_descriptors(x_MD.device)
        self.x_MD, self.y_ND = (_aligned(t) if self.described else t for t in (x_MD, y_ND))
        width = self.x_MD.shape[1]
        self.blocks = blocks_for(kernel, x_MD.device, x_MD.dtype, means.precision, width)
        if crowded:
            # What options ask for needs registers too.
            self.blocks = self.blocks._replace(pieces=2)
        self.tile = means.tile
        self.most_programs = processors(x_MD.device) * self.blocks.programs
        self.product: dict[str, Any] = {
            "WIDTH": width,
            "K": self.blocks.k,
            "DESCRIBED": self.described,
            "PRECISION": means.precision if x_MD.dtype == torch.float32 else "tf32",
            "num_warps": self.blocks.warps,
            "num_stages": self.blocks.stages,
        }
        shape = {"M": self.blocks.m, "N": self.blocks.n, "GROUP": self.blocks.group, "PIECES": self.blocks.pieces}
        self.constants = {**self.product, **shape}
        self.piece = self.blocks.n // self.blocks.pieces

    def panels(self, bytes_a_cell: float, widest: int | None = None) -> Iterator[tuple[slice, slice]]:
        """Panels of equal size, as large as the working memory allows and no wider than `widest`, row after row of them."""
        rows, columns = len(self.x_MD), len(self.y_ND)
        if not rows or not columns:
            return
        cells = self.tile / bytes_a_cell
        # Squares, or longer than a square along one side where the other is short.
        side = math.isqrt(max(1, int(cells)))
        most = min(columns, widest or columns)
        height = min(rows, max(side, int(cells / most)))
        width = min(most, max(side, int(cells / height)))
        for r in _slices(rows, height, self.blocks.m):
            for c in _slices(columns, width, self.blocks.n):
                yield r, c

    def parts(self, r: slice, c: slice) -> tuple[int, int]:
        """How many parts the sums of a panel have: for its columns, one a tile; for its rows, one a piece of a tile."""
        return triton.cdiv(_length(r), self.blocks.m), triton.cdiv(_length(c), self.blocks.n) * self.blocks.pieces

    def grid(self, r: slice, c: slice) -> tuple[int]:
        """The programs for a panel: no more than there are tiles."""
        return (min(math.prod(self.parts(r, c)) // self.blocks.pieces, self.most_programs),)

    def x(self, r: slice) -> Any:
        return _operand(self.x_MD[r], self.blocks.m, self.blocks.k, self.described)

    def y(self, c: slice, height: int | None = None) -> Any:
        return _operand(self.y_ND[c], height or self.blocks.n, self.blocks.k, self.described)

    def target(self, panel: Tensor) -> Any:
        """What a kernel takes to write a tile of a panel."""
        return _operand(panel, self.blocks.m, self.piece, self.described)

    def pairs(self, pairs: Pairs, r: slice, c: slice) -> tuple[Any, ...]:
        """What a kernel is told of a panel: which pairs count, its size, and by how many columns its rows' positives are ahead."""
        compared = pairs.positive_M if pairs.ranked or pairs.drop_above is not None else None
        margin = 0.0 if pairs.drop_above is None else float(pairs.drop_above)
        rows, columns = _length(r), _length(c)
        matches = ids_M = ids_N = None
        if pairs.ids_M is not None and pairs.ids_N is not None:
            ids_M, ids_N = (ids.to(torch.int64).view(torch.int32) for ids in (pairs.ids_M[r], pairs.ids_N[c]))
            down, across = self.parts(r, c)
            matches = ids_M.new_empty(down, across, dtype=torch.int8)
            match_kernel[(across, down)](ids_M, ids_N, matches, rows, columns, M=self.blocks.m, N=self.piece)
        return matches, ids_M, ids_N, part(compared, r), part(pairs.positive_N, c), margin, rows, columns, r.start - c.start


class Sums:
    """What the tiles find for each row of t among `others` rows: pairs of sums, merged over panels in a fixed order. Kinds:
    sums.py."""

    def __init__(self, t: Tensor, others: int, kinds: Sequence[int]) -> None:
        self.kinds = kinds
        self.found = t.new_empty(len(kinds), 2, len(t), dtype=torch.float32)
        self.numbers = t.new_empty(len(kinds), len(t), dtype=torch.int64)
        if not others:
            self.absorb(self.parts(0, slice(0, len(t))), slice(0, len(t)), t.new_zeros(1, dtype=torch.int32), first=True)

    def bytes_a_cell(self, tile: int) -> float:
        """The working memory for a cell of the panel, of which `tile` in a row share one part."""
        return 8 * len(self.kinds) / tile

    def parts(self, tiles: int, where: slice) -> Tensor:
        return self.found.new_empty(len(self.kinds), 2, tiles, _length(where))

    def absorb(self, parts: Tensor, where: slice, trouble: Tensor, *, first: bool) -> None:
        """Adds up the parts of a panel's tiles, to what is there already unless this is the first."""
        tiles, length = parts.shape[2:]
        if not length:
            return
        height = 32
        merge_kernel[(triton.cdiv(length, height),)](
            parts, self.found[:, :, where], self.numbers[:, where], trouble, tiles, length, self.found.shape[2],
            PAIRS=len(self.kinds), KINDS=sum(kind << 2 * place for place, kind in enumerate(self.kinds)), FIRST=first,
            T=64, R=height,
        )  # fmt: skip


def part(vector: Tensor | None, where: slice) -> Tensor | None:
    return None if vector is None else vector[where]


def _operand(t: Tensor, rows: int, columns: int, described: bool) -> Any:
    """What a kernel takes to read or write blocks of a matrix: its descriptor, or the matrix itself."""
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns]) if described else t


def _aligned(t: Tensor) -> Tensor:
    """The embeddings as a descriptor can read them: rows that are multiples of 16 bytes, beginning at one."""
    lacking = -t.shape[1] % (16 // t.element_size())
    if lacking:
        return torch.nn.functional.pad(t, (0, lacking))
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _slices(length: int, most: int, block: int) -> Iterator[slice]:
    """Slices of about equal size, no longer than `most` and made of whole blocks except the last."""
    count = triton.cdiv(length, max(block, most // block * block))
    size = triton.cdiv(triton.cdiv(length, count), block) * block
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _length(where: slice) -> int:
    return int(where.stop - where.start)
