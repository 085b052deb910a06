"""How a batch is computed: split over ranks and into chunks, in which precision. Memory and time are predicted for a strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]
Sharding = Literal["ddp", "fsdp2", "hsdp"]
GradientExchange = Literal["bf16"]


@dataclass(frozen=True)
class Strategy:
    """One way to compute a step over a batch of `ranks` × `shard` rows.

    ranks: processes, one per device. shard: rows of the batch on each rank. chunk: rows that go through an encoder at once.
    keep: chunks per tower whose graphs are kept, so that backward does not recompute them. checkpointing: activation checkpointing
    inside the encoders. sharding: "hsdp" shards the weights over the ranks of each computer and replicates them across computers.
    accumulate: the loss is a mean over samples, so that gradients of chunks are accumulated and no chunk is computed twice.
    node: ranks of each computer. gradient_exchange: the dtype in which gradients are averaged; None: that of the weights.
    """

    ranks: int
    shard: int
    chunk: int
    keep: int = 0
    checkpointing: bool = False
    precision: Precision = "fp32"
    sharding: Sharding = "ddp"
    accumulate: bool = False
    node: int = 8
    gradient_exchange: GradientExchange | None = None

    @property
    def batch(self) -> int:
        return self.ranks * self.shard

    @property
    def owners(self) -> int:
        """The ranks that hold one copy of the weights together."""
        return {"ddp": 1, "fsdp2": self.ranks, "hsdp": min(self.node, self.ranks)}[self.sharding]

    @property
    def on_fewest_ranks(self) -> Strategy:
        """A strategy with the same memory on each rank and the fewest ranks, so that one trace serves both.

        With DDP what a rank holds does not depend on the number of other ranks; with hybrid sharding it is what it would hold if
        its node were alone.
        """
        if self.sharding == "ddp":
            return replace(self, ranks=min(self.ranks, 2))
        return replace(self, ranks=self.owners, sharding="fsdp2")

    @property
    def chunks(self) -> int:
        return -(-self.shard // self.chunk)
