"""How good a model is: recall, median rank, nearest neighbours and zero-shot accuracy of embeddings, and a run's held-out quality.

Similarities are computed tile by tile: a million embeddings against a million fit wherever the embeddings themselves do. They are
dot products; normalise the embeddings first for cosine similarities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.collate import SkippedSample
from ..data.duplicates import join_ids
from ..data.loader import RankBatch, one_pass
from ..data.sampler import Order
from ..data.source import Source
from ..recall import RECALL_AT
from ..tiles import backend_for
from ..tiles.contract import ComputeOptions, Pairs, accumulator
from ..towers.model import Pair
from .build import Assembly
from .objective import Classification, Contrastive, contrastive_loss
from .optimizer import Average
from .run_logger import RunLogger

# Working memory of `nearest` and `zero_shot`, in bytes.
WORKSPACE = 32 * 2**20
# Bytes of one similarity, its sortable key and their temporaries.
CELL_BYTES = 32
LOW_HALF = 2**32 - 1
# Rows whose partners are looked for at once, at most.
PARTNER_ROWS = 256
# Held-out pairs that are embedded between two exchanges among ranks.
EVALUATION_BATCH = 8192


class Retrieval(NamedTuple):
    """How often the partner of a row is found, in both directions.

    pairs: rows of the longer side.
    x_to_y, y_to_x: recall at k, the fraction of rows with a partner among the k most similar rows of the other side.
    x_median_rank, y_median_rank: the median rank of the best partner; 1 is best.
    """

    pairs: int
    x_to_y: dict[int, float]
    y_to_x: dict[int, float]
    x_median_rank: float
    y_median_rank: float

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON has them, with strings as keys.

        >>> retrieval(torch.eye(3), torch.eye(3)).as_json()["x_to_y"]
        {'1': 1.0, '5': 1.0, '10': 1.0}
        """
        return {
            name: {str(k): recall for k, recall in value.items()} if isinstance(value, dict) else value
            for name, value in self._asdict().items()
        }


@torch.no_grad()
def retrieval(
    x: Tensor,
    y: Tensor,
    *,
    ids: Tensor | tuple[Tensor, Tensor] | None = None,
    workspace: int | None = None,
    backend: str | None = None,
) -> Retrieval:
    """Return recall at 1, 5 and 10 and the median rank in both directions, where row i of x is the partner of row i of y.

    x, y: (N, D), on one device. workspace: working memory in bytes. backend: "eager" or "fused". None chooses both by device.
    ids: (N,) integers, one for each pair, or the ids of x and those of y, whose numbers of rows may then differ. Rows of x and y
        with equal ids are partners (one caption of several images, several captions of one image): the rank of a row is that of the
        best of its partners among all rows that are none. An image with five captions can be one row of x and five of y, which
        gives the usual recall, or five pairs, where it counts five times as a rival of other images.

    Ties count against the partner, and similarities that differ by rounding alone are ties: a model that gives every row the same
    embedding has a recall of zero, not of one.

    >>> retrieval(torch.eye(3), torch.eye(3)[[0, 2, 1]]).x_to_y[1]
    0.3333333333333333
    """
    _check_pairs(x, y, ids)
    _check_workspace(workspace)
    x_ids, y_ids = ids if isinstance(ids, tuple) else (ids, ids)
    tiles = backend_for(x.device, x.dtype, backend)
    compute = ComputeOptions(tiles.default_workspace(x.device) if workspace is None else workspace)
    x, y = x.contiguous(), y.contiguous()
    with torch.autocast(x.device.type, enabled=False):
        if x_ids is None or y_ids is None or _are_pairs(x_ids, y_ids):
            positives = tiles.positives(x, y, compute)
            threshold = positives - _rounding(x.shape[1], positives.dtype) * _norms(x) * _norms(y)
            pairs = Pairs(is_local=True, positive_M=threshold, positive_N=threshold, ranked=True)
        else:
            x_ids, y_ids = x_ids.to(x.device).contiguous(), y_ids.to(x.device).contiguous()
            best_x = _best_partners(x, y, x_ids, y_ids, compute.workspace)
            best_y = _best_partners(y, x, y_ids, x_ids, compute.workspace)
            pairs = Pairs(ids_M=x_ids, ids_N=y_ids, positive_M=best_x, positive_N=best_y, ranked=True)
        assert pairs.positive_M is not None
        _check_finite(pairs.positive_M, "pairs")
        # The pass also computes sums of exponentials, which are not used: a scale of zero keeps them in range.
        stats = tiles.softmax_stats(x, y, pairs.positive_M.new_zeros(()), pairs, columns=True, compute=compute)
    assert stats.row_ranking is not None and stats.column_ranking is not None
    rows, columns = stats.row_ranking.ahead, stats.column_ranking.ahead
    return Retrieval(max(len(x), len(y)), _recall(rows), _recall(columns), _median_rank(rows), _median_rank(columns))


