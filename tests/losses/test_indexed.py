"""Softmax over sharded classes equals its formula, with margins and sampled classes, on one rank and several."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import KINDS, embeddings
from heap import MIB, measured
from hypothesis import given, settings
from ragged import assert_close, gradients, pieces
from torch import nn
from world import error_of

import megabatch
from megabatch import reference

pytestmark = pytest.mark.filterwarnings("ignore:scale=")
# Classes of each rank.
CLASSES = {2: [8, 5], 3: [4, 9, 0]}


def check_any_case_is_the_formula_in_fp64(data, workspace):
    rows, extra = data.draw(st.integers(1, 17)), data.draw(st.integers(0, 20))
    seed, angular = data.draw(st.integers(0, 10**6)), data.draw(st.sampled_from((0.0, 0.5, 1.5)))
    norm = 1.0 if angular else data.draw(st.sampled_from((1e-3, 1.0, 30.0)))
    x, y = embeddings(rows, extra, width=data.draw(st.integers(1, 8)), kind=data.draw(st.sampled_from(KINDS)), norm=norm, seed=seed)
    # Several rows may have one class, and there may be fewer classes than rows.
    y = y[: data.draw(st.integers(1, len(y)))]
    targets = torch.randint(0, len(y), (rows,), generator=torch.Generator().manual_seed(seed))
    options = {"margin": data.draw(st.sampled_from((0.0, 0.35, -1.0))), "angular_margin": angular}
    if data.draw(st.booleans()):
        options["label_smoothing"] = 0.2
    if data.draw(st.booleans()):
        options["weights"] = torch.linspace(0.1, 2, rows, dtype=torch.float64)
    scale = torch.tensor(data.draw(st.sampled_from((0.1, 1.0, 30.0, 64.0))), dtype=torch.float64)
    found = gradients(lambda x, y, s: megabatch.class_softmax_loss(x, y, targets, s, **options, workspace=workspace), (x, y, scale))
    true = gradients(lambda x, y, s: reference.class_softmax_loss(x, y, targets, s, **options), (x, y, scale))
    # Logits reach scale·norm²; near θ = 0 the derivative of the angular margin is up to 1 / LEAST_SINE.
    steep = 1000 if angular else 1
    allowed = max(1e-10, 64 * steep * torch.finfo(torch.float64).eps * scale.item() ** 2 * norm**3)
    assert_close([found[0], *found[1]], [true[0], *true[1]], allowed)


test_any_case_is_the_formula_in_fp64 = settings(max_examples=12, deadline=None, derandomize=True)(
    given(st.data(), st.sampled_from((400, 2000, None)))(check_any_case_is_the_formula_in_fp64)
)
test_many_cases_are_the_formula_in_fp64 = pytest.mark.slow(
    settings(max_examples=60, deadline=None, derandomize=True)(
        given(st.data(), st.sampled_from((400, 2000, None)))(check_any_case_is_the_formula_in_fp64)
    )
)


def test_the_angular_margin_is_an_angle_and_the_gradient_is_finite_where_row_and_class_coincide():
    angles = torch.tensor([0.0, 0.3, 1.2, 2.0, math.pi], dtype=torch.float64)
    x = torch.stack((angles.cos(), angles.sin()), dim=1).requires_grad_()
    y = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    for row, angle in enumerate(angles):
        own = math.cos(angle + 0.5) if angle + 0.5 < math.pi else math.cos(angle) - 0.5 * math.sin(0.5)
        expected = F.cross_entropy(torch.tensor([[8 * own, 8 * -math.cos(angle)]], dtype=torch.float64), torch.tensor([0]))
        loss = megabatch.class_softmax_loss(x[row : row + 1], y, torch.tensor([0]), 8.0, angular_margin=0.5)
        assert loss.item() == pytest.approx(expected.item(), rel=5e-3 if row == 0 else 1e-10)
        loss.backward()
    assert x.grad.isfinite().all()


def sampled(x, y, targets, scale, fraction, seed, **options):
    generator = torch.Generator().manual_seed(seed)
    return megabatch.class_softmax_loss(x, y, targets, scale, sample=fraction, generator=generator, **options)


def test_sampled_classes_hold_every_target_and_repeat_with_the_generator():
    x, y = embeddings(12, 88, width=6)
    targets = torch.arange(12) * 7
    scale = torch.tensor(9.0, dtype=torch.float64)
    chosen = []
    for seed in (0, 0, 1):
        found = gradients(lambda x, y, s, seed=seed: sampled(x, y, targets, s, 0.3, seed, workspace=700), (x, y, scale))
        kept = found[1][1].abs().sum(1) > 0
        assert kept[targets].all() and kept.sum() == 30
        true = gradients(lambda x, y, s, k=kept: reference.class_softmax_loss(x, y, targets, s, kept=k), (x, y, scale))
        assert_close([found[0], *found[1]], [true[0], *true[1]])
        chosen.append(kept)
    assert torch.equal(chosen[0], chosen[1]) and not torch.equal(chosen[0], chosen[2])
    # More targets than the fraction: all of them, and nothing else.
    everything = megabatch.class_softmax_loss(x, y, targets, 9.0, sample=0.0)
    kept = torch.zeros(100, dtype=torch.bool).index_fill_(0, targets, True)
    assert torch.allclose(everything, reference.class_softmax_loss(x, y, targets, 9.0, kept=kept))


def batch_of_nine():
    x, y = embeddings(9, 4, width=5)
    return x, y, torch.tensor([12, 0, 3, 3, 7, 11, 5, 8, 12]), torch.linspace(0.5, 2, 9, dtype=torch.float64)


def rank_results(rank: int, size: int) -> dict[str, object]:
    x, y, targets, weights = batch_of_nine()
    x, targets, weights = (pieces(t, size)[rank] for t in (x, targets, weights))
    y = y.split(CLASSES[size])[rank]
    scale = torch.tensor(6.0, dtype=torch.float64)
    options = {"angular_margin": 0.3, "margin": 0.1, "label_smoothing": 0.1, "weights": weights, "workspace": 400}
    options["group"] = dist.group.WORLD
    call = megabatch.class_softmax_loss
    return {
        "parameter": gradients(lambda x, y, s: call(x, y, targets, s, **options), (x, y, scale)),
        "encoder": gradients(lambda x, y, s: call(x, y, targets, s, y_from_encoder=True, **options), (x, y, scale)),
        "sampled": gradients(lambda x, y, s: sampled(x, y, targets, s, 0.5, rank, group=dist.group.WORLD), (x, y, scale)),
        "unknown": error_of(lambda: call(x, y, targets + 1, 1.0, group=dist.group.WORLD)),
        "margin": error_of(lambda: call(x, y, targets, 1.0, margin=float(rank), group=dist.group.WORLD)),
    }


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_ragged_rows_and_classes_get_the_gradients_of_one_process(world, size):
    results = world.run(size, rank_results)
    x, y, targets, weights = batch_of_nine()
    scale = torch.tensor(6.0, dtype=torch.float64)
    options = {"angular_margin": 0.3, "margin": 0.1, "label_smoothing": 0.1, "weights": weights}
    kept = torch.cat([found["sampled"][1][1].abs().sum(1) > 0 for found in results])
    assert kept[targets].all() and not kept.all()
    for name, formula_options in (("parameter", options), ("encoder", options), ("sampled", {"kept": kept})):
        value, (dx, dy, dscale) = gradients(
            lambda x, y, s, o=formula_options: reference.class_softmax_loss(x, y, targets, s, **o), (x, y, scale)
        )
        for rank, found in enumerate(results):
            # DDP divides by the number of ranks what it averages: the gradients of encoders.
            own = dy.split(CLASSES[size])[rank] * (size if name == "encoder" else 1)
            assert_close([found[name][0], *found[name][1]], [value, size * pieces(dx, size)[rank], own, dscale], 1e-12)
    for name, message in (("unknown", "2 rows have a class outside of [0, 13)"), ("margin", "margin is 0.0 on rank 0")):
        assert len({found[name] for found in results}) == 1 and message in results[0][name]


class Head(nn.Module):
    """A face-recognition head: normalised class weights on a frozen scale."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Parameter(torch.eye(10, 6, dtype=torch.float64) + 0.1)

    def forward(self, x, targets, loss):
        return loss(F.normalize(x, dim=1), F.normalize(self.classes, dim=1), targets, 16.0, angular_margin=0.5)


