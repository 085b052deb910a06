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
import triton
from torch import Tensor

from ..contract import Means, Normalised, Pairs, Ranking, SigmoidPass, Softmax, SoftmaxPass, Stats, Wanted
from .gradients import Products
from .kernels.normalise import normalise_kernel
from .kernels.positives import finish_kernel, positives_kernel
from .kernels.sigmoid import sigmoid_kernel
from .kernels.softmax import careful_stats_kernel, gradient_kernel, look_kernel, stats_kernel
from .kernels.sums import COUNTED, EXPONENTIALS, RANKING, SUMS
from .launch import Launch, Sums, part
from .support import unsupported

__all__ = [
    "default_tile",
    "finish",
    "normalise",
    "positives",
    "sigmoid_sums",
    "softmax_grads",
    "softmax_stats",
    "unsupported",
]

CACHED_BYTES = 24 * 2**20

Function = TypeVar("Function", bound=Callable[..., Any])


def _on_its_device(function: Function) -> Function:
    """A function whose kernels start on the device of its first argument, whichever is current."""

    @functools.wraps(function)
    def call(first: Any, *args: Any, **options: Any) -> Any:
        with torch.cuda.device_of(first if isinstance(first, Tensor) else first[0]):
            return function(first, *args, **options)

    return cast(Function, call)


def default_tile(device: torch.device) -> int:
    """The working memory in bytes that serves well: a panel whose products fill the device."""
    return 512 * 2**20


@_on_its_device
def positives(x_MD: Tensor, y_ND: Tensor, means: Means) -> Tensor:
    """The similarity of each row's positive (M)."""
    found_M = x_MD.new_empty(len(x_MD), dtype=torch.float32)
    if len(x_MD):
        launch, rows = Launch("stats", x_MD, y_ND, means), slice(0, len(x_MD))
        m = launch.blocks.m
        x, y = launch.x(rows), launch.y(rows, height=m)
        positives_kernel[(triton.cdiv(len(x_MD), m),)](x, y, found_M, len(x_MD), M=m, **launch.product)
    return found_M


