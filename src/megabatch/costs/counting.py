"""What one pass of an encoder costs, forward and backward: operations on matrices, bytes that are moved, calls of the host.

Counted on fake tensors, so nothing is computed, with attention, autocast and dropout as CUDA has them.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .flops import flops_of
from .implicit_ops import hidden_of
from .memory.routing import as_on_cuda
from .op_classes import Kind, filling_of, kind_of, tensors_of

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Rows of the two passes that are counted: what they differ by is the cost of a row.
FEW, MORE = 8, 16
aten = torch.ops.aten
# Operations that launch nothing, though they are no views by name.
FREE = {aten.detach, aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
# Arguments of which a few elements are read, if any: logits at their labels, a table at its indices.
UNREAD = {aten.nll_loss_forward: 0, aten.nll_loss_backward: 1, aten.embedding: 0}


class Call(NamedTuple):
    """One operation, as often as it is called alike: FLOP and bytes for each row, and bytes whatever the rows.

    filling: the share of its kind's rate that it reaches, where its blocks do not fill the device (`kinds.filling_of`).
    hidden: whether it is part of another operation, which is what the host calls (`hidden_of`).
    """

    kind: Kind
    flops: float
    bytes: float
    fixed: float
    times: int = 1
    filling: float = 1.0
    hidden: bool = False


class Pass(NamedTuple):
    """All operations of a forward, or of a backward."""

    calls: tuple[Call, ...] = ()

    @property
    def operations(self) -> int:
        """Calls of the host."""
        return sum(call.times for call in self.calls if not call.hidden)

    @property
    def flops(self) -> float:
        """Of matrix products, for each row."""
        return sum(call.times * call.flops for call in self.calls)

    @property
    def bytes(self) -> float:
        """Read and written, for each row."""
        return sum(call.times * call.bytes for call in self.calls)


class Work(NamedTuple):
    """Forward and backward of an encoder. trainable: parameters that receive a gradient; inputs: bytes of a row."""

    forward: Pass
    backward: Pass
    parameters: int
    trainable: int
    inputs: float = 0.0


class Counted(NamedTuple):
    """One call of an operation with its FLOP and bytes."""

    kind: Kind
    flops: float
    bytes: float
    filling: float
    hidden: bool = False


class Counter(TorchDispatchMode):
    """Lists what is called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Counted] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if func.namespace == "aten" and not func.is_view and packet not in FREE:
            name, flops = packet.__name__, flops_of(func, args, kwargs, out)
            kind = kind_of(name, args, out, counted=flops > 0)
            self.calls.append(Counted(kind, flops, _bytes((_read(packet, args), kwargs, out)), filling_of(kind, args, out)))
            self.calls += [Counted(kind, 0.0, size, filling, True) for kind, size, filling in hidden_of(name, kind, args, out)]
        return out


def count_work(
    module: nn.Module,
    inputs: Callable[[int], Any],
    precision: str = "fp32",
    *,
    device: Literal["cuda", "cpu"] = "cuda",
    loss: Callable[[Any], Tensor] | None = None,
) -> Work:
    """The cost of module(inputs(rows)) and of its backward, in autocast where the precision is half.

    inputs: a tensor, or a dict by name. loss: takes what the module returns to a number, where that costs something too.

    >>> count_work(nn.Linear(10, 20), lambda rows: torch.zeros(rows, 10)).forward.flops
    400.0
    """
    few, more = (_count(module, inputs(rows), precision, device, loss) for rows in (FEW, MORE))
    forward, backward = (_compared(a, b) for a, b in zip(few, more, strict=True))
    parameters = list(module.parameters())
    return Work(
        forward,
        backward,
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        inputs=_bytes(inputs(1)),
    )


def _compared(few: Counter, more: Counter) -> Pass:
    """Costs by row, from two passes that call the same operations; where they do not, all of it goes by the row."""
    if [call.kind for call in few.calls] != [call.kind for call in more.calls]:
        return Pass(tuple(Call(b.kind, b.flops / MORE, b.bytes / MORE, 0.0, 1, b.filling, b.hidden) for b in more.calls))
    calls = []
    for a, b in zip(few.calls, more.calls, strict=True):
        row = (b.bytes - a.bytes) / (MORE - FEW)
        flops = (b.flops - a.flops) / (MORE - FEW)
        calls.append(Call(b.kind, flops, row, max(0.0, a.bytes - FEW * row), 1, b.filling, b.hidden))
    return Pass(tuple(call._replace(times=times) for call, times in Tally(calls).items()))


def _count(
    module: nn.Module, rows: Any, precision: str, device: str, loss: Callable[[Any], Tensor] | None
) -> tuple[Counter, Counter]:
    forward, backward = Counter(), Counter()
    half = HALF.get(precision)
    learning = [p for p in module.parameters() if p.requires_grad]
    try:
        with ExitStack() as contexts:
            if device == "cuda":
                contexts.enter_context(as_on_cuda())
            contexts.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            with torch.enable_grad(), torch.autocast("cpu", half, enabled=half is not None), forward:
                out = module(**rows) if isinstance(rows, dict) else module(rows)
                value = _total(out) if loss is None else loss(out)
            if learning and value.requires_grad:
                with backward:
                    torch.autograd.grad(value, learning, allow_unused=True)
    except RuntimeError as error:
        raise ValueError(
            f"{type(module).__name__} cannot be counted without running it ({error}): what it computes depends on the inputs"
        ) from error
    return forward, backward


def _total(out: Any) -> Tensor:
    """A number that all of an output goes into."""
    values = list(out.values()) if hasattr(out, "values") and not isinstance(out, Tensor) else out
    return sum((t.sum() for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point()), torch.zeros(()))


def _read(packet: Any, args: Any) -> list[Any]:
    """Arguments as often as they are read: a convolution's two gradients have a kernel each, and both read that of the output."""
    twice = [args[0]] if packet is aten.convolution_backward and all(args[10][:2]) else []
    return [arg for place, arg in enumerate(args) if place != UNREAD.get(packet)] + twice


def _bytes(tree: Any) -> float:
    """Of all tensors; one that repeats its elements is read once."""
    return float(sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors_of(tree)))
