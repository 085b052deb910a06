"""Retrieval trainers (Tevatron, FlagEmbedding, ms-swift): their layouts of passages, and our loss in their call signatures.

Tevatron and FlagEmbedding interleave passages: with G passages for each query, the positive of query i is passage i·G, and its hard
negatives follow. ms-swift interleaves queries too. Our losses take [positives; negatives]. None of these packages is imported here;
docs/trainers.md shows where each class goes.

The gradient after DDP's average is that of the mean over the queries of all ranks. FlagEmbedding's own, and ms-swift's before 4.6,
is 1/W of it on W ranks: with an optimizer that follows the gradient's scale (SGD), divide the learning rate by W to train as
before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..losses import clip_loss
from ..ring import Group


def positives_first(passages: Tensor, queries: int) -> Tensor:
    """Return interleaved passages as [positives; negatives]: passage i·G is the positive of query i, with G = passages / queries.

    passages: (N·G, …): embeddings, or numbers such as ids.

    >>> positives_first(torch.arange(6).view(6, 1), queries=2).flatten().tolist()
    [0, 3, 1, 2, 4, 5]
    """
    if queries < 1 or len(passages) % queries:
        raise ValueError(f"{len(passages)} passages for {queries} queries: every query must have the same number of passages")
    grouped = passages.unflatten(0, (queries, -1))
    return torch.cat([grouped[:, 0], grouped[:, 1:].flatten(0, 1)])


class QueriesAndPassages(NamedTuple):
    """queries: (N, D). passages: the N positives in the order of the queries, then all hard negatives."""

    queries: Tensor
    passages: Tensor


def split_by_labels(rows: Tensor, labels: Tensor) -> QueriesAndPassages:
    """Return ms-swift's rows (anchor, positive, negatives…, anchor, positive, …) as queries and [positives; negatives].

    labels: one for each row that is no anchor: 1 for a positive, 0 for a negative. The numbers of negatives may differ.

    >>> queries, passages = split_by_labels(torch.arange(5).view(5, 1), torch.tensor([1, 0, 1]))
    >>> queries.flatten().tolist(), passages.flatten().tolist()
    ([0, 3], [1, 4, 2])
    """
    positives = labels.flatten().nonzero().flatten()
    if len(labels.flatten()) + len(positives) != len(rows) or (len(positives) and positives[0] != 0):
        raise ValueError(
            f"{len(rows)} rows and {labels.numel()} labels with {len(positives)} positives: there must be one label for each row "
            "that is no anchor, the first of them a positive"
        )
    # One anchor stands before each positive.
    anchors = positives + torch.arange(len(positives), device=positives.device)
    is_negative = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    is_negative[anchors] = is_negative[anchors + 1] = False
    return QueriesAndPassages(rows[anchors], torch.cat([rows[anchors + 1], rows[is_negative]]))


def grouped_loss(
    queries: Tensor, passages: Tensor, scale: Tensor | float, *, ids: Tensor | None = None, group: Group = ..., **options: Any
) -> Tensor:
    """Return the loss of queries against all passages, where those of a query stand together, its positive first.

    passages: (N·G, D) for N queries, or (N, G, D): then it is a loss for a Trainer whose model returns both by name,
        `megabatch.adapters.transformers.ContrastiveSettings(loss=grouped_loss)`.
    scale: 1 / temperature. ids: one for each passage, in their order. group and options: as in `megabatch.clip_loss`.
    """
    if passages.ndim == 3:
        passages = passages.flatten(0, 1)
    if ids is not None:
        ids = positives_first(ids.flatten(), len(queries))
    passages = positives_first(passages, len(queries))
    return clip_loss(queries, passages, scale, symmetric=False, ids=ids, group=group, **options)


class SimpleContrastiveLoss:
    """A drop-in for Tevatron's class of this name: this rank's queries against its own passages.

    temperature: Tevatron's gradient cache ignores its `--temperature`; here it is used.
    """

    def __init__(self, *, temperature: float = 1.0) -> None:
        self.scale = 1 / temperature

    def __call__(self, x: Tensor, y: Tensor, target: Tensor | None = None, reduction: str = "mean") -> Tensor:
        _check_call(target, reduction)
        return grouped_loss(x, y, self.scale, group=None)


class DistributedContrastiveLoss(SimpleContrastiveLoss):
    """A drop-in for Tevatron's class of this name: queries and passages of all ranks.

    scale_loss: the value is multiplied by the number of ranks, as in Tevatron, whose trainer divides it again; DDP's average of
        gradients is then that of the mean over all queries. False: it is 1/W of that.
    """

    def __init__(self, n_target: int = 0, scale_loss: bool = True, *, temperature: float = 1.0) -> None:
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialised: start with torchrun, or use SimpleContrastiveLoss")
        super().__init__(temperature=temperature)
        self.scale_loss = scale_loss

    def __call__(self, x: Tensor, y: Tensor, target: Tensor | None = None, reduction: str = "mean") -> Tensor:
        _check_call(target, reduction)
        loss, ranks = grouped_loss(x, y, self.scale, group=dist.group.WORLD), dist.get_world_size()
        if self.scale_loss:
            return loss + (ranks - 1) * loss.detach()
        return loss.detach() + (loss - loss.detach()) / ranks


def _check_call(target: Tensor | None, reduction: str) -> None:
    if target is not None or reduction != "mean":
        raise ValueError(
            f"target={'…' if target is not None else None}, reduction={reduction!r}: the positive of query i must be passage i·G, "
            "and the "
            'reduction "mean"; leave both out'
        )


class InBatchLossMixin:
    """Replaces the losses with in-batch negatives of a FlagEmbedding model; put it before the model's class.

    A teacher and scores by a function (BGE-M3) are left to FlagEmbedding. The scores are returned as None: nothing but BGE-M3
    reads them.
    """

    temperature: float

    def _compute_in_batch_neg_loss(
        self, q_reps: Any, p_reps: Any, teacher_targets: Any = None, compute_score_func: Any = None, **kwargs: Any
    ) -> Any:
        if not _is_plain(q_reps, teacher_targets, compute_score_func):
            theirs: Any = super()
            return theirs._compute_in_batch_neg_loss(q_reps, p_reps, teacher_targets, compute_score_func, **kwargs)
        return None, grouped_loss(q_reps, p_reps, 1 / self.temperature, group=None)

    def _compute_cross_device_neg_loss(
        self, q_reps: Any, p_reps: Any, teacher_targets: Any = None, compute_score_func: Any = None, **kwargs: Any
    ) -> Any:
        if not _is_plain(q_reps, teacher_targets, compute_score_func):
            theirs: Any = super()
            return theirs._compute_cross_device_neg_loss(q_reps, p_reps, teacher_targets, compute_score_func, **kwargs)
        return None, grouped_loss(q_reps, p_reps, 1 / self.temperature, group=dist.group.WORLD)


def _is_plain(q_reps: Any, teacher_targets: Any, compute_score_func: Any) -> bool:
    return isinstance(q_reps, Tensor) and teacher_targets is None and compute_score_func is None


class InfonceLoss:
    """A loss for ms-swift's table of losses, as its `infonce`: queries against the passages of all ranks.

    args, trainer: what ms-swift passes. temperature: ms-swift's default is 0.1. group: the ranks that share the batch; by default
        all.
    """

    def __init__(
        self, args: Any = None, trainer: Any = None, *, temperature: float = 0.1, group: Group | None = ..., **options: Any
    ) -> None:
        self.args, self.trainer, self.scale, self.options = args, trainer, 1 / temperature, options
        self._group = group

    def __call__(self, outputs: Any, labels: Tensor, **kwargs: Any) -> Tensor:
        queries, passages = split_by_labels(outputs["last_hidden_state"], labels)
        group: Any = self._group
        if group is ...:
            group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        return clip_loss(queries, passages, self.scale, symmetric=False, group=group, **self.options)
