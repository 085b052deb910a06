"""Copies to and from the memory of a CUDA graph, each in one launch: for small batches, where launches cost the host's time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import addresses, cdiv

# Tensors of one launch.
MOST = 4
BLOCK = 1024
# What every device can load and store, apart from integers.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool)
# Triton lets a kernel read several values at once if they start at a multiple of so many bytes.
ALIGNMENT = 16


@triton.jit(do_not_specialize=["length_a", "length_b", "length_c", "length_d"], do_not_specialize_on_alignment=["result"])
def copy_kernel(
    result, factor, a, b, c, d, to_a, to_b, to_c, to_d, place, length_a, length_b, length_c, length_d, BLOCK: tl.constexpr
):
    """Copy tensors of these lengths, times the factor unless it is None; write the address of result to place unless it is None.
    Only a is not None in any case."""
    block = tl.program_id(0)
    if result is not None:
        # All programs write the same.
        tl.store(place, result.to(tl.int64))
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


@triton.jit
def deliver_kernel(value, place):
    """Write the value to the address that is stored in place."""
    tl.store(tl.load(place).to(value.dtype), tl.load(value))


class _OneLaunch:
    """Copies between tensors of a graph and others of the same form, by one kernel.

    The first launch compiles it. Later ones call Triton's launcher directly, with addresses that are read once where they do not
    change, on the stream of the first launch, since a graph is replayed on one stream. They do not call Triton's launch hooks.
    """

    def __init__(self, own: Sequence[Tensor], place: Tensor | None = None) -> None:
        lengths = [t.numel() for t in own]
        self.missing = (None,) * (MOST - len(own))
        self.own = *own, *self.missing
        self.place_and_lengths = place, *lengths, *itertools.repeat(0, len(self.missing))
        self.device = own[0].get_device()
        self.grid = (sum(cdiv(length, BLOCK) for length in lengths), 1, 1)
        self.run: Callable[..., None] | None = None

    def compile(self, *arguments: Tensor | int | None) -> None:
        """Launch the kernel, and keep what launches it again. Triton's interpreter compiles nothing."""
        with torch.cuda.device(self.device):
            compiled = copy_kernel[self.grid](*arguments, BLOCK=BLOCK)
        if compiled is not None:
            stream = torch._C._cuda_getCurrentRawStream(self.device)
            fixed = *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None
            self.run = functools.partial(compiled.run, *fixed)


class CopiedInputs(_OneLaunch):
    """Implements contract.GraphInputs."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        # Nobody reads what is delivered before the first call. No value takes more bytes.
        self.unread = torch.empty(1, dtype=torch.float64, device=inputs[0].device)
        self.place = torch.tensor([self.unread.data_ptr()], device=inputs[0].device)
        super().__init__(inputs, self.place)
        self.rest = *self.missing, *self.own, *self.place_and_lengths
        self.rest_addresses = *addresses(self.rest), BLOCK

    def fill(self, sources: Sequence[Tensor], result: Tensor) -> None:
        pointers = []
        for t in sources:
            pointer = t.data_ptr()
            # _is_readable(t), without a call for each tensor.
            if pointer % ALIGNMENT or not t.is_contiguous() or t.is_neg():
                return self.fill([t if _is_readable(t) else _copied(t) for t in sources], result)
            pointers.append(pointer)
        if self.run is None:
            self.compile(result, None, *sources, *self.rest)
        elif self.device == torch._C._cuda_getDevice():
            self.run(result.data_ptr(), None, *pointers, *self.rest_addresses)
        else:
            with torch.cuda.device(self.device):
                self.fill(sources, result)

    def deliver(self, value: Tensor) -> None:
        deliver_kernel[(1,)](value, self.place)


class ScaledGradients(_OneLaunch):
    """Implements contract.GraphGradients."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__(gradients)
        self.rest = *self.missing, *self.place_and_lengths
        self.own_addresses, self.rest_addresses = addresses(self.own), (*addresses(self.rest), BLOCK)

    def scale(self, factor: Tensor, targets: Sequence[Tensor]) -> None:
        pointer = factor.data_ptr()
        if pointer % ALIGNMENT or factor.is_neg():
            self.scale(_copied(factor), targets)
        elif self.run is None:
            self.compile(None, factor, *self.own, *targets, *self.rest)
        elif self.device == torch._C._cuda_getDevice():
            self.run(None, pointer, *self.own_addresses, *[t.data_ptr() for t in targets], *self.rest_addresses)
        else:
            with torch.cuda.device(self.device):
                self.scale(factor, targets)


def can_copy(tensors: Sequence[Tensor]) -> bool:
    """Return whether one launch can copy these tensors to memory of the same form, or from it."""
    return 0 < len(tensors) <= MOST and all(
        t.numel() and (t.dtype in DTYPES or _is_integer(t.dtype)) and _is_readable(t) for t in tensors
    )


def _is_readable(t: Tensor) -> bool:
    return t.data_ptr() % ALIGNMENT == 0 and t.is_contiguous() and not t.is_neg()


def _copied(t: Tensor) -> Tensor:
    """Return a copy that a kernel can read."""
    return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex
