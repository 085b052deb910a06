"""Inputs of infonce_loss that its tests share."""

from __future__ import annotations

import random
from typing import Any

import torch
from cases import KINDS, Case, embeddings

import megabatch
from megabatch.losses.directions import CROSS, DIRECTIONS
from megabatch.objectives import contains_positives

ALL = DIRECTIONS


def draw_options(rng: random.Random, rows: int, extra: int, norm: float) -> dict[str, Any]:
    """Return options that go together, at random; `ids`, `weights`, `owner`, `queue` and `guide` stand for tensors."""
    options: dict[str, Any] = {"directions": tuple(rng.sample(ALL, rng.randint(1, 4)))}
    if rng.random() < 0.15 and extra:
        options |= {"directions": ("x_to_y",), "in_batch": False}
    directions = options["directions"]
    crosses = set(directions) <= set(CROSS)
    if crosses and rng.random() < 0.5:
        options["partition"] = "separate"
    elif contains_positives(directions, "by_anchor") and rng.random() < 0.5:
        options["partition"] = "by_anchor"
    if "x_to_y" in directions and rng.random() < 0.4:
        options |= {"hardness": rng.choice((2.0, 9.0)) / norm**2, "hardness_on": rng.choice(("all", "hard", "in_batch"))}
    elif rng.random() < 0.3:
        options["label_smoothing"] = 0.1
    if rng.random() < 0.4:
        options["ids"] = True
        if crosses and "hardness" not in options and options.get("in_batch", True) and rng.random() < 0.5:
            options["duplicates"] = "positive"
    if rng.random() < 0.3:
        above = rng.choice((0.1, -0.1)) * norm**2
        options["drop_above"] = above if rng.random() < 0.5 else {directions[0]: above}
    if rng.random() < 0.3:
        options["drop_ratio"] = 0.95 if rng.random() < 0.5 else {directions[-1]: 0.8}
    if "x_to_y" in directions and rng.random() < 0.3:
        options["queue"] = rng.randint(0, 9)
    elif rng.random() < 0.3:
        options["guide"] = rng.choice((0.0, 0.1, -0.1)), rng.choice(("absolute", "relative"))
    if rng.random() < 0.3:
        options["weights"] = True
    return options


def build_infonce(rows: int, extra: int, scale: float, options: dict, seed: int = 0, width: int = 8, **shape: Any) -> Case:
    """Return a case, with tensors in place of the options that stand for them."""
    options, g = dict(options), torch.Generator().manual_seed(seed)
    x, y = embeddings(rows, extra, width, seed=seed, **shape)
    if options.get("ids"):
        options["ids"] = torch.randint(0, max(1, rows // 2), (len(y),), generator=g)
    if options.get("weights"):
        options["weights"] = torch.rand(rows, dtype=torch.float64, generator=g) + 0.1
    if "queue" in options:
        options["queue"] = embeddings(options["queue"], width=width, seed=seed + 1, norm=shape.get("norm", 1.0))[0]
    if "guide" in options:
        options["guide"] = megabatch.Guide(*embeddings(rows, extra, 3, seed=seed + 2), *options["guide"])
    options["negatives_of"] = torch.randint(0, rows, (extra,), generator=g)
    return Case("infonce_loss", x, y, (scale,), options)


def random_case(seed: int) -> Case:
    """Return any case that the loss accepts."""
    rng = random.Random(seed)
    rows, extra, norm = rng.randint(1, 24), rng.choice((0, 0, 5, 13)), rng.choice((1e-3, 1.0, 30.0))
    options = draw_options(rng, rows, extra, norm)
    scale = rng.choice((0.01, 1.0, 20.0, 100.0, 1000.0, 0.0, -3.0))
    return build_infonce(rows, extra, scale, options, seed, rng.randint(2, 9), kind=rng.choice(KINDS), norm=norm)


def largest_infonce_logit(case: Case) -> float:
    """Return a bound of the logits of all directions."""
    queue = case.options.get("queue")
    norms = [t.norm(dim=1).max().item() for t in (case.x, case.y, queue) if t is not None and len(t)]
    return (abs(case.scalars[0]) + case.options.get("hardness", 0.0)) * max(norms) ** 2
