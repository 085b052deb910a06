"""Several ranks compute one batch: gradients as in one process for any shards, clear errors on every rank, no hangs."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cases import embeddings
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from world import MEETING_TIME, error_of, fresh_processes

import megabatch
from megabatch import reference
from megabatch.ring import BLOCK, Ring

# Timeout of the group whose rank dies.
PEER_TIMEOUT = timedelta(seconds=20)

SHARDS = {1: [11], 2: [7, 4], 3: [5, 0, 6], 4: [3, 1, 0, 7]}
EXTRA = [2, 0, 5, 1]
VARIANTS = {
    "clip": {},
    "clip, ids, weights": {"ids": True, "weights": True},
    "clip, several positives, smoothing": {"ids": True, "duplicates": "positive", "label_smoothing": 0.1},
    "clip, dropping": {"drop_above": 0.05},
    "one direction, hard negatives, ids": {"symmetric": False, "extra": True, "ids": True},
    "siglip": {"bias": True},
    "siglip, ids, weights": {"bias": True, "ids": True, "weights": True},
    "siglip, hard negatives, several positives": {"bias": True, "extra": True, "ids": True, "duplicates": "positive"},
}


class Towers(nn.Module):
    """Two small encoders with a learnable temperature and bias, as in CLIP and SigLIP (one-dimensional, as FSDP needs them)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.image = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 5))
        self.text = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 5))
        self.logit_scale = nn.Parameter(torch.tensor([1.5]))
        self.logit_bias = nn.Parameter(torch.tensor([-1.0]))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:
        x, y = (nn.functional.normalize(t, dim=-1) for t in (self.image(images), self.text(texts)))
        # The zeros keep parameters that this loss does not use in the graph, because DDP waits for all gradients.
        return x, y, self.logit_scale.exp() + 0 * self.logit_bias, self.logit_bias + 0 * self.logit_scale


def shard(rank: int, size: int, extra: bool) -> dict[str, Tensor]:
    """Return one rank's shard of a fixed batch."""
    g = torch.Generator().manual_seed(100 + rank)
    rows, documents = SHARDS[size][rank], SHARDS[size][rank] + (EXTRA[rank] if extra else 0)
    return {
        "images": torch.randn(rows, 6, generator=g, dtype=torch.float64),
        "texts": torch.randn(documents, 4, generator=g, dtype=torch.float64),
        "ids": torch.randint(0, 6, (documents,), generator=g),
        "weights": torch.rand(rows, generator=g, dtype=torch.float64),
    }


def whole(size: int, extra: bool) -> dict[str, Tensor]:
    """Return all ranks' shards as one batch: positives first, then the extra rows of y."""
    parts = [shard(rank, size, extra) for rank in range(size)]
    rows = [len(p["images"]) for p in parts]
    merged = {name: torch.cat([p[name] for p in parts]) for name in ("images", "weights")}
    for name in ("texts", "ids"):
        heads = [p[name][:n] for p, n in zip(parts, rows, strict=True)]
        merged[name] = torch.cat(heads + [p[name][n:] for p, n in zip(parts, rows, strict=True)])
    return merged


def step(model: nn.Module, module: object, data: dict[str, Tensor], variant: str, **more) -> Tensor:
    options = dict(VARIANTS[variant])
    options.pop("extra", None)
    for name in ("ids", "weights"):
        if options.pop(name, False):
            options[name] = data[name]
    x, y, scale, bias = model(data["images"], data["texts"])
    if options.pop("bias", False):
        loss = module.siglip_loss(x, y, scale, bias, **options, **more)
    else:
        loss = module.clip_loss(x, y, scale, **options, **more)
    loss.backward()
    return loss.detach()


