"""The tile contract in Triton: the only place that imports it. Contract and legend: ../contract.py.

A pass goes over panels of the similarity matrix. Forward, one launch computes the tiles of a panel and each tile's sums, and a
second small one adds those up. Backward, one launch writes the gradient in the logits of a panel, and two products with it follow:
a kernel that did all three would have no room for sums as wide as the embeddings. The panel's buffer is the working memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..contract import ComputeOptions, NeedsGrad, Normalised, Pairs, Ranking, SigmoidPass, Softmax, SoftmaxPass, Stats
from . import hopper
from .capability import unsupported
from .gradients import Products
from .int8 import Eight
from .kernels.backward_from_saved_exp import GRAIN, weigh_kernel
from .kernels.gradient import gradient_kernel
from .kernels.normalise import normalise_kernel
from .kernels.positives import finish_kernel, positives_kernel
from .kernels.sigmoid import sigmoid_kernel
from .kernels.stats import stats_kernel
from .kernels.sums import COUNTED, EXPONENTIALS, RANKING, SUMS
from .launch import Launch, Panel, Sums, cdiv, merge_panel, part
from .saved_exp import Kept, room_to_keep

__all__ = [
    "default_workspace",
    "finish",
    "normalise",
    "positives",
    "sigmoid_sums",
    "softmax_grads",
    "softmax_stats",
    "unsupported",
]

CACHED_BYTES = 24 * 2**20
# On its way out through shared memory a tile is cut, so that as many programs fit beside each other as without.
KEPT_PIECES = 4
WEIGHED_ROWS, WEIGHED_COLUMNS = 16, 512

Function = TypeVar("Function", bound=Callable[..., Any])


def _on_its_device(function: Function) -> Function:
    """A function whose kernels start on the device of its first argument, whichever is current."""

    @functools.wraps(function)
    def call(first: Any, *args: Any, **options: Any) -> Any:
        with torch.cuda.device_of(first if isinstance(first, Tensor) else first[0]):
            return function(first, *args, **options)

    return cast(Function, call)


def default_workspace(device: torch.device) -> int:
    """The working memory in bytes that serves well: a panel whose products fill the device."""
    return 512 * 2**20


@_on_its_device
def positives(x_MD: Tensor, y_ND: Tensor, compute: ComputeOptions) -> Tensor:
    """The similarity of each row's positive (M)."""
    rows = x_MD.shape[0]
    found_M = x_MD.new_empty(rows, dtype=torch.float32)
    if rows:
        launch = Launch("stats", x_MD, y_ND, compute)
        m = launch.blocks.m
        positives_kernel[(cdiv(rows, m),)](*launch.diagonal_operands(), found_M, rows, M=m, **launch.product)
    return found_M


@_on_its_device
def softmax_stats(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, pairs: Pairs, *, columns: bool, compute: ComputeOptions, save_exp: bool = False
) -> SoftmaxPass:
    """Stats and rankings of rows, and of columns if asked for."""
    multi_positive, drops = _multi_positive(pairs), pairs.drop_above is not None
    kinds = [EXPONENTIALS.value] + [RANKING.value] * pairs.ranked + [COUNTED.value] * (multi_positive + pairs.smoothed)
    heavy = multi_positive or (pairs.ranked and (drops or pairs.smoothed))
    pieces = 4 if heavy else 2 if pairs.ranked or drops or pairs.ids_M is not None else 1
    launch = Launch("stats", x_MD, y_ND, compute, pieces)
    needs_fallback = x_MD.new_zeros(max(launch.blocks[:2]), dtype=torch.int32)
    mine, theirs = Sums(x_MD, kinds), Sums(y_ND, kinds) if columns else None
    parts_a_cell = mine.bytes_a_cell(launch.blocks.n) + (theirs.bytes_a_cell(launch.blocks.m) if theirs else 0)
    # Exponentials alone do not say what further positives get, nor what columns have dropped.
    kept = room_to_keep(launch, compute) if save_exp and not (multi_positive or drops) else None
    # No wider than what the device's cache can hold of y, which every row of tiles reads again.
    widest = CACHED_BYTES // (x_MD.shape[1] * x_MD.element_size())
    for p in launch.panels(parts_a_cell, widest, kept.panel if kept else None):
        down, across = launch.parts(p)
        row_parts, column_parts = mine.parts(across, p.rows), theirs.parts(down, p.columns) if theirs else None
        told = launch.pairs(pairs, p)
        arguments = *launch.operands(p), scale, row_parts, column_parts, needs_fallback, *told
        holds = kept is not None and kept.holds(p)
        rings = None if multi_positive or drops or pairs.ranked or holds else hopper.serves(launch, p)
        if rings is not None:
            hopper.stats(launch, rings, p, scale, row_parts, column_parts, needs_fallback, told, pairs)
        for careful in (True,) if rings is not None else (False, True):
            way, target, stride = launch, None, 0
            if kept and holds and not careful:
                way, values = launch.cut(KEPT_PIECES), kept.values(p)
                target, stride = way.target(values), values.stride(0)
            stats_kernel[launch.grid(p)](
                *arguments, target, stride, IS_LOCAL=pairs.is_local, MULTI_POSITIVE=multi_positive, DROP=drops, SMOOTHED=pairs.smoothed and not careful,
                RANKED=pairs.ranked and not careful, CAREFUL=careful, WARPS=launch.blocks.warps, **way.constants,
            )  # fmt: skip
        merge_panel(p, mine, row_parts, theirs, column_parts)
        # Those of the next panel take their place.
        del arguments, row_parts, column_parts
    _without_panels(x_MD, y_ND, mine, theirs)
    row_ranking, column_ranking = _ranking(mine, 1, pairs), _ranking(theirs, 1, pairs)
    return SoftmaxPass(_stats(mine, pairs), _stats(theirs, pairs) if theirs else None, row_ranking, column_ranking, kept)


