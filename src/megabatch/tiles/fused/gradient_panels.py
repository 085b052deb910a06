"""Panels of the gradient in the logits: their buffer, the exponentials that forward saves in it, and the two products with them.

The products are left to the vendor's GEMM: a kernel that computed the gradient and both products would have no registers for sums
as wide as the embeddings. Hopper has its own for saved exponentials (hopper/saved_products.py). The buffer of a panel is the
workspace. Legend: ../contract.py.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..contract import ComputeOptions, NeedsGrad
from ..products import units
from .launch import Launch, Panel, first_panel, part
from .tuned_configs import kind_of

# Rows of a panel start at multiples of so many elements, so that threads read and write as many at once.
ROW_ALIGNMENT = tl.constexpr(8)
# The products of panels with fewer cells do not fill the device, so they run side by side on two streams.
CELLS_THAT_FILL_THE_DEVICE = 12_288**2
# Exponentials are saved from this width of embeddings on, by `kind_of`: on an H200, computing them again then costs more than
# writing and reading them. fp16 has none, because its products are fast and its panels are fp32.
MIN_WIDTH_TO_SAVE_EXP = {"bfloat16": 384, "tf32": 384, "ieee": 64}


def panel_dtype(embeddings: Tensor) -> torch.dtype:
    """Return the dtype of the gradient of a panel."""
    return torch.bfloat16 if embeddings.dtype == torch.bfloat16 else torch.float32


def new_buffer(p: Panel, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate the buffer of a panel, and so of all smaller ones."""
    return like.new_empty(p.rows * _stride(p), dtype=dtype)


def view_of_buffer(buffer: Tensor, p: Panel) -> Tensor:
    """Return a panel in its buffer, with rows that start at multiples of 16 bytes or more, as descriptors and vectors need."""
    return buffer.as_strided((p.rows, p.columns), (_stride(p), 1))


def _stride(p: Panel) -> int:
    return p.columns + -p.columns % ROW_ALIGNMENT.value


class SavedExp(NamedTuple):
    """The exponentials of the gradient's first panel, saved by forward in the buffer that this panel needs anyway.

    marks: of backward (Launch.new_marks), allocated together with those of forward.
    """

    panel: Panel
    buffer: Tensor
    marks: Tensor

    def contains(self, p: Panel) -> bool:
        """Return whether a panel of forward lies in this one; none lies across its edges."""
        return p.r.start < self.panel.rows and p.c.start < self.panel.columns

    def view(self, p: Panel) -> Tensor:
        """Return the part of the buffer for the exponentials of a panel in this one."""
        view = view_of_buffer(self.buffer, self.panel)
        return view if p.rows == self.panel.rows and p.columns == self.panel.columns else view[p.r, p.c]


def allocate_saved_exp(launch: Launch, compute: ComputeOptions) -> SavedExp | None:
    """Allocate the first panel of the gradient and marks, or return None if saving its exponentials does not pay.

    On a CPU, where kernels are only tested, it always pays.
    """
    x_MD, y_ND = launch.x_MD, launch.y_ND
    (rows, width), columns = x_MD.shape, y_ND.shape[0]
    min_width = 0 if x_MD.device.type == "cpu" else MIN_WIDTH_TO_SAVE_EXP.get(kind_of(x_MD.dtype, compute.precision))
    if min_width is None or width < min_width or not rows or not columns:
        return None
    dtype = panel_dtype(x_MD)
    panel = first_panel("gradient", x_MD, y_ND, compute, dtype.itemsize)
    return SavedExp(panel, new_buffer(panel, x_MD, dtype), launch.new_marks(2))


class _Product(NamedTuple):
    """A product to add to `into`, or to write there if it is the first."""

    into: Tensor
    g: Tensor
    embeddings: Tensor
    is_first: bool


