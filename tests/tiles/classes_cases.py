"""Cases of class_softmax_loss that are alike in Triton's interpreter and on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import megabatch
from megabatch import reference

OPTIONS = [
    {"margin": 0.35},
    {"angular_margin": 0.4, "weights": True},
    {"label_smoothing": 0.1},
    {"sample": 0.5},
]


def class_errors(
    options: dict, dtype: torch.dtype, device: str, *, rows: int = 37, classes: int = 90, width: int = 24, **more
) -> dict[str, float]:
    """Return the largest errors of value and gradients, relative to the largest entries, against the formula in fp64."""
    generator = torch.Generator().manual_seed(rows + classes)
    x, y = (F.normalize(torch.randn(n, width, generator=generator), dim=-1).to(dtype) for n in (rows, classes))
    # Some classes have several rows.
    targets = torch.randint(0, classes // 2, (rows,), generator=generator)
    scale = torch.tensor(16.0)
    options = dict(options)
    if options.pop("weights", False):
        options["weights"] = torch.linspace(0.2, 2, rows)
    leaves = [t.to(device).detach().requires_grad_() for t in (x, y, scale)]
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    sampling = {"generator": torch.Generator().manual_seed(3)} if "sample" in options else {}
    value = megabatch.class_softmax_loss(*leaves[:2], targets.to(device), leaves[2], **moved, **sampling, **more)
    found = [value, *torch.autograd.grad(value, leaves)]
    exact = [t.double().requires_grad_() for t in (x, y, scale)]
    formula_options = {name: v.double() if isinstance(v, torch.Tensor) else v for name, v in options.items() if name != "sample"}
    if sampling:
        formula_options["kept"] = found[2].abs().sum(1).cpu() > 0
    true_value = reference.class_softmax_loss(*exact[:2], targets, exact[2], **formula_options)
    true = [true_value, *torch.autograd.grad(true_value, exact)]
    names = ("value", "x", "y", "scale")
    return {
        name: float((a.detach().double().cpu() - b.detach()).abs().max() / b.detach().abs().max())
        for name, a, b in zip(names, found, true, strict=True)
    }
