"""Image towers from timm, by name. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

from . import without_torchvision
from .inputs import PrepareImage
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
    """Return a timm model with its own size, mean and standard deviation.

    Options: those of `PrepareImage`, and those of `timm.create_model`.
    """
    name = request.model
    try:
        timm = without_torchvision.import_timm()
    except Exception as error:
        raise import_failed("timm", "timm", error) from error
    if not timm.is_model(name):
        raise unknown_model("timm", name, timm.list_models())
    refuse_loading(f"timm:{name}", request.options)
    image_options, model_options = split_options(request.options, IMAGE_OPTIONS)
    # Only models that do not accept every size have an argument for it.
    if "size" in image_options and getattr(timm.get_pretrained_cfg(name), "fixed_input_size", False):
        model_options["img_size"] = image_options["size"]
    try:
        encoder: Any = timm.create_model(name, num_classes=0, in_chans=image_options.get("channels", 3), **model_options)
    except (TypeError, AssertionError, ImportError) as error:
        raise ValueError(f"timm:{name} does not take the options {dict(request.options)!r} ({error})") from error
    config = timm.data.resolve_model_data_config(encoder)
    image_options.setdefault("size", config["input_size"][-1])
    prepare = PrepareImage(**image_options)
    if request.checkpointing:
        enable_checkpointing(encoder, f"timm:{name}")
    classifiers = encoder.pretrained_cfg.get("classifier") or ()
    classifiers = (classifiers,) if isinstance(classifiers, str) else tuple(classifiers)

    def own_weights(state: StateDict) -> StateDict:
        return {key: value for key, value in state.items() if not key.startswith(tuple(f"{c}." for c in classifiers))}

    pixels = normalization(config["mean"], config["std"], prepare.channels)
    return as_tower(encoder, prepare, "image", request.dim, pixels=pixels, own_weights=own_weights, shapes_only=request.shapes_only)


TIMM = TowerLibrary("timm:NAME", build)
