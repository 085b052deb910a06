"""What several ranks add to memory or save: DDP's gradient buckets, FSDP2's sharded weights and the blocks that it gathers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...towers.repeats import sharded_blocks
from .trace import Recorder, autograd_nodes

# torch's DDP exchanges gradients in buckets of at most 25 MiB, the first one of 1 MiB.
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20


def allocate_buckets(recorder: Recorder, parameters: list[Tensor]) -> None:
    """Allocate DDP's buckets: a second copy of the gradients from the start, since gradients are not views of them by default."""
    for bucket in _buckets(parameters):
        recorder.allocate(sum(p.numel() * p.element_size() for p in bucket), "gradient buckets")


def exchange_in_bf16(recorder: Recorder, parameters: list[Tensor]) -> None:
    """Allocate the copies of DDP's buckets in bf16, all at once: communication may hold each until the last has arrived."""
    with recorder.during("backward", "gradient buckets", "exchange of gradients"):
        sizes = [sum(p.numel() for p in bucket) * torch.bfloat16.itemsize for bucket in _buckets(parameters)]
        for copy in [recorder.allocate(size, "gradient buckets") for size in sizes]:
            recorder.free(copy)


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters of each of DDP's buckets."""
    limit, bucket, filled = FIRST_BUCKET_BYTES, list[Tensor](), 0
    for parameter in reversed(parameters):
        bucket.append(parameter)
        filled += parameter.numel() * parameter.element_size()
        if filled >= limit:
            yield bucket
            limit, bucket, filled = BUCKET_BYTES, [], 0
    if bucket:
        yield bucket


class ShardGroup:
    """The weights that FSDP2 gathers together, those of one block of the model. root: the weights outside of all blocks."""

    def __init__(self, parameters: list[nn.Parameter], shards: dict[nn.Parameter, nn.Parameter], root: bool) -> None:
        self.root = root
        self.bytes = sum(p.numel() * p.element_size() for p in parameters)
        self.trainable = [p for p in parameters if p.requires_grad]
        self.shards = shards
        self.without_gradient = set(self.trainable)
        self.gathered: int | None = None


class FullyShardedWeights:
    """FSDP2 on one rank: every block's weights are gathered for its forward and again for its backward, with the next block's
    weights in flight; its gradients are reduce-scattered when all of them are computed, in bf16 or in their own dtype."""

    def __init__(self, recorder: Recorder, ranks: int, *, in_bf16: bool) -> None:
        self.recorder, self.ranks, self.in_bf16 = recorder, ranks, in_bf16
        self.parameters: list[Tensor] = []
        self._groups: list[ShardGroup] = []
        self._reduce_scatter: int | None = None
        self._shards: dict[nn.Parameter, nn.Parameter] = {}

    def shard(self, module: nn.Module) -> None:
        """Shard a module: each member of its longest list of modules as a group, then the rest."""
        taken: set[nn.Parameter] = set()
        for block in sharded_blocks(module):
            taken |= self._add_group(block, taken, root=False)
        self._add_group(module, taken, root=True)

    def allocate_prefetch(self) -> None:
        """Allocate memory for the weights of the next block, for the whole step."""
        self.recorder.allocate(max((g.bytes for g in self._groups if not g.root), default=0), "gathered weights")

    def finish_backward(self) -> None:
        """Free what is in flight at the end of backward."""
        if self._reduce_scatter is not None:
            self.recorder.free(self._reduce_scatter)
            self._reduce_scatter = None
        for group in self._groups:
            self._free(group)

    def _add_group(self, module: nn.Module, taken: set[nn.Parameter], *, root: bool) -> set[nn.Parameter]:
        parameters = [p for p in module.parameters() if p not in taken]
        group = ShardGroup(parameters, {p: self.shard_of(p) for p in parameters}, root)
        self._groups.append(group)
        for parameter in group.trainable:
            parameter.register_post_accumulate_grad_hook(lambda p: self._after_gradient(group, p))
        module.register_forward_pre_hook(lambda module, args: self._gather(group))
        module.register_forward_hook(lambda module, args, output: self._after_forward(group, output))
        return set(parameters)

    def shard_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return this rank's shard of a parameter; the first call allocates it."""
        if parameter in self._shards:
            return self._shards[parameter]
        allocation = self.recorder.allocation_of(parameter)
        assert allocation is not None
        # Whole weights exist only while they are gathered.
        allocation.bytes = 0
        length = -(-parameter.shape[0] // self.ranks) if parameter.ndim else 1
        with self.recorder.during("setup", "weights"):
            new = torch.empty((length, *parameter.shape[1:]), dtype=parameter.dtype, device="cpu")
        self._shards[parameter] = shard = nn.Parameter(new, parameter.requires_grad)
        if shard.requires_grad:
            self.parameters.append(shard)
        return shard

    def _gather(self, group: ShardGroup) -> None:
        for other in self._groups:
            # No gradient reports the end of backward for a group without trainable weights.
            if other.gathered is not None and not other.root and not other.trainable and other is not group:
                self._free(other)
        if group.gathered is None and group.bytes:
            receiving = self.recorder.allocate(group.bytes, "gathered weights")
            group.gathered = self.recorder.allocate(group.bytes, "gathered weights")
            self.recorder.free(receiving)

    def _after_forward(self, group: ShardGroup, output: Any) -> None:
        for node in autograd_nodes(output):
            node.register_prehook(lambda gradients: self._gather(group))
        if not group.root:
            self._free(group)

    def _free(self, group: ShardGroup) -> None:
        if group.gathered is not None:
            self.recorder.free(group.gathered)
            group.gathered = None

    def _after_gradient(self, group: ShardGroup, parameter: nn.Parameter) -> None:
        group.without_gradient.discard(parameter)
        if group.without_gradient:
            return
        sizes = (p.numel() * (torch.bfloat16.itemsize if self.in_bf16 else p.element_size()) for p in group.trainable)
        sent = self.recorder.allocate(sum(sizes), "temporaries")
        if self._reduce_scatter is not None:
            self.recorder.free(self._reduce_scatter)
        self._reduce_scatter = sent
        for trainable in group.trainable:
            shard = group.shards[trainable]
            trainable.grad = None
            if shard.grad is None:
                shard.grad = torch.empty_like(shard)
                self.recorder.label(shard.grad, "gradients")
        group.without_gradient = set(group.trainable)
        self._free(group)
