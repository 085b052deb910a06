"""Work of a few numbers, for times and plans that can be worked out by hand."""

from __future__ import annotations

from typing import NamedTuple

from megabatch.planning.counting import Call, Pass, Work


def small_work(
    flops: float, row_bytes: float, fixed: float, operations: int, parameters: int, *, locked: bool = False, inputs: float = 0.0
) -> Work:
    """A forward of one product and of elementwise operations that move all bytes; a backward of each of them twice.

    A locked tower has no backward.
    """
    others = operations - 1
    forward = Pass((Call("product", flops, 0.0, 0.0), Call("elementwise", 0.0, row_bytes / others, fixed / others, others)))
    backward = Pass(() if locked else tuple(call._replace(times=2 * call.times) for call in forward.calls))
    return Work(forward, backward, parameters, 0 if locked else parameters, inputs)


class Stated(NamedTuple):
    """A prediction of memory, as the tracer makes it."""

    peak_bytes: int
    reserved_bytes: int
    parts: dict[str, int]
    moment: str
    phases: dict[str, int]
