"""Where the kernels for Hopper (kernels/hopper/) take the place of the others, and how they are started.

They are written in Gluon, which Triton calls experimental and changes from version to version.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..contract import Pairs, Softmax
from .capability import INTERPRETED, processors
from .int8 import Operands, correct
from .kernels.gradient import lift_kernel
from .launch import Launch, Panel, cdiv, part
from .tuned_configs import Rings, rings_for

# The versions of Triton that they were tried with on a device.
TRIED = ("3.6.",)
TILE = 128
# Of the width, in bytes, at a time.
DEPTH = 128
# Registers for three groups of warps, of which the two that multiply take most.
OPTIONS = {"num_warps": 4, "maxnreg": 168}
LIFTED = 128


class Lifted(NamedTuple):
    """Gains of rows and columns for exponentials as they are, readable a pair of tiles beyond their end."""

    rows: Tensor
    columns: Tensor | None


def serves(launch: Launch, p: Panel, dtype: torch.dtype | None = None) -> Rings | None:
    """With which rings they take a panel, if they do. dtype: of what is multiplied, where it is not that of the embeddings."""
    x_MD, (m, n, *_) = launch.x_MD, launch.blocks
    # Sums have a part for each tile, of whatever kernel.
    alike = m == n == TILE or (launch.kernel == "gradient" and m == TILE and n % TILE == 0)
    if not (launch.described and alike and _available(x_MD.device)):
        return None
    rings = rings_for(launch.kernel, x_MD.device, dtype or x_MD.dtype, x_MD.shape[1])
    if rings is None or rings.least_pairs is None or _pairs(p) < rings.least_pairs * processors(x_MD.device):
        return None
    return rings


def stats(
    launch: Launch,
    rings: Rings,
    p: Panel,
    scale: Tensor,
    row_parts: Tensor,
    column_parts: Tensor | None,
    needs_fallback: Tensor,
    told: tuple[Any, ...],
    pairs: Pairs,
) -> None:
    """The sums of a panel's tiles. told: what `Launch.pairs` says of the panel."""
    matches, ids_M, ids_N, *_, shift = told
    _kernel("stats")[_grid(launch, p)](
        *_operands(*_embeddings(launch, p)), scale, row_parts, column_parts, needs_fallback, matches, ids_M, ids_N, p.rows, p.columns,
        shift, IS_LOCAL=pairs.is_local, SMOOTHED=pairs.smoothed, **_constants(launch.x_MD, rings), **OPTIONS,
    )  # fmt: skip


def lift(rows: Softmax, columns: Softmax | None, needs_fallback: Tensor) -> Lifted:
    """What `gradient` is given of a softmax. Leaves a mark where exponentials cannot be taken as they are."""
    length, width = rows.peak.shape[0], columns.peak.shape[0] if columns else 0
    lifted_M, lifted_N = (rows.peak.new_zeros(n + 2 * TILE) for n in (length, width))
    lift_kernel[(cdiv(length, LIFTED) + cdiv(width, LIFTED),)](
        rows.peak, rows.gain, columns.peak if columns else None, columns.gain if columns else None, lifted_M, lifted_N, needs_fallback,
        length, width, R=LIFTED,
    )  # fmt: skip
    return Lifted(lifted_M, lifted_N if columns else None)


def gradient(
    launch: Launch,
    rings: Rings,
    p: Panel,
    scale: Tensor,
    panel: Tensor,
    lifted: Lifted,
    rows: Softmax,
    columns: Softmax | None,
    told: tuple[Any, ...],
    is_local: bool,
    eight: Operands | None,
) -> None:
    """The gradient in the logits of a panel, written into it. eight: the panel's embeddings, where they are multiplied so."""
    matches, ids_M, ids_N, *_, shift = told
    gains = lifted.rows[p.r.start :], None if lifted.columns is None else lifted.columns[p.c.start :]
    counted_N = None if columns is None else part(columns.counted, p.c)
    x, y = _embeddings(launch, p)
    x_steps = y_steps = limit = large = None
    if eight is not None:
        (x, x_steps), (y, y_steps), limit = eight
        large = x.new_empty(cdiv(p.columns, TILE), p.rows)
    _kernel("gradient")[_grid(launch, p)](
        *_operands(x, y), scale, _described(panel, TILE // 4), gains[0], part(rows.counted, p.r), gains[1], counted_N, x_steps,
        y_steps, limit, large, matches, ids_M, ids_N, p.rows, p.columns, shift, IS_LOCAL=is_local, MARKED=launch.blocks.n,
        PLACES=rings.places, **_constants(x, rings), **OPTIONS,
    )  # fmt: skip
    if eight is not None and large is not None:
        correct(launch, p, scale, panel, large, TILE, eight.limit, gains)


def sigmoid(
    launch: Launch,
    rings: Rings,
    p: Panel,
    scale: Tensor,
    bias: Tensor,
    panel: Tensor,
    weights_M: Tensor | None,
    row_parts: Tensor,
    needs_fallback: Tensor,
    told: tuple[Any, ...],
    is_local: bool,
) -> None:
    """The sums of a panel's tiles, and the gradient in its logits, written into it."""
    matches, ids_M, ids_N, *_, shift = told
    _kernel("sigmoid")[_grid(launch, p)](
        *_operands(*_embeddings(launch, p)), scale, bias, _described(panel, TILE // 4), part(weights_M, p.r), row_parts, needs_fallback,
        matches, ids_M, ids_N, p.rows, p.columns, shift, IS_LOCAL=is_local, PLACES=rings.places, **_constants(launch.x_MD, rings),
        **OPTIONS,
    )  # fmt: skip


@functools.cache
def _available(device: torch.device) -> bool:
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0) and triton.__version__.startswith(TRIED)


@functools.cache
def _kernel(name: str) -> Any:
    """Imported where they serve: not every Triton has all that they need."""
    from .kernels.hopper.gradient import gradient_kernel
    from .kernels.hopper.sigmoid import sigmoid_kernel
    from .kernels.hopper.stats import stats_kernel

    return {"stats": stats_kernel, "gradient": gradient_kernel, "sigmoid": sigmoid_kernel}[name]


def _constants(x: Tensor, rings: Rings) -> dict[str, int]:
    shape = {"WIDTH": x.shape[1], "M": TILE, "N": TILE, "K": DEPTH // x.element_size()}
    return shape | {"GROUP": rings.group, "X_SLOTS": rings.x_slots, "Y_SLOTS": rings.y_slots, "BEHIND": rings.behind}


def _pairs(p: Panel) -> int:
    return cdiv(p.rows, 2 * TILE) * cdiv(p.columns, TILE)


def _grid(launch: Launch, p: Panel) -> tuple[int]:
    """No more programs than pairs of tiles: each has to have one."""
    return (min(_pairs(p), processors(launch.x_MD.device)),)


def _embeddings(launch: Launch, p: Panel) -> tuple[Tensor, Tensor]:
    return part(launch.x_MD, p.r), part(launch.y_ND, p.c)


def _operands(x: Tensor, y: Tensor) -> tuple[Any, Any]:
    return _described(x, DEPTH // x.element_size()), _described(y, DEPTH // y.element_size())


def _described(t: Tensor, width: int) -> Any:
    """A descriptor of blocks of TILE rows."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(t, list(t.shape), list(t.stride()), [TILE, width], _layout(width, t.element_size()))


@functools.cache
def _layout(width: int, size: int) -> Any:
    """How blocks of numbers of one or two bytes lie in shared memory."""
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, int8

    return NVMMASharedLayout.get_default_for([TILE, width], int8 if size == 1 else bfloat16)
