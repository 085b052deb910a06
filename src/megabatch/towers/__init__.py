"""Encoders by name: built in, from timm, OpenCLIP or transformers, or from a function of the user.

`LIBRARIES` holds one record for each source of towers. A new one is a file with its record and a line here.
"""

from __future__ import annotations

import re

from megabatch import config

from .built_in import CNN, TEXT, VIT
from .function import FUNCTION
from .known import find_image_model, find_text_model, similar_names
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
    "size_options",
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
        near = similar_names(name)
        guess = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"there is no tower {name!r}; towers are named {forms} or {FUNCTION.form}.{guess}")
    return library


def build_tower(tower: config.Tower, dim: int, *, side: str, shapes_only: bool = False) -> BuiltTower:
    """Return the encoder that the configuration names, for side "x" or "y", with the weights of `tower.weights`.

    Its module returns (rows, dim), not normalised. `tower.locked` is left to the caller. shapes_only: without weights, as
    `library.TowerRequest` says.

    >>> build_tower(config.Tower("cnn", {"channels": 1}), 256, side="x").prepare.size
    32
    """
    try:
        library = find_library(tower.name)
        model = tower.name if library is FUNCTION else tower.name.partition(":")[2]
        built = library.build(TowerRequest(model, dim, tower.options, side, tower.checkpointing, shapes_only))
        if tower.weights is not None and not shapes_only:
            load_weights(built.module, tower.weights)
    except ValueError as error:
        raise ValueError(f"tower {side}: {error}") from error
    return built


def rows_are_independent(name: str) -> bool:
    """Return whether no layer of the tower mixes rows, as batch norm does. False if it depends on the model."""
    library = LIBRARIES.get(name)
    return library is not None and library.independent_rows


def full_name(name: str) -> str:
    """Return the name of a tower with its library, also for model names as papers and Hugging Face write them.

    >>> full_name("ViT-L/14"), full_name("bert-base-uncased"), full_name("openai/clip-vit-base-patch16"), full_name("vit")
    ('open_clip:ViT-L-14', 'transformers:bert-base-uncased', 'open_clip:ViT-B-16-quickgelu', 'vit')
    """
    name = name.strip()
    if name in LIBRARIES or ":" in name:
        return name
    for prefix, library in LIBRARIES.items():
        if library.alias is not None and re.fullmatch(library.alias, name):
            # "ViT-L/14@336px" is ViT-L-14-336.
            return f"{prefix}:{re.sub('[/@]', '-', name.removesuffix('px'))}"
    image = find_image_model(name)
    if image is not None:
        return image
    # A folder is named with its library; a plain name that looks like a known model is that model.
    return name if find_text_model(name) is None else f"transformers:{name}"


def size_options(name: str, side: str, text_length: int | None, image_size: int | None) -> dict[str, int]:
    """Return the options that give a tower another text length or image size; none for what it does not take, or not given.

    >>> size_options("open_clip:ViT-B-32", "x", 64, 384), size_options("open_clip:ViT-B-32", "y", 64, 384)
    ({'size': 384}, {'length': 64})
    """
    library = LIBRARIES.get(name.partition(":")[0])
    if library is None:
        return {}
    kind = library.kind_of(name.partition(":")[2], side)
    option, value = ("length", text_length) if kind == "text" else ("size", image_size)
    return {} if value is None else {option: value}
