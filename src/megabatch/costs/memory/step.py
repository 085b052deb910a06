"""One training step on fake tensors: what all objectives share, and the supervised one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from .fake_params import StandIn
from .moments import Moments
from .optimizers import build_optimizer, created_state
from .recorder import Recorder
from .routing import as_on_cuda
from .setup import Setup
from .sharding import Shards, hold_buckets
from .workspaces import Scratch

Inputs = Callable[[int], Any]
Loss = Callable[[Any], Tensor]


class Step:
    """A model of fake tensors with all that a training keeps, and the marks between the parts of its trace."""

    def __init__(self, setup: Setup, recorder: Recorder, modules: Mapping[str, nn.Module]) -> None:
        self.setup, self.recorder = setup, recorder
        stand_in, moments = StandIn(recorder), Moments(recorder)
        self.modules = {name: stand_in.of(module) for name, module in modules.items()}
        if setup.checkpointing:
            for name, module in self.modules.items():
                switch_checkpointing(module, name)
        for name, module in self.modules.items():
            moments.watch(module, name)
        self.shards = Shards(recorder, setup.ranks) if setup.sharded else None
        self.learning = self._learning()
        if not self.learning:
            raise ValueError("no parameter requires a gradient: there is nothing to train; unfreeze a part of the model")
        self._hold_what_stays()
        self.state_begins = len(recorder.trace.events)
        self.optimizer = build_optimizer(setup, self.learning)
        with recorder.during("setup", "optimizer"):
            created_state(self.optimizer, self.learning)
        if setup.device == "cuda" and not setup.fused:
            self._forget_counts_of_steps()
        self.begins = self.update_begins = len(recorder.trace.events)
        if self.shards is not None:
            self.shards.prefetch()

    def update(self) -> None:
        """The optimizer's step, and what goes with the gradients."""
        if self.shards is not None:
            self.shards.finish()
        self.update_begins = len(self.recorder.trace.events)
        with self.recorder.during("optimizer step", "temporaries"):
            self.optimizer.step()
        with self.recorder.during("after the step", "temporaries"):
            self.optimizer.zero_grad()

    @contextmanager
    def autocast(self) -> Iterator[None]:
        dtype = self.setup.autocast
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            yield

    def arguments(self, made: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Example inputs as a model is called with them, on the device: a dict by name, a tuple or list by position."""
        made = tree_map(_as_fake, made)
        if isinstance(made, Mapping):
            return (), dict(made)
        return tuple(made) if isinstance(made, (tuple, list)) else (made,), {}

    def _learning(self) -> list[Tensor]:
        parameters = {p: None for module in self.modules.values() for p in module.parameters() if p.requires_grad}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: self.recorder.label(p.grad, "gradients"))
        if self.shards is None:
            return list(parameters)
        for module in dict.fromkeys(self.modules.values()):
            self.shards.shard(module)
        return self.shards.parameters

    def _forget_counts_of_steps(self) -> None:
        """Optimizers that do not compute with them on the device keep them in main memory."""
        for state in self.optimizer.state.values():
            count = state.get("step")
            block = self.recorder.block(count) if isinstance(count, Tensor) else None
            if block is not None:
                block.bytes = 0

    def _hold_what_stays(self) -> None:
        if self.recorder.scratch is not None:
            for size in self.recorder.scratch.lasting():
                self.recorder.hold(size, "workspace")
        if self.setup.ema:
            for parameter in self.learning:
                self.recorder.hold(parameter.numel() * parameter.element_size(), "averages")
        if self.setup.ranks > 1 and not self.setup.sharded:
            hold_buckets(self.recorder, self.learning)


class Supervised(Step):
    """A loss that is a mean over samples: the batch at once, or accumulated chunk by chunk."""

    def __init__(self, setup: Setup, recorder: Recorder, module: nn.Module, inputs: Inputs, rows: int, loss: Loss | None) -> None:
        super().__init__(setup, recorder, {"": module})
        self.inputs, self.rows, self.loss = inputs, rows, loss
        self.trace = recorder.trace
        chunk = min(self.setup.chunk or self.rows, self.rows)
        if chunk < self.rows and self.setup.inputs_on_device:
            with self.recorder.during("forward", "inputs"):
                self.waiting = self.arguments(self.inputs(self.rows - chunk))
        # The first chunk finds no gradients and makes them, all others find them there: the second shows what the rest does.
        for _ in range(1 if chunk == self.rows else 2):
            self._chunk(chunk)
        self.update()

    def _chunk(self, rows: int) -> None:
        with self.recorder.during("forward", "inputs"):
            args, kwargs = self.arguments(self.inputs(rows))
        with self.recorder.during("forward", "activations"), self.autocast():
            output = self.modules[""](*args, **kwargs)
            self.recorder.moment = "loss"
            value = self.loss(output) if self.loss is not None else default_loss(output)
        with self.recorder.during("backward", "temporaries", "backward of the loss"):
            value.backward()


def default_loss(output: Any) -> Tensor:
    """The model's own loss, or cross-entropy over classes."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    logits = getattr(output, "logits", output)
    if isinstance(logits, Tensor) and logits.numel() == 1:
        return logits
    if isinstance(logits, Tensor) and logits.ndim == 2:
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
    raise ValueError(f"the model returns {shape}: which loss of it is trained is not clear; pass loss=, which takes it to a number")


def switch_checkpointing(module: nn.Module, name: str) -> None:
    """Turns on the recomputation of activations by the model's own switch."""
    for owner in module.modules():
        for switch in ("gradient_checkpointing_enable", "set_grad_checkpointing"):
            if hasattr(owner, switch):
                getattr(owner, switch)()
                return
    raise ValueError(
        f"checkpointing is True, and {name or type(module).__name__} has no switch for it (gradient_checkpointing_enable, "
        "set_grad_checkpointing): call torch.utils.checkpoint in its forward, and leave checkpointing out here"
    )


@contextmanager
def tracing(setup: Setup) -> Iterator[Recorder]:
    """A context in which tensors are fake and a recorder follows them, on the device that the setup names."""
    recorder = Recorder(Scratch(setup.capability) if setup.device == "cuda" else None)
    with ExitStack() as contexts:
        if setup.device == "cuda":
            contexts.enter_context(as_on_cuda())
        contexts.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        contexts.enter_context(recorder)
        yield recorder


def _as_fake(value: Any) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
