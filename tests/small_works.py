"""Workloads of a few numbers, for times and plans that can be computed by hand."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from megabatch import config
from megabatch.costs.counting import Call, Pass, Work
from megabatch.planning.estimator import Tools
from megabatch.planning.workload import Workload


def small_work(
    flops: float, row_bytes: float, fixed: float, operations: int, parameters: int, *, locked: bool = False, inputs: float = 0.0
) -> Work:
    """Return a forward pass of one GEMM and elementwise operations that move all bytes; backward runs each of them twice.

    A locked tower has no backward.
    """
    others = operations - 1
    forward = Pass((Call("matmul", flops, 0.0, 0.0), Call("elementwise", 0.0, row_bytes / others, fixed / others, others)))
    backward = Pass(() if locked else tuple(call._replace(times=2 * call.times) for call in forward.calls))
    return Work(forward, backward, parameters, 0 if locked else parameters, inputs)


class Stated(NamedTuple):
    """A memory prediction with the fields of the tracer's."""

    peak_bytes: int
    reserved_bytes: int
    parts: dict[str, int]
    moment: str
    phases: dict[str, int]


WORK = (small_work(50e9, 0.2e9, 0.3e9, 400, 80_000_000), small_work(6e9, 0.03e9, 0.2e9, 200, 40_000_000))
RUN = config.build(config.EMBEDDED, ["compute.precision=bf16"])


def predict(request, run, work, machine):
    """Return a memory model: 2 GB of state, 0.1 GB per row of a chunk or of a kept chunk, 10 kB per row of the shard."""

    def predicted(strategy):
        kept = 0 if strategy.accumulate else max(0, min(strategy.keep, strategy.chunks) - 1)
        peak = 2 * 10**9 + 10**8 * strategy.chunk * (1 + kept) + 10**4 * strategy.shard
        return Stated(peak, peak, {"all": peak}, "backward", {"backward": peak})

    return predicted


def counted(request, run, precision, machine):
    return Workload(WORK[: 2 if request.pairs else 1], (nn.Identity(),) * 2, (lambda rows: rows,) * 2)


TOOLS = Tools(counted, predict)
