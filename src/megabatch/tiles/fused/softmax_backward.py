"""Backward of the softmax loss: the kernels and the launcher. Legend: ../contract.py; panels and tiles: tile.py; why there are a
fast and a safe launch: softmax_forward.py.

A kernel writes the gradient in the logits of a panel, from similarities that it computes again or from exponentials that forward
has saved. Two GEMMs with the panel follow (gradient_panels.py). If only rows have a softmax, their gains are factors of x and of
the other product, so the GEMMs take saved exponentials themselves. For rows and columns, an architecture may have products that
do (launch.SpecialisedGrads). In both cases the gradient is written only where the safe launch is needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import ComputeOptions, NeedsGrad, Pairs, Softmax
from .architectures import architecture_of
from .gradient_panels import ROW_ALIGNMENT, GradientProducts, SavedExp
from .launch import (
    MARKS,
    GradsRequest,
    Launch,
    Panel,
    as_compared_ids,
    cdiv,
    is_multi_positive,
    multiprocessors,
    on_device_of_input,
    part,
    run_kernel,
    without_saved_exp,
)
from .tile import (
    LOG2_E,
    PairArgs,
    Target,
    ToLogits,
    any_fallback,
    exp_offset,
    exp_peak_out_of_range,
    further_positives,
    halves,
    load_vector,
    mark_fallback,
    masked_logits,
    round_to_tf32,
    similarities,
    store_block,
    tile_at,
    tile_needs_mask,
    unshifted_gain,
)
from .unshifted_gains import unshifted_gains

# The tile of the kernel that reads saved exponentials.
SAVED_ROWS, SAVED_COLUMNS = 16, 512
# Programs per multiprocessor of the one that does so only if a mark is set.
PROGRAMS_IF_MARKED = 8


class SoftmaxArgs(NamedTuple):
    """The softmax of rows and columns (contract.Softmax) of a panel; None for what there is not."""

    row_peak: Any
    row_gain: Any
    row_further: Any
    row_counted: Any
    column_peak: Any
    column_gain: Any
    column_further: Any
    column_counted: Any


class Gains(NamedTuple):
    """The factors of exp(s - offset) for rows (M, 1) and columns (M, N); zero beyond the panel."""

    rows: Any
    columns: Any


@triton.jit(do_not_specialize=["rows", "columns", "shift", "stride"])
def gradient_kernel(
    x, y, scale, gradient, needs_fallback, row_peak, row_gain, row_further, row_counted,
    column_peak, column_gain, column_further, column_counted,
    matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns, shift, stride,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, SAFE: tl.constexpr,
    WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Write the gradient in the logits, zero for pairs that do not count and for positives.

    SAFE: compute only the tiles with a peak out of the range in which exp(s - offset) may be used without subtracting it.
    """
    # Logits in base 2, except in the safe launch, whose logits are too large for another rounding.
    offset = exp_offset(tl.load(scale))
    if SAFE:
        to_logits = ToLogits(tl.load(scale), 0.0)
    else:
        to_logits = ToLogits(tl.load(scale) * LOG2_E, offset * LOG2_E)
    pairs = PairArgs(matches, ids_M, ids_N, positive_M, positive_N, margin, rows, columns, shift)
    softmax = SoftmaxArgs(row_peak, row_gain, row_further, row_counted, column_peak, column_gain, column_further, column_counted)
    target = Target(gradient, stride)
    tiles = tl.cdiv(rows, M) * tl.cdiv(columns, N)
    if SAFE:
        tiles = tl.where(any_fallback(needs_fallback, M if M > N else N), tiles, 0)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=not SAFE):
        row, column = tile_at(t, rows, columns, M, N, GROUP)
        compute_tile = True
        if SAFE:
            compute_tile = _has_peak_out_of_range(softmax, offset, pairs, row, column, M, N)
        if compute_tile:
            z = similarities(x, y, row, column, rows, columns, WIDTH, M, N, K, DESCRIPTORS, PRECISION)
            needs_mask = tile_needs_mask(pairs, row, column, IS_LOCAL, M, N)
            gains = Gains(tl.zeros((M, 1), tl.float32), tl.zeros((M, N), tl.float32))
            if not SAFE:
                gains = _unshifted_gains(softmax, offset, needs_fallback, pairs, row, column, M, N)
            _put_gradient(
                z, needs_mask, to_logits, gains, softmax, target, pairs, row, column,
                IS_LOCAL, MULTI_POSITIVE, DROP, SAFE, M, N, PIECES, DESCRIPTORS, ROUND_TO_TF32,
            )  # fmt: skip


