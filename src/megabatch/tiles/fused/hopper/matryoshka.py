"""The fast launches of ../matryoshka.py on Hopper: all widths in the pipeline of pipeline.py, so that one consumer is in the
epilogue of a width while the other multiplies.

A consumer of `stats` has a tile of 128 rows. One of `gradient` has 64, so that the tiles that it keeps fit into its registers.
Legend: ../../contract.py; the pipeline: pipeline.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..launch import VECTOR_ALIGNMENT, Launch, NormArgs, Panel, PartialSums, PrefixSoftmax, multiprocessors
from ..reductions import SUM, put
from ..tile import HIGHEST_PEAK, LARGEST_SUM, LOG2_E, SMALLEST_PREFIX_SUM
from .pipeline import (
    OPTIONS,
    REGISTERS,
    STEP_BYTES,
    WARPS,
    MaskArgs,
    allocate_slots,
    embeddings_of,
    exchange,
    load_x,
    load_y,
    negatives,
    similarities,
    tile_layout,
    tile_needs_mask,
    tile_pair_at,
    tile_pairs,
)
from .softmax_backward import _barrier


class PrefixPipeline(NamedTuple):
    """Configuration of a kernel, as tuned_configs.Pipeline.

    pieces: in how many pieces the epilogue handles a tile. looped: the widths share the code of one epilogue, but for the last in
    `gradient`; code that does not fit into the instruction cache has to be loaded again and again.
    """

    group: int
    x_slots: int
    y_slots: int
    lag: int
    out_slots: int
    pieces: int
    looped: bool


STATS_PIPELINE = PrefixPipeline(8, 3, 7, 4, 0, 4, looped=True)
GRADIENT_PIPELINE = PrefixPipeline(16, 3, 6, 4, 8, 4, looped=True)
# Rows of a consumer's tile, and columns of a tile.
STATS_ROWS, GRADIENT_ROWS, COLUMNS = 128, 64, 128


@gluon.constexpr_function
def _first_step(dims: tuple[int, ...], width: int, k: int) -> int:
    """Return the first step of the product that a width has and narrower ones do not."""
    return dims[width - 1] // k if width > 0 else 0


@gluon.jit
def _last_step(width, DIMS: gl.constexpr, K: gl.constexpr):
    """Return the step at which the product of a width ends."""
    last = DIMS[len(DIMS) - 1] // K
    for j in gl.static_range(len(DIMS) - 1):
        last = gl.where(width == j, DIMS[j] // K, last)
    return last


@gluon.jit
def _of_width(values, width, stride, i):
    """Return the values of a width for rows or columns i, which are padded."""
    return gl.load(values + width * stride * VECTOR_ALIGNMENT + i)


@gluon.jit
def _factor(scale):
    factor = gl.load(scale) * LOG2_E
    return gl.where(factor == 0, 1e-30, factor)


@gluon.jit
def _offset(factor):
    return gl.maximum(gl.abs(factor) - HIGHEST_PEAK * LOG2_E, 0.0)


@gluon.jit
def _pieces(z, M: gl.constexpr, N: gl.constexpr, PIECES: gl.constexpr):
    """Return the pieces of a tile from left to right, each in the layout of a product of that width."""
    if PIECES == 1:
        result = (gl.convert_layout(z, tile_layout(M, N), assert_trivial=True),)
    else:
        left, right = gl.split(gl.permute(gl.reshape(z, (M, 2, N // 2)), (0, 2, 1)))
        result = _pieces(left, M, N // 2, PIECES // 2) + _pieces(right, M, N // 2, PIECES // 2)
    return result


@gluon.jit
def _column_parts(values, M: gl.constexpr, N: gl.constexpr):
    """Return the sums of columns of each warp (4, N), as `reduce_columns` in ../reductions.py."""
    alone = gl.sum(gl.sum(gl.reshape(values, (M // 64, 4, 2, 8, N)), 2), 0)
    left, right = gl.split(gl.permute(gl.reshape(alone, (4, 2, 4, 2, N // 2)), (0, 1, 2, 4, 3)))
    left, right = gl.split(gl.permute(gl.reshape(exchange(left, right, 1, SUM), (8, 2, 2, 2, N // 4)), (0, 1, 2, 4, 3)))
    left, right = gl.split(gl.reshape(exchange(left, right, 1, SUM), (16, 2, 1, N // 8, 2)))
    return gl.reshape(gl.permute(exchange(left, right, 1, SUM), (0, 2, 3, 1)), (4, N))


@gluon.jit
def _concat(parts, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Return the (4, N) of neighbouring pieces as one."""
    if COUNT == 1:
        joined = parts[FIRST]
    else:
        left, right = _concat(parts, FIRST, COUNT // 2), _concat(parts, FIRST + COUNT // 2, COUNT // 2)
        joined = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), (4, 2 * left.shape[1]))
    return joined


