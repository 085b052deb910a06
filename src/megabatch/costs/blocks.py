"""Which of a model's equal blocks is being computed, in forward and in backward: costs of one block stand for those of many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..towers.repeats import KEPT, BlockRun


class Block(NamedTuple):
    """A block that is called: the number of its run, and its position among the kept blocks of that run."""

    run: int
    position: int


class BlockTracker:
    """Knows the current block, by hooks on the kept blocks of runs and on the nodes of autograd's graph.

    What happens between two blocks belongs to the one that was called first; autograd runs nodes in the reverse order of their
    creation, so that a block's backward lasts from the node of its output to the node of its input.
    """

    def __init__(self, runs: list[BlockRun]) -> None:
        self.runs = runs
        self.current: Block | None = None
        self._entered_from: list[Block | None] = []

    def watch(self) -> list[RemovableHandle]:
        """Register hooks on the kept blocks; return their handles."""
        handles = []
        for number, run in enumerate(self.runs):
            for position, module in enumerate(run.kept):
                block = Block(number, position)
                handles.append(module.register_forward_pre_hook(self._enter_hook(block), with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave_hook(block)))
        return handles

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which the kept blocks have hooks."""
        handles = self.watch()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end_backward(self) -> None:
        """Leave the first block: its input has no node that tells the end of its backward if no gradient flows further."""
        self._set(None)

    def _enter_hook(self, block: Block) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if block.position == 0:
                for node in graph_nodes((args, kwargs)):
                    node.register_prehook(lambda gradients: self._set(None))
            self._entered_from.append(self.current)
            self._set(block)

        return enter

    def _leave_hook(self, block: Block) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            entered_from = self._entered_from.pop()
            # A block that backward recomputes is entered from itself.
            if block.position == KEPT - 1 and entered_from != block:
                self._set(None)
            for node in graph_nodes(output):
                node.register_prehook(lambda gradients: self._set(block))

        return leave

    def _set(self, block: Block | None) -> None:
        self.current = block


def graph_nodes(tree: Any) -> list[Any]:
    """Return the nodes of autograd's graph that produced the tensors of nested containers."""
    leaves = tree_leaves(list(tree.values()) if isinstance(tree, dict) else tree)
    return [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
