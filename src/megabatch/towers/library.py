"""The record of a tower library, and what the libraries' files share."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from . import without_torchvision
from .inputs import Kind, NormalizePixels, PrepareImage
from .tower import BuiltTower

IMAGE_OPTIONS = tuple(field.name for field in fields(PrepareImage))
# Options by which timm and OpenCLIP would read a file, unpickle it or download: weights come from the tower's `weights` alone.
LOADING_OPTIONS = re.compile(r"pretrained|^hf_|^(checkpoint_path|cache_dir|load_weights|load_weights_only|weights_only|file|url)$")
LOADING_VALUES = re.compile(r"^(hf[-_]hub|local-dir|https?|file):")


@dataclass(frozen=True)
class TowerRequest:
    """What a library is asked to build.

    model: the tower's name without the prefix of the library. dim: the width of the embeddings. side: "x" or "y".
    shapes_only: only the shapes of the tower are of interest: no file with weights or a tokenizer is read, and a model that is not
        on this machine is built from its known shape.
    """

    model: str
    dim: int
    options: Mapping[str, Any]
    side: str
    checkpointing: bool
    shapes_only: bool = False


@dataclass(frozen=True)
class TowerLibrary:
    """One source of towers: a built-in tower, a library, or functions of the user.

    form: how its towers are named, in errors and documentation, such as "timm:NAME".
    build: builds a tower with fresh weights, or with those that belong to a local model folder.
    takes_model: whether a model follows in the name, after a colon.
    both_sides: whether one model holds an image and a text tower, so that the model's name serves for both sides of a pair.
    partner: the name of the tower that a plan puts on side y if only x is named; None: a text tower of CLIP's size.
    plan_dim: the width of the embeddings in a plan that does not give one, if `own_dim` does not know it either.
    own_dim: returns the width of a model's own embeddings, at which it needs no further projection; None if it is not known.
    holds_weights: returns whether a model that is built already has pretrained weights, so that `weights` is not needed.
    independent_rows: whether no layer of any of its towers mixes rows, as batch norm does.
    kind_of: returns what a model reads, from its name and side, without building it.
    alias: pattern of model names without a prefix that papers use and that mean this library's models, such as "ViT-L/14".
    """

    form: str
    build: Callable[[TowerRequest], BuiltTower]
    takes_model: bool = True
    both_sides: bool = False
    partner: str | None = None
    plan_dim: int = 512
    own_dim: Callable[[str], int | None] = lambda model: None
    holds_weights: Callable[[str], bool] = lambda model: False
    independent_rows: bool = False
    kind_of: Callable[[str, str], Kind] = lambda model, side: "image"
    alias: str | None = None


def split_options(options: Mapping[str, Any], names: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options with these names, and the others."""
    ours = {key: value for key, value in options.items() if key in set(names)}
    return ours, {key: value for key, value in options.items() if key not in ours}


def refuse_loading(model: str, options: Any) -> None:
    """Raise ValueError if an option, also one in a nested table, would make the library read a file or download."""
    for key, value in options.items() if isinstance(options, Mapping) else enumerate(options):
        if isinstance(key, str) and LOADING_OPTIONS.search(key):
            raise ValueError(
                f"option {key!r} of {model} is refused: with it the library itself would load weights, from pickles or the network;"
                " name a local file with the tower's key `weights` instead"
            )
        if isinstance(value, str) and LOADING_VALUES.search(value):
            raise ValueError(f"option {key!r} of {model} is {value!r}, which would be downloaded; name a local file with `weights`")
        if isinstance(value, (Mapping, list, tuple)):
            refuse_loading(model, value)


def normalization(mean: Sequence[float], std: Sequence[float], channels: int) -> NormalizePixels:
    """Return the pixel normalisation with the library's numbers; grey images take their mean over the colours."""
    if channels == 1:
        mean, std = ([sum(values) / len(values)] for values in (mean, std))
    return NormalizePixels(mean, std)


def enable_checkpointing(encoder: nn.Module, name: str) -> None:
    """Turn on gradient checkpointing with the encoder's own switch. ValueError if it has none."""
    try:
        encoder.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError):
        enabled = False
    else:
        # Some encoders have a switch without effect.
        enabled = any(getattr(module, "grad_checkpointing", False) for module in encoder.modules())
    if not enabled:
        raise ValueError(
            f"checkpointing is true: {name} has no gradient checkpointing; leave it out, and use a smaller batch.chunk"
        )


def unknown_model(library: str, name: str, known: Sequence[str]) -> ValueError:
    """Return the error for a model that the library does not have, with similar names."""
    similar = difflib.get_close_matches(name, known, 3)
    return ValueError(f"{library} has no model {name!r}" + (f"; did you mean {', '.join(similar)}?" if similar else ""))


def import_failed(library: str, package: str, error: Exception) -> ValueError:
    """Return the error for a library that cannot be imported. package: its name on PyPI."""
    if isinstance(error, ModuleNotFoundError) and error.name == library:
        return ValueError(f"{library} is not installed: pip install {package}; the towers vit, cnn and text need no package")
    broken = without_torchvision.error_of_import()
    remedy = "" if broken is None else f"; nor can torchvision, which it uses. {without_torchvision.remedy()}"
    return ValueError(
        f"{library} cannot be imported ({type(error).__name__}: {error}){remedy}. The towers vit, cnn and text need no package"
    )
