"""A loss of small batches as a CUDA graph: value and gradients are captured once for each shape, and each call replays them.

At a few thousand pairs a step takes as long as the host needs to launch it. A call here copies its inputs into the graph's own and
replays the graph, which ends by copying the value; backward multiplies the graph's gradients, which are for an incoming gradient
of one. A graph has one place for its gradients: replays are numbered (`generation`), and backward repeats one that is no longer
the last.
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from ..tiles import graph_gradients, graph_inputs
from ..tiles.contract import GraphInputs
from .autograd import LossModule, first_derivative_only, outside_graphs
from .batch import computed_for_graph, is_accumulating
from .checks import PLAIN_TENSORS
from .one_piece import HAS_DISTRIBUTED

DEVICE = "cuda"
# Calls before a capture: kernels are compiled in the first one, and launched as they will be captured from the second one on.
WARM_UP_CALLS = 3
# Signatures that were called once and have no graph; the oldest are forgotten.
SEEN = 256
# What a graph may contain as a constant.
PLAIN_VALUES = (type(None), bool, int, float, str, type(...), torch.dtype)

_generations = itertools.count(1)
# PyTorch captures one graph at a time. Reentrant, in case that objects are collected meanwhile which clear a loss.
_capturing = threading.RLock()
# The streams that graphs are captured on, by device.
_side_streams: dict[torch.device, torch.cuda.Stream] = {}


class _Thread(threading.local):
    """State of a thread. captures: whether it captures a graph; a graphed loss that is part of the captured one is then computed
    by the loss itself."""

    captures = False


_thread = _Thread()


def graphed(loss: Callable[..., Any], *, max_graphs: int = 8, **options: Any) -> GraphedLoss:
    """Return a loss that is called as `loss` is, and that CUDA graphs compute: for small batches, where the host takes the time.

    loss: a loss of megabatch, a Module of one, or another function of tensors that returns a scalar and does not wait for the
        device. It must not draw random numbers, and all that changes or needs a gradient must be an argument.
    max_graphs: how many graphs there are at most. The one that was not used for the longest time is removed for a new one.
    options: fixed keyword arguments of the loss. Others may be passed with each call, if they are hashable.

    There is one graph for each signature: shapes, dtypes, which tensors require a gradient, autocast, grad mode, the stream, and
    the values of all arguments that are no tensors. The first call of a signature is computed by the loss itself, the second one
    captures its graph, which takes as long as many calls. So a shape that occurs once is never captured, nor a scale that is
    another number in each step; pass that one as a tensor. A graph keeps its memory: copies of the inputs, their gradients, what
    the loss needs to compute them (`workspace` limits that), and the workspaces of cuBLAS.

    Values and gradients are those of the loss for contiguous inputs on the current device, bit for bit; up to rounding for
    bfloat16 matrices of 4,096² to 8,192² cells, which a graph computes in tiles. If the loss is multiplied by something else than
    a power of two, its gradients are rounded once more. Calls and backward passes may come in any order. All inputs must be
    unchanged until backward, ids and weights too.

    Process groups, diagnostics, tensors inside of other objects (`guide`), functions, tensors on several devices, and float16
    tensors that require a gradient raise a ValueError. On a CPU, inside torch.compile, the transforms of torch.func, dispatch modes
    and autograd's anomaly detection, and while the caller captures a graph, the loss itself is called.

    >>> import torch, megabatch
    >>> x, y = torch.nn.functional.normalize(torch.randn(2, 256, 64), dim=-1).unbind()
    >>> criterion = megabatch.graphed(megabatch.clip_loss, symmetric=False)
    >>> loss = criterion(x.requires_grad_(), y, torch.tensor(20.0))
    >>> loss.backward()
    """
    return GraphedLoss(loss, max_graphs, options)


class GraphedLoss:
    """The loss that `graphed` returns, which documents the arguments. A copy of it, or a pickled one, starts without graphs."""

    def __init__(self, loss: Callable[..., Any], max_graphs: int, options: Mapping[str, Any]) -> None:
        if not callable(loss):
            raise ValueError(f"loss is a {type(loss).__name__}: must be a function or Module, for example megabatch.clip_loss")
        if not isinstance(max_graphs, int) or isinstance(max_graphs, bool) or max_graphs < 1:
            raise ValueError(f"max_graphs={max_graphs!r}: must be a positive number of graphs, for example 8")
        if isinstance(loss, nn.Module):
            held = [name for name, _ in (*loss.named_parameters(), *loss.named_buffers())]
            if held:
                raise ValueError(
                    f"loss is a Module that holds {', '.join(held)}: a graph takes all tensors as arguments; pass a function, for "
                    "example lambda x, y, log_scale: megabatch.clip_loss(x, y, log_scale.exp())"
                )
        fixed = {**loss.options, **options} if isinstance(loss, LossModule) else options
        for name, value in fixed.items():
            _check_value(name, value)
        self.options = copy.deepcopy(dict(options))
        self.function = loss
        self.max_graphs = max_graphs
        # What computes the loss without a graph.
        self.loss = functools.partial(loss, **self.options) if options else loss
        self._graphs: dict[tuple[Any, ...], LossGraph] = {}
        self._seen: dict[tuple[Any, ...], None] = {}
        self._removed = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return self.loss(*args, **kwargs)
        tensors, graph = self._find(args, kwargs)
        if graph is None:
            return self._without_graph(args, kwargs)
        if not graph.differentiable:
            return graph.run(tensors)[0]
        try:
            return _apply(graph, *tensors)
        except RuntimeError:
            # Those cannot be saved for backward; the loss says which one, or makes a copy.
            if any(t.is_inference() for t in tensors):
                return self._without_graph(args, kwargs)
            raise

    def value_and_grad(self, *args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return the value and its gradients: one for each tensor among the arguments, None for those that require none.

        This skips autograd, which takes most of the host's time in a call and its backward. Value and gradients are bit for bit
        those of the call, and no later call overwrites them. Pass the gradients on to the encoders:

        >>> import torch, megabatch
        >>> x, y, scale = torch.randn(8, 4, requires_grad=True), torch.randn(8, 4), torch.tensor(1.0, requires_grad=True)
        >>> value, (grad_x, grad_y, grad_scale) = megabatch.graphed(megabatch.clip_loss).value_and_grad(x, y, scale)
        >>> torch.autograd.backward((x, scale), (grad_x, grad_scale))
        """
        if torch.compiler.is_dynamo_compiling():
            return _uncompiled_value_and_grad(self, *args, **kwargs)
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            with torch.inference_mode(False), torch.enable_grad():
                return self.value_and_grad(*args, **kwargs)
        tensors, graph = self._find(args, kwargs)
        if graph is not None:
            return graph.value_and_grad(tensors)
        call = LossCall(self.loss, args, kwargs)
        leaves = own_leaves(call.tensors)
        value = call(leaves)
        if leaves_of(value).keys() - set(map(id, leaves)):
            check_leaves(call, leaves)
        return value.detach(), tuple(gradients_of(value, leaves))

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], LossGraph | None]:
        """Return the tensors among the arguments, and the graph of this signature or None, if the loss itself is to be called."""
        # This code is cold between two steps of a training: every Python call in it takes microseconds.
        grad = torch.is_grad_enabled()
        tensors, signature = [], []
        for value in (*args, *kwargs.values()) if kwargs else args:
            if type(value) in PLAIN_TENSORS and value.layout is torch.strided and not value.is_nested:
                tensors.append(value)
                signature.append((value.shape, value.dtype, value.get_device(), grad and value.requires_grad))
            elif isinstance(value, Tensor):
                return tensors, None
            else:
                signature.append(_constant(value))
        stream = stream_of(tensors[0]) if tensors else None
        if stream is None or _is_special():
            return tensors, None
        autocast = torch.get_autocast_dtype(DEVICE) if torch.is_autocast_enabled(DEVICE) else None
        initialized = HAS_DISTRIBUTED and dist.GroupMember.WORLD is not None
        key = stream, tuple(signature), tuple(kwargs), grad, autocast, initialized
        try:
            graph = self._graphs.get(key)
        except TypeError:
            # An argument that is not hashable.
            self._check_arguments(args, kwargs)
            raise
        return tensors, graph or self._graph_for(key, args, kwargs)

    def clear(self) -> None:
        """Remove all graphs and free their memory, as soon as no backward needs them."""
        with _capturing:
            self._graphs.clear()
            self._seen.clear()

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        name = getattr(self.function, "__name__", None) or repr(self.function)
        return f"graphed({name}, max_graphs={self.max_graphs}{options})"

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphedLoss, (self.function, self.max_graphs, self.options)

    def _without_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        value = self.loss(*args, **kwargs)
        if not isinstance(value, Tensor) or value.ndim:
            raise _not_a_scalar(value)
        return value

    def _graph_for(self, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LossGraph | None:
        """Return the new graph of a signature that has none, or None if this is its first call."""
        with _capturing:
            # Another thread may have been faster.
            if key in self._graphs:
                return self._graphs[key]
            if key not in self._seen:
                self._check_arguments(args, kwargs)
                self._seen[key] = None
                if len(self._seen) > SEEN:
                    del self._seen[next(iter(self._seen))]
                return None
            graph = capture(LossCall(self.loss, args, kwargs))
            self._seen.pop(key, None)
            self._graphs[key] = graph
            if len(self._graphs) > self.max_graphs:
                self._remove_one()
            return graph

    def _remove_one(self) -> None:
        oldest = min(self._graphs, key=lambda key: self._graphs[key].generation)
        del self._graphs[oldest]
        self._removed += 1
        if self._removed == self.max_graphs:
            warnings.warn(
                f"{self!r} has captured {2 * self.max_graphs} graphs and keeps {self.max_graphs} of them, and capturing takes as "
                "long as many calls: use fewer shapes, for example by padding or drop_last=True, or raise max_graphs",
                UserWarning,
                stacklevel=4,
            )

    def _check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise a ValueError for arguments that no graph can take."""
        names = [*(f"argument {place}" for place in range(1, 1 + len(args))), *kwargs]
        first: Tensor | None = None
        for name, value in zip(names, (*args, *kwargs.values()), strict=True):
            if not isinstance(value, Tensor):
                _check_value(name, value)
                try:
                    hash(value)
                except TypeError:
                    raise ValueError(
                        f"{name} is {value!r:.80}: a value that is passed with each call must be hashable; pass a tuple, or fix "
                        "it in graphed(loss, …)"
                    ) from None
                continue
            first = value if first is None else first
            if value.device != first.device:
                raise ValueError(
                    f"{name} is on {value.device} and the first tensor on {first.device}: all tensors of a graph must be on one "
                    "device; move it with .to()"
                )
            if value.dtype == torch.float16 and value.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{name} is float16 and requires a gradient: a graph's gradients are multiplied by the incoming one, such as a "
                    "GradScaler's, after rounding, and float16 cannot represent them; use bfloat16, or the loss itself"
                )


_uncompiled_value_and_grad = outside_graphs(GraphedLoss.value_and_grad)


class LossCall:
    """The loss as a function of the tensors among its arguments; the other arguments are constants."""

    def __init__(self, loss: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.loss, self.values, self.positional, self.names = loss, (*args, *kwargs.values()), len(args), tuple(kwargs)
        self.tensors = [value for value in self.values if isinstance(value, Tensor)]

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        replaced = iter(tensors)
        values = [next(replaced) if isinstance(value, Tensor) else value for value in self.values]
        value = self.loss(*values[: self.positional], **dict(zip(self.names, values[self.positional :], strict=True)))
        if not isinstance(value, Tensor) or value.ndim:
            raise _not_a_scalar(value)
        return value


class LossGraph:
    """A captured computation and the memory that it reads and writes.

    inputs: read by replay(). value, gradients: written by it; the latter are for an incoming gradient of one, and without those
        that are None. fused_inputs: what fills the inputs, if replay() delivers a copy of the value too. generation: the number of
        the last replay.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        value: Tensor,
        gradients: Sequence[Tensor | None],
        replay: Callable[[], None],
        fused_inputs: GraphInputs | None = None,
    ) -> None:
        self.inputs, self.value, self.replay, self.fused_inputs = list(inputs), value, replay, fused_inputs
        self.generation = next(_generations)
        # Without the GIL in operations, another thread could copy its inputs between this one's copy and replay.
        self.lock = threading.Lock()
        # The graph itself is the first argument of the Function.
        self.places = [1 + place for place, t in enumerate(gradients) if t is not None]
        self.gradients = [t for t in gradients if t is not None]
        self.no_results: list[Tensor | None] = [None] * (1 + len(gradients))
        self.differentiable = bool(self.gradients)
        self.fused_gradients = graph_gradients(self.gradients)
        self.one = torch.ones_like(value)

    def run(self, inputs: list[Tensor] | tuple[Tensor, ...]) -> tuple[Tensor, int]:
        """Return a copy of the value for these inputs, and the number of the replay."""
        with self.lock:
            value = torch.empty_like(self.value)
            self._compute(inputs, value)
            if self.fused_inputs is None:
                value.copy_(self.value)
            return value, self.generation

    def value_and_grad(self, inputs: list[Tensor]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return a copy of the value for these inputs, and copies of its gradients."""
        value, generation = self.run(inputs)
        results = self.no_results
        if self.differentiable:
            results, _ = self.backward(inputs, generation, self.one, self.new_gradients())
        return value, tuple(results[1:])

    def new_gradients(self) -> list[Tensor]:
        """Return memory for gradients."""
        return [torch.empty_like(t) for t in self.gradients]

    def backward(
        self, inputs: list[Tensor] | tuple[Tensor, ...], generation: int, g: Tensor, targets: list[Tensor]
    ) -> tuple[list[Tensor | None], int]:
        """Return the gradients for the gradient g of the value, the first one for the graph itself, and the number of their replay.

        generation: the number of the replay whose gradients are wanted; inputs: those of that replay, which is repeated if it is
        not the last one. targets: the memory of the gradients.
        """
        with self.lock:
            if self.generation != generation:
                self._compute(inputs, self.value)
            if self.fused_gradients is None:
                # A factor with a dimension is not rounded to the dtype of the gradient first: the product is rounded once.
                factor = g.view(1)
                for t, target in zip(self.gradients, targets, strict=True):
                    torch.mul(t, factor if t.ndim else g, out=target)
            else:
                self.fused_gradients.scale(g, targets)
            results = self.no_results.copy()
            for place, target in zip(self.places, targets, strict=True):
                results[place] = target
            return results, self.generation

    def _compute(self, inputs: list[Tensor] | tuple[Tensor, ...], value: Tensor) -> None:
        """Replay the graph for these inputs. value: where it delivers its value, if it does."""
        if self.fused_inputs is None:
            # Outside of an autograd function, autograd would keep what the inputs were computed from.
            with torch.no_grad():
                torch._foreach_copy_(self.inputs, inputs)
        else:
            self.fused_inputs.fill(inputs, value)
        self.replay()
        self.generation = next(_generations)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: LossGraph, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.graph = graph
        value, ctx.generation = graph.run(inputs)
        # Memory is allocated faster here than in the thread of backward, which has last allocated some in the backward before.
        ctx.targets = graph.new_gradients()
        return value

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        # Read in any case: this raises if an input was modified, or if the graph of autograd was freed.
        inputs = ctx.saved_tensors
        targets, ctx.targets = ctx.targets, None
        # A second backward of a retained graph needs memory of its own.
        results, ctx.generation = ctx.graph.backward(inputs, ctx.generation, g, targets or ctx.graph.new_gradients())
        return tuple(results)


# Function.apply without what it does for the transforms of torch.func, in which no graph is used.
_apply = super(torch.autograd.Function, _Replay).apply


def stream_of(t: Tensor) -> int | None:
    """Return the handle of the current stream of t's device, or None where no graph is used: elsewhere than on CUDA, and while the
    stream is captured."""
    if not t.is_cuda or torch._C._cuda_isCurrentStreamCapturing():
        return None
    return torch._C._cuda_getCurrentRawStream(t.get_device())


def _is_special() -> bool:
    """Return whether something else than autograd takes part in this call, or `accumulate`, in which losses raise, or whether it is
    captured as part of another loss."""
    return bool(
        _thread.captures
        or torch.is_anomaly_enabled()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack()
        or is_accumulating()
    )


def capture(call: LossCall) -> LossGraph:
    """Return the graph of a call, which is to be replayed on the current stream of its device."""
    device = call.tensors[0].device
    with torch.cuda.device(device), _own_state():
        current = torch.cuda.current_stream()
        # Static inputs belong to the current stream, which replays the graph: they are not reused before a replay is done.
        static, leaves = static_inputs(call.tensors)
        fused_inputs = graph_inputs(static)
        if device not in _side_streams:
            _side_streams[device] = torch.cuda.Stream()
        side = _side_streams[device]
        side.wait_stream(current)
        offset = torch.cuda._get_rng_state_offset(device)
        with torch.cuda.stream(side):
            check_leaves(call, leaves)
            # A capture that fails leaves PyTorch's allocator in a bad state, so this is found before.
            waits = all([_waits(call, leaves, fused_inputs) for _ in range(WARM_UP_CALLS)])
        current.wait_stream(side)
        if waits:
            raise ValueError(
                "the loss, or another thread, waits for the device in each call, as reading a value with .item() does: a graph "
                "cannot contain that; use the loss itself"
            )
        if torch.cuda._get_rng_state_offset(device) != offset:
            raise ValueError(
                "the loss draws random numbers, and backward may have to compute it again: a graphed loss must be deterministic; "
                "use the loss itself"
            )
        graph = torch.cuda.CUDAGraph()
        try:
            # If a capture fails, PyTorch does not restore the stream; the outer context does.
            with (
                _own_cublas_workspaces(),
                torch.cuda.stream(side),
                torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"),
            ):
                result = evaluate(call, leaves, fused_inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(
                f"the loss cannot be captured in a CUDA graph ({str(error).splitlines()[0]}): its operations must not wait for the "
                "device; use the loss itself"
            ) from error
    return LossGraph(static, result.value, result.gradients, graph.replay, fused_inputs)


def _waits(call: LossCall, leaves: Sequence[Tensor], fused_inputs: GraphInputs | None) -> bool:
    """Compute the loss and its gradients, and return whether the host has waited for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            evaluate(call, leaves, fused_inputs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return any("synchronizing CUDA operation" in str(warning.message) for warning in caught)


class Result(NamedTuple):
    """Value and gradients of one call; None for tensors without a gradient."""

    value: Tensor
    gradients: list[Tensor | None]


def static_inputs(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return contiguous copies of the tensors, and the same memory as leaves that require a gradient where the tensors do."""
    with torch.no_grad():
        static = [torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t) for t in tensors]
    needs = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
    return static, [t.detach().requires_grad_(need) for t, need in zip(static, needs, strict=True)]


def own_leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors without what they were computed from, each as a leaf of its own, since one may be passed twice.

    Those of forward-mode AD, of the transforms of torch.func and of inference mode are returned as they are: the loss refuses them.
    """
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return list(tensors)
    return [t if t.is_inference() else t.detach().requires_grad_(t.requires_grad) for t in tensors]


def check_leaves(call: LossCall, leaves: Sequence[Tensor]) -> None:
    """Raise a ValueError if the loss depends on other tensors than its arguments that require a gradient."""
    own = {id(t) for t in leaves}
    before = leaves_of(call(leaves))
    # Leaves that the loss itself makes are others in each call.
    others = [t for key, t in leaves_of(call(leaves)).items() if key in before and key not in own]
    if others:
        raise ValueError(
            f"the loss depends on a tensor of shape {tuple(others[0].shape)} that requires a gradient and is no argument: a graph "
            "would not compute its gradient; pass it to each call, for example graphed(lambda x, y, log_scale: clip_loss(x, y, "
            "log_scale.exp()))"
        )


def leaves_of(value: Tensor) -> dict[int, Tensor]:
    """Return the tensors that the backward pass of a value ends at, by id."""
    leaves: dict[int, Tensor] = {}
    nodes, visited = [value.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
        nodes.extend(following for following, _ in node.next_functions)
    return leaves


def evaluate(call: LossCall, leaves: Sequence[Tensor], fused_inputs: GraphInputs | None = None) -> Result:
    """Return the value, and the gradients of the leaves for an incoming gradient of one.

    fused_inputs: what delivers the value too.
    """
    value = call(leaves)
    gradients = gradients_of(value, leaves)
    if fused_inputs is not None:
        fused_inputs.deliver(value.detach())
    return Result(value.detach(), gradients)


def gradients_of(value: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradient of the value for each leaf, None for those that require none."""
    gradients: list[Tensor | None] = [None] * len(leaves)
    places = [place for place, t in enumerate(leaves) if t.requires_grad]
    if value.requires_grad and places:
        # As usual, backward runs outside of autocast.
        with torch.autocast(value.device.type, enabled=False):
            computed = torch.autograd.grad(value, [leaves[place] for place in places], allow_unused=True)
        for place, gradient in zip(places, computed, strict=True):
            gradients[place] = gradient
    return gradients


@contextmanager
def _own_cublas_workspaces() -> Iterator[None]:
    """Context in which a graph gets workspaces of cuBLAS in its own memory.

    A workspace is kept for each stream and thread until someone frees all of them, as torch.compile does before it captures graphs.
    A graph that uses one from outside of its memory would then write to memory of others.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def without_graphs() -> Iterator[None]:
    """Context in which this thread calls the losses themselves."""
    before, _thread.captures = _thread.captures, True
    try:
        yield
    finally:
        _thread.captures = before


@contextmanager
def _own_state() -> Iterator[None]:
    """Context of a capture: no inference tensors, no casts that autocast keeps, no hooks of the caller for saved tensors, no other
    graph, and the kernels that are best in one."""
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled(DEVICE)
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(grad),
        torch.autocast(DEVICE, torch.get_autocast_dtype(DEVICE), enabled=autocast, cache_enabled=False),
        saved_tensors_hooks(_itself, _itself),
        without_graphs(),
        computed_for_graph(),
    ):
        yield


def _itself(t: Tensor) -> Tensor:
    return t


def _constant(value: Any) -> Any:
    """Return the key of a value in a signature. 1, 1.0 and True are equal, and so are 0.0 and -0.0, but a loss may differ."""
    if isinstance(value, tuple):
        return type(value), tuple(map(_constant, value))
    return type(value), repr(value) if isinstance(value, float) else value


def _check_value(name: str, value: Any) -> None:
    """Raise a ValueError unless value is a constant: a plain value, or a container of them."""
    if isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            _check_value(f"{name}[{place}]", each)
    elif isinstance(value, dict):
        for key, each in value.items():
            _check_value(f"{name}[{key!r}]", each)
    elif isinstance(value, Tensor):
        raise ValueError(
            f"{name} is a tensor: a graph would keep its address, not its values; pass it as an argument of its own with each call"
        )
    elif not isinstance(value, PLAIN_VALUES):
        raise ValueError(
            f"{name} is a {type(value).__name__}: arguments of a graphed loss must be tensors, Python numbers, strings, None or "
            "tuples of those; use the loss itself, which takes process groups, guides, functions and generators too"
        )


def _not_a_scalar(value: Any) -> ValueError:
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    return ValueError(
        f"the loss returned {kind}: a graphed loss must return one tensor without dimensions; leave diagnostics out, or use the "
        "loss itself in the steps that need them"
    )
