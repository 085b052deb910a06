"""Which module a step is in, forward and backward, so that a peak can be given its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .recorder import Recorder


class Moments:
    """Tells a recorder the moment: "forward of NAME", "backward of NAME" or, run again there, "recomputation of NAME"."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._inside: list[str] = []

    def watch(self, module: nn.Module, prefix: str = "") -> None:
        """From now on, every module inside says when it begins and ends."""
        for name, inner in module.named_modules():
            full = ".".join(part for part in (prefix, name) if part) or type(module).__name__
            inner.register_forward_pre_hook(self._entering(full))
            inner.register_forward_hook(self._leaving(full))

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._inside.append(name)
            self._say_forward(name)

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            del self._inside[self._inside.index(name) :]
            if self._inside:
                self._say_forward(self._inside[-1])
            for node in nodes_of(output):
                # The innermost module was there first; an outer one that returns the same has less to say.
                if "moment" not in node.metadata:
                    node.metadata["moment"] = name
                    node.register_prehook(lambda gradients: self._say(f"backward of {name}"))

        return leave

    def _say_forward(self, name: str) -> None:
        self._say(f"{'recomputation' if self.recorder.phase == 'backward' else 'forward'} of {name}")

    def _say(self, moment: str) -> None:
        self.recorder.moment = moment


def nodes_of(output: Any) -> list[Any]:
    """The graph's nodes that tensors in an output come from."""
    values = output.values() if isinstance(output, dict) else output
    leaves = tree_leaves(list(values) if isinstance(output, dict) else values)
    return [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
