"""Matryoshka over any loss, and the spread-out regulariser, equal their formulas on one rank and several."""

from __future__ import annotations

import functools

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from cases import embeddings
from heap import MIB, measured
from hypothesis import given, settings
from ragged import assert_close, gradients, pieces
from world import error_of

import megabatch
from megabatch import reference

pytestmark = pytest.mark.filterwarnings("ignore:scale=")

TARGETS = torch.arange(14) % 9
TEACHER = embeddings(14, width=5, seed=3)
# Every loss, as a function of (module, x, y, scale).
LOSSES = {
    "clip": lambda m: lambda x, y, s, **o: m.clip_loss(x, y, s, label_smoothing=0.1, **o),
    "siglip": lambda m: lambda x, y, s, **o: m.siglip_loss(x, y, s, s - 4.0, ids=TARGETS, duplicates="positive", **o),
    "distill": lambda m: lambda x, y, s, **o: m.distill_loss(x, y, s, *TEACHER, 6.0, **o),
    "classes": lambda m: lambda x, y, s, **o: m.class_softmax_loss(x, y, TARGETS, s, angular_margin=0.2, **o),
    "similarity": lambda m: lambda x, y, s, **o: m.similarity_loss(x, y, s, similarity=torch.inner, **o),
    "late interaction": lambda m: lambda x, y, s, **o: m.maxsim_loss(x[:, None], y[:, None], s, **o),
}


def check_any_loss_over_prefixes_is_the_plain_loop(data):
    name = data.draw(st.sampled_from(sorted(LOSSES)))
    dims = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4, unique=True))
    weights = data.draw(st.sampled_from((None, tuple(0.5 + i for i in range(len(dims))))))
    x, y = embeddings(14, seed=data.draw(st.integers(0, 10**6)), norm=data.draw(st.sampled_from((0.1, 7.0))))
    scale = torch.tensor(data.draw(st.sampled_from((1.0, 20.0))), dtype=torch.float64)
    criterion = megabatch.matryoshka(LOSSES[name](megabatch), dims, weights)
    found = gradients(lambda x, y, s: criterion(x, y, s, workspace=700), (x, y, scale))
    formula = functools.partial(reference.matryoshka_loss, LOSSES[name](reference), dims=dims, dim_weights=weights)
    true = gradients(formula, (x, y, scale))
    # The angular margin is steep where a prefix of width one coincides with its class; a norm of 0.1 multiplies gradients by 10.
    assert_close([found[0], *found[1]], [true[0], *true[1]], 1e-8 if name == "classes" else 1e-10)


test_any_loss_over_prefixes_is_the_plain_loop = settings(max_examples=12, deadline=None, derandomize=True)(
    given(st.data())(check_any_loss_over_prefixes_is_the_plain_loop)
)
test_many_losses_over_prefixes_are_the_plain_loop = pytest.mark.slow(
    settings(max_examples=60, deadline=None, derandomize=True)(given(st.data())(check_any_loss_over_prefixes_is_the_plain_loop))
)


