"""Count what one pass through an encoder costs, forward and backward: FLOPs, bytes moved, operations launched by the host.

The pass runs on fake tensors, so nothing is computed; attention, autocast and dropout dispatch as on CUDA.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..towers.repeats import TEMPLATE, BlockRun, equal_blocks, few_blocks
from .blocks import Block, BlockTracker
from .cuda_dispatch import dispatch_as_cuda
from .fake_tensors import CachingFakeMode, as_fake, call, fake_parameters
from .operations import OpClass, class_of, flops_of, implicit_ops, tensors_in, utilization_of
from .without_dynamo import without_dynamo

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Rows of the two counted passes: the cost of one row is their difference.
FEW, MORE = 8, 16
aten = torch.ops.aten
# Operations that launch no kernel, though their schema does not mark them as views.
FREE = {aten.detach, aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
# Position of the argument of which only a few elements are read: logits at their labels, a table at its indices.
UNREAD = {aten.nll_loss_forward: 0, aten.nll_loss_backward: 1, aten.embedding: 0}


class Call(NamedTuple):
    """One operation and how many times it is called with the same costs.

    flops, bytes: per row. fixed: bytes that do not depend on the rows. utilization: the share of its class's rate that it reaches
    (`operations.utilization_of`). implicit: whether it is part of another operation, which the host launches
    (`operations.implicit_ops`).
    """

    op_class: OpClass
    flops: float
    bytes: float
    fixed: float
    times: int = 1
    utilization: float = 1.0
    implicit: bool = False


class Pass(NamedTuple):
    """All operations of a forward or of a backward."""

    calls: tuple[Call, ...] = ()

    @property
    def operations(self) -> int:
        """The number of operations that the host launches."""
        return sum(call.times for call in self.calls if not call.implicit)

    @property
    def flops(self) -> float:
        """FLOPs of matrix products, per row; the instructions of a pooling are none."""
        return sum(call.times * call.flops for call in self.calls if call.op_class != "pooling")

    @property
    def bytes(self) -> float:
        """Bytes read and written, per row."""
        return sum(call.times * call.bytes for call in self.calls)


class Work(NamedTuple):
    """Forward and backward of an encoder.

    parameters: how many it has; trainable: how many of them receive a gradient. inputs: bytes of one row of its inputs.
    """

    forward: Pass
    backward: Pass
    parameters: int
    trainable: int
    inputs: float = 0.0


class _CountedCall(NamedTuple):
    """One call of an operation with its FLOPs and bytes, for all rows of the pass. times: how many calls it stands for."""

    op_class: OpClass
    flops: float
    bytes: float
    utilization: float
    implicit: bool = False
    times: int = 1


class CallCounter(TorchDispatchMode):
    """Lists the operations that are called inside this context, and those of each of the model's equal blocks."""

    def __init__(self, blocks: BlockTracker, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self.calls: list[_CountedCall] = []
        self._blocks = blocks
        self._of_block: dict[Block, list[_CountedCall]] = collections.defaultdict(list)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # As in CachingFakeMode.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        out = call(self._mode, func, args, kwargs)
        packet = func._overloadpacket
        if func.namespace == "aten" and not func.is_view and packet not in FREE:
            name, flops = packet.__name__, flops_of(func, args, kwargs, out)
            op_class = class_of(name, args, out, has_flops=flops > 0)
            moved = _bytes((_read_args(packet, args), kwargs, out))
            self._add(_CountedCall(op_class, flops, moved, utilization_of(op_class, args, out)))
            for op in implicit_ops(name, op_class, args, out):
                self._add(_CountedCall(op.op_class, 0.0, op.bytes, op.utilization, implicit=True))
        return out

    def _add(self, call: _CountedCall) -> None:
        block = self._blocks.current
        if block is not None:
            self._of_block[block].append(call)
            if block.position == TEMPLATE:
                call = call._replace(times=self._blocks.runs[block.run].weight)
        self.calls.append(call)

    @property
    def inner_blocks_agree(self) -> bool:
        """Whether the two inner blocks of each run, which stand between equal ones, called the same."""
        return all(
            self._of_block[Block(run, TEMPLATE)] == self._of_block[Block(run, TEMPLATE + 1)]
            for run in range(len(self._blocks.runs))
        )


def count_work(
    module: nn.Module,
    inputs: Callable[[int], Any],
    precision: str = "fp32",
    *,
    device: Literal["cuda", "cpu"] = "cuda",
    loss: Callable[[Any], Tensor] | None = None,
    whole: bool = False,
) -> Work:
    """Return the cost of module(inputs(rows)) and of its backward, under autocast for "bf16" and "fp16".

    inputs: makes a tensor, a tuple of positional arguments, or a dict of arguments by name, for a number of rows. loss: turns the
    module's output into a scalar, where that costs something too. whole: compute all blocks of the model also where they are equal
    and a few of them show the costs of all.

    >>> count_work(nn.Linear(10, 20), lambda rows: torch.zeros(rows, 10)).forward.flops
    400.0
    """
    few, more = (_count(module, inputs(rows), precision, device, loss, whole=whole) for rows in (FEW, MORE))
    forward, backward = (_cost_per_row(a, b) for a, b in zip(few, more, strict=True))
    parameters = list(module.parameters())
    return Work(
        forward,
        backward,
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        inputs=_bytes(inputs(1)),
    )


def _cost_per_row(few: CallCounter, more: CallCounter) -> Pass:
    """Split costs into a part per row and a fixed part; if the two passes call different operations, all of it is per row."""
    if [call.op_class for call in few.calls] != [call.op_class for call in more.calls]:
        return Pass(
            tuple(Call(b.op_class, b.flops / MORE, b.bytes / MORE, 0.0, b.times, b.utilization, b.implicit) for b in more.calls)
        )
    calls: collections.Counter[Call] = collections.Counter()
    for a, b in zip(few.calls, more.calls, strict=True):
        row = (b.bytes - a.bytes) / (MORE - FEW)
        flops = (b.flops - a.flops) / (MORE - FEW)
        calls[Call(b.op_class, flops, row, max(0.0, a.bytes - FEW * row), 1, b.utilization, b.implicit)] += b.times
    return Pass(tuple(call._replace(times=times) for call, times in calls.items()))


def _count(
    module: nn.Module, rows: Any, precision: str, device: str, loss: Callable[[Any], Tensor] | None, *, whole: bool
) -> tuple[CallCounter, CallCounter]:
    """Return the operations of a forward and a backward. whole: of all blocks; otherwise few of the equal ones are computed."""
    if not whole:
        runs = equal_blocks(module)
        try:
            passes = _count_passes(module, rows, precision, device, loss, runs)
        # The model counts its blocks. Whatever else is wrong shows again.
        except (LookupError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError):
            pass
        else:
            if all(each.inner_blocks_agree for each in passes):
                return passes
    try:
        return _count_passes(module, rows, precision, device, loss, [])
    except RuntimeError as error:
        raise ValueError(
            f"The cost of {type(module).__name__} cannot be counted without running it, because what it computes depends on the "
            f"contents of its inputs: {error}"
        ) from error


def _count_passes(
    module: nn.Module, rows: Any, precision: str, device: str, loss: Callable[[Any], Tensor] | None, runs: list[BlockRun]
) -> tuple[CallCounter, CallCounter]:
    blocks = BlockTracker(runs)
    dtype = AUTOCAST_DTYPES.get(precision)
    with ExitStack() as contexts:
        contexts.enter_context(without_dynamo())
        if device == "cuda":
            contexts.enter_context(dispatch_as_cuda())
        mode = contexts.enter_context(CachingFakeMode())
        forward, backward = CallCounter(blocks, mode), CallCounter(blocks, mode)
        trainable = contexts.enter_context(fake_parameters(module))
        contexts.enter_context(blocks.watching())
        rows = tree_map(as_fake, rows)
        args, kwargs = ((), rows) if isinstance(rows, dict) else (rows if isinstance(rows, (tuple, list)) else (rows,), {})
        with torch.enable_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None), forward:
            with few_blocks(runs):
                out = module(*args, **kwargs)
            value = _sum_of_outputs(out) if loss is None else loss(out)
        if trainable and value.requires_grad:
            with backward:
                torch.autograd.grad(value, trainable, allow_unused=True)
    return forward, backward


def _sum_of_outputs(out: Any) -> Tensor:
    """Return a scalar that depends on every floating-point tensor of an output."""
    values = list(out.values()) if hasattr(out, "values") and not isinstance(out, Tensor) else out
    return sum((t.sum() for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point()), torch.zeros(()))


def _read_args(packet: Any, args: Any) -> list[Any]:
    """Return the arguments as often as they are read: the two gradients of a convolution are two kernels, and both read dy."""
    twice = [args[0]] if packet is aten.convolution_backward and all(args[10][:2]) else []
    return [arg for position, arg in enumerate(args) if position != UNREAD.get(packet)] + twice


def _bytes(tree: Any) -> float:
    """Return the bytes of all tensors; an expanded tensor is read once."""
    return float(sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors_in(tree)))