@_on_its_device
def normalise(
    rows: Stats, columns: Stats | None, positive_M: Tensor, scale: Tensor, weights_M: Tensor | None, label_smoothing: float
) -> Normalised:
    """Losses of both sides together, the softmax of each, and the gradient in the positives' logits."""
    length, sides = positive_M.shape[0], 1 if columns is None else 2
    loss_M, dpos_M, *out = positive_M.new_empty(2 + 4 * sides, length).unbind()
    if length:
        normalise_kernel[(cdiv(length, 256),)](
            *rows, *(columns or (None,) * 6), positive_M, scale, weights_M, loss_M, dpos_M, out[0], label_smoothing, length,
            SIDES=sides, R=256,
        )  # fmt: skip
    needs_grad = True, True, rows.further is not None, rows.counted is not None
    softmax = [
        Softmax(*(v if there else None for v, there in zip(out[4 * side :], needs_grad, strict=False)))  # type: ignore[arg-type]
        for side in range(sides)
    ]
    return Normalised(loss_M, dpos_M, softmax[0], None if columns is None else softmax[1])


@_on_its_device
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
    saved_exp: Kept | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """gx_MD and gy_ND of the others. The buffer of what was kept is used for all panels."""
    kept = saved_exp
    launch = Launch("gradient", x_MD, y_ND, compute)
    needs_fallback = x_MD.new_zeros(max(launch.blocks[:2]), dtype=torch.int32)
    products = Products(x_MD, y_ND, needs_grad, compute, kept.buffer if kept else None)
    plain, lifted = not _multi_positive(pairs) and pairs.drop_above is None, None
    eight = None
    # With smoothed labels the gradients of positives do not tell how large probabilities are.
    if compute.int8_similarities and dpos_M is not None and x_MD.dtype == torch.bfloat16 and not pairs.smoothed:
        eight = Eight(launch, dpos_M, 2 * hopper.TILE)
    for p in launch.panels(products.bytes_a_cell):
        panel = products.panel(p)
        softmax = *(part(v, p.r) for v in rows), *(part(v, p.c) for v in columns or (None,) * 4)
        told = launch.pairs(pairs, p)
        arguments = *launch.operands(p), scale, launch.target(panel), needs_fallback, *softmax, *told, panel.stride(0)
        was_kept = kept is not None and kept.holds(p)
        rings = rounded = None
        if plain and not was_kept:
            rings = hopper.serves(launch, p, torch.int8) if eight else None
            rounded = eight.operands(p) if eight and rings else None
            rings = rings or hopper.serves(launch, p)
        if was_kept:
            _weigh(panel, p, softmax, needs_fallback, products.rounds_to_tf32)
        elif rings is not None:
            lifted = lifted or hopper.lift(rows, columns, needs_fallback)
            hopper.gradient(launch, rings, p, scale, panel, lifted, rows, columns, told, pairs.is_local, rounded)
        for careful in (True,) if was_kept or rings is not None else (False, True):
            gradient_kernel[launch.grid(p)](
                *arguments, IS_LOCAL=pairs.is_local, MULTI_POSITIVE=_multi_positive(pairs), DROP=pairs.drop_above is not None, CAREFUL=careful,
                ROUND_TO_TF32=products.rounds_to_tf32, **launch.constants,
            )  # fmt: skip
        products.add(panel, p)
    return products.gx_MD, products.gy_ND


def _weigh(panel: Tensor, p: Panel, softmax: tuple[Tensor | None, ...], needs_fallback: Tensor, rounds_to_tf32: bool) -> None:
    """Makes a panel's exponentials its gradient."""
    row_peak, row_gain, _, row_counted, column_peak, column_gain, _, column_counted = softmax
    weigh_kernel[(cdiv(p.rows, WEIGHED_ROWS) * cdiv(p.columns, WEIGHED_COLUMNS),)](
        panel, needs_fallback, row_peak, row_gain, row_counted, column_peak, column_gain, column_counted, p.rows, p.columns,
        panel.stride(0) // GRAIN.value, M=WEIGHED_ROWS, N=WEIGHED_COLUMNS, ROUND_TO_TF32=rounds_to_tf32,
    )  # fmt: skip


