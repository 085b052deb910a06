"""A few of a model's equal blocks show the memory and the work of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megabatch.costs.counting import count_work
from megabatch.costs.memory import Setup, memory_curve
from megabatch.costs.memory.predict import _traced, summarize, trace_step, whole_step
from megabatch.costs.memory.repeats import UnequalBlocksError
from megabatch.towers.repeats import equal_blocks, few_blocks


class Stack(nn.Module):
    """A transformer of equal blocks, with a head; `unequal`: the last blocks keep another tensor each."""

    def __init__(self, depth: int = 7, *, checkpointing: bool = False, unequal: bool = False, by_number: bool = False) -> None:
        super().__init__()
        make = lambda: nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True, norm_first=True)  # noqa: E731
        self.embed = nn.Linear(32, 64)
        self.blocks = nn.ModuleList(make() for _ in range(depth))
        self.head = nn.Linear(64, 48, bias=False)
        self.checkpointing, self.unequal, self.by_number, self.depth = checkpointing, unequal, by_number, depth

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        kept = []
        for number in range(self.depth) if self.by_number else range(len(self.blocks)):
            x = checkpoint(self.blocks[number], x, use_reentrant=False) if self.checkpointing else self.blocks[number](x)
            if self.unequal and number == 2:
                kept.append(x.exp())
        return self.head(x.mean(1) + sum(t.mean(1) for t in kept))


def rows_of(rows: int) -> Tensor:
    return torch.zeros(rows, 24, 32)


SETUPS = {
    "supervised": Setup(),
    "accumulated, sharded": Setup(precision="bf16", chunk=4, ranks=4, sharding="fsdp2", ema=True),
    "contrastive": Setup(precision="bf16", objective="clip", chunk=4, keep=1, ranks=2, gradient_exchange="bf16"),
    "contrastive, sharded": Setup(objective="siglip", chunk=4, ranks=2, sharding="fsdp2", optimizer="sgd"),
}


SLOW = pytest.mark.slow
CASES = [("supervised", False), pytest.param("supervised", True, marks=SLOW)]
CASES += [pytest.param(name, checkpointing, marks=SLOW) for name in list(SETUPS)[1:] for checkpointing in (False, True)]


@pytest.mark.parametrize(("name", "checkpointing"), CASES)
def test_memory_from_a_few_equal_blocks_is_that_of_all(name: str, checkpointing: bool) -> None:
    setup = SETUPS[name]
    build: Callable[[], Any] = lambda: Stack(checkpointing=checkpointing)  # noqa: E731
    inputs: Any = rows_of
    if setup.contrastive:
        build = lambda: (Stack(7, checkpointing=checkpointing), nn.Linear(32, 48))  # noqa: E731
        inputs = (rows_of, lambda rows: torch.zeros(rows, 32))
    few, whole = (_traced(build, inputs, 8, setup, None, whole=whole) for whole in (False, True))
    assert few.runs and not whole.runs
    a, b = (summarize(step, whole_step(step, 8)) for step in (few, whole))
    assert a.phases == b.phases and a.parts == b.parts and a.reserved_bytes == b.reserved_bytes


def test_blocks_after_frozen_layers_are_not_traced_whole() -> None:
    """No gradient flows further than the first block, as with LoRA: nothing but the end of backward ends it."""

    def build() -> nn.Module:
        model = Stack()
        model.embed.requires_grad_(False)
        return model

    setup = Setup(chunk=4)
    few, whole = (_traced(build, rows_of, 8, setup, None, whole=whole) for whole in (False, True))
    a, b = (summarize(step, whole_step(step, 8)) for step in (few, whole))
    assert few.runs and a.phases == b.phases and a.parts == b.parts and a.reserved_bytes == b.reserved_bytes


@SLOW
def test_blocks_that_differ_in_what_they_keep_are_traced_whole() -> None:
    build = lambda: Stack(unequal=True)  # noqa: E731
    with pytest.raises(UnequalBlocksError):
        _traced(build, rows_of, 8, Setup(), None, whole=False)
    assert not trace_step(build, rows_of, 8, Setup(), None).runs


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=SLOW)])
def test_work_of_a_few_equal_blocks_is_that_of_all(precision: str) -> None:
    few, whole = (count_work(Stack(), rows_of, precision, whole=whole) for whole in (False, True))
    assert few.forward.operations == whole.forward.operations and few.backward.operations == whole.backward.operations
    assert sorted(few.forward.calls) == sorted(whole.forward.calls) and sorted(few.backward.calls) == sorted(whole.backward.calls)
    # A model that counts its blocks itself is computed whole.
    assert count_work(Stack(by_number=True), rows_of, precision) == count_work(
        Stack(by_number=True), rows_of, precision, whole=True
    )


def variants() -> Iterator[tuple[nn.Module, list[int]]]:
    block = nn.Linear(4, 4)
    yield nn.Sequential(*[block] * 8), []
    yield nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)]), []
    yield nn.Sequential(*[nn.Linear(4, 4, bias=number != 6) for number in range(14)]), [6, 7]
    yield nn.Sequential(*[nn.Dropout(0.1 * (number > 0)) for number in range(8)]), [7]


@pytest.mark.parametrize(("module", "counts"), list(variants()))
def test_only_long_runs_of_distinct_equal_blocks_are_shortened(module: nn.Module, counts: list[int]) -> None:
    runs = equal_blocks(module)
    assert [run.count for run in runs] == counts
    before = list(module)
    with few_blocks(runs):
        assert len(module) == len(before) - sum(count - 4 for count in counts)
    assert list(module) == before


@SLOW
def test_another_chunk_of_a_traced_step_is_as_if_it_were_traced_anew() -> None:
    setup = Setup(precision="bf16", objective="clip", chunk=4, keep=1, ranks=2, sharding="fsdp2")
    build = lambda: (Stack(7), nn.Linear(32, 48))  # noqa: E731
    inputs = (rows_of, lambda rows: torch.zeros(rows, 32))
    first = memory_curve(build, inputs, setup)
    for chunk in (6, 3):
        again, anew = first.at_chunk(chunk), memory_curve(build, inputs, replace(setup, chunk=chunk))
        assert again.peak(12) == anew.peak(12) and again.peak(12, 2) == anew.peak(12, 2)
    assert first.peak(8) == memory_curve(build, inputs, setup).peak(8)
