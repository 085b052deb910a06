"""NT-Xent, SupCon, DCL, a queue and late interaction as other libraries compute them, and the inputs for which those are wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import embeddings
from torch import Tensor, nn
from torch.nn.functional import normalize

import megabatch
from megabatch import reference
from megabatch.losses.directions import DIRECTIONS

# The libraries normalise their inputs themselves.
unit = partial(normalize, dim=-1)


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare to 1e-10 in float64 and to 1e-6 in float32, relative to the largest number."""
    for a, b in zip(found, expected, strict=True):
        tolerance = 1e-10 if a.dtype == torch.float64 else 1e-6
        assert a.dtype == b.dtype and (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1)


def views(dtype: torch.dtype, rows: int = 12, width: int = 6, **more: Any) -> tuple[Tensor, Tensor]:
    """Return embeddings of two views of the same samples, not normalised."""
    a, b = embeddings(rows, width=width, norm=1.5, **more)
    return a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["random", "clustered"])
def test_nt_xent_and_supcon_are_those_of_pytorch_metric_learning(dtype, kind):
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    a, b = views(dtype, kind=kind)
    expected = losses.SelfSupervisedLoss(losses.NTXentLoss(temperature=0.1))(a, b)
    assert_equal(gradients(megabatch.nt_xent_loss(unit(a), unit(b), 10.0, workspace=900), a, b), gradients(expected, a, b))
    # Several positives, and a row without one.
    labels = torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 9])
    expected = losses.SupConLoss(temperature=0.1)(a, labels)
    assert_equal(gradients(megabatch.supcon_loss(unit(a), labels, 10.0, workspace=900), a), gradients(expected, a))


def test_an_unlikely_positive_has_a_gradient_where_pytorch_metric_learning_has_none():
    """Its NT-Xent takes the logarithm of a probability, which is zero in float32 where logits differ by more than 104."""
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    a, _ = views(torch.float32)
    b = (-a).detach().requires_grad_()
    theirs = gradients(losses.SelfSupervisedLoss(losses.NTXentLoss(temperature=0.01))(a, b), a)
    found = gradients(megabatch.nt_xent_loss(unit(a), unit(b), 100.0), a)
    true = gradients(reference.nt_xent_loss(unit(a.double()), unit(b.double()), 100.0), a)
    assert found[0] > 100 > 88 > theirs[0] and not theirs[1].any() and true[1].abs().max() > 1
    assert (found[0] - true[0]).abs() < 1e-6 * true[0] and (found[1] - true[1]).abs().max() < 1e-5 * true[1].abs().max()


def test_a_batch_of_one_label_has_a_loss_where_pytorch_metric_learning_has_none():
    """Its SupCon returns zero without negatives; the formula pulls the positives together by a softmax over them."""
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    a, _ = views(torch.float64)
    labels = torch.zeros(12, dtype=torch.int64)
    assert losses.SupConLoss(temperature=0.1)(a, labels) == 0
    true = gradients(reference.supcon_loss(unit(a), labels, 10.0), a)
    assert true[0] > 1 and true[1].abs().max() > 0.01
    assert_equal(gradients(megabatch.supcon_loss(unit(a), labels, 10.0), a), true)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nt_xent_dcl_and_a_queue_are_those_of_lightly(dtype):
    losses = pytest.importorskip("lightly.loss")
    a, b = views(dtype)
    found = megabatch.nt_xent_loss(unit(a), unit(b), 10.0, workspace=900)
    assert_equal(gradients(found, a, b), gradients(losses.NTXentLoss(temperature=0.1)(a, b), a, b))
    found = megabatch.dcl_loss(unit(a), unit(b), 10.0, directions=DIRECTIONS, partition="by_anchor", workspace=900)
    assert_equal(gradients(found, a, b), gradients(losses.DCLLoss(temperature=0.1)(a, b), a, b))
    # A memory bank as in MoCo: keys have no gradient, and negatives are those of the bank alone.
    moco = losses.NTXentLoss(temperature=0.1, memory_bank_size=(20, 6)).to(dtype)
    moco(a, b.detach())
    bank = moco.memory_bank.bank.clone()
    found = megabatch.infonce_loss(unit(a), unit(b.detach()), 10.0, in_batch=False, queue=bank, workspace=900)
    assert_equal(gradients(found, a), gradients(moco(a, b.detach()), a))


class GivenTokens(nn.Module):
    """In place of a ColBERT model: returns the token embeddings that a batch already holds."""

    skiplist: tuple[int, ...] = ()
    do_query_expansion = False

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"token_embeddings": features["tokens"]}


def pylate_features(tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return {"input_ids": torch.ones_like(mask), "attention_mask": mask, "tokens": tokens}


def late_interaction(loss: Callable[..., Any], rows: int = 7, lengths: tuple[int, int] = (4, 9), *, positive: bool) -> list[Any]:
    """Return PyLate's loss with 0 and 2 hard negatives for each query, ours, and the tokens. positive: similarities above zero."""
    g = torch.Generator().manual_seed(3)
    cases = []
    for negatives in (0, 2):
        x, *ys = (torch.randn(rows, n, 5, generator=g, dtype=torch.float64) for n in (lengths[0], *[lengths[1]] * (1 + negatives)))
        x, *ys = ((t.abs() if positive else t).requires_grad_() for t in (x, *ys))
        masks = [(torch.arange(t.shape[1]) < torch.randint(1, t.shape[1], (rows, 1), generator=g)).long() for t in (x, *ys)]
        theirs = loss(GivenTokens(), temperature=0.25)([pylate_features(t, m) for t, m in zip((x, *ys), masks, strict=True)])
        options = {"x_mask": masks[0], "y_mask": torch.cat(masks[1:]), "normalize": True}
        found = megabatch.maxsim_loss(x, torch.cat(ys), 4.0, **options, workspace=9000)
        assert torch.allclose(found, reference.maxsim_loss(x, torch.cat(ys), 4.0, **options), rtol=1e-12)
        cases.append((found, theirs, (x, *ys)))
    return cases


@pytest.mark.slow
def test_maxsim_is_the_contrastive_loss_of_pylate_where_masks_change_no_maximum():
    losses = pytest.importorskip("pylate.losses")
    for found, theirs, tokens in late_interaction(losses.Contrastive, positive=True):
        assert_equal(gradients(found, *tokens), gradients(theirs, *tokens))


@pytest.mark.slow
def test_padding_of_pylate_wins_over_negative_similarities():
    """PyLate multiplies similarities with the mask, so that a padded token has the similarity 0."""
    losses = pytest.importorskip("pylate.losses")
    for found, theirs, _ in late_interaction(losses.Contrastive, positive=False):
        assert (found - theirs).abs() > 1e-3


@pytest.mark.slow
def test_cached_gradients_of_pylate_are_those_of_a_sum_while_its_loss_is_a_mean():
    losses = pytest.importorskip("pylate.losses")
    cached = partial(losses.CachedContrastive, mini_batch_size=3)
    for found, theirs, tokens in late_interaction(cached, positive=True):
        assert_equal([found.detach()], [theirs.detach()])
        theirs.backward()
        assert_equal([7 * g for g in torch.autograd.grad(found, tokens)], [t.grad for t in tokens])
