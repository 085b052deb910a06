"""The same values and gradients as the losses of Sentence Transformers, on the same embeddings; skipped if it is not installed."""

from __future__ import annotations

import pytest
import torch
from cases import embeddings
from torch import Tensor

import megabatch

pytestmark = pytest.mark.slow

# Sentence Transformers' names.
NAMES = {"query_to_doc": "x_to_y", "doc_to_query": "y_to_x", "query_to_query": "x_to_x", "doc_to_doc": "y_to_y"}
HARDNESS = {"all_negatives": "all", "hard_negatives": "hard", "in_batch_negatives": "in_batch"}
DIRECTIONS = (
    ("query_to_doc",),
    ("query_to_doc", "doc_to_query"),
    ("query_to_doc", "query_to_query"),
    ("query_to_doc", "doc_to_doc"),
    tuple(NAMES),
)


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("directions", DIRECTIONS, ids="+".join)
@pytest.mark.parametrize("columns", [0, 1, 3])
@pytest.mark.parametrize("hardness", [None, *HARDNESS])
@pytest.mark.parametrize("partition", ["joint", "per_direction"])
def test_sentence_transformers_ranking_loss(directions, columns, hardness, partition):
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    if partition == "per_direction" and set(directions) & {"query_to_query", "doc_to_doc"}:
        pytest.skip("both libraries refuse it")
    rows = 9
    x, y = (t.requires_grad_() for t in embeddings(rows, columns * rows, width=6))
    theirs = losses.MultipleNegativesRankingLoss(
        None,
        scale=15.0,
        similarity_fct=lambda a, b: a @ b.T,
        directions=directions,
        partition_mode=partition,
        hardness_mode=hardness,
        hardness_strength=4.0 if hardness else 0.0,
    )
    expected = theirs.compute_loss_from_embeddings([x, *y.split(rows)], None)
    found = megabatch.infonce_loss(
        x,
        y,
        15.0,
        directions=[NAMES[direction] for direction in directions],
        partition="joint" if partition == "joint" else "separate",
        hardness=4.0 if hardness else 0.0,
        hardness_on=HARDNESS.get(hardness, "all"),
        negatives_of=torch.arange(rows).repeat(columns),
        workspace=900,
    )
    assert_equal(gradients(found, x, y), gradients(expected, x, y))


@pytest.mark.parametrize("kind", ["absolute", "relative"])
@pytest.mark.parametrize("margin", [0.0, 0.1])
@pytest.mark.parametrize("contrast", [True, False])
@pytest.mark.parametrize("negatives", [False, True])
def test_sentence_transformers_gist(kind, margin, contrast, negatives):
    module = pytest.importorskip("sentence_transformers.sentence_transformer.losses.cached_gist_embed")
    # Its contrast between positives leaves out hard negatives, and "y_to_y" does not: with these, only anchors are contrasted.
    rows, positives = 9, contrast and not negatives
    x, y = (t.requires_grad_() for t in embeddings(rows, rows * negatives, width=6))
    guide_x, guide_y = embeddings(rows, rows * negatives, width=4, kind="clustered")
    theirs = module.CachedGISTEmbedLoss.__new__(module.CachedGISTEmbedLoss)
    torch.nn.Module.__init__(theirs)
    theirs.similarity_fct = torch.nn.CosineSimilarity(dim=-1)
    theirs.temperature, theirs.margin, theirs.margin_strategy = 0.1, margin, kind
    theirs.contrast_anchors, theirs.contrast_positives = contrast, positives
    theirs.gather_across_devices, theirs.show_progress_bar, theirs.mini_batch_size = False, False, 4
    theirs.cross_entropy_loss = torch.nn.CrossEntropyLoss()
    columns, guides = [x, *y.split(rows)], [guide_x, *guide_y.split(rows)]
    expected = theirs.calculate_loss([[column] for column in columns], [[column] for column in guides])
    directions = ["x_to_y"] + ["x_to_x"] * contrast + ["y_to_y"] * positives
    unit_x, unit_y = (torch.nn.functional.normalize(t, dim=-1) for t in (x, y))
    guide = megabatch.Guide(guide_x, guide_y, margin, kind)
    found = megabatch.infonce_loss(unit_x, unit_y, 10.0, directions=directions, guide=guide)
    assert_equal(gradients(found, x, y), gradients(expected, x, y))