def test_a_step_of_the_class_weights_is_that_of_the_formula():
    x, targets = torch.randn(8, 6, dtype=torch.float64), torch.arange(8)
    ours, true = Head(), Head()
    ours(x, targets, megabatch.class_softmax_loss).backward()
    true(x, targets, reference.class_softmax_loss).backward()
    assert torch.allclose(ours.classes.grad, true.classes.grad, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precisions_round_sums_in_fp32_and_gradients_once(dtype):
    x, y = (t.to(dtype).double() for t in embeddings(40, 60, width=16))
    targets = torch.arange(40) * 2
    true = gradients(lambda x, y: reference.class_softmax_loss(x, y, targets, 20.0, margin=0.2), (x, y))
    x, y = (t.to(dtype).requires_grad_() for t in (x, y))
    loss = megabatch.class_softmax_loss(x, y, targets, 20.0, margin=0.2, workspace=5000)
    loss.backward()
    assert loss.dtype == torch.float32 and x.grad.dtype == dtype
    assert loss.item() == pytest.approx(true[0].item(), rel=1e-5)
    for found, expected in zip((x.grad, y.grad), true[1], strict=True):
        assert (found.double() - expected).norm() < (2 * torch.finfo(dtype).eps + 1e-5) * expected.norm()


def work(rows: int, classes: int, workspace: int) -> None:
    x, y = torch.randn(rows, 32).requires_grad_(), torch.randn(classes, 32).requires_grad_()
    targets = torch.randint(classes, (rows,))
    megabatch.class_softmax_loss(x, y, targets, 0.5, margin=0.2, workspace=workspace).backward()


@pytest.mark.slow
def test_memory_is_linear_in_rows_and_classes():
    small, large = (measured(work, (64, 64, 4096), (rows, 4 * rows, 4 * MIB)) for rows in (1000, 4000))
    # The logits take 244 MiB.
    assert large - small < 8 * 15000 * 32 * 4 + 2 * MIB
    assert large < 3 * 4 * MIB + 8 * 20000 * 32 * 4 + 4 * MIB


def test_results_repeat_bit_for_bit_and_a_second_derivative_is_refused():
    x, y = embeddings(33, 20, width=7)
    targets = torch.zeros(33, dtype=torch.int64)
    first, second = (
        gradients(lambda x, y: megabatch.class_softmax_loss(x, y, targets, 20.0, workspace=900), (x, y)) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    x.requires_grad_()
    (dx,) = torch.autograd.grad(megabatch.class_softmax_loss(x, y, targets, 1.0), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dx.sum().backward()


def test_wrong_inputs_are_refused():
    x, y = embeddings(5, 4)
    targets = torch.arange(5)
    call = megabatch.class_softmax_loss
    for message, mistake in {
        "targets has shape": lambda: call(x, y, targets[:4], 1.0),
        "torch.float32": lambda: call(x, y, targets.float(), 1.0),
        r"1 rows have a class outside of \[0, 9\)": lambda: call(x, y, targets + 5, 1.0),
        r"5 rows have a class outside": lambda: call(x, y, targets - 9, 1.0),
        "which is no cosine": lambda: call(x, 3 * x, targets, 1.0, angular_margin=0.2),
        "angular_margin=2": lambda: call(x, y, targets, 1.0, angular_margin=2),
        "sample=1.5": lambda: call(x, y, targets, 1.0, sample=1.5),
        "width and dtype must be equal": lambda: call(x, y[:, :3], targets, 1.0),
    }.items():
        with pytest.raises(ValueError, match=message):
            mistake()
