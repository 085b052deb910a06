"""find_chunk over ranks: a size that fails on one rank fails on all, no rank is left waiting, and all return the same size."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_fit_finder import quickly, uncollecting
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from world import error_of

import megabatch
from megabatch.measuring.fit.finder import find_chunk
from megabatch.measuring.fit.loops import fitted, micro_batches
from megabatch.measuring.fit.memory import ResidentTracker

MIB = 2**20


@quickly()
def limits(rank: int, size: int, own: list[int], where: str) -> Any:
    """Ranks with different memory, and a DDP model whose backward would wait for a rank that has failed."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters())
    tried = []

    def ask(rows: int, at: str) -> None:
        if at == where and rows > own[rank]:
            raise torch.OutOfMemoryError("out of memory")

    def step(rows: int) -> None:
        tried.append(rows)
        ask(rows, "forward")
        loss = ddp(torch.rand(rows, 4)).square().mean()
        if where == "backward":
            loss.register_hook(lambda grad: ask(rows, "backward"))
        loss.backward()
        ask(rows, "optimizer step")
        optimizer.step()
        optimizer.zero_grad()

    before = [p.detach().clone() for p in model.parameters()]
    # The DDP wrapper is part of the state, or only called. Starts and caps differ: the smallest counts.
    state = [ddp if where == "backward" else model, optimizer]
    found = find_chunk(step, state=state, start=4 + rank, cap=90 - rank, margin=0.0, group=dist.group.WORLD)
    same = all(map(torch.equal, before, model.parameters())) and not optimizer.state
    # Afterwards DDP synchronizes gradients again.
    ddp(torch.full((found.size, 4), float(rank))).sum().backward()
    return found.size, [(trial.size, trial.ran, trial.why) for trial in found.trials], tried, same, model.weight.grad


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer step"])
@pytest.mark.parametrize("own", [[1000, 37], [37, 1000], [1000, 1000]], ids=["second", "first", "neither"])
def test_the_smallest_of_all_ranks_is_found_by_all(world, own, where):
    first, second = world.run(2, limits, own, where)
    expected = min(*own, 89)
    for size, trials, _, same, _ in (first, second):
        assert size == expected and same
        assert trials == first[1]
        assert all(why == (None if ran else "out of memory") for _, ran, why in trials)
    assert sorted(set(first[2])) == sorted(set(second[2]))
    assert torch.equal(first[4], second[4]) and torch.equal(first[4], torch.full((2, 4), expected / 2))


@quickly()
def broken(rank: int, size: int) -> str:
    def step(rows: int) -> None:
        if rank == 1:
            raise KeyError("labels")

    try:
        find_chunk(step, group=dist.group.WORLD)
    except (KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_an_error_on_one_rank_ends_the_search_on_all(world):
    first, second = world.run(2, broken)
    assert first.startswith("RuntimeError: rank 1 failed in a trial")
    assert second == "KeyError: 'labels'"


def test_the_group_has_to_be_named(world):
    for message in world.run(2, unnamed):
        assert "group is not given" in message


def unnamed(rank: int, size: int) -> str:
    message = error_of(lambda: find_chunk(lambda rows: None))
    # A rank that exits at once would close its connections while the other one still opens them.
    dist.barrier()
    return message


@quickly()
def contrastive(rank: int, size: int, limit: int) -> Any:
    """A contrastive step, whose ranks communicate in the loss: a cached encoder does not leave the others waiting."""
    torch.manual_seed(0)

    class Tower(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if rank == 1 and len(x) > limit:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(x)

    tower = Tower(4, 3)
    encode = megabatch.cached(DDP(tower), chunk=64)
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(rank))

    def step(chunk: int) -> None:
        encode.chunk = chunk
        megabatch.clip_loss(encode(x), encode(x + 1), 5.0, group=dist.group.WORLD).backward()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "out of memory")
        found = find_chunk(step, state=[tower], cap=40, margin=0.0, group=dist.group.WORLD)
    return found.size, encode.chunk


def test_ranks_that_meet_in_a_contrastive_loss_agree(world):
    assert [size for size, _ in world.run(2, contrastive, 12)] == [12, 12]


@uncollecting()
def sharded(rank: int, size: int) -> Any:
    """With FSDP2 a rank cannot fail alone: sizes stay below what is expected to fit, at 1 MiB per row of one rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tried = []

    def step(rows: int) -> None:
        tried.append(rows)
        held = torch.ones(rows, MIB // (4 if rank == 0 else 8))
        model(held[:, :4]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(2)
    tried.clear()
    before = [p.to_local().detach().clone() for p in model.parameters()]
    with ResidentTracker() as idle:
        pass
    budget = idle.bytes + 128 * MIB
    found = find_chunk(step, state=[model, optimizer], start=64, margin=0.0, budget=budget, group=dist.group.WORLD)
    same = all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))
    return found.size, tried, same, [trial.ran for trial in found.trials]


def test_the_search_of_sharded_models_never_fails(world):
    first, second = world.run(2, sharded)
    for size, tried, same, _ in (first, second):
        assert size == first[0] and tried == first[1] and same
        # The process's other memory varies by many MiB where allocators return pages late.
        assert 64 <= size <= 140 and max(tried) <= 145 and tried[0] == 16


@quickly()
def own_loop(rank: int, size: int) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    @fitted([model, optimizer], batch=20, margin=0.0, group=dist.group.WORLD)
    def step(chunk: int) -> None:
        seen.append(chunk)
        if chunk > 6 and rank == 0:
            raise torch.OutOfMemoryError("out of memory")
        for x, share in micro_batches(torch.ones(10, 4), chunk):
            (share * model(x).square().mean()).backward()
        optimizer.step()

    step()
    return step.chunk, step.micro_batches(10), max(seen)


def test_a_loop_of_several_ranks_has_its_share_of_the_batch_as_cap(world):
    assert world.run(2, own_loop) == [(6, 2, 10)] * 2
