"""Triton's interpreter without what it repeats or computes one element at a time, which takes most of its time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    _patch_the_language_once_a_launch()
    _look_up_dtypes()
    _make_types_once()
    _reduce_halves()
    # Sums of integers would be computed again in 64 bits. No index of these tests is near 2^31.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _patch_the_language_once_a_launch() -> None:
    """A launch puts the interpreter's functions into each module of the language once, not at every call of a function."""
    patch, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[str] = set()

    @functools.cache
    def visible(function: Callable[..., Any]) -> frozenset[str]:
        seen = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        return frozenset(module.__name__ for module in seen)

    def once(function: Callable[..., Any]) -> Any:
        if visible(function) <= patched:
            return None
        patched.update(visible(function))
        return patch(function)

    def afresh(self: Any, *args: Any, **options: Any) -> None:
        # A launch takes the functions out again at its end.
        patched.clear()
        execute(self, *args, **options)

    interpreter._patch_lang = once
    interpreter.GridExecutor.__call__ = afresh


def _look_up_dtypes() -> None:
    """Make the table of numpy's dtypes once."""
    find = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def look_up(dtype: tl.dtype) -> Any:
        if dtype.name not in found:
            found[dtype.name] = find(dtype)
        return found[dtype.name]

    interpreter._get_np_dtype = look_up


def _make_types_once() -> None:
    """Blocks of one dtype and shape share what Triton makes of these, above all its own tuples."""
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[str, tuple[Any, Any]] = {}

    def new_type(self: Any, element: tl.dtype, shape: Any) -> None:
        key = element.name, tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if key not in types:
            make_type(self, element, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key])

    def new_tensor(self: Any, handle: Any, dtype: tl.dtype) -> None:
        if dtype.name not in shapes:
            make_tensor(self, handle, dtype)
            shapes[dtype.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, dtype, dtype.scalar
        self.shape, self.numel = shapes[dtype.name]

    tl.block_type.__init__, tl.tensor.__init__ = new_type, new_tensor


def _reduce_halves() -> None:
    """Reductions with a function of a kernel combine one half with the other, not one element after another."""
    reduce_elements = interpreter.ReduceOps.generic_reduce

    def reduce(self: Any, inputs: Any) -> Any:
        if self.axis is None:
            return reduce_elements(self, inputs)
        parts, dtypes = [t.handle.data for t in inputs], [t.dtype for t in inputs]
        while parts[0].shape[self.axis] > 1:
            lower, upper = (
                [self.to_tensor(half, dtype) for half, dtype in zip(halves, dtypes, strict=True)]
                for halves in zip(*(interpreter.np.split(part, 2, self.axis) for part in parts), strict=True)
            )
            result = self.combine_fn.fn(*lower, *upper)
            parts = [t.handle.data for t in (result if isinstance(result, tuple) else (result,))]
        if not self.keep_dims:
            parts = [part.squeeze(self.axis) for part in parts]
        return [self.to_tensor(part, dtype) for part, dtype in zip(parts, dtypes, strict=True)]

    interpreter.ReduceOps.generic_reduce = reduce