@torch.no_grad()
def nearest(queries: Tensor, documents: Tensor, k: int, *, workspace: int = WORKSPACE) -> tuple[Tensor, Tensor]:
    """Return the similarities and indices, each (queries, k), of the k documents most similar to each query, best first.

    Similarities are compared in fp32; among equal ones the document with the lower index comes first. workspace: working memory in
    bytes, in addition to the result.

    >>> nearest(torch.eye(3)[:1], torch.tensor([[0.0, 1, 0], [2, 0, 0], [1, 0, 0]]), 2)
    (tensor([[2., 1.]]), tensor([[1, 2]]))
    """
    _check_matrices(queries, documents, "queries", "documents")
    _check_workspace(workspace)
    if not 1 <= k <= len(documents):
        raise ValueError(f"k={k!r}: must be at least 1 and at most {len(documents)}, the number of documents")
    assert len(documents) <= LOW_HALF
    blocks = queries.split(_query_rows(workspace, k)) if len(queries) else ()
    best = [_nearest(rows, documents, k, workspace) for rows in blocks]
    keys = torch.cat(best) if best else torch.empty(0, k, dtype=torch.int64, device=queries.device)
    return _similarities_of(keys), LOW_HALF - (keys & LOW_HALF)


@torch.no_grad()
def zero_shot(images: Tensor, classes: Tensor, labels: Tensor, k: Sequence[int] = (1, 5)) -> dict[int, float]:
    """The share of images, in [0, 1], whose class is among the k most similar ones, for each k. Ties count as errors.

    images: (N, D); classes: (C, D), see `class_embeddings`; labels: (N,) integers below C.
    """
    _check_matrices(images, classes, "images", "classes")
    if labels.shape != images.shape[:1] or labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"labels is {labels.dtype} of shape {tuple(labels.shape)}: must be one integer for each of {len(images)} images"
        )
    if not len(labels) or not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        raise ValueError(f"labels must be of at least one image, and lie between 0 and {len(classes) - 1}, the last class")
    labels = labels.to(images.device, torch.int64)
    rows = max(1, WORKSPACE // (CELL_BYTES * len(classes)))
    ahead = [_classes_ahead(block, classes, own) for block, own in zip(images.split(rows), labels.split(rows), strict=True)]
    return {n: _fraction(torch.cat(ahead), n) for n in k}


@torch.no_grad()
def class_embeddings(
    encode_texts: Callable[[list[str]], Tensor], names: Sequence[str], templates: Sequence[str] = ("{}",)
) -> Tensor:
    """Return one normalised embedding for each class, (names, D): the mean of its normalised embeddings over templates.

    encode_texts: returns embeddings (texts, D). templates: texts with "{}" where the name goes, "a photo of a {}".
    """
    if not templates or not names:
        raise ValueError(f"{len(names)} names and {len(templates)} templates: classes need at least one of each")
    for template in templates:
        if "{}" not in template:
            raise ValueError(f"template {template!r}: must hold {{}} where the name of the class goes, as in 'a photo of a {{}}'")
    # Not str.format: a name or a template is text, and may hold other braces.
    total = sum(F.normalize(encode_texts([t.replace("{}", name) for name in names]).float(), dim=1) for t in templates)
    assert isinstance(total, Tensor)
    _check_finite(total.sum(1), "class names")
    return F.normalize(total, dim=1)


class Embedded(NamedTuple):
    """Pairs of a source and their embeddings. at: the place of each pair in the source. bad: samples that could not be read.

    ids: equal for duplicates (`join_ids`). x_ids, y_ids: equal for equal rows of one side.
    """

    x: Tensor
    y: Tensor
    ids: Tensor
    x_ids: Tensor
    y_ids: Tensor
    at: list[tuple[int, int]]
    bad: list[SkippedSample]


class NothingReadable(ValueError):
    """None of the held-out samples can be read; `bad` lists them."""

    def __init__(self, bad: list[SkippedSample]) -> None:
        super().__init__(f"none of {len(bad):,} held-out samples can be read; the first one: {bad[0].key}: {bad[0].reason}")
        self.bad = bad


def evaluate_and_log(
    parts: Assembly, average: Average | None, logger: RunLogger, **at: int
) -> tuple[dict[str, Any], Embedded | None]:
    """Measure held-out quality and log it, with each sample that cannot be read. `at`: step and samples of the evaluation.

    If nothing can be read, that is logged and the result is empty: the training does not depend on it.
    """
    try:
        quality, embedded = evaluate_held_out(parts, average)
        bad: list[SkippedSample] = quality.pop("unreadable")
    except NothingReadable as error:
        quality, embedded, bad = {}, None, error.bad
    new = [sample for sample in bad if logger.bad(sample.key, sample.reason, split="held-out", **at)]
    if new:
        count = f"{len(bad):,} of {len(bad) + quality.get('pairs', 0):,} held-out samples"
        logger.say(f"{count} cannot be read and are not evaluated; log.jsonl names them. One is {new[0].key}: {new[0].reason}")
    if quality:
        logger.event("evaluation", **at, **quality)
    return quality, embedded


def evaluate_held_out(parts: Assembly, average: Average | None) -> tuple[dict[str, Any], Embedded | None]:
    """Return the held-out quality, with the averaged weights if there are any, and the embeddings. All ranks call it.

    The quality is what an evaluation event of the log holds: "bad" is the number of samples that could not be read. In addition it
    has "unreadable", the list of these samples. Raises NothingReadable where none can be read.
    """
    was_training = parts.model.training
    if average is not None:
        average.swap()
    parts.model.eval()
    try:
        if isinstance(parts.objective, Classification):
            return _accuracy(parts, parts.objective), None
        embedded = embed_source(parts, parts.held_out, parts.run.evaluate.limit)
    finally:
        parts.model.train(was_training)
        if average is not None:
            average.swap()
    device = parts.ranks.device
    # An image with several captions asks once, and counts once among the answers; so does a caption of several images.
    rows = _first_rows(embedded.x_ids), _first_rows(embedded.y_ids)
    x, y = embedded.x[rows[0]].to(device), embedded.y[rows[1]].to(device)
    recall = retrieval(x, y, ids=(embedded.ids[rows[0]], embedded.ids[rows[1]]), workspace=parts.run.compute.workspace)
    recall = recall._replace(pairs=len(embedded.at))
    bad = {"bad": len(embedded.bad), "unreadable": embedded.bad}
    # What chance depends on: with five captions for each image, any of which counts, the images.
    return {"sides": _sides(parts), **recall.as_json(), "different": min(len(x), len(y)), **bad}, embedded


@torch.no_grad()
def held_out_loss(parts: Assembly, pairs: int) -> float:
    """Return the mean loss of held-out samples; a contrastive loss is computed in batches of `pairs`. All ranks call it."""
    was_training = parts.model.training
    parts.model.eval()
    try:
        if isinstance(parts.objective, Classification):
            return _cross_entropy(parts, parts.objective)
        return _mean_contrastive_loss(parts, embed_source(parts, parts.held_out, parts.run.evaluate.limit), pairs)
    finally:
        parts.model.train(was_training)


def embed_source(parts: Assembly, source: Source, limit: int) -> Embedded:
    """Return the embeddings of at most `limit` pairs of a source, always the same ones, in host memory on every rank."""
    assert isinstance(parts.objective, Contrastive)
    order = evaluation_order(source)
    x, y, x_ids, y_ids = [], [], [], []
    at: list[tuple[int, int]] = []
    bad: list[SkippedSample] = []
    for batch in evaluation_batches(parts, source, limit, bad):
        assert batch.ids is not None and batch.x_ids is not None
        rows = len(batch.keys)
        x.append(parts.ranks.gather_rows(parts.objective.embed(batch.x, "x")))
        y.append(parts.ranks.gather_rows(parts.objective.embed(batch.y, "y")))
        x_ids.append(parts.ranks.gather_rows(batch.x_ids))
        y_ids.append(parts.ranks.gather_rows(batch.ids[:rows]))
        places = [order.at(position) for position in batch.positions]
        at += [place for rank in parts.ranks.gather(places) for place in rank]
    ids = join_ids(torch.cat(x_ids), torch.cat(y_ids))
    return Embedded(torch.cat(x), torch.cat(y), ids, torch.cat(x_ids), torch.cat(y_ids), at, bad)


def evaluation_batches(parts: Assembly, source: Source, limit: int, bad: list[SkippedSample]) -> Iterator[RankBatch]:
    """Yield batches of at most `limit` samples of a source, always the same ones, without augmentation. All ranks call it.

    Batches without rows on any rank are left out; NothingReadable is raised if none is left. Samples of all ranks that cannot be
    read are appended to `bad`.
    """
    loader = parts.loader(source, evaluation_order(source), augment=False)
    is_empty = True
    for batch in loader.batches(one_pass(min(limit, sum(source.lengths)), EVALUATION_BATCH)):
        ranks = parts.ranks.gather((len(batch.keys), batch.x is not None, batch.bad))
        bad += [sample for _, _, unread in ranks for sample in unread]
        if not any(rows for rows, _, _ in ranks):
            continue
        if not all(shaped for _, shaped, _ in ranks):
            raise ValueError(f"almost no held-out sample can be read; the last one: {bad[-1].key}: {bad[-1].reason}")
        is_empty = False
        yield batch
    if is_empty:
        raise NothingReadable(bad)


def evaluation_order(source: Source) -> Order:
    """Return the order in which evaluations take the samples of a source: shuffled as a whole, always in the same way."""
    return Order(source.lengths, max(1, sum(source.lengths)), 0)


def _sides(parts: Assembly) -> list[str]:
    """Return the names of the two sides for reports."""
    names = {("text", "text"): ["query", "document"], ("image", "text"): ["image", "text"]}
    return names.get((parts.x.kind, parts.y.kind), ["x", "y"])


def _accuracy(parts: Assembly, objective: Classification) -> dict[str, Any]:
    right = rows = 0.0
    bad: list[SkippedSample] = []
    for batch in evaluation_batches(parts, parts.held_out, parts.run.evaluate.limit, bad):
        assert batch.labels is not None
        logits = objective.classify(batch.x).cpu()
        correct = float((logits.argmax(1) == batch.labels).sum())
        right, rows = (a + b for a, b in zip((right, rows), parts.ranks.sum(correct, len(batch.keys)), strict=True))
    return {"pairs": int(rows), "accuracy": right / rows, "bad": len(bad), "unreadable": bad}


def _mean_contrastive_loss(parts: Assembly, embedded: Embedded, pairs: int) -> float:
    """Return the mean over batches of the run's own loss. A smaller rest is left out, since it has fewer negatives."""
    assert isinstance(parts.model, Pair)
    device = parts.ranks.device
    pairs = min(pairs, len(embedded.at))
    losses = []
    for first in range(0, len(embedded.at) - pairs + 1, pairs):
        x, y, ids = (t[first : first + pairs].to(device) for t in (embedded.x, embedded.y, embedded.ids))
        losses.append(contrastive_loss(parts.model, parts.run, x, y, ids, group=None))
    return float(torch.stack(losses).mean())


def _cross_entropy(parts: Assembly, objective: Classification) -> float:
    loss = rows = 0.0
    for batch in evaluation_batches(parts, parts.held_out, parts.run.evaluate.limit, []):
        assert batch.labels is not None
        logits = objective.classify(batch.x).float().cpu()
        total = F.cross_entropy(logits, batch.labels, label_smoothing=parts.run.loss.label_smoothing, reduction="sum")
        loss, rows = (a + b for a, b in zip((loss, rows), parts.ranks.sum(float(total), len(batch.keys)), strict=True))
    return loss / rows


def _first_rows(ids: Tensor) -> Tensor:
    """Return the first row with each id, in order."""
    first: dict[int, int] = {}
    for row, number in enumerate(ids.tolist()):
        first.setdefault(number, row)
    return torch.tensor(list(first.values()))


def _are_pairs(x_ids: Tensor, y_ids: Tensor) -> bool:
    """Return whether row i of x has one partner, row i of y."""
    return torch.equal(x_ids, y_ids) and len(x_ids.unique()) == len(x_ids)


def _best_partners(x: Tensor, y: Tensor, x_ids: Tensor, y_ids: Tensor, workspace: int) -> Tensor:
    """Return for each row of x its similarity to the most similar row of y with the same id, less what rounding may add."""
    dtype = accumulator(x.dtype)
    rounding = _rounding(x.shape[1], dtype)
    # In the order of the ids, the partners of a block of rows are neighbours.
    x_order, y_order = x_ids.argsort(), y_ids.argsort()
    sorted_ids = y_ids[y_order]
    best = torch.empty(len(x), dtype=dtype, device=x.device)
    rows = max(1, min(PARTNER_ROWS, workspace // (4 * CELL_BYTES)))
    columns = max(1, workspace // (CELL_BYTES * rows))
    for block in x_order.split(rows):
        own = x_ids[block]
        start, stop = (int(torch.searchsorted(sorted_ids, own[end], right=end == -1)) for end in (0, -1))
        highest = torch.full((len(block),), -math.inf, dtype=dtype, device=x.device)
        for others in y_order[start:stop].split(columns):
            z = x[block].to(dtype) @ y[others].to(dtype).T
            z -= rounding * _norms(x[block])[:, None] * _norms(y[others])
            # A partner that is not finite makes the row so too.
            z = z.masked_fill(own[:, None] != y_ids[others], -math.inf)
            highest = torch.maximum(highest, z.amax(1))
        best[block] = highest
    return best


def _rounding(width: int, dtype: torch.dtype) -> float:
    """Return a bound on how far two sums of the same products in different order usually differ, for rows of norm one."""
    return math.sqrt(width) * torch.finfo(dtype).eps


def _norms(t: Tensor) -> Tensor:
    return torch.linalg.vector_norm(t, dim=1, dtype=accumulator(t.dtype))


def _recall(ahead: Tensor) -> dict[int, float]:
    return {k: _fraction(ahead, k) for k in RECALL_AT}


def _fraction(ahead: Tensor, k: int) -> float:
    return int((ahead < k).sum()) / len(ahead)


def _median_rank(ahead: Tensor) -> float:
    ranks = ahead.sort().values + 1
    return float(ranks[(len(ranks) - 1) // 2] + ranks[len(ranks) // 2]) / 2


def _query_rows(workspace: int, k: int) -> int:
    """Return the queries of one block, such that the best documents so far take at most a quarter of the working memory."""
    return max(1, min(256, workspace // (4 * CELL_BYTES * k)))


def _nearest(rows: Tensor, documents: Tensor, k: int, workspace: int) -> Tensor:
    """Return the keys of the k best documents of some queries, in descending order."""
    # Converting documents to fp32 may copy them.
    columns = max(1, workspace // (CELL_BYTES * len(rows) + 4 * documents.shape[1]))
    best = torch.empty(len(rows), 0, dtype=torch.int64, device=rows.device)
    for start in range(0, len(documents), columns):
        z = _products(rows, documents[start : start + columns])
        _check_finite(z, "similarities")
        keys = torch.cat([best, _keys(z, start)], dim=1)
        best = keys.topk(min(k, keys.shape[1]), dim=1).values
    return best


def _products(rows: Tensor, columns: Tensor) -> Tensor:
    with torch.autocast(rows.device.type, enabled=False):
        return rows.float() @ columns.float().T


def _keys(z: Tensor, start: int) -> Tensor:
    """Return integers in the order of the similarities and, among equal ones, in the reverse order of the indices.

    topk does not specify which of equal numbers it takes; keys are never equal.
    """
    # The bits of positive fp32 numbers are ordered as integers, those of negative ones after all bits but the sign are flipped.
    # Adding zero makes -0.0 equal to 0.0.
    bits = (z + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    index = torch.arange(start, start + z.shape[1], device=z.device)
    return ordered.long().bitwise_left_shift_(32).bitwise_or_(LOW_HALF - index)


def _similarities_of(keys: Tensor) -> Tensor:
    ordered = (keys >> 32).int()
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _classes_ahead(images: Tensor, classes: Tensor, labels: Tensor) -> Tensor:
    z = _products(images, classes)
    _check_finite(z, "similarities")
    own = z.gather(1, labels[:, None]).squeeze(1)
    threshold = own - _rounding(classes.shape[1], z.dtype) * _norms(images) * _norms(classes)[labels]
    return (z >= threshold[:, None]).sum(1) - 1


def _check_matrices(a: Tensor, b: Tensor, a_name: str, b_name: str) -> None:
    for name, t in ((a_name, a), (b_name, b)):
        if t.ndim != 2 or t.shape[1] == 0 or not t.is_floating_point():
            raise ValueError(f"{name} is {t.dtype} of shape {tuple(t.shape)}: must be floating-point embeddings, (rows, width)")
    if a.shape[1] != b.shape[1] or a.device != b.device:
        raise ValueError(
            f"{a_name} has width {a.shape[1]} on {a.device} and {b_name} {b.shape[1]} on {b.device}: must be equal; embed both with"
            " the two towers of one model, on one device"
        )


def _check_pairs(x: Tensor, y: Tensor, ids: Tensor | tuple[Tensor, Tensor] | None) -> None:
    _check_matrices(x, y, "x", "y")
    # With ids of its own, a side has any number of rows.
    lengths_fit = len(x) == len(y) or isinstance(ids, tuple)
    if not lengths_fit or x.dtype != y.dtype or not len(x) or not len(y):
        raise ValueError(f"x has {len(x)} rows of {x.dtype} and y {len(y)} of {y.dtype}: must be pairs, at least one, of one dtype")
    if ids is None:
        return
    x_ids, y_ids = ids if isinstance(ids, tuple) else (ids, ids)
    for side, own in ((x, x_ids), (y, y_ids)):
        if own.shape != side.shape[:1] or own.is_floating_point() or own.dtype == torch.bool:
            raise ValueError(f"ids is {own.dtype} of shape {tuple(own.shape)}: must be one integer for each of {len(side)} rows")
    alone = int((~torch.isin(x_ids, y_ids)).sum()) + int((~torch.isin(y_ids, x_ids)).sum())
    if alone:
        raise ValueError(f"ids: {alone} rows have an id that no row of the other side has; leave out rows without a partner")


def _check_workspace(workspace: int | None) -> None:
    if workspace is not None and workspace < 1:
        raise ValueError(f"workspace={workspace!r}: must be a positive number of bytes of working memory, for example {WORKSPACE}")


def _check_finite(values: Tensor, what: str) -> None:
    """Raise ValueError where a similarity is not finite: no comparison with NaN is true, so a broken model would look perfect."""
    bad = values.numel() - int(torch.isfinite(values).sum())
    if bad:
        raise ValueError(
            f"{bad} of {values.numel()} {what} have embeddings that are not finite; the model has diverged or overflows"
        )
