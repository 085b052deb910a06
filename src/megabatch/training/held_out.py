"""What a model is worth on pairs that it has not seen."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .assembly import Assembly
from .data.loader import once
from .data.order import Order
from .data.source import Source
from .evaluate import retrieval
from .objective import Classification, Contrastive
from .optimizers import Average

# Pairs that are embedded between two exchanges.
AT_ONCE = 8192


class Embedded(NamedTuple):
    """Pairs of a source and their embeddings; `at` says where in the source each of them is."""

    x: Tensor
    y: Tensor
    ids: Tensor
    at: list[tuple[int, int]]


def measure(parts: Assembly, average: Average | None) -> tuple[dict[str, Any], Embedded | None]:
    """Held-out quality, as an evaluation event of the log holds it, by the averaged weights if there are any. All ranks call it."""
    training = parts.model.training
    if average is not None:
        average.swap()
    parts.model.eval()
    try:
        if isinstance(parts.objective, Classification):
            return _accuracy(parts, parts.objective), None
        embedded = embed_source(parts, parts.held_out, parts.run.evaluate.limit)
    finally:
        parts.model.train(training)
        if average is not None:
            average.swap()
    device = parts.ranks.device
    found = retrieval(embedded.x.to(device), embedded.y.to(device), ids=embedded.ids.to(device), tile=parts.run.compute.tile)
    return {"sides": _sides(parts), **found.facts()}, embedded


def _sides(parts: Assembly) -> list[str]:
    """What the two sides are called in front of people."""
    names = {("text", "text"): ["query", "document"], ("picture", "text"): ["picture", "text"]}
    return names.get((parts.x.kind, parts.y.kind), ["x", "y"])


def embed_source(parts: Assembly, source: Source, limit: int) -> Embedded:
    """Embeddings of both sides of at most `limit` pairs of a source, chosen once and for all, on the host of every rank."""
    assert isinstance(parts.objective, Contrastive)
    order = Order(source.lengths, max(1, sum(source.lengths)), 0)
    loader = parts.loader(source, order, augment=False)
    x, y, ids = [], [], []
    at: list[tuple[int, int]] = []
    for batch in loader.batches(once(min(limit, sum(source.lengths)), AT_ONCE)):
        assert batch.ids is not None
        rows = len(batch.keys)
        x.append(parts.ranks.gather_rows(parts.objective.embed(batch.x, "x")))
        y.append(parts.ranks.gather_rows(parts.objective.embed(batch.y, "y")))
        ids.append(parts.ranks.gather_rows(batch.ids[:rows]))
        places = [order.at(position) for position in batch.positions]
        at += [place for rank in parts.ranks.gather(places) for place in rank]
    if not at:
        raise ValueError("none of the held-out samples could be read")
    return Embedded(torch.cat(x), torch.cat(y), torch.cat(ids), at)


def _accuracy(parts: Assembly, objective: Classification) -> dict[str, Any]:
    right = rows = 0.0
    order = Order(parts.held_out.lengths, max(1, sum(parts.held_out.lengths)), 0)
    loader = parts.loader(parts.held_out, order, augment=False)
    for batch in loader.batches(once(min(parts.run.evaluate.limit, sum(parts.held_out.lengths)), AT_ONCE)):
        assert batch.labels is not None
        logits = objective.classify(batch.x).cpu()
        here = float((logits.argmax(1) == batch.labels).sum())
        right, rows = (a + b for a, b in zip((right, rows), parts.ranks.sum(here, len(batch.keys)), strict=True))
    return {"pairs": int(rows), "accuracy": right / rows}
