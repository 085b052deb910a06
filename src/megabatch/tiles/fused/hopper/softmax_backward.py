"""The fast launch of ../softmax_backward.py on Hopper, for bf16 and pairs that all count alike: no further positives, no dropping.

Similarities are computed again in bf16 or, where that was asked for, in int8 (../int8.py). Legend: ../../contract.py; the pipeline:
pipeline.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..int8 import Correction, Int8Embeddings, Int8Operands, correct_large
from ..launch import GradsRequest, Launch, Panel, SpecialisedGrads, cdiv, part, run_kernel
from ..tile import LOG2_E, PairArgs, exp_offset
from ..tuned_configs import Pipeline
from ..unshifted_gains import UnshiftedGains, unshifted_gains
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
    tile_layout,
    tile_needs_mask,
    tile_pair_at,
    tile_pairs,
)
from .saved_products import bf16_gains, fits, padded, write_product


class UnshiftedSoftmax(NamedTuple):
    """Unshifted gains of rows and columns (tile.unshifted_gain), and the targets of pairs that count (contract.Softmax)."""

    row_gain: Any
    row_counted: Any
    column_gain: Any
    column_counted: Any


class Int8Args(NamedTuple):
    """For int8 operands: their steps and biases (QuantisedRows), the limit of gradients, and where to mark (tile, row) that some
    gradient is above it."""

    row_step: Any
    row_bias: Any
    column_step: Any
    column_bias: Any
    limit: Any
    large: Any


@gluon.jit(do_not_specialize=["rows", "columns", "shift"])
def gradient_kernel(
    x, y, scale, gradient, row_gain, row_counted, column_gain, column_counted, row_step, row_bias, column_step, column_bias,
    limit, large, matches, ids_M, ids_N, rows, columns, shift,
    IS_LOCAL: gl.constexpr, WIDTH: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr, LAG: gl.constexpr, OUT_SLOTS: gl.constexpr, MATCH_WIDTH: gl.constexpr,
):  # fmt: skip
    """Write the gradient in the logits, zero for pairs that do not count and for positives. Gains are unshifted."""
    slots = allocate_slots(x, y, M, N, K, X_SLOTS, Y_SLOTS)
    # A tile leaves in quarters, through OUT_SLOTS slots per consumer, which the next tile uses in the same order.
    gl.static_assert(4 % OUT_SLOTS == 0)
    out = gl.allocate_shared_memory(gradient.dtype, [2 * OUT_SLOTS, M, N // 4], gradient.layout)
    pairs = MaskArgs(matches, ids_M, ids_N, rows, columns, shift)
    softmax = UnshiftedSoftmax(row_gain, row_counted, column_gain, column_counted)
    int8 = Int8Args(row_step, row_bias, column_step, column_bias, limit, large)
    gl.warp_specialize(
        [
            (_consume, (slots, scale, gradient, out, softmax, int8, pairs, gl.constexpr(0), IS_LOCAL, WIDTH, M, N, K, GROUP,
                        X_SLOTS, Y_SLOTS, OUT_SLOTS, MATCH_WIDTH)),
            (_consume, (slots, scale, gradient, out, softmax, int8, pairs, gl.constexpr(1), IS_LOCAL, WIDTH, M, N, K, GROUP,
                        X_SLOTS, Y_SLOTS, OUT_SLOTS, MATCH_WIDTH)),
            (load_x, (x, slots, rows, columns, gl.constexpr(0), WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, LAG)),
            (load_x, (x, slots, rows, columns, gl.constexpr(1), WIDTH, M, N, K, GROUP, X_SLOTS, Y_SLOTS, LAG)),
            (load_y, (y, slots, rows, columns, WIDTH, M, N, K, GROUP, Y_SLOTS)),
        ],
        WARPS,
        REGISTERS,
    )  # fmt: skip


@gluon.jit
def _consume(
    slots, scale, gradient, out, softmax, int8, pairs, CONSUMER: gl.constexpr, IS_LOCAL: gl.constexpr, WIDTH: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, X_SLOTS: gl.constexpr, Y_SLOTS: gl.constexpr,
    OUT_SLOTS: gl.constexpr, MATCH_WIDTH: gl.constexpr,
):  # fmt: skip
    rows, columns = pairs.rows, pairs.columns
    QUARTER: gl.constexpr = N // 4
    layout: gl.constexpr = tile_layout(M, QUARTER)
    down, across = gl.arange(0, M, gl.SliceLayout(1, layout)), gl.arange(0, QUARTER, gl.SliceLayout(0, layout))
    # Logits in base 2.
    factor, offset = gl.load(scale) * LOG2_E, exp_offset(gl.load(scale)) * LOG2_E
    z = gl.zeros((M, N), gl.float32, tile_layout(M, N))
    for n in range(tile_pairs(rows, columns, M, N)):
        row, column = tile_pair_at(n, rows, columns, M, N, GROUP)
        row += CONSUMER * M
        i = row + down
        # Loaded before the product, gains have arrived after it. They are padded to whole pairs of tiles.
        gains_M, gains_N = gl.load(softmax.row_gain + i), softmax.row_gain
        if softmax.column_gain is not None:
            gains_N = _load_quarters(softmax.column_gain, column + across, QUARTER)
        if int8.row_step is None:
            z = similarities(z, n, slots, CONSUMER, WIDTH, K, X_SLOTS, Y_SLOTS)
            quarters = split_quarters(z, M, N)
        else:
            factors_M, biases_M = factor * gl.load(int8.row_step + i), factor * gl.load(int8.row_bias + i) - offset
            steps_N = _load_quarters(int8.column_step, column + across, QUARTER)
            # Given the previous product instead of zeros, the compiler would keep it beside what is made of it.
            zeros = gl.zeros((M, N), gl.int32, tile_layout(M, N, 8))
            quarters = split_quarters(similarities(zeros, n, slots, CONSUMER, WIDTH, K, X_SLOTS, Y_SLOTS), M, N)
        needs_mask = tile_needs_mask(pairs, row, column, IS_LOCAL, M, N, MATCH_WIDTH)
        for q in gl.static_range(4):
            first = column + q * QUARTER
            gains = gains_M[:, None]
            if softmax.column_gain is not None:
                gains = gains + gains_N[q][None, :]
            if int8.row_step is None:
                g = gl.exp2(quarters[q] * factor - offset) * gains
            else:
                # There are no registers for those of all quarters.
                biases = biases_M[:, None] + factor * gl.load(int8.column_bias + first + across)[None, :]
                g = gl.exp2(quarters[q].to(gl.float32) * (factors_M[:, None] * steps_N[q][None, :]) + biases) * gains
            if softmax.row_counted is not None:
                g -= _load(softmax.row_counted, i, rows)[:, None]
                if softmax.column_counted is not None:
                    g -= _load(softmax.column_counted, first + across, columns)[None, :]
            if needs_mask:
                g = gl.where(negatives(pairs, row, first, IS_LOCAL, M, QUARTER, layout), g, 0.0)
            if int8.row_step is not None:
                if q == 0:
                    largest = _fold_max(g, M, QUARTER)
                else:
                    largest = gl.maximum(largest, _fold_max(g, M, QUARTER))
            store_quarter(g, gradient, out, row, first, CONSUMER, q, OUT_SLOTS)
        if int8.row_step is not None:
            place = (column // N).to(gl.int64) * rows + i
            largest_M = gl.convert_layout(gl.max(largest, 1), gl.SliceLayout(1, layout), assert_trivial=True)
            gl.store(int8.large + place, (largest_M > gl.load(int8.limit)).to(gl.int8), mask=i < rows)
    tma.store_wait(0)


@gluon.jit
def _load_quarters(values, j, QUARTER: gl.constexpr):
    """Return the values for the columns of a tile's quarters. j: the columns of the first."""
    place = values + j
    return gl.load(place), gl.load(place + QUARTER), gl.load(place + 2 * QUARTER), gl.load(place + 3 * QUARTER)


