"""The models of the cases by name, with random weights, and their example inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory_accuracy.cases import Case
from benchmarks.peers import declare_torchvision_schemas
from megabatch.towers.known import find_text_model
from megabatch.towers.patches import linear_image_patches

VIT_B_32: dict[str, Any] = {"projection_dim": 512}
VIT_B_16: dict[str, Any] = {"projection_dim": 512, "vision_config": {"patch_size": 16}}


@dataclass(frozen=True)
class Language:
    """A language model of transformers: the name of its config class, and the length of its texts."""

    config: str
    length: int
    masked: bool = False
    shape: dict[str, Any] = field(default_factory=dict)


LANGUAGE = {
    "bert-base": Language("BertConfig", 512, masked=True),
    "gpt2": Language("GPT2Config", 1024),
    "gpt2-medium": Language("GPT2Config", 1024, shape={"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "roberta-base": Language(
        "RobertaConfig", 512, masked=True, shape={"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
    ),
    "distilbert": Language("DistilBertConfig", 512, masked=True),
    "pythia-160m": Language(
        "GPTNeoXConfig",
        1024,
        shape={
            "vocab_size": 50304,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
        },
    ),
    "llama-small": Language(
        "LlamaConfig",
        1024,
        shape={"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    ),
    "qwen3-0.6b": Language(
        "Qwen3Config",
        1024,
        shape={
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
}


# A text embedder and the length of its texts: "embed:intfloat/e5-base-v2@256".
EMBEDDER = "embed:"
CAUSAL_LENGTH = 1024


@dataclass(frozen=True)
class Subject:
    """A function that builds a model, and one that makes inputs for a number of rows; for two towers, two of each."""

    build: Callable[[], Any]
    inputs: Any


def subject_of(case: Case) -> Subject:
    """Return the model of a case, with linear patches if the case has them."""
    described = subject(case.model)

    def build() -> Any:
        model = described.build()
        for module in model if isinstance(model, tuple) else (model,):
            linear_image_patches(module)
        return model

    return replace(described, build=build) if case.as_run else described


def subject(name: str) -> Subject:
    """Return the model of that name."""
    if name == "tiny":
        return Subject(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 64), nn.GELU(), nn.Linear(64, 10)), _images(16))
    declare_torchvision_schemas()
    if name == "tiny-clip" or name.startswith("clip-"):
        return _clip(name)
    if name in LANGUAGE:
        return _language(name)
    if name.startswith(EMBEDDER):
        return _embedder(name.removeprefix(EMBEDDER))
    if find_text_model(name) is not None:
        return _known_language(name)
    import timm

    return Subject(lambda: timm.create_model(name), _images(224))


def _images(side: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.zeros(rows, 3, side, side)


def _language(name: str) -> Subject:
    import transformers

    language = LANGUAGE[name]
    config = getattr(transformers, language.config)(**language.shape)
    maker = transformers.AutoModelForMaskedLM if language.masked else transformers.AutoModelForCausalLM

    def inputs(rows: int) -> dict[str, Tensor]:
        ids = torch.zeros(rows, language.length, dtype=torch.int64)
        return {"input_ids": ids, "labels": torch.zeros_like(ids)}

    return Subject(lambda: maker.from_config(config, attn_implementation="sdpa"), inputs)


def _known_language(name: str) -> Subject:
    """Return a language model that megabatch knows by its name."""
    import transformers

    record = find_text_model(name)
    assert record is not None and record.causal
    config = getattr(transformers, record.config)(**record.shape, use_cache=False)

    def inputs(rows: int) -> dict[str, Tensor]:
        ids = torch.zeros(rows, CAUSAL_LENGTH, dtype=torch.int64)
        return {"input_ids": ids, "labels": torch.zeros_like(ids)}

    return Subject(lambda: transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), inputs)


class _Embedder(nn.Module):
    """A text encoder with the mean over its tokens; the loss takes the embeddings for logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)

    def gradient_checkpointing_enable(self) -> None:
        self.model.gradient_checkpointing_enable()


def _embedder(name: str) -> Subject:
    import transformers

    model, _, length = name.partition("@")
    record = find_text_model(model)
    assert record is not None
    cache = {"use_cache": False} if "num_key_value_heads" in record.shape else {}
    config = getattr(transformers, record.config)(**record.shape, **cache)

    def inputs(rows: int) -> dict[str, Tensor]:
        ids = torch.ones(rows, int(length), dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return Subject(lambda: _Embedder(transformers.AutoModel.from_config(config)), inputs)


class _Tower(nn.Module):
    """One tower of a transformers CLIP, with embeddings normalised in fp32."""

    def __init__(self, encoder: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projection = encoder, projection

    def forward(self, inputs: Tensor) -> Tensor:
        return F.normalize(self.projection(self.encoder(inputs).pooler_output).float(), dim=-1)

    def gradient_checkpointing_enable(self) -> None:
        self.encoder.gradient_checkpointing_enable()


def _more_clips(large: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return shapes of CLIPs as transformers takes them: ViT-L/14 at 336 pixels, ViT-H/14, and a small one with patches of 16."""

    def tower(width: int, layers: int, heads: int, **more: int) -> dict[str, int]:
        return {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            **more,
        }

    return {
        "clip-vit-l-14-336": {**large, "vision_config": {**large["vision_config"], "image_size": 336}},
        "clip-vit-h-14": {
            "projection_dim": 1024,
            "vision_config": tower(1280, 32, 16, patch_size=14),
            "text_config": tower(1024, 24, 16),
        },
        "clip-vit-s-16": {
            "projection_dim": 384,
            "vision_config": tower(384, 12, 6, patch_size=16),
            "text_config": tower(384, 12, 6),
        },
        "clip-vit-l-16": {
            "projection_dim": 768,
            "vision_config": tower(1024, 24, 16, patch_size=16),
            "text_config": tower(768, 12, 12),
        },
    }


def _clip(name: str) -> Subject:
    from transformers import AutoModel, CLIPConfig

    from benchmarks.encoders.model import TINY, VIT_L_14

    shapes = {"clip-vit-l-14": VIT_L_14, "tiny-clip": TINY, "clip-vit-b-32": {"projection_dim": 512}, "clip-vit-b-16": VIT_B_16}
    shape = {**shapes, **_more_clips(VIT_L_14)}[name]
    config = CLIPConfig(**shape)

    def build() -> tuple[nn.Module, nn.Module]:
        model = AutoModel.from_config(config, attn_implementation="sdpa")
        return _Tower(model.vision_model, model.visual_projection), _Tower(model.text_model, model.text_projection)

    text = config.text_config

    def texts(rows: int) -> Tensor:
        # The tower looks for the end-of-text token in every text.
        return torch.full((rows, text.max_position_embeddings), text.eos_token_id, dtype=torch.int64)

    return Subject(build, (_images(config.vision_config.image_size), texts))
