"""Copies of a few tensors in one launch, times a factor if wanted: for small batches, where each launch costs the host's time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, launch_compiled

# Tensors of one launch.
MOST = 4
BLOCK = 1024
# What every device can load and store, apart from integers.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool)
# Triton lets a kernel read several values at once if they start at a multiple of so many bytes.
ALIGNMENT = 16


@triton.jit(do_not_specialize=["length_a", "length_b", "length_c", "length_d"], do_not_specialize_on_alignment=["factor"])
def copy_kernel(a, b, c, d, to_a, to_b, to_c, to_d, factor, length_a, length_b, length_c, length_d, BLOCK: tl.constexpr):
    """Copy tensors of these lengths, times the factor unless it is None. Only a is not None in any case."""
    block = tl.program_id(0)
    _copy(a, to_a, factor, length_a, block, BLOCK)
    block -= tl.cdiv(length_a, BLOCK)
    if b is not None:
        _copy(b, to_b, factor, length_b, block, BLOCK)
        block -= tl.cdiv(length_b, BLOCK)
    if c is not None:
        _copy(c, to_c, factor, length_c, block, BLOCK)
        block -= tl.cdiv(length_c, BLOCK)
    if d is not None:
        _copy(d, to_d, factor, length_d, block, BLOCK)


@triton.jit
def _copy(source, target, factor, length, block, BLOCK: tl.constexpr):
    i = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (block >= 0) & (i < length)
    values = tl.load(source + i, mask=inside)
    if factor is not None:
        # The product is rounded once, to the dtype of the target.
        values = values * tl.load(factor)
    tl.store(target + i, values, mask=inside)


class OneLaunch:
    """The copies of contract.Copies, by one kernel that is found once."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        lengths = [t.numel() for t in like]
        missing = [None] * (MOST - len(like))
        self.missing, self.device = missing, like[0].get_device()
        self.lengths = *lengths, *itertools.repeat(0, len(missing))
        self.grid = (sum(cdiv(length, BLOCK) for length in lengths),)
        self.compiled: Any = None

    def __call__(self, sources: Sequence[Tensor], targets: Sequence[Tensor], factor: Tensor | None = None) -> bool:
        if factor is not None and (factor.ndim or factor.is_neg()):
            return False
        for t in sources:
            if not t.is_contiguous() or t.data_ptr() % ALIGNMENT or t.is_neg():
                return False
        if self.device >= 0 and self.device != torch.cuda.current_device():
            return False
        arguments = *sources, *self.missing, *targets, *self.missing, factor, *self.lengths
        if self.compiled is None:
            # Triton's interpreter compiles nothing.
            self.compiled = copy_kernel[self.grid](*arguments, BLOCK=BLOCK)
        else:
            launch_compiled(self.compiled, self.grid, self.device, arguments, (BLOCK,))
        return True


def copies_of(like: Sequence[Tensor]) -> OneLaunch | None:
    """Return what copies tensors that are like these, or None if one launch cannot."""
    fits = 0 < len(like) <= MOST and all(t.numel() and (t.dtype in DTYPES or _is_integer(t.dtype)) for t in like)
    return OneLaunch(like) if fits else None


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex
