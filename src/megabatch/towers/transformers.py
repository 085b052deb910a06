"""Towers from Hugging Face transformers, from a local folder or the local cache. Nothing is downloaded, no model code is run."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import without_torchvision
from .inputs import PADDING, VOCABULARY, ByteTokenizer, Kind, NormalizePixels, PrepareImage, ShapeTokens, check_is_text
from .known import find_text_model, similar_names
from .library import IMAGE_OPTIONS, TowerLibrary, TowerRequest, import_failed, normalization, split_options
from .tower import BuiltTower, StateDict, as_tower

# How the towers of this library are named.
PREFIX = "transformers:"
POOLS = ("pooler", "mean", "class")
LOCAL = {"local_files_only": True, "trust_remote_code": False}
# Attention implementations that come with transformers and PyTorch; any other name can be a kernel to download and execute.
ATTENTION = (None, "eager", "sdpa")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
# Tokens and pixels, if neither the options nor the model give them. Text embedders are trained on 128 tokens or more
# (all-MiniLM-L6-v2 on 128, by its model card); the text models of CLIP and SigLIP have fewer positions, and keep them all.
DEFAULT_LENGTH, DEFAULT_SIZE = 128, 224
# The width of models whose record gives none.
DEFAULT_WIDTH = 768


def build(request: TowerRequest) -> BuiltTower:
    """Return a text or image model: a folder with its config.json, or a name that is in the local cache.

    A folder with weights (safetensors) starts from them, one without starts from random weights.
    pool: "pooler", the model's own pooled output; "mean" over the tokens that are not padding, or over all patches; "class", the
        first position. None: the model's own output if it has one, else the mean. Most sentence models need "mean".
    length (texts): tokens that are read. Images: the options of `PrepareImage`; size, mean and standard deviation are the model's.
    """
    name = request.model
    pool = request.options.get("pool")
    if pool is not None and pool not in POOLS:
        raise ValueError(f"pool is {pool!r}: must be one of {', '.join(POOLS)}, or left out")
    with _importing():
        config, model = _load(name, shapes_only=request.shapes_only)
        if request.checkpointing:
            _enable_checkpointing(model, name)
        kind = "text" if hasattr(config, "vocab_size") else "image"
        known = ("pool", "length") if kind == "text" else ("pool", *IMAGE_OPTIONS)
        options, unknown = split_options(request.options, known)
        options.pop("pool", None)
        if unknown:
            raise ValueError(f"transformers:{name} ({kind}) has no option {min(unknown)!r}; its options are {', '.join(known)}")
        more: dict[str, Any] = {"own_weights": _own_weights, "shapes_only": request.shapes_only}
        if kind == "text":
            length = _text_length(name, config, model, options.get("length"), DEFAULT_LENGTH)
            tokenizer = ShapeTokens(length, masked=True) if request.shapes_only else _tokenizer(name, config, length)
            return as_tower(PooledText(model, pool), tokenizer, "text", request.dim, **more)
        prepare, pixels = _image_preparation(name, config, options)
        return as_tower(PooledImage(model, pool), prepare, "image", request.dim, pixels=pixels, **more)


def _own_weights(state: StateDict) -> StateDict:
    return {f"model.{key}": value for key, value in state.items()}


@contextmanager
def _importing() -> Iterator[None]:
    """Import transformers, and build its models, with a torchvision that cannot be imported hidden: the models do not need it."""
    try:
        with without_torchvision.hidden():
            import transformers  # noqa: F401

            yield
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise import_failed("transformers", "transformers", error) from error


def _load(name: str, *, shapes_only: bool = False) -> tuple[Any, nn.Module]:
    from transformers import AutoModel

    folder = Path(name).expanduser()
    if folder.is_dir():
        name = str(folder)
    config = _config(name, shapes_only=shapes_only)
    if hasattr(config, "vision_config") and hasattr(config, "text_config"):
        raise ValueError(f"transformers:{name} holds two towers; save its vision model or its text model in a folder of its own")
    _refuse_code(name, config)
    fresh = shapes_only or (folder.is_dir() and not any(folder.glob("*.safetensors")))
    if fresh and not shapes_only and any(folder.glob("*.bin")):
        raise ValueError(f"transformers:{name} holds pickled weights, which are not read; save them as safetensors")
    model: Any
    try:
        with _offline():
            if shapes_only:
                model = _without_values(lambda: AutoModel.from_config(config))
            elif fresh:
                model = AutoModel.from_config(config)
            else:
                model = AutoModel.from_pretrained(name, config=config, use_safetensors=True, **LOCAL)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"transformers:{name} cannot be loaded ({error})") from error
    # Weights that are stored in half precision are trained in fp32.
    return config, (model.get_encoder() if config.is_encoder_decoder else model).float()


def _config(name: str, *, shapes_only: bool) -> Any:
    """Return the configuration of a folder or of a name in the cache; of a known model's shape if only shapes are of interest."""
    import transformers

    try:
        with _offline():
            config = transformers.AutoConfig.from_pretrained(name, **LOCAL)
    except (OSError, ValueError) as error:
        known = find_text_model(name)
        if known is None or not shapes_only:
            near = similar_names(name) if known is None else []
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(
                f"transformers:{name} is neither a folder with a config.json nor a name in the cache ({error}){hint}"
            ) from error
        config = getattr(transformers, known.config)(**known.shape)
    # A decoder that embeds texts has no use for the keys and values of earlier calls, which a cache would hold.
    if getattr(config, "use_cache", False):
        config.use_cache = False
    return config


