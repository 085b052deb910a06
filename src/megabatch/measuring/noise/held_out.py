"""The loss of samples that were held out: what batches can be compared by, whatever size they were trained at."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...towers.model import Pair
from ...training.build import Assembly
from ...training.held_out import Embedded, embed_source, evaluation_batches
from ...training.objective import Classification, contrastive_loss


@torch.no_grad()
def held_out_loss(parts: Assembly, pairs: int) -> float:
    """The mean loss of held-out samples, a contrastive one in batches of `pairs`. All ranks call it."""
    training = parts.model.training
    parts.model.eval()
    try:
        if isinstance(parts.objective, Classification):
            return _cross_entropy(parts, parts.objective)
        return _contrastive(parts, embed_source(parts, parts.held_out, parts.run.evaluate.limit), pairs)
    finally:
        parts.model.train(training)


def _contrastive(parts: Assembly, found: Embedded, pairs: int) -> float:
    """By the options of the run. A rest that is no whole batch is left out, since its loss is another one."""
    assert isinstance(parts.model, Pair)
    device = parts.ranks.device
    pairs = min(pairs, len(found.at))
    losses = []
    for first in range(0, len(found.at) - pairs + 1, pairs):
        x, y, ids = (t[first : first + pairs].to(device) for t in (found.x, found.y, found.ids))
        losses.append(contrastive_loss(parts.model, parts.run, x, y, ids, group=None))
    return float(torch.stack(losses).mean())


def _cross_entropy(parts: Assembly, objective: Classification) -> float:
    loss = rows = 0.0
    for batch in evaluation_batches(parts, parts.held_out, parts.run.evaluate.limit, []):
        assert batch.labels is not None
        logits = objective.classify(batch.x).float().cpu()
        here = F.cross_entropy(logits, batch.labels, label_smoothing=parts.run.loss.label_smoothing, reduction="sum")
        loss, rows = (a + b for a, b in zip((loss, rows), parts.ranks.sum(float(here), len(batch.keys)), strict=True))
    return loss / rows
