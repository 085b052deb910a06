"""Value and all gradients equal those of the formula, for any input, option and tile size."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from cases import CLIP_OPTIONS, KINDS, Case, build, embeddings, errors, formula, largest_logit, ours
from hypothesis import given, settings

import megabatch
from megabatch import reference

# The arithmetic is tested with scales that are unusual in training.
pytestmark = [pytest.mark.filterwarnings("ignore:scale="), pytest.mark.sampled(3)]
TILES = (64, 500, 4000, None)


def assert_exact(case: Case, **more) -> None:
    # Two orders of summation round a logit of size S differently by some S·eps; above 1e4 that is more than 1e-10.
    allowed = max(1e-10, 32 * torch.finfo(torch.float64).eps * largest_logit(case))
    for name, e in errors(case, ours(case, **more), formula(case)).items():
        assert e < allowed, (name, e)


@pytest.mark.parametrize(
    "options",
    [dict(itertools.chain(*(o.items() for o in combination))) for combination in itertools.product(*CLIP_OPTIONS.values())],
    ids=str,
)
def test_every_combination_of_options_of_the_softmax_loss_is_the_formula(options):
    assert_exact(build("clip_loss", 21, (7.0,), options), workspace=1000)


@pytest.mark.parametrize(
    "options",
    [
        {**ids, **weights, **extra}
        for ids in CLIP_OPTIONS["ids"]
        for weights in CLIP_OPTIONS["weights"]
        for extra in ({}, {"extra": 7})
    ],
    ids=str,
)
def test_every_combination_of_options_of_the_sigmoid_loss_is_the_formula(options):
    assert_exact(build("siglip_loss", 21, (7.0, -3.0), options), workspace=1000)


@st.composite
def cases(draw) -> Case:
    loss = draw(st.sampled_from(("clip_loss", "siglip_loss")))
    groups = [draw(st.sampled_from(CLIP_OPTIONS[name])) for name in ("ids", "weights")]
    if loss == "clip_loss":
        groups += [draw(st.sampled_from(CLIP_OPTIONS[name])) for name in ("label_smoothing", "drop_above", "direction")]
    elif draw(st.booleans()):
        groups.append({"extra": draw(st.integers(1, 9))})
    scalars = (draw(st.sampled_from((0.01, 1.0, 20.0, 100.0, 1000.0, 0.0, -3.0))), draw(st.sampled_from((-10.0, 0.0, 4.0))))
    return build(
        loss,
        draw(st.integers(1, 40)),
        scalars[: 1 if loss == "clip_loss" else 2],
        {name: value for group in groups for name, value in group.items()},
        seed=draw(st.integers(0, 10**6)),
        width=draw(st.integers(1, 9)),
        kind=draw(st.sampled_from(KINDS)),
        norm=draw(st.sampled_from((1e-3, 1.0, 30.0, 1e3))),
    )


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases(), st.sampled_from(TILES))
def test_any_case_is_the_formula_in_fp64(case, workspace):
    assert_exact(case, workspace=workspace)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases(), st.sampled_from(TILES), st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
def test_any_case_is_as_exact_as_fp32_sums_allow(case, workspace, dtype):
    case = case.rounded(dtype)
    true, found = formula(case), ours(case, dtype, workspace=workspace)
    # A logit of size S is rounded by up to S·eps/2 in each of its few sums, and shifts all later results by as much;
    # sums of up to 50 terms add their own rounding. A gradient is then rounded once to the dtype of its input.
    sums = 32 * torch.finfo(torch.float32).eps * (1 + largest_logit(case))
    for name, e in errors(case, found, true).items():
        # Gradients outside of the range of fp16 are not compared.
        largest = true[name].abs().max()
        fits = name not in ("x", "y") or largest == 0 or torch.finfo(dtype).tiny <= largest < torch.finfo(dtype).max
        # The gradient of the scale is a sum of those of x, whose products may read bf16 operands.
        rounding = torch.finfo(dtype).eps if name in ("x", "y") or (name, dtype) == ("scale", torch.bfloat16) else 0
        # Beyond logits of about 1e5, fp32 cannot represent their differences, but results are still finite.
        assert not fits or e <= sums + rounding or (sums > 1 and math.isfinite(e)), (name, e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["random", "clustered"])
@pytest.mark.parametrize("scale", [1.0, 20.0, 100.0, 400.0])
@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_the_error_is_not_larger_than_pytorchs_own(loss, scale, kind, dtype):
    x, y = embeddings(400, width=48, kind=kind, seed=3)
    case = Case(loss, x, y, (scale, -5.0)[: 1 if loss == "clip_loss" else 2]).rounded(dtype)
    true = formula(case)
    own, theirs = errors(case, ours(case, dtype, workspace=2**17), true), errors(case, formula(case, dtype), true)
    for name in true:
        # Both round; a factor of 1.5 and a few ulp of fp32 allow for chance. A gradient cannot be better than its dtype.
        slack = 8 * torch.finfo(torch.float32).eps + (torch.finfo(dtype).eps if name in ("x", "y") else 0)
        assert own[name] <= 1.5 * theirs[name] + slack, (name, own[name], theirs[name])


def test_logits_are_not_rounded_to_bf16():
    x, y = embeddings(64, width=64, kind="clustered")
    case = Case("clip_loss", x, y, (100.0,)).rounded(torch.bfloat16)
    value, true = ours(case, torch.bfloat16)["value"], formula(case)["value"]
    assert abs(value - true) < 1e-4
    assert abs(formula(case, torch.bfloat16)["value"] - true) > 1e-2  # what rounding them costs: the test can fail


@pytest.mark.parametrize("gap", [50.0, 1000.0, 1e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("workspace", [500, None])
def test_rows_far_below_the_largest_logit_of_their_tile_are_right(gap, dtype, workspace):
    x, y = embeddings(30, width=4, kind="random", seed=1)
    x = x * torch.where(torch.arange(30) % 3 == 0, gap, 1.0)[:, None].double()
    y[5:7] *= gap
    case = Case("clip_loss", x, y, (1.0,))
    eps = torch.finfo(dtype).eps
    for name, e in errors(case, ours(case, dtype, workspace=workspace), formula(case)).items():
        assert e < 32 * eps, (name, e)


def test_identical_rows_give_log_n_at_any_size_of_logit():
    for norm, scale in ((1.0, 1.0), (1.0, 100.0), (1e3, 100.0), (1e4, 1e3)):
        x = torch.full((64, 16), norm / 4)
        assert megabatch.clip_loss(x, x, scale, workspace=4000).item() == pytest.approx(math.log(64), rel=1e-6)


def test_a_small_loss_keeps_its_digits():
    """If the positive wins by far, 1 - p is small and must not be computed as a difference of two numbers near one."""
    x = torch.eye(16, dtype=torch.float64)
    for scale in (8.0, 12.0, 16.0, 20.0):
        case = Case("clip_loss", x, x, (scale,))
        found, true = ours(case, torch.float32), formula(case)
        assert found["value"].item() == pytest.approx(true["value"].item(), rel=1e-5)
        assert torch.allclose(found["x"], true["x"], rtol=1e-5, atol=0)


def test_one_row_has_no_negatives():
    x, y = embeddings(1)
    assert ours(Case("clip_loss", x, y, (10.0,)))["value"] == 0
    assert ours(Case("clip_loss", x, y, (10.0,)))["x"].abs().max() == 0


def test_the_formula_is_pytorchs_cross_entropy_and_openclips_sigmoid():
    x, y = embeddings(20, width=6)
    logits, labels = 9.0 * x @ y.T, torch.arange(20)
    both = (F.cross_entropy(logits, labels, label_smoothing=0.2) + F.cross_entropy(logits.T, labels, label_smoothing=0.2)) / 2
    assert torch.allclose(reference.clip_loss(x, y, 9.0, label_smoothing=0.2), both)
    from open_clip.loss import SigLipLoss

    assert torch.allclose(reference.siglip_loss(x, y, 9.0, -2.0), SigLipLoss()(x, y, 9.0, -2.0))


def test_several_positives_are_a_uniform_target():
    x, y = embeddings(12, width=6)
    ids = torch.arange(12) % 5
    target = (ids[:, None] == ids).double()
    target /= target.sum(1, keepdim=True)
    logits = 4.0 * x @ y.T
    expected = F.cross_entropy(logits, target)
    assert torch.allclose(reference.clip_loss(x, y, 4.0, symmetric=False, ids=ids, duplicates="positive"), expected)


@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
@pytest.mark.parametrize("extra", [0, 6])
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("workspace", [600, None])
def test_diagnostics_rank_every_positive(loss, extra, with_ids, workspace):
    x, y = embeddings(33, extra, width=5, seed=2)
    ids = torch.arange(len(y)) % 20 if with_ids else None
    options = {"symmetric": not extra} if loss == "clip_loss" else {}
    scalars = (3.0,) if loss == "clip_loss" else (3.0, -1.0)
    value, found = getattr(megabatch, loss)(x, y, *scalars, ids=ids, workspace=workspace, diagnostics=True, **options)
    rank, hardest = reference.ranks(x, y, ids)
    assert torch.equal(found.row_rank, rank)
    assert torch.allclose(found.row_hardest, hardest)
    assert torch.allclose(found.positive, (x * y[:33]).sum(1))
    assert found.recall(3)[0] == (rank < 3).float().mean()
    if loss == "clip_loss" and extra:
        assert found.column_rank is None and found.recall()[1] is None
    else:
        negatives = (y[:33] @ x.T).masked_fill(
            torch.eye(33, dtype=torch.bool) if ids is None else ids[:33, None] == ids[:33], -math.inf
        )
        assert torch.equal(found.column_rank, (negatives >= found.positive[:, None]).sum(1))
        assert torch.allclose(found.column_hardest, negatives.amax(1))
    assert torch.allclose(value, getattr(megabatch, loss)(x, y, *scalars, ids=ids, **options))


def test_dropping_negatives_does_not_improve_ranks_and_collapse_is_not_a_hit():
    x, y = embeddings(30, width=3)
    plain = megabatch.clip_loss(x, y, 5.0, diagnostics=True)[1]
    dropped = megabatch.clip_loss(x, y, 5.0, drop_above=0.0, diagnostics=True)[1]
    assert torch.equal(plain.row_rank, dropped.row_rank)
    same = torch.ones(8, 4)
    assert megabatch.clip_loss(same, same, 5.0, diagnostics=True)[1].recall(1)[0] == 0


@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
@pytest.mark.parametrize("scale", [50.0, 200.0])
def test_autocast_rounds_the_embeddings_and_nothing_else(loss, scale):
    x, y = embeddings(40, width=16)
    case = Case(loss, x, y, (scale, -3.0)[: 1 if loss == "clip_loss" else 2]).rounded(torch.bfloat16)
    true = formula(case)
    a, b = x.float().requires_grad_(), y.float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, found = getattr(megabatch, loss)(a, b, *case.scalars, diagnostics=True)
        value.backward()
    assert value.dtype == a.grad.dtype == torch.float32
    assert value.item() == pytest.approx(true["value"].item(), rel=1e-6)
    # On a CPU with bf16 units, the products with the gradient use them.
    assert (a.grad.double() - true["x"]).norm() < 4e-3 * true["x"].norm()
    assert torch.allclose(found.positive.double(), (case.x * case.y).sum(1), atol=1e-6)


@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_scale_and_bias_may_be_floats_parameters_or_of_another_dtype(loss):
    x, y = embeddings(9)
    values = (3.0, -1.0)[: 1 if loss == "clip_loss" else 2]
    f = getattr(megabatch, loss)
    expected = f(x, y, *values)
    parameters = [torch.nn.Parameter(torch.tensor([v], dtype=torch.float32)) for v in values]
    result = f(x, y, *parameters)
    result.backward()
    assert torch.allclose(result, expected)
    assert all(p.grad.shape == (1,) and p.grad.dtype == torch.float32 for p in parameters)


@pytest.mark.parametrize("frozen", ["x", "y", "both"])
@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss"])
def test_a_frozen_side_gets_no_gradient_and_the_rest_is_right(loss, frozen):
    x, y = embeddings(17, width=5)
    scalars = (6.0, -2.0)[: 1 if loss == "clip_loss" else 2]
    true = formula(Case(loss, x, y, scalars))
    x.requires_grad_(frozen == "y")
    y.requires_grad_(frozen == "x")
    parameters = [torch.tensor(s, dtype=torch.float64, requires_grad=True) for s in scalars]
    getattr(megabatch, loss)(x, y, *parameters, workspace=900).backward()
    assert (x.grad is None) == (frozen != "y") and (y.grad is None) == (frozen != "x")
    for name, found in (("x", x.grad), ("y", y.grad), ("scale", parameters[0].grad)):
        assert found is None or torch.allclose(found, true[name], rtol=1e-10)
