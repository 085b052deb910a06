"""InfoNCE over directions and its relatives: value and gradients equal the formula, for any input, option and tile size."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from cases import Case, embeddings, errors, formula, ours
from infonce_cases import ALL, build_infonce, largest_infonce_logit, random_case

import megabatch
from megabatch import reference
from megabatch.losses import symmetric

pytestmark = [pytest.mark.filterwarnings("ignore:scale=")]
WORKSPACES = (300, 2000, None)
SUBSETS = [subset for size in range(1, 5) for subset in itertools.combinations(ALL, size)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Cut symmetric products of a few rows already."""
    monkeypatch.setitem(symmetric.PIECE_ROWS, "cpu", 6)


def assert_exact(case: Case, **more) -> None:
    # Two orders of summation round a logit of size S differently by some S·eps; above 1e4 that is more than 1e-10.
    allowed = max(1e-10, 64 * torch.finfo(torch.float64).eps * largest_infonce_logit(case))
    for name, e in errors(case, ours(case, **more), formula(case)).items():
        assert e < allowed, (case.options, name, e)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("directions", SUBSETS, ids="+".join)
def test_every_set_of_directions_is_the_formula(directions):
    for extra, options in itertools.product((0, 7), ({}, {"ids": True, "weights": True, "drop_above": 0.1})):
        assert_exact(build_infonce(17, extra, 9.0, {"directions": directions, **options}), workspace=900)


def test_any_case_is_the_formula_in_fp64():
    for seed in range(40):
        assert_exact(random_case(seed), workspace=WORKSPACES[seed % 3])


