"""Published trainings, one record each: what was trained on how much, and the batch, rate and warm-up that were used.

They are what a plan shows as "what others did", and what the rules of `recipes` are checked against. A new one is a record here.
A value that its source does not state, or that could not be read there, is None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from .objectives import DEFAULT, PAIR_LOSSES
from .optimizers import FamilyName

# What is trained: an image and a text encoder on pairs; a text encoder on pairs; a language model; a classifier.
Kind = Literal["clip", "embedder", "lm", "classifier"]
Start = Literal["scratch", "pretrained", "locked"]

M, B, T = 10**6, 10**9, 10**12


@dataclass(frozen=True)
class TrainingTask:
    """What is trained, from what, and on how much. None means unknown.

    start: "scratch" for random weights, "pretrained" for fine-tuning, "locked" for a pretrained tower or body that does not learn.
    data: samples; seen: samples that training sees; unique: different items among the samples. Samples are pairs, images, or for a
        language model sequences of `length` tokens.
    params: parameters of the whole model. loss: contrastive loss, for pairs. optimizer: its family.
    negatives: mined hard negatives of each query. lora: rank of LoRA adapters; None trains the weights themselves.
    """

    kind: Kind
    start: Start = "scratch"
    data: int | None = None
    seen: int | None = None
    unique: int | None = None
    params: int | None = None
    loss: str = DEFAULT
    optimizer: FamilyName = "adam"
    negatives: int = 0
    lora: int | None = None
    length: int = 1024

    def __post_init__(self) -> None:
        choices = [
            ("kind", self.kind, get_args(Kind)),
            ("start", self.start, get_args(Start)),
            ("loss", self.loss, PAIR_LOSSES),
            ("optimizer", self.optimizer, get_args(FamilyName)),
        ]
        for name, value, allowed in choices:
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}: must be one of {', '.join(allowed)}")
        for name in ("data", "seen", "unique", "params", "lora", "length"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}: must be at least 1")
        if self.negatives < 0:
            raise ValueError(f"negatives is {self.negatives}: must be 0 or more hard negatives per query")
        if self.lora is not None and self.start == "scratch":
            raise ValueError(f"lora is {self.lora} and start is scratch: LoRA adapts pretrained weights; give start=pretrained")

    @property
    def pairs(self) -> bool:
        """Whether negatives come from the batch."""
        return self.kind in ("clip", "embedder")

    def steps(self, batch: int) -> int | None:
        """Return the optimizer steps at a batch, or None if the samples seen are unknown."""
        return None if self.seen is None else math.ceil(self.seen / batch)


class Recipe(NamedTuple):
    """A published training. batch: samples of one step (pairs, images or sequences). warmup: steps."""

    name: str
    task: TrainingTask
    batch: int | None
    lr: float | None = None
    warmup: int | None = None
    beta2: float | None = None
    weight_decay: float | None = None
    source: str = ""


def _recipe(kind: Kind, name: str, params: int | None, seen: int | None, batch: int | None, source: str, **rest: Any) -> Recipe:
    """Return a record. rest: further fields of TrainingTask and Recipe."""
    known = {
        field: rest.pop(field) for field in ("start", "data", "loss", "optimizer", "negatives", "lora", "length") if field in rest
    }
    return Recipe(name, TrainingTask(kind, params=params, seen=seen, **known), batch, source=source, **rest)


def _clip(name: str, params: int | None, seen: int | None, batch: int | None, source: str, **rest: Any) -> Recipe:
    return _recipe("clip", name, params, seen, batch, source, **rest)


def _text(name: str, params: int | None, seen: int | None, batch: int | None, source: str, **rest: Any) -> Recipe:
    """Return a text embedder, fine-tuned from a language model."""
    return _recipe("embedder", name, params, seen, batch, source, start="pretrained", **rest)


LAION = "LAION scaling-laws-openclip, results table"
RECIPES: tuple[Recipe, ...] = (
    # Images and texts, from scratch.
    _clip("CLIP ViT-L/14, WIT", 428 * M, 12_800 * M, 32_768, "arXiv 2103.00020, section 2.5", data=400 * M, warmup=2_000),
    _clip("OpenCLIP ViT-B/32, LAION-400M", 151 * M, 13 * B, 86_016, LAION, data=400 * M, lr=1e-3),
    _clip("OpenCLIP ViT-L/14, LAION-2B", 428 * M, 34 * B, 86_016, LAION, data=2 * B, lr=1e-3),
    _clip("OpenCLIP ViT-H/14, LAION-2B", 986 * M, 34 * B, 79_104, LAION, data=2 * B, lr=5e-4),
    _clip("OpenCLIP ViT-bigG/14, LAION-2B", 2_540 * M, 39 * B, 160_000, "OpenCLIP, tag s39b_b160k", data=2 * B),
    _clip("OpenCLIP ConvNeXt-XXL, LAION-2B", 1_200 * M, 34 * B, 82_000, "OpenCLIP, tag of the weights", data=2 * B),
    _clip("OpenCLIP CoCa ViT-L/14, LAION-2B", 638 * M, 13 * B, 90_000, "OpenCLIP, tag of the weights", data=2 * B),
    _clip(
        "DataComp small, ViT-B/32", 151 * M, 12_800_000, 4_096, "DataComp, scale_configs.py", data=12_800_000, lr=5e-4, warmup=500
    ),
    _clip("DataComp medium, ViT-B/32", 151 * M, 128 * M, 4_096, "DataComp, scale_configs.py", data=128 * M, lr=5e-4, warmup=500),
    _clip("DataComp large, ViT-B/16", 150 * M, 1_280 * M, 8_192, "DataComp, scale_configs.py", data=1_280 * M, lr=5e-4, warmup=500),
    _clip(
        "DataComp xlarge, ViT-L/14",
        428 * M,
        12_800 * M,
        90_112,
        "DataComp, scale_configs.py",
        data=12_800 * M,
        lr=1e-3,
        warmup=10_000,
        beta2=0.95,
    ),
    _clip("MetaCLIP ViT-B/16", 150 * M, 12_800 * M, 32_768, "MetaCLIP, configs/metaclip_v1.py", data=400 * M, lr=5e-4),
    _clip("MetaCLIP ViT-L/14", 428 * M, 12_800 * M, 32_768, "MetaCLIP, configs/metaclip_v1.py", data=400 * M, lr=4e-4),
    _clip("SigLIP ViT-B/16, WebLI", 203 * M, 40 * B, 32_768, "arXiv 2303.15343", loss="siglip"),
    _clip("SigLIP 2, WebLI", 375 * M, 40 * B, 32_768, "arXiv 2502.14786", data=10 * B, loss="siglip", warmup=20_000),
    _clip("CLIPA-v2 ViT-H/14", 986 * M, 12_800 * M, 65_536, "OpenCLIP, docs/script_examples/clipav2", lr=2.048e-3, warmup=3_200),
    _clip("Perception Encoder L/14", 671 * M, 58 * B, 65_536, "arXiv 2504.13181", data=5_400 * M, optimizer="lamb", lr=2e-3),
    # A locked tower.
    _clip("LiT ablation, YFCC", None, 200 * M, 16_384, "LiT, arXiv 2111.07991", start="locked"),
    # Text pairs whose negatives come from the batch.
    _text("E5-base, CCPairs", 110 * M, 655 * M, 32_768, "arXiv 2406.01607; unilm issue 1448", data=270 * M),
    _text("BGE zh (C-Pack)", 326 * M, 100 * M, 19_200, "arXiv 2309.07597, section 4.2", data=100 * M, lr=2e-5),
    _text("nomic-embed-text v1", 137 * M, 235 * M, 16_384, "contrastors", data=235 * M, lr=2e-4, warmup=700, beta2=0.999),
    _text("ColBERT-Zero", 137 * M, 235 * M, 16_384, "PyLate, unsupervised.py", data=235 * M, lr=3e-4),
    _text("SimCSE unsupervised", 110 * M, 1 * M, 64, "SimCSE, scripts", data=1 * M, lr=3e-5),
    # Text pairs with mined negatives.
    _text("SimCSE supervised", 110 * M, 825_000, 512, "SimCSE, scripts", data=275_000, negatives=1, lr=5e-5),
    _text("GTE fine-tuning", 110 * M, 3 * M, 128, "arXiv 2308.03281", data=3 * M, negatives=15),
    _text("e5-mistral-7b", 7_110 * M, 1_800_000, 2_048, "arXiv 2401.00368", data=1_800_000, negatives=1, lora=16, lr=1e-4),
    _text("GritLM-7B, embeddings only", 7_240 * M, 2_566_144, 2_048, "gritlm, train_embonly.sh", negatives=1, lr=2e-5),
    _text("llama-embed-nemotron-8b", 7_500 * M, 3_662_592, 128, "NeMo Automodel", data=16_100_000, negatives=4, lr=2e-6),
)
