"""A contrastive step on fake tensors: one chunk of each tower is traced, and the step is put together from it.

All chunks of a tower take the same, so a trace of one stands for all: what the number of rows and of kept chunks adds is arithmetic
(composition.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .recorder import Recorder
from .setup import Setup
from .step import Inputs, Step
from .trace import Event


@dataclass(frozen=True)
class Side:
    """What one chunk of a tower does in forward and in backward.

    chunk: its rows; sides: 2 where the tower serves both sides, else 1; width and element_bytes are those of its embeddings.
    """

    name: str
    chunk: int
    sides: int
    forward: list[Event]
    backward: list[Event]
    width: int
    element_bytes: int
    gradient_bytes: list[int]


class Contrastive(Step):
    """CLIP or SigLIP as a run takes the step: y's tower first, then x's, so that backward begins with x."""

    def __init__(self, setup: Setup, recorder: Recorder, towers: Any, inputs: Any, rows: int) -> None:
        x, y = _two("build", towers)
        of_x, of_y = _two("inputs", inputs)
        for name, tower in (("x", x), ("y", y)):
            if not isinstance(tower, nn.Module) and not (name == "y" and tower is None):
                raise ValueError(f"tower {name} is a {type(tower).__name__}: must be an nn.Module")
        super().__init__(setup, recorder, {"x": x} if y is None else {"y": y, "x": x})
        self.lasting = len(recorder.trace.events)
        chunk = min(setup.chunk or rows, rows)
        if y is None:
            # Both sides in one pass: the longer input of the two decides.
            self.sides = [self._traced("x", [of_x, of_y], chunk if setup.chunk else 2 * rows)]
        else:
            self.sides = [self._traced("y", [of_y], chunk), self._traced("x", [of_x], chunk)]
        with recorder.apart() as self.update_events:
            self.update()

    def _traced(self, name: str, inputs: list[Inputs], rows: int) -> Side:
        recorder = self.recorder
        module = self.modules[name]
        with recorder.apart() as forward:
            with recorder.during("forward", "inputs"):
                args, kwargs = max((self.arguments(make(rows)) for make in inputs), key=lambda made: _bytes_in(made))
            with recorder.during("forward", "activations"), self.autocast():
                out = module(*args, **kwargs)
            del args, kwargs
        if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != rows:
            raise ValueError(
                f"tower {name} returns {tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__} for {rows} rows: must "
                "return embeddings (rows, dim)"
            )
        width, size = out.shape[1], out.element_size()
        with recorder.apart() as backward, recorder.during("backward", "temporaries"):
            if out.requires_grad:
                gradient = torch.empty_like(out)
                # It is a part of the gradient of all embeddings.
                self._is_counted_elsewhere(gradient)
                out.backward(gradient)
                del gradient
            del out
            if self.shards is not None:
                self.shards.finish()
        learning = [p for p in module.parameters() if p.requires_grad]
        for parameter in self.learning:
            # The composition counts gradients; these are there for the optimizer's step.
            if parameter.grad is not None:
                parameter.grad = torch.empty_like(parameter)
                self._is_counted_elsewhere(parameter.grad)
        sizes = [p.numel() * p.element_size() for p in learning]
        return Side(name, rows, len(inputs), forward, backward, width, size, sizes)

    def _is_counted_elsewhere(self, tensor: Tensor) -> None:
        block = self.recorder.block(tensor)
        if block is not None:
            block.bytes = 0


def _bytes_in(arguments: Any) -> int:
    args, kwargs = arguments
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _two(name: str, value: Any) -> tuple[Any, Any]:
    if isinstance(value, nn.Module) and hasattr(value, "x") and hasattr(value, "y"):
        return value.x, value.y
    if not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(f"{name} gives a {type(value).__name__}: a contrastive step takes two, of x and of y")
    return value[0], value[1]
