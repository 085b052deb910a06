"""Ask the rules of plans and audits for every published training: `python -m benchmarks.practice`.

For each recipe of `megabatch.published` the rules are asked for the batch (from what is trained, the start and the samples seen),
and for rate and warm-up at the published batch. The result is kept in benchmarks/results/practice.json: agreement, and every miss
with its reason.

The constants of the rules were chosen with most of these recipes in view, so agreement alone proves little. Three further numbers
stand beside it. "leave one out": each group of recipes (kind, start, hard negatives, LoRA) gets one factor, the median of
published / advised over the other recipes of the group; it shows how far the answer for a recipe depends on the recipe itself.
"nearest other": the value of the most similar other recipe is copied, as a person with the table but without rules would do.
"blind": the recipes that were read after the rules had been written down, none of which changed them.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from megabatch.recipes import RECIPES, Recipe, advise_batch, advise_rate, advise_warmup, nearest, power_near

RESULT = Path(__file__).parent / "results" / "practice.json"
DOCS = Path(__file__).resolve().parents[1] / "docs" / "planning.md"
# A value counts as agreeing if it lies within this factor of the published one, and the share that should.
WITHIN = {"batch": (2.0, 0.80), "rate": (3.0, 0.90), "warm-up": (4.0, 0.80)}
# Why a rule that is right for the kind differs from a recipe.
REASONS = {
    ("batch", "ALIGN"): "a batch from 2021; later trainings with as many samples take two to five times as many pairs",
    ("batch", "BGE zh (C-Pack)"): "as many pairs as fit in memory; the paper's own comparison still gains from 2,048 to 19,200",
    ("batch", "Contriever"): "131,072 further negatives come from a queue, which replaces the batch",
    ("batch", "all-MiniLM-L6-v2"): "128 pairs on each of eight TPU cores, as memory allowed without gradient caching",
    ("batch", "all-mpnet-base-v2"): "128 pairs on each of eight TPU cores, as memory allowed without gradient caching",
    ("batch", "VLM2Vec Qwen2-VL-2B"): "gradient caching was used to reach it; the batch was not tuned against updates",
    ("batch", "ColPali"): "late interaction: each query is compared with all patches, and memory decided",
    ("batch", "DPR, Natural Questions"): "8 GPUs of 16, as memory allowed; DPR at 512 gains 0.6 points (arXiv 2101.06983)",
    ("batch", "llama-embed-nemotron-8b"): "no negatives from the batch: only the four mined ones count",
    ("batch", "GPT-2 124M, OpenWebText"): "chosen to reproduce GPT-2's and GPT-3's half a million tokens, not for 300 B tokens",
    ("batch", "GPT-3 125M"): "GPT-3 chose the batch by model size; later measurements show that data decides (arXiv 2505.13738)",
    ("batch", "ResNet-50, ImageNet, large batch"): "the largest batch that loses nothing: the upper end of the interval",
    ("batch", "CLIPA ViT-B/16, LAION-400M"): "images of 112 pixels: the batch is large to keep 8 GPUs busy; inside the interval",
    ("rate", "SmolLM 135M"): "a constant rate with a long decay (trapezoidal schedule), at which small models take more",
    ("warm-up", "OLMo 2 7B"): "LLaMA's 2,000 in a run of 929,000 steps",
    ("rate", "BGE zh (C-Pack)"): "ten times below nomic-embed, GTE and E5 at a similar batch",
    ("rate", "llama-embed-nemotron-8b"): "an embedder already, trained further",
    ("rate", "all-MiniLM-L6-v2"): "the same rate for every size of the all-* models",
    ("rate", "Long-CLIP, ShareGPT4V"): "keeps CLIP's alignment on purpose; the authors corrected the rate downwards",
    ("rate", "DeiT-B, fine-tuning at 384"): "the same data at a higher resolution: only positions change",
    ("rate", "MAE ViT-B, fine-tuning"): "layer-wise decay 0.65: the lower layers train at a thousandth of it",
    ("warm-up", "DataComp xlarge, ViT-L/14"): "OpenCLIP's default of 10,000",
    ("warm-up", "LLM2Vec Llama-3-8B"): "300 of a schedule that is cut off after 1,000 steps",
    ("warm-up", "GPT-3 175B"): "375 M tokens for every size: 117 steps of the largest batch, after a ramp of the batch itself",
    ("warm-up", "TinyLlama 1.1B"): "LLaMA's 2,000 in a run of 1.4 M steps",
}  # fmt: skip

# Recipes that were read after the rules had been written down.
BLIND = {
    "CLIPA ViT-B/16, LAION-400M", "CLIPA ViT-L/16, LAION-400M", "CLIPA ViT-B/16, fine-tuning", "VLM2Vec-V2 Qwen2-VL-2B", "ColQwen2",
    "SmolLM 135M", "OLMo 1B", "OLMo 2 7B",
}  # fmt: skip


class Case(NamedTuple):
    """A published value beside the advised one."""

    quantity: str
    recipe: Recipe
    published: float
    advised: float

    @property
    def factor(self) -> float:
        """How many times one is the other, at least 1."""
        return ratio(self.published, self.advised)


def ratio(one: float, other: float) -> float:
    return max(one / other, other / one)


def cases() -> list[Case]:
    """Ask for everything that a recipe states."""
    asked = []
    for recipe in RECIPES:
        task, batch = recipe.task, recipe.batch
        advice = advise_batch(task)
        if batch is not None and advice is not None:
            asked.append(Case("batch", recipe, batch, advice.value))
        if recipe.lr is not None:
            at = batch or (None if advice is None else round(advice.value)) or 32_768
            asked.append(Case("rate", recipe, recipe.lr, advise_rate(task, at).value))
        if recipe.warmup is not None and batch is not None and task.seen is not None:
            asked.append(Case("warm-up", recipe, recipe.warmup, advise_warmup(task, batch).value))
    return asked


def group(case: Case) -> tuple[object, ...]:
    task = case.recipe.task
    return case.quantity, task.kind, task.start, bool(task.negatives), task.lora is not None, task.optimizer == "sgd"


def left_out(case: Case, asked: list[Case]) -> float:
    """Return the advised value times the median factor of the other recipes of the group; a batch stays a power of two."""
    others = [other.published / other.advised for other in asked if group(other) == group(case) and other.recipe is not case.recipe]
    value = case.advised * (statistics.median(others) if others else 1.0)
    return power_near(value) if case.quantity == "batch" else value


def copied(case: Case) -> float | None:
    """Return the value of the most similar other recipe that states it, or None."""
    fields: dict[str, Callable[[Recipe], float | None]] = {
        "batch": lambda recipe: recipe.batch,
        "rate": lambda recipe: recipe.lr,
        "warm-up": lambda recipe: recipe.warmup,
    }
    for other in nearest(case.recipe.task, len(RECIPES)):
        value = fields[case.quantity](other)
        if other is not case.recipe and value is not None:
            return value
    return None


def share(factors: Iterable[float], limit: float) -> float:
    # Rates are rounded to two digits.
    found = [factor <= limit * 1.01 for factor in factors]
    return sum(found) / len(found)


def summary(asked: list[Case]) -> dict[str, dict[str, float]]:
    """Return the shares that agree, in all three readings, by quantity."""
    table = {}
    for quantity, (limit, goal) in WITHIN.items():
        of = [case for case in asked if case.quantity == quantity]
        others = [(case, copied(case)) for case in of]
        table[quantity] = {
            "recipes": len(of),
            "within": limit,
            "goal": goal,
            "agree": round(share((case.factor for case in of), limit), 3),
            "leave one out": round(share((ratio(case.published, left_out(case, asked)) for case in of), limit), 3),
            "blind": round(share((case.factor for case in of if case.recipe.name in BLIND), limit), 3),
            "blind recipes": sum(case.recipe.name in BLIND for case in of),
            "nearest other": round(share((ratio(c.published, value) if value else math.inf for c, value in others), limit), 3),
        }
    return table


def misses(asked: list[Case]) -> list[dict[str, object]]:
    """Return every value that does not agree, with its reason."""
    return [
        {
            "quantity": case.quantity,
            "recipe": case.recipe.name,
            "published": case.published,
            "advised": case.advised,
            "factor": round(case.factor, 1),
            "why": REASONS.get((case.quantity, case.recipe.name), "no reason known"),
        }
        for case in asked
        if case.factor > WITHIN[case.quantity][0] * 1.01
    ]


def as_markdown(table: dict[str, dict[str, float]]) -> str:
    """Return the summary as a table for docs/planning.md."""
    head = "| | trainings | within | agree | leave one out | nearest other | blind |\n"
    head += "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    rows = [
        f"| {quantity} | {line['recipes']} | {line['within']:g}× | **{line['agree']:.0%}** | {line['leave one out']:.0%}"
        f" | {line['nearest other']:.0%} | {line['blind']:.0%} of {line['blind recipes']} |\n"
        for quantity, line in table.items()
    ]
    return head + "".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT, help="File of the result.")
    out = parser.parse_args().out
    asked = cases()
    rows = [
        {
            "recipe": case.recipe.name,
            "quantity": case.quantity,
            "published": case.published,
            "advised": case.advised,
            "blind": case.recipe.name in BLIND,
            "source": case.recipe.source,
        }
        for case in asked
    ]
    result = {"summary": summary(asked), "misses": misses(asked), "rows": rows}
    for quantity, line in result["summary"].items():
        print(quantity, line)
    for miss in result["misses"]:
        print(f"{miss['quantity']:8} {miss['recipe']:40} {miss['published']:>10,.6g} {miss['advised']:>10,.6g}  {miss['why']}")
    out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if out == RESULT:
        text = DOCS.read_text("utf-8")
        part = as_markdown(summary(asked))
        text = re.sub(r"(<!-- practice -->\n).*?(<!-- end -->)", lambda found: found[1] + part + found[2], text, flags=re.S)
        DOCS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
