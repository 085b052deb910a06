"""What one forward of an encoder costs: operations on matrices, bytes that everything else moves, and calls of the host.

Counted on fake tensors, so nothing is computed. Products are counted by torch's own formulas (torch.utils.flop_counter), with their
two faults put right: the attention of CPUs, which they do not know, has one here; backward, where they count depthwise convolutions
sixteen times too often, is not counted but taken as twice the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Rows of the two forwards that are counted: what they differ by is the cost of a row.
FEW, MORE = 8, 16
# Operations that launch nothing, though they are no views by name.
FREE = (torch.ops.aten.detach, torch.ops.aten._unsafe_view)


class Work(NamedTuple):
    """One forward: FLOP and bytes for each row, bytes for each pass whatever its rows, operations that the host calls.

    learning: parameters that receive a gradient, of `parameters`.
    """

    flops: float
    bytes: float
    pass_bytes: float
    operations: int
    parameters: int
    learning: int


class Counter(TorchDispatchMode):
    """Sums up what is called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.bytes = 0
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if func.namespace != "aten" or func.is_view or packet in FREE:
            return out
        self.operations += 1
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        elif "scaled_dot_product" in packet.__name__:
            query, key, value = args[:3]
            self.flops += sdpa_flop_count(query.shape, key.shape, value.shape)
        else:
            # Products are bound by their operations; whatever else there is, by the memory it reads and writes.
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return out


def count_work(module: nn.Module, inputs: Callable[[int], Any], precision: str = "fp32") -> Work:
    """The cost of module(inputs(rows)), in autocast where the precision is half.

    >>> count_work(nn.Linear(10, 20), lambda rows: torch.zeros(rows, 10)).flops
    400.0
    """
    few, more = _count(module, inputs(FEW), precision), _count(module, inputs(MORE), precision)
    row_bytes = (more.bytes - few.bytes) / (MORE - FEW)
    parameters = list(module.parameters())
    return Work(
        flops=(more.flops - few.flops) / (MORE - FEW),
        bytes=row_bytes,
        pass_bytes=max(0.0, few.bytes - FEW * row_bytes),
        operations=more.operations,
        parameters=sum(p.numel() for p in parameters),
        learning=sum(p.numel() for p in parameters if p.requires_grad),
    )


def _count(module: nn.Module, rows: Any, precision: str) -> Counter:
    autocast: AbstractContextManager[Any] = nullcontext()
    if precision in HALF:
        autocast = torch.autocast("cpu", HALF[precision])
    counter = Counter()
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), autocast, counter:
            module(rows)
    except RuntimeError as error:
        raise ValueError(
            f"{type(module).__name__} cannot be counted without running it ({error}): what it computes depends on the inputs"
        ) from error
    return counter
