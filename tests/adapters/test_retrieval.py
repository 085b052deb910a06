"""The layouts of retrieval trainers: our losses give the values and gradients of theirs on interleaved passages.

Tevatron, FlagEmbedding and ms-swift are not installed with the other packages of these tests, so their layouts stand here;
test_retrieval_trainers.py runs their trainers where they are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import embeddings
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from megabatch.adapters import retrieval

QUERIES, GROUP, SCALE = 4, 3, 5.0


def interleaved(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = embeddings(QUERIES, QUERIES * (GROUP - 1), seed=seed)
    return x.requires_grad_(), y.requires_grad_()


def formula(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of all scores, with the positive of query i at i·G."""
    return cross_entropy(SCALE * x @ y.T, torch.arange(len(x)) * (len(y) // len(x)))


def gradients(loss: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, tensors)]


def assert_equal(found: list[torch.Tensor], true: list[torch.Tensor]) -> None:
    for a, b in zip(found, true, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


class Embedder:
    """FlagEmbedding's model, as far as the mixin sees it."""

    temperature = 1 / SCALE

    def _compute_in_batch_neg_loss(self, *args: Any, **kwargs: Any) -> Any:
        return "in batch", args, kwargs

    def _compute_cross_device_neg_loss(self, *args: Any, **kwargs: Any) -> Any:
        return "cross device", args, kwargs


class OurEmbedder(retrieval.InBatchLossMixin, Embedder):
    pass


def test_every_layout_gives_the_loss_of_its_trainer():
    x, y = interleaved()
    true = gradients(formula(x, y), x, y)
    assert_equal(gradients(retrieval.SimpleContrastiveLoss(temperature=1 / SCALE)(x, y), x, y), true)
    assert_equal(gradients(OurEmbedder()._compute_in_batch_neg_loss(x, y)[1], x, y), true)
    assert_equal(gradients(retrieval.grouped_loss(x, y, SCALE, group=None), x, y), true)
    # ms-swift: anchor, positive, negatives, and a label for all but the anchor.
    rows = torch.cat([torch.cat([x[i : i + 1], y[i * GROUP : (i + 1) * GROUP]]) for i in range(QUERIES)])
    labels = torch.tensor([1, 0, 0] * QUERIES)
    found = retrieval.InfonceLoss(temperature=1 / SCALE)({"last_hidden_state": rows}, labels)
    assert_equal(gradients(found, x, y), true)


def test_passages_and_ids_may_have_one_row_for_each_query():
    x, y = interleaved()
    ids = torch.tensor([[0, 1, 2], [3, 4, 0], [5, 6, 7], [8, 9, 5]])
    same = ids.flatten()[None] == ids[:, :1]
    same[torch.arange(QUERIES), torch.arange(QUERIES) * GROUP] = False
    scores = (SCALE * x @ y.T).masked_fill(same, -torch.inf)
    true = gradients(cross_entropy(scores, torch.arange(QUERIES) * GROUP), x, y)
    assert not torch.allclose(true[0], formula(x, y))
    for passages, numbers in ((y, ids.flatten()), (y.unflatten(0, (QUERIES, GROUP)), ids)):
        assert_equal(gradients(retrieval.grouped_loss(x, passages, SCALE, ids=numbers, group=None), x, y), true)


@pytest.mark.parametrize("place, method", [("in batch", "in_batch"), ("cross device", "cross_device")])
def test_teachers_scores_and_lists_are_left_to_flagembedding(place, method):
    x, y = interleaved()
    call = getattr(OurEmbedder(), f"_compute_{method}_neg_loss")
    for arguments in ((x, y, torch.ones(1), None), (x, y, None, max), ([x], [y], None, None)):
        assert call(*arguments, all_scores=1) == (place, arguments, {"all_scores": 1})


def test_options_reach_the_loss_of_ms_swift():
    x, y = interleaved()
    rows, labels = torch.stack([x, y[::GROUP]], 1).flatten(0, 1), torch.ones(QUERIES)
    expected = cross_entropy(10.0 * x @ y[::GROUP].T, torch.arange(QUERIES), label_smoothing=0.1)
    # ms-swift's default temperature is 0.1.
    found = retrieval.InfonceLoss(label_smoothing=0.1)({"last_hidden_state": rows}, labels)
    assert torch.allclose(found, expected, rtol=1e-9)


def test_queries_may_have_different_numbers_of_negatives():
    rows = torch.randn(7, 4, dtype=torch.float64)
    queries, passages = retrieval.split_by_labels(rows, torch.tensor([1, 0, 0, 1, 0]))
    assert torch.equal(queries, rows[[0, 4]])
    assert torch.equal(passages, rows[[1, 5, 2, 3, 6]])


@pytest.mark.parametrize(
    "call",
    [
        lambda: retrieval.positives_first(torch.zeros(5, 2), 2),
        lambda: retrieval.split_by_labels(torch.zeros(5, 2), torch.tensor([0, 1, 1])),
        lambda: retrieval.split_by_labels(torch.zeros(5, 2), torch.tensor([1, 0, 0])),
        lambda: retrieval.SimpleContrastiveLoss()(torch.zeros(1, 2), torch.zeros(2, 2), target=torch.zeros(1)),
        lambda: retrieval.SimpleContrastiveLoss()(torch.zeros(1, 2), torch.zeros(2, 2), reduction="sum"),
        lambda: retrieval.DistributedContrastiveLoss(),
    ],
)
def test_other_layouts_are_refused(call):
    with pytest.raises(ValueError):
        call()


def on_two_ranks(rank: int, size: int) -> list[list[torch.Tensor]]:
    """Return the gradient of a weight after DDP's average, for each trainer's class."""
    x, y = (t.detach() for t in interleaved(rank))
    rows = torch.cat([torch.cat([x[i : i + 1], y[i * GROUP : (i + 1) * GROUP]]) for i in range(QUERIES)])
    labels = torch.tensor([1, 0, 0] * QUERIES)
    calls = [
        lambda f: retrieval.DistributedContrastiveLoss(temperature=1 / SCALE)(f(x), f(y)) / size,
        lambda f: OurEmbedder()._compute_cross_device_neg_loss(f(x), f(y))[1],
        lambda f: retrieval.InfonceLoss(temperature=1 / SCALE)({"last_hidden_state": f(rows)}, labels),
        lambda f: retrieval.DistributedContrastiveLoss(scale_loss=False, temperature=1 / SCALE)(f(x), f(y)),
        lambda f: retrieval.InfonceLoss(temperature=1 / SCALE, group=None)({"last_hidden_state": f(rows)}, labels),
    ]
    with pytest.raises(ValueError, match="target"):
        retrieval.DistributedContrastiveLoss()(x, y, target=labels)
    results = []
    for call in calls:
        torch.manual_seed(0)
        layer = DistributedDataParallel(torch.nn.Linear(8, 8, bias=False).double())
        # One forward of DDP a step.
        everything = torch.cat([x, y, rows])
        outputs = layer(everything)
        places = {id(x): outputs[: len(x)], id(y): outputs[len(x) : len(x) + len(y)], id(rows): outputs[len(x) + len(y) :]}
        loss = call(lambda t, places=places: places[id(t)])
        loss.backward()
        results.append([loss.detach(), layer.module.weight.grad.clone()])
    return results


def test_two_ranks_give_the_gradient_of_the_mean_over_all_queries(world):
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8, bias=False).double()
    x, y = (torch.cat(parts) for parts in zip(*(interleaved(rank) for rank in range(2)), strict=True))
    true = gradients(formula(layer(x), layer(y)), layer.weight)
    alone = [formula(layer(x), layer(y)) for x, y in (interleaved(rank) for rank in range(2))]
    for rank, (tevatron, flag, swift, unscaled, own) in enumerate(world.run(2, on_two_ranks)):
        assert_equal([tevatron[0], 2 * tevatron[1]], true)
        assert_equal(flag, true)
        assert_equal(swift, true)
        assert_equal([unscaled[0], 2 * unscaled[1]], true)
        assert_equal(own, [alone[rank].detach(), *torch.autograd.grad(sum(alone) / 2, layer.weight, retain_graph=True)])
