"""Models as people name them: the shapes of widely used ones, so that a plan needs no download.

A record holds facts of the model's published configuration. A text model's is a configuration class of transformers with the
arguments that differ from its defaults; image models and pairs of towers are names in timm and OpenCLIP, which know their shapes.
"""

# One record a line, however long.
# ruff: noqa: E501
from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# Where the shapes of text models come from, and the rounded parameter counts.
MODEL_CARD = "config.json and model card on Hugging Face"


@dataclass(frozen=True)
class KnownText:
    """A text model of transformers.

    parameters: as published, rounded, without a head for tokens unless `causal`. config: its configuration class. shape: arguments
    of the class. length: the longest text that it takes, in tokens. causal: whether it is a language model; as an encoder it then
    has no head.
    """

    name: str
    parameters: float
    config: str
    shape: Mapping[str, Any] = field(default_factory=dict)
    length: int = 512
    causal: bool = False
    source: str = MODEL_CARD


def _bert(name: str, parameters: float, width: int = 768, layers: int = 12, **more: Any) -> KnownText:
    heads = {384: 12, 1024: 16}.get(width, 12)
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * width}
    return KnownText(name, parameters, "BertConfig", {**shape, **more})


def _roberta(name: str, parameters: float, config: str = "RobertaConfig", width: int = 768, **more: Any) -> KnownText:
    layers, heads = (24, 16) if width == 1024 else (12, 12)
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * width}
    vocabulary = {
        "vocab_size": 50265 if config == "RobertaConfig" else 250002,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
    }
    length = more.get("max_position_embeddings", 514) - 2
    return KnownText(name, parameters, config, {**shape, **vocabulary, **more}, length)


def _deberta(name: str, parameters: float, width: int, layers: int) -> KnownText:
    shape = {
        "vocab_size": 128100,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
        "type_vocab_size": 0,
        "relative_attention": True,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "max_relative_positions": -1,
        "position_biased_input": False,
    }
    return KnownText(name, parameters, "DebertaV2Config", shape)


def _decoder(
    name: str,
    parameters: float,
    config: str,
    width: int,
    inner: int,
    layers: int,
    heads: tuple[int, int],
    vocabulary: int,
    *,
    causal: bool = True,
    length: int = 32768,
    **more: Any,
) -> KnownText:
    """heads: of queries, and of keys and values."""
    shape = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
    }
    return KnownText(name, parameters, config, {**shape, **more}, length, causal)


def _gpt2(name: str, parameters: float, width: int, layers: int, heads: int) -> KnownText:
    return KnownText(name, parameters, "GPT2Config", {"n_embd": width, "n_layer": layers, "n_head": heads}, 1024, causal=True)


def _pythia(size: str, parameters: float, width: int, layers: int, heads: int, vocabulary: int = 50304) -> KnownText:
    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "num_attention_heads": heads}
    shape |= {"vocab_size": vocabulary, "max_position_embeddings": 2048}
    return KnownText(f"EleutherAI/pythia-{size}", parameters, "GPTNeoXConfig", shape, 2048, causal=True)


_TIED = {"tie_word_embeddings": True}
_MODERN_LARGE = {"hidden_size": 1024, "intermediate_size": 2624, "num_hidden_layers": 28, "num_attention_heads": 16}
_MPNET = {"max_position_embeddings": 514}
_BGE_M3 = {"max_position_embeddings": 8194}
M, B = 1e6, 1e9

