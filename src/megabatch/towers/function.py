"""Towers that a function of the user builds, named "package.module:function"."""

from __future__ import annotations

import inspect
import pkgutil

from torch import nn

from .inputs import ByteTokenizer, NormalizePixels, PrepareImage
from .library import IMAGE_OPTIONS, TowerLibrary, TowerRequest, split_options
from .tower import BuiltTower, as_tower

# The values of the option `kind`, and the options of the preparation that belongs to each.
PREPARATION_OPTIONS = {None: (), "image": IMAGE_OPTIONS, "text": ("length",)}


def build(request: TowerRequest) -> BuiltTower:
    """Return what the function returns for the options: a BuiltTower; or a Module, which needs the option `kind`.

    kind = "image": the Module takes normalised floats, after `PrepareImage`. kind = "text": it takes the tokens of `ByteTokenizer`.
    Options of the preparation are passed to the function too if it has parameters of their names.
    """
    name, options = request.model, request.options
    if request.checkpointing:
        raise ValueError(f"checkpointing is true: {name} is your function; let it turn gradient checkpointing on, by an option")
    kind = options.get("kind")
    if kind not in PREPARATION_OPTIONS:
        raise ValueError(f"kind is {kind!r}: must be 'image' or 'text', or left out if the function returns a BuiltTower")
    _, remaining = split_options(options, ("kind",))
    preparation, arguments = split_options(remaining, PREPARATION_OPTIONS[kind])
    try:
        function = pkgutil.resolve_name(name)
        signature = inspect.signature(function)
        arguments |= {key: value for key, value in preparation.items() if key in signature.parameters}
        signature.bind(**arguments)
    except Exception as error:
        raise ValueError(f"{name} cannot be called with {dict(options)!r} ({type(error).__name__}: {error})") from error
    result = function(**arguments)
    if isinstance(result, BuiltTower):
        return as_tower(result.module, result.prepare, result.kind, request.dim)
    if not isinstance(result, nn.Module):
        raise ValueError(f"{name} returned a {type(result).__name__}: must return a torch.nn.Module or a BuiltTower")
    if kind is None:
        raise ValueError(f"{name} returned a Module: give the option kind = 'image' or 'text', which says what it takes")
    if kind == "text":
        return as_tower(result, ByteTokenizer(**preparation), "text", request.dim)
    return as_tower(result, PrepareImage(**preparation), "image", request.dim, pixels=NormalizePixels())


# The function decides itself which weights its tower starts from.
FUNCTION = TowerLibrary("package.module:function", build, holds_weights=lambda model: True)
