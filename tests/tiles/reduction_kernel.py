"""A kernel that reduces the rows and columns of one tile to sums, maxima and products, for tests on a CPU and on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megabatch.tiles.fused.reductions import finish_columns, finish_rows, reduce_columns, reduce_rows, row_order


@triton.jit
def _kernel(values, rows, columns, OP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr, PRODUCT: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    tile = tl.load(values + i[:, None] * N + j[None, :])
    if PRODUCT:
        # Times the identity: the same values, in the layout that tensor cores leave them in.
        one = tl.where(j[:, None] == j[None, :], 1.0, 0.0)
        tile = tl.dot(tile.to(tl.float16), one.to(tl.float16))
    tl.store(rows + row_order(M, WARPS), finish_rows(reduce_rows(tile, OP, M, N), OP, M, WARPS))
    tl.store(columns + j, finish_columns(reduce_columns(tile, OP, M, N, WARPS), OP))


def rows_and_columns(values: Tensor, op: int, warps: int, product: bool) -> tuple[Tensor, Tensor]:
    """Return the kernel's results, NaN where it writes nothing. product: reduce the result of a product."""
    rows, columns = (values.new_full((length,), torch.nan) for length in values.shape)
    m, n = values.shape
    _kernel[(1,)](values, rows, columns, OP=op, M=m, N=n, WARPS=warps, PRODUCT=product, num_warps=warps)
    return rows, columns


def expected(values: Tensor, op: int) -> tuple[Tensor, Tensor]:
    """Return the same by PyTorch. 0: sums, 1: maxima, 2: products of 1 + a, minus one."""
    reduce = (torch.Tensor.sum, torch.Tensor.amax, lambda t, dim: (1 + t).prod(dim) - 1)[op]
    return reduce(values, 1), reduce(values, 0)


def integers(m: int, n: int, op: int) -> Tensor:
    """Return values whose sums and products are exact in fp32: zeros and a few ones for products."""
    g = torch.Generator().manual_seed(m + n)
    return (torch.rand(m, n, generator=g) < 0.06).float() if op == 2 else torch.randint(-99, 99, (m, n), generator=g).float()
