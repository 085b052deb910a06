"""cached() with several ranks: DDP and FSDP2 give the gradient of one process, and exchange it once per step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from world import Collectives, error_of

import megabatch

pytestmark = pytest.mark.sampled(4)

ROWS = 14


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Towers(nn.Module):
    """Two towers and a temperature in one forward, as in OpenCLIP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(nn.Linear(6, 8), Block(8), nn.Linear(8, 4))
        self.right = nn.Sequential(nn.Linear(5, 8), Block(8), nn.Linear(8, 4))
        # fully_shard takes no scalars.
        self.log_scale = nn.Parameter(torch.ones(1))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.left(x), self.right(y), self.log_scale.exp().sum()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 6, generator=generator).double(), torch.randn(ROWS, 5, generator=generator).double()


def shard(rank: int, size: int, *, empty: bool = False) -> tuple[Tensor, Tensor]:
    """Return unequal shards of the rows; with `empty`, the last rank has none."""
    cuts = [0, *(ROWS * (r + 1) // size - (r + 1 < size) for r in range(size))]
    if empty:
        cuts[-2] = ROWS
    x, y = data()
    return x[cuts[rank] : cuts[rank + 1]], y[cuts[rank] : cuts[rank + 1]]


def expected() -> list[Tensor]:
    model = Towers()
    left, right, scale = model(*data())
    megabatch.reference.clip_loss(left, right, scale).backward()
    return [p.grad for p in model.parameters()]


def counted(step: Callable[[], Any]) -> Counter[str]:
    with Collectives() as collectives:
        step()
    return collectives.counts


def loss_of(encode: Callable[..., Any], x: Tensor, y: Tensor) -> None:
    left, right, scale = encode(x, y)
    megabatch.clip_loss(left, right, scale, group=dist.group.WORLD).backward()


def ddp_step(rank: int, size: int, keep: Any, empty: bool, options: dict[str, Any]) -> Any:
    model = Towers()
    ddp = DDP(model, **options)
    encode = megabatch.cached(ddp, chunk=2, keep=keep)
    x, y = shard(rank, size, empty=empty)
    found = []
    for _ in range(2):
        ddp.zero_grad()
        loss_of(encode, x, y)
        found.append([p.grad.clone() for p in model.parameters()])
    plain = DDP(Towers(), **options)
    for _ in range(2):
        loss_of(plain, x, y)
    counts = [counted(lambda call=call: loss_of(call, x, y)) for call in (encode, plain)]
    assert ddp.module is model
    return found, counts


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "keep, empty, options",
    [
        (0, False, {}),
        (1, False, {"find_unused_parameters": True}),
        ("auto", True, {"gradient_as_bucket_view": True}),
        (0, True, {"static_graph": True}),
    ],
)
def test_ddp_gives_the_gradient_of_one_process_and_exchanges_it_once(world, size, keep, empty, options):
    if empty and size == 1:
        empty = False
    want = expected()
    for found, (cached, plain) in world.run(size, ddp_step, keep, empty, options):
        for grads in found:
            for a, b in zip(grads, want, strict=True):
                assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
        assert cached == plain and sum(cached.values()) > 0


def many_chunks(rank: int, size: int) -> list[int]:
    """All-reduces of DDP in one step at 1 and at 7 chunks: one bucket, one all-reduce."""
    counts = []
    for chunk in (100, 1):
        model = DDP(Towers().left)
        encode = megabatch.cached(model, chunk=chunk)
        x, _ = shard(rank, size)
        counts.append(counted(lambda encode=encode, x=x: (encode(x) ** 2).sum().backward())["allreduce_"])
    return counts


def test_the_number_of_all_reduces_does_not_depend_on_the_chunk(world):
    assert world.run(2, many_chunks) == [[1, 1], [1, 1]]


def two_ddp_towers(rank: int, size: int) -> list[Tensor]:
    """Wrap each tower in a separate DDP, and the temperature in none: the loss completes its gradient on every rank."""
    model = Towers()
    left, right = (megabatch.cached(DDP(tower), chunk=3) for tower in (model.left, model.right))
    x, y = shard(rank, size)
    megabatch.clip_loss(left(x), right(y), model.log_scale.exp().sum(), group=dist.group.WORLD).backward()
    return [p.grad for p in model.parameters()]


class Inside(nn.Module):
    """Call the cached encoders inside the module that DDP wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Towers()
        self.left = megabatch.cached(self.model.left, chunk=3)
        self.right = megabatch.cached(self.model.right, chunk=3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.left(x), self.right(y), self.model.log_scale.exp().sum()


def ddp_around(rank: int, size: int) -> list[Tensor]:
    model = Inside()
    loss_of(DDP(model), *shard(rank, size))
    return [p.grad for p in model.model.parameters()]


def shared_tower(rank: int, size: int, wrapper: str) -> list[Tensor]:
    """Use one tower for both sides, called twice before each backward."""
    model = Towers().left
    if wrapper == "fsdp":
        fully_shard(model[1])
        fully_shard(model)
    encode = megabatch.cached(model if wrapper == "fsdp" else DDP(model), chunk=3)
    x, _ = shard(rank, size)
    for _ in range(2):
        model.zero_grad()
        megabatch.clip_loss(encode(x), encode(x.flip(1)), 2.0, group=dist.group.WORLD).backward()
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]


@pytest.mark.parametrize("arrangement", [two_ddp_towers, ddp_around])
def test_other_arrangements_with_ddp_give_the_same_gradient(world, arrangement):
    want = expected()
    for found in world.run(2, arrangement):
        for a, b in zip(found, want, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_tower_shared_by_both_sides(world, wrapper):
    model = Towers().left
    x, _ = data()
    megabatch.reference.clip_loss(model(x), model(x.flip(1)), 2.0).backward()
    for found in world.run(2, shared_tower, wrapper):
        for a, p in zip(found, model.parameters(), strict=True):
            assert torch.allclose(a, p.grad, rtol=1e-9, atol=1e-12)


def on_a_device(rank: int, size: int) -> list[Tensor]:
    """DDP with device_ids moves its inputs and expects at least one; on a GPU that is the usual form."""
    model = Towers().left
    ddp = DDP(model)
    ddp.device_ids, ddp.device_type = [0], "cpu"
    x, _ = shard(rank, size)
    (megabatch.cached(ddp, chunk=3)(x) ** 2).mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    encode = megabatch.cached(ddp, chunk=3)
    megabatch.retry_on_oom(lambda: (encode(x) ** 2).mean().backward(), optimizer, group=dist.group.WORLD)()
    return [p.grad for p in model.parameters()]


def test_ddp_with_device_ids(world):
    model = Towers().left
    for rank in range(2):
        (model(shard(rank, 2)[0]) ** 2).mean().backward()
    for found in world.run(2, on_a_device):
        for a, p in zip(found, model.parameters(), strict=True):
            # Two steps, each the average of two ranks' gradients.
            assert torch.allclose(a, p.grad, rtol=1e-9, atol=1e-12)


def hidden_ddp(rank: int, size: int) -> str:
    ddp = DDP(Towers().left)
    return error_of(lambda: megabatch.cached(lambda x: ddp(x), chunk=2))


def test_ddp_hidden_inside_the_encoder_is_refused(world):
    assert all("pass the DDP model itself" in message for message in world.run(2, hidden_ddp))


def sharded(model: Towers) -> Towers:
    for tower in (model.left, model.right):
        fully_shard(tower[1])
        fully_shard(tower)
    return fully_shard(model)


def fsdp_step(rank: int, size: int, chunk: int, keep: Any, empty: bool) -> Any:
    model = sharded(Towers())
    encode = megabatch.cached(model, chunk=chunk, keep=keep)
    x, y = shard(rank, size, empty=empty)
    found = []
    for _ in range(2):
        model.zero_grad()
        loss_of(encode, x, y)
        found.append([p.grad.full_tensor() for p in model.parameters()])
    model.zero_grad()
    return found, counted(lambda: loss_of(encode, x, y))["_reduce_scatter_base_"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("keep, empty", [(0, False), (1, False), ("auto", True)])
def test_fsdp2_gives_the_gradient_of_one_process(world, size, keep, empty):
    want = expected()
    scattered = set()
    for chunk in (2, 100):
        for found, scatters in world.run(size, fsdp_step, chunk, keep, empty and size > 1):
            scattered.add(scatters)
            for grads in found:
                for a, b in zip(grads, want, strict=True):
                    assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    assert len(scattered) == 1 and (min(scattered) > 0 or size == 1), "the number of reduce-scatters does not depend on the chunk"


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4))


def synchronised_norms(rank: int, size: int) -> list[int]:
    from megabatch.chunks.ddp_fsdp import meeting_rings

    return [ring.size for ring in meeting_rings([Normed()])]


def test_ranks_of_synchronised_norms_are_found(world):
    assert world.run(2, synchronised_norms) == [[2], [2]]