class GradientProducts:
    """gx_MD and gy_ND, to which the products of each panel are added.

    With bf16 embeddings a panel is bf16. fp16 could not represent a gradient that is small against the largest, so the panel of
    fp16 embeddings is fp32, rounded to tf32, which represents fp16 exactly. All products accumulate in fp32.
    """

    def __init__(
        self, x_MD: Tensor, y_ND: Tensor, needs_grad: NeedsGrad, compute: ComputeOptions, buffer: Tensor | None = None
    ) -> None:
        """buffer: of the first panel, which is the largest."""
        self.dtype = panel_dtype(x_MD)
        self.precision = "tf32" if x_MD.dtype == torch.float16 else compute.precision
        self.x_MD, self.y_ND = x_MD.to(self.dtype), y_ND.to(self.dtype)
        new = torch.empty_like if len(x_MD) and len(y_ND) else torch.zeros_like
        self.gx_MD = new(x_MD, dtype=torch.float32) if needs_grad.x else None
        self.gy_ND = new(y_ND, dtype=torch.float32) if needs_grad.y else None
        self.buffer = buffer

    @property
    def bytes_per_cell(self) -> int:
        return self.dtype.itemsize

    @property
    def rounds_to_tf32(self) -> bool:
        return self.dtype == torch.float32 and self.precision == "tf32"

    def panel(self, p: Panel) -> Tensor:
        """Return the buffer for a panel; the first panel is the largest."""
        if self.buffer is None:
            self.buffer = new_buffer(p, self.x_MD, self.dtype)
        return view_of_buffer(self.buffer, p)

    def add(self, panel: Tensor, p: Panel, columns: slice | None = None, *, starts: bool = True) -> None:
        """Add panel @ y and panel.T @ x. Panels come row after row, so the first of a row (column) starts its sum.

        columns: of the embeddings; None for all. starts: whether no other product has been added to these columns before.
        """
        products: list[_Product] = []
        for into, g, embeddings, rows, summed in (
            (self.gx_MD, panel, self.y_ND, p.r, p.c),
            (self.gy_ND, panel.T, self.x_MD, p.c, p.r),
        ):
            if into is not None:
                into, embeddings = part(into, rows), part(embeddings, summed)
                if columns is not None:
                    into, embeddings = into[:, columns], embeddings[:, columns]
                products.append(_Product(into, g, embeddings, starts and summed.start == 0))
        if len(products) == 2 and panel.is_cuda and panel.numel() < CELLS_THAT_FILL_THE_DEVICE:
            current, second = torch.cuda.current_stream(), _second_stream(panel.device)
            second.wait_stream(current)
            with torch.cuda.stream(second):
                self._add(products.pop())
            self._add(products.pop())
            current.wait_stream(second)
        for product in products:
            self._add(product)

    def write_with_gains(self, panel: Tensor, p: Panel, gains_M: Tensor) -> None:
        """Write the products of the gradient that is the panel with each row multiplied by its gain, without computing it.

        These are the first products of these rows and columns.
        """
        gains_M1, x_MD = gains_M.unsqueeze(1), part(self.x_MD, p.r)
        gx_MD, gy_ND = part(self.gx_MD, p.r), part(self.gy_ND, p.c)
        if gy_ND is not None:
            # As long as gx is not written, its memory is free, and enough.
            into = torch.empty_like(x_MD) if gx_MD is None else gx_MD.view(-1).view(self.dtype)[: x_MD.numel()].view(x_MD.shape)
            torch.mul(x_MD, gains_M1, out=into)
            self._add(_Product(gy_ND, panel.T, into, is_first=True))
        if gx_MD is not None:
            self._add(_Product(gx_MD, panel, part(self.y_ND, p.c), is_first=True))
            gx_MD.mul_(gains_M1)

    def _add(self, product: _Product) -> None:
        into, g, embeddings, is_first = product
        if self.dtype == torch.bfloat16:
            if is_first:
                torch.mm(g, embeddings, out_dtype=torch.float32, out=into)
            else:
                torch.addmm(into, g, embeddings, out_dtype=torch.float32, out=into)
            return
        with units(into, self.precision):
            if is_first:
                torch.mm(g, embeddings, out=into)
            else:
                into.addmm_(g, embeddings)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
