"""Predicted memory of every loss that a run can name, with the keys that change it, against the peak of tensors on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megabatch import config
from megabatch.costs.counting import Pass, Work
from megabatch.costs.hardware import find_machine
from megabatch.costs.memory import Setup, predict_memory
from megabatch.costs.memory.loss import LossMemory
from megabatch.costs.strategy import Strategy
from megabatch.costs.time import StepWork, step_time
from megabatch.objectives import DIRECTIONS, OBJECTIVES, LossOptions
from megabatch.planning.workload import loss_options
from megabatch.towers.model import Pair
from megabatch.training.memory import peak_of_tensors
from megabatch.training.objective import contrastive_loss

WIDTH = 96
ALL, CROSS = list(DIRECTIONS), list(DIRECTIONS[:2])
# Keys of the section [loss], and "hard" for the number of hard negatives.
CASES: list[dict[str, Any]] = [
    *(
        {"objective": name, "duplicates": ids}
        for name, spec in OBJECTIVES.items()
        if spec.contrastive
        for ids in ("mask", "negative")
    ),
    *({"objective": name, "dims": [96, 64, 32]} for name in ("clip", "siglip", "infonce", "dcl", "nt_xent")),
    *({"objective": name, "spread_out": 1.0} for name in ("clip", "siglip", "infonce", "dcl", "nt_xent")),
    {"objective": "clip", "dims": [48, 32]},
    {"objective": "clip", "dims": [96], "spread_out": 1.0},
    {"objective": "infonce", "dims": [96, 80], "spread_out": 1.0, "directions": ALL},
    *({"objective": "infonce", "directions": directions} for directions in (CROSS, ALL)),
    {"objective": "infonce", "directions": CROSS, "hardness": 3.0},
    {"objective": "dcl", "directions": ALL, "partition": "by_anchor"},
    *({"objective": name, "hard": 2} for name in ("clip", "siglip", "infonce", "dcl")),
    {"objective": "infonce", "hard": 2, "in_batch": False},
    {"objective": "clip", "hard": 1, "spread_out": 1.0},
]


class Ledger:
    """Adds up allocations."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.count = self.peak = 0

    def allocate(self, size: int, part: str) -> int:
        self.count += 1
        self.sizes[self.count] = size
        self.peak = max(self.peak, sum(self.sizes.values()))
        return self.count

    def free(self, index: int) -> None:
        del self.sizes[index]


def predicted_peak(setup: Setup, rows: int, element_bytes: int) -> int:
    ledger = Ledger()
    loss = LossMemory(ledger, setup, rows, WIDTH, element_bytes)
    loss.forward()
    gradients = loss.backward()
    assert sorted(gradients) == sorted(ledger.sizes), "the gradients remain, and nothing else"
    return ledger.peak


def measured_peak(run: config.Run, rows: int, hard: int, dtype: torch.dtype) -> int:
    """Return the peak of tensors in forward and backward of a run's loss, without the embeddings."""
    torch.manual_seed(0)
    x, y = (
        nn.functional.normalize(torch.randn(count, WIDTH), dim=-1).to(dtype).requires_grad_() for count in (rows, rows * (1 + hard))
    )
    model = Pair(nn.Identity(), None, 10.0, -10.0 if OBJECTIVES[run.loss.objective].bias else None)  # type: ignore[arg-type]
    ids = torch.arange(len(y))
    owners = torch.arange(rows).repeat(hard) if hard else None

    def step() -> None:
        loss, _ = contrastive_loss(model, run, x, y, ids, owners, group=None, diagnostics=True)
        loss.backward()
        x.grad = y.grad = None

    step()
    return peak_of_tensors(step, [])


def case_name(case: dict[str, Any]) -> str:
    return ",".join("+".join(map(str, v)) if isinstance(v, list) else str(v) for v in case.values())


def assert_predicted(case: dict[str, Any], rows: int, workspace: int, dtype: torch.dtype = torch.float32) -> None:
    options = dict(case)
    hard = options.pop("hard", 0)
    run = config.build({"loss": {"dim": WIDTH, **options}, "compute": {"workspace": workspace}, "schedule": {"steps": 1}})
    setup = Setup(
        objective=OBJECTIVES[run.loss.objective].cost_name, loss_options=loss_options(run, hard), workspace=workspace, device="cpu"
    )
    predicted, measured = predicted_peak(setup, rows, dtype.itemsize), measured_peak(run, rows, hard, dtype)
    # Vectors of a few numbers for each row, and in half precision fp32 copies of a tile's rows, are counted roughly: they are 2 %
    # and 5 % of the smallest of these peaks.
    assert predicted == pytest.approx(measured, rel=0.02 if dtype == torch.float32 else 0.05), (rows, workspace, dtype)


