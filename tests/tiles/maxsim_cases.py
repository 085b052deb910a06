"""Cases of maxsim_loss that are alike in Triton's interpreter and on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import megabatch
from megabatch import reference

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
    rows, documents, query_tokens, document_tokens, width = shape
    options = dict(options)
    g = torch.Generator().manual_seed(sum(shape))
    x, y = (
        F.normalize(torch.randn(n, t, width, generator=g), dim=-1).to(dtype)
        for n, t in ((rows, query_tokens), (documents, document_tokens))
    )
    scale = torch.tensor(3.0)
    if options.pop("masks", False):
        options["x_mask"] = torch.rand(rows, query_tokens, generator=g) < 0.7
        options["y_mask"] = torch.rand(documents, document_tokens, generator=g) < 0.5
        # No token at all; the last token alone; no token in the first half.
        options["y_mask"][1] = False
        options["y_mask"][2] = torch.arange(document_tokens) == document_tokens - 1
        options["y_mask"][3, : document_tokens // 2] = False
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
