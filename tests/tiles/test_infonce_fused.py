"""InfoNCE over directions with the Triton kernels, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from cases import Case, errors, formula, ours
from infonce_cases import ALL, build_infonce, largest_infonce_logit
from interpreted import IN_INTERPRETER

import megabatch
from megabatch import reference
from megabatch.losses import symmetric

pytestmark = IN_INTERPRETER

OPTIONS = [
    {"directions": ALL, "drop_ratio": 0.9, "drop_above": {"x_to_y": 0.1}},
    {"directions": ALL},
    {"directions": ALL, "ids": True, "label_smoothing": 0.1, "extra": 0},
    {"directions": ALL, "hardness": 5.0},
    {"hardness": 5.0, "hardness_on": "hard"},
    {"directions": ("x_to_y", "y_to_x"), "ids": True, "duplicates": "positive"},
    {"queue": 23, "directions": ALL},
    {"in_batch": False, "queue": 23},
    {"directions": ("y_to_x", "x_to_x"), "weights": True},
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setitem(symmetric.PIECE_ROWS, "cpu", 17)


def test_the_kernels_serve_limits_and_both_sides():
    case = build_infonce(18, 0, 12.0, {"directions": ("x_to_y", "y_to_x"), "drop_ratio": 0.9}, width=8).rounded(torch.float32)
    found = ours(case, torch.float32, backend="fused")
    assert all(e <= 1e-5 for e in errors(case, found, formula(case)).values())


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_kernels_are_as_exact_as_fp32_sums_allow(options):
    options = dict(options)
    case = build_infonce(40, options.pop("extra", 11), 12.0, options, width=24).rounded(torch.float32)
    options = {k: v.float() if k in ("queue", "weights") else v for k, v in case.options.items()}
    if len(case.x) == len(case.y):
        # Without hard negatives there is nothing to say about them.
        options.pop("negatives_of", None)
    found = ours(Case(case.loss, case.x, case.y, case.scalars, options), torch.float32, backend="fused", workspace=4000)
    true = formula(
        Case(case.loss, case.x, case.y, case.scalars, {k: v.double() if k == "queue" else v for k, v in options.items()})
    )
    allowed = 64 * torch.finfo(torch.float32).eps * (1 + largest_infonce_logit(case))
    for name, e in errors(case, found, true).items():
        assert e <= allowed, (name, e)


def test_a_second_backward_computes_what_the_first_has_overwritten():
    case = build_infonce(40, 0, 12.0, {"ids": True}, width=64).rounded(torch.float32)
    x, y = (t.float().requires_grad_() for t in (case.x, case.y))
    loss = megabatch.infonce_loss(x, y, 12.0, backend="fused", **case.options)
    # From saved exponentials.
    assert loss.grad_fn.products is not None
    first = [t.clone() for t in torch.autograd.grad(loss, (x, y), retain_graph=True)]
    assert loss.grad_fn.products is None
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(torch.autograd.grad(loss, (x, y)), first, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"drop_ratio": 0.9}, {"hardness": 4.0, "hardness_on": "hard"}], ids=str)
def test_the_kernels_rank_also_what_they_do_not_sum(options):
    case = build_infonce(40, 11, 12.0, options, width=24)
    x, y = case.x.float(), case.y.float()
    found = megabatch.infonce_loss(x, y, 12.0, backend="fused", diagnostics=True, **case.options)[1]
    rank, hardest = reference.ranks(x, y)
    assert torch.equal(found.row_rank, rank) and torch.allclose(found.row_hardest, hardest)
