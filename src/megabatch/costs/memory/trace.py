"""Record a step on fake tensors: every storage from its allocation to its end, what it is for, and where in the step it is made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..blocks import Block, BlockTracker
from ..fake_tensors import call
from .workspaces import KernelWorkspaces

# What memory is for, in the order in which it is reported. "rests": remainders of blocks that the allocator does not split off.
PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "averages",
    "gradient buckets",
    "gathered weights",
    "weight copies",
    "inputs",
    "activations",
    "embeddings",
    "loss tiles",
    "ring buffers",
    "temporaries",
    "workspace",
    "rests",
)
# CUDA's allocator rounds every request up to a multiple of this.
CUDA_GRANULE = 512


@dataclass
class Allocation:
    """A piece of memory: its size and the part that it belongs to, which may be set later.

    remainder: bytes that the allocator adds to it; they are reported as a part of their own.
    """

    bytes: int
    part: str
    remainder: int = 0


class Event(NamedTuple):
    """An allocation begins or ends, at a moment of a phase. allocation: its index in the trace. block: of equal ones, if any."""

    allocation: int
    is_allocation: bool
    phase: str
    moment: str
    block: Block | None = None


class PhasePeak(NamedTuple):
    """The most bytes that were allocated at one moment, by part."""

    bytes: int
    parts: dict[str, int]
    moment: str


@dataclass
class Trace:
    """Allocations and, in order, when they began and ended."""

    allocations: list[Allocation] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def allocate(self, size: int, part: str, phase: str, moment: str, block: Block | None = None) -> int:
        """Add an allocation; return the index that `free` takes."""
        self.allocations.append(Allocation(size, part))
        self.events.append(Event(len(self.allocations) - 1, True, phase, moment, block))
        return len(self.allocations) - 1

    def free(self, index: int, phase: str, moment: str, block: Block | None = None) -> None:
        self.events.append(Event(index, False, phase, moment, block))

    def peaks(self, start: int) -> dict[str, PhasePeak]:
        """Return the highest point of each phase, at or after event number `start`."""
        live = 0
        parts = dict.fromkeys(PARTS, 0)
        highest: dict[str, PhasePeak] = {}
        for number, event in enumerate(self.events):
            allocation = self.allocations[event.allocation]
            sign = 1 if event.is_allocation else -1
            live += sign * (allocation.bytes + allocation.remainder)
            parts[allocation.part] += sign * allocation.bytes
            parts["rests"] += sign * allocation.remainder
            if number >= start and (event.phase not in highest or live > highest[event.phase].bytes):
                highest[event.phase] = PhasePeak(live, {part: size for part, size in parts.items() if size}, event.moment)
        return highest


class Recorder(TorchDispatchMode):
    """Follows every storage that operations return, by a weak reference that reports its end.

    part: what new storages are for. phase, moment: where in the step execution is. workspaces: what CUDA's kernels allocate; None
    on a CPU. blocks: says which of the model's equal blocks is computed.
    """

    def __init__(self, workspaces: KernelWorkspaces | None) -> None:
        super().__init__()
        self.trace = Trace()
        self.workspaces = workspaces
        self.part = "activations"
        self.phase = "setup"
        self.moment = "setup"
        self.operations: set[str] = set()
        self.granule = 1 if workspaces is None else CUDA_GRANULE
        self.blocks: BlockTracker | None = None
        self.fake_mode: FakeTensorMode | None = None
        self._live: dict[int, tuple[Any, int]] = {}
        # The storage of a gradient that another was just added to, and the allocation of the sum.
        self._last_sum: tuple[int, int] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here; otherwise torch wraps every dispatch in `torch._dynamo.disable`.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], FakeTensor):
            # Asked for more often than anything is computed: the answers of a fake tensor, without its dispatch.
            if func is torch.ops.prim.device.default:
                return args[0].fake_device
            if func is torch.ops.aten._local_scalar_dense.default and args[0].constant is not None:
                with no_dispatch():
                    return args[0].constant.item()
        self.operations.add(func._schema.name)
        if _only_writes_lists(func, args):
            return None
        out = call(self.fake_mode, func, args, kwargs or {})
        copies_weights = func is torch.ops.aten._to_copy.default and self.part_of(args[0]) == "weights"
        results = tree_leaves(out)
        workspaces = self.workspaces.of(func, args, out) if self.workspaces is not None else []
        # Results are allocated one after the other, each with the workspace of the kernel that computes it.
        for leaf, size in zip(results, [0] * (len(results) - len(workspaces)) + workspaces, strict=True):
            if isinstance(leaf, Tensor):
                self._follow(leaf, "weight copies" if copies_weights else self.part)
            if size:
                self.free(self.allocate(size, "workspace"))
        if func is torch.ops.aten.add.Tensor and self.phase == "backward":
            self._note_sum(args[0], out)
        return out

    def allocate(self, size: int, part: str) -> int:
        """Add memory that no tensor of the trace represents; return the index that `free` takes."""
        rounded = -(-size // self.granule) * self.granule
        return self.trace.allocate(rounded, part, self.phase, self.moment, self._block)

    def free(self, index: int) -> None:
        self.trace.free(index, self.phase, self.moment, self._block)

    @property
    def _block(self) -> Block | None:
        return None if self.blocks is None else self.blocks.current

    @contextmanager
    def separate_events(self) -> Iterator[list[Event]]:
        """Yield the list that collects the events of this context, which do not join the trace."""
        before, self.trace.events = self.trace.events, []
        try:
            yield self.trace.events
        finally:
            self.trace.events = before

    def allocation_of(self, tensor: Tensor) -> Allocation | None:
        """Return the allocation behind a tensor, or None if it was not made during the trace."""
        live = self._live.get(tensor.untyped_storage()._cdata)
        return None if live is None else self.trace.allocations[live[1]]

    def part_of(self, tensor: Tensor) -> str | None:
        allocation = self.allocation_of(tensor)
        return None if allocation is None else allocation.part

    def label(self, tensor: Tensor | None, part: str) -> None:
        """Set what a tensor's memory is for, for all of its lifetime."""
        allocation = None if tensor is None else self.allocation_of(tensor)
        if allocation is not None:
            allocation.part = part

    @contextmanager
    def during(self, phase: str, part: str, moment: str | None = None) -> Iterator[None]:
        """A context in which the phase is `phase` and new storages are for `part`."""
        before = self.phase, self.part, self.moment
        self.phase, self.part, self.moment = phase, part, moment or phase
        try:
            yield
        finally:
            self.phase, self.part, self.moment = before

    def _follow(self, tensor: Tensor, part: str) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._live or size == 0:
            return
        index = self.allocate(size, part)
        # The weak reference is kept: a dropped one does not call back.
        self._live[key] = weakref.ref(storage, lambda _: self._end(key)), index

    def _note_sum(self, first: Tensor, out: Tensor) -> None:
        live = self._live.get(out.untyped_storage()._cdata)
        if live is not None and first.shape == out.shape and first.dtype == out.dtype and _is_dense(first):
            self._last_sum = first.untyped_storage()._cdata, live[1]

    def _end(self, key: int) -> None:
        index = self._live.pop(key)[1]
        events = self.trace.events
        self.free(index)
        # Autograd adds in place to a gradient that nothing else refers to, except to fake tensors (InputBuffer::accumulate). If the
        # first summand ends right after the sum, both never exist at once: swap the two events.
        if (
            self._last_sum is not None
            and self._last_sum[0] == key
            and len(events) > 1
            and events[-2][:2] == (self._last_sum[1], True)
        ):
            events[-2:] = events[:-3:-1]


