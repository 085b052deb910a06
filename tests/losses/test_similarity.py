"""The softmax loss over any similarity, and late interaction, equal their formulas on one rank and several, tile by tile."""

from __future__ import annotations

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
from megabatch.tiles import maxsim as eager_maxsim

pytestmark = pytest.mark.filterwarnings("ignore:scale=")


def distance(x, y):
    """A similarity that is no inner product, of dicts of tensors."""
    spread = (x["a"][:, None] - y["a"]).square().sum(2)
    return x["bias"][:, None] * torch.exp(-spread) - spread * y["b"]["c"]


def tree(rows: int, seed: int, kind: str = "random", norm: float = 1.0):
    """Return the tensors of x and y for `distance`."""
    x, y = embeddings(rows, width=3, kind=kind, norm=norm, seed=seed)
    g = torch.Generator().manual_seed(seed)
    bias, c = torch.rand(2, rows, dtype=torch.float64, generator=g)
    return x, bias, y, c


def over_trees(module, options):
    def loss(x, bias, y, c, scale):
        return module.similarity_loss({"a": x, "bias": bias}, {"a": y, "b": {"c": c}}, scale, similarity=distance, **options)

    return loss


@st.composite
def options_for(draw, rows: int, documents: int):
    options = {"symmetric": draw(st.booleans()) if rows == documents else False}
    if draw(st.booleans()):
        options["ids"] = torch.randint(0, max(1, rows // 2), (documents,), generator=torch.Generator().manual_seed(rows))
        options["duplicates"] = draw(st.sampled_from(("mask", "positive")))
    if draw(st.booleans()):
        options["label_smoothing"] = 0.2
    if draw(st.booleans()):
        options["weights"] = torch.linspace(0.1, 2, rows, dtype=torch.float64)
    return options


def check_any_similarity_is_the_formula_in_fp64(data, workspace):
    rows = data.draw(st.integers(1, 17))
    kind, norm = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from((0.1, 1.0, 10.0)))
    options = data.draw(options_for(rows, rows))
    scale = torch.tensor(data.draw(st.sampled_from((0.01, 1.0, 30.0, -2.0))), dtype=torch.float64)
    tensors = *tree(rows, data.draw(st.integers(0, 10**6)), kind, norm), scale
    found = gradients(over_trees(megabatch, {**options, "workspace": workspace}), tensors)
    true = gradients(over_trees(reference, options), tensors)
    # Scores reach 4·norm², and the gradient of a distance is as large as the scale times the norm.
    allowed = max(1e-10, 64 * torch.finfo(torch.float64).eps * 4 * norm**2 * abs(scale) * (1 + abs(scale) * norm))
    assert_close([found[0], *found[1]], [true[0], *true[1]], allowed)


test_any_similarity_is_the_formula_in_fp64 = settings(max_examples=12, deadline=None, derandomize=True)(
    given(st.data(), st.sampled_from((900, 4000, None)))(check_any_similarity_is_the_formula_in_fp64)
)
test_many_similarities_are_the_formula_in_fp64 = pytest.mark.slow(
    settings(max_examples=60, deadline=None, derandomize=True)(
        given(st.data(), st.sampled_from((900, 4000, None)))(check_any_similarity_is_the_formula_in_fp64)
    )
)


def check_any_case_of_late_interaction_is_the_formula_in_fp64(data, workspace):
    rows, extra = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 4))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    query_tokens, document_tokens = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    x = torch.randn(rows, query_tokens, 4, dtype=torch.float64, generator=g)
    y = torch.randn(rows + extra, document_tokens, 4, dtype=torch.float64, generator=g)
    options = data.draw(options_for(rows, rows + extra))
    options |= {"normalize": data.draw(st.booleans()), "average_tokens": data.draw(st.booleans())}
    if data.draw(st.booleans()):
        # Some queries and documents have no tokens at all.
        options["x_mask"] = torch.rand(x.shape[:2], generator=g) < 0.6
        options["y_mask"] = (torch.rand(y.shape[:2], generator=g) < 0.6).float()
    scale = torch.tensor(data.draw(st.sampled_from((0.1, 3.0, 20.0))), dtype=torch.float64)
    found = gradients(lambda *t: megabatch.maxsim_loss(*t, **options, workspace=workspace), (x, y, scale))
    true = gradients(lambda *t: reference.maxsim_loss(*t, **options), (x, y, scale))
    assert_close([found[0], *found[1]], [true[0], *true[1]], 1e-10)


