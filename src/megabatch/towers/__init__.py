"""Encoders by name: small ones that need nothing, those of other packages, your own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megabatch import config

from .cnn import cnn
from .huggingface import from_transformers
from .library import from_function, from_open_clip, from_timm
from .text import text
from .tower import Tower
from .vit import vit
from .weights import load_weights

__all__ = ["Tower", "build_tower", "load_weights"]

# Numbers of layers that a tower can do without.
MAY_BE_NONE = ("depth", "layers")
BUILT_IN: dict[str, Callable[..., Tower]] = {"vit": vit, "cnn": cnn, "text": text}


def build_tower(tower: config.Tower, dim: int, *, side: str) -> Tower:
    """The encoder that the configuration names, for `side` "x" or "y", with the weights of `tower.weights`.

    Its module returns (rows, dim), not normalised. `tower.locked` is the model's business.

    >>> build_tower(config.Tower("cnn", {"channels": 1}), 256, side="x").prepare.size
    32
    """
    try:
        built = _build(tower, dim, side)
        if tower.weights is not None:
            load_weights(built.module, tower.weights)
    except ValueError as error:
        raise ValueError(f"tower {side}: {error}") from error
    return built


def _build(tower: config.Tower, dim: int, side: str) -> Tower:
    library, _, name = tower.name.partition(":")
    if tower.name in BUILT_IN:
        builder = BUILT_IN[tower.name]
        return builder(dim, **_checked(tower.name, builder, tower.options), checkpointing=tower.checkpointing)
    if not library or not name:
        raise ValueError(
            f"there is no tower {tower.name!r}: name one of {', '.join(BUILT_IN)}; timm:NAME, open_clip:NAME, transformers:FOLDER;"
            " or package.module:function"
        )
    if library == "timm":
        return from_timm(name, dim, tower.options, checkpointing=tower.checkpointing)
    if library == "open_clip":
        return from_open_clip(name, dim, tower.options, side=side, checkpointing=tower.checkpointing)
    if library == "transformers":
        return from_transformers(name, dim, tower.options, checkpointing=tower.checkpointing)
    return from_function(tower.name, dim, tower.options, checkpointing=tower.checkpointing)


def _checked(name: str, builder: Callable[..., Tower], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, each known and of its default's type."""
    known = {key: entry.default for key, entry in inspect.signature(builder).parameters.items()}
    del known["dim"], known["checkpointing"]
    checked = {}
    for key, value in options.items():
        if key not in known:
            raise ValueError(f"{name} has no option {key!r}; known are {', '.join(known)}")
        checked[key] = _as_default(key, value, known[key])
        least = 0 if key in MAY_BE_NONE else 1
        if type(known[key]) is int and value < least:
            raise ValueError(f"option {key} is {value!r}: must be at least {least}")
    return checked


def _as_default(key: str, value: Any, default: Any) -> Any:
    if isinstance(default, tuple) and isinstance(value, (list, tuple)):
        return tuple(_as_default(key, entry, default[0]) for entry in value)
    # True is an int to Python, but no number to a reader.
    if type(value) is type(default) or (isinstance(default, float) and type(value) is int):
        return type(default)(value)
    raise ValueError(f"option {key} is {value!r}: must be like its default, {default!r}")
