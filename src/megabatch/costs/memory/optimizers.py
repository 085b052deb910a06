"""The optimizer's state and temporaries: the optimizer's own class runs its step on fake parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...optimizers import LR, STATES
from .setup import Setup

# bitsandbytes quantises state in blocks of this many elements, with one fp32 scale each; smaller tensors keep fp32 state.
BLOCK_ELEMENTS, SMALLEST_QUANTISED = 256, 4096


class EightBitAdam(torch.optim.Optimizer):
    """Allocates the 8-bit state of bitsandbytes' AdamW; computes nothing."""

    def __init__(self, parameters: Any, lr: float = LR) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.grad is not None and not state:
                    small = parameter.numel() < SMALLEST_QUANTISED
                    for moment in ("first", "second"):
                        state[moment] = torch.empty_like(parameter, dtype=torch.float32 if small else torch.uint8)
                        if not small:
                            scales = -(-parameter.numel() // BLOCK_ELEMENTS)
                            state[f"{moment} scales"] = torch.empty(scales, dtype=torch.float32, device=parameter.device)


def build_optimizer(setup: Setup, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer over fake parameters, with the implementation (fused, foreach) that it has on the device."""
    optimizer_class: Any = setup.optimizer
    arguments: Mapping[str, Any] = {}
    if isinstance(setup.optimizer, str):
        state = STATES[setup.optimizer]
        if not state.torch_class:
            return EightBitAdam(parameters)
        optimizer_class, arguments = getattr(torch.optim, state.torch_class), state.arguments
    return optimizer_class(parameters, lr=LR, **arguments, **_implementation(optimizer_class, setup))


def _implementation(optimizer_class: Any, setup: Setup) -> dict[str, bool]:
    """Return the argument fused or foreach, if the class takes it."""
    accepted = inspect.signature(optimizer_class.__init__).parameters
    if setup.fused:
        if "fused" not in accepted:
            raise ValueError(f"fused is True, but {optimizer_class.__name__} has no fused kernel; leave fused out")
        return {"fused": True}
    # By default torch uses lists of tensors (foreach) on CUDA and single tensors on a CPU.
    return {"foreach": setup.device == "cuda"} if "foreach" in accepted else {}


def create_state(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
    """Make the optimizer allocate its state, as its first step does; leave no gradients."""
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
