"""Both products with the gradient of a panel whose exponentials were saved, on Hopper, without writing that gradient.

The gradient in the logits is an exponential times the sum of a row's and a column's gain. Writing it and reading it again takes as
long as 40 % of a product. Here a product reads exponentials, and multiplies them on their way from shared memory to the tensor
cores, which take one operand from registers.

Instructions on pairs of bf16 numbers do that, less than half as many as in fp32 with its conversions. The gain of an output row is
the sum of two bf16 numbers, because an error of it would be that of the whole row. Other roundings, of each sum and of the gains
along the sum, differ from entry to entry and average out.

A program computes 128 rows and 256 columns of a product. Two warp groups (consumers) have 64 rows each and share the blocks of
embeddings; another warp loads. Slots and barriers: pipeline.py; legend: ../../contract.py.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..launch import MARKS, cdiv, multiprocessors, run_kernel
from ..tile import any_fallback

# Rows of a consumer, entries of a step of the sum, and columns of the product.
ROWS, DEPTH, COLUMNS = 64, 64, 256
SLOTS = 4
# As in pipeline.py: two consumers take most of the registers of three warp groups.
OPTIONS = {"num_warps": 4, "maxnreg": 168}
WARPS = gl.constexpr([4, 1])
REGISTERS = gl.constexpr([232, 40])
# The share of the device that has to be busy with what is wanted: the last programs leave some multiprocessors idle, and columns of
# some programs may lie beyond the product.
MIN_BUSY = 0.9
GAINS_OF_A_PROGRAM = 1024


class Bf16Gains(NamedTuple):
    """Gains of the rows or of the columns of a panel.

    high, low: their sum is the gain, for the product that has these rows. inner: for the product that sums over them, in the order
    of `_place`. Where the panel holds its gradient already, these are one, zero and zero.
    """

    high: Any
    low: Any
    inner: Any


@gluon.jit(do_not_specialize=["rows", "steps"])
def product_kernel(
    exp, embeddings, product, high, low, inner, rows, steps,
    TRANSPOSED: gl.constexpr, WIDTH: gl.constexpr, M: gl.constexpr, K: gl.constexpr, N: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Write (exp ⊙ gains) @ embeddings, or of the transposed exponentials.

    steps: blocks of K entries to sum over, an even number. WIDTH: of the product; embeddings may be wider.
    """
    exps = gl.allocate_shared_memory(exp.dtype, [2 * SLOTS, K, M] if TRANSPOSED else [2 * SLOTS, M, K], exp.layout)
    others = gl.allocate_shared_memory(embeddings.dtype, [SLOTS, K, N], embeddings.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    # Programs side by side read the same exponentials.
    ACROSS: gl.constexpr = (WIDTH + N - 1) // N
    row, column = gl.program_id(0) // ACROSS * 2 * M, gl.program_id(0) % ACROSS * N
    gains = Bf16Gains(high, low, inner)
    gl.warp_specialize(
        [
            (_multiply, (exps, others, full, empty, product, gains, row, column, rows, steps, gl.constexpr(0), TRANSPOSED, WIDTH,
                         M, K, N, SLOTS)),
            (_multiply, (exps, others, full, empty, product, gains, row, column, rows, steps, gl.constexpr(1), TRANSPOSED, WIDTH,
                         M, K, N, SLOTS)),
            (_load, (exp, embeddings, exps, others, full, empty, row, column, steps, TRANSPOSED, M, K, N, SLOTS)),
        ],
        WARPS,
        REGISTERS,
    )  # fmt: skip


@gluon.jit
def _load(
    exp, embeddings, exps, others, full, empty, row, column, steps,
    TRANSPOSED: gl.constexpr, M: gl.constexpr, K: gl.constexpr, N: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Producer: fill the slots with the exponentials of both consumers and the embeddings of a step."""
    for k in range(steps):
        slot = k % SLOTS
        mbarrier.wait(empty.index(slot), ((k // SLOTS) & 1) ^ 1)
        mbarrier.expect(full.index(slot), (2 * M * K + K * N) * exp.dtype.primitive_bitwidth // 8)
        for consumer in gl.static_range(2):
            first = row + consumer * M
            block = exps.index(2 * slot + consumer)
            if TRANSPOSED:
                tma.async_copy_global_to_shared(exp, [k * K, first], full.index(slot), block)
            else:
                tma.async_copy_global_to_shared(exp, [first, k * K], full.index(slot), block)
        tma.async_copy_global_to_shared(embeddings, [k * K, column], full.index(slot), others.index(slot))


@gluon.jit
def _multiply(
    exps, others, full, empty, product, gains, row, column, rows, steps, CONSUMER: gl.constexpr,
    TRANSPOSED: gl.constexpr, WIDTH: gl.constexpr, M: gl.constexpr, K: gl.constexpr, N: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    row += CONSUMER * M
    i = row + gl.arange(0, M, gl.SliceLayout(1, operand))
    high, low = gl.load(gains.high + i)[:, None], gl.load(gains.low + i)[:, None]
    z = gl.zeros((M, N), gl.float32, layout)
    mbarrier.wait(full.index(0), 0)
    g = _gradient(exps.index(CONSUMER), high, low, gains, 0, TRANSPOSED, K, operand)
    # Two steps at a time: the gradient of one is computed in registers that the product of the other does not read.
    for pair in range(steps // 2 - 1):
        z, next_g = _advance(z, g, 2 * pair, exps, others, full, empty, high, low, gains, CONSUMER, TRANSPOSED, K, SLOTS, operand)
        z, g = _advance(
            z, next_g, 2 * pair + 1, exps, others, full, empty, high, low, gains, CONSUMER, TRANSPOSED, K, SLOTS, operand
        )
    z, g = _advance(z, g, steps - 2, exps, others, full, empty, high, low, gains, CONSUMER, TRANSPOSED, K, SLOTS, operand)
    z = warpgroup_mma(g, others.index((steps - 1) % SLOTS), z, is_async=True)
    z, g = warpgroup_mma_wait(0, deps=(z, g))
    i = row + gl.arange(0, M, gl.SliceLayout(1, layout))
    j = column + gl.arange(0, N, gl.SliceLayout(0, layout))
    inside = (i < rows)[:, None]
    if WIDTH % N != 0:
        inside = inside & (j < WIDTH)[None, :]
    gl.store(product + i.to(gl.int64)[:, None] * WIDTH + j[None, :], z, mask=inside)


@gluon.jit
def _advance(
    z, g, k, exps, others, full, empty, high, low, gains,
    CONSUMER: gl.constexpr, TRANSPOSED: gl.constexpr, K: gl.constexpr, SLOTS: gl.constexpr, operand: gl.constexpr,
):  # fmt: skip
    """Add the product of step k, whose gradient is given, and return the sum and the gradient of the next step."""
    slot, next_slot, next_phase = k % SLOTS, (k + 1) % SLOTS, ((k + 1) // SLOTS) & 1
    z = warpgroup_mma(g, others.index(slot), z, is_async=True)
    mbarrier.wait(full.index(next_slot), next_phase)
    next_g = _gradient(exps.index(2 * next_slot + CONSUMER), high, low, gains, k + 1, TRANSPOSED, K, operand)
    # Does not wait, since that phase is over, but ends a basic block: ptxas would put the arithmetic behind the wait for the
    # product.
    mbarrier.wait(full.index(next_slot), next_phase)
    z, g = warpgroup_mma_wait(0, deps=(z, g))
    mbarrier.arrive(empty.index(slot), count=1)
    return z, next_g


@gluon.jit
def _gradient(block, high, low, gains, k, TRANSPOSED: gl.constexpr, K: gl.constexpr, operand: gl.constexpr):
    """Return the exponentials of a block times their gains."""
    # A thread loads its gains at once. The permutation moves nothing between threads.
    inner = gl.load(gains.inner + k * K + gl.arange(0, K, gl.BlockedLayout([K // 4], [32], [4], [0])))
    inner = gl.reshape(gl.permute(gl.reshape(inner, (4, K // 16, 2, 2)), (1, 2, 0, 3)), (K,))
    inner = gl.convert_layout(inner, gl.SliceLayout(0, operand), assert_trivial=True)[None, :]
    if TRANSPOSED:
        block = block.permute((1, 0))
    e = block.load(operand)
    # The small term first. With the other two in the other order, ptxas copies operands from register to register.
    return _fma(e, inner, _fma(e, high, _product(e, low)))


@gluon.jit
def _fma(a, b, c):
    """Return a * b + c of bf16 numbers, two at a time, rounded once."""
    return gl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _product(a, b):
    return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], gl.bfloat16, is_pure=True, pack=2)


@triton.jit
def bf16_gains_kernel(
    row_gains, column_gains, needs_fallback, high, low, inner, rows, columns,
    MARKS: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Write the Bf16Gains of the first `rows` gains of rows, and behind them those of `columns` gains of columns."""
    programs = tl.cdiv(rows, R)
    is_gradient = any_fallback(needs_fallback, MARKS)
    if tl.program_id(0) < programs:
        _put_bf16(row_gains, is_gradient, high, low, inner, tl.program_id(0) * R, rows, K, R)
    else:
        first = (tl.program_id(0) - programs) * R
        _put_bf16(column_gains, is_gradient, high + rows, low + rows, inner + rows, first, columns, K, R)


@triton.jit
def _put_bf16(gains, is_gradient, high, low, inner, first, length, K: tl.constexpr, R: tl.constexpr):
    i = first + tl.arange(0, R)
    inside = i < length
    g = tl.where(is_gradient, 0.0, tl.load(gains + i, mask=inside, other=0.0))
    rounded = g.to(tl.bfloat16)
    tl.store(high + i, tl.where(is_gradient, 1.0, rounded.to(tl.float32)).to(tl.bfloat16), mask=inside)
    tl.store(low + i, (g - rounded.to(tl.float32)).to(tl.bfloat16), mask=inside)
    tl.store(inner + _place(i, K), rounded, mask=inside)


@triton.jit
def _place(i, K: tl.constexpr):
    """Return where the gain of entry i is: those of a step lie together that one of four threads needs, two in each eight."""
    within = i % K
    return i - within + within // 2 % 4 * (K // 4) + within // 8 * 2 + within % 2


def padded(rows: int) -> int:
    """Return the number of rows of all programs, which is that of all pairs of steps too (ROWS = DEPTH)."""
    return cdiv(rows, 2 * ROWS) * 2 * ROWS


def bf16_gains(
    row_gains: Tensor, column_gains: Tensor, rows: int, columns: int, needs_fallback: Tensor
) -> tuple[Bf16Gains, Bf16Gains]:
    """Return the first gains of rows and of columns in bf16.

    rows, columns: how many, as `padded` gives them.
    """
    made = torch.empty(3, rows + columns, dtype=torch.bfloat16, device=needs_fallback.device)
    run_kernel(
        bf16_gains_kernel, (cdiv(rows, GAINS_OF_A_PROGRAM) + cdiv(columns, GAINS_OF_A_PROGRAM),),
        row_gains, column_gains, needs_fallback, *made.unbind(), rows, columns, MARKS=MARKS, K=DEPTH, R=GAINS_OF_A_PROGRAM,
    )  # fmt: skip
    of_rows, of_columns = made.split((rows, columns), dim=1)
    return Bf16Gains(*of_rows.unbind()), Bf16Gains(*of_columns.unbind())


def fits(rows: int, width: int, device: torch.device) -> bool:
    """Return whether programs of such a product keep the device busy with what is wanted."""
    programs, available = _programs(rows, width), multiprocessors(device)
    wanted = width / (cdiv(width, COLUMNS) * COLUMNS)
    return wanted * programs >= MIN_BUSY * cdiv(programs, available) * available


def _programs(rows: int, width: int) -> int:
    return cdiv(rows, 2 * ROWS) * cdiv(width, COLUMNS)


def write_product(panel: Tensor, embeddings: Tensor, outer: Bf16Gains, inner: Bf16Gains, into: Tensor, *, transposed: bool) -> None:
    """Write the product of a panel, or of its transpose, with embeddings. outer, inner: gains of its rows and columns."""
    depth, rows = panel.shape if transposed else panel.shape[::-1]
    # Embeddings may be padded.
    blocks, width = [DEPTH, ROWS] if transposed else [ROWS, DEPTH], into.shape[1]
    run_kernel(
        product_kernel, (_programs(rows, width),),
        _descriptor(panel, blocks), _descriptor(embeddings, [DEPTH, COLUMNS]), into, outer.high, outer.low, inner.inner, rows,
        2 * cdiv(depth, 2 * DEPTH), TRANSPOSED=transposed, WIDTH=width, M=ROWS, K=DEPTH, N=COLUMNS, SLOTS=SLOTS, **OPTIONS,
    )  # fmt: skip


def _descriptor(t: Tensor, blocks: list[int]) -> Any:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), blocks, _layout(*blocks))


@functools.cache
def _layout(rows: int, columns: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
