"""What a model is worth on pairs that it has not seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data.collate import SkippedSample
from ..data.loader import RankBatch, one_pass
from ..data.sampler import Order
from ..data.source import Source
from .build import Assembly
from .evaluate import retrieval
from .objective import Classification, Contrastive
from .optimizer import Average
from .run_logger import Watch

# Pairs that are embedded between two exchanges.
AT_ONCE = 8192


class Embedded(NamedTuple):
    """Pairs of a source and their embeddings; `at` says where in the source each of them is, `bad` which ones could not be read."""

    x: Tensor
    y: Tensor
    ids: Tensor
    at: list[tuple[int, int]]
    bad: list[SkippedSample]


class NothingReadable(ValueError):
    """None of the held-out samples can be read; `bad` are the samples."""

    def __init__(self, bad: list[SkippedSample]) -> None:
        super().__init__(f"none of {len(bad):,} held-out samples can be read; the first one: {bad[0].key}: {bad[0].reason}")
        self.bad = bad


def evaluated(parts: Assembly, average: Average | None, watch: Watch, **at: int) -> tuple[dict[str, Any], Embedded | None]:
    """Measure held-out quality and log it, with each sample that cannot be read. `at`: step and samples of the evaluation.

    If nothing can be read, that is said, and the result is empty: the training does not depend on it.
    """
    try:
        found, embedded = measure(parts, average)
        bad: list[SkippedSample] = found.pop("unreadable")
    except NothingReadable as error:
        found, embedded, bad = {}, None, error.bad
    new = [each for each in bad if watch.bad(each.key, each.reason, split="held-out", **at)]
    if new:
        count = f"{len(bad):,} of {len(bad) + found.get('pairs', 0):,} held-out samples"
        watch.say(f"{count} cannot be read and are not evaluated; log.jsonl names them. One is {new[0].key}: {new[0].reason}")
    if found:
        watch.event("evaluation", **at, **found)
    return found, embedded


def measure(parts: Assembly, average: Average | None) -> tuple[dict[str, Any], Embedded | None]:
    """Held-out quality by the averaged weights if there are any. All ranks call it.

    The result is what an evaluation event of the log holds; "bad" is how many samples could not be read, and "unreadable", which
    the log does not hold, a list of them. NothingReadable where all of them are.
    """
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
    found = retrieval(
        embedded.x.to(device), embedded.y.to(device), ids=embedded.ids.to(device), workspace=parts.run.compute.workspace
    )
    bad = {"bad": len(embedded.bad), "unreadable": embedded.bad}
    return {"sides": _sides(parts), **found.facts(), **bad}, embedded


def _sides(parts: Assembly) -> list[str]:
    """What the two sides are called in front of people."""
    names = {("text", "text"): ["query", "document"], ("image", "text"): ["image", "text"]}
    return names.get((parts.x.kind, parts.y.kind), ["x", "y"])


def embed_source(parts: Assembly, source: Source, limit: int) -> Embedded:
    """Embeddings of both sides of at most `limit` pairs of a source, chosen once and for all, on the host of every rank."""
    assert isinstance(parts.objective, Contrastive)
    order = _order(source)
    x, y, ids = [], [], []
    at: list[tuple[int, int]] = []
    bad: list[SkippedSample] = []
    for batch in evaluation_batches(parts, source, limit, bad):
        assert batch.ids is not None
        rows = len(batch.keys)
        x.append(parts.ranks.gather_rows(parts.objective.embed(batch.x, "x")))
        y.append(parts.ranks.gather_rows(parts.objective.embed(batch.y, "y")))
        ids.append(parts.ranks.gather_rows(batch.ids[:rows]))
        places = [order.at(position) for position in batch.positions]
        at += [place for rank in parts.ranks.gather(places) for place in rank]
    return Embedded(torch.cat(x), torch.cat(y), torch.cat(ids), at, bad)


def evaluation_batches(parts: Assembly, source: Source, limit: int, bad: list[SkippedSample]) -> Iterator[RankBatch]:
    """Batches of at most `limit` samples of a source, always the same ones, without augmentation. All ranks call it.

    Batches without rows on any rank are left out, and NothingReadable is raised if that leaves none. Samples of all ranks that
    cannot be read are added to `bad`.
    """
    loader = parts.loader(source, _order(source), augment=False)
    found = False
    for batch in loader.batches(one_pass(min(limit, sum(source.lengths)), AT_ONCE)):
        ranks = parts.ranks.gather((len(batch.keys), batch.x is not None, batch.bad))
        bad += [each for _, _, unread in ranks for each in unread]
        if not any(rows for rows, _, _ in ranks):
            continue
        if not all(shaped for _, shaped, _ in ranks):
            raise ValueError(f"hardly any held-out sample can be read; the last one: {bad[-1].key}: {bad[-1].reason}")
        found = True
        yield batch
    if not found:
        raise NothingReadable(bad)


def _order(source: Source) -> Order:
    return Order(source.lengths, max(1, sum(source.lengths)), 0)


def _accuracy(parts: Assembly, objective: Classification) -> dict[str, Any]:
    right = rows = 0.0
    bad: list[SkippedSample] = []
    for batch in evaluation_batches(parts, parts.held_out, parts.run.evaluate.limit, bad):
        assert batch.labels is not None
        logits = objective.classify(batch.x).cpu()
        here = float((logits.argmax(1) == batch.labels).sum())
        right, rows = (a + b for a, b in zip((right, rows), parts.ranks.sum(here, len(batch.keys)), strict=True))
    return {"pairs": int(rows), "accuracy": right / rows, "bad": len(bad), "unreadable": bad}
