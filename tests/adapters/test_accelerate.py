"""A chunk that accelerate's decorator finds ran on every rank, and the training is as if it had been given from the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import megabatch
from megabatch.adapters.accelerate import find_executable_batch_size

ROWS = 40


class Tower(nn.Module):
    """A layer with dropout and a counter. More than `limit` rows at once are out of memory, when the counter has changed "
    "already."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.dropout, self.limit = nn.Linear(8, 4), nn.Dropout(0.5), limit
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += len(rows)
        if len(rows) > self.limit:
            raise torch.OutOfMemoryError("out of memory.")
        return self.dropout(self.layer(rows))


def train(limit: int, rank: int = 0, size: int = 1, **options: Any) -> Any:
    """Return the chunk, the chunks that were tried, and the state after two steps."""
    tower, tried = Tower(limit), []
    model = DistributedDataParallel(tower) if size > 1 else tower
    optimizer = torch.optim.AdamW(tower.parameters())

    @find_executable_batch_size(**options)
    def step(chunk, model, optimizer, rows):
        tried.append(chunk)
        encode = megabatch.cached(model, chunk)
        loss = encode(rows).square().mean()
        if encode.chunk < chunk:
            # `cached` went on with smaller chunks of its own.
            raise torch.OutOfMemoryError("out of memory.")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(5 + rank)
    batch = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        step(model, optimizer, batch)
    return step.chunk, tried, {name: value.clone() for name, value in tower.state_dict().items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*out of memory")
def test_the_training_is_that_of_the_chunk_that_was_found():
    chunk, tried, state = train(limit=25, starting_batch_size=32)
    assert (chunk, tried) == (25, [32, 28, 25, 25])
    _, _, expected = train(limit=25, starting_batch_size=25)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*out of memory")
def test_a_given_reduction_is_used():
    sizes = iter([16, 8])
    assert train(limit=10, starting_batch_size=32, reduce_batch_size_fn=lambda: next(sizes))[0] == 8


@pytest.mark.filterwarnings("ignore:.*out of memory")
def test_other_errors_and_models_that_never_fit_are_raised():
    with pytest.raises(RuntimeError, match="not even one row"):
        train(limit=0, starting_batch_size=2)

    @find_executable_batch_size
    def broken(chunk):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        broken()


def on_two_ranks(rank: int, size: int) -> Any:
    # The second rank has less memory.
    return train(25 - 7 * rank, rank, size, starting_batch_size=32)


@pytest.mark.slow
def test_ranks_find_the_chunk_that_runs_on_all(world):
    [(chunk, tried, first), (other, also_tried, second)] = world.run(2, on_two_ranks)
    assert chunk == other == 17
    assert tried == also_tried == [32, 28, 25, 22, 19, 17, 17, 17]
    for name in ("layer.weight", "layer.bias"):
        assert torch.equal(first[name], second[name])
