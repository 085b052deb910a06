"""InfoNCE over directions on several ranks: losses and gradients are those of one process, for any shards; ranks must agree."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from world import error_of

import megabatch
from megabatch import reference
from megabatch.losses import symmetric
from megabatch.losses.directions import DIRECTIONS as ALL

SHARDS = {1: [11], 2: [7, 4], 3: [5, 0, 6], 4: [3, 1, 0, 7]}
EXTRA, QUEUED = [2, 0, 5, 1], [3, 0, 4, 2]
# "hard" stands for hard negatives, other names in TENSORS for the tensors of a shard.
VARIANTS = {
    "joint": {"directions": ALL},
    "joint, every option": {
        "directions": ALL,
        "hard": True,
        "ids": True,
        "weights": True,
        "label_smoothing": 0.1,
        "drop_ratio": 0.9,
    },
    "hardness of all, queue": {"directions": ALL, "hard": True, "hardness": 5.0, "queue": True},
    "hardness of own negatives": {"directions": ALL, "hard": True, "hardness": 5.0, "hardness_on": "hard"},
    "guide": {"directions": ALL, "hard": True, "guide": True},
    "own negatives": {"in_batch": False, "hard": True},
    "queue alone": {"in_batch": False, "queue": True},
    "separate, several positives": {
        "directions": ALL[:2],
        "partition": "separate",
        "ids": True,
        "duplicates": "positive",
        "hard": True,
    },
    "one direction back": {"directions": ("y_to_x",), "drop_above": 0.05},
    "one side": {"directions": ("x_to_x",)},
    "nt_xent_loss": {"ids": True, "weights": True},
    "dcl_loss": {"directions": ALL, "partition": "joint"},
    "supcon_loss": {"weights": True},
}
TENSORS = ("ids", "weights", "queue", "guide")


class Towers(nn.Module):
    """Two small encoders with a learnable temperature."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.x, self.y = nn.Linear(6, 5), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
        self.logit_scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y = (nn.functional.normalize(t, dim=-1) for t in (self.x(a), self.y(b)))
        # The zeros keep parameters that this loss does not use in the graph, because DDP waits for all gradients.
        return x + 0 * y.sum(), y + 0 * x.sum(), self.logit_scale.exp()


def shard(rank: int, size: int, hard: bool) -> dict[str, Tensor]:
    """Return one rank's shard of a fixed batch."""
    g = torch.Generator().manual_seed(100 + rank)
    rows = SHARDS[size][rank]
    extra = EXTRA[rank] if hard and rows else 0

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return {
        "a": normal(rows, 6),
        "b": normal(rows + extra, 4),
        "ids": torch.randint(0, 6, (rows + extra,), generator=g),
        "weights": torch.rand(rows, generator=g, dtype=torch.float64),
        "negatives_of": torch.randint(0, max(1, rows), (extra,), generator=g),
        "guide_x": nn.functional.normalize(normal(rows, 3), dim=-1),
        "guide_y": nn.functional.normalize(normal(rows + extra, 3), dim=-1),
        "queue": nn.functional.normalize(normal(QUEUED[rank], 5), dim=-1),
    }


def whole(size: int, hard: bool) -> dict[str, Tensor]:
    """Return all ranks' shards as one batch: positives first, then hard negatives."""
    parts = [shard(rank, size, hard) for rank in range(size)]
    rows = [len(p["a"]) for p in parts]
    merged = {name: torch.cat([p[name] for p in parts]) for name in ("a", "weights", "guide_x", "queue")}
    for name in ("b", "ids", "guide_y"):
        heads = [p[name][:n] for p, n in zip(parts, rows, strict=True)]
        merged[name] = torch.cat(heads + [p[name][n:] for p, n in zip(parts, rows, strict=True)])
    merged["negatives_of"] = torch.cat([p["negatives_of"] + sum(rows[:rank]) for rank, p in enumerate(parts)])
    return merged


def step(model: nn.Module, module: object, data: dict[str, Tensor], variant: str, **more) -> Tensor:
    options = dict(VARIANTS[variant])
    if options.pop("hard", False):
        options["negatives_of"] = data["negatives_of"]
    for name in TENSORS:
        if options.pop(name, False):
            options[name] = megabatch.Guide(data["guide_x"], data["guide_y"], 0.05) if name == "guide" else data[name]
    x, y, scale = model(data["a"], data["b"])
    if variant == "supcon_loss":
        loss = module.supcon_loss(x, data["ids"][: len(x)], scale, **options, **more)
    else:
        loss = getattr(module, variant if variant.endswith("_loss") else "infonce_loss")(x, y, scale, **options, **more)
    loss.backward()
    return loss.detach()


def train_sharded(rank: int, size: int) -> dict[str, tuple[float, dict[str, Tensor]]]:
    symmetric.PIECE_ROWS["cpu"] = 2
    found = {}
    for variant, options in VARIANTS.items():
        model = DistributedDataParallel(Towers().double())
        loss = step(model, megabatch, shard(rank, size, "hard" in options), variant, group=dist.group.WORLD, workspace=700)
        found[variant] = loss.item(), {name: p.grad for name, p in model.module.named_parameters()}
    return found


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_under_ddp_are_those_of_one_process_on_the_whole_batch(world, size):
    results = world.run(size, train_sharded)
    for variant, options in VARIANTS.items():
        model = Towers().double()
        loss = step(model, reference, whole(size, "hard" in options), variant)
        for rank, found in enumerate(results):
            value, gradients = found[variant]
            assert value == pytest.approx(loss.item(), rel=1e-10), (variant, rank)
            for name, p in model.named_parameters():
                assert torch.allclose(gradients[name], p.grad, rtol=1e-9, atol=1e-12), (variant, rank, name)


def differ(rank: int, size: int) -> dict[str, str]:
    g = torch.Generator().manual_seed(rank)
    x, y = (torch.randn(4, 3, generator=g) for _ in range(2))
    other = rank == 1

    def message(**options) -> str:
        return error_of(lambda: megabatch.infonce_loss(x, y, 2.0, group=dist.group.WORLD, **options))

    found = {
        "directions": message(directions=ALL if other else ALL[:2]),
        "hardness": message(hardness=1.0 if other else 2.0),
        "margins": message(drop_above={"x_to_y": 0.1} if other else 0.1),
        "queue": message(queue=x if other else None),
        "guide": message(guide=megabatch.Guide(x, y) if other else None),
        "negatives_of": message(negatives_of=torch.empty(0, dtype=torch.int64) if other else None),
        "wrong on one rank": message(negatives_of=torch.arange(1 if other else 0)),
    }
    # Lengths of the queue may differ, and ranks can still communicate.
    found["fine"] = str(megabatch.infonce_loss(x, y, 2.0, group=dist.group.WORLD, queue=x[: 1 + rank]).item())
    return found


def test_every_rank_raises_the_same_error_if_options_differ(world):
    first, second = world.run(2, differ)
    assert first == second
    errors = {name: text for name, text in first.items() if name != "fine"}
    assert all("rank 1" in text for text in errors.values()), errors
    assert float(first["fine"]) > 0
