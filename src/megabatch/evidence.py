"""Published and measured facts about batch sizes, with their sources, and the rules that follow from them.

`planning`, `audit` and `measuring` share these constants and rules, so that a plan and an audit cannot disagree.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Confidence = Literal["measured", "high", "medium", "low"]


class Fact(NamedTuple):
    """A finding, the source that reports it, and how far it can be trusted."""

    says: str
    source: str
    confidence: Confidence


# Contrastive learning: the batch below which plain InfoNCE loses quality, and the batch above which every published comparison from
# scratch lost quality (FACTS["negatives"]). The batch at which more negatives stop helping depends on the loss: `objectives`.
FLOOR = 4_096
CEILING = 262_144

# Contrastive learning: how many updates are needed. Two budgets have been trained at several batch sizes. For each: the samples
# seen, the most updates that were too few, and the fewest that were enough. The number needed lies between the two.
SCRATCH_SEEN, SCRATCH_TOO_FEW, SCRATCH_ENOUGH = 2_000_000, 488, 1_953
LOCKED_SEEN, LOCKED_TOO_FEW, LOCKED_ENOUGH = 450_000_000, 3_433, 13_733
# Updates that towers trained from scratch need, relative to a locked tower. The middle of what both budgets allow.
SCRATCH_OVER_LOCKED = 2.0
# Quality falls steeply below the first number of updates; above the second, batches of any size did equally well.
FEWEST_UPDATES, ENOUGH_UPDATES = 2_000, 15_000

# Below the first number of updates a contrastive run from scratch learned next to nothing. 122 updates learned little, 488 reached
# four fifths of what 1,953 did (FACTS["updates from scratch"]): below the second number, between the two, a run is poor. A batch
# that leaves fewer is only planned where even the smallest does.
HOPELESS_UPDATES, POOR_UPDATES = 100, 250
# The fewest samples seen of a published CLIP from scratch, DataComp small. Below, the law of `batch_law` decides if there is one.
LEAST_PUBLISHED = 12_800_000
# Published CLIP trainings from scratch make about so many updates where the samples seen allow it (FACTS["published updates"]).
USUAL_UPDATES = 150_000
# Below so many samples seen, a CLIP of usual size learns little from scratch (FACTS["clip from scratch"]).
CLIP_LEAST_SEEN = 100_000_000
# Above so many parameters, a CLIP from scratch should see at least so many samples (FACTS["clip sizes"]).
LARGE_CLIP, LARGE_CLIP_SEEN = 500_000_000, 1_280_000_000

# Fine-tuning on pairs: updates that published trainings make (FACTS["published fine-tuning"]), the batch below which quality falls
# (FACTS["fine-tuning pairs"]), and the largest that is usual.
FINETUNE_UPDATES, FINETUNE_LEAST, FINETUNE_MOST = 10_000, 128, 32_768
# Larger batches for fine-tuning, of pairs and of samples, have to leave FEWEST_UPDATES (GTE, e5-mistral and GritLM fine-tune at 64
# to 2,048 pairs).
FINETUNE_LARGE, FINETUNE_LARGE_SAMPLES = 2_048, 256
# Fewer updates are not planned for fine-tuning on little data: the batch is smaller then. Our choice, not from a paper.
FINETUNE_FEWEST = 500
# No smaller batch of pairs is planned, however few they are: its negatives would be too few. Half of the smallest published one,
# ColPali's 32; at 8, DPR lost seven points (FACTS["fine-tuning pairs"]). Our choice, not from a paper.
SMALLEST_PAIRS = 16
# Mined negatives: documents of a step, and the fewest and most queries (FACTS["hard negatives"]).
HARD_DOCUMENTS, LEAST_QUERIES, MOST_QUERIES = 2_048, 64, 2_048

# Critical batch of supervised learning (samples), and the factor by which this prior may be off.
IMAGENET, IMAGENET_CRITICAL = 1_281_167, 8_192
CRITICAL_FACTOR = 4.0
# The part of it that is usual: 1/16 with SGD, 1/4 with Adam (FACTS["usual images"]).
SGD_PART, ADAM_PART = 16, 4
# Language models: tokens of a batch at so many tokens seen, and its growth with them (FACTS["lm batch"]).
LM_BATCH, LM_SEEN, LM_GROWTH = 524_288, 10**10, 0.4
# Fewer tokens per parameter than this are not worth pre-training (FACTS["tokens per parameter"]).
LEAST_TOKENS = 2
# Fewer images than this are not worth training a large classifier from scratch.
CLASSIFIER_LEAST = 100_000

# Fine-tuning of means over samples: updates that the batch should leave, and the smallest and largest usual batch.
FINETUNE_LM, FINETUNE_CLASSIFIER = (1_000, 16, 128), (20_000, 32, 512)

# The learning rate falls with this power of the parameters (FACTS["lm rate"]).
RATE_SIZE = 0.25
# LoRA's rate, at any size and batch (FACTS["lora rate"]).
LORA_RATE = 1e-4
# Towers of fewer parameters are small. Contrastive batches of this size from scratch need a faster β2.
LARGE_MODEL, LARGE_CONTRASTIVE = 20_000_000, 16_384
# The rules for the learning rate were tested for batches up to this factor apart. Further away the rate has to be swept.
RATE_RANGE = 16
# Warm-up: share of a short run, steps of a long run, share of a very long run (FACTS["image-text warm-up"] and the others).
WARMUP_SHARE, USUAL_WARMUP, LONG_WARMUP = 0.05, 2_000, 0.01
# The most steps of warm-up that a published training takes, SigLIP 2's.
MOST_WARMUP_STEPS = 20_000
# The largest share of a run that a sweep spends on warm-up.
MOST_WARMUP = 0.2
# Epochs if none are given, by kind of model and whether it is trained from scratch (FACTS["epochs"]); the samples that a CLIP from
# scratch sees at most, and the pairs up to which a text embedder sees them three times.
EPOCHS = {
    ("image-text", True): 30.0, ("image-text", False): 10.0, ("embedder", True): 1.0, ("embedder", False): 1.0,
    ("lm", True): 1.0, ("lm", False): 3.0, ("classifier", True): 90.0, ("classifier", False): 10.0,
}  # fmt: skip
MOST_SEEN, FEW_PAIRS, EPOCHS_OF_FEW_PAIRS = 13_000_000_000, 1_000_000, 3.0
# Batch norm over fewer rows loses accuracy (FACTS["batch norm"]).
BATCH_NORM_ROWS = 16
# Adam's weight decay by kind of model, and whether it is trained from scratch (FACTS["usual decay"]).
WEIGHT_DECAYS = {
    ("image-text", True): 0.2, ("image-text", False): 0.1, ("embedder", True): 0.1, ("embedder", False): 0.01,
    ("lm", True): 0.1, ("lm", False): 0.0, ("classifier", True): 0.05, ("classifier", False): 0.01,
}  # fmt: skip

FACTS = {
    "negatives": Fact(
        "SigLIP B/16 from scratch, 9 B samples seen, ImageNet zero-shot, sigmoid / softmax: 4k 68.4/66.6, 16k 72.3/71.7,"
        " 32k 73.4/72.9, 98k 73.0/73.2, 307k 71.6/72.6; runs differ by 0.1 to 0.2",
        "arXiv 2303.15343, table 5",
        "high",
    ),
    "updates from scratch": Fact(
        "67k images and captions, small towers from scratch, 2 M samples seen, held-out recall@1: batch 256 (7,812 updates) 27.1,"
        " 1,024 (1,953) 27.3, 4,096 (488) 21.5, 16,384 (122) 1.1",
        "megabatch's own run on an H200, one seed, the better of two learning rates",
        "medium",
    ),
    "updates locked": Fact(
        "frozen image tower: at 450 M samples seen 32k (13.7k updates) is best, 128k (3.4k) loses 1.4 points, 256k (1.7k) 9;"
        " at 900 M 128k (6.9k) is best; at 3 B 256k (11k) and at 18 B 1M (17k) are as good as any",
        "arXiv 2303.15343, table 8",
        "high",
    ),
    "data": Fact(
        "at a fixed learning rate and number of epochs the best batch grows with the data (CC3M 16k, CC12M 32k, LAION-400M 256k),"
        " and 1M loses 1.35 points against 64k",
        "Inf-CL, arXiv 2410.17243, figure 5 and table 3",
        "medium",
    ),
    "collisions": Fact(
        "an epoch is a permutation: a batch of B out of N samples, U of them different, holds about B²/2 · (N/U − 1)/(N − 1) pairs"
        " of equal items, none where all samples differ",
        "arithmetic; sentence-transformers issue 3189",
        "high",
    ),
    "no accumulation": Fact(
        "gradient accumulation adds no negatives: 8 steps of 8 have 7 negatives per sample, one step of 64 has 63, and the gradient"
        " differs by 31 %",
        "megabatch's own run",
        "high",
    ),
    "fine-tuning pairs": Fact(
        "DPR, NQ top-20 accuracy: batch 8 71.9, 128 79.3, 512 79.9",
        "arXiv 2101.06983",
        "medium",
    ),
    "published fine-tuning": Fact(
        "published trainings on pairs from pretrained weights make 2,000 to 50,000 updates whatever the data, half of them 10,000"
        " to 20,000: 64 to 512 pairs at 1 to 3 M pairs seen, 16k to 32k at hundreds of millions",
        "FLYP, SimCSE, BioCLIP, Long-CLIP, nomic-embed, E5 (published.py)",
        "medium",
    ),
    "unlabelled text": Fact(
        "unlabelled text pairs, batch 256 / 2,048 / 19,200: average 56.4 / 57.9 / 59.0, retrieval 57.3 / 61.0 / 63.9, while"
        " clustering falls from 49.5 to 47.7",
        "C-Pack, arXiv 2309.07597, table 4",
        "medium",
    ),
    "fine-tuning": Fact(
        "16 to 32 for models of BERT's size; sweep it for LoRA", "arXiv 2602.09492 for LoRA; common practice otherwise", "low"
    ),
    "critical batch": Fact(
        "the steps to a target fall as 1 + B_crit/B: below the critical batch, doubling the batch nearly halves them; above it,"
        " doubling saves almost none; the critical batch of ImageNet is thousands to tens of thousands",
        "McCandlish et al., arXiv 1812.06162 (the form of the curve is recalled)",
        "medium",
    ),
    "imagenet": Fact("ResNet-50 trains without loss of accuracy up to 8,192", "Goyal et al., arXiv 1706.02677", "high"),
    "small lm": Fact("on one device small batches without accumulation do as well", "arXiv 2507.07101", "medium"),
    "linear": Fact("SGD: the learning rate grows linearly with the batch, after warm-up", "Goyal et al., arXiv 1706.02677", "high"),
    "square root": Fact(
        "Adam: the learning rate grows with the square root of the batch, as a first guess; the best rate can rise and fall again",
        "arXiv 2205.10287, 2405.14578",
        "medium",
    ),
    "epochs": Fact(
        "CLIPs from scratch see up to 13 B samples, and their data at most 30 times; fine-tuned ones 6 to 20 times; text embedders"
        " once, up to a million pairs three times; language models once, fine-tuned three times; classifiers 90 times, fine-tuned"
        " 3 to 30 times",
        "arXiv 2103.00020, 2212.00638, 2308.03281, 2104.08821, 1512.03385, 1810.04805",
        "medium",
    ),
    "epochs of warm-up": Fact("SGD: 5 epochs", "Goyal et al., arXiv 1706.02677", "high"),
    "beta2": Fact("CLIP's β2 is 0.98; large contrastive batches need 0.95 to be stable", "arXiv 2103.00020, 2303.15343", "high"),
    "decay": Fact(
        "0.1 is usual; at a fixed rate and data the best one grows in proportion to the batch", "arXiv 2505.13738", "medium"
    ),
    "batch norm": Fact(
        "batch norm over fewer than 16 rows of a device loses accuracy, 34.7 % error instead of 23.6 % at 2 rows; group norm stays"
        " at 24.1 %",
        "arXiv 1803.08494",
        "high",
    ),
    "ema": Fact("ρ becomes ρ^k when the batch is k times as large", "arXiv 2307.13813", "medium"),
    "published updates": Fact(
        "published CLIP trainings from scratch: 4,096 at 13 M and 128 M samples seen, 8,192 at 1.3 B, 32k to 90k at 13 B, 65k to"
        " 160k at 34 B and more; above 4,096 they make 140,000 updates or more",
        "DataComp's scale_configs.py; OpenCLIP's and MetaCLIP's configurations; arXiv 2103.00020",
        "medium",
    ),
    "clip from scratch": Fact(
        "published CLIPs from scratch see 12.8 M samples only to compare data sets (DataComp small), and 400 M or more to be used",
        "DataComp, arXiv 2304.14108; arXiv 2103.00020",
        "medium",
    ),
    "clip sizes": Fact(
        "DataComp trains ViT-B/32 with 12.8 M and 128 M samples seen, ViT-B/16 with 1.28 B, and ViT-L/14 with 12.8 B",
        "arXiv 2304.14108",
        "high",
    ),
    "embedder from scratch": Fact(
        "every published text embedder starts from a pretrained language model, also those with hundreds of millions of pairs",
        "E5, GTE, BGE, nomic-embed, Contriever",
        "high",
    ),
    "hard negatives": Fact(
        "with mined negatives published trainings take 64 to 2,048 queries, about 2,048 documents a step (GTE 128 × 16, nomic-embed"
        " 256 × 8, e5-mistral 2,048 × 2), because mined negatives already give a reliable gradient",
        "arXiv 2308.03281, 2401.00368; contrastors",
        "medium",
    ),
    "fine-tuning lm": Fact(
        "language models are fine-tuned on instructions at 16 to 128 sequences",
        "Stanford Alpaca, README (128); LIMA, QLoRA (recalled)",
        "low",
    ),
    "lm batch": Fact(
        "the optimal and the critical batch grow as a power of the tokens seen, with no effect of the model's size; GPT-2 124M"
        " takes 0.5 M tokens a step, LLaMA 7B 4 M",
        "arXiv 2505.13738 (exponent 0.4 of the optimal, 0.5 of the critical batch), 2410.21676; llm.c; arXiv 2302.13971",
        "medium",
    ),
    "tokens per parameter": Fact(
        "about 20 tokens per parameter are compute-optimal", "arXiv 2203.15556", "high"
    ),
    "usual images": Fact(
        "ImageNet classifiers take 256 to 1,024 with SGD, 1,024 to 4,096 with AdamW; adaptive optimizers stay efficient up to"
        " larger batches",
        "torchvision, DeiT, Swin and ConvNeXt, configurations; arXiv 1907.04164",
        "medium",
    ),
    "clip rate": Fact(
        "CLIP from scratch is trained at 4e-4 to 1e-3 from 4,096 to 90,000 pairs; no published rate falls below 4,096",
        "DataComp's scale_configs.py; OpenCLIP's and MetaCLIP's configurations",
        "medium",
    ),
    "embedder scratch rate": Fact(
        "no text embedder from scratch is published; this is the rate of CLIP's towers", "CLIP's rates", "low"
    ),
    "views rate": Fact(
        "SimCLR trains with LARS at 0.3 × batch / 256; for AdamW this is the rate of CLIP's towers", "arXiv 2002.05709", "low"
    ),
    "locked rate": Fact("with a locked tower the other one is trained at 1e-3", "contrastors (nomic-embed-vision)", "medium"),
    "clip fine-tuning rate": Fact("CLIP is fine-tuned at 1e-6 to 1e-4", "arXiv 2212.00638, 2311.18803", "medium"),
    "embedder rate": Fact(
        "text encoders are fine-tuned at 1e-5 to 5e-5, at 16k pairs trained at 2e-4; larger models at lower rates",
        "contrastors; SimCSE; arXiv 2212.03533",
        "medium",
    ),
    "lora rate": Fact(
        "LoRA is trained at 5e-5 to 2e-4 whatever the model's size and the batch, ten times the rate of whole weights",
        "arXiv 2401.00368; VLM2Vec, LLM2Vec, RepLLaMA and QLoRA, scripts",
        "medium",
    ),
    "lm rate": Fact(
        "6e-4 at 124 M parameters, falling with their fourth root (GPT-3: 6e-4 at 125 M to 6e-5 at 175 B, LLaMA: 3e-4 at 7 B to"
        " 1.5e-4 at 65 B)",
        "arXiv 2005.14165, table 2.1; 2302.13971",
        "high",
    ),
    "lm fine-tuning rate": Fact("2e-5 at 7 B parameters, 5e-5 at BERT's size", "arXiv 1810.04805; Stanford Alpaca, README", "low"),
    "classifier rate": Fact("1e-3 at 1,024 with AdamW", "DeiT, arXiv 2012.12877; Swin, arXiv 2103.14030", "medium"),
    "classifier fine-tuning rate": Fact("2e-5 to 5e-5 with AdamW", "arXiv 1810.04805, 2109.01903", "medium"),
    "image-text warm-up": Fact(
        "DataComp 500 (10,000 at xlarge), MobileCLIP 1,000, CLIP 2,000, SigLIP 2 20,000 of 1.2 M steps",
        "DataComp, MobileCLIP, OpenCLIP, configurations; arXiv 2103.00020, 2502.14786",
        "medium",
    ),
    "embedder warm-up": Fact(
        "nomic-embed 700 of 14,000 steps, E5 1,000 of 20,000, GritLM 38 of 1,250, all-MiniLM 500 of 100,000",
        "contrastors; arXiv 2212.03533; GritLM, all-MiniLM-L6-v2",
        "medium",
    ),
    "lm warm-up": Fact(
        "LLaMA, OLMo and TinyLlama 2,000, Pythia 1,430 of 143,000, GPT-2 124M 700 of 19,000 steps",
        "arXiv 2302.13971; OLMo, TinyLlama, Pythia and llm.c, configurations",
        "high",
    ),
    "lm beta2": Fact(
        "language models are pre-trained with β2 = 0.95 at half a million tokens or more; below, its half-life is fixed in tokens",
        "arXiv 2005.14165, 2302.13971; 2507.07101",
        "medium",
    ),
    "default beta2": Fact("fine-tuning and classifiers keep Adam's default", "contrastors; arXiv 2012.12877", "medium"),
    "usual decay": Fact(
        "the usual value for this kind of training",
        "OpenCLIP, contrastors, DeiT, ConvNeXt, LLaMA and QLoRA, configurations",
        "medium",
    ),
    "ramp": Fact(
        "doubling the batch where the rate would have been halved: 36 % less wall-clock time; warming up the batch: 43 % fewer"
        " steps",
        "arXiv 2510.14717, 2505.23971",
        "medium",
    ),
}  # fmt: skip


def collisions(batch: int, unique: int, data: int | None = None) -> float:
    """Return the expected pairs of equal items in a batch out of a permutation of the data, `unique` of whose items differ.

    Each item is taken to occur data/unique times. Without duplicates in the data there are none in a batch. data: None if it is
    unknown, and much larger than unique.

    >>> round(collisions(32768, 70_000, 1_000_000)), collisions(32768, 10**7, 10**7), round(collisions(32768, 70_000))
    (7133, 0.0, 7670)
    """
    if data is None:
        return batch * batch / (2 * unique)
    return batch * (batch - 1) / 2 * (data / unique - 1) / max(1, data - 1)


def steps_factor(batch: int, critical: float) -> float:
    """Return the steps to a target, relative to those of an infinitely large batch (FACTS["critical batch"]).

    >>> steps_factor(8192, 8192), steps_factor(1024, 8192)
    (2.0, 9.0)
    """
    return 1 + critical / batch


def ema_at(decay: float, growth: float) -> float:
    """Return the decay of a moving average when the batch grows by a factor (FACTS["ema"])."""
    return decay**growth


def round_rate(rate: float) -> float:
    """Round a learning rate to two significant digits: a rule of thumb gives no more.

    >>> round_rate(0.00070711)
    0.00071
    """
    return float(f"{rate:.2g}")
