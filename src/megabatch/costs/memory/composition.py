"""A whole contrastive step, put together from one chunk of each tower: forward, loss, backward chunk by chunk, update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .contrastive import Contrastive, Side
from .loss import LossMemory
from .trace import Event, Trace

# Blocks of the traced chunk that are there now, and the blocks that stand for them here.
Alive = dict[int, int]


class Composition:
    """The trace of a step over `rows` pairs, of which a tower keeps the graphs of as many chunks as `keep` says of it."""

    def __init__(self, step: Contrastive, rows: int, keep: Mapping[str, int]) -> None:
        self.step, self.rows = step, rows
        self.setup = step.setup
        self.keep = keep
        recorded = step.recorder.trace
        self.trace = Trace(list(recorded.blocks), recorded.events[: step.lasting])
        self.phase = self.moment = "forward"
        self._gradients: list[int] = []
        self._forward_and_backward()
        self.update_begins = len(self.trace.events)
        self._splice(step.update_events, {})
        self._say("after the step", "after the step")
        self._release(self._gradients)

    def hold(self, size: int, kind: str) -> int:
        granule = self.step.recorder.granule
        return self.trace.hold(-(-size // granule) * granule, kind, self.phase, self.moment)

    def release(self, number: int) -> None:
        self.trace.release(number, self.phase, self.moment)

    def _forward_and_backward(self) -> None:
        self._say("forward", "forward")
        inputs = [self.hold(self._input_bytes(side), "inputs") for side in self.step.sides] if self.setup.inputs_on_device else []
        kept = {side.name: self._forward(side) for side in self.step.sides}
        embeddings = [self._embeddings(side) for side in self.step.sides]
        last = self.step.sides[-1]
        loss = LossMemory(self, self.setup, self.rows, last.width, last.element_bytes)
        self._say("loss", "forward of the loss")
        loss.forward()
        self._say("backward", "backward of the loss")
        gradients = loss.backward()
        for side in reversed(self.step.sides):
            self._backward(side, *kept[side.name])
        self._say("backward", "end of backward")
        self._release([*gradients, *embeddings, *inputs])

    def _forward(self, side: Side) -> tuple[Alive, list[list[int]]]:
        """The graphs of the chunks that are kept: one as it was traced, and what is left of the others."""
        graph: Alive = {}
        # A batch that goes through at once is not computed twice.
        kept = 1 if self.setup.chunk is None else min(self.keep[side.name], self._count(side))
        if not kept:
            return graph, []
        self._say("forward", f"forward of {side.name}")
        self._splice(side.forward, graph)
        left = [self.trace.blocks[number] for number in graph.values()]
        return graph, [[self.hold(block.bytes, block.kind) for block in left] for _ in range(kept - 1)]

    def _embeddings(self, side: Side) -> int:
        """Those of all rows, joined from those of the chunks."""
        self._say("forward", "joining the embeddings")
        size = self._rows(side) * side.width * side.element_bytes
        pieces = [self.hold(size, "embeddings")] if self._count(side) > 1 else []
        joined = self.hold(size, "embeddings")
        self._release(pieces)
        return joined

    def _backward(self, side: Side, graph: Alive, others: list[list[int]]) -> None:
        """Kept chunks first, while the others' graphs are there; then the recomputed ones, which find gradients."""
        self._say("backward", f"backward of {side.name}")
        again = self._count(side) - len(others) - bool(graph)
        # Several chunks' gradients are added up whole, also where weights are sharded, before they are exchanged.
        whole = self._count(side) > 1 and (self.setup.sharded or not graph)
        found = [self.hold(size, "gradients") for size in side.gradient_bytes] if whole else []
        if graph:
            size = sum(self.trace.blocks[number].bytes for number in graph.values())
            self._splice(side.backward, graph, found=bool(found))
            if others and not found:
                # The next one that was kept finds gradients, where the first one's graph was.
                self.release(self.hold(max(0, sum(side.gradient_bytes) - size), "gradients"))
            for other in others:
                self._release(other)
            self._gradients += graph.values()
        if again:
            recomputed: Alive = {}
            self._splice(side.forward, recomputed, recomputing=True)
            self._splice(side.backward, recomputed, found=bool(found or graph))
            self._gradients += recomputed.values()
        if found and self.setup.sharded:
            self._release(found)
            found = [self.hold(-(-size // self.setup.ranks), "gradients") for size in side.gradient_bytes]
        self._gradients += found

    def _splice(self, events: Iterable[Event], alive: Alive, *, found: bool = False, recomputing: bool = False) -> None:
        """Adds traced events. With gradients `found`, new ones are added to those and go at once."""
        for event in events:
            self.phase = "backward" if recomputing else event.phase
            self.moment = event.moment.replace("forward of", "recomputation of") if recomputing else event.moment
            block = self.trace.blocks[event.block]
            if not event.comes:
                if event.block in alive:
                    self.release(alive.pop(event.block))
            elif found and block.kind == "gradients":
                self.release(self.hold(block.bytes, "temporaries"))
            elif block.bytes:
                alive[event.block] = self.hold(block.bytes, block.kind)

    def _input_bytes(self, side: Side) -> int:
        blocks = [self.trace.blocks[event.block] for event in side.forward if event.comes]
        return sum(b.bytes for b in blocks if b.kind == "inputs") * self._rows(side) // side.chunk

    def _count(self, side: Side) -> int:
        return -(-self._rows(side) // side.chunk)

    def _rows(self, side: Side) -> int:
        return self.rows * side.sides

    def _say(self, phase: str, moment: str) -> None:
        self.phase, self.moment = phase, moment

    def _release(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.release(number)
