"""With several ranks, a cached encoder is refused if and only if nobody would exchange its gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_encoders import tower
from test_cached_ranks import Towers, data, expected, shard
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from world import error_of

import megabatch


class Model(Towers):
    """Has one method for each side, as in OpenCLIP."""

    def encode_left(self, x: Tensor) -> Tensor:
        return self.left(x)


class Trainer:
    """Wraps the model after the loss was created, as trainers do; then `model` is the wrapped one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


class Hidden:
    __slots__ = ("model",)

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        return self.model(x)


def refused(rank: int, size: int) -> dict[str, str]:
    x, _ = shard(rank, size)
    model = Model()
    before = megabatch.cached(model.encode_left, chunk=3)
    trainer = Trainer(model.left)
    late = megabatch.cached(lambda x: trainer.model(x), chunk=3)
    ddp = DDP(model)
    trainer.model = DDP(model.left)
    other = nn.ModuleDict({"own": nn.Linear(6, 4).double()})
    other.forward = lambda x: other["own"](x) + megabatch.cached(model.left, chunk=3)(x)
    part = Model()
    fully_shard(part.left[1])
    encoders: dict[str, Callable[[Tensor], Any]] = {
        "the module inside": megabatch.cached(ddp.module.left, chunk=3),
        "kept": megabatch.cached(ddp.module.left, chunk=3, keep=9),
        "a module inside that": megabatch.cached(ddp.module.left[0], chunk=3),
        "a method": megabatch.cached(ddp.module.encode_left, chunk=3),
        "a method before it was wrapped": before,
        "a DDP model that was wrapped later": late,
        "a function": megabatch.cached(lambda x: nn.functional.normalize(model.left(x)), chunk=3),
        "a partial": megabatch.cached(functools.partial(nn.Module.__call__, ddp.module.left), chunk=3),
        "an object": megabatch.cached(Hidden(model.left), chunk=3),
        "inside another DDP model": DDP(other),
        "sharded in part": megabatch.cached(part.left, chunk=3),
        "inputs that require gradients": lambda x: megabatch.cached(model.left, chunk=3)(x.clone().requires_grad_() * 2),
    }
    return {name: error_of(functools.partial(encode, x)) for name, encode in encoders.items()}


def test_an_encoder_whose_gradients_nobody_exchanges_is_refused_with_the_choices(world):
    for messages in world.run(2, refused):
        for name, message in messages.items():
            assert "would not be exchanged" in message, (name, message)
            assert "cached(ddp, chunk=…)" in message and "create the cached encoder afterwards" in message, name
            assert 'sync="none"' in message, name


def test_without_other_ranks_nothing_is_refused():
    megabatch.cached(Model().encode_left, chunk=3)(data()[0]).sum().backward()


def exchanged_by_hand(rank: int, size: int) -> list[Tensor]:
    """With sync="none", somebody else averages the gradients."""
    model = Towers()
    left, right = (megabatch.cached(side, chunk=3, sync="none") for side in (model.left, model.right))
    x, y = shard(rank, size)
    megabatch.clip_loss(left(x), right(y), model.log_scale.exp().sum(), group=dist.group.WORLD).backward()
    for p in (*model.left.parameters(), *model.right.parameters()):
        dist.all_reduce(p.grad)
        p.grad /= size
    return [p.grad for p in model.parameters()]


