"""Inputs and comparisons that the loss tests share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import megabatch
from megabatch import reference

KINDS = ("random", "clustered", "identical", "opposite")


# Losses that are computed in one piece at small batches, and embeddings with a scale whose logits need different care.
LOSSES_IN_ONE_PIECE = {"clip": ("clip_loss", {}), "rows only": ("clip_loss", {"symmetric": False}), "siglip": ("siglip_loss", {})}
INPUTS_OF_ONE_PIECE = {
    "small logits": ({}, 20.0),
    "easy pairs": ({"kind": "clustered"}, 50.0),
    "negative scale": ({"norm": 2.0}, -5.0),
    "no common exponent": ({}, 500.0),
    "huge": ({"norm": 100.0}, 1e4),
}


def embeddings(
    rows: int, extra: int = 0, width: int = 8, kind: str = "random", norm: float = 1.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return fp64 embeddings x (rows, width) and y (rows + extra, width) of the given norm."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, dtype=torch.float64, generator=g)
    y = torch.randn(rows + extra, width, dtype=torch.float64, generator=g)
    if kind == "clustered":
        centres = torch.randn(3, width, dtype=torch.float64, generator=g)
        y = centres[torch.arange(len(y)) % 3] + 0.1 * y
        x = y[:rows] + 0.1 * x
    if kind in ("identical", "opposite"):
        x, y = x[:1].expand(rows, width), x[:1].expand(rows + extra, width)
    if kind == "opposite":
        x = x * torch.where(torch.arange(rows) % 2 == 0, 1, -1)[:, None]
    return norm * normalize(x, dim=1), norm * normalize(y, dim=1)


@dataclass
class Case:
    """A loss, its inputs in fp64 and its options."""

    loss: str
    x: Tensor
    y: Tensor
    scalars: tuple[float, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, module: Any, dtype: torch.dtype = torch.float64, **more: Any) -> dict[str, Tensor]:
        """Return value and gradients, as fp64, of a loss computed in dtype."""
        x, y = (t.to(dtype).requires_grad_() for t in (self.x.clone(), self.y.clone()))
        weights = self.options.get("weights")
        options = self.options if weights is None else {**self.options, "weights": weights.to(dtype)}
        scalars = [torch.tensor(s, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32)) for s in self.scalars]
        scalars = [s.requires_grad_() for s in scalars]
        value = getattr(module, self.loss)(x, y, *scalars, **options, **more)
        value.backward()
        found = {"value": value, "x": x.grad, "y": y.grad}
        found |= dict(zip(("scale", "bias"), (s.grad for s in scalars), strict=False))
        return {name: t.detach().double() for name, t in found.items()}

    def rounded(self, dtype: torch.dtype) -> Case:
        """Return the same case with inputs that dtype represents exactly, so that only the arithmetic has errors."""
        options = {k: v.to(dtype).double() if k == "weights" and v is not None else v for k, v in self.options.items()}
        return Case(self.loss, self.x.to(dtype).double(), self.y.to(dtype).double(), self.scalars, options)


def ours(case: Case, dtype: torch.dtype = torch.float64, **more: Any) -> dict[str, Tensor]:
    return case.run(megabatch, dtype, **more)


def formula(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return case.run(reference, dtype)


def largest_logit(case: Case) -> float:
    """Return a bound of |scale * x·y + bias|."""
    bias = abs(case.scalars[1]) if len(case.scalars) > 1 else 0.0
    return abs(case.scalars[0]) * (case.x.norm(dim=1).max() * case.y.norm(dim=1).max()).item() + bias


def errors(case: Case, found: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, float]:
    """Return the errors of value and gradients, each relative to the size of its terms; inf if it is not finite.

    Relative to the terms and not to the sum: if a gradient cancels to zero, as for identical rows, the rounding of terms remains.
    """
    x_norm, y_norm = case.x.norm(dim=1).max(), case.y.norm(dim=1).max()
    pairs = len(case.y) if case.loss == "siglip_loss" else 1
    terms = {
        "value": pairs * (1 + largest_logit(case)),
        "x": abs(case.scalars[0]) * y_norm * pairs / len(case.x) ** 0.5,
        "y": abs(case.scalars[0]) * x_norm * pairs / len(case.x) ** 0.5,
        "scale": x_norm * y_norm * pairs,
        "bias": pairs,
    }
    return {
        name: ((found[name] - t).norm() / (t.norm() + terms[name] + 1e-300)).item() if found[name].isfinite().all() else math.inf
        for name, t in true.items()
    }


CLIP_OPTIONS = {
    "ids": ({}, {"ids": True}, {"ids": True, "duplicates": "positive"}),
    "label_smoothing": ({}, {"label_smoothing": 0.1}),
    "drop_above": ({}, {"drop_above": 0.2}, {"drop_above": -0.1}),
    "weights": ({}, {"weights": True}),
    "direction": ({}, {"symmetric": False}, {"symmetric": False, "extra": 7}),
}


def build(loss: str, rows: int, scalars: tuple[float, ...], options: dict, seed: int = 0, **shape) -> Case:
    """Return a case. In options, True stands for random ids or weights, and drop_above is in units of the norm squared."""
    options = dict(options)
    x, y = embeddings(rows, options.pop("extra", 0), seed=seed, **shape)
    g = torch.Generator().manual_seed(seed)
    if options.get("ids"):
        options["ids"] = torch.randint(0, max(1, rows // 2), (len(y),), generator=g)
    if options.get("weights"):
        options["weights"] = torch.rand(rows, dtype=torch.float64, generator=g) + 0.1
    if "drop_above" in options:
        options["drop_above"] *= shape.get("norm", 1.0) ** 2
    return Case(loss, x, y, scalars, options)
