"""Where the kernels for Hopper (kernels/hopper/) take the place of the others, and how they are started.

They are written in Gluon, which Triton calls experimental and changes from version to version.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..contract import Softmax
from .kernels.gradient import lift_kernel
from .launch import Launch, Panel, cdiv, part
from .support import INTERPRETED, processors

# The versions of Triton that they were tried with on a device.
TRIED = ("3.6.",)
TILE, DEPTH = 128, 64
# Pairs of tiles for a multiprocessor, and the width, from which on they serve. Not measured: with few pairs, more and smaller
# programs should fill a device better.
LEAST_PAIRS = 16
LEAST_WIDTH = 64
# The best of some that were tried on an H200 at 768 wide; slots are what its shared memory has room for.
STATS = {"GROUP": 8, "X_SLOTS": 3, "Y_SLOTS": 7, "BEHIND": 5}
GRADIENT = {"GROUP": 16, "X_SLOTS": 3, "Y_SLOTS": 6, "BEHIND": 4}
# Registers for three groups of warps, of which the two that multiply take most.
OPTIONS = {"num_warps": 4, "maxnreg": 168}
LIFTED = 128


class Lifted(NamedTuple):
    """Gains of rows and columns for exponentials as they are, readable a pair of tiles beyond their end."""

    rows: Tensor
    columns: Tensor | None


def serves(launch: Launch, p: Panel, panel: Tensor | None = None) -> bool:
    """Whether they take a panel of similarities, or of the gradient."""
    x_MD = launch.x_MD
    if not (launch.described and _available(x_MD.device)):
        return False
    if x_MD.dtype not in (torch.bfloat16, torch.float16) or x_MD.shape[1] < LEAST_WIDTH:
        return False
    if panel is None:
        fits = launch.blocks[:2] == (TILE, TILE)
    else:
        fits = panel.dtype == torch.bfloat16 and launch.blocks.m == TILE and launch.blocks.n % TILE == 0
    return fits and _pairs(p) >= LEAST_PAIRS * processors(x_MD.device)


def stats(
    launch: Launch,
    p: Panel,
    scale: Tensor,
    row_parts: Tensor,
    column_parts: Tensor | None,
    trouble: Tensor,
    told: tuple[Any, ...],
    home: bool,
) -> None:
    """The sums of a panel's tiles. told: what `Launch.pairs` says of the panel."""
    kernel, _ = _kernels()
    matches, ids_M, ids_N, *_, shift = told
    kernel[_grid(launch, p)](
        *_operands(launch, p), scale, row_parts, column_parts, trouble, matches, ids_M, ids_N, p.rows, p.columns, shift,
        HOME=home, **_shape(launch), **STATS, **OPTIONS,
    )  # fmt: skip


def lift(rows: Softmax, columns: Softmax | None, trouble: Tensor) -> Lifted:
    """What `gradient` is given of a softmax. Leaves a mark where exponentials cannot be taken as they are."""
    length, width = rows.peak.shape[0], columns.peak.shape[0] if columns else 0
    lifted_M, lifted_N = (rows.peak.new_zeros(n + 2 * TILE) for n in (length, width))
    lift_kernel[(cdiv(length, LIFTED) + cdiv(width, LIFTED),)](
        rows.peak, rows.gain, columns.peak if columns else None, columns.gain if columns else None, lifted_M, lifted_N, trouble,
        length, width, R=LIFTED,
    )  # fmt: skip
    return Lifted(lifted_M, lifted_N if columns else None)


def gradient(
    launch: Launch,
    p: Panel,
    scale: Tensor,
    panel: Tensor,
    lifted: Lifted,
    rows: Softmax,
    columns: Softmax | None,
    told: tuple[Any, ...],
    home: bool,
) -> None:
    """The gradient in the logits of a panel, written into it."""
    _, kernel = _kernels()
    matches, ids_M, ids_N, *_, shift = told
    gains_N = None if lifted.columns is None else lifted.columns[p.c.start :]
    counted_N = None if columns is None else part(columns.counted, p.c)
    kernel[_grid(launch, p)](
        *_operands(launch, p), scale, _described(panel, TILE // 4), lifted.rows[p.r.start :], part(rows.counted, p.r), gains_N,
        counted_N, matches, ids_M, ids_N, p.rows, p.columns, shift, HOME=home, MARKED=launch.blocks.n, **_shape(launch), **GRADIENT,
        **OPTIONS,
    )  # fmt: skip


@functools.cache
def _available(device: torch.device) -> bool:
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0) and triton.__version__.startswith(TRIED)


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """Imported where they serve: not every Triton has all that they need."""
    from .kernels.hopper.gradient import gradient_kernel
    from .kernels.hopper.stats import stats_kernel

    return stats_kernel, gradient_kernel


def _shape(launch: Launch) -> dict[str, int]:
    return {"WIDTH": launch.x_MD.shape[1], "M": TILE, "N": TILE, "K": DEPTH}


def _pairs(p: Panel) -> int:
    return cdiv(p.rows, 2 * TILE) * cdiv(p.columns, TILE)


def _grid(launch: Launch, p: Panel) -> tuple[int]:
    """No more programs than pairs of tiles: each has to have one."""
    return (min(_pairs(p), processors(launch.x_MD.device)),)


def _operands(launch: Launch, p: Panel) -> tuple[Any, Any]:
    return _described(part(launch.x_MD, p.r), DEPTH), _described(part(launch.y_ND, p.c), DEPTH)


def _described(t: Tensor | None, width: int) -> Any:
    """A descriptor of blocks of TILE rows."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    assert t is not None
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [TILE, width], _layout(width))


@functools.cache
def _layout(width: int) -> Any:
    """How blocks of two-byte numbers lie in shared memory."""
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16

    return NVMMASharedLayout.get_default_for([TILE, width], bfloat16)
