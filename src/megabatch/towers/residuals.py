"""The residual stream of transformers in bf16 under autocast to it.

Autocast computes the products of a block in bf16, but layer norms return fp32 and embeddings of positions are fp32 parameters, so
that the stream to which blocks add is fp32. In bf16 it has half the bytes to read, write and save.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .patches import autocast_dtype
from .repeats import SHORTEST, equal_blocks

Model = TypeVar("Model", bound=nn.Module)
NORMS = (nn.LayerNorm, nn.RMSNorm)


def bf16_residuals(model: Model) -> Model:
    """Keep the residual stream of a transformer in bf16 under autocast to bf16; return the model.

    In each run of at least six equal blocks, inputs of blocks and results of layer norms are rounded to bf16. The last of them
    returns fp32, so that what follows is computed as before. Without autocast to bf16, and for a stream that is bf16 already, as in
    OpenCLIP's own towers, nothing changes. Parameters and the state dict do not change. Call it before `torch.compile`.

    >>> import torch, megabatch
    >>> layers = [torch.nn.TransformerEncoderLayer(64, 2, 128, batch_first=True) for _ in range(6)]
    >>> model = megabatch.bf16_residuals(torch.nn.Sequential(*layers))
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     model(torch.randn(4, 50, 64)).dtype
    torch.float32
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: must be a torch.nn.Module that has the blocks of a transformer")
    if not keep_residuals_in_bf16(model):
        raise ValueError(
            f"the {type(model).__name__} has no run of equal blocks: bf16_residuals needs at least {SHORTEST} of them with norms, "
            "one after the other in a torch.nn.ModuleList or torch.nn.Sequential; leave it out"
        )
    return model


def keep_residuals_in_bf16(model: nn.Module) -> int:
    """Do what `bf16_residuals` does, and return the number of runs of blocks, which may be none."""
    runs = [run.blocks for run in equal_blocks(model) if any(map(_is_norm, run.blocks[0].modules()))]
    for blocks in runs:
        if not _has_hooks(blocks[0]):
            _add_hooks(blocks)
    return len(runs)


class ResidualStream:
    """Hooks of a run of blocks. They are copied and pickled with the model.

    rounds: whether the stream was fp32 at the first block when autocast to bf16 was last enabled there. Blocks that are computed
    again in backward expect that it was the same in all calls since, as it is unless one model has inputs of several kinds.
    """

    def __init__(self) -> None:
        self.rounds = False

    def enter_first(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        stream = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(stream, Tensor):
            warnings.warn(
                f"bf16_residuals has no effect on a {type(block).__name__}: its first argument is no tensor, nor is hidden_states",
                stacklevel=2,
            )
        elif autocast_dtype(stream.device) == torch.bfloat16:
            self.rounds = stream.dtype == torch.float32
        return self.enter(block, args, kwargs)

    def enter(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        # In every block: a LayerScale in fp32, for example, makes the sum fp32 again.
        if args:
            return (self._cast(args[0], torch.float32, torch.bfloat16), *args[1:]), kwargs
        if "hidden_states" in kwargs:
            kwargs = {**kwargs, "hidden_states": self._cast(kwargs["hidden_states"], torch.float32, torch.bfloat16)}
        return args, kwargs

    def leave_norm(self, norm: nn.Module, args: Any, output: Any) -> Any:
        return self._cast(output, torch.float32, torch.bfloat16)

    def leave_last(self, block: nn.Module, args: Any, output: Any) -> Any:
        if type(output) is tuple and output:
            return (self._cast(output[0], torch.bfloat16, torch.float32), *output[1:])
        return self._cast(output, torch.bfloat16, torch.float32)

    def _cast(self, value: Any, source: torch.dtype, target: torch.dtype) -> Any:
        """Return a tensor of the source dtype in the target dtype, and any other value as it is."""
        if not self.rounds or not isinstance(value, Tensor) or value.dtype != source:
            return value
        return value.to(target) if autocast_dtype(value.device) == torch.bfloat16 else value


def _add_hooks(blocks: list[nn.Module]) -> None:
    stream = ResidualStream()
    for place, block in enumerate(blocks):
        block.register_forward_pre_hook(stream.enter if place else stream.enter_first, with_kwargs=True)
        for module in block.modules():
            if isinstance(module, NORMS):
                module.register_forward_hook(stream.leave_norm)
    blocks[-1].register_forward_hook(stream.leave_last)


def _has_hooks(block: nn.Module) -> bool:
    return any(isinstance(getattr(hook, "__self__", None), ResidualStream) for hook in block._forward_pre_hooks.values())


def _is_norm(module: nn.Module) -> bool:
    # By its name too: many models have classes of their own for RMS norms.
    return isinstance(module, NORMS) or "norm" in type(module).__name__.lower()
