"""Several ranks on one CUDA device, whose messages gloo sends through host memory, get the gradients of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import megabatch
from megabatch.losses.directions import DIRECTIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:scale="),
]
WIDTH = 96
# Rows of each rank, by the number of ranks.
SHARDS = {1: [700], 2: [450, 250], 4: [150, 0, 300, 250]}
ROWS = sum(SHARDS[1])
LOSSES = {
    "clip": lambda x, y, ids, scale, group: megabatch.clip_loss(x, y, scale, group=group),
    "clip, ids": lambda x, y, ids, scale, group: megabatch.clip_loss(x, y, scale, ids=ids, label_smoothing=0.1, group=group),
    "siglip": lambda x, y, ids, scale, group: megabatch.siglip_loss(x, y, scale, -10.0, group=group),
    "infonce": lambda x, y, ids, scale, group: megabatch.infonce_loss(x, y, scale, directions=DIRECTIONS, group=group),
}


def pieces(t: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    return t.split(SHARDS[size])


def batch(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (F.normalize(torch.randn(ROWS, WIDTH, generator=generator), dim=-1).to(dtype) for _ in range(2))
    return [x, y, torch.randint(0, ROWS // 2, (ROWS,), generator=generator)]


def results(dtype: torch.dtype, group, rank: int = 0, size: int = 1) -> dict[str, list[torch.Tensor]]:
    """Return the value and the gradients of this rank's rows for every loss; those of x and y as DDP averages them."""
    found = {}
    for name, loss in LOSSES.items():
        x, y, ids = (pieces(t, size)[rank].cuda() for t in batch(dtype))
        leaves = [x.requires_grad_(), y.requires_grad_(), torch.tensor(12.0, device="cuda", requires_grad=True)]
        value = loss(leaves[0], leaves[1], ids, leaves[2], group)
        gradients = torch.autograd.grad(value, leaves)
        factors = (1 / size, 1 / size, 1.0)
        found[name] = [value.detach().cpu(), *(f * g.float().cpu() for f, g in zip(factors, gradients, strict=True))]
    return found


def on_rank(rank: int, size: int, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    return results(dtype, dist.group.WORLD, rank, size)


@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_on_one_device_get_the_gradients_of_one_process(world, size, dtype, allowed):
    alone = results(dtype, None)
    for rank, found in enumerate(world.run(size, on_rank, dtype)):
        for name, (value, dx, dy, dscale) in found.items():
            expected = alone[name][0], *(pieces(t, size)[rank] for t in alone[name][1:3]), alone[name][3]
            for a, b in zip((value, dx, dy, dscale), expected, strict=True):
                # A rank without rows has nothing to compare.
                assert (a - b).norm() <= allowed * b.norm(), (name, rank)
