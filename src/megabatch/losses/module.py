"""A loss as a Module: it keeps the options and calls the function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn


class LossModule(nn.Module):
    """Takes the function's options once, and with each batch its inputs: `module(x, y, scale, …, ids=…, weights=…)`."""

    loss: ClassVar[Callable[..., Any]]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        parameters = inspect.signature(self.loss).parameters.values()
        known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in ("ids", "weights")]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TypeError(f"unknown options {unknown}: must be among {known}; ids and weights are given with each batch")
        self.options = options

    def forward(self, *inputs: Tensor | float, ids: Tensor | None = None, weights: Tensor | None = None) -> Any:
        return self.loss(*inputs, ids=ids, weights=weights, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
