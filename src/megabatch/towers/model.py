"""The model that a run trains, saves and evaluates: two towers with a logit scale and bias, or one tower with a classifier."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Run
from ..objectives import OBJECTIVES
from . import build_tower
from .tower import BuiltTower, ProjectedEncoder

# The name of y that shares the tower of x.
SHARED = "x"


class Encoder(nn.Module):
    """A tower with normalised embeddings. A locked tower stays in evaluation mode."""

    def __init__(self, tower: nn.Module, *, locked: bool = False) -> None:
        super().__init__()
        self.tower = tower
        self.locked = locked

    def forward(self, inputs: Any) -> Tensor:
        return F.normalize(self.tower(inputs).float(), dim=-1)

    def train(self, mode: bool = True) -> Encoder:
        super().train(mode)
        if self.locked:
            self.tower.eval()
        return self


class Pair(nn.Module):
    """The encoders of both sides with a learnable logit scale (stored as its logarithm) and bias. `y` is None if both share x."""

    def __init__(self, x: Encoder, y: Encoder | None, scale: float, bias: float | None) -> None:
        super().__init__()
        self.x = x
        self.y = y
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.bias = None if bias is None else nn.Parameter(torch.tensor(bias))

    def scale(self) -> Tensor:
        return self.log_scale.exp()

    @torch.no_grad()
    def clamp_scale(self, limit: float) -> None:
        self.log_scale.clamp_(max=math.log(limit))


class Classifier(nn.Module):
    """The tower of x with one logit per class. A locked tower stays in evaluation mode."""

    def __init__(self, tower: nn.Module, dim: int, classes: int, *, locked: bool = False) -> None:
        super().__init__()
        self.tower = tower
        self.head = nn.Linear(dim, classes)
        self.locked = locked

    def forward(self, inputs: Any) -> Tensor:
        return self.head(self.tower(inputs)).float()

    def train(self, mode: bool = True) -> Classifier:
        super().train(mode)
        if self.locked:
            self.tower.eval()
        return self


def build_towers(run: Run, *, shapes_only: bool = False) -> tuple[BuiltTower, BuiltTower]:
    """Return the towers of x and y with their initial weights; the same tower twice if the name of y is "x".

    shapes_only: without their weights, as `library.TowerRequest` says.
    """
    x = build_tower(run.x, run.loss.dim, side="x", shapes_only=shapes_only)
    y = x if run.y.name == SHARED else build_tower(run.y, run.loss.dim, side="y", shapes_only=shapes_only)
    for tower, options in ((x, run.x), (y, run.y)):
        if options.locked:
            _lock(tower.module)
    return x, y


def build_pair(run: Run, x: BuiltTower, y: BuiltTower) -> Pair:
    """Return the model of a contrastive run. The default initial scale is that of the paper of its loss."""
    objective = OBJECTIVES[run.loss.objective]
    scale = run.loss.scale if run.loss.scale is not None else objective.scale
    second = None if y.module is x.module else Encoder(y.module, locked=run.y.locked)
    return Pair(
        Encoder(x.module, locked=run.x.locked), second, min(scale, run.loss.max_scale), run.loss.bias if objective.bias else None
    )


def _lock(module: nn.Module) -> None:
    """Freeze a tower, except for a projection after an encoder from elsewhere, which starts from random weights."""
    module.requires_grad_(False)
    if isinstance(module, ProjectedEncoder):
        module.head.requires_grad_(True)
