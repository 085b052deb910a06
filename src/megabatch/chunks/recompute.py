"""A forward whose graph saves nothing: what backward needs of it is computed again when it is asked for.

torch.utils.checkpoint (non-reentrant) works the same way, with more bookkeeping for every saved tensor, which shows where
chunks are small (benchmarks/overhead.py). Left out here are early stopping and its report on mismatches
(outputs are compared instead: repeatable.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def recomputed(run: Callable[[bool], Any]) -> Any:
    """What run(False) returns; in backward, run(True) must compute it again, the same in every tensor that autograd saves."""
    return _Recomputation(run).forward()


class _Recomputation:
    def __init__(self, run: Callable[[bool], Any]) -> None:
        self.run = run
        self.shapes: list[torch.Size] = []
        self.tensors: dict[int, Tensor] = {}
        # The backward pass that the tensors are for.
        self.task: int | None = None
        self.asked_again = False

    def forward(self) -> Any:
        with saved_tensors_hooks(self._forget, self._recall):
            return self.run(False)

    def _forget(self, tensor: Tensor) -> int:
        self.shapes.append(tensor.shape)
        return len(self.shapes) - 1

    def _recall(self, index: int) -> Tensor:
        task = torch._C._current_graph_task_id()
        if task != self.task or index not in self.tensors:
            # A node may read what it saved more than once; then nothing is let go of before the end.
            self.asked_again = task == self.task
            self.tensors = dict(enumerate(self._compute()))
            self.task = task
        return self.tensors[index] if self.asked_again else self.tensors.pop(index)

    def _compute(self) -> list[Tensor]:
        found: list[Tensor] = []

        def keep(tensor: Tensor) -> None:
            # Without its graph, which is of no use: autograd puts the saved tensor back into the first one.
            found.append(tensor.detach())

        with torch.enable_grad(), saved_tensors_hooks(keep, _never):
            self.run(True)
        if [tensor.shape for tensor in found] != self.shapes:
            raise RuntimeError(
                f"the encoder did something else when it was run again in backward: {len(found)} tensors were saved instead of "
                f"{len(self.shapes)}, or their shapes differ. What it does must follow from its inputs, weights, buffers and "
                "from random numbers that can be replayed; pass generators that were not found as cached(…, generators=(g,))"
            )
        return found


def _never(packed: Any) -> Any:
    raise AssertionError("backward does not go through a recomputation")
