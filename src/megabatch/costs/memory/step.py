"""One training step on fake tensors: what all objectives share, and the supervised step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from ...towers.repeats import equal_blocks, few_blocks
from ..blocks import BlockTracker
from ..cuda_dispatch import dispatch_as_cuda
from ..fake_tensors import CachingFakeMode, as_fake
from ..without_dynamo import without_dynamo
from .optimizers import build_optimizer, create_state
from .repeats import UnequalBlocksError, complete
from .setup import Setup
from .sharding import FullyShardedWeights, allocate_buckets, exchange_in_bf16
from .trace import Event, ModuleTracker, Recorder, Trace
from .workspaces import KernelWorkspaces

Inputs = Callable[[int], Any]
Loss = Callable[[Any], Tensor]


def build_on_meta(build: Callable[[], Any]) -> Any:
    """Return what `build` makes, on the meta device, or on the CPU if its code reads values, which meta tensors do not have."""
    try:
        with torch.device("meta"):
            return build()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error).lower():
            raise
    with torch.device("cpu"):
        return build()


class FakeParameters:
    """Replaces the tensors of modules by fake ones. A tensor in several places (tied weights, a shared tower) stays one tensor."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        # The original is kept with its replacement, so that no new tensor gets its id.
        self._replaced: dict[int, tuple[Tensor, Tensor]] = {}

    def replace_in(self, module: nn.Module) -> nn.Module:
        """Replace the module's parameters and buffers; return the same module."""
        with self.recorder.during("setup", "weights"):
            for owner in module.modules():
                for tensors in (owner._parameters, owner._buffers):
                    for name, tensor in tensors.items():
                        if tensor is not None:
                            tensors[name] = self._replacement(tensor)
        return module

    def _replacement(self, tensor: Tensor) -> Any:
        if id(tensor) not in self._replaced:
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            fake = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
            self._replaced[id(tensor)] = tensor, fake
            self._replaced[id(fake)] = fake, fake
        return self._replaced[id(tensor)][1]


@contextmanager
def recording(setup: Setup) -> Iterator[Recorder]:
    """A context in which tensors are fake and a recorder follows them, on the device of the setup."""
    recorder = Recorder(KernelWorkspaces(setup.capability) if setup.device == "cuda" else None)
    with recording_again(recorder, CachingFakeMode()):
        yield recorder


@contextmanager
def recording_again(recorder: Recorder, mode: FakeTensorMode | None = None) -> Iterator[None]:
    """A context in which a recorder goes on, with the fake tensors that it has seen before."""
    recorder.fake_mode = mode or recorder.fake_mode
    assert recorder.fake_mode is not None
    with ExitStack() as contexts:
        contexts.enter_context(without_dynamo())
        if recorder.workspaces is not None:
            contexts.enter_context(dispatch_as_cuda())
        contexts.enter_context(recorder.fake_mode)
        contexts.enter_context(recorder)
        yield


