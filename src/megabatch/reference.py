"""Every loss as its plain formula, with the whole similarity matrix: the definition that tests, docs and benchmarks share.

x has M rows, y has N >= M rows, both of width D; the positive of row i of x is row i of y.
Memory is O(M·N), and autograd computes the gradients: correct and readable, for batches whose matrix fits in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def clip_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    *,
    symmetric: bool = True,
    ids: Tensor | None = None,
    duplicates: str = "mask",
    label_smoothing: float = 0.0,
    drop_above: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the weighted mean over rows of the cross-entropy of `scale * x @ y.T`; if symmetric, averaged with that over columns.

    Row i has the pairs A_i that count, and among them its positives P_i:

        loss_i = logsumexp_{j in A_i} s_ij - (1 - label_smoothing) * mean_{j in P_i} s_ij
                                           - label_smoothing * mean_{j in A_i} s_ij

    P_i is {i}; with `duplicates="positive"` it is every j with ids_j = ids_i. A_i contains all pairs except those with equal ids
    (`duplicates="mask"`) and negatives with x_i·y_j > x_i·y_i + drop_above. A column is treated as a row of the transposed matrix.
    """
    return _loss_of_scores(x @ y.T, scale, symmetric, ids, duplicates, label_smoothing, drop_above, weights)


def siglip_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    *,
    ids: Tensor | None = None,
    duplicates: str = "mask",
    weights: Tensor | None = None,
) -> Tensor:
    """Return the weighted mean over rows of the sum over their pairs of `-logsigmoid(±(scale * x @ y.T + bias))`.

    The sign is + for positives and - for negatives. Pairs with equal ids, apart from the positive itself, are left out
    (`duplicates="mask"`) or are positives too (`duplicates="positive"`).
    """
    similarity = x @ y.T
    logits = scale * similarity + bias
    same, diagonal = _same(similarity, ids), _diagonal(similarity)
    positive = same if duplicates == "positive" else diagonal
    pair_loss = -F.logsigmoid(torch.where(positive, logits, -logits))
    loss = pair_loss.masked_fill(same & ~positive, 0).sum(1)
    return loss.mean() if weights is None else (weights * loss).sum() / weights.sum()


