"""Encoders to count and to measure against memory, built by the names that a run uses, without computing or filling anything."""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .. import config
from ..objectives import OBJECTIVES
from ..towers import BuiltTower
from ..towers.model import SHARED, Encoder, build_towers

# Tensors of fewer elements are computed as ever: what a builder reads back, such as rates of dropout, is small.
LARGE = 2**16
META = torch.device("meta")


class SkipCompute(TorchDispatchMode):
    """Inside, nothing large is computed: operations return tensors of the right shape with whatever memory holds.

    Builders then take a second where filling gigabytes with random numbers, and trying the result, takes a minute.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        makes = not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
        if func.is_view or not (makes or _large((args, kwargs))):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return args[0]
        if makes and not any(argument.name == "device" for argument in func._schema.arguments):
            return func(*args, **kwargs)
        moved, named = tree_map(lambda leaf: leaf.to(META) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        if makes or "device" in named:
            named = {**named, "device": META}
        out = func(*moved, **named)
        if makes and not _large(out):
            return func(*args, **kwargs)
        return tree_map(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) if isinstance(t, Tensor) else t, out)


class EncoderWithInputs:
    """One encoder of a run, and inputs for it. `module` is what the run calls: the tower, its embeddings made unit length."""

    def __init__(self, tower: BuiltTower, *, locked: bool) -> None:
        self.module = Encoder(tower.module, locked=locked)
        self.sample = _sample(tower)

    def inputs(self, rows: int) -> Any:
        """So many rows of zeros, as the data loader would stack them."""
        return tree_map(lambda sample: torch.zeros((rows, *sample.shape), dtype=sample.dtype), self.sample)


def encoders_of(run: config.Run) -> tuple[EncoderWithInputs, ...]:
    """The encoders of a run: two, or one where both sides share it or where it classifies."""
    with SkipCompute():
        x, y = build_towers(run)
    first = EncoderWithInputs(x, locked=run.x.locked)
    if not OBJECTIVES[run.loss.objective].contrastive or run.y.name == SHARED:
        return (first,)
    return (first, EncoderWithInputs(y, locked=run.y.locked))


def copy_modules(modules: Any) -> Any:
    """A copy of the modules for a trace, which leaves its marks on what it traces; no weights are copied."""
    with SkipCompute():
        return copy.deepcopy(modules)


def module_from_function(name: str) -> nn.Module:
    """What "package.module:function" returns, a Module."""
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


def _large(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.numel() >= LARGE for leaf in tree_leaves(tree))


def _sample(tower: BuiltTower) -> Any:
    if tower.kind == "text":
        return tower.prepare("a text", None)
    size, channels = getattr(tower.prepare, "size", None), getattr(tower.prepare, "channels", None)
    if size is None or channels is None:
        raise ValueError(
            f"{type(tower.prepare).__name__} prepares images of unknown size: give it the attributes size and channels"
        )
    return torch.zeros(channels, size, size, dtype=torch.uint8)