TEXT_MODELS = (
    # BERT and models of its shape.
    _bert("bert-base-uncased", 109.5 * M),
    _bert("bert-base-cased", 108.3 * M, vocab_size=28996),
    _bert("bert-base-multilingual-cased", 177.9 * M, vocab_size=119547),
    _bert("bert-large-uncased", 335.1 * M, 1024, 24),
    _bert("allenai/scibert_scivocab_uncased", 109.9 * M, vocab_size=31090),
    _bert("facebook/contriever", 109.5 * M),
    _bert("sentence-transformers/all-MiniLM-L6-v2", 22.7 * M, 384, 6),
    _bert("sentence-transformers/all-MiniLM-L12-v2", 33.4 * M, 384),
    _bert("sentence-transformers/multi-qa-MiniLM-L6-cos-v1", 22.7 * M, 384, 6),
    _bert("sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2", 117.7 * M, 384, vocab_size=250037),
    _bert("intfloat/e5-small-v2", 33.4 * M, 384),
    _bert("intfloat/e5-base-v2", 109.5 * M),
    _bert("intfloat/e5-large-v2", 335.1 * M, 1024, 24),
    _bert("intfloat/multilingual-e5-small", 117.7 * M, 384, vocab_size=250037),
    _bert("BAAI/bge-small-en-v1.5", 33.4 * M, 384),
    _bert("BAAI/bge-base-en-v1.5", 109.5 * M),
    _bert("BAAI/bge-large-en-v1.5", 335.1 * M, 1024, 24),
    _bert("thenlper/gte-small", 33.4 * M, 384),
    _bert("thenlper/gte-base", 109.5 * M),
    _bert("thenlper/gte-large", 335.1 * M, 1024, 24),
    _bert("mixedbread-ai/mxbai-embed-large-v1", 335.1 * M, 1024, 24),
    _bert("Snowflake/snowflake-arctic-embed-xs", 22.7 * M, 384, 6),
    _bert("Snowflake/snowflake-arctic-embed-s", 33.4 * M, 384),
    _bert("Snowflake/snowflake-arctic-embed-m", 109.5 * M),
    _bert("Snowflake/snowflake-arctic-embed-l", 335.1 * M, 1024, 24),
    # RoBERTa, XLM-RoBERTa, MPNet, DistilBERT, ELECTRA, ALBERT, DeBERTa, ModernBERT.
    _roberta("roberta-base", 124.6 * M),
    _roberta("roberta-large", 355.4 * M, width=1024),
    _roberta("sentence-transformers/all-roberta-large-v1", 355.4 * M, width=1024),
    _roberta("xlm-roberta-base", 278.0 * M, "XLMRobertaConfig"),
    _roberta("xlm-roberta-large", 559.9 * M, "XLMRobertaConfig", 1024),
    _roberta("intfloat/multilingual-e5-base", 278.0 * M, "XLMRobertaConfig"),
    _roberta("intfloat/multilingual-e5-large", 559.9 * M, "XLMRobertaConfig", 1024),
    _roberta("BAAI/bge-m3", 567.8 * M, "XLMRobertaConfig", 1024, **_BGE_M3),
    _roberta("Snowflake/snowflake-arctic-embed-l-v2.0", 567.8 * M, "XLMRobertaConfig", 1024, **_BGE_M3),
    KnownText("sentence-transformers/all-mpnet-base-v2", 109.5 * M, "MPNetConfig", _MPNET),
    KnownText("sentence-transformers/multi-qa-mpnet-base-dot-v1", 109.5 * M, "MPNetConfig", _MPNET),
    KnownText("sentence-transformers/paraphrase-mpnet-base-v2", 109.5 * M, "MPNetConfig", _MPNET),
    KnownText("distilbert-base-uncased", 66.4 * M, "DistilBertConfig"),
    KnownText("distilroberta-base", 82.1 * M, "RobertaConfig", {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "num_hidden_layers": 6}),
    KnownText("google/electra-base-discriminator", 108.9 * M, "ElectraConfig", {"embedding_size": 768, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}),
    KnownText("google/electra-small-discriminator", 13.5 * M, "ElectraConfig"),
    KnownText("albert-base-v2", 11.7 * M, "AlbertConfig", {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}),
    _deberta("microsoft/deberta-v3-small", 141.3 * M, 768, 6),
    _deberta("microsoft/deberta-v3-base", 183.8 * M, 768, 12),
    _deberta("microsoft/deberta-v3-large", 434.0 * M, 1024, 24),
    KnownText("answerdotai/ModernBERT-base", 149.0 * M, "ModernBertConfig", length=8192),
    KnownText("answerdotai/ModernBERT-large", 394.8 * M, "ModernBertConfig", _MODERN_LARGE, 8192),
    KnownText("Alibaba-NLP/gte-modernbert-base", 149.0 * M, "ModernBertConfig", length=8192),
    KnownText("nomic-ai/modernbert-embed-base", 149.0 * M, "ModernBertConfig", length=8192),
    # Nomic's own class is not needed: rotary positions add no weights, and the gated layer has two matrices of the inner width.
    _decoder("nomic-ai/nomic-embed-text-v1.5", 137 * M, "LlamaConfig", 768, 3072, 12, (12, 12), 30528, causal=False, length=8192),
    # Embedders that are decoders.
    _decoder("Qwen/Qwen3-Embedding-0.6B", 596 * M, "Qwen3Config", 1024, 3072, 28, (16, 8), 151669, causal=False, head_dim=128),
    _decoder("Qwen/Qwen3-Embedding-4B", 4.02 * B, "Qwen3Config", 2560, 9728, 36, (32, 8), 151665, causal=False, head_dim=128),
    _decoder("Qwen/Qwen3-Embedding-8B", 7.57 * B, "Qwen3Config", 4096, 12288, 36, (32, 8), 151665, causal=False, head_dim=128),
    _decoder("intfloat/e5-mistral-7b-instruct", 7.11 * B, "MistralConfig", 4096, 14336, 32, (32, 8), 32000, causal=False),
    _decoder("Alibaba-NLP/gte-Qwen2-1.5B-instruct", 1.54 * B, "Qwen2Config", 1536, 8960, 28, (12, 2), 151646, causal=False),
    _decoder("Alibaba-NLP/gte-Qwen2-7B-instruct", 7.07 * B, "Qwen2Config", 3584, 18944, 28, (28, 4), 151646, causal=False),
    # Language models.
    _gpt2("gpt2", 124.4 * M, 768, 12, 12),
    _gpt2("gpt2-medium", 354.8 * M, 1024, 24, 16),
    _gpt2("gpt2-large", 774.0 * M, 1280, 36, 20),
    _gpt2("gpt2-xl", 1.558 * B, 1600, 48, 25),
    _pythia("70m", 70.4 * M, 512, 6, 8),
    _pythia("160m", 162.3 * M, 768, 12, 12),
    _pythia("410m", 405.3 * M, 1024, 24, 16),
    _pythia("1b", 1.012 * B, 2048, 16, 8),
    _pythia("1.4b", 1.415 * B, 2048, 24, 16),
    _pythia("2.8b", 2.775 * B, 2560, 32, 32),
    _pythia("6.9b", 6.857 * B, 4096, 32, 32, 50432),
    _decoder("TinyLlama/TinyLlama-1.1B", 1.10 * B, "LlamaConfig", 2048, 5632, 22, (32, 4), 32000, length=2048),
    _decoder("HuggingFaceTB/SmolLM2-135M", 134.5 * M, "LlamaConfig", 576, 1536, 30, (9, 3), 49152, length=8192, **_TIED),
    _decoder("HuggingFaceTB/SmolLM2-360M", 361.8 * M, "LlamaConfig", 960, 2560, 32, (15, 5), 49152, length=8192, **_TIED),
    _decoder("HuggingFaceTB/SmolLM2-1.7B", 1.71 * B, "LlamaConfig", 2048, 8192, 24, (32, 32), 49152, length=8192, **_TIED),
    _decoder("meta-llama/Llama-2-7b", 6.74 * B, "LlamaConfig", 4096, 11008, 32, (32, 32), 32000, length=4096),
    _decoder("meta-llama/Llama-2-13b", 13.02 * B, "LlamaConfig", 5120, 13824, 40, (40, 40), 32000, length=4096),
    _decoder("meta-llama/Llama-2-70b", 68.98 * B, "LlamaConfig", 8192, 28672, 80, (64, 8), 32000, length=4096),
    _decoder("meta-llama/Llama-3.2-1B", 1.24 * B, "LlamaConfig", 2048, 8192, 16, (32, 8), 128256, length=131072, head_dim=64, **_TIED),
    _decoder("meta-llama/Llama-3.2-3B", 3.21 * B, "LlamaConfig", 3072, 8192, 28, (24, 8), 128256, length=131072, head_dim=128, **_TIED),
    _decoder("meta-llama/Llama-3.1-8B", 8.03 * B, "LlamaConfig", 4096, 14336, 32, (32, 8), 128256, length=131072),
    _decoder("meta-llama/Meta-Llama-3-8B", 8.03 * B, "LlamaConfig", 4096, 14336, 32, (32, 8), 128256, length=8192),
    _decoder("meta-llama/Llama-3.1-70B", 70.55 * B, "LlamaConfig", 8192, 28672, 80, (64, 8), 128256, length=131072),
    _decoder("mistralai/Mistral-7B-v0.1", 7.24 * B, "MistralConfig", 4096, 14336, 32, (32, 8), 32000),
    _decoder("mistralai/Mistral-7B-v0.3", 7.25 * B, "MistralConfig", 4096, 14336, 32, (32, 8), 32768),
    _decoder("Qwen/Qwen2.5-0.5B", 494.0 * M, "Qwen2Config", 896, 4864, 24, (14, 2), 151936, **_TIED),
    _decoder("Qwen/Qwen2.5-1.5B", 1.54 * B, "Qwen2Config", 1536, 8960, 28, (12, 2), 151936, **_TIED),
    _decoder("Qwen/Qwen2.5-3B", 3.09 * B, "Qwen2Config", 2048, 11008, 36, (16, 2), 151936, **_TIED),
    _decoder("Qwen/Qwen2.5-7B", 7.62 * B, "Qwen2Config", 3584, 18944, 28, (28, 4), 152064),
    _decoder("Qwen/Qwen2.5-14B", 14.77 * B, "Qwen2Config", 5120, 13824, 48, (40, 8), 152064),
    _decoder("Qwen/Qwen2.5-32B", 32.76 * B, "Qwen2Config", 5120, 27648, 64, (40, 8), 152064),
    _decoder("Qwen/Qwen2.5-72B", 72.71 * B, "Qwen2Config", 8192, 29568, 80, (64, 8), 152064),
    _decoder("Qwen/Qwen3-0.6B", 596 * M, "Qwen3Config", 1024, 3072, 28, (16, 8), 151936, head_dim=128, **_TIED),
    _decoder("Qwen/Qwen3-1.7B", 1.72 * B, "Qwen3Config", 2048, 6144, 28, (16, 8), 151936, head_dim=128, **_TIED),
    _decoder("Qwen/Qwen3-4B", 4.02 * B, "Qwen3Config", 2560, 9728, 36, (32, 8), 151936, head_dim=128, **_TIED),
    _decoder("Qwen/Qwen3-8B", 8.19 * B, "Qwen3Config", 4096, 12288, 36, (32, 8), 151936, head_dim=128),
    _decoder("Qwen/Qwen3-14B", 14.77 * B, "Qwen3Config", 5120, 17408, 40, (40, 8), 151936, head_dim=128),
)  # fmt: skip

