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

# Critical batch of supervised learning (samples) and of language models (tokens), and the factor by which these priors may be off.
IMAGENET, IMAGENET_CRITICAL = 1_281_167, 8_192
CRITICAL_TOKENS = 500_000
CRITICAL_FACTOR = 4.0

# Batch for fine-tuning: pairs where negatives come from the batch, samples otherwise (FACTS["fine-tuning pairs"], ["fine-tuning"]).
FINETUNE_PAIRS, FINETUNE_SAMPLES = 512, 32

# The learning rate of CLIP pre-training (FACTS["published rate"]).
PRETRAINING_RATE = 5e-4
# The rules for the learning rate were tested for batches up to this factor apart. Further away the rate has to be swept.
RATE_RANGE = 16
# Warm-up of SGD (FACTS["epochs of warm-up"]), and the largest share of a run that a plan or a sweep spends on warm-up.
EPOCHS_OF_WARMUP = 5
MOST_WARMUP = 0.2

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
        "a batch of B drawn uniformly from U unique items holds about B²/2U pairs of equal items",
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
        "text embedders are fine-tuned at hundreds of pairs; DPR, NQ top-20: 8 71.9, 128 79.3, 512 79.9",
        "arXiv 2101.06983",
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
    "lm critical batch": Fact(
        "grows with the data, not with the model; near zero at the start, then levels off",
        "arXiv 2410.21676, 2505.13738, 2505.23971; the number is an assumption: measure it",
        "low",
    ),
    "small lm": Fact("on one device small batches without accumulation do as well", "arXiv 2507.07101", "medium"),
    "linear": Fact("SGD: the learning rate grows linearly with the batch, after warm-up", "Goyal et al., arXiv 1706.02677", "high"),
    "square root": Fact(
        "Adam: the learning rate grows with the square root of the batch, as a first guess; the best rate can rise and fall again",
        "arXiv 2205.10287, 2405.14578",
        "medium",
    ),
    "warm-up": Fact("Adam: 2/(1 − β2) steps", "arXiv 1910.04209", "medium"),
    "epochs of warm-up": Fact("SGD: 5 epochs", "Goyal et al., arXiv 1706.02677", "high"),
    "beta2": Fact("large contrastive batches need β2 = 0.95 to be stable", "arXiv 2303.15343", "high"),
    "beta2 in tokens": Fact("the half-life of β2 is fixed in tokens: β2' = β2^(B'/B)", "arXiv 2507.07101", "medium"),
    "decay": Fact("keeping B / (lr · decay · D) constant", "arXiv 2505.13738", "medium"),
    "ema": Fact("ρ becomes ρ^k when the batch is k times as large", "arXiv 2307.13813", "medium"),
    "published rate": Fact(
        "CLIP models of ViT size are trained at 5e-4 (OpenCLIP's default) to 1e-3 (Inf-CL), at batches of 32k and more",
        "OpenCLIP's documentation; arXiv 2410.17243, section 4.1",
        "medium",
    ),
    "small towers": Fact("1e-3 at 256 is a common starting point", "a convention to sweep around", "low"),
    "ramp": Fact(
        "doubling the batch where the rate would have been halved: 36 % less wall-clock time; warming up the batch: 43 % fewer"
        " steps",
        "arXiv 2510.14717, 2505.23971",
        "medium",
    ),
}  # fmt: skip


def collisions(batch: int, unique: int) -> float:
    """Return the expected pairs of equal items in a batch that is drawn uniformly from so many unique items.

    >>> round(collisions(32768, 70_000))
    7670
    """
    return batch * batch / (2 * unique)


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


def adam_warmup(beta2: float) -> float:
    """Return the steps of warm-up for Adam (FACTS["warm-up"])."""
    return 2 / (1 - beta2)


def sgd_warmup(data: int, batch: int) -> float:
    """Return the steps of warm-up for SGD (FACTS["epochs of warm-up"]). data: samples of an epoch."""
    return EPOCHS_OF_WARMUP * data / batch
