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
Kind = Literal["image-text", "embedder", "lm", "classifier"]
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
        return self.kind in ("image-text", "embedder")

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
    return _recipe("image-text", name, params, seen, batch, source, **rest)


def _text(name: str, params: int | None, seen: int | None, batch: int | None, source: str, **rest: Any) -> Recipe:
    """Return a text embedder, fine-tuned from a language model."""
    return _recipe("embedder", name, params, seen, batch, source, start="pretrained", **rest)


def _lm(name: str, params: int, tokens: int, batch: int, length: int, source: str, **rest: Any) -> Recipe:
    """Return a language model that sees so many tokens, in sequences of `length`."""
    data = rest.pop("data", tokens) // length
    return _recipe("lm", name, params, tokens // length, batch, source, length=length, data=data, **rest)


def _images(name: str, params: int, epochs: int, batch: int, source: str, **rest: Any) -> Recipe:
    """Return a classifier trained on ImageNet for so many epochs."""
    return _recipe("classifier", name, params, epochs * 1_281_167, batch, source, data=1_281_167, **rest)


LAION = "LAION scaling-laws-openclip, results table"
DATACOMP = "DataComp, scale_configs.py"
OPENCLIP = "OpenCLIP, tag of the weights"
# A number in brackets behind a source was recalled, not read there.
RECIPES: tuple[Recipe, ...] = (
    # Images and texts, from scratch.
    _clip("CLIP ViT-L/14", 428 * M, 12_800 * M, 32_768, "arXiv 2103.00020 (rate)", data=400 * M, lr=4e-4, warmup=2_000, beta2=0.98),
    _clip("OpenCLIP ViT-B/32, LAION-400M", 151 * M, 13 * B, 86_016, LAION, data=400 * M, lr=1e-3),
    _clip("OpenCLIP ViT-B/32, LAION-400M, 128 GPUs", 151 * M, 12_800 * M, 32_768, "OpenCLIP, README", lr=5e-4, warmup=2_000),
    _clip("OpenCLIP ViT-L/14, LAION-2B", 428 * M, 34 * B, 86_016, LAION, data=2 * B, lr=1e-3),
    _clip("OpenCLIP ViT-H/14, LAION-2B", 986 * M, 34 * B, 79_104, LAION, data=2 * B, lr=5e-4),
    _clip("OpenCLIP ViT-bigG/14, LAION-2B", 2_540 * M, 39 * B, 160_000, f"{OPENCLIP} (rate)", data=2 * B, lr=2e-3),
    _clip("OpenCLIP ConvNeXt-XXL, LAION-2B", 1_200 * M, 34 * B, 82_000, OPENCLIP, data=2 * B),
    _clip("OpenCLIP CoCa ViT-L/14, LAION-2B", 638 * M, 13 * B, 90_000, OPENCLIP, data=2 * B),
    _clip("CoCa", 2_100 * M, 32_768 * M, 65_536, "arXiv 2205.01917 (steps, rate)", lr=8e-4),
    _clip("DataComp small, ViT-B/32", 151 * M, 12_800_000, 4_096, DATACOMP, data=12_800_000, lr=5e-4, warmup=500),
    _clip("DataComp medium, ViT-B/32", 151 * M, 128 * M, 4_096, DATACOMP, data=128 * M, lr=5e-4, warmup=500),
    _clip("DataComp large, ViT-B/16", 150 * M, 1_280 * M, 8_192, DATACOMP, data=1_280 * M, lr=5e-4, warmup=500),
    _clip("DataComp xlarge, ViT-L/14", 428 * M, 12_800 * M, 90_112, DATACOMP, data=12_800 * M, lr=1e-3, warmup=10_000, beta2=0.95),
    _clip("MetaCLIP ViT-B/16", 150 * M, 12_800 * M, 32_768, "MetaCLIP, configs/metaclip_v1.py", data=400 * M, lr=5e-4),
    _clip("MetaCLIP ViT-L/14", 428 * M, 12_800 * M, 32_768, "MetaCLIP, configs/metaclip_v1.py", data=400 * M, lr=4e-4),
    _clip("SigLIP ViT-B/16, WebLI", 203 * M, 40 * B, 32_768, "arXiv 2303.15343", loss="siglip", beta2=0.95),
    _clip(
        "SigLIP 2, WebLI", 375 * M, 40 * B, 32_768, "arXiv 2502.14786 (rate)",
        data=10 * B, loss="siglip", lr=1e-3, warmup=20_000,
    ),
    _clip("ALIGN", 820 * M, 19_660 * M, 16_384, "arXiv 2102.05918 (steps, rate)", data=1_800 * M, optimizer="lamb", lr=1e-3),
    _clip("CLIPA-v2 ViT-H/14", 986 * M, 12_800 * M, 65_536, "OpenCLIP, docs/script_examples/clipav2", lr=2.048e-3, warmup=3_200),
    _clip("Perception Encoder L/14", 671 * M, 58 * B, 65_536, "arXiv 2504.13181", data=5_400 * M, optimizer="lamb", lr=2e-3),
    _clip("Perception Encoder G/14", 2_350 * M, 86 * B, 131_072, "arXiv 2504.13181 (batch)", data=5_400 * M, optimizer="lamb"),
    _clip(
        "MobileCLIP-B, DataCompDR-12M", 150 * M, 245_760_000, 8_192, "ml-mobileclip, run_datacompdr12m.sh",
        data=12_800_000, lr=1e-3, warmup=1_000, beta2=0.95, weight_decay=0.2,
    ),
    _clip(
        "MobileCLIP-B, DataCompDR-1B", 150 * M, 13_107_200_000, 65_536, "ml-mobileclip, run_datacompdr1b.sh",
        data=1_280 * M, lr=1e-3, warmup=1_000, beta2=0.95, weight_decay=0.2,
    ),
    _clip("CLIP ViT-B/16, YFCC15M", 150 * M, 375 * M, 4_096, "SLIP, README", data=15 * M, lr=5e-4, weight_decay=0.5),
    _clip(
        "CLIPA ViT-B/16, LAION-400M", 150 * M, 2_400 * M, 65_536, "CLIPA, vit_b16/i50_t16_pretrain.sh",
        data=400 * M, lr=2.048e-3, warmup=782, beta2=0.95, weight_decay=0.2,
    ),
    _clip(
        "CLIPA ViT-L/16, LAION-400M", 428 * M, 2_400 * M, 32_768, "CLIPA, vit_l16/i37_t8_pretrain.sh",
        data=400 * M, lr=1.024e-3, warmup=1_563, beta2=0.95, weight_decay=0.2,
    ),
    # A locked tower.
    _clip("LiT ablation, YFCC", None, 200 * M, 16_384, "LiT, arXiv 2111.07991", start="locked"),
    _clip("nomic-embed-vision v1.5", 230 * M, None, None, "contrastors", start="locked", lr=1e-3, warmup=2_000, beta2=0.95),
    # Images and texts, from pretrained weights.
    _clip(
        "BioCLIP ViT-B/16, iNat21", 150 * M, 270 * M, 16_384, "Imageomics/bioclip, slurm/train.sh",
        start="pretrained", data=2_700_000, lr=1e-4, warmup=1_000,
    ),
    _clip(
        "BioCLIP ViT-B/16, 10 M", 150 * M, 1_040 * M, 32_768, "BioCLIP's model card",
        start="pretrained", data=10_400_000, lr=1e-4,
    ),
    _clip(
        "Long-CLIP, ShareGPT4V", 150 * M, 7_476_000, 2_048, "Long-CLIP, train/train.md",
        start="pretrained", data=1_246_000, lr=1e-6, warmup=200, beta2=0.999, weight_decay=0.01,
    ),
    _clip(
        "CLIPA ViT-B/16, fine-tuning", 150 * M, 131_072_000, 8_192, "CLIPA, vit_b16/i50_t16_finetune.sh",
        start="pretrained", data=400 * M, lr=2.56e-5, warmup=3_072, beta2=0.95, weight_decay=0.2,
    ),
    _clip("FLYP ViT-B/16, ImageNet", 150 * M, 12_811_670, 512, "FLYP, README", start="pretrained", data=1_281_167, lr=1e-5),
    _clip("FLYP ViT-B/16, iWildCam", 150 * M, 2_596_180, 256, "FLYP, README", start="pretrained", data=129_809, lr=1e-5),
    _clip("FLYP ViT-B/16, FMoW", 150 * M, 1_537_260, 256, "FLYP, README", start="pretrained", data=76_863, lr=1e-5),
    _clip("FashionCLIP 2", 151 * M, None, 1_024, "fashion-clip issue 36", start="pretrained", data=800_000),
    _clip("TinyCLIP", 120 * M, None, 32_768, "microsoft/Cream issue 214", start="pretrained"),
    # Text pairs whose negatives come from the batch.
    _text("E5-base, CCPairs", 110 * M, 655 * M, 32_768, "arXiv 2212.03533 (steps, rate)", data=270 * M, lr=2e-4, warmup=1_000),
    _text("GTE-base", 110 * M, 819 * M, 16_384, "arXiv 2308.03281 (batch, steps, rate)", data=788 * M, lr=2e-4),
    _text("BGE zh (C-Pack)", 326 * M, 100 * M, 19_200, "arXiv 2309.07597, section 4.2", data=100 * M, lr=2e-5),
    _text("nomic-embed-text v1", 137 * M, 235 * M, 16_384, "contrastors", data=235 * M, lr=2e-4, warmup=700, beta2=0.999),
    _text(
        "nomic-embed-text v2 (multilingual)", 475 * M, 3_200 * M, 16_384, "contrastors (data)",
        data=1_600 * M, lr=8e-5, warmup=1_000,
    ),
    _text("ModernBERT-embed", 149 * M, 235 * M, 16_384, "contrastors", data=235 * M, lr=2e-4, warmup=700, beta2=0.999),
    _text("ColBERT-Zero", 137 * M, 235 * M, 16_384, "PyLate, unsupervised.py", data=235 * M, lr=3e-4),
    _text("Contriever", 110 * M, 1_024 * M, 2_048, "contriever.sh; with a queue of 131,072", lr=5e-5),
    _text("all-MiniLM-L6-v2", 22_700_000, 102_400_000, 1_024, "model card", data=1_170 * M, lr=2e-5, warmup=500),
    _text("all-mpnet-base-v2", 109 * M, 102_400_000, 1_024, "model card", data=1_170 * M, lr=2e-5, warmup=500),
    _text("SimCSE unsupervised", 110 * M, 1 * M, 64, "SimCSE, scripts", data=1 * M, lr=3e-5),
    _text("VLM2Vec Qwen2-VL-2B", 2_200 * M, 4_096_000, 2_048, "VLM2Vec, train_v1-qwen2vl-2B.sh", lora=16, lr=5e-5, warmup=100),
    _text("VLM2Vec-V2 Qwen2-VL-2B", 2_200 * M, 5_120_000, 1_024, "VLM2Vec, train_v2-qwen2vl-2B.sh", lora=16, lr=5e-5, warmup=100),
    _text("ColQwen2", 2_200 * M, 118_695, 64, "colpali, train_colqwen2_model.yaml", data=118_695, lora=32, lr=5e-5, warmup=250),
    _text("ColPali", 2_920 * M, 356_000, 32, "colpali, scripts (data, epochs)", data=118_695, lora=32, lr=5e-5),
    # Text pairs with mined negatives.
    _text("SimCSE supervised", 110 * M, 825_000, 512, "SimCSE, scripts", data=275_000, negatives=1, lr=5e-5),
    _text(
        "DPR, Natural Questions", 220 * M, 2_355_200, 128, "DPR, biencoder_nq.yaml, 8 GPUs",
        data=58_880, negatives=1, lr=2e-5, warmup=1_237,
    ),
    _text("GTE fine-tuning", 110 * M, 3 * M, 128, "arXiv 2308.03281", data=3 * M, negatives=15),
    _text(
        "nomic-embed-text v1, fine-tuning", 137 * M, 1_600_000, 256, "contrastors (data)",
        data=1_600_000, negatives=7, lr=2e-5, warmup=400,
    ),
    _text("e5-mistral-7b", 7_110 * M, 1_800_000, 2_048, "arXiv 2401.00368", data=1_800_000, negatives=1, lora=16, lr=1e-4),
    _text(
        "RepLLaMA-7B, MS MARCO", 6_740 * M, 491_000, 128, "Tevatron, examples/repllama",
        data=491_000, negatives=15, lora=32, lr=1e-4, warmup=100,
    ),
    _text("LLM2Vec Llama-3-8B", 8_030 * M, 512_000, 512, "llm2vec, MetaLlama3.json", negatives=1, lora=16, lr=2e-4, warmup=300),
    _text("GritLM-7B, embeddings only", 7_240 * M, 2_566_144, 2_048, "gritlm, train_embonly.sh", negatives=1, lr=2e-5, warmup=38),
    _text("llama-embed-nemotron-8b", 7_500 * M, 3_662_592, 128, "NeMo Automodel", data=16_100_000, negatives=4, lr=2e-6),
    # Language models from scratch; samples are sequences.
    _lm("GPT-2 124M, FineWeb 10B", 124 * M, 10 * B, 512, 1_024, "llm.c, run_gpt2_124M.sh", lr=6e-4, warmup=700, weight_decay=0.1),
    _lm("GPT-2 124M, OpenWebText", 124 * M, 300 * B, 480, 1_024, "nanoGPT, train_gpt2.py", lr=6e-4, warmup=2_000, weight_decay=0.1),
    _lm("GPT-3 125M", 125 * M, 300 * B, 256, 2_048, "arXiv 2005.14165, table 2.1", lr=6e-4, beta2=0.95),
    _lm("GPT-3 1.3B", 1_300 * M, 300 * B, 512, 2_048, "arXiv 2005.14165, table 2.1", lr=2e-4, beta2=0.95),
    _lm("GPT-3 175B", 175 * B, 300 * B, 1_562, 2_048, "arXiv 2005.14165, table 2.1", lr=6e-5, warmup=117, beta2=0.95),
    _lm("Pythia 160M", 162 * M, 300 * B, 1_024, 2_048, "pythia, pythia-160m.yml", lr=6e-4, warmup=1_430, beta2=0.95),
    _lm("Pythia 6.9B", 6_860 * M, 300 * B, 1_024, 2_048, "pythia, pythia-6.9b.yml", lr=1.2e-4, warmup=1_430, beta2=0.95),
    _lm("TinyLlama 1.1B", 1_100 * M, 3 * T, 1_024, 2_048, "TinyLlama, README", data=1 * T, lr=4e-4, warmup=2_000),
    _lm("LLaMA 7B", 6_700 * M, 1 * T, 2_048, 2_048, "arXiv 2302.13971, table 2", lr=3e-4, warmup=2_000, beta2=0.95),
    _lm("LLaMA 65B", 65_200 * M, 1_400 * B, 2_048, 2_048, "arXiv 2302.13971, table 2", lr=1.5e-4, warmup=2_000, beta2=0.95),
    _lm("SmolLM 135M", 135 * M, 600 * B, 512, 2_048, "smollm, config_smollm1_135M.yaml", lr=3e-3, warmup=2_000, beta2=0.95),
    _lm("OLMo 1B", 1_180 * M, 3 * T, 2_048, 2_048, "OLMo-1B.yaml (tokens)", lr=4e-4, warmup=2_000, beta2=0.95),
    _lm("OLMo 2 7B", 7_300 * M, 3_900 * B, 1_024, 4_096, "OLMo2-7B-stage1.yaml", lr=3e-4, warmup=2_000, beta2=0.95),
    # Language models, fine-tuned on instructions.
    _lm("Alpaca 7B", 6_700 * M, 3 * 52_000 * 512, 128, 512, "stanford_alpaca, README", start="pretrained", lr=2e-5),
    _lm(
        "Guanaco 7B (QLoRA)", 6_700 * M, 30_000 * 528, 16, 528, "qlora, finetune_guanaco_7b.sh",
        start="pretrained", lora=64, lr=2e-4,
    ),
    # Image classifiers.
    _images("ResNet-50, ImageNet", 25_600_000, 90, 256, "arXiv 1706.02677", optimizer="sgd", lr=0.1),
    _images("ResNet-50, ImageNet, large batch", 25_600_000, 90, 8_192, "arXiv 1706.02677", optimizer="sgd", lr=3.2, warmup=782),
    _images("DeiT-B, ImageNet", 86 * M, 300, 1_024, "arXiv 2012.12877", lr=1e-3, warmup=6_256, weight_decay=0.05),
    _images("ConvNeXt-T, ImageNet", 28_600_000, 300, 4_096, "ConvNeXt, TRAINING.md", lr=4e-3, weight_decay=0.05),
    _images("Swin-T, ImageNet", 28_300_000, 300, 1_024, "Swin-Transformer, config.py", lr=1e-3, warmup=25_023, weight_decay=0.05),
    _images("ViT-B/16, ImageNet", 86 * M, 300, 4_096, "torchvision, references", lr=3e-3, warmup=9_384, weight_decay=0.3),
    _images("RegNetX-32GF, ImageNet", 107 * M, 100, 256, "torchvision, references", optimizer="sgd", lr=0.2, warmup=25_023),
    _images("ConvNeXt-B, fine-tuning at 384", 88_600_000, 30, 512, "ConvNeXt, TRAINING.md", start="pretrained", lr=5e-5),
    _images("DeiT-B, fine-tuning at 384", 86 * M, 30, 512, "DeiT, README", start="pretrained", lr=5e-6),
    _images("MAE ViT-B, fine-tuning", 86 * M, 100, 1_024, "MAE, FINETUNE.md; layer-wise decay 0.65", start="pretrained", lr=2e-3),
)  # fmt: skip
