"""A small BERT with a tokenizer of whole words, and texts for it: models of Sentence Transformers without a download."""

from __future__ import annotations

import random

import torch
from torch import nn

from benchmarks.peers import declare_torchvision_schemas

# Also in the worker processes of distributed tests, which do not import conftest.
declare_torchvision_schemas()

from sentence_transformers import SentenceTransformer  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast  # noqa: E402

WORDS = [f"w{number}" for number in range(200)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tokenizer(padding_side: str = "right") -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=64, padding_side=padding_side, **names)


def bert(*, width: int = 16, layers: int = 2, dropout: float = 0.0, seed: int = 0) -> BertModel:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * width,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertModel(config)


def in_sentence_transformer(folder: str, encoder: nn.Module, **pooling: object) -> SentenceTransformer:
    """Return a model with mean pooling around the encoder, which is saved to the folder and loaded from it."""
    save(folder, encoder)
    return load(folder, **pooling)


def save(folder: str, encoder: nn.Module) -> None:
    """Save an encoder. In a process group only the first rank would: call this before."""
    encoder.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def load(folder: str, **pooling: object) -> SentenceTransformer:
    transformer = Transformer(folder, max_seq_length=64)
    width = transformer.get_embedding_dimension()
    return SentenceTransformer(modules=[transformer, Pooling(width, **{"pooling_mode": "mean", **pooling})], device="cpu")


def texts(count: int, *, seed: int = 0, longest: int = 30) -> list[str]:
    """Return texts of different lengths, most of them short."""
    chooser = random.Random(seed)
    return [" ".join(chooser.choices(WORDS, k=1 + int(longest * chooser.random() ** 3))) for _ in range(count)]
