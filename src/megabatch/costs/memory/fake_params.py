"""A model without its memory: built where nothing is stored, its parameters and buffers then replaced by fake ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .recorder import Recorder


def built(build: Callable[[], Any]) -> Any:
    """What `build` returns, made on the meta device, or on the CPU where its code reads numbers, which meta tensors lack."""
    try:
        with torch.device("meta"):
            return build()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error).lower():
            raise
    with torch.device("cpu"):
        return build()


class StandIn:
    """Replaces tensors by fake ones. What was one tensor in several places (tied weights, a shared tower) stays one."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        # The original is kept beside its replacement, so that its id does not become another's.
        self._replaced: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, module: nn.Module) -> nn.Module:
        """The module itself, with fake parameters and buffers in place of its own."""
        with self.recorder.during("setup", "weights"):
            for owner in module.modules():
                for tensors in (owner._parameters, owner._buffers):
                    for name, tensor in tensors.items():
                        if tensor is not None:
                            tensors[name] = self._replacement(tensor)
        return module

    def _replacement(self, tensor: Tensor) -> Any:
        if id(tensor) not in self._replaced:
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            fake = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
            self._replaced[id(tensor)] = tensor, fake
            self._replaced[id(fake)] = fake, fake
        return self._replaced[id(tensor)][1]
