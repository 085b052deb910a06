"""Image and text towers of OpenCLIP models, by name. Nothing is downloaded."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from . import without_torchvision
from .inputs import Kind, PrepareImage, ShapeTokens, check_is_text
from .library import (
    IMAGE_OPTIONS,
    TowerLibrary,
    TowerRequest,
    enable_checkpointing,
    import_failed,
    normalization,
    refuse_loading,
    split_options,
    unknown_model,
)
from .tower import BuiltTower, StateDict, as_tower


def build(request: TowerRequest) -> BuiltTower:
    """Return the image tower (side x) or the text tower (side y) of an OpenCLIP model, from its configuration.

    Options: those of `PrepareImage`, and those of `open_clip.create_model`; length: tokens of a text, if not the model's own;
    part = "image" or "text" overrides the side.
    """
    name = request.model
    try:
        open_clip = _import_for_shapes(name) if request.shapes_only else without_torchvision.import_open_clip()
    except Exception as error:
        raise import_failed("open_clip", "open_clip_torch", error) from error
    if name not in open_clip.list_models():
        raise unknown_model("open_clip", name, open_clip.list_models())
    refuse_loading(f"open_clip:{name}", request.options)
    image_options, model_options = split_options(request.options, (*IMAGE_OPTIONS, "part", "length"))
    part = image_options.pop("part", "image" if request.side == "x" else "text")
    length = image_options.pop("length", None)
    if part not in ("image", "text"):
        raise ValueError(f"part is {part!r}: must be 'image' or 'text'")
    text_config = open_clip.get_model_config(name)["text_cfg"]
    downloads = text_config.get("hf_model_name") or (part == "text" and text_config.get("hf_tokenizer_name"))
    if text_config.get("hf_model_name") or (downloads and not request.shapes_only):
        raise ValueError(f"open_clip:{name} would have to be downloaded in part; name a model whose text tower is OpenCLIP's own")
    if length is not None:
        model_options["force_context_length"] = length
    model = _create_model(open_clip.create_model, name, image_options.get("size"), model_options)
    encoder = model.visual if part == "image" else model.text
    if request.checkpointing:
        enable_checkpointing(encoder, f"open_clip:{name}")
    prefix = "visual." if part == "image" else "text."

    def own_weights(state: StateDict) -> StateDict:
        state = open_clip.model.convert_to_custom_text_state_dict(state)
        return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}

    shapes_only = request.shapes_only
    if part == "text":
        own_length = int(encoder.context_length)
        tokenizer = ShapeTokens(own_length) if shapes_only else OpenClipTokenizer(name, length)
        return as_tower(encoder, tokenizer, "text", request.dim, own_weights=own_weights, shapes_only=shapes_only)
    if image_options.get("channels", 3) != 3:
        raise ValueError(f"channels is {image_options['channels']}: open_clip:{name} takes RGB images, channels = 3")
    image_options.setdefault("size", encoder.image_size if isinstance(encoder.image_size, int) else encoder.image_size[0])
    pixels = normalization(encoder.image_mean, encoder.image_std, 3)
    prepare = PrepareImage(**image_options)
    return as_tower(encoder, prepare, "image", request.dim, pixels=pixels, own_weights=own_weights, shapes_only=shapes_only)


def _create_model(create: Callable[..., nn.Module], name: str, size: int | None, options: Mapping[str, Any]) -> Any:
    # OpenCLIP warns that the weights are random, which is intended here; those of a file are loaded later.
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return create(name, pretrained_text=False, force_custom_text=True, force_image_size=size, **options)
    except Exception as error:
        raise ValueError(f"open_clip:{name} cannot be built with the options {dict(options)!r} ({error})") from error
    finally:
        logging.disable(disabled)


def kind_of(model: str, side: str) -> Kind:
    """Return what a side of the model reads."""
    return "image" if side == "x" else "text"


def own_dim(model: str) -> int | None:
    """Return the width of the joint embeddings of an OpenCLIP model, or None if it is not known."""
    try:
        found = _import_for_shapes(model).get_model_config(model)
    except Exception:
        # `build` says what is wrong.
        return None
    return None if found is None else int(found["embed_dim"])


def _import_for_shapes(model: str) -> Any:
    """Return OpenCLIP for building a model that computes nothing: as it is imported already, else without what it can do without.

    timm and transformers take seconds to import, and most models need neither. OpenCLIP imports them if they are installed.
    """
    if "open_clip" in sys.modules:
        return without_torchvision.import_open_clip()
    light = _private_copy(("timm", "transformers", "huggingface_hub"))
    vision = (light.get_model_config(model) or {}).get("vision_cfg", {})
    return _private_copy(("transformers",)) if vision.get("timm_model_name") else light


@functools.cache
def _private_copy(without: tuple[str, ...]) -> Any:
    """Return the module open_clip, imported as if some packages were not installed, which nobody else imports afterwards.

    Its tokenizers are placeholders: importing them reads a vocabulary.
    """
    hidden = {name: None for name in without if name not in sys.modules}
    # Python raises ModuleNotFoundError for a module that is None here.
    sys.modules.update(hidden)  # type: ignore[arg-type]
    sys.modules["open_clip.tokenizer"] = _Placeholders("open_clip.tokenizer")
    try:
        # timm would keep placeholders of torchvision.
        return without_torchvision.import_open_clip(unused="timm" in without)
    finally:
        for name in [name for name in sys.modules if name in hidden or name.partition(".")[0] == "open_clip"]:
            del sys.modules[name]


class _Placeholders(ModuleType):
    """A module whose every public name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__} has no attribute {name!r}")
        return type(name, (), {})


@functools.lru_cache(maxsize=2)
def _tokenizer(name: str, length: int | None) -> Callable[[str], Tensor]:
    return without_torchvision.import_open_clip().get_tokenizer(name, context_length=length)


@dataclass(frozen=True)
class OpenClipTokenizer:
    """Convert a text to the tokens of an OpenCLIP model. Only the name is pickled for worker processes."""

    name: str
    length: int | None = None

    def __call__(self, raw: Any, seed: int | None) -> Tensor:
        check_is_text(raw)
        return _tokenizer(self.name, self.length)(raw)[0]


OPEN_CLIP = TowerLibrary("open_clip:NAME", build, both_sides=True, own_dim=own_dim, kind_of=kind_of, alias=r"(ViT|RN|coca)[\w/@-]+")
