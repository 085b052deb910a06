"""Every loss as its plain formula, with the whole similarity matrix: the definition that tests, docs and benchmarks share.

x has M rows, y has N >= M rows, both of width D; the positive of row i of x is row i of y.
Memory is O(M·N), and autograd computes the gradients: correct and readable, for batches whose matrix fits in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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


def infonce_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    *,
    directions: Sequence[str] = ("x_to_y",),
    partition: str = "joint",
    ids: Tensor | None = None,
    duplicates: str = "mask",
    label_smoothing: float = 0.0,
    drop_above: float | Mapping[str, float] | None = None,
    drop_ratio: float | Mapping[str, float] | None = None,
    hardness: float = 0.0,
    hardness_on: str = "all",
    guide: Any = None,
    in_batch: bool = True,
    negatives_of: Tensor | None = None,
    queue: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the weighted mean over samples of the cross-entropy of a softmax over the candidates of all directions
    (`partition="joint"`), or averaged over one softmax for each direction (`partition="separate"`) or for each side's directions
    (`partition="by_anchor"`).

    Sample i has in each direction the candidates

        x_to_y: (x_i, y_j) for every j, and (x_i, q_j) for every row of the queue      x_to_x: (x_i, x_j) for j != i
        y_to_x: (y_i, x_j) for every j                                                 y_to_y: (y_i, y_j) for j != i

    where y_j is a positive or a hard negative, except that y_to_y leaves out the hard negatives of sample i. With `in_batch=False`
    x_to_y has the positive, the hard negatives of sample i and the queue. A softmax without x_to_y and y_to_x also gets the
    positive. The loss of a softmax is that of `clip_loss`: pairs with equal ids are left out or further positives. Also left out
    are negatives with z_ij > z_ii + drop_above, with z_ij > drop_ratio * z_ii, and with a guide similarity above g_ii - margin (or
    g_ii - margin * |g_ii|), where z_ii and g_ii are those of the sample's positive. The logit of a candidate is scale * z.
    Negatives in x_to_y have scale * z + hardness * z, with the second z a constant: all of them, the sample's own hard negatives
    ("hard"), or all others ("in_batch").
    """
    tables = _candidates(
        x,
        y,
        scale,
        directions,
        ids,
        duplicates,
        drop_above,
        drop_ratio,
        hardness,
        hardness_on,
        guide,
        in_batch,
        negatives_of,
        queue,
    )
    if not any(direction in ("x_to_y", "y_to_x") for direction in directions):
        positive = scale * (x * y[: len(x)]).sum(1, keepdim=True)
        ones = torch.ones_like(positive, dtype=torch.bool)
        tables.append((positive, ones, ones))
    by_direction = dict(zip((*directions, "positive"), tables, strict=False))
    losses = []
    for part in _softmaxes(list(by_direction), partition):
        logits, is_positive, counts = (torch.cat(parts, 1) for parts in zip(*(by_direction[d] for d in part), strict=True))
        losses.append(_softmax_loss(logits, is_positive, counts, label_smoothing))
    loss = torch.stack(losses).mean(0)
    return loss.mean() if weights is None else (weights * loss).sum() / weights.sum()


