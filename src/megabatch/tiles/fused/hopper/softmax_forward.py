"""The fast launch of ../softmax_forward.py on Hopper, for pairs that all count alike: no ranking, no dropping, no label
smoothing.

Legend: ../../contract.py; the pipeline: pipeline.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ...contract import Pairs
from ..launch import Launch, Panel, PartialSums, run_kernel
from ..reductions import put
from ..tile import LARGEST_SUM, LOG2_E, SMALLEST_SUM, PairArgs, exp_offset
from .pipeline import (
    OPTIONS,
    REGISTERS,
    TILE,
    WARPS,
    MaskArgs,
    allocate_slots,
    constants,
    descriptor,
    embeddings_of,
    grid,
    load_x,
    load_y,
    negatives,
    operands,
    select_pipeline,
    similarities,
    split_quarters,
    store_quarter,
    sum_columns,
    tile_layout,
    tile_needs_mask,
    tile_pair_at,
    tile_pairs,
)

# Where exponentials are saved, their slots take the place of two for y.
OUT_SLOTS, Y_SLOTS_TO_SAVE, LAG_TO_SAVE, GROUP_TO_SAVE = 2, 5, 4, 16


@gluon.jit(do_not_specialize=["rows", "columns", "shift"])
def stats_kernel(
    x, y, scale, row_parts, column_parts, needs_fallback, saved, matches, ids_M, ids_N, rows, columns, shift,
    IS_LOCAL: gl.constexpr, WIDTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr, LAG: gl.constexpr, OUT_SLOTS: gl.constexpr,
):  # fmt: skip
    """Write the sums of each tile for its rows and, if column_parts is given, for its columns; and its exponentials to saved."""
    slots = allocate_slots(x, y, M, N, K, X_SLOTS, Y_SLOTS)
    out = slots.xs
    if saved is not None:
        # As gradients do (softmax_backward.py), a tile leaves in quarters.
        gl.static_assert(4 % OUT_SLOTS == 0)
        out = gl.allocate_shared_memory(saved.dtype, [2 * OUT_SLOTS, M, N // 4], saved.layout)
    pairs = MaskArgs(matches, ids_M, ids_N, rows, columns, shift)
    sums = PartialSums(row_parts, column_parts, needs_fallback)
    gl.warp_specialize(
        [
            (_consume, (slots, scale, sums, saved, out, pairs, gl.constexpr(0), IS_LOCAL, WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS,
                        OUT_SLOTS)),
            (_consume, (slots, scale, sums, saved, out, pairs, gl.constexpr(1), IS_LOCAL, WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS,
                        OUT_SLOTS)),
            (load_x, (x, slots, rows, columns, gl.constexpr(0), WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, LAG)),
            (load_x, (x, slots, rows, columns, gl.constexpr(1), WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, LAG)),
            (load_y, (y, slots, rows, columns, WIDTH, M, N, K, GROUP, Y_SLOTS)),
        ],
        WARPS,
        REGISTERS,
    )  # fmt: skip


@gluon.jit
def _consume(
    slots, scale, sums, saved, out, pairs, CONSUMER: gl.constexpr, IS_LOCAL: gl.constexpr, WIDTH: gl.constexpr, M: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr, OUT_SLOTS: gl.constexpr,
):  # fmt: skip
    rows, columns = pairs.rows, pairs.columns
    layout: gl.constexpr = tile_layout(M, N)
    # Logits in base 2.
    factor, offset = gl.load(scale) * LOG2_E, exp_offset(gl.load(scale)) * LOG2_E
    z = gl.zeros((M, N), gl.float32, layout)
    for n in range(tile_pairs(rows, columns, M, N)):
        row, column = tile_pair_at(n, rows, columns, M, N, GROUP)
        row += CONSUMER * M
        z = similarities(z, n, slots, CONSUMER, WIDTH, K, X_SLOTS, Y_SLOTS)
        needs_mask = tile_needs_mask(pairs, row, column, IS_LOCAL, M, N, N)
        power = gl.exp2(z * factor - offset)
        if needs_mask:
            power = gl.where(negatives(pairs, row, column, IS_LOCAL, M, N, layout), power, 0.0)
        if saved is not None:
            quarters = split_quarters(power, M, N)
            for q in gl.static_range(4):
                store_quarter(quarters[q], saved, out, row, column + q * (N // 4), CONSUMER, q, OUT_SLOTS)
        total = gl.sum(power, 1)
        _put_rows(sums, pairs, row, column, total, M, N)
        _mark_fallback(sums.needs_fallback, row, rows, total, M)
        if sums.column_parts is not None:
            total = sum_columns(power, M, N)
            _put_columns(sums, pairs, row, column, total, M, N)
            if row < rows:
                _mark_fallback(sums.needs_fallback, column, columns, total, N)
        # The next product takes these registers, so that z is not kept alive until then.
        z = power
    if saved is not None:
        tma.store_wait(0)


@gluon.jit
def _put_rows(sums, pairs, row, column, values, M: gl.constexpr, N: gl.constexpr):
    i = row + gl.arange(0, M, values.type.layout)
    put(sums.row_parts, 1, column // N, gl.cdiv(pairs.columns, N), i, pairs.rows, values)


@gluon.jit
def _put_columns(sums, pairs, row, column, values, M: gl.constexpr, N: gl.constexpr):
    j, tiles = column + gl.arange(0, N, values.type.layout), gl.cdiv(pairs.rows, M)
    place = sums.column_parts + (tiles + row // M).to(gl.int64) * pairs.columns + j
    # The second tile of a pair may lie below the panel.
    gl.store(place, values, mask=(j < pairs.columns) & (row < pairs.rows))


@gluon.jit
def _mark_fallback(needs_fallback, first, length, total, SIZE: gl.constexpr):
    """Set marks where sums are out of range."""
    within = gl.arange(0, SIZE, total.type.layout)
    gl.store(needs_fallback + within, 1, mask=(first + within < length) & ((total < SMALLEST_SUM) | (total > LARGEST_SUM)))


def softmax_stats(
    launch: Launch, p: Panel, scale: Tensor, sums: PartialSums, pair_args: PairArgs, pairs: Pairs, saved: Tensor | None
) -> bool:
    """Compute the sums of a panel's tiles, and its exponentials if wanted; see launch.SpecialisedKernels."""
    pipeline = select_pipeline(launch, p)
    if pipeline is None or (saved is not None and saved.dtype != torch.bfloat16):
        return False
    target = None
    if saved is not None:
        pipeline = pipeline._replace(group=GROUP_TO_SAVE, y_slots=Y_SLOTS_TO_SAVE, lag=LAG_TO_SAVE)
        target = descriptor(saved, TILE // 4)
    run_kernel(
        stats_kernel, grid(launch, p),
        *operands(*embeddings_of(launch, p)), scale, *sums, target, pair_args.matches, pair_args.ids_M, pair_args.ids_N, p.rows,
        p.columns, pair_args.shift, IS_LOCAL=pairs.is_local, OUT_SLOTS=OUT_SLOTS, **constants(launch.x_MD, pipeline), **OPTIONS,
    )  # fmt: skip
    return True