# Names on Hugging Face, and names that papers and torchvision use, as names in the libraries that hold the shapes.
_OPENAI, _LAION, _SIGLIP = "open_clip:{}-quickgelu", "open_clip:{}", "open_clip:ViT-{}-SigLIP{}"
IMAGE_MODELS: Mapping[str, str] = {
    "openai/clip-vit-base-patch32": _OPENAI.format("ViT-B-32"),
    "openai/clip-vit-base-patch16": _OPENAI.format("ViT-B-16"),
    "openai/clip-vit-large-patch14": _OPENAI.format("ViT-L-14"),
    "openai/clip-vit-large-patch14-336": _OPENAI.format("ViT-L-14-336"),
    "laion/CLIP-ViT-B-32-laion2B-s34B-b79K": _LAION.format("ViT-B-32"),
    "laion/CLIP-ViT-B-16-laion2B-s34B-b88K": _LAION.format("ViT-B-16"),
    "laion/CLIP-ViT-L-14-laion2B-s32B-b82K": _LAION.format("ViT-L-14"),
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": _LAION.format("ViT-H-14"),
    "laion/CLIP-ViT-g-14-laion2B-s34B-b88K": _LAION.format("ViT-g-14"),
    "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k": _LAION.format("ViT-bigG-14"),
    "google/siglip-base-patch16-224": _SIGLIP.format("B-16", ""),
    "google/siglip-base-patch16-256": _SIGLIP.format("B-16", "-256"),
    "google/siglip-base-patch16-384": _SIGLIP.format("B-16", "-384"),
    "google/siglip-base-patch16-512": _SIGLIP.format("B-16", "-512"),
    "google/siglip-large-patch16-256": _SIGLIP.format("L-16", "-256"),
    "google/siglip-large-patch16-384": _SIGLIP.format("L-16", "-384"),
    "google/siglip-so400m-patch14-224": _SIGLIP.format("SO400M-14", ""),
    "google/siglip-so400m-patch14-384": _SIGLIP.format("SO400M-14", "-384"),
    "google/siglip2-base-patch16-224": _SIGLIP.format("B-16", "2"),
    "google/siglip2-base-patch16-256": _SIGLIP.format("B-16", "2-256"),
    "google/siglip2-large-patch16-256": _SIGLIP.format("L-16", "2-256"),
    "google/siglip2-so400m-patch14-384": _SIGLIP.format("SO400M-14", "2-378"),
    "google/vit-base-patch16-224": "timm:vit_base_patch16_224",
    "google/vit-base-patch16-224-in21k": "timm:vit_base_patch16_224",
    "google/vit-large-patch16-224": "timm:vit_large_patch16_224",
    "google/vit-huge-patch14-224-in21k": "timm:vit_huge_patch14_224",
    "facebook/deit-tiny-patch16-224": "timm:deit_tiny_patch16_224",
    "facebook/deit-small-patch16-224": "timm:deit_small_patch16_224",
    "facebook/deit-base-patch16-224": "timm:deit_base_patch16_224",
    "facebook/dinov2-small": "timm:vit_small_patch14_dinov2",
    "facebook/dinov2-base": "timm:vit_base_patch14_dinov2",
    "facebook/dinov2-large": "timm:vit_large_patch14_dinov2",
    "facebook/dinov2-giant": "timm:vit_giant_patch14_dinov2",
    "dinov2_vits14": "timm:vit_small_patch14_dinov2",
    "dinov2_vitb14": "timm:vit_base_patch14_dinov2",
    "dinov2_vitl14": "timm:vit_large_patch14_dinov2",
    "dinov2_vitg14": "timm:vit_giant_patch14_dinov2",
    "facebook/convnext-tiny-224": "timm:convnext_tiny",
    "facebook/convnext-small-224": "timm:convnext_small",
    "facebook/convnext-base-224": "timm:convnext_base",
    "facebook/convnext-large-224": "timm:convnext_large",
    "facebook/convnextv2-tiny-22k-224": "timm:convnextv2_tiny",
    "facebook/convnextv2-base-22k-224": "timm:convnextv2_base",
    "microsoft/swin-tiny-patch4-window7-224": "timm:swin_tiny_patch4_window7_224",
    "microsoft/swin-base-patch4-window7-224": "timm:swin_base_patch4_window7_224",
    "microsoft/resnet-18": "timm:resnet18",
    "microsoft/resnet-50": "timm:resnet50",
    "microsoft/resnet-101": "timm:resnet101",
    "google/efficientnet-b0": "timm:efficientnet_b0",
    **{
        name: f"timm:{name}"
        for name in (
            "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet50_2", "resnext50_32x4d", "densenet121",
            "vgg16", "efficientnet_b0", "efficientnet_b3", "mobilenetv3_large_100", "regnety_032", "convnext_tiny",
            "convnext_small", "convnext_base", "convnext_large", "swin_tiny_patch4_window7_224", "swin_base_patch4_window7_224",
            "vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224", "vit_base_patch32_224",
            "vit_large_patch16_224", "vit_huge_patch14_224", "deit_small_patch16_224", "deit_base_patch16_224",
        )
    },
}  # fmt: skip
# Former names, and suffixes of variants with the same shape.
_FORMER = {
    "google-bert/": "",
    "FacebookAI/": "",
    "distilbert/": "",
    "openai-community/": "",
    "albert/": "",
    "microsoft/mpnet": "mpnet",
}
_VARIANT = re.compile(r"-(hf|instruct|chat|chat-hf|base|it|v\d(\.\d)?|intermediate-step.*)$", re.IGNORECASE)