def _only_writes_lists(func: Any, args: Any) -> bool:
    """Whether an operation of an optimizer writes to lists of tensors in place: it allocates nothing, and hundreds of tensors take
    their time even as fake ones. Tensors with known values, the step counts, have to be computed."""
    name = func._schema.name
    if not (name.startswith("aten::_foreach_") and name.endswith("_")):
        return False
    first = args[0][0]
    return isinstance(first, FakeTensor) and first.constant is None


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements are adjacent in memory, each of them once."""
    return tensor.numel() == 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class ModuleTracker:
    """Sets a recorder's moment: "forward of NAME", "backward of NAME" or "recomputation of NAME" for a forward during backward."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._inside: list[str] = []

    def watch(self, module: nn.Module, prefix: str = "") -> None:
        """Register hooks on every module inside that report when it begins and ends."""
        for name, inner in module.named_modules():
            full = ".".join(part for part in (prefix, name) if part) or type(module).__name__
            inner.register_forward_pre_hook(self._enter_hook(full))
            inner.register_forward_hook(self._leave_hook(full))

    def _enter_hook(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._inside.append(name)
            self._set_forward(name)

        return enter

    def _leave_hook(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            # The last entry of that name: a recomputation that stops early enters blocks and does not leave them.
            del self._inside[len(self._inside) - 1 - self._inside[::-1].index(name) :]
            if self._inside:
                self._set_forward(self._inside[-1])
            for node in autograd_nodes(output):
                # The innermost module comes first; an outer one that returns the same tensor is less precise.
                if "moment" not in node.metadata:
                    node.metadata["moment"] = name
                    node.register_prehook(lambda gradients: self._set(f"backward of {name}"))

        return leave

    def _set_forward(self, name: str) -> None:
        self._set(f"{'recomputation' if self.recorder.phase == 'backward' else 'forward'} of {name}")

    def _set(self, moment: str) -> None:
        self.recorder.moment = moment


def autograd_nodes(output: Any) -> list[Any]:
    """Return the nodes of the autograd graph that produced the tensors of an output."""
    values = output.values() if isinstance(output, dict) else output
    leaves = tree_leaves(list(values) if isinstance(output, dict) else values)
    return [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