@pytest.mark.parametrize("case", [CASES[0], {"objective": "nt_xent", "dims": [96, 64], "spread_out": 1.0}], ids=case_name)
def test_predicted_memory_of_a_loss_is_that_of_a_cpu(case: dict[str, Any]) -> None:
    assert_predicted(case, 500, 2**25)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_predicted_memory_of_every_loss_is_that_of_a_cpu(case: dict[str, Any]) -> None:
    # A workspace that holds the whole matrix, one that cuts it, and embeddings in half precision.
    assert_predicted(case, 500, 2**25)
    assert_predicted(case, 1400, 2**20)
    if case["objective"] in ("clip", "infonce"):
        assert_predicted(case, 1400, 2**20, torch.bfloat16)


def test_hard_negatives_are_rows_of_the_second_tower() -> None:
    def predict(negatives: int, shared: bool = False) -> int:
        def build() -> tuple[nn.Module, nn.Module | None]:
            return nn.Linear(64, 512), None if shared else nn.Linear(64, 512)

        def inputs(rows: int) -> torch.Tensor:
            return torch.zeros(rows, 64)

        setup = Setup(objective="clip", chunk=16, workspace=1, loss_options=LossOptions(negatives=negatives))
        return predict_memory(build, (inputs, inputs), 4096, setup).parts["embeddings"]

    # Embeddings and gradients of the documents: twice 4,096 rows of 512 numbers for each hard negative.
    for shared in (False, True):
        assert predict(3, shared) - predict(1, shared) >= 2 * 2 * 4096 * 512 * 4


def test_time_of_a_loss_counts_its_products() -> None:
    machine, work = find_machine("H200", 4), Work(Pass(), Pass(), 0, 0)

    def seconds(objective: str = "infonce", **options: Any) -> float:
        task = StepWork((work,), objective, 768, loss_options=LossOptions(**options))  # type: ignore[arg-type]
        return step_time(task, Strategy(4, 16384, 256), machine).parts["loss"]

    one = seconds()
    # Operations grow with the widths and with the documents that a query is compared with.
    assert seconds(dims=(768, 512, 256)) == pytest.approx(2 * one)
    assert seconds(negatives=3) == pytest.approx(4 * one) == pytest.approx(4 * seconds("clip"))
    assert seconds(negatives=3, directions=("x_to_y", "y_to_y")) == pytest.approx((1 + 3 + 0.5 + 3) * one)
    assert (
        seconds(directions=tuple(CROSS), hardened=True)
        == pytest.approx(2 * one)
        == pytest.approx(2 * seconds(directions=tuple(CROSS)))
    )
    assert seconds(negatives=4, in_batch=False) < 1e-4 * one
    # The regulariser: a product of D × D for each row instead of one with every row of the batch.
    assert seconds(spread_out=True) == pytest.approx((1 + 768 / (4 * 16384)) * one)


def test_prefixes_are_predicted_together_where_their_kernels_run():
    def together(element_bytes: int = 2, **changes: Any) -> bool:
        options = LossOptions(dims=(768, 256), masked=False)
        options = replace(options, **{name: changes.pop(name) for name in list(changes) if hasattr(options, name)})
        return LossMemory(
            Ledger(), Setup(**{"objective": "clip", "loss_options": options, **changes}), 4096, 768, element_bytes
        ).prefixes_together

    assert together() and together(objective="infonce") and together(negatives=1)
    for changes in (
        {"element_bytes": 4},
        {"device": "cpu"},
        {"capability": (8, 0)},
        {"ranks": 2},
        {"objective": "siglip"},
        {"masked": True},
        {"weighted": True},
        {"dims": ()},
        {"dims": (768, 100)},
        {"objective": "infonce", "directions": DIRECTIONS},
        {"objective": "infonce", "negatives": 2},
    ):
        assert not together(**changes), changes


# Peaks on an H200, in MiB, of tests/losses/test_matryoshka_gpu.py.
@pytest.mark.parametrize(
    ("precision", "rows", "measured"),
    [("bf16", 16_384, 511.9), ("bf16", 65_536, 1148.6), ("fp16", 4096, 379.1), ("fp16", 16_384, 795.3), ("fp16", 65_536, 1663.9)],
)
def test_predicted_memory_of_all_prefixes_together_is_that_of_an_h200(precision, rows, measured):
    options = LossOptions(dims=(768, 512, 256, 128, 64), masked=False)
    ledger = Ledger()
    setup = Setup(objective="clip", precision=precision, loss_options=options, device_memory=140 * 2**30)
    loss = LossMemory(ledger, setup, rows, 768, 2)
    loss.forward()
    assert set(loss.backward()) == set(ledger.sizes), "the gradients remain, and nothing else"
    assert ledger.peak / 2**20 == pytest.approx(measured, rel=0.02)
