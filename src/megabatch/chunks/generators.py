"""Random number generators beside torch's default ones: reading and setting their state, and finding those of an encoder."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

# How many references away from the encoder or one of its modules a generator is looked for.
DEPTH = 3
# The search visits at most this many objects, and no container that is larger than the second number: those are data.
MOST_OBJECTS, MOST_ITEMS = 50_000, 256
# Objects that hold no generator.
ATOMS = (Tensor, str, bytes, int, float, complex, type(None), type, ModuleType, torch.dtype, torch.device, torch.Size)


class Source(Protocol):
    """A generator whose state can be read and set. get() returns the same object as long as the state is the same."""

    def get(self) -> Any: ...

    def set(self, state: Any) -> None: ...


class Accessors:
    """A generator by the two calls that read and set its state."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self._read, self._write = read, write
        self._last: Any = None

    def get(self) -> Any:
        state = self._read()
        # A state may take kilobytes, and one is held for every chunk.
        if self._last is None or not _same(state, self._last):
            self._last = state
        return self._last

    def set(self, state: Any) -> None:
        self._write(state)


class NumpyGlobal(Accessors):
    """NumPy's global generator. Reading its state takes as long as a small layer, so it is read only if it has changed."""

    # The words of a Mersenne Twister and its position among them, as its struct holds them.
    BYTES = 4 * 624 + 4

    def __init__(self, numpy_random: Any) -> None:
        super().__init__(functools.partial(numpy_random.get_state, legacy=False), numpy_random.set_state)
        self._numpy = numpy_random
        self._raw: bytes | None = None

    def get(self) -> Any:
        # Before 1.24 NumPy does not give it out.
        bits: Any = getattr(self._numpy, "get_bit_generator", lambda: None)()
        raw = ctypes.string_at(bits.ctypes.state_address, self.BYTES) if type(bits) is self._numpy.MT19937 else None
        # A second normal number that is kept for the next draw lies elsewhere.
        if raw is not None and raw == self._raw and not self._last["has_gauss"]:
            return self._last
        self._raw = raw
        return super().get()


_PYTHON = Accessors(random.getstate, random.setstate)
_numpy_global = functools.cache(NumpyGlobal)


def host_sources() -> list[Source]:
    """Return Python's global generator, and NumPy's where numpy.random is imported."""
    numpy_random = sys.modules.get("numpy.random")
    return [_PYTHON] if numpy_random is None else [_PYTHON, _numpy_global(numpy_random)]


def source_of(value: Any) -> Source | None:
    """Return how to read and set the state of a generator of torch, Python or NumPy; None for any other object."""
    if isinstance(value, torch.Generator):
        return Accessors(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        # The operating system's generator has no state that could be set.
        return None if isinstance(value, random.SystemRandom) else Accessors(value.getstate, value.setstate)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    if isinstance(value, numpy_random.RandomState):
        return Accessors(functools.partial(value.get_state, legacy=False), value.set_state)
    bits = value.bit_generator if isinstance(value, numpy_random.Generator) else value
    if isinstance(bits, numpy_random.BitGenerator):
        return Accessors(functools.partial(getattr, bits, "state"), functools.partial(setattr, bits, "state"))
    return None


def check_generators(generators: Any) -> list[Source]:
    """Return the sources of the generators that a caller names; a ValueError for what is none."""
    if isinstance(generators, (torch.Generator, random.Random)) or not isinstance(generators, Iterable):
        raise ValueError(f"generators={generators!r}: must be a sequence of generators, for example generators=(g,)")
    sources: list[Source] = []
    value: Any
    for place, value in enumerate(generators):
        source = source_of(value)
        if source is None and callable(getattr(value, "get_state", None)) and callable(getattr(value, "set_state", None)):
            source = Accessors(value.get_state, value.set_state)
        if source is None:
            raise ValueError(
                f"generators[{place}] is a {type(value).__name__}: must be a generator of torch, random or numpy.random whose "
                "state can be set, or an object with get_state() and set_state()"
            )
        sources.append(source)
    return sources


def sources_in(encoder: object, modules: Sequence[nn.Module]) -> list[Source]:
    """Return the generators that the encoder or its modules refer to: in attributes, closures, globals, defaults and partials."""
    sources: list[Source] = []
    seen: set[int] = set()
    queue: deque[tuple[object, int]] = deque([(encoder, 0), *((module, 0) for module in modules)])
    while queue and len(seen) < MOST_OBJECTS:
        value, depth = queue.popleft()
        if isinstance(value, ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        source = source_of(value)
        if source is not None:
            sources.append(source)
        elif depth < DEPTH:
            queue.extend((inner, depth + 1) for inner in _referred(value))
    return sources


def _same(a: Any, b: Any) -> bool:
    """Whether two states of one generator are equal."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return all(_same(a[key], b[key]) for key in a)
    if hasattr(a, "tobytes"):
        return bool(a.tobytes() == b.tobytes())
    return bool(a == b)


def _referred(value: Any) -> Iterator[object]:
    """The objects that a value refers to directly, as far as they may lead to a generator."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif inspect.ismethod(value):
        yield from (value.__self__, value.__func__)
    elif inspect.isfunction(value):
        yield from _referred_by_function(value)
    elif isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
        if len(value) <= MOST_ITEMS:
            yield from value.values() if isinstance(value, Mapping) else value
    elif isinstance(value, nn.Module):
        yield from vars(value).values()
        yield type(value).forward
    elif not _is_library(type(value)):
        yield from getattr(value, "__dict__", {}).values()
        # An object that is called: its code may use a global generator.
        yield vars(type(value)).get("__call__")


def _referred_by_function(function: Any) -> Iterator[object]:
    if _is_library(function):
        return
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        # A variable of the enclosing function may have no value yet.
        with contextlib.suppress(ValueError):
            yield cell.cell_contents
    for name in _names(function.__code__):
        yield function.__globals__.get(name)


def _names(code: CodeType) -> Iterator[str]:
    """The global names that a function's code uses, comprehensions and lambdas inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_library(what: Any) -> bool:
    """Whether a class or function belongs to torch, NumPy or Python itself, whose global generators are replayed anyway."""
    package = (getattr(what, "__module__", None) or "").partition(".")[0]
    return package in ("torch", "numpy") or (package in sys.stdlib_module_names and package != "__main__")