@_on_its_device
def softmax_stats(x_MD: Tensor, y_ND: Tensor, scale: Tensor, pairs: Pairs, *, columns: bool, means: Means) -> SoftmaxPass:
    """Stats and rankings of rows, and of columns if asked for."""
    several = _several(pairs)
    kinds = [EXPONENTIALS.value] + [RANKING.value] * pairs.ranked + [COUNTED.value] * (several + pairs.smoothed)
    launch = Launch("stats", x_MD, y_ND, means, crowded=len(kinds) > 1 or pairs.ids_M is not None)
    mine, theirs = Sums(x_MD, len(y_ND), kinds), Sums(y_ND, len(x_MD), kinds) if columns else None
    trouble = x_MD.new_zeros(1, dtype=torch.int32)
    options = {"HOME": pairs.home, "SEVERAL": several, "DROP": pairs.drop_above is not None, **launch.constants}
    careful = {**options, "N": launch.piece}
    parts_a_cell = mine.bytes_a_cell(launch.piece) + (theirs.bytes_a_cell(launch.blocks.m) if theirs else 0)
    # No wider than what the device's cache can hold of y, which every row of tiles reads again.
    for r, c in launch.panels(parts_a_cell, widest=CACHED_BYTES // (x_MD.shape[1] * x_MD.element_size())):
        down, across = launch.parts(r, c)
        row_parts, column_parts = mine.parts(across, r), theirs.parts(down, c) if theirs else None
        rest = (scale, row_parts, column_parts, trouble, *launch.pairs(pairs, r, c))
        grid = launch.grid(r, c)
        stats_kernel[grid](launch.x(r), launch.y(c), *rest, SMOOTHED=pairs.smoothed, RANKED=pairs.ranked, **options)
        careful_stats_kernel[grid](launch.x(r), launch.y(c, height=launch.piece), *rest, **careful)
        mine.absorb(row_parts, r, trouble, first=c.start == 0)
        if theirs is not None and column_parts is not None:
            theirs.absorb(column_parts, c, trouble, first=r.start == 0)
    row_ranking, column_ranking = _ranking(mine, 1, pairs), _ranking(theirs, 1, pairs)
    return SoftmaxPass(_stats(mine, pairs), _stats(theirs, pairs) if theirs else None, row_ranking, column_ranking)


@_on_its_device
def normalise(
    rows: Stats, columns: Stats | None, positive_M: Tensor, scale: Tensor, weights_M: Tensor | None, label_smoothing: float
) -> Normalised:
    """Losses of both sides together, the softmax of each, and the gradient in the positives' logits."""
    length, sides, height = len(positive_M), 1 if columns is None else 2, 256
    loss_M, own_M = positive_M.new_empty(2, length)
    out = positive_M.new_empty(sides, 4, length)
    if length:
        normalise_kernel[(triton.cdiv(length, height),)](
            *rows, *(columns or (None,) * len(rows)), positive_M, scale, weights_M, loss_M, own_M, out, label_smoothing, length,
            SIDES=sides, R=height,
        )  # fmt: skip
    softmax = [
        Softmax(side[0], side[1], None if rows.further is None else side[2], None if rows.counted is None else side[3])
        for side in out
    ]
    return Normalised(loss_M, own_M, softmax[0], softmax[1] if columns is not None else None)


@_on_its_device
def softmax_grads(
    x_MD: Tensor,
    y_ND: Tensor,
    scale: Tensor,
    pairs: Pairs,
    rows: Softmax,
    columns: Softmax | None,
    *,
    wanted: Wanted,
    means: Means,
) -> tuple[Tensor | None, Tensor | None]:
    """gx_MD and gy_ND of the others."""
    launch = Launch("gradient", x_MD, y_ND, means)
    products = Products(x_MD, y_ND, wanted, means)
    trouble = x_MD.new_zeros(1, dtype=torch.int32)
    for side in (rows,) if columns is None else (rows, columns):
        if len(side.peak):
            look_kernel[(triton.cdiv(len(side.peak), 1024),)](side.peak, len(side.peak), trouble, R=1024)
    for r, c in launch.panels(products.bytes_a_cell):
        panel = products.panel(r, c)
        softmax = *(part(v, r) for v in rows), *(part(v, c) for v in columns or (None,) * 4)
        counted = launch.pairs(pairs, r, c)
        for careful in (False, True):
            gradient_kernel[launch.grid(r, c)](
                launch.x(r), launch.y(c), scale, launch.target(panel), trouble, *softmax, *counted,
                panel.stride(0), HOME=pairs.home, SEVERAL=_several(pairs), DROP=pairs.drop_above is not None, CAREFUL=careful,
                ROUND_TO_TF32=products.rounds_to_tf32, **launch.constants,
            )  # fmt: skip
        products.add(panel, r, c)
    return products.gx_MD, products.gy_ND


@_on_its_device
def sigmoid_sums(
    x_MD: Tensor,
    y_ND: Tensor,
    scale: Tensor,
    bias: Tensor,
    pairs: Pairs,
    weights_M: Tensor | None,
    *,
    wanted: Wanted | None,
    means: Means,
) -> SigmoidPass:
    """Values of the others and, if wanted, their slopes and gradients from the same pass."""
    launch = Launch("sigmoid", x_MD, y_ND, means)
    products = Products(x_MD, y_ND, wanted, means) if wanted else None
    trouble = x_MD.new_zeros(1, dtype=torch.int32)
    mine = Sums(x_MD, len(y_ND), [SUMS.value] + [RANKING.value] * pairs.ranked)
    theirs = Sums(y_ND, len(x_MD), [RANKING.value]) if pairs.ranked else None
    parts_a_cell = mine.bytes_a_cell(launch.piece) + (theirs.bytes_a_cell(launch.blocks.m) if theirs else 0)
    for r, c in launch.panels(products.bytes_a_cell if products else parts_a_cell):
        down, across = launch.parts(r, c)
        row_parts, column_parts = mine.parts(across, r), theirs.parts(down, c) if theirs else None
        panel = products.panel(r, c) if products else None
        target, stride = (None, 0) if panel is None else (launch.target(panel), panel.stride(0))
        counted = launch.pairs(pairs, r, c)
        for careful in (False, True):
            sigmoid_kernel[launch.grid(r, c)](
                launch.x(r), launch.y(c), scale, bias, target, part(weights_M, r), row_parts, column_parts, trouble, *counted,
                stride, HOME=pairs.home, SEVERAL=_several(pairs), RANKED=pairs.ranked, CAREFUL=careful,
                ROUND_TO_TF32=products is not None and products.rounds_to_tf32, **launch.constants,
            )  # fmt: skip
        mine.absorb(row_parts, r, trouble, first=c.start == 0)
        if theirs is not None and column_parts is not None:
            theirs.absorb(column_parts, c, trouble, first=r.start == 0)
        if products is not None and panel is not None:
            products.add(panel, r, c)
    slope_M = gx_MD = gy_ND = None
    if products is not None:
        slope_M, gx_MD, gy_ND = mine.found[0, 1], products.gx_MD, products.gy_ND
    return SigmoidPass(mine.found[0, 0], slope_M, gx_MD, gy_ND, _ranking(mine, 1, pairs), _ranking(theirs, 0, pairs))


@_on_its_device
def finish(gradient: Tensor, embeddings: Tensor, partners: Tensor, own_M: Tensor, factor: Tensor, finished: Tensor) -> Tensor:
    """Writes gx (or gy) with the positives' part added, times a factor, into `finished`; returns the slope without the factor."""
    rows, width = gradient.shape
    height = 8
    slopes = gradient.new_empty(triton.cdiv(rows, height))
    if rows:
        finish_kernel[(len(slopes),)](
            gradient, embeddings, partners, own_M, factor, finished, slopes, rows, len(own_M), WIDTH=width, R=height, K=256
        )
    return slopes.sum()


def _several(pairs: Pairs) -> bool:
    return pairs.several and pairs.ids_M is not None


def _stats(sums: Sums, pairs: Pairs) -> Stats:
    options: list[Tensor | None] = []
    place = 1 + pairs.ranked
    for asked in (_several(pairs), pairs.smoothed):
        options += [sums.found[place, 0], sums.numbers[place]] if asked else [None, None]
        place += asked
    return Stats(sums.found[0, 0], sums.found[0, 1], *options)


def _ranking(sums: Sums | None, place: int, pairs: Pairs) -> Ranking | None:
    return Ranking(sums.numbers[place], sums.found[place, 0]) if sums is not None and pairs.ranked else None
