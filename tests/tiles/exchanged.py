"""A kernel that makes sums, maxima and products of the rows and columns of one tile: alone, on a CPU and on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles.fused.kernels.warp_reduce import columns_together, of_columns, of_rows, row_order, rows_together


@triton.jit
def _kernel(values, rows, columns, OF: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr, PRODUCT: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    tile = tl.load(values + i[:, None] * N + j[None, :])
    if PRODUCT:
        # Times one: the same values, as matrix units leave them.
        one = tl.where(j[:, None] == j[None, :], 1.0, 0.0)
        tile = tl.dot(tile.to(tl.float16), one.to(tl.float16))
    found = rows_together(of_rows(tile, OF, M, N), OF, M, WARPS)
    tl.store(rows + row_order(M, WARPS), found)
    tl.store(columns + j, columns_together(of_columns(tile, OF, M, N, WARPS), OF))


def rows_and_columns(values: Tensor, of: int, warps: int, product: bool) -> tuple[Tensor, Tensor]:
    """What the kernel finds; NaN where it writes nothing. product: for a tile that a product has left."""
    rows, columns = (values.new_full((length,), torch.nan) for length in values.shape)
    m, n = values.shape
    _kernel[(1,)](values, rows, columns, OF=of, M=m, N=n, WARPS=warps, PRODUCT=product, num_warps=warps)
    return rows, columns


def expected(values: Tensor, of: int) -> tuple[Tensor, Tensor]:
    """The same by PyTorch. 0: sums, 1: maxima, 2: products of 1 + a, less one."""
    make = (torch.Tensor.sum, torch.Tensor.amax, lambda t, dim: (1 + t).prod(dim) - 1)[of]
    return make(values, 1), make(values, 0)


def whole_numbers(m: int, n: int, of: int) -> Tensor:
    """Values whose sums and products fp32 holds exactly: zeros and a few ones for products."""
    g = torch.Generator().manual_seed(m + n)
    return (torch.rand(m, n, generator=g) < 0.06).float() if of == 2 else torch.randint(-99, 99, (m, n), generator=g).float()
