"""Encoders of other packages, by name: timm, OpenCLIP, and functions of your own. Nothing is downloaded."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from . import without_torchvision
from .image_transform import Pixels, PrepareImage
from .projection import State, fit
from .tokenizer import ByteTokenizer
from .tower import Tower

IMAGE_OPTIONS = tuple(field.name for field in fields(PrepareImage))
# What a Module of your own may be given, and the options of its preparation.
PREPARATIONS = {None: (), "image": IMAGE_OPTIONS, "text": ("length",)}
# Options by which timm and OpenCLIP would read a file, unpickle it or download: weights come from the tower's `weights` alone.
LOADING_OPTIONS = re.compile(r"pretrained|^hf_|^(checkpoint_path|cache_dir|load_weights|load_weights_only|weights_only|file|url)$")
LOADING_VALUES = re.compile(r"^(hf[-_]hub|local-dir|https?|file):")


def from_timm(name: str, dim: int, options: Mapping[str, Any], *, checkpointing: bool) -> Tower:
    """A timm model, with its own size, mean and deviation. Options: those of `PrepareImage`, and of `timm.create_model`."""
    try:
        timm = without_torchvision.import_timm()
    except Exception as error:
        raise unusable("timm", error) from error
    if not timm.is_model(name):
        raise unknown("timm", name, timm.list_models())
    refuse_loading(f"timm:{name}", options)
    ours, theirs = split(options, IMAGE_OPTIONS)
    # Only models that do not take any size have an argument for it.
    if "size" in ours and getattr(timm.get_pretrained_cfg(name), "fixed_input_size", False):
        theirs["img_size"] = ours["size"]
    try:
        encoder: Any = timm.create_model(name, num_classes=0, in_chans=ours.get("channels", 3), **theirs)
    except (TypeError, AssertionError, ImportError) as error:
        raise ValueError(f"timm:{name} does not take the options {dict(options)!r} ({error})") from error
    config = timm.data.resolve_model_data_config(encoder)
    ours.setdefault("size", config["input_size"][-1])
    prepare = PrepareImage(**ours)
    if checkpointing:
        checkpoint_inside(encoder, f"timm:{name}")
    classifiers = encoder.pretrained_cfg.get("classifier") or ()
    classifiers = (classifiers,) if isinstance(classifiers, str) else tuple(classifiers)

    def own_weights(state: State) -> State:
        return {key: value for key, value in state.items() if not key.startswith(tuple(f"{c}." for c in classifiers))}

    pixels = normalise(config["mean"], config["std"], prepare.channels)
    return fit(encoder, prepare, "image", dim, pixels=pixels, own_weights=own_weights)


def from_open_clip(name: str, dim: int, options: Mapping[str, Any], *, side: str, checkpointing: bool) -> Tower:
    """The image tower (side x) or the text tower (side y) of an OpenCLIP model, from its configuration.

    Options: those of `PrepareImage`, and of `open_clip.create_model`; part = "image" or "text" overrules the side.
    """
    try:
        open_clip = without_torchvision.import_open_clip()
    except Exception as error:
        raise unusable("open_clip", error) from error
    if name not in open_clip.list_models():
        raise unknown("open_clip", name, open_clip.list_models())
    refuse_loading(f"open_clip:{name}", options)
    ours, theirs = split(options, (*IMAGE_OPTIONS, "part"))
    part = ours.pop("part", "image" if side == "x" else "text")
    if part not in ("image", "text"):
        raise ValueError(f"part is {part!r}: must be 'image' or 'text'")
    texts = open_clip.get_model_config(name)["text_cfg"]
    if texts.get("hf_model_name") or (part == "text" and texts.get("hf_tokenizer_name")):
        raise ValueError(f"open_clip:{name} would have to be downloaded in part; name a model whose text tower is OpenCLIP's own")
    model = _create_open_clip(open_clip.create_model, name, ours.get("size"), theirs)
    encoder = model.visual if part == "image" else model.text
    if checkpointing:
        checkpoint_inside(encoder, f"open_clip:{name}")
    prefix = "visual." if part == "image" else "text."

    def own_weights(state: State) -> State:
        state = open_clip.model.convert_to_custom_text_state_dict(state)
        return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}

    if part == "text":
        return fit(encoder, OpenClipTokenizer(name), "text", dim, own_weights=own_weights)
    if ours.get("channels", 3) != 3:
        raise ValueError(f"channels is {ours['channels']}: open_clip:{name} takes colours, channels = 3")
    ours.setdefault("size", encoder.image_size if isinstance(encoder.image_size, int) else encoder.image_size[0])
    pixels = normalise(encoder.image_mean, encoder.image_std, 3)
    return fit(encoder, PrepareImage(**ours), "image", dim, pixels=pixels, own_weights=own_weights)


def _create_open_clip(create: Callable[..., nn.Module], name: str, size: int | None, options: Mapping[str, Any]) -> Any:
    # It warns of fresh weights, which are what was asked for; those of a file come later.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return create(name, pretrained_text=False, force_custom_text=True, force_image_size=size, **options)
    except Exception as error:
        raise ValueError(f"open_clip:{name} cannot be built with the options {dict(options)!r} ({error})") from error
    finally:
        logging.disable(before)


@functools.lru_cache(maxsize=2)
def _open_clip_tokenizer(name: str) -> Callable[[str], Tensor]:
    return without_torchvision.import_open_clip().get_tokenizer(name)


@dataclass(frozen=True)
class OpenClipTokenizer:
    """Makes of a text the tokens of an OpenCLIP model. Only the name travels to worker processes."""

    name: str

    def __call__(self, raw: Any, seed: int | None) -> Tensor:
        if not isinstance(raw, str):
            raise ValueError(f"a tower for texts was given a {type(raw).__name__}: this side of the data is no text")
        return _open_clip_tokenizer(self.name)(raw)[0]


def from_function(name: str, dim: int, options: Mapping[str, Any], *, checkpointing: bool) -> Tower:
    """What the function "package.module:function" returns, called with the options: a Tower; or a Module, with the option kind.

    kind = "image": the Module is given normalised numbers, after `PrepareImage`. kind = "text": the tokens of `ByteTokenizer`.
    The options of these reach the function too where it has arguments of their names.
    """
    if checkpointing:
        raise ValueError(f"checkpointing is true: {name} is your function; let it turn gradient checkpointing on, by an option")
    ours, theirs = split(options, ("kind",))
    kind = ours.get("kind")
    if kind not in PREPARATIONS:
        raise ValueError(f"kind is {kind!r}: must be 'image' or 'text', or left out where the function returns a Tower")
    ours, theirs = split(theirs, PREPARATIONS[kind])
    try:
        function = pkgutil.resolve_name(name)
        signature = inspect.signature(function)
        arguments = theirs | {key: value for key, value in ours.items() if key in signature.parameters}
        signature.bind(**arguments)
    except Exception as error:
        raise ValueError(f"{name} cannot be called with {dict(options)!r} ({type(error).__name__}: {error})") from error
    made = function(**arguments)
    if isinstance(made, Tower):
        return fit(made.module, made.prepare, made.kind, dim)
    if not isinstance(made, nn.Module):
        raise ValueError(f"{name} returned a {type(made).__name__}: must be a torch.nn.Module, or a Tower")
    if kind is None:
        raise ValueError(f"{name} returned a Module: give the option kind = 'image' or 'text', which says what it takes")
    if kind == "text":
        return fit(made, ByteTokenizer(**ours), "text", dim)
    return fit(made, PrepareImage(**ours), "image", dim, pixels=Pixels())


def split(options: Mapping[str, Any], names: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of these names, and the others."""
    ours = {key: value for key, value in options.items() if key in set(names)}
    return ours, {key: value for key, value in options.items() if key not in ours}


