"""Encoders from elsewhere, fitted: bytes normalised in front, a projection to the wanted width behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megabatch import packages

from .image_transform import Pixels
from .tower import Tower

State = dict[str, Tensor]
# What a module is tried with: its output shows its width.
TEXT, EDGE = "a text", 64


class Fitted(nn.Module):
    """An encoder between what makes its input fit and what makes its output fit.

    own_weights: of a file that the encoder's library wrote, the part that is this encoder's, under the encoder's names.
    """

    def __init__(self, encoder: nn.Module, pixels: Pixels | None, own_weights: Callable[[State], State]) -> None:
        super().__init__()
        self.pixels = pixels
        self.encoder = encoder
        self.head: nn.Module = nn.Identity()
        self.own_weights = own_weights

    def forward(self, rows: Any) -> Tensor:
        return self.head(self.encoder(rows if self.pixels is None else self.pixels(rows)))

    def library_weights(self, state: State) -> State:
        """The library's own weights under this module's names; a projection that the library does not know stays as it is."""
        head = {f"head.{name}": value for name, value in self.head.state_dict().items()}
        return {f"encoder.{name}": value for name, value in self.own_weights(state).items()} | head


def fit(
    encoder: nn.Module,
    prepare: Callable[[Any, int | None], Any],
    kind: Literal["image", "text"],
    dim: int,
    *,
    pixels: Pixels | None = None,
    own_weights: Callable[[State], State] = dict,
) -> Tower:
    """The encoder as a tower: tried with two rows, and given a projection where it is not `dim` wide.

    Weights that its output does not depend on, such as those of a head that is not used, are frozen: optimizers and DDP would
    otherwise wait for their gradients.
    """
    module = Fitted(encoder, pixels, own_weights)
    sample = prepare(TEXT if kind == "text" else _blank(), None)
    before = encoder.training
    module.eval()
    try:
        width = _width(module, _stack([sample, sample]))
    finally:
        module.train(before)
    for parameter in encoder.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
    if width != dim:
        module.head = nn.Linear(width, dim, bias=False)
    return Tower(module, prepare, kind)


def _blank() -> Any:
    packages.require(packages.IMAGES)
    from PIL import Image

    return Image.new("RGB", (EDGE, EDGE))


def _stack(samples: Sequence[Any]) -> Any:
    if isinstance(samples[0], Mapping):
        return {name: _stack([sample[name] for sample in samples]) for name in samples[0]}
    return torch.stack(list(samples))


def _width(module: nn.Module, rows: Any) -> int:
    try:
        out = module(rows)
    except Exception as error:
        raise ValueError(f"the encoder cannot take what was prepared for it ({type(error).__name__}: {error})") from error
    if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != 2:
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"the encoder returned {shape} for two rows: must be one tensor (rows, width)")
    if out.requires_grad:
        out.float().sum().backward()
    return out.shape[1]