@_on_its_device
def sigmoid_sums(
    x_MD: Tensor,
    y_ND: Tensor,
    scale: Tensor,
    bias: Tensor,
    pairs: Pairs,
    weights_M: Tensor | None,
    *,
    needs_grad: NeedsGrad | None,
    compute: ComputeOptions,
) -> SigmoidPass:
    """Values of the others and, if wanted, their slopes and gradients from the same pass."""
    launch = Launch("sigmoid", x_MD, y_ND, compute, 4 if pairs.ranked else 1)
    needs_fallback = x_MD.new_zeros(max(launch.blocks[:2]), dtype=torch.int32)
    products = Products(x_MD, y_ND, needs_grad, compute) if needs_grad else None
    mine = Sums(x_MD, [SUMS.value] + [RANKING.value] * pairs.ranked)
    theirs = Sums(y_ND, [RANKING.value]) if pairs.ranked else None
    parts_a_cell = mine.bytes_a_cell(launch.blocks.n) + (theirs.bytes_a_cell(launch.blocks.m) if theirs else 0)
    # Beside a panel of the gradient, the parts do not count.
    for p in launch.panels(products.bytes_a_cell if products else parts_a_cell):
        down, across = launch.parts(p)
        row_parts, column_parts = mine.parts(across, p.rows), theirs.parts(down, p.columns) if theirs else None
        panel = products.panel(p) if products else None
        target, stride = (None, 0) if panel is None else (launch.target(panel), panel.stride(0))
        told = launch.pairs(pairs, p)
        outputs = target, part(weights_M, p.r), row_parts, column_parts, needs_fallback
        arguments = *launch.operands(p), scale, bias, *outputs, *told, stride
        rings = hopper.serves(launch, p) if panel is not None and not (_multi_positive(pairs) or pairs.ranked) else None
        if panel is not None and rings is not None:
            hopper.sigmoid(launch, rings, p, scale, bias, panel, weights_M, row_parts, needs_fallback, told, pairs.is_local)
        for careful in (True,) if rings is not None else (False, True):
            sigmoid_kernel[launch.grid(p)](
                *arguments, IS_LOCAL=pairs.is_local, MULTI_POSITIVE=_multi_positive(pairs), RANKED=pairs.ranked and not careful, CAREFUL=careful,
                ROUND_TO_TF32=products is not None and products.rounds_to_tf32, WARPS=launch.blocks.warps, **launch.constants,
            )  # fmt: skip
        merge_panel(p, mine, row_parts, theirs, column_parts)
        if products is not None and panel is not None:
            products.add(panel, p)
    _without_panels(x_MD, y_ND, mine, theirs)
    slope_M = gx_MD = gy_ND = None
    if products is not None:
        slope_M, gx_MD, gy_ND = mine.found[0, 1], products.gx_MD, products.gy_ND
    return SigmoidPass(mine.found[0, 0], slope_M, gx_MD, gy_ND, _ranking(mine, 1, pairs), _ranking(theirs, 0, pairs))


@_on_its_device
def finish(gradient: Tensor, embeddings: Tensor, partners: Tensor, dpos_M: Tensor, factor: Tensor, finished: Tensor) -> Tensor:
    """Writes gx (or gy) with the positives' part added, times a factor, into `finished`; returns what sums up to the slope."""
    rows, width = gradient.shape
    slopes = gradient.new_empty(cdiv(rows, 8))
    if rows:
        finish_kernel[(slopes.shape[0],)](
            gradient, embeddings, partners, dpos_M, factor, finished, slopes, rows, dpos_M.shape[0], WIDTH=width, R=8, K=256
        )
    return slopes


def _without_panels(x_MD: Tensor, y_ND: Tensor, mine: Sums, theirs: Sums | None) -> None:
    """The sums of no pairs, where one of the blocks is empty."""
    if x_MD.shape[0] and y_ND.shape[0]:
        return
    p = Panel(slice(0, x_MD.shape[0]), slice(0, y_ND.shape[0]))
    merge_panel(p, mine, mine.parts(0, p.rows), theirs, theirs.parts(0, p.columns) if theirs else None)


def _multi_positive(pairs: Pairs) -> bool:
    return pairs.multi_positive and pairs.ids_M is not None


def _stats(sums: Sums, pairs: Pairs) -> Stats:
    options: list[Tensor | None] = []
    place = 1 + pairs.ranked
    for asked in (_multi_positive(pairs), pairs.smoothed):
        options += [sums.found[place, 0], sums.numbers[place]] if asked else [None, None]
        place += asked
    return Stats(sums.found[0, 0], sums.found[0, 1], *options)


def _ranking(sums: Sums | None, place: int, pairs: Pairs) -> Ranking | None:
    return Ranking(sums.numbers[place], sums.found[place, 0]) if sums is not None and pairs.ranked else None
