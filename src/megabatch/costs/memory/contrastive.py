"""A contrastive step on fake tensors: one chunk of each tower is traced, and whole steps are composed from these traces.

All chunks of a tower allocate the same, so one traced chunk represents all of them; the number of rows and of kept chunks is then
arithmetic. `ContrastiveStep` traces, `ComposedStep` composes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .loss import LossMemory
from .setup import Setup
from .step import TracedStep, recording_again
from .trace import Event, Recorder, Trace

# Allocations of the traced chunk that exist now, and the allocations of the composed step that represent them.
Live = dict[int, int]


@dataclass(frozen=True)
class TowerTrace:
    """What one chunk of a tower allocates in forward and in backward.

    chunk: its rows. sides: rows that it encodes for each row of x: of x, of y, and of the hard negatives.
    width, element_bytes: of its embeddings.
    gradient_bytes: of each trainable parameter.
    """

    name: str
    chunk: int
    sides: int
    forward: list[Event]
    backward: list[Event]
    width: int
    element_bytes: int
    gradient_bytes: list[int]


class ContrastiveStep(TracedStep):
    """A step with a contrastive loss in the order of a run: y's tower first, then x's, so that backward begins with x."""

    def __init__(self, setup: Setup, recorder: Recorder, towers: Any, inputs: Any, rows: int, *, whole: bool = False) -> None:
        x, y = _two("build", towers)
        x_inputs, y_inputs = _two("inputs", inputs)
        for name, tower in (("x", x), ("y", y)):
            if not isinstance(tower, nn.Module) and not (name == "y" and tower is None):
                raise ValueError(f"tower {name} is a {type(tower).__name__}: must be an nn.Module")
        super().__init__(setup, recorder, {"x": x} if y is None else {"y": y, "x": x}, whole=whole)
        self.persistent_events = len(recorder.trace.events)
        self.inputs = {"x": [x_inputs, y_inputs]} if y is None else {"y": [y_inputs], "x": [x_inputs]}
        traced = self._trace_towers(rows)
        with recorder.separate_events() as update_events:
            self.update()
        self.towers, self.update_events = self._completed_towers(traced, update_events)

    def at_chunk(self, chunk: int) -> ContrastiveStep:
        """Return the step in chunks of another size: its towers are traced again, what does not depend on the chunk is shared."""
        other = copy.copy(self)
        other.setup = replace(self.setup, chunk=chunk)
        with recording_again(self.recorder):
            traced = other._trace_towers(chunk)
            for parameter in self.trainable:
                parameter.grad = None
        other.towers, _ = other._completed_towers(traced, [])
        return other

    def _trace_towers(self, rows: int) -> list[TowerTrace]:
        chunk = min(self.setup.chunk or rows, rows)
        # With a shared tower and no chunks, both sides go through in one pass: the larger of the two inputs decides.
        whole = self.setup.chunk is None
        return [self._trace_tower(name, self._sides(name) * rows if whole else chunk) for name in self.inputs]

    def _sides(self, name: str) -> int:
        """Return the rows that a tower encodes for each row of x."""
        shared = len(self.inputs) == 1
        return shared + 1 + (self.setup.loss_options.negatives if shared or name == "y" else 0)

    def _completed_towers(self, traced: list[TowerTrace], update_events: list[Event]) -> tuple[list[TowerTrace], list[Event]]:
        """Return the traces and the optimizer's events with those of blocks that did not run."""
        lists = [events for tower in traced for events in (tower.forward, tower.backward)]
        *passes, update = self.completed([*lists, update_events])
        towers = [
            replace(tower, forward=forward, backward=backward)
            for tower, forward, backward in zip(traced, passes[::2], passes[1::2], strict=True)
        ]
        return towers, update

    def _trace_tower(self, name: str, rows: int) -> TowerTrace:
        recorder, inputs = self.recorder, self.inputs[name]
        module = self.modules[name]
        with recorder.separate_events() as forward:
            with recorder.during("forward", "inputs"):
                args, kwargs = max((self.call_arguments(make(rows)) for make in inputs), key=_argument_bytes)
            with recorder.during("forward", "activations"):
                out = self.call(module, args, kwargs)
            del args, kwargs
        if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != rows:
            raise ValueError(
                f"tower {name} returns {tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__} for {rows} rows: must "
                "return embeddings (rows, dim)"
            )
        width, size = out.shape[1], out.element_size()
        with recorder.separate_events() as backward, recorder.during("backward", "temporaries"):
            if out.requires_grad:
                gradient = torch.empty_like(out)
                # A slice of the gradient of all embeddings, which ComposedStep counts.
                self.do_not_count(gradient)
                self.backward(out, gradient)
                del gradient
            del out
            if self.shards is not None:
                self.shards.finish_backward()
        trainable = [p for p in module.parameters() if p.requires_grad]
        for parameter in self.trainable:
            # ComposedStep counts gradients; these exist for the trace of the optimizer's step.
            if parameter.grad is not None:
                parameter.grad = torch.empty_like(parameter)
                self.do_not_count(parameter.grad)
        sizes = [p.numel() * p.element_size() for p in trainable]
        return TowerTrace(name, rows, self._sides(name), forward, backward, width, size, sizes)


def _argument_bytes(arguments: Any) -> int:
    args, kwargs = arguments
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _two(name: str, value: Any) -> tuple[Any, Any]:
    if isinstance(value, nn.Module) and hasattr(value, "x") and hasattr(value, "y"):
        return value.x, value.y
    if not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(f"{name} gives a {type(value).__name__}: a contrastive step takes two, one for x and one for y")
    return value[0], value[1]


