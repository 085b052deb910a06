"""Cases of maxsim_loss that are alike in Triton's interpreter and on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import megabatch
from megabatch import reference

# Where two tokens nearly tie for a maximum, rounding decides which of them gets the gradient. A similarity of unit vectors in fp32
# is off by some 1e-7 at most.
LEAST_GAP, MOST_DRAWS = 1e-6, 50

# Options, and what the batch is like: queries, documents, their tokens and the width.
CASES = {
    "one direction": ({}, (5, 5, 8, 16, 16)),
    "holes, empty documents, extra negatives": ({"masks": True}, (4, 9, 12, 37, 24)),
    "both directions": ({"masks": True, "symmetric": True, "average_tokens": True}, (6, 6, 3, 33, 8)),
    "normalized": ({"masks": True, "normalize": True, "label_smoothing": 0.1}, (4, 5, 17, 34, 20)),
    "long queries": ({"masks": True, "ids": True, "duplicates": "positive"}, (3, 4, 40, 9, 16)),
    "places of two bytes": ({"weights": True}, (2, 3, 2, 270, 16)),
}


def maxsim_errors(options: dict, shape: tuple[int, ...], dtype: torch.dtype, device: str, **more) -> dict[str, float]:
    """Return the errors of value and gradients against the formula in fp64, relative to the norms."""
    rows, documents = shape[:2]
    options = dict(options)
    x, y, masks = _batch_without_ties(shape, options.pop("masks", False), dtype)
    options |= masks
    scale = torch.tensor(3.0)
    if options.pop("ids", False):
        options["ids"] = torch.arange(documents) % 2
    if options.pop("weights", False):
        options["weights"] = torch.linspace(0.2, 2, rows)
    leaves = [t.to(device).detach().requires_grad_() for t in (x, y, scale)]
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    value = megabatch.maxsim_loss(*leaves, **moved, backend="fused", **more)
    found = [value, *torch.autograd.grad(value, leaves)]
    exact = [t.double().requires_grad_() for t in (x, y, scale)]
    true_value = reference.maxsim_loss(*exact, **options)
    true = [true_value, *torch.autograd.grad(true_value, exact)]
    names = ("value", "x", "y", "scale")
    return {
        name: float((a.detach().double().cpu() - b.detach()).norm() / b.detach().norm())
        for name, a, b in zip(names, found, true, strict=True)
    }


def _batch_without_ties(
    shape: tuple[int, ...], masked: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the first random tokens and masks in which the best token leads by LEAST_GAP everywhere."""
    for draw in range(MOST_DRAWS):
        x, y, masks = _batch(shape, masked, dtype, sum(shape) + draw)
        if _smallest_gap(x, y, masks) >= LEAST_GAP:
            return x, y, masks
    raise AssertionError(f"all of {MOST_DRAWS} batches of {shape} have tokens that nearly tie for a maximum")


def _batch(
    shape: tuple[int, ...], masked: bool, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    rows, documents, query_tokens, document_tokens, width = shape
    g = torch.Generator().manual_seed(seed)
    x, y = (
        F.normalize(torch.randn(n, t, width, generator=g), dim=-1).to(dtype)
        for n, t in ((rows, query_tokens), (documents, document_tokens))
    )
    if not masked:
        return x, y, {}
    x_mask = torch.rand(rows, query_tokens, generator=g) < 0.7
    y_mask = torch.rand(documents, document_tokens, generator=g) < 0.5
    # No token at all; the last token alone; no token in the first half.
    y_mask[1] = False
    y_mask[2] = torch.arange(document_tokens) == document_tokens - 1
    y_mask[3, : document_tokens // 2] = False
    return x, y, {"x_mask": x_mask, "y_mask": y_mask}


def _smallest_gap(x: torch.Tensor, y: torch.Tensor, masks: dict[str, torch.Tensor]) -> float:
    """Return by how much the best token exceeds the second best at least, over all query tokens and documents that count."""
    similarity = torch.einsum("itd,jud->ijtu", x.double(), y.double())
    if masks:
        similarity.masked_fill_(~masks["y_mask"][:, None], -torch.inf)
    best, second = similarity.topk(2, dim=3).values.unbind(3)
    gap = best - second
    # Infinite with one token, NaN without any.
    gap[gap.isnan()] = torch.inf
    if masks:
        gap.masked_fill_(~masks["x_mask"][:, None], torch.inf)
    return gap.min().item()