def _without_values(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model with weights that were never initialised, which takes no time whatever its size; its buffers are zeros."""
    try:
        with torch.device("meta"):
            model = build()
    except (NotImplementedError, RuntimeError):
        # Its constructor reads values, which meta tensors do not have.
        return build()
    # The original is kept with its replacement, so that no other tensor gets its id. Tied weights stay tied.
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                module._parameters[name] = made.setdefault(id(parameter), (parameter, new))[1]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    return model


def language_model(name: str) -> nn.Module:
    """Return the language model of a folder's or a known model's shape, with fresh weights and its head for tokens."""
    with _importing():
        from transformers import AutoModelForCausalLM

        config = _config(str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name, shapes_only=True)
        _refuse_code(name, config)
        try:
            return _without_values(lambda: AutoModelForCausalLM.from_config(config))
        except ValueError as error:
            raise ValueError(f"model is {name!r}: it is not a language model that predicts the next token ({error})") from error


def sequence_length(name: str, wanted: int | None, usual: int) -> int:
    """Return the tokens of a language model's sequences: as wanted, else as usual, or as many as it has positions for.

    Raises ValueError if it has fewer positions than wanted.

    >>> sequence_length("gpt2", None, 4096), sequence_length("bert-base-uncased", 128, 4096)
    (1024, 128)
    """
    known = None if Path(name).expanduser().is_dir() else find_text_model(name)
    if known is not None and (wanted is None or wanted <= known.length):
        # Neither transformers nor the model is needed.
        return min(usual, known.length) if wanted is None else wanted
    model = language_model(name)
    return _text_length(name, model.config, model, wanted, usual)


def _text_length(name: str, config: Any, model: nn.Module, wanted: int | None, usual: int) -> int:
    """Return the tokens that are read of a text, as `sequence_length` does, of a model that is built."""
    limit = _learned_positions(model)
    # Positions that are computed have no end: `max_position_embeddings` is then the length that the model was made for.
    lengths = [limit, getattr(config, "max_position_embeddings", None)]
    most = min((length for length in lengths if length is not None and length > 0), default=usual)
    if wanted is None:
        return min(usual, most)
    if type(wanted) is not int or wanted < 1:
        raise ValueError(f"length is {wanted!r}: must be a number of tokens, at least 1")
    if limit is not None and wanted > most:
        raise ValueError(
            f"length is {wanted:,}: {PREFIX}{name} has positions for {most:,} tokens; give {most:,} or less, or name a model that"
            " reads longer texts"
        )
    return wanted


def _learned_positions(model: nn.Module) -> int | None:
    """Return the tokens for which a model has learned positions; None if it computes positions, for texts of any length."""
    tables = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and re.search(r"position|^wpe$", name.rpartition(".")[2])
    ]
    # RoBERTa and alike count positions from behind the one of padding.
    skipped = [0 if table.padding_idx is None else table.padding_idx + 1 for table in tables]
    return min((table.num_embeddings - skip for table, skip in zip(tables, skipped, strict=True)), default=None)


def _refuse_code(name: str, config: Any) -> None:
    """Raise ValueError if a model's configuration asks for foreign attention kernels or for quantized weights."""
    for part in (config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", ()))):
        attention = getattr(part, "_attn_implementation", None)
        if attention not in ATTENTION:
            raise ValueError(
                f"transformers:{name} asks for the attention {attention!r} in its config.json, which can be code from the network;"
                ' set attn_implementation to "sdpa" or "eager" there'
            )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"transformers:{name} holds quantized weights, which cannot be trained; save it in fp32 or bf16")


@contextmanager
def _offline() -> Iterator[None]:
    """Keep the libraries of Hugging Face from downloading anything, whatever a configuration refers to."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _enable_checkpointing(model: nn.Module, name: str) -> None:
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    except ValueError as error:
        raise ValueError(f"checkpointing is true: transformers:{name} has no gradient checkpointing ({error})") from error


def _image_preparation(name: str, config: Any, options: Mapping[str, Any]) -> tuple[PrepareImage, NormalizePixels]:
    """Return the preparation and the normalisation of the model and its folder, changed by the options."""
    path = Path(name).expanduser() / "preprocessor_config.json"
    preprocessor = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    size = getattr(config, "image_size", DEFAULT_SIZE)
    defaults = {"size": size if isinstance(size, int) else size[0], "channels": getattr(config, "num_channels", 3)}
    prepare = PrepareImage(**{**defaults, **options})
    half = [0.5] * prepare.channels
    return prepare, normalization(preprocessor.get("image_mean", half), preprocessor.get("image_std", half), prepare.channels)


def _tokenizer(name: str, config: Any, length: int) -> ByteTokens | FolderTokenizer:
    folder = Path(name).expanduser()
    if not folder.is_dir() or any((folder / file).is_file() for file in TOKENIZER_FILES):
        return FolderTokenizer(str(folder) if folder.is_dir() else name, length)
    if config.vocab_size < VOCABULARY:
        raise ValueError(
            f"transformers:{name} has no tokenizer, and its vocabulary of {config.vocab_size} is too small for bytes,"
            f" which need {VOCABULARY}; put the tokenizer's files beside config.json"
        )
    return ByteTokens(ByteTokenizer(length))


@dataclass(frozen=True)
class ByteTokens:
    """Convert a text to the inputs of a transformers model, with one token per byte."""

    tokenizer: ByteTokenizer

    def __call__(self, raw: Any, seed: int | None) -> dict[str, Tensor]:
        tokens = self.tokenizer(raw, seed).long()
        return {"input_ids": tokens, "attention_mask": (tokens != PADDING).long()}


@functools.lru_cache(maxsize=2)
def _folder_tokenizer(name: str) -> Any:
    with _importing():
        from transformers import AutoTokenizer

        with _offline():
            tokenizer = AutoTokenizer.from_pretrained(name, **LOCAL)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@dataclass(frozen=True)
class FolderTokenizer:
    """Convert a text with the tokenizer in the model's folder. Only the name is pickled for worker processes."""

    name: str
    length: int

    def __call__(self, raw: Any, seed: int | None) -> dict[str, Tensor]:
        check_is_text(raw)
        encoded = _folder_tokenizer(self.name)(raw, truncation=True, max_length=self.length, padding="max_length")
        return {key: torch.tensor(encoded[key]) for key in ("input_ids", "attention_mask")}


class PooledText(nn.Module):
    """A text model with one output vector per row."""

    def __init__(self, model: nn.Module, pool: str | None) -> None:
        super().__init__()
        self.model, self.pool = model, pool

    def forward(self, rows: Mapping[str, Tensor]) -> Tensor:
        out = self.model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"])
        mask = rows["attention_mask"].unsqueeze(-1).to(out.last_hidden_state.dtype)
        return pooled(out, self.pool, lambda hidden: (hidden * mask).sum(1) / mask.sum(1).clamp(min=1))


class PooledImage(nn.Module):
    """An image model with one output vector per row; the pixels of a feature map count as positions."""

    def __init__(self, model: nn.Module, pool: str | None) -> None:
        super().__init__()
        self.model, self.pool = model, pool

    def forward(self, rows: Tensor) -> Tensor:
        out = self.model(pixel_values=rows)
        return pooled(out, self.pool, lambda hidden: hidden.flatten(2).mean(2) if hidden.ndim == 4 else hidden.mean(1))


def pooled(out: Any, pool: str | None, mean: Any) -> Tensor:
    """Return one vector per row from a model's output. mean: averages the last hidden state."""
    pooler_output = getattr(out, "pooler_output", None)
    if pool == "pooler" and pooler_output is None:
        raise ValueError("pool is 'pooler': the model has no pooled output; use 'mean' or 'class'")
    if pooler_output is not None and pool in (None, "pooler"):
        # Convolutional models keep two spatial dimensions of size 1.
        return pooler_output.flatten(1)
    return out.last_hidden_state[:, 0] if pool == "class" else mean(out.last_hidden_state)


def own_dim(model: str) -> int | None:
    """Return the width of a model's pooled output, or None if its configuration cannot be read."""
    try:
        with _importing(), _offline():
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(str(Path(model).expanduser()), **LOCAL)
    except (OSError, ValueError):
        # `build` says what is wrong with a name that is not known either.
        known = find_text_model(model)
        return None if known is None else known.shape.get("hidden_size", known.shape.get("n_embd", DEFAULT_WIDTH))
    width = getattr(config, "hidden_size", None)
    return width if isinstance(width, int) else None


def kind_of(model: str, side: str) -> Kind:
    """Return what a model reads: by its record, or by the configuration in its folder."""
    if find_text_model(model) is not None:
        return "text"
    path = Path(model).expanduser() / "config.json"
    return "text" if path.is_file() and "vocab_size" in json.loads(path.read_text("utf-8")) else "image"


def holds_weights(model: str) -> bool:
    """Return whether `build` finds weights: in the folder, or in the cache for a name."""
    folder = Path(model).expanduser()
    return not folder.is_dir() or any(folder.glob("*.safetensors"))


TRANSFORMERS = TowerLibrary(
    "transformers:FOLDER", build, partner="x", own_dim=own_dim, holds_weights=holds_weights, kind_of=kind_of
)