test_any_case_of_late_interaction_is_the_formula_in_fp64 = settings(max_examples=12, deadline=None, derandomize=True)(
    given(st.data(), st.sampled_from((3000, 30000, None)))(check_any_case_of_late_interaction_is_the_formula_in_fp64)
)
test_many_cases_of_late_interaction_are_the_formula_in_fp64 = pytest.mark.slow(
    settings(max_examples=60, deadline=None, derandomize=True)(
        given(st.data(), st.sampled_from((3000, 30000, None)))(check_any_case_of_late_interaction_is_the_formula_in_fp64)
    )
)


def test_masked_document_tokens_never_win_and_padding_changes_nothing():
    x, y = -torch.ones(2, 1, 3), torch.ones(2, 2, 3)
    mask = torch.tensor([[1, 0], [1, 1]])
    y[1] *= 2
    y.requires_grad_()
    # All similarities are negative: a padded token whose similarity is 0 would win, as it does if scores are multiplied by masks.
    loss = megabatch.maxsim_loss(x, y, 1.0, y_mask=mask)
    assert loss.item() == pytest.approx(F.cross_entropy(torch.tensor([[-3.0, -6.0]] * 2), torch.arange(2)).item())
    loss.backward()
    assert y.grad[0, 1].abs().max() == 0 < y.grad[0, 0].abs().max()
    wide = F.pad(y.detach(), (0, 0, 0, 5), value=9.0)
    assert megabatch.maxsim_loss(x, wide, 1.0, y_mask=F.pad(mask, (0, 5))) == loss