class Checkpointed(nn.Module):
    """Checkpoints around cached encoders, so that they are called again in backward, after DDP's forward has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Towers()
        self.left = megabatch.cached(self.model.left, chunk=3)
        self.right = megabatch.cached(self.model.right, chunk=3)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        left, right = (checkpoint(side, rows, use_reentrant=False) for side, rows in ((self.left, x), (self.right, y)))
        return left, right, self.model.log_scale.exp().sum()


def _gradients(model: nn.Module, call: Callable[..., Any], rank: int, size: int) -> list[Tensor]:
    left, right, scale = call(*shard(rank, size))
    megabatch.clip_loss(left, right, scale, group=dist.group.WORLD).backward()
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]


def checkpointed(rank: int, size: int) -> list[Tensor]:
    model = Checkpointed()
    return _gradients(model, DDP(model), rank, size)


def cached_inside_cached(rank: int, size: int) -> list[Tensor]:
    model = Checkpointed()
    return _gradients(model, megabatch.cached(DDP(model), chunk=100), rank, size)


def composable(rank: int, size: int) -> list[Tensor]:
    from torch.distributed._composable.replicate import replicate

    model = Checkpointed()
    return _gradients(model, replicate(model), rank, size)


@pytest.mark.parametrize("arrangement", [exchanged_by_hand, checkpointed, cached_inside_cached, composable])
def test_every_supported_exchange_gives_the_gradients_of_one_process(world, arrangement):
    want = expected()
    for found in world.run(2, arrangement):
        for a, b in zip(found, want, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def nothing_to_exchange(rank: int, size: int) -> list[str]:
    x, _ = shard(rank, size)
    frozen, half = Model().requires_grad_(False), Model()
    half.left.requires_grad_(False)
    learns = DDP(Model().right)
    encode = megabatch.cached(Model().left, chunk=3)

    def without_gradients() -> None:
        with torch.no_grad():
            encode(x)

    def with_gradients_of_the_input() -> None:
        given = x.clone().requires_grad_()
        megabatch.cached(frozen.left, chunk=3)(learns.module[0](torch.zeros(1, 5).double()).sum() * given).sum().backward()
        assert given.grad is not None

    return [
        error_of(call)
        for call in (
            lambda: megabatch.cached(frozen, chunk=3)(*shard(rank, size)),
            # The method's module has trainable parameters, but this side of it has none.
            lambda: megabatch.cached(half.encode_left, chunk=3)(x),
            lambda: megabatch.cached(nn.functional.normalize, chunk=3)(x),
            without_gradients,
            with_gradients_of_the_input,
        )
    ]


def test_where_there_is_nothing_to_exchange_nothing_is_refused(world):
    for messages in world.run(2, nothing_to_exchange):
        assert set(messages) == {"no error"}


def replicated(rank: int, size: int) -> str:
    from torch.distributed._composable.replicate import replicate

    model = replicate(Model().left)
    return error_of(lambda: megabatch.cached(model, chunk=3))


def test_composable_replication_of_the_encoder_itself_is_refused(world):
    assert all("called inside the encoder" in message for message in world.run(2, replicated))


def around_ddp(rank: int, size: int) -> list[str]:
    """Try losses that bypass the DDP model, and one that does not."""
    x, _ = shard(rank, size)
    model = Model().left
    ddp = DDP(model)
    losses = [lambda x: model(x).mean(), lambda x: ddp.module(x).mean(), lambda x: ddp(x).mean(), lambda x: ddp.forward(x).mean()]
    return [error_of(lambda loss=loss: megabatch.accumulate(loss, ddp, chunk=3)(x)) for loss in losses]


def test_an_accumulated_loss_must_call_the_ddp_model(world):
    for raw, inner, *right in world.run(2, around_ddp):
        assert "does not call the DDP model" in raw and "does not call the DDP model" in inner
        assert right == ["no error", "no error"]


def unrepeatable_on_one_rank(rank: int, size: int) -> str:
    model = tower(dropout=0.0)
    encode = megabatch.cached(DDP(model), chunk=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        encode(x).sum().backward()
        if rank:
            x.mul_(2)
            raise torch.OutOfMemoryError("CUDA out of memory")

    try:
        megabatch.retry_on_oom(step, optimizer, group=dist.group.WORLD)(torch.ones(4, 6))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_step_that_one_rank_cannot_repeat_ends_on_all(world):
    first, second = world.run(2, unrepeatable_on_one_rank)
    assert "what it starts from on rank 1" in first and "its input args[0]" in second


def test_sync_has_two_values():
    with pytest.raises(ValueError, match='sync=True: must be "wrapper"'):
        megabatch.cached(tower(), chunk=2, sync=True)


def sync_with_ddp(rank: int, size: int) -> str:
    return error_of(lambda: megabatch.cached(DDP(tower()), chunk=2, sync="none"))


def test_sync_none_is_refused_for_a_ddp_model(world):
    assert all("no_sync" in message for message in world.run(2, sync_with_ddp))
