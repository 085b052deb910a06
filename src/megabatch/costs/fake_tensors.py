"""Fake tensors for counting and tracing: torch's, with a faster answer for operations that were seen before.

A step calls the same operations on the same shapes many times: in every block, in every chunk, and for the counts as for the
memory. `FakeTensorMode` caches their results, but building its keys takes longer than the rest of a trace.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._mode_utils import no_dispatch

from .without_dynamo import without_dynamo

aten = torch.ops.aten
# Views whose kernels need shapes only: called directly, they share the storage of their first argument.
VIEWS = frozenset(
    {
        aten._unsafe_view.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    }
)
# Matrix products, of their last two arguments.
PRODUCTS = frozenset({aten.addmm.default, aten.bmm.default, aten.mm.default})
LAYER_NORM_BACKWARD = aten.native_layer_norm_backward.default
NORMS_AND_SUMS = frozenset({aten.native_layer_norm.default, LAYER_NORM_BACKWARD, aten.sum.dim_IntList})
# Operations that return a tensor of the sizes in their second argument.
BACKWARD_OF_VIEWS = frozenset({aten.select_backward.default, aten.slice_backward.default})
# Operations on lists of tensors, and the same operation on each of them.
LISTS = {aten._foreach_sqrt.default: aten.sqrt.default}
# Arguments that are equal if they compare equal and have the same type.
VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
# Other results than tensors: sizes that attention returns, and gradients that were not asked for.
PLAIN_RESULTS = (int, type(None))


class NewTensor(NamedTuple):
    """A result in memory of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def with_shape(self, shape: Sequence[int]) -> NewTensor:
        """Return a tensor of another shape with the same order of dimensions in memory; contiguous where the order is ambiguous."""
        order = _order(self.shape, self.stride) or range(len(shape))
        stride, step = [0] * len(shape), 1
        for dim in reversed(order):
            stride[dim] = step
            step *= shape[dim]
        return self._replace(shape=tuple(shape), stride=tuple(stride))


class Results(NamedTuple):
    """What an operation returns: new tensors and numbers. single: one tensor, not a tuple."""

    leaves: tuple[Any, ...]
    single: bool

    def with_shapes(self, shapes: Sequence[Sequence[int]]) -> Results:
        """Return the same results with other shapes and the same order of dimensions in memory."""
        tensors = iter(shapes)
        leaves = [leaf.with_shape(next(tensors, ())) if isinstance(leaf, NewTensor) else leaf for leaf in self.leaves]
        return Results(tuple(leaves), self.single)


class ShapeRule(NamedTuple):
    """The shapes of an operation's results, and what these depend on otherwise."""

    key: tuple[Any, ...]
    shapes: Sequence[Sequence[int]]


class ConstantConverter(FakeTensorConverter):
    """`FakeTensorConverter` that makes fake tensors of known values, such as step counts, without importing torch._dynamo."""

    def from_real_tensor(
        self, fake_mode: FakeTensorMode, t: Tensor, make_constant: bool = False, *args: Any, **kwargs: Any
    ) -> FakeTensor:
        own_bytes = t.numel() * t.element_size()
        if not make_constant or t.is_sparse or t._is_view() or t.untyped_storage().nbytes() != own_bytes:
            return super().from_real_tensor(fake_mode, t, make_constant, *args, **kwargs)
        out = self._get_memo(t)
        if out is None:
            with no_dispatch():
                like = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
                out = FakeTensor(fake_mode, like, t.device, constant=t)
            self.set_tensor_memo(t, out)
            self.add_constant_storage_mapping(out)
        return out


