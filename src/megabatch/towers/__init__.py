"""Encoders by name: built in, from timm, OpenCLIP or transformers, or from a function of the user.

`LIBRARIES` holds one record for each source of towers. A new one is a file with its record and a line here.
"""

from __future__ import annotations

import re

from megabatch import config

from .built_in import CNN, TEXT, VIT
from .function import FUNCTION
from .library import TowerLibrary, TowerRequest
from .open_clip import OPEN_CLIP
from .timm import TIMM
from .tower import BuiltTower
from .transformers import TRANSFORMERS
from .weights import load_weights

__all__ = [
    "LIBRARIES",
    "BuiltTower",
    "TowerLibrary",
    "build_tower",
    "find_library",
    "full_name",
    "load_weights",
    "names_code",
    "rows_are_independent",
]

# By a tower's name, or by the part of it before the colon. Any other name with a colon is that of a function.
LIBRARIES = {
    "vit": VIT,
    "cnn": CNN,
    "text": TEXT,
    "timm": TIMM,
    "open_clip": OPEN_CLIP,
    "transformers": TRANSFORMERS,
}


def names_code(name: str) -> bool:
    """Return whether a tower's name is that of a function to import and call, "package.module:function".

    >>> names_code("timm:vit_tiny_patch16_224"), names_code("my.towers:small")
    (False, True)
    """
    prefix, colon, _ = name.partition(":")
    library = LIBRARIES.get(prefix)
    return bool(colon) and (library is None or not library.takes_model)


def find_library(name: str) -> TowerLibrary:
    """Return the record of the library that a tower's name belongs to."""
    prefix, _, model = name.partition(":")
    library = FUNCTION if names_code(name) else LIBRARIES.get(prefix)
    if library is None or (library.takes_model and not (prefix and model)):
        forms = ", ".join(record.form for record in LIBRARIES.values())
        raise ValueError(f"there is no tower {name!r}; towers are named {forms} or {FUNCTION.form}")
    return library


def build_tower(tower: config.Tower, dim: int, *, side: str) -> BuiltTower:
    """Return the encoder that the configuration names, for side "x" or "y", with the weights of `tower.weights`.

    Its module returns (rows, dim), not normalised. `tower.locked` is left to the caller.

    >>> build_tower(config.Tower("cnn", {"channels": 1}), 256, side="x").prepare.size
    32
    """
    try:
        library = find_library(tower.name)
        model = tower.name if library is FUNCTION else tower.name.partition(":")[2]
        built = library.build(TowerRequest(model, dim, tower.options, side, tower.checkpointing))
        if tower.weights is not None:
            load_weights(built.module, tower.weights)
    except ValueError as error:
        raise ValueError(f"tower {side}: {error}") from error
    return built


def rows_are_independent(name: str) -> bool:
    """Return whether no layer of the tower mixes rows, as batch norm does. False if it depends on the model."""
    library = LIBRARIES.get(name)
    return library is not None and library.independent_rows


def full_name(name: str) -> str:
    """Return the name of a tower with its library, also for model names as papers write them.

    >>> full_name("ViT-L/14"), full_name("vit")
    ('open_clip:ViT-L-14', 'vit')
    """
    name = name.strip()
    for prefix, library in LIBRARIES.items():
        if library.alias is not None and re.fullmatch(library.alias, name):
            return f"{prefix}:{name.replace('/', '-')}"
    return name
