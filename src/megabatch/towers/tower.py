"""A tower: an encoder together with the preparation of its samples; and how an encoder from elsewhere becomes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megabatch import packages

from .inputs import Kind, NormalizePixels, Prepare
from .repeats import BlockRun, equal_blocks, few_blocks

StateDict = dict[str, Tensor]
# A trial input for encoders from elsewhere: the output shows their width.
TRIAL_TEXT, TRIAL_EDGE = "a text", 64


class BuiltTower(NamedTuple):
    """One encoder, ready to be trained.

    module: takes what `prepare` returned, stacked along a new first dimension, and returns (rows, dim) embeddings, not normalised.
        Images arrive as uint8, channels first, and are normalised inside.
    prepare: prepare(raw, seed) runs in a worker process and converts an image or a text to a tensor, or a dict of tensors, of one
        fixed shape. `seed` is an integer that decides every random choice of an augmentation; None: no augmentation (evaluation).
        Must be picklable.
    kind: what `prepare` takes.
    """

    module: nn.Module
    prepare: Prepare
    kind: Kind


class ProjectedEncoder(nn.Module):
    """An encoder from elsewhere, with pixel normalisation before it and a projection to the embedding width after it.

    own_weights: converts a state dict that the encoder's library wrote to the encoder's part of it, under the encoder's names.
    """

    def __init__(self, encoder: nn.Module, pixels: NormalizePixels | None, own_weights: Callable[[StateDict], StateDict]) -> None:
        super().__init__()
        self.pixels = pixels
        self.encoder = encoder
        self.head: nn.Module = nn.Identity()
        self.own_weights = own_weights

    def forward(self, rows: Any) -> Tensor:
        return self.head(self.encoder(rows if self.pixels is None else self.pixels(rows)))

    def library_weights(self, state: StateDict) -> StateDict:
        """Return the library's weights under this module's names, with the projection as it is: the library does not know it."""
        head = {f"head.{name}": value for name, value in self.head.state_dict().items()}
        return {f"encoder.{name}": value for name, value in self.own_weights(state).items()} | head


def as_tower(
    encoder: nn.Module,
    prepare: Prepare,
    kind: Kind,
    dim: int,
    *,
    pixels: NormalizePixels | None = None,
    own_weights: Callable[[StateDict], StateDict] = dict,
    shapes_only: bool = False,
) -> BuiltTower:
    """Return the encoder as a tower: tried with two rows, and with a projection if its output is not `dim` wide.

    Parameters that the output does not depend on, such as those of an unused head, are frozen: optimizers and DDP would otherwise
    wait for their gradients. shapes_only: few of the encoder's equal blocks are tried.
    """
    module = ProjectedEncoder(encoder, pixels, own_weights)
    runs = equal_blocks(encoder) if shapes_only else []
    sample = prepare(TRIAL_TEXT if kind == "text" else _blank_image(), None)
    training = encoder.training
    module.eval()
    try:
        width = _try_few_blocks(module, _stack([sample, sample]), runs)
    finally:
        module.train(training)
    for template, parameter in (pair for run in runs for pair in run.template_and_dropped_parameters()):
        parameter.grad = template.grad
    for parameter in encoder.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
    if width != dim:
        module.head = nn.Linear(width, dim, bias=False)
    return BuiltTower(module, prepare, kind)


def _blank_image() -> Any:
    packages.require(packages.IMAGES)
    from PIL import Image

    return Image.new("RGB", (TRIAL_EDGE, TRIAL_EDGE))


def _stack(samples: Sequence[Any]) -> Any:
    if isinstance(samples[0], Mapping):
        return {name: _stack([sample[name] for sample in samples]) for name in samples[0]}
    return torch.stack(list(samples))


def _try_few_blocks(module: nn.Module, rows: Any, runs: list[BlockRun]) -> int:
    """Return the width of the output, from few of the equal blocks if the encoder lets itself be called so."""
    try:
        with few_blocks(runs):
            return _output_width(module, rows)
    except ValueError:
        if not runs:
            raise
        return _output_width(module, rows)


def _output_width(module: nn.Module, rows: Any) -> int:
    """Return the width of the output for two rows, and run a backward pass, which shows the parameters that the output uses."""
    try:
        out = module(rows)
    except Exception as error:
        raise ValueError(f"the encoder cannot take what was prepared for it ({type(error).__name__}: {error})") from error
    if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != 2:
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"the encoder returned {shape} for two rows: must return one tensor (rows, width)")
    if out.requires_grad:
        out.float().sum().backward()
    return out.shape[1]
