"""A simulated device for Gluon on a CPU: warp groups, shared memory, barriers, TMA copies and products. Used by gluon_on_cpu.py.

The warp groups of a program are threads, one of which runs at a time. Wherever they could observe each other, a seeded draw decides
which runs next. So any order that a device may choose can occur, the same one again for the same seed, and if no group can
continue, that is a deadlock.

Asynchronous operations happen at the worst time. The target of a TMA load is NaN until the load arrives. A product or a TMA store
reads shared memory from its start until it is waited for, and what it reads must not change meanwhile. Uninitialised shared memory
is NaN too.
"""

from __future__ import annotations

import collections
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gluon_values import INT1, OF_TORCH, DType, Value, as_many_axes, fitted, value_of
from torch import Tensor


class Broken(Exception):
    """An error that would be undefined behaviour on a device."""


class Deadlock(Broken):
    """All warp groups wait for each other."""


class Stopped(BaseException):
    """Ends a thread because another one has failed."""


class Group:
    """A warp group: a thread that runs when it is its turn, and its asynchronous operations that were not waited for."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number, self.done = name, number, False
        self.speed, self.slow = 1.0, False
        self.turn, self.thread = threading.Semaphore(0), threading.current_thread()
        self.until: Callable[[], bool] = lambda: True
        self.waiting: Callable[[], str] | None = None
        self.products: collections.deque[Reading] = collections.deque()
        self.stores: collections.deque[Reading] = collections.deque()

    def leave(self) -> None:
        for what, asked in (("products", self.products), ("stores", self.stores)):
            if asked:
                raise Broken(f"{self.name} ends before its {what} are waited for")


@dataclass
class Flight:
    """A TMA load that has not arrived."""

    speed: float
    land: Callable[[], None]
    slow: bool = False


class Program:
    """One program of a launch."""

    now: Program | None = None

    def __init__(self, place: Sequence[int], grid: Sequence[int], seed: int) -> None:
        self.place, self.grid, self.random = place, grid, random.Random(f"{seed} {place}")
        self.whole = self.running = Group("the program", 1)
        self.groups, self.flights = [self.whole], list[Flight]()
        self.memory: list[Shared] = []
        self.barriers: dict[int, Barrier] = {}
        self.failure: BaseException | None = None

    def run(self, kernel: Callable[..., Any], arguments: dict[str, Any]) -> None:
        Program.now = self
        try:
            kernel(**arguments)
            self.whole.leave()
            if self.flights or any(barrier.bytes for barrier in self.barriers.values()):
                raise Broken("the program ends before its loads are waited for")
        finally:
            Program.now = None

    def pause(self, until: Callable[[], bool] = lambda: True, waiting: Callable[[], str] | None = None, slow: bool = False) -> None:
        """Let other groups run; return when `until` holds and it is this group's turn; if slow, when no other can continue."""
        me = self.running
        me.until, me.waiting, me.slow = until, waiting, slow
        chosen = self._draw()
        if chosen is not me:
            self._give_turn(chosen)
            me.turn.acquire()
        if self.failure is not None:
            raise self.failure if me is self.whole else Stopped

    def specialize(self, calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> Any:
        """Run functions concurrently and return the result of the first."""
        if len(self.groups) > 1:
            raise Broken("a program may call warp_specialize once")
        results: dict[int, Any] = {}
        for number, (function, arguments) in enumerate(calls, 2):
            group = Group(f"{function.__name__} ({number - 2})", number)
            group.thread = threading.Thread(target=self._work, args=(group, function, arguments, results), daemon=True)
            self.groups.append(group)
        formed = self.groups[1:]
        for group in formed:
            group.thread.start()
        try:
            self.pause(lambda: all(group.done for group in formed))
        except BaseException as error:
            self.failure = error
            raise
        finally:
            for group in formed:
                group.turn.release()
                group.thread.join()
        return results[2]

    def _work(self, group: Group, function: Callable[..., Any], arguments: tuple[Any, ...], results: dict[int, Any]) -> None:
        group.turn.acquire()
        try:
            if self.failure is None:
                results[group.number] = function(*arguments)
                group.leave()
        except Stopped:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        group.done = True
        self._give_turn(self._draw())

    def _give_turn(self, group: Group) -> None:
        self.running = group
        group.turn.release()

    def _draw(self) -> Group:
        """Draw the next group among those that can continue; loads arrive in between. After a failure it is the whole program.

        Some groups are faster than others for a while, so that each gets as far ahead, or behind, as possible.
        """
        try:
            while self.failure is None:
                if self.random.random() < 0.05:
                    for group in self.groups:
                        group.speed = self.speed()
                able = [*(group for group in self.groups if not group.done and group.until()), *self.flights]
                able = [each for each in able if not each.slow] or able
                if not able:
                    raise Deadlock("\n".join(["no warp group can continue:", *self._report()]))
                chosen = self.random.choices(able, [each.speed for each in able])[0]
                if isinstance(chosen, Group):
                    return chosen
                self.flights.remove(chosen)
                chosen.land()
        except Exception as error:
            self.failure = error
        return self.whole

    def speed(self) -> float:
        return 10 ** self.random.uniform(-2, 2)

    def _report(self) -> Iterator[str]:
        frames = sys._current_frames()
        for group in self.groups:
            if not group.done and group.waiting:
                frame = frames[group.thread.ident or 0]
                while frame.f_code.co_filename in (__file__, threading.__file__) and frame.f_back:
                    frame = frame.f_back
                yield f"  {group.name}, {Path(frame.f_code.co_filename).name}:{frame.f_lineno}, waits for {group.waiting()}"


def program() -> Program:
    if Program.now is None:
        raise Broken("this works only inside a kernel")
    return Program.now


def unwritten(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return NaN, or for integers a conspicuous number."""
    return torch.full(tuple(shape), torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min, dtype=dtype)


def _reached(pointer: Value, mask: Any, verb: str) -> Tensor:
    """Check that the unmasked pointers stay inside their tensor, and return them."""
    there = value_of(True if mask is None else mask, INT1)
    as_many_axes(pointer, there)
    reached = there.held.expand(pointer.shape)
    places, size = pointer.held[reached], pointer.dtype.memory.numel()
    if places.numel() and not 0 <= places.min() <= places.max() < size:
        raise Broken(f"a {verb} reaches from {places.min()} to {places.max()} in a tensor of {size}")
    return reached


def load(pointer: Value, mask: Any = None, other: Any = None, **hints: Any) -> Value:
    """Return the values at pointers; where the mask is false, `other`, or an arbitrary value without it."""
    reached, element = _reached(pointer, mask, "load"), pointer.dtype.element_ty
    found = unwritten(pointer.shape, element.native)
    if other is not None:
        other = value_of(other, element)
        as_many_axes(pointer, other)
        found.copy_(other.held)
    found[reached] = pointer.dtype.memory[pointer.held[reached]]
    return fitted(found, element)


def store(pointer: Value, value: Any, mask: Any = None, **hints: Any) -> None:
    reached, element = _reached(pointer, mask, "store"), pointer.dtype.element_ty
    value = value_of(value, element)
    as_many_axes(pointer, value)
    pointer.dtype.memory[pointer.held[reached]] = value.held.to(element.native).expand(pointer.shape)[reached]


class Shared:
    """A region of shared memory. unfenced: the number of the group that has written to it since its last fence."""

    def __init__(self, data: Tensor, unfenced: Tensor, dtype: DType, layout: Any, name: str) -> None:
        self.data, self.unfenced, self.dtype, self.layout, self.name = data, unfenced, dtype, layout, name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(shape=self.shape, layout=self.layout, element_ty=self.dtype)

    def _view(self, change: Callable[[Tensor], Tensor], how: str = "") -> Shared:
        return Shared(change(self.data), change(self.unfenced), self.dtype, self.layout, self.name + how)

    def index(self, index: Any) -> Shared:
        return self.slice(index, 1)._view(lambda t: t[0])

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        start = int(start)
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise Broken(f"{self.name} has {self.shape[dim]} entries, and {start} to {start + length} were asked for")
        return self._view(lambda t: t.narrow(dim, start, length), f"[{start}]" if length == 1 else f"[{start}:{start + length}]")

    def permute(self, order: Sequence[int]) -> Shared:
        return self._view(lambda t: t.permute(*order))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return self._view(lambda t: t.view(*shape))

    def load(self, layout: Any = None) -> Value:
        program().pause()
        return fitted(self.data.clone(), self.dtype)

    def store(self, value: Any) -> None:
        program().pause()
        value = value_of(value)
        if value.dtype is not self.dtype or value.shape != self.shape:
            raise TypeError(f"{self.name} is {self.dtype.name} {self.shape}, not {value.dtype.name} {value.shape}")
        self.data.copy_(value.held)
        self.unfenced.fill_(program().running.number)


def allocate_shared_memory(element_ty: DType, shape: Sequence[int], layout: Any, value: Any = None) -> Shared:
    data, unfenced = unwritten(shape, element_ty.native), torch.zeros(*shape, dtype=torch.int16)
    program().memory.append(Shared(data, unfenced, element_ty, layout, f"shared memory {len(program().memory)}"))
    if value is not None:
        program().memory[-1].store(value)
    return program().memory[-1]


def fence_async_shared(cluster: bool = False) -> None:
    program().pause()
    for place in program().memory:
        place.unfenced[place.unfenced == program().running.number] = 0


class Reading:
    """An operation that reads shared memory from its start until it is waited for."""

    def __init__(self, what: str, places: Sequence[Shared], finish: Callable[[], None]) -> None:
        self.what, self.places, self.finish = what, places, finish
        for place in places:
            if place.unfenced.any():
                raise Broken(f"{what} reads {place.name} before a fence makes the writes visible")
        self.seen = [self._bits(place) for place in places]

    def end(self) -> None:
        for place, seen in zip(self.places, self.seen, strict=True):
            if not torch.equal(self._bits(place), seen):
                raise Broken(f"{place.name} changes while {self.what} reads it")
        self.finish()

    @staticmethod
    def _bits(place: Shared) -> Tensor:
        return place.data.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _end_but(asked: collections.deque[Reading], left: Any) -> None:
    program().pause(slow=program().random.random() < 0.5)
    while len(asked) > int(left):
        asked.popleft().end()


@dataclass
class Barrier:
    """A phase ends when all groups and all expected bytes have arrived. Phases are known by their parity; the first is 0."""

    name: str
    count: int
    missing: int
    bytes: int = 0
    parity: int = 0

    def arrive(self, count: int, expected: int) -> None:
        self.missing -= count
        self.bytes += expected
        if self.missing < 0:
            raise Broken(f"more than {self.count} arrive in a phase of {self.name}")
        if self.missing == 0 and self.bytes < 0:
            raise Broken(f"{-self.bytes} bytes arrive at {self.name} that nobody expects")
        if self.missing == self.bytes == 0:
            self.missing, self.parity = self.count, 1 - self.parity


def _barrier_at(place: Shared) -> Barrier:
    barrier = program().barriers.get(place.data.data_ptr())
    if place.data.numel() != 1 or barrier is None:
        raise Broken(f"there is no barrier at {place.name}")
    return barrier


def init(mbarrier: Shared, count: int) -> None:
    if mbarrier.data.numel() != 1 or mbarrier.data.data_ptr() in program().barriers:
        raise Broken(f"{mbarrier.name} is not the place of one barrier, or has one already")
    program().barriers[mbarrier.data.data_ptr()] = Barrier(mbarrier.name, count, count)


def expect(mbarrier: Shared, bytes_per_cta: int, pred: Any = True) -> None:
    """Arrive, and extend the phase until so many bytes have come."""
    program().pause()
    if pred:
        _barrier_at(mbarrier).arrive(1, int(bytes_per_cta))


def arrive(mbarrier: Shared, *, count: int = 1, pred: Any = True) -> None:
    program().pause()
    if pred:
        _barrier_at(mbarrier).arrive(count, 0)


def wait(mbarrier: Shared, phase: Any, pred: Any = True, deps: Sequence[Any] = ()) -> None:
    """Wait while a phase of this parity is active. A new barrier therefore never blocks for parity 1."""
    if pred:
        barrier, parity = _barrier_at(mbarrier), int(phase) & 1
        program().pause(lambda: barrier.parity != parity, lambda: f"the end of a phase of parity {parity}: {barrier}")


@dataclass
class Descriptor:
    """A matrix whose blocks TMA copies; Gluon calls it a TensorDescriptor."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    layout: Any = None

    def __post_init__(self) -> None:
        size = self.base.element_size()
        if self.base.data_ptr() % 16 or self.strides[-1] != 1 or any(stride * size % 16 for stride in self.strides[:-1]):
            raise Broken("rows must start at multiples of 16 bytes and have no gaps")
        self.memory = torch.as_strided(self.base.detach(), tuple(self.shape), tuple(self.strides), self.base.storage_offset())

    @property
    def dtype(self) -> DType:
        return OF_TORCH[self.base.dtype]

    def inside(self, corner: Sequence[Any], place: Shared) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the part of a block that lies inside the matrix, as slices of the matrix and of the block."""
        if place.dtype is not self.dtype or place.shape != tuple(self.block_shape):
            raise Broken(f"{place.name} is {place.dtype.name} {place.shape}, and a block {self.dtype.name} {self.block_shape}")
        bounds = []
        for start, size, length in zip(map(int, corner), self.shape, self.block_shape, strict=True):
            first = max(start, 0)
            bounds.append((start, first, max(first, min(start + length, size))))
        return tuple(slice(a, b) for _, a, b in bounds), tuple(slice(a - start, b - start) for start, a, b in bounds)


def async_copy_global_to_shared(
    tensor_desc: Descriptor, coord: Sequence[Any], barrier: Shared, result: Shared, pred: Any = True, multicast: bool = False
) -> None:
    program().pause()
    if not pred:
        return
    (there, here), expected = tensor_desc.inside(coord, result), _barrier_at(barrier)
    result.data.copy_(unwritten(result.shape, result.data.dtype))

    def land() -> None:
        result.data.zero_()
        result.data[here] = tensor_desc.memory[there]
        expected.arrive(0, -result.data.numel() * result.data.element_size())

    program().flights.append(Flight(program().speed(), land))


def async_copy_shared_to_global(tensor_desc: Descriptor, coord: Sequence[Any], src: Shared) -> None:
    program().pause()
    there, here = tensor_desc.inside(coord, src)
    program().running.stores.append(Reading("a store", [src], lambda: tensor_desc.memory[there].copy_(src.data[here])))


def store_wait(pendings: Any) -> None:
    _end_but(program().running.stores, pendings)


class Product:
    """An accumulator of a product that may not have finished."""

    def __init__(self, a: Any, b: Shared, before: Any, adds: bool) -> None:
        self.a, self.b, self.before, self.adds = a, b, before, adds
        self.shape, self.found = (a.shape[0], b.shape[1]), None
        if a.dtype is not b.dtype or a.shape[1] != b.shape[0] or tuple(before.shape) != self.shape:
            raise TypeError(f"no product of {a.dtype.name} {a.shape} and {b.dtype.name} {b.shape} in {before.shape}")

    def compute(self) -> None:
        before = value_of(self.before)
        a = self.a.data if isinstance(self.a, Shared) else self.a.held
        product = a.to(before.held.dtype) @ self.b.data.to(before.held.dtype)
        self.found = Value(before.held + product if self.adds else product, before.dtype)
        self.before = None

    def as_value(self) -> Value:
        if self.found is None:
            raise Broken("a product is used before it is waited for")
        return self.found


def warpgroup_mma(a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False, **precision: Any) -> Any:
    program().pause()
    asked = program().running.products
    product = Product(a if isinstance(a, Shared) else value_of(a), b, acc, bool(use_acc))
    asked.append(Reading("a product", [place for place in (a, b) if isinstance(place, Shared)], product.compute))
    if is_async:
        return product
    _end_but(asked, 0)
    return product.as_value()


def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Sequence[Any] = ()) -> Any:
    """Return deps: as values, except those whose product may still be outstanding."""
    _end_but(program().running.products, num_outstanding)
    found = tuple(dep if getattr(dep, "found", None) is None else dep.found for dep in deps)
    return found[0] if len(found) == 1 else found
