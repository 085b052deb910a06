"""The product of one tile, and the order in which programs take tiles: what every kernel begins with. Legend: ../../contract.py.

Kernels are persistent: a fixed number of programs, each walking over tiles in one flattened loop, so that the loads of the next
tile start under the epilogue of this one. A panel is a rectangle of the similarity matrix that one launch computes: rows and
columns count from its corner.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_at(t, rows, columns, M: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr):
    """First row and first column of the t-th tile; tiles go in groups of GROUP rows of tiles, whose x stays in the cache."""
    across = tl.cdiv(columns, N)
    first = t // (GROUP * across) * GROUP
    height = tl.minimum(tl.cdiv(rows, M) - first, GROUP)
    within = t % (GROUP * across)
    return (first + within % height) * M, within // height * N


@triton.jit
def similarities(
    x, y, row, column, rows, columns, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z_MN of the tile whose first row and column are given, summed up in fp32."""
    z = tl.zeros((M, N), tl.float32)
    for k in range(0, tl.cdiv(WIDTH, K)):
        a = _block(x, row, k * K, rows, WIDTH, M, K, DESCRIBED)
        b = _block(y, column, k * K, columns, WIDTH, N, K, DESCRIBED)
        z = tl.dot(a, b.T, z, input_precision=PRECISION)
    return z


@triton.jit
def _block(source, row, k, rows, WIDTH: tl.constexpr, M: tl.constexpr, K: tl.constexpr, DESCRIBED: tl.constexpr):
    """A block of embeddings, zero beyond their edges: by tensor descriptor, or by pointers where a device has none."""
    if DESCRIBED:
        block = source.load([row, k])
    else:
        i = row + tl.arange(0, M)
        j = k + tl.arange(0, K)
        inside = (i < rows)[:, None]
        if WIDTH % K != 0:
            inside = inside & (j < WIDTH)[None, :]
        block = tl.load(source + i.to(tl.int64)[:, None] * WIDTH + j[None, :], mask=inside, other=0.0)
    return block


@triton.jit
def halves(z, M: tl.constexpr, N: tl.constexpr):
    """The left and the right half of a tile: the registers and the shared memory that one needs, the other takes over."""
    return tl.split(tl.permute(tl.reshape(z, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def side_by_side(left, right):
    """What was found for the columns of the halves of a tile, (parts, columns) each, as one."""
    joined = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(joined, (left.shape[0], 2 * left.shape[1]))


@triton.jit
def put_block(
    target,
    values,
    row,
    column,
    rows,
    columns,
    M: tl.constexpr,
    N: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ROUND_TO_TF32: tl.constexpr,
):
    """Writes a tile into a matrix of the panel, given with its stride, as its dtype."""
    matrix, stride = target
    if ROUND_TO_TF32:
        values = rounded_to_tf32(values)
    if DESCRIBED:
        matrix.store([row, column], values.to(matrix.dtype))
    else:
        i = row + tl.arange(0, M)
        j = column + tl.arange(0, N)
        inside = (i < rows)[:, None] & (j < columns)[None, :]
        tl.store(matrix + i.to(tl.int64)[:, None] * stride + j[None, :], values.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def rounded_to_tf32(values):
    """The nearest numbers that tf32 holds: the product's units would cut the rest off, always towards zero. NaN stays NaN."""
    rounded = ((values.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(values == values, rounded, values)
