"""Chunks whose forward records no graph: backward runs each of them with one, and adds up the gradients of the leaves.

`recompute.py` records the graph of every chunk in forward, without its tensors, so that any encoder works and a chunk of forward is
one of backward. Here forward may take several chunks at once: no activations are kept, so a row takes a fraction of the memory.
What the encoder depends on has to be known before: the leaves of the graph of another chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def attached(values: Sequence[Tensor], differentiable: Sequence[bool], chunks: Chunks, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the values, with a backward that runs `chunks` and gives the gradients to the leaves.

    values: outputs of forward, computed without a graph. differentiable: which of them depend on the leaves.
    """
    return list(_Attached.apply(values, differentiable, chunks, *leaves)) if leaves else list(values)


class Chunks:
    """Runs the chunks of one call in backward.

    run: returns the outputs of a chunk with their graph. leaves_of: returns the leaves of that graph. sizes: rows of each chunk.
    """

    def __init__(
        self, run: Callable[[int], list[Tensor]], leaves_of: Callable[[list[Tensor]], list[Tensor]], sizes: list[int]
    ) -> None:
        self._run, self._leaves_of, self._sizes = run, leaves_of, sizes

    def gradients(self, leaves: Sequence[Tensor], output_grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the leaves, summed over the chunks from the last to the first, as autograd does."""
        parts = [grad.split(self._sizes) if grad is not None and grad.ndim else None for grad in output_grads]
        totals: list[Tensor | None] = [None] * len(leaves)
        for index in reversed(range(len(self._sizes))):
            # One expression: no name may keep the gradients of a chunk alive while the next one runs.
            _add(totals, self._of_chunk(index, leaves, [None if part is None else part[index] for part in parts]))
        return totals

    def _of_chunk(self, index: int, leaves: Sequence[Tensor], grads: list[Tensor | None]) -> Sequence[Tensor | None]:
        with torch.enable_grad():
            outputs = self._run(index)
        if not {id(leaf) for leaf in self._leaves_of(outputs)} <= {id(leaf) for leaf in leaves}:
            raise RuntimeError(
                "a chunk depends on parameters that the first chunk does not depend on, as in a mixture of experts, and their "
                "gradients would be lost: leave forward_chunk out"
            )
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None and out.requires_grad]
        if not pairs:
            return [None] * len(leaves)
        return torch.autograd.grad([out for out, _ in pairs], leaves, [grad for _, grad in pairs], allow_unused=True)


def _add(totals: list[Tensor | None], grads: Sequence[Tensor | None]) -> None:
    """Add to the sums in place, where None is zero."""
    for place, grad in enumerate(grads):
        total = totals[place]
        if total is not None and grad is not None:
            total.add_(grad)
        elif grad is not None:
            # A copy, since autograd may return one tensor for two leaves.
            totals[place] = grad.clone()


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Sequence[Tensor], differentiable: Sequence[bool], chunks: Chunks, *leaves: Tensor) -> Any:
        ctx.chunks = chunks
        ctx.leaves = leaves
        ctx.set_materialize_grads(False)
        # New tensors: an encoder may return one of its inputs.
        outputs = tuple(value.detach() for value in values)
        ctx.mark_non_differentiable(*(output for output, has_grad in zip(outputs, differentiable, strict=True) if not has_grad))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, None, *ctx.chunks.gradients(ctx.leaves, grads)
