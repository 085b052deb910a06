"""Distillation equals its formula and OpenCLIP's, on one rank and several, and needs no matrix."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from cases import KINDS, embeddings
from heap import MIB, measured
from hypothesis import given, settings
from ragged import assert_close, gradients, pieces
from world import error_of

import megabatch
from megabatch import reference

pytestmark = pytest.mark.filterwarnings("ignore:scale=")


@st.composite
def problems(draw):
    """Return (x, y, teacher_x, teacher_y), two scales and options."""
    rows, extra = draw(st.integers(1, 24)), draw(st.integers(0, 5))
    symmetric = draw(st.booleans())
    shape = {"rows": rows, "extra": 0 if symmetric else extra, "seed": draw(st.integers(0, 10**6))}
    norm = draw(st.sampled_from((1e-3, 1.0, 30.0)))
    student = embeddings(**shape, width=draw(st.integers(1, 9)), kind=draw(st.sampled_from(KINDS)), norm=norm)
    shape["seed"] += 1
    teacher = embeddings(**shape, width=draw(st.integers(1, 9)), kind=draw(st.sampled_from(KINDS)), norm=norm)
    options = {"symmetric": symmetric, "divergence": draw(st.sampled_from(("cross_entropy", "kl")))}
    if draw(st.booleans()):
        options["weights"] = torch.rand(rows, dtype=torch.float64) + 0.1
    scales = [draw(st.sampled_from((0.01, 1.0, 20.0, 100.0, -3.0))) for _ in range(2)]
    return (*student, *teacher), scales, options


def run(module, tensors, scales, options, **more):
    x, y, teacher_x, teacher_y = tensors

    def loss(x, y, scale):
        return module.distill_loss(x, y, scale, teacher_x, teacher_y, scales[1], **options, **more)

    value, grads = gradients(loss, (x, y, torch.tensor(scales[0], dtype=torch.float64)))
    return [value, *grads]


def check_any_case_is_the_formula_in_fp64(problem, workspace):
    tensors, scales, options = problem
    true = run(reference, tensors, scales, options)
    found = run(megabatch, tensors, scales, options, workspace=workspace)
    largest = max(
        abs(s) * a.norm(dim=1).max() * b.norm(dim=1).max() for s, a, b in zip(scales, tensors[::2], tensors[1::2], strict=True)
    )
    # A logit of size S is rounded by some S·eps, which every later result inherits; gradients are multiplied with the embeddings.
    size = 1 + tensors[0].norm(dim=1).max() * tensors[1].norm(dim=1).max() + abs(scales[0]) * tensors[1].norm(dim=1).max()
    allowed = max(1e-10, 64 * torch.finfo(torch.float64).eps * largest.item() * size.item())
    assert_close(found, true, allowed)


test_any_case_is_the_formula_in_fp64 = settings(max_examples=12, deadline=None, derandomize=True)(
    given(problems(), st.sampled_from((300, 3000, None)))(check_any_case_is_the_formula_in_fp64)
)
test_many_cases_are_the_formula_in_fp64 = pytest.mark.slow(
    settings(max_examples=60, deadline=None, derandomize=True)(
        given(problems(), st.sampled_from((300, 3000, None)))(check_any_case_is_the_formula_in_fp64)
    )
)


@pytest.mark.slow
def test_it_is_the_distillation_term_of_open_clip():
    from open_clip.loss import DistillClipLoss

    x, y = embeddings(20, width=6)
    teacher_x, teacher_y = embeddings(20, width=11, seed=3)
    peer = DistillClipLoss()
    scale = torch.tensor(30.0, dtype=torch.float64)
    found = gradients(lambda x, y, s: megabatch.distill_loss(x, y, s, teacher_x, teacher_y, 50.0), (x, y, scale))
    true = gradients(lambda x, y, s: peer(x, y, s, teacher_x, teacher_y, 50.0)[1], (x, y, scale))
    assert_close([found[0], *found[1]], [true[0], *true[1]])


def test_kl_is_zero_where_student_and_teacher_agree_and_has_the_gradient_of_the_cross_entropy():
    x, y = embeddings(30, width=5, kind="clustered")
    teacher = embeddings(30, width=5, seed=8)
    assert abs(megabatch.distill_loss(x, y, 9.0, x, y, 9.0, divergence="kl")) < 1e-14
    both = [run(megabatch, (x, y, *teacher), (9.0, 9.0), {"divergence": d}) for d in ("kl", "cross_entropy")]
    assert both[0][0] < both[1][0]
    assert_close(both[0][1:], both[1][1:], 1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precisions_round_sums_in_fp32_and_gradients_once(dtype):
    tensors = [t.to(dtype).double() for t in (*embeddings(40, width=16), *embeddings(40, width=24, seed=1))]
    true = run(reference, tensors, (20.0, 40.0), {})
    x, y, teacher_x, teacher_y = (t.to(dtype) for t in tensors)
    x, y, scale = x.requires_grad_(), y.requires_grad_(), torch.tensor(20.0, requires_grad=True)
    loss = megabatch.distill_loss(x, y, scale, teacher_x, teacher_y, 40.0, workspace=5000)
    loss.backward()
    assert loss.dtype == torch.float32 and x.grad.dtype == dtype
    for found, expected in zip((loss, x.grad, y.grad, scale.grad), true, strict=True):
        assert (found.double() - expected).norm() < (torch.finfo(dtype).eps + 1e-5) * (1 + expected.norm())


@pytest.mark.parametrize("norm", [1.0, 40.0])
@pytest.mark.parametrize("options", [{"divergence": "kl", "weights": True}, {"symmetric": False}], ids=["both", "rows"])
def test_the_kernels_are_as_exact_as_fp32_sums_allow(norm, options):
    pytest.importorskip("triton")
    tensors = [t.float().double() for t in (*embeddings(67, width=8, norm=norm), *embeddings(67, width=5, seed=1, norm=norm))]
    weights = {"weights": torch.linspace(0.5, 2, 67, dtype=torch.float64)} if options.get("weights") else {}
    options = {**options, **weights}
    true = run(reference, tensors, (3.0, 5.0), options)
    x, y, teacher_x, teacher_y = (t.float() for t in tensors)
    options = {**options, "backend": "fused", "workspace": 40_000} | {name: w.float() for name, w in weights.items()}
    found = gradients(
        lambda x, y, s: megabatch.distill_loss(x, y, s, teacher_x, teacher_y, 5.0, **options), (x, y, torch.tensor(3.0))
    )
    # Logits reach 5·norm², and are rounded by that times eps in each of a few sums.
    allowed = 32 * torch.finfo(torch.float32).eps * 5 * norm**2
    for a, b in zip((found[0], *found[1]), true, strict=True):
        assert a.isfinite().all() and (a.double() - b).norm() < allowed * (1 + b.norm())


def rank_gradients(rank: int, size: int) -> dict[str, list]:
    found = {}
    tensors = (*embeddings(9, width=4), *embeddings(9, width=6, seed=2))
    x, y, teacher_x, teacher_y = (pieces(t, size)[rank] for t in tensors)
    weights = pieces(torch.linspace(0.5, 2, 9, dtype=torch.float64), size)[rank]
    for name, options in (("both", {"weights": weights, "divergence": "kl"}), ("rows", {"symmetric": False})):

        def loss(x, y, scale, options=options):
            return megabatch.distill_loss(x, y, scale, teacher_x, teacher_y, 7.0, **options, workspace=300, group=dist.group.WORLD)

        value, grads = gradients(loss, (x, y, torch.tensor(5.0, dtype=torch.float64)))
        found[name] = [value, *grads]
    found["error"] = error_of(lambda: megabatch.distill_loss(x, y, 1.0, teacher_x, teacher_y, 1.0 + rank, group=dist.group.WORLD))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_ragged_shards_get_the_gradients_of_one_process(world, size):
    x, y, teacher_x, teacher_y = (*embeddings(9, width=4), *embeddings(9, width=6, seed=2))
    weights = torch.linspace(0.5, 2, 9, dtype=torch.float64)
    results = world.run(size, rank_gradients)
    for name, options in (("both", {"weights": weights, "divergence": "kl"}), ("rows", {"symmetric": False})):
        value, (dx, dy, dscale) = gradients(
            lambda x, y, s, options=options: reference.distill_loss(x, y, s, teacher_x, teacher_y, 7.0, **options),
            (x, y, torch.tensor(5.0, dtype=torch.float64)),
        )
        for rank, found in enumerate(results):
            # DDP divides the gradients of embeddings by the number of ranks; that of the scale is complete everywhere.
            expected = [value, size * pieces(dx, size)[rank], size * pieces(dy, size)[rank], dscale]
            assert_close(found[name], expected, 1e-12)
    assert len({found["error"] for found in results}) == 1 and "teacher_scale is 1.0 on rank 0" in results[0]["error"]


def work(rows: int, workspace: int) -> None:
    x, y = (torch.randn(rows, 32).requires_grad_() for _ in range(2))
    teacher_x, teacher_y = (torch.randn(rows, 16) for _ in range(2))
    megabatch.distill_loss(x, y, 0.5, teacher_x, teacher_y, 0.5, workspace=workspace).backward()


@pytest.mark.slow
def test_memory_is_linear_in_the_batch():
    small, large = (measured(work, (64, 4096), (rows, 4 * MIB)) for rows in (2000, 6000))
    # Inputs, gradients, transposed panels and sums; one of the two similarity matrices takes 137 MiB.
    assert large - small < 14 * 4000 * 32 * 4 + 2 * MIB
    assert large < 2 * 4 * MIB + 14 * 6000 * 32 * 4 + 4 * MIB


def test_results_repeat_bit_for_bit_and_a_second_derivative_is_refused():
    tensors = (*embeddings(33, width=7), *embeddings(33, width=5, seed=1))
    first, second = (run(megabatch, tensors, (20.0, 30.0), {}, workspace=900) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    x = tensors[0].clone().requires_grad_()
    loss = megabatch.distill_loss(x, *tensors[1:2], 3.0, *tensors[2:], 3.0)
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dx.sum().backward()


def test_wrong_teachers_are_refused():
    x, y = embeddings(5)
    call = megabatch.distill_loss
    for message, mistake in {
        "teacher_x has shape": lambda: call(x, y, 1.0, x[:4], y, 1.0),
        "teacher_y has shape": lambda: call(x, y, 1.0, x, y[0], 1.0),
        "width and dtype must be equal": lambda: call(x, y, 1.0, x[:, :3], y, 1.0),
        "teacher_x requires a gradient": lambda: call(x, y, 1.0, x.clone().requires_grad_(), y, 1.0),
        "divergence='js'": lambda: call(x, y, 1.0, x, y, 1.0, divergence="js"),
        "a symmetric loss needs equally many": lambda: call(x, torch.cat((y, y)), 1.0, x, torch.cat((y, y)), 1.0),
    }.items():
        with pytest.raises(ValueError, match=message):
            mistake()
    with pytest.raises(TypeError, match="divergence"):
        megabatch.DistillLoss()(x, y, 1.0, x, y, 1.0, divergence="kl")


def test_losses_on_k_documents_are_the_formulas_and_skip_absent_documents():
    g = torch.Generator().manual_seed(0)
    scores, teacher = (torch.randn(7, 4, dtype=torch.float64, generator=g) for _ in range(2))
    for name, options in (("margin_mse_loss", {}), ("listwise_kl_loss", {"temperature": 2.5})):
        found = gradients(lambda s, name=name, o=options: getattr(megabatch, name)(s, teacher, **o), (scores,))
        true = gradients(lambda s, name=name, o=options: getattr(reference, name)(s, teacher, **o), (scores,))
        assert_close([found[0], *found[1]], [true[0], *true[1]], 1e-14)
        # A row that lacks its last document is a row with one document less.
        padded = teacher.clone()
        padded[:, 3] = -torch.inf
        value, (ds,) = gradients(lambda s, name=name, o=options, t=padded: getattr(megabatch, name)(s, t, **o), (scores,))
        true = gradients(lambda s, name=name, o=options: getattr(reference, name)(s, teacher[:, :3], **o), (scores[:, :3],))
        assert_close([value, ds[:, :3]], [true[0], *true[1]], 1e-14)
        assert ds[:, 3].abs().max() == 0
        # Equal weights are no weights.
        assert_close([getattr(megabatch, name)(scores, teacher, weights=torch.full((7,), 3.0), **options)], [found[0]], 1e-14)


@pytest.mark.slow
def test_margin_mse_is_that_of_sentence_transformers():
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    g = torch.Generator().manual_seed(0)
    query, positive, *negatives = torch.randn(5, 6, 8, dtype=torch.float64, generator=g)
    labels = torch.randn(6, 3, dtype=torch.float64, generator=g)
    peer = losses.MarginMSELoss(torch.nn.Identity()).compute_loss_from_embeddings([query, positive, *negatives], labels)
    scores = torch.stack([(query * document).sum(1) for document in (positive, *negatives)], dim=1)
    # Its labels are margins: a teacher whose positive has the score 0 has them as negated scores.
    teacher = torch.cat((torch.zeros(6, 1, dtype=torch.float64), -labels), dim=1)
    assert torch.allclose(megabatch.margin_mse_loss(scores, teacher), peer)