def find_text_model(name: str) -> KnownText | None:
    """Return the record of a text model's name, its former name, its name without the owner, or a variant of the same shape.

    >>> find_text_model("all-MiniLM-L6-v2").parameters, find_text_model("meta-llama/Llama-3.1-8B-Instruct").name
    (22700000.0, 'meta-llama/Llama-3.1-8B')
    """
    known = {key: record for record in TEXT_MODELS for key in (record.name.lower(), record.name.lower().rpartition("/")[2])}
    return next((known[key] for key in _spellings(name) if key in known), None)


def find_image_model(name: str) -> str | None:
    """Return the tower's name in timm or OpenCLIP for an image model, or a pair of towers, as people name it."""
    known = {key.lower(): tower for key, tower in IMAGE_MODELS.items()}
    return known.get(name.strip().lower())


def similar_names(name: str) -> list[str]:
    """Return up to three names of known models that look like this one."""
    names = {key.lower(): full for full in _names() for key in (full, full.rpartition("/")[2])}
    return list(dict.fromkeys(names[near] for near in difflib.get_close_matches(name.lower(), names, 3, 0.6)))


def _names() -> Iterator[str]:
    yield from (record.name for record in TEXT_MODELS)
    yield from IMAGE_MODELS


def _spellings(name: str) -> Iterator[str]:
    for former, now in _FORMER.items():
        name = name.replace(former, now, 1)
    key = name.strip().lower()
    while True:
        yield key
        shorter = _VARIANT.sub("", key)
        if shorter == key:
            return
        key = shorter