def refuse_loading(model: str, options: Any) -> None:
    """Raise ValueError where an option, also one inside a table, would have the library read a file or download."""
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


def normalise(mean: Sequence[float], std: Sequence[float], channels: int) -> Pixels:
    """As the library wants it; grey takes the means of the colours' numbers."""
    if channels == 1:
        mean, std = ([sum(values) / len(values)] for values in (mean, std))
    return Pixels(mean, std)


def checkpoint_inside(encoder: nn.Module, name: str) -> None:
    """Turns on gradient checkpointing by the encoder's own switch, or raises."""
    try:
        encoder.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError):
        on = False
    else:
        # Some switches do nothing.
        on = any(getattr(module, "grad_checkpointing", False) for module in encoder.modules())
    if not on:
        raise ValueError(
            f"checkpointing is true: {name} has no gradient checkpointing; leave it out, and take a smaller batch.chunk"
        )


def unknown(library: str, name: str, known: Sequence[str]) -> ValueError:
    near = difflib.get_close_matches(name, known, 3)
    return ValueError(f"{library} knows no model {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))


def unusable(library: str, error: Exception) -> ValueError:
    if isinstance(error, ModuleNotFoundError) and error.name == library:
        package = {"open_clip": "open_clip_torch"}.get(library, library)
        return ValueError(f"{library} is not installed: pip install {package}; the towers vit, cnn and text need no package")
    broken = without_torchvision.error_of_import()
    mend = "" if broken is None else f"; nor can torchvision, which it uses. {without_torchvision.remedy()}"
    return ValueError(
        f"{library} cannot be imported ({type(error).__name__}: {error}){mend}. The towers vit, cnn and text need no package"
    )