@pytest.mark.slow
def test_late_interaction_is_that_of_sentence_transformers():
    maxsim = pytest.importorskip("sentence_transformers.util.similarity").maxsim
    x, y = torch.randn(6, 4, 8), torch.randn(6, 5, 8)
    masks = {"x_mask": torch.rand(6, 4) < 0.7, "y_mask": torch.rand(6, 5) < 0.7}
    masks["y_mask"][:, 0] = True

    def peer(x, y):
        return F.cross_entropy(2.0 * maxsim(x, y, masks["x_mask"], masks["y_mask"]), torch.arange(6))

    found, true = gradients(lambda x, y: megabatch.maxsim_loss(x, y, 2.0, **masks), (x, y)), gradients(peer, (x, y))
    assert_close([found[0], *found[1]], [true[0], *true[1]], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_scores_of_late_interaction_are_not_rounded(dtype, autocast):
    x, y = (F.normalize(torch.randn(12, t, 16), dim=-1).to(dtype).double() for t in (6, 9))
    true = gradients(lambda x, y: reference.maxsim_loss(x, y, 20.0), (x, y))
    x, y = (t.to(torch.float32 if autocast else dtype).requires_grad_() for t in (x, y))
    with torch.autocast("cpu", dtype=dtype if dtype != torch.float32 else None, enabled=autocast and dtype != torch.float32):
        loss = megabatch.maxsim_loss(x, y, 20.0, workspace=50_000)
        loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(true[0].item(), rel=1e-5)
    for found, expected in zip((x.grad, y.grad), true[1], strict=True):
        assert (found.double() - expected).norm() < (4 * torch.finfo(dtype).eps + 1e-5) * expected.norm()


@pytest.mark.parametrize("workspace", [None, 500], ids=["one tile", "several"])
def test_gradients_of_late_interaction_are_not_rounded_where_backward_is_under_autocast(workspace):
    x, y = (torch.randn(5, t, 8).requires_grad_() for t in (3, 5))
    found = []
    for inside in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            loss = megabatch.maxsim_loss(x, y, 2.0, workspace=workspace)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            found.append(torch.autograd.grad(loss, (x, y)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Bilinear(nn.Module):
    """A similarity with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3))

    def forward(self, x, y):
        return x @ self.weight @ y.T


def test_parameters_of_the_similarity_get_their_gradient_or_an_error():
    x, y = embeddings(7, width=3)
    found, true = Bilinear(), Bilinear()
    megabatch.similarity_loss(x, y, 2.0, similarity=found, workspace=500).backward()
    reference.similarity_loss(x, y, 2.0, similarity=true).backward()
    assert torch.allclose(found.weight.grad, true.weight.grad, rtol=1e-12)
    with pytest.raises(ValueError, match=r"shape \(3, 3\) that requires a gradient"):
        megabatch.similarity_loss(x, y, 2.0, similarity=lambda a, b: found(a, b))
    hidden = torch.ones(2, dtype=torch.float64, requires_grad=True)
    for both in (lambda a, b: found(a, b) + hidden.sum(), lambda a, b: hidden.sum() + found(a, b)):
        with pytest.raises(ValueError, match=r"shape \(2,\) that requires a gradient"):
            megabatch.similarity_loss(x, y, 2.0, similarity=both, parameters=list(found.parameters()))
    # A parameter may be the result of a computation.
    computed = found.weight * 2
    found.weight.grad = None
    megabatch.similarity_loss(x, y, 1.0, similarity=lambda a, b: a @ computed @ b.T, parameters=[computed]).backward()
    assert torch.allclose(found.weight.grad, true.weight.grad, rtol=1e-12)


def rank_results(rank: int, size: int) -> dict[str, object]:
    world = dist.group.WORLD
    scale = torch.tensor(3.0, dtype=torch.float64)
    tensors = [pieces(t, size)[rank] for t in tree(9, 0)]
    ids = pieces(torch.arange(9) % 5, size)[rank]
    weights = pieces(torch.linspace(0.5, 2, 9, dtype=torch.float64), size)[rank]
    options = {"ids": ids, "weights": weights, "label_smoothing": 0.1, "group": world, "workspace": 900}
    found: dict[str, object] = {"any": gradients(over_trees(megabatch, options), (*tensors, scale))}
    module = Bilinear()
    x, y = (pieces(t, size)[rank] for t in embeddings(9, width=3))
    megabatch.similarity_loss(x, y, 2.0, similarity=module, group=world).backward()
    found["parameter"] = torch.zeros(3, 3, dtype=torch.float64) if module.weight.grad is None else module.weight.grad
    # Pad widths differ between ranks.
    queries, documents, mask = late_batch()
    queries, documents, mask = (pieces(t, size)[rank] for t in (queries, documents, mask))
    widths = mask.any(0).sum() if len(mask) else 1
    options = {"y_mask": mask[:, :widths], "group": world, "workspace": 3000}
    found["late"] = gradients(lambda x, y, s: megabatch.maxsim_loss(x, y, s, **options), (queries, documents[:, :widths], scale))
    found["error"] = error_of(lambda: megabatch.maxsim_loss(queries, documents, 1.0, average_tokens=rank == 0, group=world))
    found["wrong"] = error_of(lambda: megabatch.maxsim_loss(queries, documents[0] if rank == 0 else documents, 1.0, group=world))
    return found


def late_batch():
    g = torch.Generator().manual_seed(1)
    queries, documents = (torch.randn(9, t, 4, dtype=torch.float64, generator=g) for t in (3, 6))
    mask = torch.arange(6) < torch.tensor([2, 4, 3, 1, 4, 2, 6, 5, 3])[:, None]
    return queries, documents, mask


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_ragged_shards_get_the_gradients_of_one_process(world, size):
    results = world.run(size, rank_results)
    scale = torch.tensor(3.0, dtype=torch.float64)
    options = {"ids": torch.arange(9) % 5, "weights": torch.linspace(0.5, 2, 9, dtype=torch.float64), "label_smoothing": 0.1}
    queries, documents, mask = late_batch()
    expected = {
        "any": gradients(over_trees(reference, options), (*tree(9, 0), scale)),
        "late": gradients(lambda x, y, s: reference.maxsim_loss(x, y, s, y_mask=mask), (queries, documents, scale)),
    }
    for rank, found in enumerate(results):
        for name, (value, (*grads, dscale)) in expected.items():
            shards = [size * pieces(t, size)[rank] for t in grads]
            shards = [s[:, : f.shape[1]] if s.ndim == 3 else s for s, f in zip(shards, found[name][1], strict=False)]
            assert_close([found[name][0], *found[name][1]], [value, *shards, dscale], 1e-12)
    true = Bilinear()
    reference.similarity_loss(*embeddings(9, width=3), 2.0, similarity=true).backward()
    # What DDP averages.
    assert torch.allclose(sum(found["parameter"] for found in results) / size, true.weight.grad, rtol=1e-12)
    for name, message in (("error", "average_tokens is True on rank 0"), ("wrong", "rank 0: y has shape")):
        assert len({found[name] for found in results}) == 1 and message in results[0][name]


def work(rows: int, workspace: int) -> None:
    x, y = torch.randn(rows, 8, 16).requires_grad_(), torch.randn(rows, 24, 16).requires_grad_()
    megabatch.maxsim_loss(x, y, 0.5, workspace=workspace).backward()


@pytest.mark.slow
def test_memory_is_linear_in_the_batch():
    small, large = (measured(work, (32, 40960), (rows, 4 * MIB)) for rows in (256, 1024))
    tokens = 16 * (8 + 24) * 4
    # The similarities of all tokens take 768 MiB at 1,024 rows.
    assert large - small < 10 * 768 * tokens + 4 * MIB
    assert large < 4 * 4 * MIB + 10 * 1024 * tokens


def test_results_repeat_bit_for_bit_and_a_second_derivative_is_refused():
    tensors = *tree(21, 4), torch.tensor(5.0, dtype=torch.float64)
    first, second = (gradients(over_trees(megabatch, {"workspace": 900}), tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    x, y = embeddings(5)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(megabatch.similarity_loss(x, y, 1.0, similarity=torch.inner), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        dx.sum().backward()


def test_wrong_inputs_are_refused():
    x, y = embeddings(5)
    tokens = torch.randn(5, 3, 8)
    call, late = megabatch.similarity_loss, megabatch.maxsim_loss
    for message, mistake in {
        "similarity returned": lambda: call(x, y, 1.0, similarity=lambda a, b: (a * b).sum(1)),
        "x holds no tensors": lambda: call((), y, 1.0, similarity=torch.inner),
        "x is a int": lambda: call((x, 3), y, 1.0, similarity=torch.inner),
        "equally many rows": lambda: call((x, x[:3]), y, 1.0, similarity=torch.inner),
        "y must hold the positive": lambda: call(x, y[:3], 1.0, similarity=torch.inner),
        "pair_bytes=0": lambda: call(x, y, 1.0, similarity=torch.inner, pair_bytes=0),
        "a symmetric loss needs equally many": lambda: late(tokens[:3], tokens, 1.0, symmetric=True),
        "x has shape": lambda: late(tokens[0], tokens, 1.0),
        "y_mask has shape": lambda: late(tokens, tokens, 1.0, y_mask=torch.ones(5, 4)),
        "x has width 8": lambda: late(tokens, tokens[..., :4], 1.0),
        "y is a float": lambda: call(tokens, [[1.0]], 1.0, similarity=torch.inner),
        "y is a list": lambda: late(tokens, [tokens], 1.0),
    }.items():
        with pytest.raises(ValueError, match=message):
            mistake()


def test_late_interaction_of_one_tile_computes_its_scores_once_and_again_for_a_second_backward(monkeypatch):
    calls = []
    scores = eager_maxsim.maxsim_scores
    monkeypatch.setattr(eager_maxsim, "maxsim_scores", lambda *t, **o: calls.append(o["save"]) or scores(*t, **o))
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(6, n, 8, generator=g, dtype=torch.float64).requires_grad_() for n in (3, 5))
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    ids = torch.arange(6) % 4
    leaves = x, y, scale
    loss = megabatch.maxsim_loss(*leaves, ids=ids, symmetric=True)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert calls == [True]
    second = torch.autograd.grad(3 * loss, leaves)
    assert calls == [True, True]
    true = torch.autograd.grad(reference.maxsim_loss(*leaves, ids=ids, symmetric=True), leaves)
    assert_close(first, true)
    assert_close(second, [3 * t for t in true])
    calls.clear()
    megabatch.maxsim_loss(*leaves, workspace=400).backward()
    assert calls.count(False) == calls.count(True) > 1


def test_late_interaction_gives_gradients_of_what_requires_them_only():
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(4, n, 8, generator=g, dtype=torch.float64) for n in (3, 5))
    scale = torch.tensor(2.0, dtype=torch.float64)
    true = torch.autograd.grad(reference.maxsim_loss(*(t.requires_grad_() for t in (x, y, scale))), (x, y, scale))
    for place, expected in enumerate(true):
        leaves = [t.detach().requires_grad_(i == place) for i, t in enumerate((x, y, scale))]
        megabatch.maxsim_loss(*leaves).backward()
        assert [t.grad is not None for t in leaves] == [i == place for i in range(3)]
        assert_close([leaves[place].grad], [expected])
