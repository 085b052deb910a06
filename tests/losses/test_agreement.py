"""Ranks with different arguments all raise the same ValueError, before an exchange that could hang or abort."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import embeddings
from world import error_of

import megabatch
from megabatch.ring import Ring

IDS = torch.arange(5)


def clip(x, y, scale=4.0, **options):
    return megabatch.clip_loss(x, y, scale, group=dist.group.WORLD, **options)


def siglip(x, y, scale=4.0, bias=-1.0, **options):
    return megabatch.siglip_loss(x, y, scale, bias, group=dist.group.WORLD, **options)


# For each difference: the call on ranks 0 and 2, the call on rank 1, and a part of the error on every rank.
DIFFERENCES = {
    "loss": (clip, siglip, "loss is clip_loss on ranks 0, 2 and siglip_loss on rank 1"),
    "dtype of ids": (
        lambda x, y: clip(x, y, ids=IDS),
        lambda x, y: clip(x, y, ids=IDS.int()),
        "dtype of ids is torch.int64 on ranks 0, 2 and torch.int32 on rank 1",
    ),
    "ids": (
        lambda x, y: siglip(x, y),
        lambda x, y: siglip(x, y, ids=IDS),
        "dtype of ids is None on ranks 0, 2 and torch.int64 on rank 1",
    ),
    "weights": (clip, lambda x, y: clip(x, y, weights=torch.ones(5)), "weights is None on ranks 0, 2 and given on rank 1"),
    "width": (clip, lambda x, y: clip(x[:, :3], y[:, :3]), "width of the embeddings is 4 on ranks 0, 2 and 3 on rank 1"),
    "dtype": (
        clip,
        lambda x, y: clip(x.float(), y.float()),
        "dtype of the embeddings is torch.float64 on ranks 0, 2 and torch.float32 on rank 1",
    ),
    "option": (clip, lambda x, y: clip(x, y, drop_above=0.1), "drop_above is None on ranks 0, 2 and 0.1 on rank 1"),
    "two options": (
        lambda x, y: clip(x, y, label_smoothing=0.1),
        lambda x, y: clip(x, y, symmetric=False),
        "symmetric is True on ranks 0, 2 and False on rank 1, label_smoothing is 0.1 on ranks 0, 2 and 0.0 on rank 1",
    ),
    "diagnostics": (clip, lambda x, y: clip(x, y, diagnostics=True), "diagnostics is False on ranks 0, 2 and True on rank 1"),
    "precision": (clip, lambda x, y: clip(x, y, precision="tf32"), "precision is ieee on ranks 0, 2 and tf32 on rank 1"),
    "int8_backward": (
        lambda x, y: clip(x.bfloat16(), y.bfloat16()),
        lambda x, y: clip(x.bfloat16(), y.bfloat16(), int8_backward=True),
        "int8_backward is False on ranks 0, 2 and True on rank 1",
    ),
    "gradients": (clip, torch.no_grad()(clip), "torch.is_grad_enabled() is True on ranks 0, 2 and False on rank 1"),
    "scale": (clip, lambda x, y: clip(x, y, 5.0), "scale is 4.0 on ranks 0, 2 and 5.0 on rank 1: it must have one value"),
    "scale tensor": (
        lambda x, y: clip(x, y, torch.tensor(4.0, requires_grad=True)),
        lambda x, y: clip(x, y, torch.tensor(4.5, requires_grad=True)),
        "scale is 4.0 on ranks 0, 2 and 4.5 on rank 1: it must have one value",
    ),
    "NaN scale": (
        lambda x, y: clip(x, y, torch.tensor(4.0)),
        lambda x, y: clip(x, y, torch.tensor(torch.nan)),
        "and nan on rank 1",
    ),
    "bias": (siglip, lambda x, y: siglip(x, y, bias=torch.tensor(-3.0)), "bias is -1.0 on ranks 0, 2 and -3.0 on rank 1"),
    "wrong input": (clip, lambda x, y: clip(x, y, ids=IDS[:3]), "rank 1: ids has shape (3,): must be (5,), one for each row of y"),
    "no tensor": (clip, lambda x, y: clip([1.0], y), "rank 1: x is a list"),
    "nested": (clip, lambda x, y: clip(x, y.to_sparse()), "rank 1: y has the layout torch.sparse_coo"),
    "two wrong inputs": (
        lambda x, y: clip(x, y, "big"),
        lambda x, y: clip(x, y[:, :2]),
        "ranks 0, 2: scale='big': must be a finite number; rank 1: x has width 4 and y 2",
    ),
    "inference mode": (
        lambda x, y: clip(x.requires_grad_(), y),
        lambda x, y: clip(x, in_inference_mode(y)),
        "y on rank 1 was made in inference mode",
    ),
}


def in_inference_mode(t):
    with torch.inference_mode():
        return t.clone()


def differ(rank: int, size: int) -> dict[str, str]:
    found = {}
    for name, (most, one, _) in DIFFERENCES.items():
        x, y = embeddings(5, width=4, seed=rank)
        found[name] = error_of(lambda call=one if rank == 1 else most, x=x, y=y: call(x, y))
    # After all these errors, the ranks can still communicate.
    x, y = embeddings(5, width=4, seed=rank)
    found["fine"] = clip(x, y).item()
    return found


@pytest.fixture(scope="module")
def found(world) -> list[dict]:
    return world.run(3, differ)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_every_rank_raises_one_error_that_names_values_and_ranks(found, name):
    messages = {f[name] for f in found}
    assert len(messages) == 1 and DIFFERENCES[name][2] in messages.pop()


def test_errors_leave_the_group_usable(found):
    x, y = (torch.cat(parts) for parts in zip(*(embeddings(5, width=4, seed=rank) for rank in range(3)), strict=True))
    expected = megabatch.clip_loss(x, y, 4.0).item()
    assert all(f["fine"] == pytest.approx(expected, rel=1e-12) for f in found)


def agree_all_the_same(rank: int, size: int) -> list[float]:
    """Make calls that differ between ranks in allowed ways."""
    x, y = embeddings(5, width=4, seed=rank)
    rounded = torch.tensor(4.0).double() * (1 + 1e-7 * rank)
    return [
        clip(x.requires_grad_(rank == 0), y).item(),
        clip(x, y, 4.0 if rank else torch.tensor(4.0, requires_grad=True)).item(),
        clip(x, y, rounded).item(),
        clip(x, y, workspace=700 if rank else None).item(),
        *(clip(x, y, ids=(IDS + 5 * rank).to(dtype)).item() for dtype in (torch.int8, torch.int32, torch.uint16, torch.uint64)),
        float(clip(x, y, torch.tensor(torch.nan)).isnan()),
    ]


def test_differences_that_do_not_matter_are_accepted(world):
    for values in world.run(2, agree_all_the_same):
        *losses, is_nan = values
        assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-6) and is_nan


UNEQUAL = {
    "rows": (lambda x, y: clip(x[:3], y[:3], equal_shards=True), "number of rows of x is 5 on rank 0 and 3 on rank 1"),
    "loss and rows": (lambda x, y: siglip(x[:3], y, equal_shards=True), "loss is clip_loss on rank 0 and siglip_loss on rank 1"),
    "statement": (lambda x, y: clip(x, y), "equal_shards is True on rank 0 and False on rank 1"),
    "requires_grad": (
        lambda x, y: clip(x.clone().requires_grad_(), y, equal_shards=True),
        "requires_grad of x, y and scalars is [False, False, False] on rank 0 and [True, False, False] on rank 1",
    ),
    "scale": (lambda x, y: clip(x, y, 5.0, equal_shards=True), "scale is 4.0 on rank 0 and 5.0 on rank 1"),
}


def state_equal_shards(rank: int, size: int, name: str) -> tuple[str, int]:
    calls, gather = [], Ring.gather
    x, y = embeddings(5, width=4, seed=rank)
    call = UNEQUAL[name][0] if rank == 1 else lambda x, y: clip(x, y, equal_shards=True)
    message = error_of(lambda: call(x, y))
    Ring.gather = lambda self, *args: calls.append(1) or gather(self, *args)
    try:
        for _ in range(2):
            clip(x, y, equal_shards=True)
    finally:
        Ring.gather = gather
    return message, len(calls)


@pytest.mark.parametrize("name", UNEQUAL)
def test_equal_shards_is_checked_in_the_first_call_on_a_group_and_costs_nothing_later(world, name):
    results = world.run(2, state_equal_shards, name)
    assert results[0] == results[1]
    message, exchanges = results[0]
    # The first call was refused, so that the next one is checked.
    assert UNEQUAL[name][1] in message and exchanges == 1


def distributed_tensors(rank: int, size: int) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    x, _ = embeddings(4, width=4)
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    scale = distribute_tensor(torch.tensor([4.0]), mesh, [Replicate()])
    rows = sharded.to_local()
    assert torch.equal(clip(rows, rows, scale.full_tensor()), clip(rows, rows, 4.0))
    return [error_of(lambda: clip(sharded, sharded)), error_of(lambda: clip(rows, rows, scale))]


def test_distributed_tensors_are_refused_with_the_call_that_unwraps_them(world):
    for sharded, scale in world.run(2, distributed_tensors):
        assert "x is a DTensor" in sharded and "x.to_local()" in sharded
        assert "scale is a DTensor" in scale and "scale.full_tensor()" in scale
