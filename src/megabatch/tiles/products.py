"""The tiles of two blocks and the products with them, in PyTorch operations. Legend: contract.py.

A tile is a rectangle of the similarity matrix, R rows by C columns, sized to the workspace: two buffers of its size are allocated
once per walk and overwritten by every tile.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .contract import ComputeOptions, Pairs, accumulator

# Cells of a block of rows for each thread of a CPU, which stay in its cache. A matrix of up to SMALL_CELLS is one block, a larger
# one FEWEST_BLOCKS or more.
BLOCK_CELLS, FEWEST_BLOCKS, SMALL_CELLS = 2**17, 16, 2**20


class Tile(NamedTuple):
    """The place of a tile, its operands in the dtype of the products, its similarities, and a buffer of the same shape."""

    rows: slice
    columns: slice
    x_RD: Tensor
    y_CD: Tensor
    z_RC: Tensor
    work_RC: Tensor


def walk(x_MD: Tensor, y_ND: Tensor, pairs: Pairs, compute: ComputeOptions) -> Iterator[Tile]:
    """Yield every tile with its similarities, one panel of columns after another."""
    acc = accumulator(x_MD.dtype)
    # Masks and what is computed from them add about two floats per cell, the similarities of a guide one more.
    masked = pairs.ids_M is not None or pairs.skip_N is not None or pairs.compares
    floats = (4 if masked or pairs.smoothed or pairs.ranked else 2) + (pairs.guide is not None)
    cells = max(1, compute.workspace // (floats * acc.itemsize))
    height = max(1, min(len(x_MD), math.isqrt(cells)))
    width = max(1, min(len(y_ND), cells // height))
    z, work = x_MD.new_empty(2, height * width, dtype=acc)
    for columns in slices(len(y_ND), width):
        y_CD = operand(y_ND[columns])
        # Transposed once per panel, because CPUs multiply faster with it.
        y_DC = y_CD.T.contiguous()
        for rows in slices(len(x_MD), height):
            x_RD = operand(x_MD[rows])
            shape = len(x_RD), len(y_CD)
            z_RC, work_RC = (buffer[: math.prod(shape)].view(shape) for buffer in (z, work))
            if x_RD.dtype == acc:
                with units(x_MD, compute.precision):
                    torch.mm(x_RD, y_DC, out=z_RC)
            else:
                torch.mm(x_RD, y_DC, out_dtype=acc, out=z_RC)
            yield Tile(rows, columns, x_RD, y_CD, z_RC, work_RC)


def row_blocks(t_RC: Tensor) -> tuple[Tensor, ...]:
    """Return blocks of rows: all that is done with one at a time needs buffers of its size only, which stay in the caches."""
    if t_RC.numel() <= SMALL_CELLS or not t_RC.is_cpu:
        return (t_RC,)
    cells = min(BLOCK_CELLS * torch.get_num_threads(), t_RC.numel() // FEWEST_BLOCKS)
    return t_RC.split(max(1, cells // t_RC.shape[1]))


def tile_blocks(t: Tile) -> Iterator[Tile]:
    """Yield the tile in blocks of its rows, which share the beginning of its buffer."""
    row = 0
    for z_BC in row_blocks(t.z_RC):
        stop = row + len(z_BC)
        work_BC = t.work_RC.view(-1)[: z_BC.numel()].view(z_BC.shape)
        yield Tile(slice(t.rows.start + row, t.rows.start + stop), t.columns, t.x_RD[row:stop], t.y_CD, z_BC, work_BC)
        row = stop


def operand(t: Tensor) -> Tensor:
    """Return the operand of a product, in a dtype whose products are not rounded before they are accumulated."""
    acc = accumulator(t.dtype)
    return t if t.dtype == acc or t.is_cuda else t.to(acc)


def similarities(x_RD: Tensor, y_CD: Tensor) -> Tensor:
    """Return the similarities of two small blocks, in the dtype of sums."""
    acc = accumulator(x_RD.dtype)
    with units(x_RD, "ieee"):
        return x_RD.to(acc) @ y_CD.to(acc).T


_NO_SWITCH = nullcontext()


def units(embeddings: Tensor, precision: str) -> AbstractContextManager[None]:
    """Choose the matrix units for fp32 products by the arguments, whatever the settings of the process.

    On CUDA, tf32 if the precision is "tf32". On a CPU with bf16 units (AMX), those for bf16 embeddings: the products read fp32
    copies, which bf16 represents exactly, and accumulate in fp32, so no logit is rounded. The settings belong to the process, so
    they are changed only during the product.
    """
    if embeddings.is_cpu and embeddings.dtype != torch.bfloat16:
        return _NO_SWITCH
    return _switched(embeddings, precision)


@contextmanager
def _switched(embeddings: Tensor, precision: str) -> Iterator[None]:
    switch: Any = None
    if embeddings.device.type == "cuda":
        switch = torch.backends.cuda.matmul
    elif embeddings.device.type == "cpu":
        switch, precision = getattr(torch.backends.mkldnn, "matmul", None), "bf16"
    if switch is None:
        yield
        return
    # Before torch 2.9 the setting for CUDA was a boolean.
    name, value = ("fp32_precision", precision) if hasattr(switch, "fp32_precision") else ("allow_tf32", precision == "tf32")
    setting = _settings.setdefault((embeddings.device.type, name), _Setting(switch, name))
    setting.take(value)
    try:
        yield
    finally:
        setting.give_back()


class _Setting:
    """A setting of the process that threads change for a product: those that want one value share it, others wait for them."""

    def __init__(self, switch: Any, name: str) -> None:
        self.switch, self.name = switch, name
        self.free = threading.Condition()
        self.users = 0
        self.value: Any = None
        self.before: Any = None

    def take(self, value: Any) -> None:
        """Set the value, as soon as no thread uses another one."""
        with self.free:
            self.free.wait_for(lambda: not self.users or self.value == value)
            if not self.users:
                self.before, self.value = getattr(self.switch, self.name), value
                setattr(self.switch, self.name, value)
            self.users += 1

    def give_back(self) -> None:
        """Restore what the setting was before the first user, after the last one."""
        with self.free:
            self.users -= 1
            if not self.users:
                setattr(self.switch, self.name, self.before)
                self.free.notify_all()


_settings: dict[tuple[str, str], _Setting] = {}


def no_product(t: Tensor, needs_grad: bool) -> Tensor | None:
    """Return zeros of the shape of t to add products to, or None."""
    return torch.zeros_like(t, dtype=accumulator(t.dtype)) if needs_grad else None


def add_products(
    embeddings: Tensor, t: Tile, g_RC: Tensor, gx_MD: Tensor | None, gy_ND: Tensor | None, compute: ComputeOptions
) -> None:
    """Add g @ y and g.T @ x of a tile. embeddings: the original ones, for their dtype."""
    if t.x_RD.dtype == torch.bfloat16:
        g_RC = g_RC.to(torch.bfloat16)
    with units(embeddings, compute.precision):
        if gx_MD is not None:
            _add_product(gx_MD[t.rows], g_RC, t.y_CD)
        if gy_ND is not None:
            _add_product(gy_ND[t.columns], g_RC.T, t.x_RD)


def _add_product(into: Tensor, g: Tensor, operand: Tensor) -> None:
    if operand.dtype == torch.bfloat16:
        into.add_(torch.mm(g, operand, out_dtype=into.dtype))
    else:
        # fp16 cannot represent a gradient that is small against the largest, so its products are fp32.
        into.addmm_(g, operand.to(into.dtype))


def positive_entries(t: Tile, matrix_RC: Tensor) -> Tensor:
    """Return a view of the positives' entries in a tile, or a matrix of its shape, of the local block."""
    start, stop = max(t.rows.start, t.columns.start), min(t.rows.stop, t.columns.stop)
    stop = max(start, stop)
    square = matrix_RC[start - t.rows.start : stop - t.rows.start, start - t.columns.start : stop - t.columns.start]
    return square.diagonal()


def slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def number(value: float, dtype: torch.dtype) -> Tensor:
    """Return a number as a tensor. PyTorch makes and converts one in every product with a number, which takes longer than a
    product of some thousand elements."""
    # A mode, such as that of fake tensors, makes tensors that are of no use outside of it.
    return _new_number(value, dtype) if torch._C._len_torch_dispatch_stack() else _known_number(value, dtype)


@functools.lru_cache(maxsize=256)
def _known_number(value: float, dtype: torch.dtype) -> Tensor:
    return _new_number(value, dtype)


def _new_number(value: float, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((), value, dtype=dtype, device="cpu")
