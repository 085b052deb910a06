"""`fitted` and `micro_batches`: the batch stays, the chunk follows the memory, and training is that of the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_fit_finder import quickly
from torch import Tensor, nn

from megabatch.measuring.fit.loops import FittedStep, fitted, micro_batches


class Loop:
    """Training at a batch of 50 on a device with memory for `limit` rows."""

    def __init__(self, limit: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.limit = limit
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.GELU(), nn.Linear(8, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.chunks: list[int] = []
        state = [self.model, self.optimizer]
        self.step: FittedStep[[Tensor, Tensor], Tensor] = fitted(state, margin=0.0, **options)(self.take)

    def take(self, chunk: int, inputs: Tensor, labels: Tensor) -> Tensor:
        """Take one step over all rows."""
        self.chunks.append(chunk)
        mean = torch.zeros(())
        for (x, y), share in micro_batches((inputs, labels), chunk):
            if len(x) > self.limit:
                raise torch.OutOfMemoryError("out of memory")
            loss = share * F.cross_entropy(self.model(x), y)
            loss.backward()
            mean += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(50, 6, generator=generator), torch.randint(3, (50,), generator=generator)) for _ in range(count)]


@quickly()
@pytest.mark.parametrize("limit", [1, 7, 16, 49, 50, 1000])
def test_training_is_that_of_the_whole_batch(limit):
    plain, loop = Loop(1000), Loop(limit)
    expected = [plain.take(50, *batch) for batch in batches()]
    found = [loop.step(*batch) for batch in batches()]
    assert torch.allclose(torch.stack(expected), torch.stack(found), rtol=1e-5)
    for a, b in zip(plain.model.parameters(), loop.model.parameters(), strict=True):
        # Sums in another order, through three steps of an optimizer that divides by them.
        assert torch.allclose(a, b, atol=2e-4)
    count = loop.step.micro_batches(50)
    assert loop.step.chunk <= 50 and count == -(-50 // loop.step.chunk)
    assert -(-50 // count) <= limit, "micro-batches that fit"
    assert limit >= 50 or -(-50 // (count - 1)) > limit, "and no more of them than it takes"


@quickly()
def test_the_chunk_is_searched_once_and_again_only_after_forget():
    loop = Loop(7)
    for batch in batches():
        loop.step(*batch)
    tried = len(loop.chunks)
    first = loop.step.chunk
    assert loop.chunks[-3:] == [first] * 3 and max(loop.chunks) <= 50
    # There is more memory now: the next search starts where the first did, and not at its result.
    loop.limit = 1000
    loop.step(*batches(1)[0])
    assert loop.step.chunk == first and len(loop.chunks) == tried + 1
    loop.step.forget()
    assert loop.step.chunk is None and loop.step.micro_batches(50) is None
    loop.step(*batches(1)[0])
    assert loop.step.chunk == 50 and loop.chunks[tried + 1] == loop.chunks[0]


@quickly()
def test_the_stored_result_is_used_by_the_next_process(tmp_path):
    path = tmp_path / "chunk.json"
    first = Loop(7, file=path)
    first.step(*batches(1)[0])
    resumed = Loop(7, file=path)
    resumed.step(*batches(1)[0])
    # Two steps of one trial, then the step itself.
    assert resumed.chunks == [first.step.chunk] * 3
    resumed.step.forget()
    assert not Path(path).exists()


@quickly()
def test_a_step_that_reads_its_own_rows_names_the_batch():
    asked = []

    @fitted([], batch=30, margin=0.0)
    def step(chunk: int, scale: float) -> float:
        asked.append(chunk)
        if chunk > 11:
            raise torch.OutOfMemoryError("out of memory")
        return scale * chunk

    assert step(2.0) == 22.0 and step.chunk == 11 and step.micro_batches(30) == 3 and max(asked) <= 30
    assert step.__name__ == "step"


def test_bad_batches_are_named():
    with pytest.raises(ValueError, match="batch is 0"):
        fitted([], batch=0)
    with pytest.raises(ValueError, match="no tensor"):
        fitted([])(lambda chunk, scale: None)(2.0)


@pytest.mark.parametrize(
    "rows, chunk, sizes",
    [
        (10, 4, [4, 4, 2]),
        (1000, 300, [250] * 4),
        (9, 8, [5, 4]),
        (8, 8, [8]),
        (3, 100, [3]),
        (5, 1, [1] * 5),
        (0, 4, [0]),
        (7, 3, [3, 2, 2]),
    ],
)
def test_micro_batches_are_few_and_even_and_have_no_single_row_where_possible(rows, chunk, sizes):
    pieces = list(micro_batches({"x": torch.zeros(rows, 2), "y": [torch.zeros(rows)]}, chunk))
    assert [len(piece["x"]) for piece, _ in pieces] == [len(piece["y"][0]) for piece, _ in pieces] == sizes
    assert sum(share for _, share in pieces) == pytest.approx(1.0 if rows else 0.0)
    assert [share for _, share in pieces] == [size / max(1, rows) for size in sizes]


def test_batch_norm_gets_no_micro_batch_of_one_row():
    model = nn.BatchNorm1d(6).train()
    for x, _ in micro_batches(torch.randn(7, 6), 3):
        # A single row raises ValueError here.
        model(x)