@gluon.jit
def _put_columns(parts, channel, pairs, row, column, values, M: gl.constexpr, N: gl.constexpr):
    j, down = column + gl.arange(0, N, values.type.layout), gl.cdiv(pairs.rows, M)
    place = parts + (channel * down + row // M).to(gl.int64) * pairs.columns + j
    # The second tile of a pair may lie below the panel.
    gl.store(place, values, mask=(j < pairs.columns) & (row < pairs.rows))


@gluon.jit
def _put_rows(parts, channel, pairs, row, column, values, M: gl.constexpr, N: gl.constexpr):
    i = row + gl.arange(0, M, values.type.layout)
    put(parts, channel, column // N, gl.cdiv(pairs.columns, N), i, pairs.rows, values)


@gluon.jit
def _mark_fallback(needs_fallback, first, length, total, SIZE: gl.constexpr):
    within = gl.arange(0, SIZE, total.type.layout)
    gl.store(needs_fallback + within, 1, mask=(first + within < length) & ((total < SMALLEST_PREFIX_SUM) | (total > LARGEST_SUM)))


@gluon.jit(do_not_specialize=["rows", "columns", "shift", "row_stride", "column_stride"])
def pipelined_prefix_stats_kernel(
    x, y, scale, rx, ry, row_stride, column_stride, row_parts, column_parts, needs_fallback, rows, columns, shift,
    DIMS: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, PIECES: gl.constexpr,
    X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr, LAG: gl.constexpr, LOOPED: gl.constexpr,
):  # fmt: skip
    """Write the sums of each tile and width for its rows and, if column_parts is given, for its columns."""
    slots = allocate_slots(x, y, M, N, K, X_SLOTS, Y_SLOTS)
    pairs = MaskArgs(None, None, None, rows, columns, shift)
    norms = NormArgs(rx, ry, row_stride, column_stride)
    sums = PartialSums(row_parts, column_parts, needs_fallback)
    WIDTH: gl.constexpr = DIMS[len(DIMS) - 1]
    gl.warp_specialize(
        [
            (_sum, (slots, scale, norms, sums, pairs, gl.constexpr(0), DIMS, M, N, K, GROUP, PIECES, X_SLOTS, Y_SLOTS, LOOPED)),
            (_sum, (slots, scale, norms, sums, pairs, gl.constexpr(1), DIMS, M, N, K, GROUP, PIECES, X_SLOTS, Y_SLOTS, LOOPED)),
            (load_x, (x, slots, rows, columns, gl.constexpr(0), WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, LAG)),
            (load_x, (x, slots, rows, columns, gl.constexpr(1), WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, LAG)),
            (load_y, (y, slots, rows, columns, WIDTH, M, N, K, GROUP, Y_SLOTS)),
        ],
        WARPS,
        REGISTERS,
    )


@gluon.jit
def _sum(
    slots, scale, norms, sums, pairs, CONSUMER: gl.constexpr, DIMS: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    K: gl.constexpr, GROUP: gl.constexpr, PIECES: gl.constexpr, X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr, LOOPED: gl.constexpr,
):  # fmt: skip
    rows, columns = pairs.rows, pairs.columns
    WIDTH: gl.constexpr = DIMS[len(DIMS) - 1]
    factor = _factor(scale)
    z = gl.zeros((M, N), gl.float32, tile_layout(M, N))
    for n in range(tile_pairs(rows, columns, M, N)):
        row, column = tile_pair_at(n, rows, columns, M, N, GROUP)
        row += CONSUMER * M
        needs_mask = tile_needs_mask(pairs, row, column, True, M, N, N)
        if LOOPED:
            first = 0
            for width in range(len(DIMS)):
                last = _last_step(width, DIMS, K)
                z = _sum_width(
                    z, n, width, first, last, slots, factor, norms, sums, pairs, row, column, needs_mask, CONSUMER, WIDTH, M, N, K,
                    PIECES, X_SLOTS, Y_SLOTS,
                )  # fmt: skip
                first = last
        else:
            for width in gl.static_range(len(DIMS)):
                z = _sum_width(
                    z, n, width, _first_step(DIMS, width, K), DIMS[width] // K, slots, factor, norms, sums, pairs, row, column,
                    needs_mask, CONSUMER, WIDTH, M, N, K, PIECES, X_SLOTS, Y_SLOTS,
                )  # fmt: skip


@gluon.jit
def _sum_width(
    z, n, width, first_step, last_step, slots, factor, norms, sums, pairs, row, column, needs_mask, CONSUMER: gl.constexpr,
    WIDTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, PIECES: gl.constexpr, X_SLOTS: gl.constexpr,
    Y_SLOTS: gl.constexpr,
):  # fmt: skip
    """Continue the product of a tile up to a width, write the sums of this width, and return the product."""
    PIECE: gl.constexpr = N // PIECES
    layout: gl.constexpr = tile_layout(M, PIECE)
    down, across = gl.arange(0, M, gl.SliceLayout(1, layout)), gl.arange(0, PIECE, gl.SliceLayout(0, layout))
    factors_M = _of_width(norms.rx, width, norms.row_stride, row + down) * factor
    z = similarities(z, n, slots, CONSUMER, WIDTH, K, X_SLOTS, Y_SLOTS, first_step, last_step)
    pieces = _pieces(z, M, N, PIECES)
    column_parts = ()
    for piece in gl.static_range(PIECES):
        first = column + piece * PIECE
        factors_N = _of_width(norms.ry, width, norms.column_stride, first + across)
        power = gl.exp2(pieces[piece] * (factors_M[:, None] * factors_N[None, :]) - _offset(factor))
        if needs_mask:
            power = gl.where(negatives(pairs, row, first, True, M, PIECE, layout), power, 0.0)
        if sums.column_parts is not None:
            column_parts += (_column_parts(power, M, PIECE),)  # type: ignore[assignment]
        if piece == 0:
            total_M = gl.sum(power, 1)
        else:
            total_M += gl.sum(power, 1)
    _put_rows(sums.row_parts, 2 * width + 1, pairs, row, column, total_M, M, N)
    _mark_fallback(sums.needs_fallback, row, pairs.rows, total_M, M)
    if sums.column_parts is not None:
        total_N = gl.sum(_concat(column_parts, 0, PIECES), 0)
        _put_columns(sums.column_parts, 2 * width + 1, pairs, row, column, total_N, M, N)
        if row < pairs.rows:
            _mark_fallback(sums.needs_fallback, column, pairs.columns, total_N, N)
    return z


@gluon.jit(do_not_specialize=["rows", "columns", "shift", "row_stride", "column_stride", "panel_rows"])
def pipelined_prefix_gradient_kernel(
    x, y, scale, rx, ry, row_stride, column_stride, row_gain, column_gain, panels, row_parts, column_parts, rows, columns, shift,
    panel_rows,
    DIMS: gl.constexpr, KEPT: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    PIECES: gl.constexpr, X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr, LAG: gl.constexpr, OUT_SLOTS: gl.constexpr,
    LOOPED: gl.constexpr,
):  # fmt: skip
    """Write the panels and sums of ../matryoshka.py's `prefix_gradient_kernel`."""
    slots = allocate_slots(x, y, M, N, K, X_SLOTS, Y_SLOTS)
    out = gl.allocate_shared_memory(panels.dtype, [2 * OUT_SLOTS, M, N // PIECES], panels.layout)
    pairs = MaskArgs(None, None, None, rows, columns, shift)
    norms = NormArgs(rx, ry, row_stride, column_stride)
    softmax = PrefixSoftmax(row_gain, None, column_gain, None)
    sums = PartialSums(row_parts, column_parts, None)
    WIDTH: gl.constexpr = DIMS[len(DIMS) - 1]
    gl.warp_specialize(
        [
            (_write_gradient, (slots, scale, norms, softmax, panels, out, sums, pairs, panel_rows, gl.constexpr(0), DIMS,
                               KEPT, M, N, K, GROUP, PIECES, X_SLOTS, Y_SLOTS, OUT_SLOTS, LOOPED)),
            (_write_gradient, (slots, scale, norms, softmax, panels, out, sums, pairs, panel_rows, gl.constexpr(1), DIMS,
                               KEPT, M, N, K, GROUP, PIECES, X_SLOTS, Y_SLOTS, OUT_SLOTS, LOOPED)),
            (load_x, (x, slots, rows, columns, gl.constexpr(0), WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, LAG)),
            (load_x, (x, slots, rows, columns, gl.constexpr(1), WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, LAG)),
            (load_y, (y, slots, rows, columns, WIDTH, M, N, K, GROUP, Y_SLOTS)),
        ],
        WARPS,
        REGISTERS,
    )  # fmt: skip


@gluon.jit
def _write_gradient(
    slots, scale, norms, softmax, panels, out, sums, pairs, panel_rows, CONSUMER: gl.constexpr, DIMS: gl.constexpr,
    KEPT: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, PIECES: gl.constexpr,
    X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr, OUT_SLOTS: gl.constexpr, LOOPED: gl.constexpr,
):  # fmt: skip
    rows, columns = pairs.rows, pairs.columns
    PIECE: gl.constexpr = N // PIECES
    LAST: gl.constexpr = len(DIMS) - 1
    WIDTH: gl.constexpr = DIMS[LAST]
    factor = _factor(scale)
    z = gl.zeros((M, N), gl.float32, tile_layout(M, N))
    # Tiles of the widths before this one, the oldest first, piece after piece.
    kept = ()
    for _ in gl.static_range(KEPT * PIECES):
        kept += (_packed(gl.zeros((M, PIECE), gl.float32, tile_layout(M, PIECE)), M, PIECE),)  # type: ignore[assignment]
    # Stores so far, which tells the slot of the next.
    stores = 0
    for n in range(tile_pairs(rows, columns, M, N)):
        row, column = tile_pair_at(n, rows, columns, M, N, GROUP)
        row += CONSUMER * M
        needs_mask = tile_needs_mask(pairs, row, column, True, M, N, N)
        if LOOPED:
            first = 0
            for width in range(LAST):
                last = _last_step(width, DIMS, K)
                z, kept, stores = _write_width(
                    z, n, width, first, last, kept, stores, slots, factor, norms, softmax, panels, out, sums, pairs, row, column,
                    needs_mask, panel_rows, CONSUMER, WIDTH, LAST - KEPT, False, M, N, K, PIECES, X_SLOTS, Y_SLOTS, OUT_SLOTS,
                )  # fmt: skip
                first = last
        else:
            for width in gl.static_range(LAST):
                z, kept, stores = _write_width(
                    z, n, width, _first_step(DIMS, width, K), DIMS[width] // K, kept, stores, slots, factor, norms, softmax,
                    panels, out, sums, pairs, row, column, needs_mask, panel_rows, CONSUMER, WIDTH, LAST - KEPT, False, M, N, K,
                    PIECES, X_SLOTS, Y_SLOTS, OUT_SLOTS,
                )  # fmt: skip
        z, kept, stores = _write_width(
            z, n, LAST, _first_step(DIMS, LAST, K), WIDTH // K, kept, stores, slots, factor, norms, softmax, panels, out, sums,
            pairs, row, column, needs_mask, panel_rows, CONSUMER, WIDTH, LAST - KEPT, True, M, N, K, PIECES, X_SLOTS, Y_SLOTS,
            OUT_SLOTS,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _write_width(
    z, n, width, first_step, last_step, kept, stores, slots, factor, norms, softmax, panels, out, sums, pairs, row, column,
    needs_mask, panel_rows, CONSUMER: gl.constexpr, WIDTH: gl.constexpr, ALONE: gl.constexpr, IS_LAST: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, PIECES: gl.constexpr, X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr,
    OUT_SLOTS: gl.constexpr,
):  # fmt: skip
    """Continue the product of a tile up to a width, and write or keep the gradient of this width.

    ALONE: how many widths are groups of their own. All others are one group, whose tiles are written with its last.
    """
    PIECE: gl.constexpr = N // PIECES
    layout: gl.constexpr = tile_layout(M, PIECE)
    down, across = gl.arange(0, M, gl.SliceLayout(1, layout)), gl.arange(0, PIECE, gl.SliceLayout(0, layout))
    factors_M = _of_width(norms.rx, width, norms.row_stride, row + down) * factor
    gains_M = _of_width(softmax.row_gain, width, norms.row_stride, row + down)
    z = similarities(z, n, slots, CONSUMER, WIDTH, K, X_SLOTS, Y_SLOTS, first_step, last_step)
    pieces = _pieces(z, M, N, PIECES)
    column_parts, new = (), ()
    for piece in gl.static_range(PIECES):
        first = column + piece * PIECE
        both = factors_M[:, None] * _of_width(norms.ry, width, norms.column_stride, first + across)[None, :]
        gains = gains_M[:, None]
        if softmax.column_gain is not None:
            gains = gains + _of_width(softmax.column_gain, width, norms.column_stride, first + across)[None, :]
        q = gl.exp2(pieces[piece] * both - _offset(factor)) * (gains * both)
        if needs_mask:
            q = gl.where(negatives(pairs, row, first, True, M, PIECE, layout), q, 0.0)
        ps = q * pieces[piece]
        if sums.column_parts is not None:
            column_parts += (_column_parts(ps, M, PIECE),)  # type: ignore[assignment]
        if piece == 0:
            total_M = gl.sum(ps, 1)
        else:
            total_M += gl.sum(ps, 1)
        if IS_LAST:
            _store(q, panels, out, width * panel_rows + row, first, CONSUMER, stores, OUT_SLOTS)
            stores += 1
            for back in gl.static_range(1, len(kept) // PIECES + 1):
                q += _unpacked(kept[len(kept) - back * PIECES + piece], M, PIECE)
                _store(q, panels, out, (width - back) * panel_rows + row, first, CONSUMER, stores, OUT_SLOTS)
                stores += 1
        else:
            if width < ALONE:
                _store(q, panels, out, width * panel_rows + row, first, CONSUMER, stores, OUT_SLOTS)
                stores += 1
            new += (_packed(q, M, PIECE),)  # type: ignore[assignment]
    _put_rows(sums.row_parts, width, pairs, row, column, total_M, M, N)
    if sums.column_parts is not None:
        total_N = gl.sum(_concat(column_parts, 0, PIECES), 0)
        _put_columns(sums.column_parts, width, pairs, row, column, total_N, M, N)
    if not IS_LAST:
        kept = _shifted(kept, new)
    return z, kept, stores


@gluon.jit
def _shifted(kept, new):
    """Return the tiles with the oldest replaced by new ones, which are the last."""
    result = ()
    if len(kept) > 0:
        for i in gl.static_range(len(new), len(kept)):
            result += (kept[i],)
        for i in gl.static_range(len(new)):
            result += (new[i],)
    return result


@gluon.jit
def _packed(q, M: gl.constexpr, N: gl.constexpr):
    """Return neighbouring columns as two bf16 in an int32: the compiler would give each of them a register."""
    low, high = gl.split(gl.reshape(q, (M, N // 2, 2)))
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,r,r", [high, low], gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpacked(packed, M: gl.constexpr, N: gl.constexpr):
    low, high = (packed << 16).to(gl.float32, bitcast=True), (packed & -0x10000).to(gl.float32, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), (M, N)), tile_layout(M, N), assert_trivial=True)


@gluon.jit
def _store(q, panels, out, row, column, CONSUMER: gl.constexpr, stores, OUT_SLOTS: gl.constexpr):
    """Start the store of a piece through its slot. All stores have to be waited for before the kernel ends."""
    # The previous store from this slot has finished reading it.
    tma.store_wait(OUT_SLOTS - 1)
    _barrier()
    slot = out.index(CONSUMER * OUT_SLOTS + stores % OUT_SLOTS)
    slot.store(q.to(panels.dtype))
    fence_async_shared()
    _barrier()
    tma.async_copy_shared_to_global(panels, [row, column], slot)


def _descriptor(t: Tensor, rows: int, columns: int) -> Any:
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns], layout)


def _fits(launch: Launch, dims: tuple[int, ...], rows: int) -> bool:
    """Return whether the kernels can compute these widths in tiles that are those of the portable kernel."""
    step = STEP_BYTES // launch.x_MD.element_size()
    whole_steps = all(d % step == 0 for d in dims)
    return whole_steps and launch.x_MD.dtype == torch.bfloat16 and launch.blocks[:2] == (rows, COLUMNS)


def _arguments(launch: Launch, p: Panel, pipeline: PrefixPipeline, rows: int) -> tuple[tuple[int], tuple[Any, Any], dict[str, Any]]:
    """Return the grid, the operands and the constants of a kernel whose consumers have tiles of so many rows."""
    k = STEP_BYTES // launch.x_MD.element_size()
    x, y = embeddings_of(launch, p)
    pairs = -(-p.rows // (2 * rows)) * -(-p.columns // COLUMNS)
    constants = {"M": rows, "N": COLUMNS, "K": k, "GROUP": pipeline.group, "PIECES": pipeline.pieces, "X_SLOTS": pipeline.x_slots}
    constants |= {"Y_SLOTS": pipeline.y_slots, "LAG": pipeline.lag, "LOOPED": pipeline.looped, **OPTIONS}
    grid = (min(pairs, multiprocessors(launch.x_MD.device)),)
    return grid, (_descriptor(x, rows, k), _descriptor(y, COLUMNS, k)), constants


def prefix_stats(
    launch: Launch, p: Panel, scale: Tensor, dims: tuple[int, ...], norms: NormArgs, sums: PartialSums
) -> bool:  # fmt: skip
    """Compute the sums of a panel's tiles; see launch.SpecialisedKernels."""
    if not _fits(launch, dims, STATS_ROWS):
        return False
    grid, operands, constants = _arguments(launch, p, STATS_PIPELINE, STATS_ROWS)
    pipelined_prefix_stats_kernel[grid](
        *operands, scale, *norms, *sums, p.rows, p.columns, p.r.start - p.c.start, DIMS=dims, **constants
    )
    return True


def prefix_gradient(
    launch: Launch,
    p: Panel,
    scale: Tensor,
    dims: tuple[int, ...],
    norms: NormArgs,
    softmax: PrefixSoftmax,
    panels_JMN: Tensor,
    sums: PartialSums,
    group_ends: tuple[int, ...],
) -> bool:
    """Write the panels of all widths and the sums of a panel's tiles; see launch.SpecialisedKernels."""
    kept = group_ends.count(len(dims) - 1) - 1
    only_last_keeps = group_ends[: -kept - 1] == tuple(range(len(dims) - kept - 1))
    if not only_last_keeps or not _fits(launch, dims, GRADIENT_ROWS):
        return False
    pipeline = GRADIENT_PIPELINE
    grid, operands, constants = _arguments(launch, p, pipeline, GRADIENT_ROWS)
    target = _descriptor(panels_JMN.flatten(0, 1), GRADIENT_ROWS, COLUMNS // pipeline.pieces)
    pipelined_prefix_gradient_kernel[grid](
        *operands, scale, *norms, softmax.row_gain, softmax.column_gain, target, sums.row_parts, sums.column_parts, p.rows,
        p.columns, p.r.start - p.c.start, panels_JMN.shape[1], DIMS=dims, KEPT=kept, OUT_SLOTS=pipeline.out_slots,
        **constants,
    )  # fmt: skip
    return True
