"""A chunk's forward again, in backward, from the state that it started from: generators, autocast and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from .generators import Source

State: TypeAlias = tuple[Source, Any]


class Buffer(NamedTuple):
    """A buffer by its place, so that another tensor can stand there for a while."""

    owner: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        value = self.owner._buffers[self.name]
        assert value is not None
        return value


def buffers_of(modules: Iterable[nn.Module]) -> list[Buffer]:
    """The buffers that the modules themselves own, not those inside them."""
    return [Buffer(module, name) for module in modules for name, value in module._buffers.items() if value is not None]


def versions_of(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    """Each tensor with the count of in-place changes to it; those made under inference mode have none."""
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def differs(before: Tensor, after: Tensor) -> bool:
    """Whether a buffer was changed; one without values may have been."""
    return before.is_meta or not torch.equal(before, after)


class Replay:
    """The state at this moment of the generators of `devices`, of autocast there, of the default device and of the `buffers`.

    `weights` come with the version that they have; they cannot be put back, but it can be seen that they were changed.
    `sources` are generators beside the default ones of the devices, those of the host and an encoder's own, with their states.
    """

    def __init__(
        self,
        devices: Iterable[torch.device],
        buffers: Iterable[Buffer],
        weights: Sequence[tuple[Tensor, int]] = (),
        sources: Sequence[State] = (),
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

    def end(self) -> list[State]:
        """Note after the chunk's forward which sources it drew from, for `again` to leave the others alone; return the new states.

        The generators of the host belong to the whole process: other threads may draw from them while backward runs.
        """
        after = states_of(source for source, _ in self.sources)
        self._drawn = [before for before, now in zip(self.sources, after, strict=True) if before[1] is not now[1]]
        return after

    @contextmanager
    def again(self) -> Iterator[None]:
        """This state, and afterwards the one before: what is drawn or counted in between leaves no trace."""
        if any(tensor._version != version for tensor, version in self.weights):
            raise RuntimeError(
                "weights were changed between forward and backward, which runs the encoder again and would use the new ones: call "
                "backward before the optimizer's step"
            )
        before = {device: get_generator(device) for device in self.generators}
        sources_before = states_of(source for source, _ in self._drawn)
        originals = {buffer: buffer.tensor for buffer in self.buffers}
        # Backward may run on another thread, which knows nothing of what was set on the one that ran forward.
        with ExitStack() as contexts:
            if torch.get_default_device() != self.default_device:
                contexts.enter_context(self.default_device)
            for kind, dtype, enabled in self.autocast:
                contexts.enter_context(torch.autocast(kind, dtype, enabled, self.autocast_cache))
            try:
                _set_generators(self.generators)
                _set_sources(self._drawn)
                # Other tensors take the buffers' places: writing into the buffers would disturb graphs that saved them.
                for buffer, value in self.buffers.items():
                    buffer.owner._buffers[buffer.name] = value.clone()
                yield
            finally:
                _set_generators(before)
                _set_sources(sources_before)
                for buffer, original in originals.items():
                    buffer.owner._buffers[buffer.name] = original

    def restore(self) -> None:
        """Makes this state the present one, for another try."""
        _set_generators(self.generators)
        _set_sources(self.sources)
        for buffer, value in self.buffers.items():
            buffer.tensor.copy_(value)


def current_accelerator() -> list[torch.device]:
    """The accelerator that is in use, or none: an encoder may move its inputs there itself."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
        return []
    return [torch.device(kind.type, torch.accelerator.current_device_index())]


def get_generator(device: torch.device) -> Tensor:
    """The state of the device's default generator."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(*_index(device))


def _set_generators(states: dict[torch.device, Tensor]) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, *_index(device))


def states_of(sources: Iterable[Source]) -> list[State]:
    """Each generator with its present state."""
    return [(source, source.get()) for source in sources]


def _set_sources(states: Sequence[State]) -> None:
    for source, state in states:
        source.set(state)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    # There is one MPS device, and its functions take none.
    return () if device.type == "mps" else (device,)
