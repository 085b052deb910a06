"""The state that a chunk's forward starts from, so that backward can run it again: generators, autocast, device and buffers.

Torch's default generators are saved by device. Other generators (Python's, NumPy's, and those that the encoder holds) are an
`RngSource` each: an object that reads and sets a state.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, ModuleType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

# How many references away from the encoder or one of its modules a generator is searched for.
DEPTH = 3
# The search visits at most MOST_OBJECTS objects and skips containers with more than MOST_ITEMS items: those hold data.
MOST_OBJECTS, MOST_ITEMS = 50_000, 256
# Types that hold no generator.
ATOMS = (Tensor, str, bytes, int, float, complex, type(None), type, ModuleType, torch.dtype, torch.device, torch.Size)


class Buffer(NamedTuple):
    """A buffer by its owner and name, so that another tensor can replace it temporarily."""

    owner: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        value = self.owner._buffers[self.name]
        assert value is not None
        return value


def buffers_of(modules: Iterable[nn.Module]) -> list[Buffer]:
    """Return the buffers that the modules own directly, without those of their submodules."""
    return [Buffer(module, name) for module in modules for name, value in module._buffers.items() if value is not None]


def versions_of(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    """Return each tensor with its version counter; tensors made in inference mode have none and are left out."""
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def differs(before: Tensor, after: Tensor) -> bool:
    """Return whether a buffer was changed; True for a meta tensor, whose values cannot be compared."""
    return before.is_meta or not torch.equal(before, after)


class RngSource(Protocol):
    """A generator whose state can be read and set. get() returns the same object as long as the state is the same."""

    def get(self) -> Any: ...

    def set(self, state: Any) -> None: ...


RngState: TypeAlias = tuple[RngSource, Any]


class ForwardState:
    """A snapshot of the generators of `devices`, of autocast there, of the default device and of the `buffers`.

    weights: tensors with their versions. They cannot be restored, but a change is detected.
    sources: generators besides the default ones of the devices, with their states: the host's and the encoder's own.
    """

    def __init__(
        self,
        devices: Iterable[torch.device],
        buffers: Iterable[Buffer],
        weights: Sequence[tuple[Tensor, int]] = (),
        sources: Sequence[RngState] = (),
    ) -> None:
        self.weights = weights
        self.sources = sources
        self._drawn = sources
        self.generators = {device: get_generator(device) for device in devices}
        self.buffers = {buffer: buffer.tensor.clone() for buffer in buffers}
        self.default_device = torch.get_default_device()
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys(device.type for device in self.generators)
            if torch.amp.is_autocast_available(kind)
        ]
        self.autocast_cache = torch.is_autocast_cache_enabled()

    def forward_done(self) -> list[RngState]:
        """Record which sources the chunk's forward drew from, and return their states after it.

        `replayed` leaves the other sources alone: the host's generators belong to the whole process, and other threads may draw
        from them while backward runs.
        """
        after = states_of(source for source, _ in self.sources)
        self._drawn = [before for before, now in zip(self.sources, after, strict=True) if before[1] is not now[1]]
        return after

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Restore this state inside the context and the present one after it, so that the context has no side effects."""
        if any(tensor._version != version for tensor, version in self.weights):
            raise RuntimeError(
                "weights were changed between forward and backward, which runs the encoder again and would use the new ones: call "
                "backward before the optimizer's step"
            )
        generators_before = {device: get_generator(device) for device in self.generators}
        sources_before = states_of(source for source, _ in self._drawn)
        originals = {buffer: buffer.tensor for buffer in self.buffers}
        # Backward may run on another thread, which has its own autocast state and default device.
        with ExitStack() as contexts:
            if torch.get_default_device() != self.default_device:
                contexts.enter_context(self.default_device)
            for kind, dtype, enabled in self.autocast:
                contexts.enter_context(torch.autocast(kind, dtype, enabled, self.autocast_cache))
            try:
                _set_generators(self.generators)
                _set_sources(self._drawn)
                # Copies replace the buffers: writing into the buffers themselves would invalidate graphs that saved them.
                for buffer, value in self.buffers.items():
                    buffer.owner._buffers[buffer.name] = value.clone()
                yield
            finally:
                _set_generators(generators_before)
                _set_sources(sources_before)
                for buffer, original in originals.items():
                    buffer.owner._buffers[buffer.name] = original

    def changed(self) -> bool:
        """Return whether a generator or one of the buffers has changed since."""
        return (
            any(not torch.equal(state, get_generator(device)) for device, state in self.generators.items())
            or any(source.get() is not state for source, state in self.sources)
            or any(differs(value, buffer.tensor) for buffer, value in self.buffers.items())
        )

    def restore(self) -> None:
        """Set generators and buffers to this state, for another attempt."""
        _set_generators(self.generators)
        _set_sources(self.sources)
        for buffer, value in self.buffers.items():
            buffer.tensor.copy_(value)


