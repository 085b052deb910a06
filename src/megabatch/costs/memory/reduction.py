"""What CUDA's reductions write aside: partial sums of several blocks of threads, which the last one adds up.

The launch is the one that ATen/native/cuda/Reduce.cuh works out (setReduceConfig). A sum over rows, as of a bias's gradient, takes
an accumulator for every thread, output and block: for many rows as much as the tensor that is summed up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

WARP, MAX_THREADS, VECTOR = 32, 512, 4
# Values for one thread: several blocks share an output from the second number on, and leave each thread the first at least.
FEW_VALUES, MANY_VALUES = 16, 256
ACCUMULATOR = 4
# CUDA's programming guide, technical specifications by compute capability: threads resident on a multiprocessor, where not 2,048.
RESIDENT = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
# Of the largest common device: V100, T4, A100, RTX 3090, L40S, H100 and H200, B200, RTX 5090.
MULTIPROCESSORS = {(7, 0): 80, (7, 5): 40, (8, 0): 108, (8, 6): 82, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 170}


class Span(NamedTuple):
    """A dimension, or several that lie behind each other: how far apart its elements are, and how many."""

    stride: int
    size: int


@dataclass(frozen=True)
class Launch:
    """How a block of threads, width × height, shares a reduction.

    along: its width lies along what is summed up, if that is densest in memory, and across the outputs else, `vector` for each
        thread. shares_height: its height shares the sums, too, so that `values` are left to a thread.
    """

    width: int
    height: int
    vector: int
    along: bool
    values: int
    shares_height: bool

    def blocks(self, outputs: int, capability: tuple[int, int]) -> int:
        """Blocks that share an output: more than one where they are few and each thread would have much to add up."""
        threads = self.width * self.height
        room = MULTIPROCESSORS.get(capability, 132) * (RESIDENT.get(capability, 2048) // threads)
        step = (1 if self.along else self.width) * (1 if self.shares_height else self.height)
        grid = -(-(outputs // self.vector) // step)
        if not self.shares_height or self.values < MANY_VALUES or grid > room:
            return 1
        return max(min(-(-room // grid), -(-self.values // FEW_VALUES)), -(-self.values // MANY_VALUES))


def reduction_bytes(tensor: Tensor, dims: Sequence[int] | None, capability: tuple[int, int]) -> int:
    """Bytes of partial sums while `tensor` is summed up over `dims` (None: all)."""
    if not tensor.numel() or not tensor.ndim:
        return 0
    over = {dim % tensor.ndim for dim in dims} if dims else set(range(tensor.ndim))
    spans = [(dim in over, Span(*found)) for dim, found in enumerate(zip(tensor.stride(), tensor.shape, strict=True))]
    reduced, kept = (_joined([span for inside, span in spans if inside == wanted and span.size > 1]) for wanted in (True, False))
    outputs = math.prod(span.size for span in kept)
    launch = _launch(reduced, kept, tensor.numel() // outputs, outputs)
    blocks = launch.blocks(outputs, capability)
    if blocks == 1:
        return 0
    return ACCUMULATOR * outputs * blocks * (1 if launch.along else launch.width * launch.vector)


def _launch(reduced: list[Span], kept: list[Span], inputs: int, outputs: int) -> Launch:
    along = not kept or not reduced or reduced[0].stride < kept[0].stride
    wide, high, vector = (inputs, outputs, 1) if along else (outputs, inputs, 1)
    if along and reduced and reduced[0].stride == 1 and wide >= 128 and len(reduced) == 1:
        wide //= VECTOR
    elif not along and kept[0].stride == 1:
        vector = math.gcd(VECTOR, kept[0].size, *(span.stride for span in (*reduced, *kept[1:])))
        wide //= vector
    most = MAX_THREADS // vector
    wide, high = (_power(min(size, most)) for size in (wide, high))
    height = min(high, most // min(wide, WARP))
    width = min(wide, most // height)
    values = -(-inputs // width) if along else inputs
    shares_height = values >= min(height * FEW_VALUES, MANY_VALUES)
    if shares_height:
        values = -(-inputs // (height * (width if along else 1)))
    return Launch(width, height, vector, along, values, shares_height)


def _joined(spans: list[Span]) -> list[Span]:
    """The densest first, each joined with the next where that goes on where it ends."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and span.stride == joined[-1].stride * joined[-1].size:
            joined[-1] = Span(joined[-1].stride, joined[-1].size * span.size)
        else:
            joined.append(span)
    return joined


def _power(number: int) -> int:
    """The largest power of two that is no larger."""
    return 1 << (number.bit_length() - 1)
