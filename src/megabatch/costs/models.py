"""Build the encoders of a run for counting and tracing, without computing or initialising their weights."""

from __future__ import annotations

import copy
import mmap
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .. import config
from ..objectives import OBJECTIVES
from ..towers import BuiltTower
from ..towers.model import SHARED, Encoder, build_towers
from .fake_tensors import tensors_of
from .without_dynamo import without_dynamo

# Smaller tensors are computed as usual: the values that a model's constructor reads back, such as dropout rates, are small.
LARGE = 2**16
META = torch.device("meta")


class SkipCompute(TorchDispatchMode):
    """A context in which operations on large tensors return uninitialised tensors of the right shape.

    Building a model then takes a second, where initialising gigabytes with random numbers and trying the result takes a minute.
    """

    def __init__(self) -> None:
        super().__init__()
        self._contexts = ExitStack()
        # Results on the meta device, by operation and arguments: equal blocks call the same.
        self._results: dict[Any, Any] = {}

    def __enter__(self) -> Any:
        self._contexts.enter_context(without_dynamo())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._contexts.close()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # As in CachingFakeMode.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, tuple(kwargs.values())))
        creates = not given
        if func.is_view or not (creates or any(tensor.numel() >= LARGE for tensor in given)):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return args[0]
        if creates and not any(argument.name == "device" for argument in func._schema.arguments):
            return func(*args, **kwargs)
        key = (func, torch.get_default_dtype(), *_key(args), *_key(kwargs.items()))
        if key not in self._results:
            on_meta, named = tree_map(lambda leaf: leaf.to(META) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            if creates or "device" in named:
                named = {**named, "device": META}
            self._results[key] = func(*on_meta, **named)
        out = self._results[key]
        if creates and not _is_large(out):
            return func(*args, **kwargs)
        return tree_map(lambda t: _uninitialised(t) if isinstance(t, Tensor) else t, out)


class EncoderWithInputs:
    """One encoder of a run and example inputs for it. `module` is what the run calls: the tower with normalised embeddings."""

    def __init__(self, tower: BuiltTower, *, locked: bool) -> None:
        self.tower = tower
        self.module = Encoder(tower.module, locked=locked)
        self.sample = _sample(tower)

    def inputs(self, rows: int) -> Any:
        """Return this many rows of zeros, stacked as the data loader stacks them; a dict in a tuple, since it is one argument."""
        stacked = tree_map(lambda sample: torch.zeros((rows, *sample.shape), dtype=sample.dtype), self.sample)
        return (stacked,) if isinstance(stacked, dict) else stacked


def encoders_of(run: config.Run) -> tuple[EncoderWithInputs, ...]:
    """Return the encoders of a run: two, or one if both sides share it or the run classifies."""
    x, y = shapes_of(run)
    first = EncoderWithInputs(x, locked=run.x.locked)
    if not OBJECTIVES[run.loss.objective].contrastive or run.y.name == SHARED:
        return (first,)
    return (first, EncoderWithInputs(y, locked=run.y.locked))


def shapes_of(run: config.Run) -> tuple[BuiltTower, BuiltTower]:
    """Return the towers of a run with weights that are not initialised. Files with weights are not read: they need not exist."""
    with SkipCompute():
        return build_towers(run, shapes_only=True)


def copy_modules(modules: Any) -> Any:
    """Return a copy of the modules without copying weights: a trace changes the modules that it runs."""
    with SkipCompute():
        return copy.deepcopy(modules)


def module_from_function(name: str) -> nn.Module:
    """Return the Module that the function named "package.module:function" builds."""
    try:
        make: Callable[[], Any] = pkgutil.resolve_name(name)
        with SkipCompute():
            module = make()
    except Exception as error:
        hint = "; --trust-code imports from the current folder too" if isinstance(error, ModuleNotFoundError) else ""
        raise ValueError(f"model is {name!r}: cannot be built ({type(error).__name__}: {error}){hint}") from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"model is {name!r}: returned a {type(module).__name__}, must be a torch.nn.Module")
    return module


def _key(values: Any) -> Iterator[Any]:
    """Yield what the shapes of results depend on: layouts of tensors, and other values with their types."""
    for value in values:
        if isinstance(value, Tensor):
            yield value.shape, value.stride(), value.dtype
        else:
            yield (type(value), *_key(value)) if isinstance(value, (tuple, list)) else (type(value), value)


def _is_large(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.numel() >= LARGE for leaf in tree_leaves(tree))


def _uninitialised(like: Tensor) -> Tensor:
    """Return a tensor on the CPU. A large one is mapped and never touched: malloc writes to its first page, of up to 2 MiB."""
    size = like.untyped_storage().nbytes()
    if size < LARGE:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=like.dtype).as_strided(like.shape, like.stride())


def _sample(tower: BuiltTower) -> Any:
    if tower.kind == "text":
        return tower.prepare("a text", None)
    size, channels = getattr(tower.prepare, "size", None), getattr(tower.prepare, "channels", None)
    if size is None or channels is None:
        raise ValueError(
            f"{type(tower.prepare).__name__} prepares images of unknown size: give it the attributes size and channels"
        )
    return torch.zeros(channels, size, size, dtype=torch.uint8)