@pytest.mark.slow
def test_many_cases_are_the_formula_in_fp64():
    for seed in range(1000, 1600):
        assert_exact(random_case(seed), workspace=WORKSPACES[seed % 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_case_is_as_exact_as_fp32_sums_allow(dtype):
    for seed in range(3000, 3030):
        case = random_case(seed)
        options = {k: v.to(dtype).double() if k in ("queue", "weights") else v for k, v in case.options.items()}
        case = Case(case.loss, case.x.to(dtype).double(), case.y.to(dtype).double(), case.scalars, options)
        if any(name in case.options for name in ("drop_above", "drop_ratio", "guide")):
            # A similarity at a limit may be rounded to its other side.
            continue
        rounded = {k: v.to(dtype) if k == "queue" else v for k, v in options.items()}
        found = Case(case.loss, case.x, case.y, case.scalars, rounded)
        true = formula(case)
        sums = 64 * torch.finfo(torch.float32).eps * (1 + largest_infonce_logit(case))
        for name, e in errors(case, ours(found, dtype, workspace=WORKSPACES[seed % 3]), true).items():
            largest = true[name].abs().max()
            fits = name not in ("x", "y") or largest == 0 or torch.finfo(dtype).tiny <= largest < torch.finfo(dtype).max
            # Half a unit in the last place of the gradient's dtype for each product that is rounded.
            rounding = 2 * torch.finfo(dtype).eps if name in ("x", "y") or (name, dtype) == ("scale", torch.bfloat16) else 0
            assert not fits or e <= sums + rounding or sums > 1, (case.options, name, e)


def test_one_direction_is_the_softmax_loss_and_two_separate_ones_the_symmetric_one():
    x, y = embeddings(23, width=6)
    assert torch.equal(megabatch.infonce_loss(x, y, 9.0), megabatch.clip_loss(x, y, 9.0, symmetric=False))
    both = megabatch.infonce_loss(x, y, 9.0, directions=("x_to_y", "y_to_x"), partition="separate")
    assert torch.equal(both, megabatch.clip_loss(x, y, 9.0))


def test_the_formula_of_joint_directions_is_one_cross_entropy_over_all_similarities():
    x, y = embeddings(12, 5, width=6)
    owner = torch.arange(5)
    itself = torch.eye(12, dtype=torch.bool)
    of_own = torch.zeros(12, 5, dtype=torch.bool)
    of_own[owner, torch.arange(5)] = True
    candidates = [
        x @ y.T,
        y[:12] @ x.T,
        (x @ x.T).masked_fill(itself, -torch.inf),
        (y[:12] @ y.T).masked_fill(torch.cat([itself, of_own], 1), -torch.inf),
    ]
    expected = F.cross_entropy(7.0 * torch.cat(candidates, 1), torch.arange(12))
    assert torch.allclose(reference.infonce_loss(x, y, 7.0, directions=ALL, negatives_of=owner), expected)


def test_hardness_weights_the_gradient_and_not_the_positive():
    """The gradient of scale·z + α·constant(z) is scale·p, with p the softmax that contains α."""
    x, y = embeddings(9, width=4)
    a = x.clone().requires_grad_()
    megabatch.infonce_loss(a, y, 5.0, hardness=3.0).backward()
    z = x @ y.T
    logits = 5.0 * z + 3.0 * (z - torch.diag(z.diagonal()))
    p = logits.softmax(1) - torch.eye(9)
    assert torch.allclose(a.grad, 5.0 * p @ y / 9, rtol=1e-12)


def test_own_negatives_alone_need_no_other_samples():
    x, y = embeddings(6, 9, width=4)
    owner = torch.tensor([0, 0, 0, 2, 5, 5, 3, 3, 3])
    expected = [F.cross_entropy(8.0 * torch.cat([y[i : i + 1], y[6:][owner == i]]) @ x[i], torch.tensor(0)) for i in range(6)]
    found = megabatch.infonce_loss(x, y, 8.0, in_batch=False, negatives_of=owner)
    assert torch.allclose(found, torch.stack(expected).mean())
    alone = [megabatch.infonce_loss(x[i : i + 1], torch.cat([y[i : i + 1], y[6:][owner == i]]), 8.0) for i in range(6)]
    assert torch.allclose(found, torch.stack(alone).mean())


def test_a_queue_is_further_negatives_without_a_gradient():
    x, y = embeddings(9, 5, width=4)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    megabatch.infonce_loss(a, y[:9], 6.0, queue=y[9:]).backward()
    megabatch.infonce_loss(b, y, 6.0).backward()
    assert torch.allclose(a.grad, b.grad, rtol=1e-12)


CONTRADICTIONS = {
    "no direction": {"directions": ()},
    "unknown direction": {"directions": ("x_to_z",)},
    "direction twice": {"directions": ("x_to_y", "x_to_y")},
    "separate without the positive": {"directions": ("x_to_y", "x_to_x"), "partition": "separate"},
    "an anchor without the positive": {"directions": ("x_to_y", "y_to_y"), "partition": "by_anchor"},
    "partition": {"partition": "both"},
    "positives on the same side": {"directions": ("x_to_y", "y_to_y"), "duplicates": "positive"},
    "positives with hardness": {"duplicates": "positive", "hardness": 1.0},
    "hardness with smoothing": {"hardness": 1.0, "label_smoothing": 0.1},
    "hardness without its direction": {"directions": ("y_to_x",), "hardness": 1.0},
    "own negatives in other directions": {"in_batch": False, "directions": ALL},
    "margin of another direction": {"drop_above": {"y_to_x": 0.1}},
    "margin that is no number": {"drop_ratio": {"x_to_y": "much"}},
    "hardness_on": {"hardness": 1.0, "hardness_on": "some"},
    "diagnostics of one side": {"directions": ("x_to_x",), "diagnostics": True},
    "queue without its direction": {"directions": ("y_to_x",), "queue": torch.ones(3, 4)},
    "queue of another width": {"queue": torch.ones(3, 5)},
    "queue with a gradient": {"queue": torch.ones(3, 4, requires_grad=True)},
    "owners out of range": {"negatives_of": torch.tensor([0, 5])},
    "owners of another number": {"negatives_of": torch.tensor([0])},
    "owners that are no integers": {"negatives_of": torch.tensor([0.0, 1.0])},
    "owners missing, own negatives": {"in_batch": False},
    "owners missing, hardness": {"hardness": 1.0, "hardness_on": "hard"},
    "owners missing, y_to_y": {"directions": ("x_to_y", "y_to_y")},
    "a number for in_batch": {"in_batch": 1},
    "a tensor for label_smoothing": {"label_smoothing": torch.tensor(0.0)},
    "several numbers for label_smoothing": {"label_smoothing": torch.tensor([0.0, 0.1])},
    "a tensor for hardness": {"hardness": torch.tensor(0.0)},
    "guide and queue": {"guide": megabatch.Guide(torch.ones(5, 3), torch.ones(7, 3)), "queue": torch.ones(3, 4)},
    "guide of another length": {"guide": megabatch.Guide(torch.ones(4, 3), torch.ones(7, 3))},
    "guide with a gradient": {"guide": megabatch.Guide(torch.ones(5, 3, requires_grad=True), torch.ones(7, 3))},
    "guide that is none": {"guide": torch.ones(5, 3)},
    "guide's margin": {"guide": megabatch.Guide(torch.ones(5, 3), torch.ones(7, 3), margin_kind="twice")},
    "guide on fused tiles": {"guide": megabatch.Guide(torch.ones(5, 3), torch.ones(7, 3)), "backend": "fused"},
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_options_that_make_no_sense_together_raise(name):
    x, y = torch.ones(5, 4), torch.ones(7, 4)
    with pytest.raises(ValueError, match=":"):
        megabatch.infonce_loss(x, y, 5.0, **CONTRADICTIONS[name])


@pytest.mark.parametrize("extra", [0, 6])
@pytest.mark.parametrize("options", [{}, {"drop_ratio": 0.9}, {"hardness": 4.0}, {"hardness": 4.0, "hardness_on": "hard"}], ids=str)
def test_diagnostics_rank_every_positive_among_all_negatives(extra, options):
    x, y = embeddings(33, extra, width=5, seed=2)
    owner = torch.arange(extra)
    ids = torch.arange(len(y)) % 20
    arguments = {"directions": ("x_to_y", "y_to_x", "x_to_x"), "ids": ids, "negatives_of": owner, "workspace": 600, **options}
    value, found = megabatch.infonce_loss(x, y, 3.0, diagnostics=True, **arguments)
    rank, hardest = reference.ranks(x, y, ids)
    assert torch.equal(found.row_rank, rank) and torch.allclose(found.row_hardest, hardest)
    rank, hardest = reference.ranks(y[:33], x, ids[:33])
    assert torch.equal(found.column_rank, rank) and torch.allclose(found.column_hardest, hardest)
    assert torch.equal(value, megabatch.infonce_loss(x, y, 3.0, **arguments))


def test_diagnostics_of_own_negatives_rank_those():
    x, y = embeddings(5, 8, width=4)
    owner = torch.tensor([0, 0, 1, 1, 1, 3, 3, 4])
    found = megabatch.infonce_loss(x, y, 3.0, in_batch=False, negatives_of=owner, diagnostics=True)[1]
    for i in range(5):
        similarities = y[5:][owner == i] @ x[i]
        assert found.row_rank[i] == (similarities >= (x[i] * y[i]).sum()).sum()
        assert found.row_hardest[i] == pytest.approx(similarities.max().item() if len(similarities) else -torch.inf)


@pytest.mark.parametrize("frozen", ["x", "y", "both"])
def test_a_frozen_side_gets_no_gradient_and_the_rest_is_right(frozen):
    case = build_infonce(13, 4, 6.0, {"directions": ALL})
    true = formula(case)
    x, y = case.x.clone().requires_grad_(frozen == "y"), case.y.clone().requires_grad_(frozen == "x")
    scale = torch.tensor(6.0, dtype=torch.float64, requires_grad=True)
    megabatch.infonce_loss(x, y, scale, workspace=900, **case.options).backward()
    assert (x.grad is None) == (frozen != "y") and (y.grad is None) == (frozen != "x")
    for name, found in (("x", x.grad), ("y", y.grad), ("scale", scale.grad)):
        assert found is None or torch.allclose(found, true[name], rtol=1e-10)


@pytest.mark.parametrize("name", ["ids", "negatives_of", "queue", "guide"])
def test_an_input_modified_before_backward_is_named(name):
    x, y = embeddings(6, 3, width=4)
    guide = megabatch.Guide(*embeddings(6, 3, width=3))
    tensors = {"ids": torch.arange(9), "negatives_of": torch.arange(3), "queue": y.clone(), "guide": guide}
    tensors.pop("queue" if name == "guide" else "guide")
    loss = megabatch.infonce_loss(x.requires_grad_(), y, 4.0, **tensors)
    modified = guide.y if name == "guide" else tensors[name]
    modified[0] += 0
    with pytest.raises(RuntimeError, match=name):
        loss.backward()


def test_second_derivatives_raise_and_repeated_backwards_are_equal():
    x, y = (t.requires_grad_() for t in embeddings(8, width=4))
    loss = megabatch.infonce_loss(x, y, 4.0, directions=ALL)
    first, second = (torch.autograd.grad(loss, (x, y), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        gradient.sum().backward()


def test_autocast_rounds_the_embeddings_and_nothing_else():
    case = build_infonce(20, 4, 30.0, {"directions": ALL, "queue": 5})
    rounded = {k: v.bfloat16().double() if k == "queue" else v for k, v in case.options.items()}
    true = formula(Case(case.loss, case.x.bfloat16().double(), case.y.bfloat16().double(), case.scalars, rounded))
    x, y = case.x.float().requires_grad_(), case.y.float().requires_grad_()
    options = {**case.options, "queue": case.options["queue"].float()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = megabatch.infonce_loss(x, y, 30.0, **options)
    value.backward()
    assert value.dtype == x.grad.dtype == torch.float32
    assert value.item() == pytest.approx(true["value"].item(), rel=1e-6)
    assert (x.grad.double() - true["x"]).norm() < 4e-3 * true["x"].norm()


def test_the_module_stores_options_and_takes_tensors_with_each_batch():
    x, y = embeddings(9, 4, width=4)
    options = {"directions": ("x_to_y", "y_to_y"), "hardness": 2.0}
    inputs = {"negatives_of": torch.arange(4), "queue": y[:3]}
    module = megabatch.InfoNCELoss(**options)
    assert torch.equal(module(x, y, 4.0, **inputs), megabatch.infonce_loss(x, y, 4.0, **options, **inputs))
    with pytest.raises(TypeError, match="queue"):
        megabatch.InfoNCELoss(queue=y)


def named_loss(module, name: str, inputs: list, **options) -> list[torch.Tensor]:
    tensors = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    scale = torch.tensor(8.0, dtype=torch.float64, requires_grad=True)
    value = getattr(module, name)(*tensors, scale, **options)
    value.backward()
    return [value.detach(), scale.grad, *(t.grad for t in tensors if t.is_floating_point())]


@pytest.mark.parametrize("kind", ["random", "clustered", "identical"])
def test_nt_xent_supcon_and_dcl_are_their_formulas(kind):
    weights = torch.rand(20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x, y = embeddings(20, width=6, kind=kind)
    z, labels = embeddings(20, width=6, kind=kind, seed=3)[0], torch.arange(20) % 7
    for name, inputs, options in (
        ("nt_xent_loss", [x, y], {}),
        ("nt_xent_loss", [x, y], {"ids": labels, "weights": weights}),
        ("supcon_loss", [z, labels], {}),
        ("supcon_loss", [z, torch.arange(20) // 2 * (torch.arange(20) > 4)], {"weights": weights}),
        ("supcon_loss", [z, torch.arange(20).clamp(min=12)], {}),  # rows without a positive
        ("dcl_loss", [x, y], {}),
        ("dcl_loss", [x, y], {"directions": ALL, "partition": "by_anchor"}),
        ("dcl_loss", [x, y], {"directions": ALL, "partition": "joint", "ids": labels, "drop_above": 0.1, "weights": weights}),
    ):
        pairs = zip(named_loss(megabatch, name, inputs, **options), named_loss(reference, name, inputs, **options), strict=True)
        # Relative to the size of the terms: with identical rows, gradients cancel to zero.
        assert all(torch.allclose(found, true, rtol=1e-10, atol=1e-12) for found, true in pairs), (name, options)


def test_the_formulas_of_nt_xent_and_supcon_are_those_of_their_papers():
    a, b = embeddings(7, width=5)
    z = torch.cat([a, b])
    exponentials = (4.0 * z @ z.T).exp() * (1 - torch.eye(14))
    other_view = torch.arange(14).roll(7)
    expected = -(exponentials[torch.arange(14), other_view] / exponentials.sum(1)).log().mean()
    assert torch.allclose(reference.nt_xent_loss(a, b, 4.0), expected)
    # It is InfoNCE with one softmax for the anchors of each view.
    assert torch.allclose(reference.infonce_loss(a, b, 4.0, directions=ALL, partition="by_anchor"), expected)
    # Two views of each sample are two rows with one label: SupCon is then NT-Xent.
    assert torch.allclose(reference.supcon_loss(z, torch.arange(7).repeat(2), 4.0), expected)
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 0, 1, 1, 1, 2, 2, 0, 1])
    terms = []
    for i in range(14):
        positives = [j for j in range(14) if j != i and labels[j] == labels[i]]
        terms.append(torch.stack([-(exponentials[i, p] / exponentials[i].sum()).log() for p in positives]).mean())
    assert torch.allclose(reference.supcon_loss(z, labels, 4.0), torch.stack(terms).mean())


def test_dcl_leaves_the_positive_out_of_the_denominator():
    x, y = embeddings(7, width=5)
    logits = 4.0 * x @ y.T
    negatives = logits.masked_fill(torch.eye(7, dtype=torch.bool), -torch.inf)
    both = (negatives.logsumexp(1) + negatives.logsumexp(0)) / 2 - logits.diagonal()
    assert torch.allclose(megabatch.dcl_loss(x, y, 4.0), both.mean())
    assert megabatch.dcl_loss(x[:1], y[:1], 4.0) == 0
