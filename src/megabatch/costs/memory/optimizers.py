"""Optimizers as they are on the device: the class itself takes its step over fake parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...optimizers import LR, STATES
from .setup import Setup

# bitsandbytes quantises state in blocks of this many numbers, each with a scale in fp32, and leaves smaller tensors alone.
BLOCK, SMALLEST = 256, 4096


class EightBitAdam(torch.optim.Optimizer):
    """The memory of AdamW with state in 8 bits, as bitsandbytes keeps it; it computes nothing."""

    def __init__(self, parameters: Any, lr: float = LR) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.grad is not None and not state:
                    small = parameter.numel() < SMALLEST
                    for moment in ("first", "second"):
                        state[moment] = torch.empty_like(parameter, dtype=torch.float32 if small else torch.uint8)
                        if not small:
                            scales = -(-parameter.numel() // BLOCK)
                            state[f"{moment} scales"] = torch.empty(scales, dtype=torch.float32, device=parameter.device)


def build_optimizer(setup: Setup, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """The optimizer over fake parameters, with the implementation that it would have on the device."""
    kind: Any = setup.optimizer
    arguments: Mapping[str, Any] = {}
    if isinstance(setup.optimizer, str):
        state = STATES[setup.optimizer]
        if not state.torch_class:
            return EightBitAdam(parameters)
        kind, arguments = getattr(torch.optim, state.torch_class), state.arguments
    return kind(parameters, lr=LR, **arguments, **_implementation(kind, setup))


def _implementation(kind: Any, setup: Setup) -> dict[str, bool]:
    """fused or foreach, where the class can be asked for it."""
    known = inspect.signature(kind.__init__).parameters
    if setup.fused:
        if "fused" not in known:
            raise ValueError(f"fused is True, and {kind.__name__} has no fused kernel; leave it out")
        return {"fused": True}
    # On CUDA torch takes lists of tensors by itself, on a CPU it does not.
    return {"foreach": setup.device == "cuda"} if "foreach" in known else {}


def created_state(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
    """Has the optimizer create its state, as its first step does, and leaves no gradient."""
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