class TracedStep:
    """A model of fake tensors with everything that training keeps, and the positions between the parts of its trace.

    state_begins, begins, update_begins: numbers of the events at which the optimizer's state is created, the step begins, and the
    exchange of gradients begins, with the optimizer's step after it. whole: all of the model's equal blocks are computed;
    otherwise a few of them stand for the others.
    """

    def __init__(self, setup: Setup, recorder: Recorder, modules: Mapping[str, nn.Module], *, whole: bool) -> None:
        self.setup, self.recorder = setup, recorder
        self.runs = [] if whole else [run for module in modules.values() for run in equal_blocks(module)]
        recorder.blocks = BlockTracker(self.runs)
        fake_parameters, tracker = FakeParameters(recorder), ModuleTracker(recorder)
        self.modules = {name: fake_parameters.replace_in(module) for name, module in modules.items()}
        if setup.checkpointing:
            for name, module in self.modules.items():
                enable_checkpointing(module, name)
        # Before other hooks, so that what those allocate belongs to the block.
        recorder.blocks.watch()
        for name, module in self.modules.items():
            tracker.watch(module, name)
        self.in_bf16 = setup.gradient_exchange == "bf16"
        self.shards = FullyShardedWeights(recorder, setup.ranks, in_bf16=self.in_bf16) if setup.sharded else None
        self.trainable = self._trainable_parameters()
        if not self.trainable:
            raise ValueError("no parameter requires a gradient: there is nothing to train; unfreeze a part of the model")
        self._allocate_persistent()
        self.state_begins = len(recorder.trace.events)
        self.optimizer = build_optimizer(setup, self.trainable)
        with recorder.during("setup", "optimizer"):
            create_state(self.optimizer, self.trainable)
        if setup.device == "cuda" and not setup.fused:
            self._move_step_counts_to_host()
        self.begins = self.update_begins = len(recorder.trace.events)
        if self.shards is not None:
            self.shards.allocate_prefetch()

    def update(self) -> None:
        """Exchange the gradients, run the optimizer's step and free the gradients."""
        if self.shards is not None:
            self.shards.finish_backward()
        self.update_begins = len(self.recorder.trace.events)
        if self._has_buckets and self.in_bf16:
            exchange_in_bf16(self.recorder, self.trainable)
        self._give_gradients_to_dropped_blocks()
        with self.recorder.during("optimizer step", "temporaries"):
            self.optimizer.step()
        with self.recorder.during("after the step", "temporaries"):
            self.optimizer.zero_grad()

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the module's output, computed with few of its equal blocks."""
        with few_blocks(self.runs), self.autocast():
            return module(*args, **kwargs)

    def backward(self, out: Tensor, gradient: Tensor | None = None) -> None:
        """Run the backward of an output."""
        out.backward(gradient)
        assert self.recorder.blocks is not None
        self.recorder.blocks.end_backward()

    def completed(self, lists: list[list[Event]]) -> list[list[Event]]:
        """Return the events with those of the blocks that did not run."""
        return complete(self.recorder.trace, lists, self.runs)

    def do_not_count(self, tensor: Tensor) -> None:
        """Count no memory for a tensor that represents one counted elsewhere."""
        allocation = self.recorder.allocation_of(tensor)
        if allocation is not None:
            allocation.bytes = 0

    def _give_gradients_to_dropped_blocks(self) -> None:
        """The optimizer updates the weights of all blocks; the memory of these gradients is in the completed events."""
        for template, parameter in (pair for run in self.runs for pair in run.template_and_dropped_parameters()):
            owner, like = (p if self.shards is None else self.shards.shard_of(p) for p in (parameter, template))
            if like.grad is not None:
                owner.grad = torch.empty_like(owner)
                self.do_not_count(owner.grad)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        dtype = self.setup.autocast
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            yield

    def call_arguments(self, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return example inputs as fake arguments of a model: a dict by name, a tuple or list by position."""
        example = tree_map(as_fake, example)
        if isinstance(example, Mapping):
            return (), dict(example)
        return tuple(example) if isinstance(example, (tuple, list)) else (example,), {}

    @property
    def _has_buckets(self) -> bool:
        return self.setup.ranks > 1 and not self.setup.sharded

    def _trainable_parameters(self) -> list[Tensor]:
        parameters = {p: None for module in self.modules.values() for p in module.parameters() if p.requires_grad}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: self.recorder.label(p.grad, "gradients"))
        if self.shards is None:
            return list(parameters)
        for module in dict.fromkeys(self.modules.values()):
            self.shards.shard(module)
        return self.shards.parameters

    def _move_step_counts_to_host(self) -> None:
        """Optimizers keep their step counts in host memory, unless a fused kernel reads them on the device."""
        for state in self.optimizer.state.values():
            count = state.get("step")
            allocation = self.recorder.allocation_of(count) if isinstance(count, Tensor) else None
            if allocation is not None:
                allocation.bytes = 0

    def _allocate_persistent(self) -> None:
        if self.recorder.workspaces is not None:
            for size in self.recorder.workspaces.persistent():
                self.recorder.allocate(size, "workspace")
        if self.setup.ema:
            for parameter in self.trainable:
                self.recorder.allocate(parameter.numel() * parameter.element_size(), "averages")
        if self._has_buckets:
            allocate_buckets(self.recorder, self.trainable)


class SupervisedStep(TracedStep):
    """A step with a loss that is a mean over samples: the batch at once, or accumulated chunk by chunk."""

    def __init__(
        self,
        setup: Setup,
        recorder: Recorder,
        module: nn.Module,
        inputs: Inputs,
        rows: int,
        loss: Loss | None,
        *,
        whole: bool = False,
    ) -> None:
        super().__init__(setup, recorder, {"": module}, whole=whole)
        self.inputs, self.rows, self.loss = inputs, rows, loss
        self._setup_events = recorder.trace.events
        self._run()

    def at_chunk(self, rows: int, chunk: int) -> SupervisedStep | None:
        """Return the step over other rows in chunks of another size: what does not depend on them is shared.

        None if the step has to be traced from the start: the model keeps tensors of one step for the next, or its blocks differ.
        """
        if self._keeps_tensors:
            return None
        other = copy.copy(self)
        other.setup, other.rows = replace(self.setup, chunk=chunk), rows
        try:
            with recording_again(self.recorder):
                other._run()
        except UnequalBlocksError:
            return None
        return other

    def _run(self) -> None:
        chunk = min(self.setup.chunk or self.rows, self.rows)
        with self.recorder.separate_events() as events:
            if chunk < self.rows and self.setup.inputs_on_device:
                with self.recorder.during("forward", "inputs"):
                    self.waiting_inputs = self.call_arguments(self.inputs(self.rows - chunk))
            # The first chunk allocates the gradients, all others add to them: the second one shows what the rest does.
            for _ in range(1 if chunk == self.rows else 2):
                self._run_chunk(chunk)
            self.update()
        freed = {event.allocation for event in events if not event.is_allocation}
        self._keeps_tensors = any(event.is_allocation and event.allocation not in freed for event in events)
        body, update = events[: self.update_begins], events[self.update_begins :]
        begins, before = self.begins, self._setup_events
        parts = self.completed([before[:begins], before[begins:] + body, update])
        self.trace = Trace(self.recorder.trace.allocations, [event for part in parts for event in part])
        self.update_begins = len(parts[0]) + len(parts[1])

    def _run_chunk(self, rows: int) -> None:
        with self.recorder.during("forward", "inputs"):
            args, kwargs = self.call_arguments(self.inputs(rows))
        with self.recorder.during("forward", "activations"), self.autocast():
            output = self.call(self.modules[""], args, kwargs)
            self.recorder.moment = "loss"
            value = self.loss(output) if self.loss is not None else default_loss(output)
        with self.recorder.during("backward", "temporaries", "backward of the loss"):
            self.backward(value)


def default_loss(output: Any) -> Tensor:
    """Return the model's own loss, or cross-entropy over classes."""
    own_loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own_loss, Tensor):
        return own_loss
    logits = getattr(output, "logits", output)
    if isinstance(logits, Tensor) and logits.numel() == 1:
        return logits
    if isinstance(logits, Tensor) and logits.ndim == 2:
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
    raise ValueError(f"the model returns {shape}: its loss is unknown; pass loss=, a function from the model's output to a scalar")


def enable_checkpointing(module: nn.Module, name: str) -> None:
    """Turn on activation checkpointing with the model's own switch."""
    for owner in module.modules():
        for switch in ("gradient_checkpointing_enable", "set_grad_checkpointing"):
            if hasattr(owner, switch):
                getattr(owner, switch)()
                return
    raise ValueError(
        f"checkpointing is True, but {name or type(module).__name__} has no switch for it (gradient_checkpointing_enable, "
        "set_grad_checkpointing): call torch.utils.checkpoint in its forward, and leave checkpointing False"
    )
