"""The facts that the rules rest on: what was found, by whom, how sure it is. Numbers that rules compute with are named once."""

from __future__ import annotations

from typing import Literal, NamedTuple

Confidence = Literal["measured", "high", "medium", "low"]


class Fact(NamedTuple):
    """What was found, where it is written, and how far it carries."""

    says: str
    source: str
    confidence: Confidence


class Number(NamedTuple):
    """One number of a plan, with its reasons. `value` is what a program reads, `shown` what a person does."""

    name: str
    value: float | int | str | None
    shown: str
    why: str
    source: str
    confidence: Confidence


# Contrastive learning: how many negatives pay.
FLOOR = 4096
CEILING = 262_144

# Contrastive learning: how many updates are needed. Two budgets have been tried at several batches; of each, the most updates that
# were too few and the fewest that were enough. What is needed lies between them.
SCRATCH_SEEN, SCRATCH_TOO_FEW, SCRATCH_ENOUGH = 2_000_000, 488, 1_953
LOCKED_SEEN, LOCKED_TOO_FEW, LOCKED_ENOUGH = 450_000_000, 3_433, 13_733
# "More for towers trained from scratch": how many times as many as for a locked one. A middle of what both budgets allow.
SCRATCH_OVER_LOCKED = 2.0
# Under which a batch of 4,096 is no floor.
FLOOR_UPDATES = 2_000

# Samples that can be used at once in supervised learning and language models, as the sources have them; intervals are wide.
IMAGENET, IMAGENET_CRITICAL = 1_281_167, 8_192
CRITICAL_TOKENS = 500_000
CRITICAL_FACTOR = 4.0

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
        "at fixed learning rate and epochs the best batch grows with the data (CC3M 16k, CC12M 32k, LAION-400M 256k), and 1M loses"
        " 1.35 points against 64k",
        "Inf-CL, arXiv 2410.17243, figure 5 and table 3",
        "medium",
    ),
    "collisions": Fact(
        "with U unique items drawn uniformly, a batch of B holds about B²/2U colliding pairs",
        "arithmetic; sentence-transformers issue 3189",
        "high",
    ),
    "no accumulation": Fact(
        "accumulation adds no negatives: 8 steps of 8 have 7 negatives a sample, one of 64 has 63; the gradient is 31 % off",
        "megabatch's own run",
        "high",
    ),
    "fine-tuning pairs": Fact(
        "text embedders fine-tune at hundreds; DPR, NQ top-20: 8 71.9, 128 79.3, 512 79.9", "arXiv 2101.06983", "medium"
    ),
    "fine-tuning": Fact("16 to 32 for BERT-size models; sweep for LoRA", "arXiv 2602.09492 for LoRA; a habit else", "low"),
    "critical batch": Fact(
        "steps to a target fall as 1 + B_crit/B: below the critical batch doubling nearly halves them, above it buys nothing; the"
        " critical batch of ImageNet is thousands to tens of thousands",
        "McCandlish et al., arXiv 1812.06162 (the form of the curve is recalled)",
        "medium",
    ),
    "imagenet": Fact("ResNet-50 trains without loss up to 8,192", "Goyal et al., arXiv 1706.02677", "high"),
    "lm critical batch": Fact(
        "grows with the data, not with the model; near zero at the start, then levels off",
        "arXiv 2410.21676, 2505.13738, 2505.23971; the number is an assumption: measure it",
        "low",
    ),
    "small lm": Fact("on one device small batches without accumulation do as well", "arXiv 2507.07101", "medium"),
    "linear": Fact("SGD: the learning rate grows with the batch, after warm-up", "Goyal et al., arXiv 1706.02677", "high"),
    "square root": Fact(
        "Adam: with the square root of the batch, as a start; it can rise and fall again", "arXiv 2205.10287, 2405.14578", "medium"
    ),
    "warm-up": Fact("Adam: 2/(1 − β2) steps", "arXiv 1910.04209", "medium"),
    "epochs of warm-up": Fact("SGD: 5 epochs", "Goyal et al., arXiv 1706.02677", "high"),
    "beta2": Fact("large contrastive batches need β2 = 0.95 to be stable", "arXiv 2303.15343", "high"),
    "beta2 in tokens": Fact("the half-life of β2 is fixed in tokens: β2' = β2^(B'/B)", "arXiv 2507.07101", "medium"),
    "decay": Fact("hold B / (lr · decay · D)", "arXiv 2505.13738", "medium"),
    "ema": Fact("ρ becomes ρ^k where the batch is k times as large", "arXiv 2307.13813", "medium"),
    "published rate": Fact(
        "CLIPs of ViT size are trained at 5e-4 (OpenCLIP's default) to 1e-3 (Inf-CL), at batches of 32k and more",
        "OpenCLIP's documentation; arXiv 2410.17243, section 4.1",
        "medium",
    ),
    "small towers": Fact("a stated base, 1e-3 at 256", "a convention; what to sweep around", "low"),
    "ramp": Fact(
        "doubling the batch where one would have halved the rate: 36 % less wall-clock; warming up the batch: 43 % fewer steps",
        "arXiv 2510.14717, 2505.23971",
        "medium",
    ),
}  # fmt: skip
