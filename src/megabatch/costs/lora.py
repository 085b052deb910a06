"""LoRA adapters in a model of which only the cost is of interest: frozen weights, and two small matrices beside each of them.

The adapters stand beside every linear layer inside the model's blocks, as with PEFT's target "all-linear". Frozen weights are kept
in the precision of the run: they need no fp32 copy for the optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .strategy import Precision

# Modules that read the weights of their linear layers instead of calling them: an adapter there would compute nothing. PEFT adds
# one all the same, which gets no gradient.
READ_WEIGHTS = (nn.MultiheadAttention,)
FROZEN_DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class AdaptedLinear(nn.Module):
    """base(x) + up(down(x)), with the base frozen. Models that read a weight of the layer, as for its dtype, get the base's."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    @property
    def weight(self) -> Any:
        return self.base.weight

    @property
    def bias(self) -> Any:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x.to(self.down.weight.dtype)))


def add_adapters(model: nn.Module, rank: int, precision: Precision) -> nn.Module:
    """Freeze the model, in place, give the linear layers of its blocks adapters of this rank, and return it.

    Raises ValueError if there is no linear layer in a list of blocks.
    """
    model.requires_grad_(False)
    dtype = FROZEN_DTYPES[precision]
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    blocks = [member for owner in model.modules() if isinstance(owner, (nn.ModuleList, nn.Sequential)) for member in owner]
    layers = {
        (id(owner), name): (owner, name, child)
        for block in blocks
        for owner in block.modules()
        if not isinstance(owner, READ_WEIGHTS)
        for name, child in owner.named_children()
        if _widths(child) is not None
    }
    if not layers:
        raise ValueError(
            f"lora is {rank}: {type(model).__name__} has no linear layers in blocks that could have adapters;"
            " leave it out, or name a transformer"
        )
    for owner, name, child in layers.values():
        inputs, outputs = _widths(child) or (0, 0)
        setattr(owner, name, AdaptedLinear(child, inputs, outputs, rank))
    return model


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """Return the widths of a linear layer's input and output; None for other modules."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    # transformers' linear layer with a transposed weight, which GPT-2 has.
    if type(module).__name__ == "Conv1D" and isinstance(module.weight, Tensor):
        return int(module.weight.shape[0]), int(module.weight.shape[1])
    return None