@triton.jit
def _unshifted_gains(softmax, offset, needs_fallback, pairs, row, column, M: tl.constexpr, N: tl.constexpr):
    """Return the gains of a tile, and mark peaks out of range.

    They are made for the whole tile, where a thread has one row and one column; for its part of a piece, each thread would make
    many.
    """
    peaks, gains_M = load_vector(softmax.row_peak, row, pairs.rows, M), load_vector(softmax.row_gain, row, pairs.rows, M)
    wide_N = tl.zeros((M, N), tl.float32)
    if softmax.column_peak is not None:
        peaks_N = load_vector(softmax.column_peak, column, pairs.columns, N)
        gains_N = load_vector(softmax.column_gain, column, pairs.columns, N)
        mark_fallback(needs_fallback, tl.arange(0, N), exp_peak_out_of_range(peaks_N, offset))
        wide_N = tl.broadcast_to(unshifted_gain(gains_N, peaks_N, offset)[None, :], (M, N))
    mark_fallback(needs_fallback, tl.arange(0, M), exp_peak_out_of_range(peaks, offset))
    return Gains(unshifted_gain(gains_M, peaks, offset)[:, None], wide_N)


@triton.jit
def _put_gradient(
    z, needs_mask, to_logits, gains, softmax, target, pairs, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, SAFE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PIECES: tl.constexpr, DESCRIPTORS: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a tile, piece by piece."""
    if PIECES > 1:
        left, right = halves(z, M, N)
        gains_left, gains_right = halves(gains.columns, M, N)
        _put_gradient(
            left, needs_mask, to_logits, Gains(gains.rows, gains_left), softmax, target, pairs, row, column,
            IS_LOCAL, MULTI_POSITIVE, DROP, SAFE, M, N // 2, PIECES // 2, DESCRIPTORS, ROUND_TO_TF32,
        )  # fmt: skip
        _put_gradient(
            right, needs_mask, to_logits, Gains(gains.rows, gains_right), softmax, target, pairs, row, column + N // 2,
            IS_LOCAL, MULTI_POSITIVE, DROP, SAFE, M, N // 2, PIECES // 2, DESCRIPTORS, ROUND_TO_TF32,
        )  # fmt: skip
    else:
        g = _gradient(z, needs_mask, to_logits, gains, softmax, pairs, row, column, IS_LOCAL, MULTI_POSITIVE, DROP, SAFE, M, N)
        store_block(target, g, row, column, pairs.rows, pairs.columns, M, N, DESCRIPTORS, ROUND_TO_TF32)


@triton.jit
def _gradient(
    z, needs_mask, to_logits, gains, softmax, pairs, row, column,
    IS_LOCAL: tl.constexpr, MULTI_POSITIVE: tl.constexpr, DROP: tl.constexpr, SAFE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    rows, columns = pairs.rows, pairs.columns
    logits, column_logits = masked_logits(to_logits, z, needs_mask, pairs, row, column, IS_LOCAL, MULTI_POSITIVE, DROP, M, N)
    if SAFE:
        peaks, row_gains = load_vector(softmax.row_peak, row, rows, M), load_vector(softmax.row_gain, row, rows, M)
        g = _shifted_exp(logits, peaks[:, None], row_gains[:, None])
        if softmax.column_peak is not None:
            peaks_N = load_vector(softmax.column_peak, column, columns, N)
            gains_N = load_vector(softmax.column_gain, column, columns, N)
            g += _shifted_exp(column_logits, peaks_N[None, :], gains_N[None, :])
    elif softmax.column_peak is None:
        g = tl.exp2(logits) * gains.rows
    elif DROP:
        g = tl.exp2(logits) * gains.rows + tl.exp2(column_logits) * gains.columns
    else:
        g = tl.exp2(logits) * (gains.rows + gains.columns)
    if softmax.row_counted is not None:
        share = load_vector(softmax.row_counted, row, rows, M)[:, None]
        column_share = tl.zeros((1, N), tl.float32)
        if softmax.column_peak is not None:
            column_share = load_vector(softmax.column_counted, column, columns, N)[None, :]
        if DROP:
            g -= tl.where(logits > float("-inf"), share, 0.0) + tl.where(column_logits > float("-inf"), column_share, 0.0)
        else:
            g -= share + column_share
            if needs_mask:
                g = tl.where(logits > float("-inf"), g, 0.0)
    if MULTI_POSITIVE:
        if needs_mask:
            further = tl.broadcast_to(load_vector(softmax.row_further, row, rows, M)[:, None], (M, N))
            if softmax.column_peak is not None:
                further += load_vector(softmax.column_further, column, columns, N)[None, :]
            g -= tl.where(further_positives(pairs, row, column, IS_LOCAL, M, N), further, 0.0)
    return g


@triton.jit
def _shifted_exp(logits, peaks, gains):
    return tl.exp2((logits - peaks) * LOG2_E) * gains


@triton.jit
def _has_peak_out_of_range(softmax, offset, pairs, row, column, M: tl.constexpr, N: tl.constexpr):
    peaks = load_vector(softmax.row_peak, row, pairs.rows, M)
    out_of_range = tl.max(exp_peak_out_of_range(peaks, offset).to(tl.int32), 0)
    if softmax.column_peak is not None:
        peaks_N = load_vector(softmax.column_peak, column, pairs.columns, N)
        out_of_range = tl.maximum(out_of_range, tl.max(exp_peak_out_of_range(peaks_N, offset).to(tl.int32), 0))
    return out_of_range > 0


@triton.jit(do_not_specialize=["rows", "columns", "stride_units"])
def gradient_from_saved_exp_kernel(
    panel, scale, needs_fallback, row_peak, row_gain, row_counted, column_peak, column_gain, column_counted, rows, columns,
    stride_units, M: tl.constexpr, N: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    """Turn the saved exponentials of a panel into the gradient in its logits, in place; pairs that do not count are zero already.

    stride_units: the stride in units of ROW_ALIGNMENT, by which the compiler knows that it may read vectors. Sets a mark where a
    peak is out of the range in which exp(s - offset) may be used without subtracting it.
    """
    across = tl.cdiv(columns, N)
    _put_gradient_from_saved_exp(
        tl.program_id(0) // across * M, tl.program_id(0) % across * N, panel, scale, needs_fallback, row_peak, row_gain,
        row_counted, column_peak, column_gain, column_counted, rows, columns, stride_units, M, N, ROUND_TO_TF32,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "columns", "stride_units"])
def gradient_if_marked_kernel(
    panel, scale, needs_fallback, row_peak, row_gain, row_counted, column_peak, column_gain, column_counted, rows, columns,
    stride_units, M: tl.constexpr, N: tl.constexpr, ROUND_TO_TF32: tl.constexpr, MARKS: tl.constexpr,
):  # fmt: skip
    """The same with any number of programs, and only if a mark is set already."""
    across = tl.cdiv(columns, N)
    tiles = tl.where(any_fallback(needs_fallback, MARKS), tl.cdiv(rows, M) * across, 0)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        _put_gradient_from_saved_exp(
            t // across * M, t % across * N, panel, scale, needs_fallback, row_peak, row_gain, row_counted, column_peak,
            column_gain, column_counted, rows, columns, stride_units, M, N, ROUND_TO_TF32,
        )  # fmt: skip


@triton.jit
def _put_gradient_from_saved_exp(
    row, column, panel, scale, needs_fallback, row_peak, row_gain, row_counted, column_peak, column_gain, column_counted, rows,
    columns, stride_units, M: tl.constexpr, N: tl.constexpr, ROUND_TO_TF32: tl.constexpr,
):  # fmt: skip
    stride, offset = stride_units * ROW_ALIGNMENT, exp_offset(tl.load(scale))
    i, j = row + tl.arange(0, M), column + tl.arange(0, N)
    place = panel + (i.to(tl.int64) * stride)[:, None] + j[None, :]
    inside = (i < rows)[:, None] & (j < stride)[None, :]
    power = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    peaks = load_vector(row_peak, row, rows, M)
    gains = unshifted_gain(load_vector(row_gain, row, rows, M), peaks, offset)[:, None]
    out_of_range = tl.max(exp_peak_out_of_range(peaks, offset).to(tl.int32), 0)
    if column_peak is not None:
        peaks_N = load_vector(column_peak, column, columns, N)
        gains = gains + unshifted_gain(load_vector(column_gain, column, columns, N), peaks_N, offset)[None, :]
        out_of_range = tl.maximum(out_of_range, tl.max(exp_peak_out_of_range(peaks_N, offset).to(tl.int32), 0))
    g = power * gains
    if row_counted is not None:
        shares = tl.broadcast_to(load_vector(row_counted, row, rows, M)[:, None], (M, N))
        if column_counted is not None:
            shares += load_vector(column_counted, column, columns, N)[None, :]
        g -= tl.where(power > 0, shares, 0.0)
    if ROUND_TO_TF32:
        g = round_to_tf32(g)
    tl.store(place, g.to(panel.dtype.element_ty), mask=inside)
    if out_of_range > 0:
        tl.store(needs_fallback, 1)


@on_device_of_input
def softmax_grads(
    x_MD: Tensor,
    y_ND: Tensor,
    scale: Tensor,
    pairs: Pairs,
    rows: Softmax,
    columns: Softmax | None,
    *,
    needs_grad: NeedsGrad,
    compute: ComputeOptions,
    dpos_M: Tensor | None = None,
    saved_exp: SavedExp | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return gx_MD and gy_ND of the others. The buffer of saved exponentials is used for all panels."""
    pairs = as_compared_ids(pairs, x_MD)
    if saved_exp is None:
        compute = without_saved_exp(compute)
    launch = Launch(architecture_of(x_MD.device), "gradient", x_MD, y_ND, compute)
    needs_fallback = saved_exp.marks if saved_exp else launch.new_marks()
    products = GradientProducts(x_MD, y_ND, needs_grad, compute, saved_exp.buffer if saved_exp else None)
    multi_positive, drops = is_multi_positive(pairs), pairs.drop_above is not None
    kernels = None if multi_positive or drops else launch.architecture.load_kernels()
    # With label smoothing, the gradients of positives do not show how large probabilities are.
    int8 = compute.int8_similarities and x_MD.dtype == torch.bfloat16 and not pairs.smoothed
    request = GradsRequest(scale, pairs, rows, columns, needs_fallback, dpos_M if int8 else None)
    specialised = None if kernels is None else kernels.softmax_grads(launch, request)
    # The gradient is then an exponential times the gain of its row. Products in tf32 would cut exponentials off, not round them.
    one_gain = columns is None and rows.counted is None and not products.rounds_to_tf32
    for p in launch.panels(products.bytes_per_cell):
        panel, pair_args = products.panel(p), launch.pair_args(pairs, p)
        softmax = SoftmaxArgs(*(part(v, p.r) for v in rows), *(part(v, p.c) for v in columns or (None,) * 4))
        was_saved = saved_exp is not None and saved_exp.contains(p)
        gains_M = multiply = None
        if was_saved and one_gain:
            gains_M = unshifted_gains(scale, Softmax(softmax.row_peak, softmax.row_gain), None, needs_fallback).rows[: p.rows]
        elif was_saved and specialised is not None:
            multiply = specialised.saved_products(p)
        if was_saved:
            if_marked = gains_M is not None or multiply is not None
            _gradient_from_saved_exp(panel, p, scale, softmax, needs_fallback, products.rounds_to_tf32, if_marked=if_marked)
        computed = was_saved or (specialised is not None and specialised(p, panel, pair_args))
        operands, target = launch.operands(p), launch.target(panel)
        for safe in (True,) if computed else (False, True):
            run_kernel(
                gradient_kernel, launch.grid(p),
                *operands, scale, target, needs_fallback, *softmax, *pair_args, panel.stride(0), IS_LOCAL=pairs.is_local,
                MULTI_POSITIVE=multi_positive, DROP=drops, SAFE=safe, ROUND_TO_TF32=products.rounds_to_tf32, **launch.constants,
            )  # fmt: skip
        if gains_M is not None:
            # With a mark, the panel holds the gradient.
            products.write_with_gains(panel, p, gains_M.masked_fill_(needs_fallback.any(), 1.0))
        elif multiply is not None:
            multiply(panel, part(products.gx_MD, p.r), part(products.gy_ND, p.c))
        else:
            products.add(panel, p)
    return products.gx_MD, products.gy_ND


def _gradient_from_saved_exp(
    panel: Tensor, p: Panel, scale: Tensor, softmax: SoftmaxArgs, needs_fallback: Tensor, rounds_to_tf32: bool, *, if_marked: bool
) -> None:
    """Turn exponentials into the gradient; if_marked: only if a mark is set, which the device decides."""
    tiles = cdiv(p.rows, SAVED_ROWS) * cdiv(p.columns, SAVED_COLUMNS)
    kernel, programs, constants = gradient_from_saved_exp_kernel, tiles, {}
    if if_marked:
        programs = min(tiles, PROGRAMS_IF_MARKED * multiprocessors(panel.device))
        kernel, constants = gradient_if_marked_kernel, {"MARKS": MARKS}
    run_kernel(
        kernel, (programs,),
        panel, scale, needs_fallback, softmax.row_peak, softmax.row_gain, softmax.row_counted, softmax.column_peak,
        softmax.column_gain, softmax.column_counted, p.rows, p.columns, panel.stride(0) // ROW_ALIGNMENT.value, M=SAVED_ROWS,
        N=SAVED_COLUMNS, ROUND_TO_TF32=rounds_to_tf32, **constants,
    )  # fmt: skip