def train_sharded(rank: int, size: int) -> dict[str, tuple[float, dict[str, Tensor]]]:
    found = {}
    for variant, options in VARIANTS.items():
        model = DistributedDataParallel(Towers().double())
        data = shard(rank, size, "extra" in options)
        loss = step(model, megabatch, data, variant, group=dist.group.WORLD, workspace=700)
        found[variant] = loss.item(), {name: p.grad for name, p in model.module.named_parameters()}
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_under_ddp_are_those_of_one_process_on_the_whole_batch(world, size):
    results = world.run(size, train_sharded)
    for variant, options in VARIANTS.items():
        model = Towers().double()
        loss = step(model, reference, whole(size, "extra" in options), variant)
        for rank, found in enumerate(results):
            value, gradients = found[variant]
            assert value == pytest.approx(loss.item(), rel=1e-10), (variant, rank)
            for name, p in model.named_parameters():
                assert torch.allclose(gradients[name], p.grad, rtol=1e-9, atol=1e-12), (variant, rank, name)


def train_fully_sharded(rank: int, size: int) -> dict[str, Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = Towers().double()
    mesh = init_device_mesh("cpu", (size,))
    fully_shard(model, mesh=mesh)
    step(model, megabatch, shard(rank, size, False), "siglip, ids, weights", group=mesh)
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_gradients_under_fsdp_are_those_of_one_process_on_the_whole_batch(world):
    model = Towers().double()
    step(model, reference, whole(2, False), "siglip, ids, weights")
    for gradients in world.run(2, train_fully_sharded):
        for name, p in model.named_parameters():
            assert torch.allclose(gradients[name], p.grad, rtol=1e-9, atol=1e-12), name


def run_everything_else(rank: int, size: int) -> dict[str, object]:
    """Return the results of several checks on four ranks, in one call."""
    found: dict[str, object] = {}
    x, y = embeddings(5, width=4, seed=rank)
    ids = torch.arange(5) + 3 * rank
    everyone = dist.group.WORLD

    found["diagnostics"] = megabatch.clip_loss(x, y, 4.0, ids=ids, group=everyone, diagnostics=True)[1]
    found["sigmoid diagnostics"] = megabatch.siglip_loss(x, y, 4.0, -1.0, ids=ids, group=everyone, diagnostics=True)[1]
    pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    found["sub-group"] = megabatch.clip_loss(x, y, 4.0, group=pair).item()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "data"))
    found["mesh"] = megabatch.clip_loss(x, y, 4.0, group=mesh["data"]).item()
    found["whole mesh"] = error_of(lambda: megabatch.clip_loss(x, y, 4.0, group=mesh))
    found["alone"] = megabatch.clip_loss(x, y, 4.0, group=None).item()
    found["no group"] = error_of(lambda: megabatch.clip_loss(x, y, 4.0))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found[str(dtype)] = megabatch.clip_loss(x.to(dtype), y.to(dtype), 4.0, group=everyone).item()

    wide = torch.zeros(5, 6 if rank == 2 else 4)
    found["width"] = error_of(lambda: megabatch.clip_loss(wide, wide, 4.0, group=everyone))
    wrong = ids[:3] if rank == 1 else ids
    found["ids"] = error_of(lambda: megabatch.clip_loss(x, y, 4.0, ids=wrong, group=everyone))
    integers = x.long() if rank == 3 else x
    found["integers"] = error_of(lambda: megabatch.siglip_loss(integers, y, 4.0, 0.0, group=everyone))
    found["options"] = error_of(lambda: megabatch.clip_loss(x, y, 4.0, label_smoothing=0.1 * rank, group=everyone))
    found["smoothing"] = error_of(lambda: megabatch.clip_loss(x, y, 4.0, label_smoothing=float(rank), group=everyone))
    found["empty"] = error_of(lambda: megabatch.clip_loss(x[:0], y[:0], 4.0, group=everyone))
    found["nan scale"] = error_of(lambda: megabatch.clip_loss(x, y, float("nan") if rank == 0 else 1.0, group=everyone))
    return found


@pytest.fixture(scope="module")
def found(world) -> list[dict]:
    return world.run(4, run_everything_else)


def test_diagnostics_rank_against_all_ranks(found):
    x, y = (torch.cat(parts) for parts in zip(*(embeddings(5, width=4, seed=rank) for rank in range(4)), strict=True))
    ids = torch.cat([torch.arange(5) + 3 * rank for rank in range(4)])
    (rank, hardest), (column_rank, column_hardest) = reference.ranks(x, y, ids), reference.ranks(y, x, ids)
    for name in ("diagnostics", "sigmoid diagnostics"):
        merged = [torch.cat(parts) for parts in zip(*(f[name] for f in found), strict=True)]
        assert torch.equal(merged[1], rank) and torch.equal(merged[3], column_rank)
        assert torch.allclose(merged[2], hardest) and torch.allclose(merged[4], column_hardest)


