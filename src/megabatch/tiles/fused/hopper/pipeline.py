"""Shared by the Hopper kernels: the pipeline that loads and multiplies pairs of tiles, masks, sums of columns, launch arguments.

A program has a multiprocessor to itself. Two warp groups (consumers 0 and 1) compute tiles that lie one above the other and share
the blocks of y, which is a quarter less to load than two unrelated tiles. Consumer 1 is some steps behind consumer 0, so that one
is in its epilogue while the other multiplies. Three more warps (producers) load y, and the x of each consumer.

Blocks go through slots in shared memory. A slot is `full` when its block has arrived, and `empty` when its readers have finished. A
barrier tells odd from even phases only, so whoever waits knows which use of the slot it waits for.

Legend: ../../contract.py; tiles: ../tile.py. A step is one block of K entries of the embedding width.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..launch import Launch, Panel, cdiv, multiprocessors, part
from ..reductions import SUM, combine, swap
from ..tile import tile_at
from ..tuned_configs import Pipeline, pipeline_for

TILE = 128
# Bytes of the embedding width per step.
STEP_BYTES = 128
# Registers for three warp groups, of which the two consumers take most.
OPTIONS = {"num_warps": 4, "maxnreg": 168}
# Of all partitions but the first, consumer 0, which has the remaining registers: consumer 1, and the producers.
WARPS = gl.constexpr([4, 1, 1, 1])
REGISTERS = gl.constexpr([232, 40, 40, 40])
# Triton 3.7 renames it.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


class Slots(NamedTuple):
    """Shared memory: blocks of x of both consumers, blocks of y, their barriers, and the barrier that starts consumer 1."""

    xs: Any
    ys: Any
    x_full: Any
    x_empty: Any
    y_full: Any
    y_empty: Any
    start_second: Any


class MaskArgs(NamedTuple):
    """Which pairs of a panel count: those fields of tile.PairArgs that the Hopper kernels need."""

    matches: Any
    ids_M: Any
    ids_N: Any
    rows: Any
    columns: Any
    shift: Any


@gluon.constexpr_function
def tile_layout(M, N, BITS=16):
    """Return which threads of a warp group hold what of a product of operands with so many bits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 256 // BITS])