class ComposedStep:
    """The trace of a step over `rows` pairs: forward, loss, backward chunk by chunk, update. keep: kept chunks by tower."""

    def __init__(self, step: ContrastiveStep, rows: int, keep: Mapping[str, int]) -> None:
        self.step, self.rows = step, rows
        self.setup = step.setup
        self.keep = keep
        recorded = step.recorder.trace
        self.trace = Trace(list(recorded.allocations), recorded.events[: step.persistent_events])
        self.phase = self.moment = "forward"
        self._gradients: list[int] = []
        self._forward_and_backward()
        self.update_begins = len(self.trace.events)
        self._replay(step.update_events, {})
        self._set_moment("after the step", "after the step")
        self._free_all(self._gradients)

    def allocate(self, size: int, part: str) -> int:
        granule = self.step.recorder.granule
        return self.trace.allocate(-(-size // granule) * granule, part, self.phase, self.moment)

    def free(self, index: int) -> None:
        self.trace.free(index, self.phase, self.moment)

    def _forward_and_backward(self) -> None:
        self._set_moment("forward", "forward")
        on_device = self.setup.inputs_on_device
        inputs = [self.allocate(self._input_bytes(tower), "inputs") for tower in self.step.towers] if on_device else []
        kept = {tower.name: self._forward(tower) for tower in self.step.towers}
        embeddings = [self._concatenate_embeddings(tower) for tower in self.step.towers]
        last = self.step.towers[-1]
        loss = LossMemory(self, self.setup, self.rows, last.width, last.element_bytes)
        self._set_moment("loss", "forward of the loss")
        loss.forward()
        self._set_moment("backward", "backward of the loss")
        gradients = loss.backward()
        for tower in reversed(self.step.towers):
            self._backward(tower, *kept[tower.name])
        self._set_moment("backward", "end of backward")
        self._free_all([*gradients, *embeddings, *inputs])

    def _forward(self, tower: TowerTrace) -> tuple[Live, list[list[int]]]:
        """Return the graphs of the kept chunks: the first as it was traced, of the others only what remains after forward."""
        graph: Live = {}
        # A batch that goes through at once is not recomputed.
        kept = 1 if self.setup.chunk is None else min(self.keep[tower.name], self._chunks(tower))
        if not kept:
            return graph, []
        self._set_moment("forward", f"forward of {tower.name}")
        self._replay(tower.forward, graph)
        remaining = [self.trace.allocations[index] for index in graph.values()]
        return graph, [[self.allocate(each.bytes, each.part) for each in remaining] for _ in range(kept - 1)]

    def _concatenate_embeddings(self, tower: TowerTrace) -> int:
        """Return the allocation of all rows' embeddings, concatenated from those of the chunks."""
        self._set_moment("forward", "joining the embeddings")
        size = self._rows(tower) * tower.width * tower.element_bytes
        chunks = [self.allocate(size, "embeddings")] if self._chunks(tower) > 1 else []
        concatenated = self.allocate(size, "embeddings")
        self._free_all(chunks)
        return concatenated

    def _backward(self, tower: TowerTrace, graph: Live, other_graphs: list[list[int]]) -> None:
        """Kept chunks first, while the graphs of the others exist; then the recomputed ones, which add to existing gradients."""
        self._set_moment("backward", f"backward of {tower.name}")
        recomputed_chunks = self._chunks(tower) - len(other_graphs) - bool(graph)
        # The gradients of several chunks are accumulated unsharded, also with sharded weights, before they are exchanged.
        accumulates = self._chunks(tower) > 1 and (self.setup.sharded or not graph)
        gradients = [self.allocate(size, "gradients") for size in tower.gradient_bytes] if accumulates else []
        if graph:
            size = sum(self.trace.allocations[index].bytes for index in graph.values())
            self._replay(tower.backward, graph, accumulating=bool(gradients))
            if other_graphs and not gradients:
                # The next kept chunk adds to existing gradients, in the memory of the first one's graph.
                self.free(self.allocate(max(0, sum(tower.gradient_bytes) - size), "gradients"))
            for other in other_graphs:
                self._free_all(other)
            self._gradients += graph.values()
        if recomputed_chunks:
            recomputed: Live = {}
            self._replay(tower.forward, recomputed, recomputing=True)
            self._replay(tower.backward, recomputed, accumulating=bool(gradients or graph))
            self._gradients += recomputed.values()
        if gradients and self.setup.sharded:
            self._free_all(gradients)
            gradients = [self.allocate(-(-size // self.setup.ranks), "gradients") for size in tower.gradient_bytes]
        self._gradients += gradients

    def _replay(self, events: Iterable[Event], live: Live, *, accumulating: bool = False, recomputing: bool = False) -> None:
        """Add traced events. accumulating: new gradients are added to existing ones and freed at once."""
        for event in events:
            self.phase = "backward" if recomputing else event.phase
            self.moment = event.moment.replace("forward of", "recomputation of") if recomputing else event.moment
            allocation = self.trace.allocations[event.allocation]
            if not event.is_allocation:
                if event.allocation in live:
                    self.free(live.pop(event.allocation))
            elif accumulating and allocation.part == "gradients":
                self.free(self.allocate(allocation.bytes, "temporaries"))
            elif allocation.bytes:
                live[event.allocation] = self.allocate(allocation.bytes, allocation.part)

    def _input_bytes(self, tower: TowerTrace) -> int:
        allocations = [self.trace.allocations[event.allocation] for event in tower.forward if event.is_allocation]
        return sum(a.bytes for a in allocations if a.part == "inputs") * self._rows(tower) // tower.chunk

    def _chunks(self, tower: TowerTrace) -> int:
        return -(-self._rows(tower) // tower.chunk)

    def _rows(self, tower: TowerTrace) -> int:
        return self.rows * tower.sides

    def _set_moment(self, phase: str, moment: str) -> None:
        self.phase, self.moment = phase, moment

    def _free_all(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.free(index)