def test_a_frozen_side_the_scale_alone_and_a_second_backward():
    x, y = embeddings(9, width=6)
    scale = torch.tensor(5.0, dtype=torch.float64)
    value, (dx, _, dscale) = gradients(
        functools.partial(reference.matryoshka_loss, reference.clip_loss, dims=(6, 2)), (x, y, scale)
    )
    criterion = megabatch.matryoshka(megabatch.ClipLoss(), dims=(2, 6))
    x.requires_grad_()
    loss = criterion(x, y, 5.0)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_close([loss.detach(), x.grad], [value, 2 * dx])
    scale.requires_grad_()
    criterion(x.detach(), y, scale).backward()
    assert_close([scale.grad], [dscale])
    with torch.no_grad():
        assert not criterion(x, y, scale).requires_grad
    (again,) = torch.autograd.grad(criterion(x, y, 5.0), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        again.sum().backward()


def test_diagnostics_are_those_of_the_widest_prefix_and_options_pass_through():
    x, y = embeddings(9, width=6)
    loss, found = megabatch.matryoshka(megabatch.clip_loss, dims=(2, 6))(x.requires_grad_(), y, 5.0, diagnostics=True)
    assert torch.equal(found.row_rank, reference.ranks(x, y)[0])
    loss.backward()
    assert "dims=(6, 2)" in repr(megabatch.matryoshka(megabatch.ClipLoss(), dims=(2, 6)))


def test_embeddings_passed_by_name_are_cut_too():
    x, y = embeddings(9, width=6)
    _, queue = embeddings(5, width=6, seed=4)

    def with_queue(x, y, scale, queue):
        return megabatch.clip_loss(x, torch.cat((y, queue)), scale, symmetric=False)

    found = megabatch.matryoshka(with_queue, dims=(6, 3))(x, y, 5.0, queue=queue)
    prefixes = [[torch.nn.functional.normalize(t[:, :width], dim=1) for t in (x, y, queue)] for width in (6, 3)]
    assert torch.allclose(found, sum(with_queue(x, y, 5.0, queue) for x, y, queue in prefixes))


@pytest.mark.slow
def test_it_is_the_matryoshka_loss_of_sentence_transformers():
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")

    class Model(torch.nn.Module):
        """What the peer needs of an encoder: features in, features with an embedding out."""

        def forward(self, features):
            return {**features, "sentence_embedding": features["input"]}

        def get_embedding_dimension(self):
            return 8

    x, y = embeddings(12, norm=3.0)
    model = Model()
    inner = losses.MultipleNegativesRankingLoss(model, scale=20.0)
    peer = losses.MatryoshkaLoss(model, inner, [8, 4, 2], [1, 0.5, 0.25])
    true = gradients(lambda x, y: peer([{"input": x}, {"input": y}], None), (x, y))
    ours = megabatch.matryoshka(megabatch.clip_loss, (8, 4, 2), (1, 0.5, 0.25))
    found = gradients(lambda x, y: ours(x, y, 20.0, symmetric=False), (x, y))
    assert_close([found[0], *found[1]], [true[0], *true[1]], 1e-10)


def rank_results(rank: int, size: int) -> dict[str, object]:
    world = dist.group.WORLD
    x, y = (pieces(t, size)[rank] for t in embeddings(9, width=6, norm=2.0))
    scale = torch.tensor(5.0, dtype=torch.float64)
    criterion = megabatch.matryoshka(megabatch.ClipLoss(group=world), dims=(6, 3))
    found = {
        # The gradients that come in differ between ranks: what counts is their sum.
        "matryoshka": gradients(criterion, (x, y, scale), grad=1.0 + rank),
        "spread": gradients(lambda x: megabatch.spread_out_loss(x, group=world), (x,)),
    }
    # One rank has nothing that requires a gradient, and still takes part in backward.
    frozen = rank == size - 1
    x, y = x.clone().requires_grad_(not frozen), y.clone().requires_grad_(not frozen)
    criterion(x, y, 5.0).backward()
    found["frozen"] = torch.zeros_like(x) if frozen else x.grad
    found["no group"] = error_of(lambda: megabatch.matryoshka(megabatch.clip_loss, dims=(6, 3))(x, y, 5.0))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_ragged_shards_get_the_gradients_of_one_process(world, size):
    results = world.run(size, rank_results)
    x, y = embeddings(9, width=6, norm=2.0)
    scale = torch.tensor(5.0, dtype=torch.float64)
    formula = functools.partial(reference.matryoshka_loss, reference.clip_loss, dims=(6, 3))
    value, (dx, dy, dscale) = gradients(formula, (x, y, scale))
    spread = gradients(reference.spread_out_loss, (x,))
    total = sum(1.0 + rank for rank in range(size))
    for rank, found in enumerate(results):
        expected = [value, total * pieces(dx, size)[rank], total * pieces(dy, size)[rank], total / size * dscale]
        assert_close([found["matryoshka"][0], *found["matryoshka"][1]], expected, 1e-12)
        assert_close([found["spread"][0], *found["spread"][1]], [spread[0], size * pieces(spread[1][0], size)[rank]], 1e-12)
        assert "group is not given" in found["no group"]
        if rank < size - 1:
            assert_close([found["frozen"]], [size * pieces(dx, size)[rank]], 1e-12)


DIMS = (64, 56, 48, 40, 32, 24)


def step(rows: int, plain: bool) -> None:
    x, y = torch.randn(rows, 64).requires_grad_(), torch.randn(rows, 64).requires_grad_()
    loss = functools.partial(megabatch.clip_loss, workspace=MIB)
    if plain:
        reference.matryoshka_loss(loss, x, y, 5.0, dims=DIMS).backward()
    else:
        megabatch.matryoshka(loss, DIMS)(x, y, 5.0).backward()


@pytest.mark.slow
def test_memory_is_that_of_one_width():
    rows = 4096
    one_width = rows * 64 * 4
    several, plain = (measured(step, (64, kind), (rows, kind)) for kind in (False, True))
    # Inputs, totals, and one width's prefixes, products and gradients, of both sides.
    assert several < 12 * one_width + 4 * MIB
    # The plain loop keeps the prefixes of all widths.
    assert plain > several + 3 * one_width


def test_wrong_arguments_are_refused():
    x, y = embeddings(5)
    for message, mistake in {
        "must be different positive widths": lambda: megabatch.matryoshka(megabatch.clip_loss, (4, 4)),
        "one for each width": lambda: megabatch.matryoshka(megabatch.clip_loss, (4, 2), (1.0,)),
        "dims has 9 and the embeddings are 8 wide": lambda: megabatch.matryoshka(megabatch.clip_loss, (9,))(x, y, 1.0),
        "no tensor of embeddings": lambda: megabatch.matryoshka(megabatch.clip_loss, (4,))(1.0, y, 1.0),
        "x has shape": lambda: megabatch.spread_out_loss(x[0]),
    }.items():
        with pytest.raises(ValueError, match=message):
            mistake()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.integers(2, 40),
    st.integers(1, 9),
    st.sampled_from((1e-2, 1.0, 100.0)),
    st.sampled_from(("random", "clustered", "identical")),
)
def test_the_spread_is_the_formula(rows, width, norm, kind):
    x, _ = embeddings(rows, width=width, kind=kind, norm=norm)
    found, true = gradients(megabatch.spread_out_loss, (x,)), gradients(reference.spread_out_loss, (x,))
    size = torch.tensor([norm**4, norm**3], dtype=torch.float64)
    assert abs(found[0] - true[0]) < 1e-12 * size[0]
    assert (found[1][0] - true[1][0]).norm() < 1e-12 * size[1]
    assert abs(megabatch.spread_out_loss(x[:1])) < 1e-12 * size[0]


def test_rows_of_tiny_norms_have_the_gradient_of_the_plain_loop():
    x, y = embeddings(6, width=5)
    x[1] *= 1e-14
    x[2, :3] = 0
    found, true = (
        gradients(functools.partial(loss, dims=(5, 3)), (x, y, torch.tensor(2.0, dtype=torch.float64)))
        for loss in (
            lambda *inputs, dims: megabatch.matryoshka(megabatch.clip_loss, dims)(*inputs),
            functools.partial(reference.matryoshka_loss, reference.clip_loss),
        )
    )
    assert true[1][0][1].abs().max() > 1e9
    assert_close([found[0], *found[1]], [true[0], *true[1]])