def current_accelerator() -> list[torch.device]:
    """Return the accelerator in use, or an empty list: an encoder may move its inputs there itself."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
        return []
    return [torch.device(kind.type, torch.accelerator.current_device_index())]


def get_generator(device: torch.device) -> Tensor:
    """Return the state of the device's default generator."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(*_index(device))


def _set_generators(states: dict[torch.device, Tensor]) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, *_index(device))


def states_of(sources: Iterable[RngSource]) -> list[RngState]:
    """Return each source with its present state."""
    return [(source, source.get()) for source in sources]


def _set_sources(states: Sequence[RngState]) -> None:
    for source, state in states:
        source.set(state)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    # There is only one MPS device, and its functions take no argument.
    return () if device.type == "mps" else (device,)


class Accessors:
    """An `RngSource` made of two functions that read and set a generator's state."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self._read, self._write = read, write
        self._last: Any = None

    def get(self) -> Any:
        state = self._read()
        # A state may take kilobytes, and every chunk holds one: equal states share one object.
        if self._last is None or not _same(state, self._last):
            self._last = state
        return self._last

    def set(self, state: Any) -> None:
        self._write(state)


class NumpyGlobal(Accessors):
    """NumPy's global generator. Reading its state takes as long as a small layer, so it is read only if it has changed."""

    # The words of a Mersenne Twister and its position among them, as laid out in its C struct.
    BYTES = 4 * 624 + 4

    def __init__(self, numpy_random: Any) -> None:
        super().__init__(functools.partial(numpy_random.get_state, legacy=False), numpy_random.set_state)
        self._numpy = numpy_random
        self._raw: bytes | None = None

    def get(self) -> Any:
        # NumPy before 1.24 does not expose its global bit generator.
        bits: Any = getattr(self._numpy, "get_bit_generator", lambda: None)()
        raw = ctypes.string_at(bits.ctypes.state_address, self.BYTES) if type(bits) is self._numpy.MT19937 else None
        # The spare normal number that is cached for the next draw is stored outside of the struct.
        if raw is not None and raw == self._raw and not self._last["has_gauss"]:
            return self._last
        self._raw = raw
        return super().get()


_PYTHON = Accessors(random.getstate, random.setstate)
_numpy_global = functools.cache(NumpyGlobal)


def host_sources() -> list[RngSource]:
    """Return Python's global generator, and NumPy's where numpy.random is imported."""
    numpy_random = sys.modules.get("numpy.random")
    return [_PYTHON] if numpy_random is None else [_PYTHON, _numpy_global(numpy_random)]


def source_of(value: Any) -> RngSource | None:
    """Return the source of a generator of torch, Python or NumPy; None for any other object."""
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


def check_generators(generators: Any) -> list[RngSource]:
    """Return the sources of the generators that a caller lists; raise a ValueError for any other object."""
    if isinstance(generators, (torch.Generator, random.Random)) or not isinstance(generators, Iterable):
        raise ValueError(f"generators={generators!r}: must be a sequence of generators, for example generators=(g,)")
    sources: list[RngSource] = []
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


def sources_in(encoder: object, modules: Sequence[nn.Module]) -> list[RngSource]:
    """Return the generators that the encoder or its modules refer to: in attributes, closures, globals, defaults and partials."""
    sources: list[RngSource] = []
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
    """Return whether two states of one generator are equal."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return all(_same(a[key], b[key]) for key in a)
    if hasattr(a, "tobytes"):
        return bool(a.tobytes() == b.tobytes())
    return bool(a == b)


def _referred(value: Any) -> Iterator[object]:
    """Yield the objects that a value refers to directly and that may lead to a generator."""
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
        # The code of a callable object may use a global generator.
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
    """Yield the global names that a function's code uses, including those in its comprehensions and lambdas."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_library(obj: Any) -> bool:
    """Return whether a class or function belongs to torch, NumPy or Python, whose global generators are replayed anyway."""
    package = (getattr(obj, "__module__", None) or "").partition(".")[0]
    return package in ("torch", "numpy") or (package in sys.stdlib_module_names and package != "__main__")