@gluon.jit
def allocate_slots(x, y, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr):
    xs = gl.allocate_shared_memory(x.dtype, [2 * X_SLOTS, M, K], x.layout)
    ys = gl.allocate_shared_memory(y.dtype, [Y_SLOTS, N, K], y.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [2 * X_SLOTS, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [2 * X_SLOTS, 1], mbarrier.MBarrierLayout())
    y_full = gl.allocate_shared_memory(gl.int64, [Y_SLOTS, 1], mbarrier.MBarrierLayout())
    y_empty = gl.allocate_shared_memory(gl.int64, [Y_SLOTS, 1], mbarrier.MBarrierLayout())
    start_second = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(start_second, count=1)
    for slot in gl.static_range(2 * X_SLOTS):
        mbarrier.init(x_full.index(slot), count=1)
        mbarrier.init(x_empty.index(slot), count=1)
    for slot in gl.static_range(Y_SLOTS):
        mbarrier.init(y_full.index(slot), count=1)
        mbarrier.init(y_empty.index(slot), count=2)
    fence_async_shared()
    return Slots(xs, ys, x_full, x_empty, y_full, y_empty, start_second)


@gluon.jit
def tile_pairs(rows, columns, M: gl.constexpr, N: gl.constexpr):
    """Return how many pairs of tiles this program computes."""
    pairs = gl.cdiv(rows, 2 * M) * gl.cdiv(columns, N)
    return gl.cdiv(pairs - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def tile_pair_at(n, rows, columns, M: gl.constexpr, N: gl.constexpr, GROUP: gl.constexpr):
    """Return first row and first column of this program's n-th pair of tiles."""
    return tile_at(gl.program_id(0) + n * gl.num_programs(0), rows, columns, 2 * M, N, GROUP)


@gluon.jit
def load_x(
    x, slots, rows, columns, CONSUMER: gl.constexpr, WIDTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    GROUP: gl.constexpr, X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """Producer: fill the slots for x of one consumer. Consumer 1 starts when consumer 0 is LAG steps ahead."""
    STEPS: gl.constexpr = (WIDTH + K - 1) // K
    pairs = tile_pairs(rows, columns, M, N)
    # A slot is released when the product of the next step has been issued. Consumer 0 alone gets as far as the slots for y reach.
    gl.static_assert((X_SLOTS > 1) & (Y_SLOTS > 1) & (LAG < Y_SLOTS))
    ahead = gl.minimum(LAG + X_SLOTS, pairs * STEPS) - 1
    if CONSUMER == 1:
        mbarrier.wait(slots.start_second, 0)
    for n in range(pairs):
        row = tile_pair_at(n, rows, columns, M, N, GROUP)[0]
        for k in range(STEPS):
            step = n * STEPS + k
            slot, turn = CONSUMER * X_SLOTS + step % X_SLOTS, step // X_SLOTS
            _load(x, slots.xs, slots.x_full, slots.x_empty, row + CONSUMER * M, k * K, slot, turn, M, K)
            if CONSUMER == 0:
                if step == ahead:
                    mbarrier.arrive(slots.start_second, count=1)


@gluon.jit
def load_y(
    y, slots, rows, columns,
    WIDTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, Y_SLOTS: gl.constexpr,
):  # fmt: skip
    """Producer: fill the slots for y."""
    STEPS: gl.constexpr = (WIDTH + K - 1) // K
    for n in range(tile_pairs(rows, columns, M, N)):
        column = tile_pair_at(n, rows, columns, M, N, GROUP)[1]
        for k in range(STEPS):
            step = n * STEPS + k
            _load(y, slots.ys, slots.y_full, slots.y_empty, column, k * K, step % Y_SLOTS, step // Y_SLOTS, N, K)


@gluon.jit
def _load(source, blocks, full, empty, row, k, slot, turn, R: gl.constexpr, K: gl.constexpr):
    mbarrier.wait(empty.index(slot), (turn & 1) ^ 1)
    mbarrier.expect(full.index(slot), R * K * source.dtype.primitive_bitwidth // 8)
    tma.async_copy_global_to_shared(source, [row, k], full.index(slot), blocks.index(slot))


@gluon.jit
def similarities(
    z, n, slots, CONSUMER: gl.constexpr, WIDTH: gl.constexpr, K: gl.constexpr, X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr
):  # fmt: skip
    """Return the product of a consumer's n-th tile. It takes the registers of z, whose values are ignored."""
    STEPS: gl.constexpr = (WIDTH + K - 1) // K
    x_slot, y_slot = CONSUMER * X_SLOTS, 0
    for k in range(STEPS):
        step = n * STEPS + k
        previous_x, previous_y = x_slot, y_slot
        x_slot, y_slot = CONSUMER * X_SLOTS + step % X_SLOTS, step % Y_SLOTS
        mbarrier.wait(slots.y_full.index(y_slot), (step // Y_SLOTS) & 1)
        mbarrier.wait(slots.x_full.index(x_slot), (step // X_SLOTS) & 1)
        z = warpgroup_mma(slots.xs.index(x_slot), slots.ys.index(y_slot).permute((1, 0)), z, use_acc=k > 0, is_async=True)
        # The product of the previous step has finished, so its slots are released.
        z = warpgroup_mma_wait(1, deps=(z,))
        if k > 0:
            mbarrier.arrive(slots.y_empty.index(previous_y), count=1)
            mbarrier.arrive(slots.x_empty.index(previous_x), count=1)
    z = warpgroup_mma_wait(0, deps=(z,))
    mbarrier.arrive(slots.y_empty.index(y_slot), count=1)
    mbarrier.arrive(slots.x_empty.index(x_slot), count=1)
    return z


@gluon.jit
def negatives(pairs, row, column, IS_LOCAL: gl.constexpr, M: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """Return the mask of the pairs inside the panel that are neither positives nor equal in id, as in ../tile.py."""
    i = row + gl.arange(0, M, gl.SliceLayout(1, layout))
    j = column + gl.arange(0, N, gl.SliceLayout(0, layout))
    mask = (i < pairs.rows)[:, None] & (j < pairs.columns)[None, :]
    if IS_LOCAL:
        mask = mask & ((i + pairs.shift)[:, None] != j[None, :])
    if pairs.ids_M is not None:
        equal = mask
        for half in gl.static_range(2):
            half_M = gl.load(pairs.ids_M + 2 * i.to(gl.int64) + half, mask=i < pairs.rows, other=0)
            half_N = gl.load(pairs.ids_N + 2 * j.to(gl.int64) + half, mask=j < pairs.columns, other=0)
            equal = equal & (half_M[:, None] == half_N[None, :])
        mask = mask & ~equal
    return mask


@gluon.jit
def tile_needs_mask(
    pairs, row, column, IS_LOCAL: gl.constexpr, M: gl.constexpr, N: gl.constexpr, MATCH_WIDTH: gl.constexpr
):  # fmt: skip
    """Return whether some pair of the tile may not be a negative, as in ../tile.py. MATCH_WIDTH: of the tiles of `matches`."""
    needs_mask = (row + M > pairs.rows) | (column + N > pairs.columns)
    if IS_LOCAL:
        needs_mask = needs_mask | ((row + pairs.shift < column + N) & (column < row + pairs.shift + M))
    if pairs.matches is not None:
        inside = row < pairs.rows
        place = (row // M) * gl.cdiv(pairs.columns, MATCH_WIDTH) + column // MATCH_WIDTH
        needs_mask = needs_mask | (gl.load(pairs.matches + place, mask=inside, other=0) != 0)
    return needs_mask


@gluon.jit
def sum_columns(values, M: gl.constexpr, N: gl.constexpr):
    """Return sums of columns: of each thread's values, then over eight threads, then over four warps, as in ../reductions.py."""
    alone = gl.sum(gl.sum(gl.reshape(values, (M // 64, 4, 2, 8, N)), 2), 0)
    left, right = gl.split(gl.permute(gl.reshape(alone, (4, 2, 4, 2, N // 2)), (0, 1, 2, 4, 3)))
    left, right = gl.split(gl.permute(gl.reshape(_exchange(left, right, 1, SUM), (8, 2, 2, 2, N // 4)), (0, 1, 2, 4, 3)))
    left, right = gl.split(gl.permute(gl.reshape(_exchange(left, right, 1, SUM), (16, 2, 1, 2, N // 8)), (0, 1, 2, 4, 3)))
    return gl.sum(gl.reshape(_exchange(left, right, 1, SUM), (4, N)), 0)


@gluon.jit
def _exchange(first, second, AXIS: gl.constexpr, OP: gl.constexpr):
    """Reduce an axis of two: the result of `first` is at place 0, that of `second` at place 1."""
    place = gl.reshape(gl.arange(0, 2), [1] * AXIS + [2] + [1] * (3 - AXIS))
    own, given = gl.where(place == 0, first, second), gl.where(place == 0, second, first)
    return combine(own, swap(given, AXIS), OP)


@gluon.jit
def split_quarters(z, M: gl.constexpr, N: gl.constexpr):
    """Return the quarters of a tile from left to right, each in the layout of a product of that width."""
    layout: gl.constexpr = tile_layout(M, N // 4)
    left, right = gl.split(gl.permute(gl.reshape(z, (M, 2, N // 2)), (0, 2, 1)))
    a, b = gl.split(gl.permute(gl.reshape(left, (M, 2, N // 4)), (0, 2, 1)))
    c, d = gl.split(gl.permute(gl.reshape(right, (M, 2, N // 4)), (0, 2, 1)))
    return (
        gl.convert_layout(a, layout, assert_trivial=True),
        gl.convert_layout(b, layout, assert_trivial=True),
        gl.convert_layout(c, layout, assert_trivial=True),
        gl.convert_layout(d, layout, assert_trivial=True),
    )


@gluon.jit
def store_quarter(values, target, out, row, column, CONSUMER: gl.constexpr, QUARTER: gl.constexpr, OUT_SLOTS: gl.constexpr):
    """Start the store of a quarter of a tile through its slot. All stores have to be waited for before the kernel ends."""
    # The previous store from this slot has finished reading it.
    tma.store_wait(OUT_SLOTS - 1)
    _barrier()
    slot = out.index(CONSUMER * OUT_SLOTS + QUARTER % OUT_SLOTS)
    slot.store(values.to(target.dtype))
    fence_async_shared()
    _barrier()
    tma.async_copy_shared_to_global(target, [row, column], slot)


def select_pipeline(launch: Launch, p: Panel, dtype: torch.dtype | None = None) -> Pipeline | None:
    """Return the pipeline for a panel, or None if the portable kernel is faster or the only one.

    dtype: of the operands, if it is not that of the embeddings.
    """
    x_MD, (m, n, *_) = launch.x_MD, launch.blocks
    # The partial sums of both kernels have to be those of the same tiles.
    same_tiles = m == n == TILE or (launch.kernel == "gradient" and m == TILE and n % TILE == 0)
    if not same_tiles:
        return None
    pipeline = pipeline_for(launch.kernel, x_MD.device, dtype or x_MD.dtype, x_MD.shape[1])
    if pipeline is None or pipeline.min_tile_pairs is None:
        return None
    return pipeline if count_tile_pairs(p) >= pipeline.min_tile_pairs * multiprocessors(x_MD.device) else None


def count_tile_pairs(p: Panel) -> int:
    return cdiv(p.rows, 2 * TILE) * cdiv(p.columns, TILE)


def grid(launch: Launch, p: Panel) -> tuple[int]:
    """Return the number of programs: no more than pairs of tiles, because each program has to have one."""
    return (min(count_tile_pairs(p), multiprocessors(launch.x_MD.device)),)


def constants(x: Tensor, pipeline: Pipeline) -> dict[str, int]:
    """Return the constants of a kernel, given its operand x."""
    shape = {"WIDTH": x.shape[1], "M": TILE, "N": TILE, "K": STEP_BYTES // x.element_size()}
    slots = {"X_SLOTS": pipeline.x_slots, "Y_SLOTS": pipeline.y_slots, "LAG": pipeline.lag}
    return {**shape, "GROUP": pipeline.group, **slots}


def embeddings_of(launch: Launch, p: Panel) -> tuple[Tensor, Tensor]:
    return part(launch.x_MD, p.r), part(launch.y_ND, p.c)


def operands(x: Tensor, y: Tensor) -> tuple[Any, Any]:
    """Return the descriptors by which a kernel reads blocks of x and y."""
    return descriptor(x, STEP_BYTES // x.element_size()), descriptor(y, STEP_BYTES // y.element_size())


def descriptor(t: Tensor, width: int) -> Any:
    """Return a descriptor of blocks of TILE rows."""
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [TILE, width], _block_layout(width, t.element_size()))


@functools.cache
def _block_layout(width: int, size: int) -> Any:
    """Return how blocks of elements of one or two bytes lie in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([TILE, width], gl.int8 if size == 1 else gl.bfloat16)
