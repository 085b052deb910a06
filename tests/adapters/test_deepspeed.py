"""A DeepSpeed engine with ZeRO-1 or -2 whose module runs cached encoders trains as one process with the whole batch.

Needs DeepSpeed, which the tests do not install; DS_BUILD_OPS=0 installs it without a GPU.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import normalize
from world import Collectives, World

import megabatch

STEPS, ROWS = 3, 16
# The ranks hold different numbers of rows.
SHARDS = (slice(0, 6), slice(6, ROWS))
# The last one is larger than a shard.
CHUNKS = (3, 100)


class Pair(nn.Module):
    """Two encoders with dropout-free layers, which run in chunks, and a scale of one dimension, as DeepSpeed needs."""

    def __init__(self, chunk: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 6)) for _ in range(2))
        self.logit_scale = nn.Parameter(torch.tensor([10.0]).log())
        # DeepSpeed exchanges the gradients of this module.
        self.encoders = [t if chunk is None else megabatch.cached(t, chunk, sync="none") for t in (self.image, self.text)]

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y = (normalize(encode(rows), dim=1) for encode, rows in zip(self.encoders, (images, texts), strict=True))
        return x, y, self.logit_scale.exp()


def batch(number: int) -> Tensor:
    return torch.randn(2, ROWS, 8, generator=torch.Generator().manual_seed(number))


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    # Not Adam, which would hide a gradient that is a multiple of the true one.
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def in_one_process(accumulation: int) -> dict[str, Tensor]:
    model = Pair(None)
    optimizer = optimizer_for(model)
    for step in range(STEPS):
        for part in range(accumulation):
            x, y, scale = model(*batch(step * accumulation + part))
            (megabatch.clip_loss(x, y, scale[0], group=None) / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


Result = tuple[dict[str, Tensor], Counter[str]]


def on_two_ranks(rank: int, size: int) -> dict[tuple[int, int, int], Result]:
    """Return the results by stage, accumulated batches and chunk. In one call: DeepSpeed keeps the process group that it finds."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29521"}
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    cases = [(stage, accumulation, chunk) for stage in (1, 2) for accumulation in (1, 2) for chunk in CHUNKS]
    return {case: in_an_engine(rank, size, *case) for case in cases}


def in_an_engine(rank: int, size: int, stage: int, accumulation: int, chunk: int) -> Result:
    """Return the weights after some steps, and the collectives of the last backward pass."""
    import deepspeed

    model = Pair(chunk)
    settings = {
        "train_micro_batch_size_per_gpu": ROWS // size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_for(model), config=settings)
    for number in range(STEPS * accumulation):
        x, y, scale = engine(*(rows[SHARDS[rank]] for rows in batch(number)))
        loss = megabatch.clip_loss(x, y, scale[0], group=dist.group.WORLD)
        with Collectives() as collectives:
            engine.backward(loss)
        engine.step()
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}, collectives.counts


@pytest.mark.slow
def test_an_engine_trains_as_one_process_with_one_exchange():
    pytest.importorskip("deepspeed")
    world = World()
    results = world.run(2, on_two_ranks)
    world.close()
    for found in results:
        for (stage, accumulation, chunk), (weights, counts) in found.items():
            case = f"ZeRO-{stage}, {accumulation} batches, chunk {chunk}"
            true = in_one_process(accumulation)
            assert max(float((weights[name] - true[name]).abs().max()) for name in true) < 1e-6, case
            assert sum(counts.values()) > 0 and counts == found[stage, accumulation, CHUNKS[-1]][1], case


def test_weights_that_zero_3_has_split_are_refused_when_the_encoder_is_called():
    """Engines are created after the encoders that their modules call."""
    tower = nn.Linear(8, 4)
    encode = megabatch.cached(tower, 4, sync="none")
    encode(torch.ones(6, 8))
    tower.weight.ds_id = 1
    with pytest.raises(ValueError, match="DeepSpeed"):
        encode(torch.ones(6, 8))