@gluon.jit
def _fold_max(values, M: gl.constexpr, N: gl.constexpr):
    """Return the maximum of both halves, again and again, as long as a thread holds both."""
    if N > 8:
        left, right = gl.split(gl.permute(gl.reshape(values, (M, 2, N // 2)), (0, 2, 1)))
        folded = _fold_max(gl.maximum(left, right), M, N // 2)
    else:
        folded = values
    return folded


@gluon.jit
def _load(values, i, length):
    return gl.load(values + i, mask=i < length, other=0.0)


class _GradientWriter:
    """Writes the gradient of one panel after another; gains and quantised embeddings are made for the first that needs them."""

    def __init__(self, launch: Launch, request: GradsRequest) -> None:
        self.launch, self.request = launch, request
        self.gains: UnshiftedGains | None = None
        self.int8 = None if request.dpos_M is None else Int8Embeddings(launch, request.dpos_M, 2 * TILE)

    def __call__(self, p: Panel, panel: Tensor, pair_args: PairArgs) -> bool:
        int8 = None
        pipeline = select_pipeline(self.launch, p, torch.int8) if self.int8 else None
        if self.int8 and pipeline:
            int8 = self.int8.operands(p)
        pipeline = pipeline or select_pipeline(self.launch, p)
        if pipeline is None:
            return False
        self._write(pipeline, p, panel, pair_args, self._unshifted_gains(), int8)
        return True

    def saved_products(self, p: Panel) -> Callable[[Tensor, Tensor | None, Tensor | None], None] | None:
        """See launch.SpecialisedGrads."""
        x, y = self.launch.x_MD, self.launch.y_ND
        is_first = not p.r.start and not p.c.start
        if x.dtype != torch.bfloat16 or self.request.columns is None or self.request.rows.counted is not None or not is_first:
            return None
        if not all(fits(rows, x.shape[1], x.device) for rows in (p.rows, p.columns)):
            return None
        row_gains, column_gains = self._unshifted_gains()
        assert column_gains is not None

        def multiply(panel: Tensor, gx: Tensor | None, gy: Tensor | None) -> None:
            marks = self.request.needs_fallback
            rows, columns = bf16_gains(row_gains, column_gains, padded(p.rows), padded(p.columns), marks)
            if gx is not None:
                write_product(panel, part(y, p.c), rows, columns, gx, transposed=False)
            if gy is not None:
                write_product(panel, part(x, p.r), columns, rows, gy, transposed=True)

        return multiply

    def _unshifted_gains(self) -> UnshiftedGains:
        if self.gains is None:
            self.gains = unshifted_gains(self.request.scale, self.request.rows, self.request.columns, self.request.needs_fallback)
        return self.gains

    def _write(
        self, pipeline: Pipeline, p: Panel, panel: Tensor, pair_args: PairArgs, unshifted: UnshiftedGains, int8: Int8Operands | None
    ) -> None:  # fmt: skip
        launch, (scale, pairs, rows, columns, *_) = self.launch, self.request
        gains = unshifted.rows[p.r.start :], None if unshifted.columns is None else unshifted.columns[p.c.start :]
        counted_N = None if columns is None else part(columns.counted, p.c)
        softmax = UnshiftedSoftmax(gains[0], part(rows.counted, p.r), gains[1], counted_N)
        (x, y), int8_args = embeddings_of(launch, p), Int8Args(*(None,) * 6)
        if int8 is not None:
            x, y = int8.x.values, int8.y.values
            large = x.new_empty(cdiv(p.columns, TILE), p.rows)
            int8_args = Int8Args(*int8.x[1:], *int8.y[1:], int8.limit, large)
        run_kernel(
            gradient_kernel, grid(launch, p),
            *operands(x, y), scale, descriptor(panel, TILE // 4), *softmax, *int8_args, pair_args.matches, pair_args.ids_M,
            pair_args.ids_N, p.rows, p.columns, pair_args.shift, IS_LOCAL=pairs.is_local, MATCH_WIDTH=launch.blocks.n,
            OUT_SLOTS=pipeline.out_slots, **constants(x, pipeline), **OPTIONS,
        )  # fmt: skip
        if int8 is not None:
            correct_large(launch, p, panel, Correction(scale, int8_args.large, TILE, int8.limit, *gains))


def softmax_grads(launch: Launch, request: GradsRequest) -> SpecialisedGrads:
    """Return the kernels of a backward pass; see launch.SpecialisedKernels."""
    return _GradientWriter(launch, request)
