"""The two products with the gradient in the logits, panel by panel, as the vendor computes them. Legend: ../contract.py."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..contract import ComputeOptions, NeedsGrad
from ..products import units
from .kernels.backward_from_saved_exp import GRAIN
from .launch import Panel, part

# Products of panels with fewer cells do not fill the device: the two run side by side.
FILLS_THE_DEVICE = 12_288**2


def panel_dtype(embeddings: Tensor) -> torch.dtype:
    """What the gradient of a panel is written in."""
    return torch.bfloat16 if embeddings.dtype == torch.bfloat16 else torch.float32


def buffer_for(p: Panel, like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_empty(p.rows * _stride(p), dtype=dtype)


def in_buffer(buffer: Tensor, p: Panel) -> Tensor:
    """A panel in its buffer, whose rows begin at multiples of 16 bytes or more, for descriptors and vectors alike."""
    return buffer.as_strided((p.rows, p.columns), (_stride(p), 1))


def _stride(p: Panel) -> int:
    return p.columns + -p.columns % GRAIN.value


class Products:
    """gx_MD and gy_ND, to which each panel's products are added.

    bf16 embeddings meet a panel in bf16. fp16 could not hold a gradient that is small against the largest: their panel is fp32,
    rounded to tf32, which holds fp16 exactly. All products are summed up in fp32.
    """

    def __init__(
        self, x_MD: Tensor, y_ND: Tensor, needs_grad: NeedsGrad, compute: ComputeOptions, buffer: Tensor | None = None
    ) -> None:
        """buffer: for the first panel, and so for all."""
        self.dtype = panel_dtype(x_MD)
        self.precision = "tf32" if x_MD.dtype == torch.float16 else compute.precision
        self.x_MD, self.y_ND = x_MD.to(self.dtype), y_ND.to(self.dtype)
        new = torch.empty_like if len(x_MD) and len(y_ND) else torch.zeros_like
        self.gx_MD = new(x_MD, dtype=torch.float32) if needs_grad.x else None
        self.gy_ND = new(y_ND, dtype=torch.float32) if needs_grad.y else None
        self.buffer = buffer

    @property
    def bytes_a_cell(self) -> int:
        return self.dtype.itemsize

    @property
    def rounds_to_tf32(self) -> bool:
        return self.dtype == torch.float32 and self.precision == "tf32"

    def panel(self, p: Panel) -> Tensor:
        """The buffer for a panel; the first panel is the largest."""
        if self.buffer is None:
            self.buffer = buffer_for(p, self.x_MD, self.dtype)
        return in_buffer(self.buffer, p)

    def add(self, panel: Tensor, p: Panel) -> None:
        """Adds panel @ y and panel.T @ x. Panels come row after row, so the first of a row (column) starts its sum."""
        products: list[tuple[Any, ...]] = []
        if self.gx_MD is not None:
            products.append((part(self.gx_MD, p.r), panel, part(self.y_ND, p.c), p.c.start == 0))
        if self.gy_ND is not None:
            products.append((part(self.gy_ND, p.c), panel.T, part(self.x_MD, p.r), p.r.start == 0))
        if len(products) == 2 and panel.is_cuda and panel.numel() < FILLS_THE_DEVICE:
            here, other = torch.cuda.current_stream(), _second_stream(panel.device)
            other.wait_stream(here)
            with torch.cuda.stream(other):
                self._add(*products.pop())
            self._add(*products.pop())
            here.wait_stream(other)
        for product in products:
            self._add(*product)

    def _add(self, into: Tensor, g: Tensor, embeddings: Tensor, first: bool) -> None:
        if self.dtype == torch.bfloat16:
            if first:
                torch.mm(g, embeddings, out_dtype=torch.float32, out=into)
            else:
                torch.addmm(into, g, embeddings, out_dtype=torch.float32, out=into)
            return
        with units(into, self.precision):
            if first:
                torch.mm(g, embeddings, out=into)
            else:
                into.addmm_(g, embeddings)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