def nt_xent_loss(
    a: Tensor, b: Tensor, scale: Tensor | float, *, ids: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return the mean cross-entropy of all rows of both views, each over all rows but itself, with the other view as its target.

    Rows whose samples have equal ids are left out of each other's denominators.
    """
    z, samples = torch.cat([a, b]), len(a)
    labels = torch.arange(2 * samples, device=a.device).roll(samples)
    names = torch.arange(samples, device=a.device) if ids is None else ids
    out = names.repeat(2)[:, None] == names.repeat(2)
    out[torch.arange(2 * samples), labels] = False
    loss = F.cross_entropy((scale * z @ z.T).masked_fill(out, -torch.inf), labels, reduction="none")
    return loss.mean() if weights is None else (weights.repeat(2) * loss).sum() / (2 * weights.sum())


def supcon_loss(x: Tensor, labels: Tensor, scale: Tensor | float, *, weights: Tensor | None = None) -> Tensor:
    """Return the weighted mean, over rows that have positives, of log Σ_{j != i} exp(s_ij) - mean_{p in P_i} s_ip.

    P_i are the other rows with the label of row i.
    """
    logits = scale * x @ x.T
    itself = _diagonal(logits)
    positive = (labels[:, None] == labels) & ~itself
    log_z = logits.masked_fill(itself, -torch.inf).logsumexp(1)
    has = positive.any(1)
    loss = (log_z - (logits * positive).sum(1) / positive.sum(1).clamp(min=1))[has]
    return loss.mean() if weights is None else (weights[has] * loss).sum() / weights[has].sum()


def dcl_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    *,
    directions: Sequence[str] = ("x_to_y", "y_to_x"),
    partition: str = "separate",
    weights: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return the loss of `infonce_loss` without the positive in the denominators: log Σ_{negatives} exp(s_ij) - s_ii.

    A sample without negatives counts as zero.
    """
    positive = scale * (x * y[: len(x)]).sum(1)
    losses = []
    for part in _softmaxes(directions, partition):
        tables = _candidates(x, y, scale, part, **options)
        logits, is_positive, counts = (torch.cat(parts, 1) for parts in zip(*tables, strict=True))
        negatives = logits.masked_fill(is_positive | ~counts, -torch.inf)
        has = (~is_positive & counts).any(1)
        log_z = negatives.masked_fill(~has[:, None], 0).logsumexp(1)
        losses.append(torch.where(has, log_z - positive, 0))
    loss = torch.stack(losses).mean(0)
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
    return _softmax_loss(scale * similarity, positive, counts, label_smoothing)


def _softmax_loss(logits: Tensor, positive: Tensor, counts: Tensor, label_smoothing: float) -> Tensor:
    """Return the cross-entropy of each row over the candidates that count, with equal targets for its positives."""
    log_p = logits.masked_fill(~counts, -torch.inf).log_softmax(1).masked_fill(~counts, 0)
    hard = (log_p * positive).sum(1) / positive.sum(1)
    soft = log_p.sum(1) / counts.sum(1)
    return -(1 - label_smoothing) * hard - label_smoothing * soft


def _softmaxes(directions: Sequence[str], partition: str) -> list[list[str]]:
    """Return the directions of each softmax."""
    part = {direction: {"joint": "", "separate": direction, "by_anchor": direction[0]}[partition] for direction in directions}
    return [[direction for direction in directions if part[direction] == each] for each in dict.fromkeys(part.values())]


def _candidates(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    directions: Sequence[str],
    ids: Tensor | None = None,
    duplicates: str = "mask",
    drop_above: float | Mapping[str, float] | None = None,
    drop_ratio: float | Mapping[str, float] | None = None,
    hardness: float = 0.0,
    hardness_on: str = "all",
    guide: Any = None,
    in_batch: bool = True,
    negatives_of: Tensor | None = None,
    queue: Tensor | None = None,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return for each direction the logits of all candidates, which of them are positives, and which count."""
    rows = len(x)
    positive = (x * y[:rows]).sum(1)
    limits = {direction: _limit(positive.detach(), direction, drop_above, drop_ratio) for direction in directions}
    owner = torch.full((len(y),), -1, device=x.device)
    owner[rows:] = -1 if negatives_of is None else negatives_of.to(owner.dtype)
    own = owner == torch.arange(rows, device=x.device)[:, None]
    tables = []
    for direction in directions:
        anchors, candidates = x if direction[0] == "x" else y[:rows], y if direction[-1] == "y" else x
        similarity = anchors @ candidates.T
        diagonal, same = _diagonal(similarity), _same(similarity, ids)
        is_positive = diagonal if direction in ("x_to_y", "y_to_x") else torch.zeros_like(diagonal)
        if duplicates == "positive":
            is_positive = is_positive | same
        counts = is_positive | ~same
        if direction == "y_to_y":
            counts = counts & ~own
        limit = limits[direction]
        dropped = torch.zeros_like(counts) if limit is None else similarity > limit[:, None]
        if guide is not None:
            dropped = dropped | _guide_drops(guide, direction, rows)
        counts = counts & (is_positive | ~dropped)
        if not in_batch:
            counts = counts & (diagonal | own)
        if direction == "x_to_y" and queue is not None:
            earlier = x @ queue.T
            kept = torch.ones_like(earlier, dtype=torch.bool) if limit is None else earlier <= limit[:, None]
            similarity, counts = torch.cat([similarity, earlier], 1), torch.cat([counts, kept], 1)
            is_positive = torch.cat([is_positive, torch.zeros_like(kept)], 1)
        logits = scale * similarity
        if direction == "x_to_y" and hardness:
            padded = torch.zeros_like(counts)
            padded[:, : len(y)] = own
            hardened = {"all": ~is_positive, "hard": padded & ~is_positive, "in_batch": ~padded & ~is_positive}[hardness_on]
            logits = logits + hardness * (similarity * hardened).detach()
        tables.append((logits, is_positive, counts))
    return tables


def _limit(
    positive: Tensor,
    direction: str,
    drop_above: float | Mapping[str, float] | None,
    drop_ratio: float | Mapping[str, float] | None,
) -> Tensor | None:
    """Return the similarity above which negatives of each sample are left out."""
    above, ratio = (m.get(direction) if isinstance(m, Mapping) else m for m in (drop_above, drop_ratio))
    limits = [positive + above] if above is not None else []
    limits += [ratio * positive] if ratio is not None else []
    return torch.stack(limits).amin(0) if limits else None


def _guide_drops(guide: Any, direction: str, rows: int) -> Tensor:
    """Return the pairs of a direction whose guide similarity is too high."""
    positive = (guide.x * guide.y[:rows]).sum(1)
    margin = guide.margin * positive.abs() if guide.margin_kind == "relative" else guide.margin
    anchors = guide.x if direction[0] == "x" else guide.y[:rows]
    candidates = guide.y if direction[-1] == "y" else guide.x
    return anchors @ candidates.T > (positive - margin)[:, None]
