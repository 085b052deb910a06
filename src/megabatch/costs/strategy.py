"""How a batch is reached: what a search chooses and what memory and time are predicted for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]
Sharding = Literal["ddp", "fsdp2"]


@dataclass(frozen=True)
class Strategy:
    """One way to compute a step over a batch of `shard` × `ranks` rows.

    chunk: rows that go through an encoder at once. keep: chunks of each tower that are not computed twice. checkpointing: inside
    the encoders. accumulate: the loss is a mean over samples, so that chunks add up and nothing is computed twice.
    """

    ranks: int
    shard: int
    chunk: int
    keep: int = 0
    checkpointing: bool = False
    precision: Precision = "fp32"
    sharding: Sharding = "ddp"
    accumulate: bool = False

    @property
    def batch(self) -> int:
        return self.ranks * self.shard

    @property
    def chunks(self) -> int:
        return -(-self.shard // self.chunk)
