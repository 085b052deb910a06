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


class Counter:
    """Something with a state that is no module."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_whatever_a_step_changes_is_restored():
    """Positional and keyword arguments, and what `state` names: modules, and objects with a state_dict."""
    first, second, outside = Counter(), Counter(), Counter()
    layers, tried = [nn.Linear(1, 1) for _ in range(2)], []
    before = [layer.weight.item() for layer in layers]

    @find_executable_batch_size(starting_batch_size=4, state=[outside])
    def step(chunk, counter, layer, *, other_counter, other_layer):
        tried.append(chunk)
        for each in (counter, other_counter, outside):
            each.count += 1
        with torch.no_grad():
            layer.weight += 1
            other_layer.weight += 1
        if chunk > 2:
            raise torch.OutOfMemoryError("out of memory.")

    step(first, layers[0], other_counter=second, other_layer=layers[1])
    assert tried == [4, 3, 2]
    assert (first.count, second.count, outside.count) == (1, 1, 1)
    assert [layer.weight.item() for layer in layers] == pytest.approx([weight + 1 for weight in before])
    assert step.__name__ == "step"


def test_a_chunk_has_at_least_one_row():
    with pytest.raises(ValueError, match="starting_batch_size"):
        find_executable_batch_size(lambda chunk: None, starting_batch_size=0)


def on_two_ranks(rank: int, size: int) -> Any:
    # The second rank has less memory.
    found = train(25 - 7 * rank, rank, size, starting_batch_size=32)
    # The ranks ask for different sizes.
    reduced = train(25, rank, size, starting_batch_size=32, reduce_batch_size_fn=lambda: 10 + 7 * rank)[0]

    @find_executable_batch_size(starting_batch_size=32, group=None)
    def alone(chunk):
        if chunk > 25 - 7 * rank:
            raise torch.OutOfMemoryError("out of memory.")

    alone()
    return *found, reduced, alone.chunk


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*out of memory")
def test_ranks_find_the_chunk_that_runs_on_all(world):
    [(chunk, tried, first, *more), (other, also_tried, second, *other_more)] = world.run(2, on_two_ranks)
    # The smallest that a rank asks for; and with group=None, each rank finds its own.
    assert (more, other_more) == ([10, 25], [10, 17])
    assert chunk == other == 17
    assert tried == also_tried == [32, 28, 25, 22, 19, 17, 17, 17]
    for name in ("layer.weight", "layer.bias"):
        assert torch.equal(first[name], second[name])
