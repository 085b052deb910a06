"""What forward keeps for backward: the exponentials of the gradient's first panel, in the memory that this panel will take anyway.

Backward then has only to weigh them, in place, where it would compute the similarities again.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..contract import ComputeOptions
from .gradients import buffer_for, in_buffer, panel_dtype
from .launch import Launch, Panel, first_panel
from .tuned_configs import kind_of

# The least width of embeddings whose product costs more, on an H200, than to write an exponential and read it again, by `kind_of`.
# fp16, whose products are fast and whose panels are fp32, has none.
LEAST_WIDTH = {"bfloat16": 384, "tf32": 384, "ieee": 64}


class Kept(NamedTuple):
    """The gradient's first panel, and its buffer."""

    panel: Panel
    buffer: Tensor

    def holds(self, p: Panel) -> bool:
        """Whether a panel of forward lies in this one; none lies across its edges."""
        return p.r.start < self.panel.rows and p.c.start < self.panel.columns

    def values(self, p: Panel) -> Tensor:
        """The place for the exponentials of a panel in this one."""
        return in_buffer(self.buffer, self.panel)[p.r, p.c]


def room_to_keep(launch: Launch, compute: ComputeOptions) -> Kept | None:
    """Room for the first panel of the gradient, where it is worth it. On a CPU, where kernels are tried, it always is."""
    x_MD, y_ND = launch.x_MD, launch.y_ND
    (rows, width), columns = x_MD.shape, y_ND.shape[0]
    least = 0 if x_MD.device.type == "cpu" else LEAST_WIDTH.get(kind_of(x_MD.dtype, compute.precision))
    if least is None or width < least or not rows or not columns:
        return None
    dtype = panel_dtype(x_MD)
    panel = first_panel("gradient", x_MD, y_ND, compute, dtype.itemsize)
    return Kept(panel, buffer_for(panel, x_MD, dtype))
