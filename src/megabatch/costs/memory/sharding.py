"""What ranks add or take away: DDP's buckets, FSDP2's shards and the blocks that it gathers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .moments import nodes_of
from .recorder import Recorder

# torch's DDP exchanges gradients in buckets of at most 25 MiB, the first of 1 MiB.
BUCKET, FIRST_BUCKET = 25 * 2**20, 2**20


def hold_buckets(recorder: Recorder, parameters: list[Tensor]) -> None:
    """DDP's buckets: a second copy of the gradients, there from the start, since gradients are no views of them by default."""
    limit, filled = FIRST_BUCKET, 0
    for parameter in reversed(parameters):
        filled += parameter.numel() * parameter.element_size()
        if filled >= limit:
            recorder.hold(filled, "gradient buckets")
            limit, filled = BUCKET, 0
    if filled:
        recorder.hold(filled, "gradient buckets")


class Group:
    """The weights that FSDP2 gathers together, for one block."""

    def __init__(self, parameters: list[nn.Parameter], shards: dict[nn.Parameter, nn.Parameter], root: bool) -> None:
        self.root = root
        self.bytes = sum(p.numel() * p.element_size() for p in parameters)
        self.learning = [p for p in parameters if p.requires_grad]
        self.shards = shards
        self.waiting = set(self.learning)
        self.gathered: int | None = None


class Shards:
    """FSDP2 over ranks, played through: every block's weights are gathered for its forward and again for its backward, the next
    block's on their way meanwhile; its gradients are scattered when all of them are there."""

    def __init__(self, recorder: Recorder, ranks: int) -> None:
        self.recorder, self.ranks = recorder, ranks
        self.parameters: list[Tensor] = []
        self._groups: list[Group] = []
        self._leaving: int | None = None
        self._made: dict[nn.Parameter, nn.Parameter] = {}

    def shard(self, module: nn.Module) -> None:
        """Shards a module: the members of its longest list by themselves, then the rest."""
        taken: set[nn.Parameter] = set()
        for block in _blocks(module):
            taken |= self._group(block, taken, root=False)
        self._group(module, taken, root=True)

    def prefetch(self) -> None:
        """Room for the weights of the block that comes next, while a step lasts."""
        self.recorder.hold(max((g.bytes for g in self._groups if not g.root), default=0), "gathered weights")

    def _group(self, module: nn.Module, taken: set[nn.Parameter], *, root: bool) -> set[nn.Parameter]:
        parameters = [p for p in module.parameters() if p not in taken]
        shards = {p: self._shard(p) for p in parameters}
        group = Group(parameters, shards, root)
        self._groups.append(group)
        for parameter in group.learning:
            parameter.register_post_accumulate_grad_hook(lambda p: self._accumulated(group, p))
        module.register_forward_pre_hook(lambda module, args: self._gather(group))
        module.register_forward_hook(lambda module, args, output: self._ran(group, output))
        return set(parameters)

    def _shard(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter in self._made:
            return self._made[parameter]
        block = self.recorder.block(parameter)
        assert block is not None
        # Whole weights are there only while they are gathered.
        block.bytes = 0
        length = -(-parameter.shape[0] // self.ranks) if parameter.ndim else 1
        with self.recorder.during("setup", "weights"):
            new = torch.empty((length, *parameter.shape[1:]), dtype=parameter.dtype, device="cpu")
        self._made[parameter] = shard = nn.Parameter(new, parameter.requires_grad)
        if shard.requires_grad:
            self.parameters.append(shard)
        return shard

    def _gather(self, group: Group) -> None:
        for other in self._groups:
            # Who learns nothing is never told that its backward is over.
            if other.gathered is not None and not other.root and not other.learning and other is not group:
                self._free(other)
        if group.gathered is None and group.bytes:
            arriving = self.recorder.hold(group.bytes, "gathered weights")
            group.gathered = self.recorder.hold(group.bytes, "gathered weights")
            self.recorder.release(arriving)

    def _ran(self, group: Group, output: Any) -> None:
        for node in nodes_of(output):
            node.register_prehook(lambda gradients: self._gather(group))
        if not group.root:
            self._free(group)

    def _free(self, group: Group) -> None:
        if group.gathered is not None:
            self.recorder.release(group.gathered)
            group.gathered = None

    def _accumulated(self, group: Group, parameter: nn.Parameter) -> None:
        group.waiting.discard(parameter)
        if group.waiting:
            return
        sent = self.recorder.hold(sum(p.numel() * p.element_size() for p in group.learning), "temporaries")
        if self._leaving is not None:
            self.recorder.release(self._leaving)
        self._leaving = sent
        for learning in group.learning:
            shard = group.shards[learning]
            learning.grad = None
            if shard.grad is None:
                shard.grad = torch.empty_like(shard)
                self.recorder.label(shard.grad, "gradients")
        group.waiting = set(group.learning)
        self._free(group)

    def finish(self) -> None:
        """The end of backward: nothing is on its way any more."""
        if self._leaving is not None:
            self.recorder.release(self._leaving)
            self._leaving = None
        for group in self._groups:
            self._free(group)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """As a run shards them: the members of the longest list of modules inside."""
    lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1]
    longest = max(lists, key=len, default=None)
    return [block for block in longest if any(True for _ in block.parameters())] if longest is not None else []