class CachingFakeMode(FakeTensorMode):
    """`FakeTensorMode` that remembers results by the shapes of the arguments, and calls the kernels of views directly.

    Results of the most frequent operations follow from those for other shapes (`_shapes_of_results`). Whatever else is asked, such
    as writes in place and tensors with known values, is `FakeTensorMode`'s.
    """

    # None: not to be remembered. Kept for all modes: they hold no tensors.
    _remembered: ClassVar[dict[Any, Results | None]] = {}
    # Results by everything except sizes. None: they do not have the shapes of `_shapes_of_results`.
    _for_other_shapes: ClassVar[dict[Any, Results | None]] = {}

    def __init__(self) -> None:
        with without_dynamo():
            super().__init__(allow_non_fake_inputs=True)
        self.fake_tensor_converter = ConstantConverter(copy_data=self.propagate_real_tensors)
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here; otherwise torch wraps every dispatch in `torch._dynamo.disable`.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, types, args, kwargs or {})

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = self.recall(func, args, kwargs)
        if out is not NotImplemented:
            return out
        if func in LISTS:
            return [self.dispatch(LISTS[func], types, (each,)) for each in args[0]]
        if func is aten.lift_fresh.default and type(args[0]) is Tensor and self.may_turn_const(args[0]):
            return self.fake_tensor_converter.from_real_tensor(self, args[0], make_constant=True)
        out = super().dispatch(func, types, args, kwargs)
        key = _full_key(func, args, kwargs)
        if key is not None and key not in self._remembered:
            self._remembered[key] = results = _results(out, args, kwargs)
            rule = _rule(key, func, args, kwargs)
            if rule is not None and results is not None:
                self._for_other_shapes.setdefault(rule.key, results if results == results.with_shapes(rule.shapes) else None)
        return out

    def recall(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation returns if it is known or a view; otherwise NotImplemented."""
        key = _full_key(func, args, kwargs)
        if key is None:
            return NotImplemented
        if func in VIEWS:
            with in_kernel_invocation_manager(self):
                out = func(*args, **kwargs)
            return self._fake(out, args[0].fake_device)
        if key not in self._remembered:
            rule = _rule(key, func, args, kwargs)
            known = None if rule is None else self._for_other_shapes.get(rule.key)
            if rule is None or known is None:
                return NotImplemented
            self._remembered[key] = known.with_shapes(rule.shapes)
        results = self._remembered[key]
        if results is None:
            return NotImplemented
        made = tuple(self._new(leaf) if isinstance(leaf, NewTensor) else leaf for leaf in results.leaves)
        return made[0] if results.single else made

    def _new(self, like: NewTensor) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            out = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device="meta")
        return self._fake(out, like.device)

    def _fake(self, tensor: Tensor, device: torch.device) -> FakeTensor:
        """Return a meta tensor as a fake one. All attributes are those of the first one, which saves most of its construction."""
        if device not in self._attributes:
            fake = FakeTensor(self, tensor, device)
            self._attributes[device] = dict(vars(fake))
            return fake
        fake = Tensor._make_subclass(FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=device)
        vars(fake).update(self._attributes[device])
        return fake


def call(mode: FakeTensorMode | None, func: Any, args: Any, kwargs: Any) -> Any:
    """Return func(*args, **kwargs) for fake tensors of a mode: without torch's dispatch where the result is known."""
    out = mode.recall(func, args, kwargs) if isinstance(mode, CachingFakeMode) else NotImplemented
    return func(*args, **kwargs) if out is NotImplemented else out


@contextmanager
def fake_parameters(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """A context, within a fake mode, in which the parameters and buffers of a module are fake; yields the parameters that require a
    gradient.

    Real ones would be converted in every operation. A tensor in several places (tied weights) stays one.
    """
    before = [
        (owner, name, tensor)
        for owner in module.modules()
        for tensors in (owner._parameters, owner._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    fake = {tensor: _fake_weight(tensor) for tensor in dict.fromkeys(tensor for _, _, tensor in before)}
    # By setattr: recurrent layers keep a second list of their weights.
    try:
        for owner, name, tensor in before:
            setattr(owner, name, fake[tensor])
        yield [each for each in fake.values() if isinstance(each, nn.Parameter) and each.requires_grad]
    finally:
        for owner, name, tensor in before:
            setattr(owner, name, tensor)


def as_fake(value: Any) -> Any:
    """Return a tensor, within a fake mode, as a fake one on the CPU; anything else as it is."""
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


def _fake_weight(tensor: Tensor) -> Tensor:
    return nn.Parameter(as_fake(tensor), tensor.requires_grad) if isinstance(tensor, nn.Parameter) else as_fake(tensor)


@functools.cache
def _is_functional(func: Any) -> bool:
    """Whether an operation writes to none of its arguments, returns none of them, and is not made of other operations."""
    schema = func._schema
    return (
        func.namespace == "aten"
        and not any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
        and not func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        and not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    )


def _full_key(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """Return what the results of an operation depend on; None if they are not to be remembered."""
    if func not in VIEWS and not _is_functional(func):
        return None
    key = (func, torch.get_default_dtype(), *_key(args), *_key(kwargs.items()))
    return None if None in key else key


def _key(values: Any) -> Any:
    """Yield what a result depends on: shapes of tensors, and other values with their types. None for anything else."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            plain = value.constant is None and value.layout is torch.strided and not value.dtype.is_complex
            yield (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device) if plain else None
        elif kind in VALUES:
            yield kind, value
        elif kind in (tuple, list):
            inner = (kind, *_key(value))
            yield None if None in inner else inner
        else:
            yield None


def _rule(key: tuple[Any, ...], func: Any, args: Any, kwargs: Any) -> ShapeRule | None:
    shapes = _shapes_of_results(func, args)
    return None if shapes is None else ShapeRule((*key[:2], *_kinds(func, args), *_kinds(func, kwargs.items())), shapes)


def _kinds(func: Any, values: Any) -> Any:
    """Yield what the results of `_shapes_of_results` depend on except for their sizes."""
    for position, value in enumerate(values):
        kind = type(value)
        if kind is FakeTensor:
            yield value.dtype, value.ndim, _order(value.shape, value.stride()), value.fake_device
        elif kind in (tuple, list):
            yield (kind, *_kinds(func, value)) if func not in BACKWARD_OF_VIEWS or position != 1 else kind
        else:
            yield kind, value


def _shapes_of_results(func: Any, args: Any) -> Sequence[Sequence[int]] | None:
    """Return the shapes of the tensors that an operation returns; None if there is no rule.

    There is one where the order of a result's dimensions in memory depends on nothing but those of the arguments.
    """
    if func in PRODUCTS:
        first, second = args[-2:]
        return ((*first.shape[:-1], second.shape[-1]),)
    if func in BACKWARD_OF_VIEWS:
        return (args[1],)
    if func not in NORMS_AND_SUMS and not _is_elementwise(func):
        return None
    # The statistics of a layer norm, which have dimensions of size 1, do not matter for the order.
    tensors = [each for each in (args[:2] if func is LAYER_NORM_BACKWARD else args) if isinstance(each, Tensor)]
    if not tensors or any(_order(each.shape, each.stride()) is None for each in tensors):
        return None
    shape = max((tuple(each.shape) for each in tensors), key=len)
    if func is aten.native_layer_norm.default:
        statistics = (*shape[: -len(args[1])], *[1] * len(args[1]))
        return shape, statistics, statistics
    if func is LAYER_NORM_BACKWARD:
        return [shape, args[2], args[2]] if all(args[7]) else None
    if func is aten.sum.dim_IntList:
        dims, keep = {dim % len(shape) for dim in args[1] or ()}, len(args) > 2 and args[2]
        return ([1 if dim in dims else size for dim, size in enumerate(shape)],) if dims and keep else None
    # Broadcast along leading dimensions only.
    return (shape,) if all(tuple(each.shape) == shape[len(shape) - each.ndim :] for each in tensors) else None


@functools.cache
def _is_elementwise(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags or func in (aten._to_copy.default, aten.clone.default)


def _order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dimensions in the order of their strides, the largest first.

    None if they overlap or leave gaps, or if the order is ambiguous because one has size 1.
    """
    order = sorted(range(len(shape)), key=lambda dim: -stride[dim])
    step = 1
    for dim in reversed(order):
        if stride[dim] != step or shape[dim] < 2:
            return None
        step *= shape[dim]
    return tuple(order)


def _results(out: Any, args: Any, kwargs: Any) -> Results | None:
    """Return how to make the results of an operation again; None if they are not tensors with memory of their own."""
    leaves = out if isinstance(out, tuple) else (out,)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not all(isinstance(leaf, (FakeTensor, *PLAIN_RESULTS)) for leaf in leaves):
        return None
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    given = {each.untyped_storage()._cdata for each in tensors_of((args, tuple(kwargs.values())))}
    if len(storages) < len(tensors) or storages & given:
        return None
    made = [_remember(leaf) if isinstance(leaf, FakeTensor) else leaf for leaf in leaves]
    if any(isinstance(leaf, FakeTensor) for leaf in made):
        return None
    return Results(tuple(made), not isinstance(out, tuple))


def _remember(tensor: FakeTensor) -> NewTensor | FakeTensor:
    """Return how to make a tensor again; the tensor itself if it has a value, or is a part of its memory."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    same_bytes = tensor.untyped_storage().nbytes() == like.untyped_storage().nbytes()
    if tensor.constant is not None or tensor.storage_offset() or not same_bytes:
        return tensor
    return NewTensor(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.fake_device)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of nested tuples and lists."""
    if isinstance(tree, (tuple, list)):
        return [tensor for each in tree for tensor in tensors_of(each)]
    return [tree] if isinstance(tree, Tensor) else []