def test_a_group_or_a_mesh_selects_the_ranks(found):
    parts = [embeddings(5, width=4, seed=rank) for rank in range(4)]
    for rank in range(4):
        pair = [parts[rank // 2 * 2], parts[rank // 2 * 2 + 1]]
        both = reference.clip_loss(*(torch.cat(t) for t in zip(*pair, strict=True)), 4.0).item()
        assert found[rank]["sub-group"] == found[rank]["mesh"] == pytest.approx(both)
        assert found[rank]["alone"] == pytest.approx(reference.clip_loss(*parts[rank], 4.0).item())
        assert "2 dimensions" in found[rank]["whole mesh"] and "mesh['data']" in found[rank]["whole mesh"]


def test_several_processes_need_a_group(found):
    assert all("group=None" in f["no group"] and "group.WORLD" in f["no group"] for f in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_of_every_dtype_travel(found, dtype):
    x, y = (torch.cat(parts) for parts in zip(*(embeddings(5, width=4, seed=rank) for rank in range(4)), strict=True))
    expected = reference.clip_loss(x.to(dtype).double(), y.to(dtype).double(), 4.0).item()
    assert all(f[str(dtype)] == pytest.approx(expected, rel=1e-5) for f in found)


@pytest.mark.parametrize(
    "problem, words",
    [
        ("width", "width of the embeddings is 4 on ranks 0, 1, 3 and 6 on rank 2"),
        ("ids", "rank 1: ids has shape (3,)"),
        ("integers", "rank 3: x is torch.int64"),
        ("options", "label_smoothing is 0.0 on rank 0 and 0.1 on rank 1"),
        ("smoothing", "rank 2: label_smoothing=2.0: must be a finite number in [0, 1]; rank 3: label_smoothing=3.0"),
        ("empty", "0 rows over all ranks"),
        ("nan scale", "rank 0: scale=nan"),
    ],
)
def test_wrong_input_on_any_rank_is_the_same_error_on_every_rank(found, problem, words):
    (message,) = {f[problem] for f in found}
    assert words in message


def frozen_on_one_rank(rank: int, size: int) -> Tensor | None:
    x, y = embeddings(4, width=3, seed=rank)
    x.requires_grad_(rank == 0)
    loss = megabatch.clip_loss(x, y, 2.0, group=dist.group.WORLD)
    loss.backward()
    return x.grad


def test_a_rank_that_needs_no_gradient_still_takes_part_in_backward(world):
    gradient, none = world.run(2, frozen_on_one_rank)
    x, y = (torch.cat(parts) for parts in zip(embeddings(4, width=3, seed=0), embeddings(4, width=3, seed=1), strict=True))
    x.requires_grad_()
    reference.clip_loss(x, y, 2.0).backward()
    assert none is None and torch.allclose(gradient, 2 * x.grad[:4], rtol=1e-10)


def different_gradients(rank: int, size: int) -> Tensor:
    x, y = embeddings(4, width=3, seed=rank)
    x.requires_grad_()
    (megabatch.clip_loss(x, y, 2.0, group=dist.group.WORLD) * (rank + 1)).backward()
    return x.grad


def test_the_gradient_is_that_of_the_sum_over_ranks(world):
    found = torch.cat(world.run(2, different_gradients))
    x, y = (torch.cat(parts) for parts in zip(embeddings(4, width=3, seed=0), embeddings(4, width=3, seed=1), strict=True))
    x.requires_grad_()
    (reference.clip_loss(x, y, 2.0) * (1 + 2)).backward()
    assert torch.allclose(found, x.grad, rtol=1e-10)


def blocks_that_arrive_during_visits(rank: int, size: int) -> list[int]:
    """Return the owners of the blocks that had arrived before the visit of the block before them ended."""
    start, arriving, arrived = dist.batch_isend_irecv, [], []

    def exchange(operations):
        for each in operations:
            if each.op is dist.irecv and each.tag == BLOCK:
                arriving.append(each.tensor.fill_(-1))
        return start(operations)

    def visit(block: tuple[Tensor], owner: int) -> tuple[None, None]:
        # A visit that does not end before the next block is there: it would wait in vain if sending began after it.
        deadline = time.monotonic() + 20
        while arriving and time.monotonic() < deadline:
            if (arriving[-1] == (owner - 1) % size).all():
                arrived.append((owner - 1) % size)
                arriving.clear()
            time.sleep(0.001)
        return None, None

    dist.batch_isend_irecv = exchange
    try:
        Ring.of(dist.group.WORLD).tour((torch.full((1000, 100), float(rank)),), [1000] * size, visit, lambda a, b: None)
    finally:
        dist.batch_isend_irecv = start
    return arrived


@pytest.mark.parametrize("size", [2, 4])
def test_the_next_block_arrives_while_one_is_visited(world, size):
    found = world.run(size, blocks_that_arrive_during_visits)
    assert found == [[(rank - hop) % size for hop in range(1, size)] for rank in range(size)]


def count_exchanges(rank: int, size: int) -> list[int]:
    calls, gather = [], Ring.gather
    Ring.gather = lambda self, *args: calls.append(1) or gather(self, *args)
    counts = []
    try:
        x, y = embeddings(4, width=3, seed=rank)
        values = []
        for equal_shards in (False, True):
            values.append(megabatch.clip_loss(x, y, 2.0, group=dist.group.WORLD, equal_shards=equal_shards))
            counts.append(len(calls))
    finally:
        Ring.gather = gather
    assert torch.equal(*values)
    return counts


def test_equal_shards_saves_the_exchange(world):
    assert world.run(2, count_exchanges) == [[1, 1], [1, 1]]


def exchange_objects(rank: int, size: int) -> list:
    ring, device = Ring.world(), torch.device("cpu")

    def fail_on_rank_1() -> int:
        if rank == 1:
            raise OSError(28, "no space left")
        return rank

    try:
        ring.raise_together(fail_on_rank_1, device)
        error = "no error"
    except OSError as caught:
        error = str(caught)
    return [
        ring.gather_objects({"rank": rank, "text": "é" * 1000 * rank}, device),
        error,
        ring.raise_together(lambda: rank, device),
    ]


def test_objects_of_any_size_are_gathered_and_one_ranks_exception_is_raised_on_all(world):
    objects = [{"rank": rank, "text": "é" * 1000 * rank} for rank in range(3)]
    assert world.run(3, exchange_objects) == [[objects, "[Errno 28] no space left", rank] for rank in range(3)]
    assert Ring(None).gather_objects("alone", torch.device("cpu")) == ["alone"]
    with pytest.raises(ZeroDivisionError):
        Ring(None).raise_together(lambda: 1 // 0, torch.device("cpu"))


def desert(rank: int, store: str, pipe) -> None:
    """Rank 1 dies in its first visit; rank 0 reports its own error."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=MEETING_TIME)
    # Only the group of the loss has a short timeout: processes may take long to start on a machine under load.
    group = dist.new_group(timeout=PEER_TIMEOUT)
    x, y = embeddings(4)
    start = time.monotonic()
    try:
        if rank == 1:
            Ring.tour = lambda *args: os._exit(1)
        megabatch.clip_loss(x, y, 2.0, group=group)
        pipe.send(("no error", 0.0))
    except RuntimeError as error:
        pipe.send((str(error), time.monotonic() - start))
    os._exit(0)


def test_a_rank_whose_peer_dies_fails_within_the_timeout(tmp_path):
    context = fresh_processes()
    pipe, child_pipe = context.Pipe()
    processes = [context.Process(target=desert, args=(rank, str(tmp_path / "store"), child_pipe)) for rank in range(2)]
    for process in processes:
        process.start()
    assert pipe.poll(MEETING_TIME.total_seconds()), "the surviving rank hangs"
    message, seconds = pipe.recv()
    for process in processes:
        process.join(10)
        process.kill()
    assert message != "no error" and seconds < 4 * PEER_TIMEOUT.total_seconds()
