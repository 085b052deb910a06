"""Equal blocks of a model: a transformer repeats one block many times, and a few of them show what all of them do.

`equal_blocks` finds the runs of equal blocks in a module; `few_blocks` is a context in which only the first two and the last two
of each run are called. Costs that are counted or traced there are then multiplied (`costs.counting`, `costs.memory.repeats`).
`sharded_blocks` are those that a run shards, equal or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

# Blocks of a run that are called: the first two and the last two. The inner two have equal neighbours on both sides.
KEPT = 4
# The kept block that stands for those that are left out.
TEMPLATE = 1
# Shorter runs are called whole.
SHORTEST = KEPT + 2
# Attributes that number a block, as transformers writes them for its caches.
NUMBERING = ("idx", "index", "layer_id", "block_id")


@dataclass(frozen=True)
class BlockRun:
    """Consecutive equal members of a list of modules. owner: the list. first: position of the first one. count: how many."""

    owner: nn.Module
    first: int
    count: int

    @property
    def blocks(self) -> list[nn.Module]:
        members = [member for member in self.owner._modules.values() if member is not None]
        return members[self.first : self.first + self.count]

    @property
    def kept(self) -> list[nn.Module]:
        blocks = self.blocks
        return [*blocks[: KEPT // 2], *blocks[-KEPT // 2 :]]

    @property
    def dropped(self) -> list[nn.Module]:
        return self.blocks[KEPT // 2 : -KEPT // 2]

    def template_and_dropped_parameters(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield the template's parameters with those of each block that is not called."""
        for block in self.dropped:
            yield from zip(self.kept[TEMPLATE].parameters(), block.parameters(), strict=True)

    @property
    def weight(self) -> int:
        """The number of blocks that the template stands for, itself included."""
        return self.count - KEPT + 1


def equal_blocks(module: nn.Module) -> list[BlockRun]:
    """Return the runs of at least six equal blocks in lists of modules; none lies within another."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return [run for child in module.children() for run in equal_blocks(child)]
    runs: list[BlockRun] = []
    members = list(module)
    signatures = [_signature(member) for member in members]
    start = 0
    while start < len(members):
        end = start
        while end < len(members) and signatures[end] == signatures[start]:
            end += 1
        # A block that occurs twice is one set of weights, which the costs of separate blocks do not describe.
        distinct = len({id(member) for member in members[start:end]}) == end - start
        if end - start >= SHORTEST and distinct:
            runs.append(BlockRun(module, start, end - start))
        else:
            runs += [run for member in dict.fromkeys(members[start:end]) for run in equal_blocks(member)]
        start = end
    return runs


@contextmanager
def few_blocks(runs: Sequence[BlockRun]) -> Iterator[None]:
    """A context in which each run has its kept blocks only."""
    owners = {id(run.owner): run.owner for run in runs}
    before = {key: dict(owner._modules) for key, owner in owners.items()}
    try:
        for key, owner in owners.items():
            dropped = {id(block) for run in runs if run.owner is owner for block in run.dropped}
            remaining = [block for block in before[key].values() if id(block) not in dropped]
            owner._modules = {str(position): block for position, block in enumerate(remaining)}
        yield
    finally:
        for key, owner in owners.items():
            owner._modules = before[key]


def _signature(block: nn.Module) -> Any:
    """Return what decides the operations of a block: classes, shapes, and attributes other than its number and rates."""
    return tuple((name, type(inner), _tensors(inner), tuple(sorted(_attributes(inner)))) for name, inner in block.named_modules())


def _tensors(module: nn.Module) -> Any:
    return tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    )


def _attributes(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, value in vars(module).items():
        if name.startswith("_") or any(part in name for part in NUMBERING):
            continue
        # Rates of dropout and of stochastic depth differ between blocks; only whether they are 0 changes the operations.
        if isinstance(value, float):
            yield name, str(value != 0)
        elif isinstance(value, (bool, int, str, tuple)):
            yield name, repr(value)


def sharded_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks that FSDP2 shards one by one: the members of the longest list of modules, which are the layers of a
    transformer and the stages of a convolutional network."""
    lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1]
    longest = max(lists, key=len, default=None)
    return [block for block in longest if any(True for _ in block.parameters())] if longest is not None else []