def ranks(x: Tensor, y: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the rank of each row's positive among its negatives, and the similarity of its hardest negative.

    Rank 0 is best; ties count against the positive. Negatives are all pairs with another id than the positive's. Without negatives
    the hardest is -inf.
    For columns: `ranks(y[:len(x)], x, ids)`.
    """
    similarity = x @ y.T
    negative = similarity.masked_fill(_same(similarity, ids), -torch.inf)
    return (negative >= similarity.diagonal()[:, None]).sum(1), negative.amax(1)


def distill_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    teacher_x: Tensor,
    teacher_y: Tensor,
    teacher_scale: Tensor | float,
    *,
    symmetric: bool = True,
    divergence: str = "cross_entropy",
    weights: Tensor | None = None,
) -> Tensor:
    """Return the weighted mean over rows of `-Σ softmax(t) * log_softmax(s)`; if symmetric, averaged with that over columns.

    s = scale * x @ y.T, t = teacher_scale * teacher_x @ teacher_y.T. With `divergence="kl"`, the teacher's entropy
    `-Σ softmax(t) * log_softmax(t)` is subtracted.
    """
    student, teacher = scale * x @ y.T, (teacher_scale * teacher_x @ teacher_y.T).detach()

    def divergence_of(s: Tensor, t: Tensor) -> Tensor:
        log_p = t.log_softmax(1) - s.log_softmax(1) if divergence == "kl" else -s.log_softmax(1)
        return (t.softmax(1) * log_p).sum(1)

    loss = divergence_of(student, teacher)
    if symmetric:
        loss = (loss + divergence_of(student.T, teacher.T)) / 2
    return loss.mean() if weights is None else (weights * loss).sum() / weights.sum()


def margin_mse_loss(scores: Tensor, teacher_scores: Tensor) -> Tensor:
    """Return the mean of `((s_0 - s_j) - (t_0 - t_j))²` over all queries and negatives j; column 0 is the positive."""
    return ((scores[:, :1] - scores[:, 1:]) - (teacher_scores[:, :1] - teacher_scores[:, 1:])).square().mean()


def listwise_kl_loss(scores: Tensor, teacher_scores: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return `temperature² * KL(softmax(teacher / temperature) ‖ softmax(student / temperature))`, averaged over rows."""
    log_t, log_s = (teacher_scores / temperature).log_softmax(1), (scores / temperature).log_softmax(1)
    return temperature**2 * (log_t.exp() * (log_t - log_s)).sum(1).mean()


def similarity_loss(
    x: Any,
    y: Any,
    scale: Tensor | float,
    *,
    similarity: Callable[[Any, Any], Tensor],
    symmetric: bool = True,
    ids: Tensor | None = None,
    duplicates: str = "mask",
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Return `clip_loss` with `similarity(x, y)` in place of `x @ y.T`."""
    return _loss_of_scores(similarity(x, y), scale, symmetric, ids, duplicates, label_smoothing, None, weights)


def maxsim_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    *,
    x_mask: Tensor | None = None,
    y_mask: Tensor | None = None,
    normalize: bool = False,
    average_tokens: bool = False,
    symmetric: bool = False,
    ids: Tensor | None = None,
    duplicates: str = "mask",
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Return `clip_loss` with the scores `Σ_t max_u x[i, t]·y[j, u]` in place of `x @ y.T`, over the tokens that the masks keep.

    A document without tokens has the score 0. With `average_tokens` a score is divided by the number of the query's tokens.
    """
    if normalize:
        x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    x_kept = torch.ones_like(x[..., 0]) if x_mask is None else (x_mask != 0).to(x.dtype)
    y_kept = torch.ones_like(y[..., 0], dtype=torch.bool) if y_mask is None else y_mask != 0
    similarity = torch.einsum("itd,jud->ijtu", x, y).masked_fill(~y_kept[:, None], torch.finfo(x.dtype).min)
    best = similarity.max(3).values.masked_fill(~y_kept.any(1)[:, None], 0)
    scores = (best * x_kept[:, None]).sum(2)
    if average_tokens:
        scores = scores / x_kept.sum(1).clamp(min=1)[:, None]
    return _loss_of_scores(scores, scale, symmetric, ids, duplicates, label_smoothing, None, weights)


def class_softmax_loss(
    x: Tensor,
    y: Tensor,
    targets: Tensor,
    scale: Tensor | float,
    *,
    margin: float = 0.0,
    angular_margin: float = 0.0,
    kept: Tensor | None = None,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the weighted mean of the cross-entropy of `scale * x @ y.T`, with a margin for each row's own class `targets[i]`.

    With m = angular_margin, the cosine of the own class becomes `cos(θ + m) - margin`, or `cos θ - m * sin(m) - margin` where θ + m
    exceeds π; sin θ is at least 1e-3. kept: which classes count (C booleans), the targets among them.
    """
    similarity = x @ y.T
    own = similarity.gather(1, targets[:, None])
    if angular_margin:
        m = angular_margin
        sine = (1 - own.square()).clamp(min=1e-6).sqrt()
        own = torch.where(own > -math.cos(m), own * math.cos(m) - sine * math.sin(m), own - m * math.sin(m))
    logits = scale * similarity.scatter(1, targets[:, None], own - margin)
    if kept is not None:
        logits = logits[:, kept]
        targets = (kept.cumsum(0) - 1)[targets]
    loss = F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="none")
    return loss.mean() if weights is None else (weights * loss).sum() / weights.sum()


def matryoshka_loss(
    loss: Callable[..., Tensor],
    x: Tensor,
    y: Tensor,
    *inputs: Any,
    dims: Sequence[int],
    dim_weights: Sequence[float] | None = None,
    **options: Any,
) -> Tensor:
    """Return `Σ_k dim_weights[k] * loss(x[..., :dims[k]], y[..., :dims[k]], ...)` of prefixes divided by their own norms."""
    terms = [loss(*(F.normalize(t[..., :d], dim=-1) for t in (x, y)), *inputs, **options) for d in dims]
    return torch.stack([term * weight for term, weight in zip(terms, dim_weights or [1.0] * len(dims), strict=True)]).sum()


def spread_out_loss(x: Tensor) -> Tensor:
    """Return the mean over pairs of different rows of `(x_i·x_j)²`."""
    return (x @ x.T).square().masked_fill(torch.eye(len(x), dtype=torch.bool, device=x.device), 0).sum() / (len(x) * (len(x) - 1))


def _diagonal(similarity: Tensor) -> Tensor:
    return torch.eye(*similarity.shape, dtype=torch.bool, device=similarity.device)


def _same(similarity: Tensor, ids: Tensor | None) -> Tensor:
    rows, columns = similarity.shape
    return _diagonal(similarity) if ids is None else ids[:rows, None] == ids[None, :columns]


def _loss_of_scores(
    similarity: Tensor,
    scale: Tensor | float,
    symmetric: bool,
    ids: Tensor | None,
    duplicates: str,
    label_smoothing: float,
    drop_above: float | None,
    weights: Tensor | None,
) -> Tensor:
    same = _same(similarity, ids)
    loss = _cross_entropy(similarity, scale, same, duplicates, label_smoothing, drop_above)
    if symmetric:
        columns = _cross_entropy(similarity.T, scale, same, duplicates, label_smoothing, drop_above)
        loss = (loss + columns) / 2
    return loss.mean() if weights is None else (weights * loss).sum() / weights.sum()


def _cross_entropy(
    similarity: Tensor,
    scale: Tensor | float,
    same: Tensor,
    duplicates: str,
    label_smoothing: float,
    drop_above: float | None,
) -> Tensor:
    positive = same if duplicates == "positive" else _diagonal(similarity)
    counts = positive | ~same
    if drop_above is not None:
        limit = similarity.diagonal()[:, None] + drop_above
        counts = counts & (positive | (similarity <= limit))
    log_p = (scale * similarity).masked_fill(~counts, -torch.inf).log_softmax(1).masked_fill(~counts, 0)
    hard = (log_p * positive).sum(1) / positive.sum(1)
    soft = log_p.sum(1) / counts.sum(1)
    return -(1 - label_smoothing) * hard - label_smoothing * soft
