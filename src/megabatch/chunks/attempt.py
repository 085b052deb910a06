"""One attempt at a step that may run out of memory: who takes part in it, and what has to be done once it has gone well."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol

from torch.nn.parallel import DistributedDataParallel

from ..ring import Ring
from .ddp_fsdp import exchange_gradients
from .rng_state import Replay


class Shrinkable(Protocol):
    """What runs a batch in chunks, and can do it in smaller ones."""

    chunk: int

    def stop_keeping(self) -> bool:
        """Keeps no graphs from now on; returns whether it kept any."""


class Attempt:
    """What the chunked callables that run inside a step leave for its end."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.chunked: list[Shrinkable] = []
        self.starts: list[Replay] = []
        self.afterwards: dict[int, Callable[[], object]] = {}

    def join(self, chunked: Shrinkable, meeting: list[Ring], ddp: DistributedDataParallel | None) -> None:
        """Takes part in it; the gradients of `ddp` are exchanged once every rank is known to have them."""
        if meeting:
            raise ValueError(
                "ranks meet inside this model's forward (FSDP2 gathers weights, SyncBatchNorm statistics), so that one of them "
                "cannot drop out of it alone: retry_on_oom() works with DDP or one process; choose a chunk that fits, with some "
                "to spare"
            )
        active = DistributedDataParallel._active_ddp_module
        if active is not None and active is not ddp and active.require_backward_grad_sync and self.ring.size > 1:
            raise ValueError(
                "retry_on_oom() around a DDP model that calls the cached encoder: it would exchange gradients while another "
                "rank may have run out of memory; cache the DDP model itself, cached(ddp, chunk=…)"
            )
        if ddp is not None and ddp.static_graph:
            raise ValueError(
                "retry_on_oom() with DDP(static_graph=True): that exchanges gradients in the first backward, which has to wait "
                "here until every rank is through it; leave static_graph out"
            )
        if all(chunked is not other for other in self.chunked):
            self.chunked.append(chunked)
        if ddp is not None:
            self.afterwards[id(ddp)] = functools.partial(exchange_gradients, ddp)


current: ContextVar[Attempt | None] = ContextVar("attempt", default=None)
