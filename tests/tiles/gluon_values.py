"""Values of Gluon on a CPU, and the functions of the language that compute values from values. Used by gluon_on_cpu.py.

Layouts are ignored here: the compiler checks which thread holds what.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DType:
    """native: the dtype in memory. held: the dtype of arithmetic, which differs for unsigned integers, as PyTorch lacks theirs."""

    name: str
    primitive_bitwidth: int
    native: torch.dtype
    held: torch.dtype

    @functools.cached_property
    def kind(self) -> int:
        """0 for booleans, 1 for integers, 2 for floats."""
        return 2 if self.held.is_floating_point else min(1, self.primitive_bitwidth - 1)

    def is_floating(self) -> bool:
        return self.kind == 2

    def is_unsigned(self) -> bool:
        return self.name.startswith("uint")


DTYPES = {
    name: DType(name, bits, native, torch.int64 if name in ("uint16", "uint32") else native)
    for name, bits, native in (
        ("int1", 1, torch.bool),
        *((f"{sign}int{bits}", bits, getattr(torch, f"{sign}int{bits}")) for bits in (8, 16, 32) for sign in ("", "u")),
        ("int64", 64, torch.int64),
        ("float16", 16, torch.float16),
        ("bfloat16", 16, torch.bfloat16),
        ("float32", 32, torch.float32),
        ("float64", 64, torch.float64),
    )
}
OF_TORCH = {dtype.native: dtype for dtype in DTYPES.values()}
INT1, INT32, INT64, FLOAT32 = (DTYPES[name] for name in ("int1", "int32", "int64", "float32"))
WHOLE = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


@dataclass(frozen=True, eq=False)
class PointerType:
    """Pointers into a flat tensor: their values are indices."""

    memory: Tensor
    element_ty: DType
    held: torch.dtype = torch.int64
    native: torch.dtype = torch.int64


class Value:
    """A scalar, a tensor, or pointers. Methods that are not defined here are functions of the language."""

    def __init__(self, held: Tensor, dtype: DType | PointerType) -> None:
        self.held, self.dtype = held, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.held.shape)

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(shape=self.shape, layout=None, scalar=self.dtype, element_ty=self.dtype)

    @property
    def T(self) -> Value:
        return Value(self.held.T, self.dtype)

    def to(self, dtype: DType, bitcast: bool = False) -> Value:
        if not bitcast:
            return fitted(self.held, dtype)
        if self.dtype.primitive_bitwidth != dtype.primitive_bitwidth:
            raise TypeError(f"{self.dtype.name} and {dtype.name} differ in size")
        whole = WHOLE[dtype.primitive_bitwidth]
        bits = self.held.contiguous().view(whole) if self.dtype.is_floating() else self.held.to(whole)
        return fitted(bits.view(dtype.native) if dtype.is_floating() else bits, dtype)

    def __getitem__(self, places: Any) -> Value:
        places = places if isinstance(places, tuple) else (places,)
        if any(place is not None and place != slice(None) for place in places):
            raise TypeError("indexing can add axes to a tensor, but not slice it")
        return Value(self.held[places], self.dtype)

    def __getattr__(self, name: str) -> Any:
        if name not in FUNCTIONS:
            raise AttributeError(f"the Gluon interpreter has no tensor.{name}")
        return functools.partial(FUNCTIONS[name], self)

    def __bool__(self) -> bool:
        return bool(self._alone())

    def __int__(self) -> int:
        return int(self._alone())

    def _alone(self) -> Any:
        if self.held.dim():
            raise TypeError(f"a tensor of shape {self.shape} is not a scalar")
        return self.held.item()

    def __neg__(self) -> Value:
        return self * -1

    def __invert__(self) -> Value:
        return fitted(~self.held, self.dtype)

    def __repr__(self) -> str:
        return f"Value({self.held})"


def fitted(t: Tensor, dtype: DType | PointerType) -> Value:
    t = t if t.dtype is dtype.held else t.to(dtype.held)
    return Value(t if dtype.held is dtype.native else t & (2**dtype.primitive_bitwidth - 1), dtype)


def dtype_of(given: Any) -> DType | PointerType:
    if isinstance(given, Value):
        return given.dtype
    if isinstance(given, float):
        return FLOAT32
    return INT1 if isinstance(given, bool) else INT32 if -(2**31) <= given < 2**31 else INT64


def _plain(given: Any) -> Any:
    """Return a value or a number; other objects have a method that returns their value."""
    return given if isinstance(given, (Value, int, float)) else given.as_value()


def value_of(given: Any, dtype: DType | PointerType | None = None) -> Value:
    """Return the value of any object of a kernel."""
    given = _plain(given)
    if isinstance(given, Value):
        return given if dtype is None or dtype is given.dtype else fitted(given.held, dtype)
    dtype = dtype or dtype_of(given)
    return _number(given, dtype) if isinstance(dtype, DType) and given else fitted(torch.tensor(given, dtype=dtype.held), dtype)


@functools.lru_cache(typed=True)
def _number(given: float, dtype: DType) -> Value:
    """Cached, because most are sizes of tiles. Not for pointers, which would keep their memory alive, nor for zeros, of which there
    are two."""
    return fitted(torch.tensor(given, dtype=dtype.held), dtype)


def _common(a: Any, b: Any) -> Any:
    """Return the dtype of an operation on two operands. Python numbers take the dtype of values."""
    x, y = dtype_of(a), dtype_of(b)
    if isinstance(x, PointerType) or isinstance(y, PointerType):
        if isinstance(x, PointerType) and isinstance(y, PointerType) and x is not y:
            raise TypeError("pointers into two different tensors cannot be combined")
        return x if isinstance(x, PointerType) else y
    if isinstance(a, Value) != isinstance(b, Value):
        number, value = (y, x) if isinstance(a, Value) else (x, y)
        if number.kind <= value.kind:
            return value
    if x.kind != y.kind:
        return x if x.kind > y.kind else y
    if x.primitive_bitwidth != y.primitive_bitwidth:
        return x if x.primitive_bitwidth > y.primitive_bitwidth else y
    return FLOAT32 if x.is_floating() and x is not y else y if y.is_unsigned() else x


def as_many_axes(*values: Value) -> None:
    """Check the numbers of axes: only scalars may have fewer than others."""
    if len({value.held.ndim for value in values} - {0}) > 1:
        raise TypeError(f"tensors of shapes {[value.shape for value in values]} have different numbers of axes")


def _alike(a: Any, b: Any) -> tuple[Value, Value]:
    a, b = _plain(a), _plain(b)
    if not (isinstance(a, Value) and isinstance(b, Value) and a.dtype is b.dtype):
        dtype = _common(a, b)
        a, b = value_of(a, dtype), value_of(b, dtype)
    as_many_axes(a, b)
    return a, b


def _arithmetic(operation: Callable[[Tensor, Tensor], Tensor], a: Any, b: Any) -> Value:
    a, b = _alike(a, b)
    return fitted(operation(a.held, b.held), a.dtype)


def _comparison(operation: Callable[[Tensor, Tensor], Tensor], a: Any, b: Any) -> Value:
    a, b = _alike(a, b)
    return Value(operation(a.held, b.held), INT1)


def _quotient(a: Any, b: Any) -> Value:
    a, b = _alike(a, b)
    return _arithmetic(operator.truediv, *((a, b) if a.dtype.is_floating() else (a.to(FLOAT32), b.to(FLOAT32))))


def _whole_quotient(a: Any, b: Any) -> Value:
    """Divide towards zero, as in C."""
    if _common(_plain(a), _plain(b)).is_floating():
        raise TypeError("// needs integers")
    return _arithmetic(functools.partial(torch.div, rounding_mode="trunc"), a, b)


OPERATORS: dict[str, Callable[[Any, Any], Value]] = {
    "truediv": _quotient,
    "floordiv": _whole_quotient,
    "mod": functools.partial(_arithmetic, torch.fmod),
    **{name: functools.partial(_arithmetic, getattr(operator, name)) for name in ("add", "sub", "mul", "lshift", "rshift", "xor")},
    **{name: functools.partial(_arithmetic, getattr(operator, f"{name}_")) for name in ("and", "or")},
}
for _name, _operation in OPERATORS.items():
    setattr(Value, f"__{_name}__", lambda a, b, _operation=_operation: _operation(a, b))
    setattr(Value, f"__r{_name}__", lambda a, b, _operation=_operation: _operation(b, a))
for _operation in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
    setattr(Value, f"__{_operation.__name__}__", lambda a, b, _operation=_operation: _comparison(_operation, a, b))


def _elementwise(operation: Callable[[Tensor], Tensor], value: Any) -> Value:
    value = value_of(value)
    return fitted(operation(value.held), value.dtype)


def full(shape: Sequence[int], value: Any, dtype: DType, layout: Any = None) -> Value:
    if any(size < 1 or size & (size - 1) for size in shape):
        raise ValueError(f"sizes must be powers of two, not {shape}")
    return Value(value_of(value, dtype).held.expand(tuple(shape)), dtype)


def arange(start: int, end: int, layout: Any = None) -> Value:
    return full([end - start], 0, INT32) + Value(torch.arange(start, end, dtype=torch.int32), INT32)


def cdiv(a: Any, b: Any) -> Any:
    return (a + (b - 1)) // b


def where(condition: Any, a: Any, b: Any) -> Value:
    a, b = _alike(a, b)
    condition = value_of(condition, INT1)
    as_many_axes(condition, a, b)
    return Value(torch.where(condition.held, a.held, b.held), a.dtype)


def _flat(numbers: tuple[Any, ...]) -> list[int]:
    return [int(n) for n in (numbers if len(numbers) != 1 or isinstance(numbers[0], int) else numbers[0])]


def _reshape(value: Any, *shape: Any) -> Value:
    return _elementwise(lambda t: t.reshape(_flat(shape)), value)


def _permute(value: Any, *order: Any) -> Value:
    return _elementwise(lambda t: t.permute(_flat(order)), value)


def _broadcast_to(value: Any, *shape: Any) -> Value:
    return _elementwise(lambda t: t.expand(_flat(shape)), value)


def _expand_dims(value: Any, axis: int) -> Value:
    return _elementwise(lambda t: t.unsqueeze(axis), value)


def _split(value: Any) -> tuple[Value, Value]:
    a, b = value.held.unbind(-1)
    return Value(a, value.dtype), Value(b, value.dtype)


def _join(a: Any, b: Any) -> Value:
    a, b = _alike(a, b)
    return Value(torch.stack((a.held, b.held), -1), a.dtype)


def _reduce(value: Any, axis: int | None, combine: Callable[..., Any]) -> Value:
    """Combine the halves of an axis until one entry is left."""
    value, along = value_of(value), 0 if axis is None else axis
    if axis is None:
        value = _reshape(value, value.held.numel())
    while (half := value.shape[along] // 2) > 0:
        value = combine(*(Value(value.held.narrow(along, start, half), value.dtype) for start in (0, half)))
    return Value(value.held.squeeze(along), value.dtype)


def _sum(value: Any, axis: int | None = None) -> Value:
    value = value_of(value)
    if not value.dtype.is_floating() and value.dtype.primitive_bitwidth < 32:
        value = value.to(DTYPES["uint32"] if value.dtype.is_unsigned() else INT32)
    return _reduce(value, axis, operator.add)


def _inline_asm(asm: str, constraints: str, args: Sequence[Any], dtype: DType, is_pure: bool, pack: int) -> Value:
    """The two instructions on pairs of bf16 numbers that kernels contain: products, and sums with one, rounded once."""
    instruction, values = asm.split()[0], [value_of(arg) for arg in args]
    as_many_axes(*values)
    if instruction not in ("fma.rn.bf16x2", "mul.rn.bf16x2") or pack != 2 or any(value.dtype is not dtype for value in values):
        raise AttributeError(f"the Gluon interpreter has no {instruction!r} of {[value.dtype.name for value in values]}")
    # The product of two bf16 numbers is exact in fp64.
    a, b, *c = (value.held.double() for value in values)
    return fitted(a * b + c[0] if c else a * b, dtype)


def _check(condition: Any, message: str = "", **_: Any) -> None:
    assert bool(condition.held.all() if isinstance(condition, Value) else condition), message


# On a device, NaN loses against a number.
maximum, minimum = functools.partial(_arithmetic, torch.fmax), functools.partial(_arithmetic, torch.fmin)
ELEMENTWISE = ("abs", "exp2", "log2", "rsqrt")
FUNCTIONS: dict[str, Any] = {
    **{name: functools.partial(_elementwise, getattr(torch, name)) for name in ELEMENTWISE},
    "arange": arange,
    "broadcast_to": _broadcast_to,
    "cdiv": cdiv,
    "convert_layout": lambda value, *_, **__: value,
    "expand_dims": _expand_dims,
    "full": full,
    "inline_asm_elementwise": _inline_asm,
    "join": _join,
    "max": lambda value, axis=None: _reduce(value, axis, maximum),
    "maximum": maximum,
    "minimum": minimum,
    "permute": _permute,
    "reduce": _reduce,
    "reshape": _reshape,
    "split": _split,
    "static_assert": _check,
    "static_range": range,
    "sum": _sum,
    "where": where,
    "xor_sum": lambda value, axis=None: _reduce(value, axis, operator.xor),
    "zeros": lambda shape, dtype, layout=None: full(shape, 0, dtype),
}
