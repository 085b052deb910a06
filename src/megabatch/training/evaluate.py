"""How well two sets of embeddings find each other: recall, median rank, nearest neighbours, zero-shot accuracy.

All of it goes tile by tile: a million embeddings against a million fit wherever the embeddings themselves do. Similarities are dot
products; normalise the embeddings first where cosines are meant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..recall import RECALL_AT
from ..tiles import backend_for
from ..tiles.contract import ComputeOptions, Pairs, accumulator

# Working memory of `nearest` and `zero_shot`, in bytes.
WORKSPACE = 32 * 2**20
# What a similarity, its sortable key and their temporaries take for each cell.
CELL_BYTES = 32
LOW_HALF = 2**32 - 1


class Retrieval(NamedTuple):
    """How often the partner of a row is found, in both directions.

    x_to_y, y_to_x: recall at k: the share of rows, in [0, 1], whose partner is among the k most similar rows of the other side.
    x_median_rank, y_median_rank: the partner's place in the answers of half of the rows; 1 is best.
    """

    pairs: int
    x_to_y: dict[int, float]
    y_to_x: dict[int, float]
    x_median_rank: float
    y_median_rank: float

    def facts(self) -> dict[str, Any]:
        """The same as JSON has it: keys are texts.

        >>> retrieval(torch.eye(3), torch.eye(3)).facts()["x_to_y"]
        {'1': 1.0, '5': 1.0, '10': 1.0}
        """
        return {
            name: {str(k): share for k, share in value.items()} if isinstance(value, dict) else value
            for name, value in self._asdict().items()
        }


@torch.no_grad()
def retrieval(
    x: Tensor, y: Tensor, *, ids: Tensor | None = None, workspace: int | None = None, backend: str | None = None
) -> Retrieval:
    """Recall at 1, 5 and 10 and the median rank of x's and y's rows in each other, row i of x being the partner of row i of y.

    x, y: (N, D), on one device. workspace: working memory in bytes; backend: "eager" or "fused"; None chooses both by device.
    ids: (N,) integers, one for each pair. Pairs with equal ids (one caption on several pictures, several captions of one picture)
        are left out of each other's answers: neither right nor wrong. Every pair still asks for its own partner. So with five
        captions for a picture, given as five pairs, a caption finds its picture as usual; a picture has to find each of its
        captions among those of the other pictures, and recall is the mean over captions, not whether any one of them was found.

    Ties count against the partner, and similarities that differ by rounding alone are ties: a model that gives every row the same
    embedding has a recall of zero, not of one.

    >>> retrieval(torch.eye(3), torch.eye(3)[[0, 2, 1]]).x_to_y[1]
    0.3333333333333333
    """
    _check_pairs(x, y, ids)
    _check_workspace(workspace)
    tiles = backend_for(x.device, x.dtype, backend)
    compute = ComputeOptions(tiles.default_workspace(x.device) if workspace is None else workspace)
    x, y = x.contiguous(), y.contiguous()
    ids = None if ids is None else ids.to(x.device).contiguous()
    with torch.autocast(x.device.type, enabled=False):
        own = tiles.positives(x, y, compute)
        _check_finite(own, "pairs")
        bar = own - _rounding(x.shape[1], own.dtype) * _norms(x) * _norms(y)
        pairs = Pairs(is_local=True, ids_M=ids, ids_N=ids, positive_M=bar, positive_N=bar, ranked=True)
        # The pass also gives sums of exponentials, which are not needed here: a scale of zero keeps them in range.
        found = tiles.softmax_stats(x, y, own.new_zeros(()), pairs, columns=True, compute=compute)
    assert found.row_ranking is not None and found.column_ranking is not None
    rows, columns = found.row_ranking.ahead, found.column_ranking.ahead
    return Retrieval(len(x), _recall(rows), _recall(columns), _median_rank(rows), _median_rank(columns))


@torch.no_grad()
def nearest(queries: Tensor, documents: Tensor, k: int, *, workspace: int = WORKSPACE) -> tuple[Tensor, Tensor]:
    """The similarities and the indices, each (queries, k), of the k documents most similar to each query, the best first.

    Similarities are compared in fp32, and of equal ones the document with the lower index comes first. workspace: working memory in
    bytes; besides it, all that is allocated is the answer.

    >>> nearest(torch.eye(3)[:1], torch.tensor([[0.0, 1, 0], [2, 0, 0], [1, 0, 0]]), 2)
    (tensor([[2., 1.]]), tensor([[1, 2]]))
    """
    _check_matrices(queries, documents, "queries", "documents")
    _check_workspace(workspace)
    if not 1 <= k <= len(documents):
        raise ValueError(f"k={k!r}: must be at least 1, and at most the {len(documents)} documents there are")
    assert len(documents) <= LOW_HALF
    answers = [_nearest(rows, documents, k, workspace) for rows in queries.split(_query_rows(workspace, k))] if len(queries) else []
    keys = torch.cat(answers) if answers else torch.empty(0, k, dtype=torch.int64, device=queries.device)
    return _similarities_of(keys), LOW_HALF - (keys & LOW_HALF)


@torch.no_grad()
def zero_shot(images: Tensor, classes: Tensor, labels: Tensor, k: Sequence[int] = (1, 5)) -> dict[int, float]:
    """The share of pictures, in [0, 1], whose class is among the k most similar ones, for each k. Ties count as errors.

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
    ahead = [_classes_ahead(p, classes, own) for p, own in zip(images.split(rows), labels.split(rows), strict=True)]
    return {n: _share(torch.cat(ahead), n) for n in k}


@torch.no_grad()
def class_embeddings(
    encode_texts: Callable[[list[str]], Tensor], names: Sequence[str], templates: Sequence[str] = ("{}",)
) -> Tensor:
    """One normalised embedding for each class, (names, D): the mean of its normalised embeddings over templates.

    encode_texts: gives embeddings (texts, D). templates: texts with "{}" where the name goes, "a photo of a {}".
    """
    if not templates or not names:
        raise ValueError(f"{len(names)} names and {len(templates)} templates: classes need at least one of each")
    for template in templates:
        if "{}" not in template:
            raise ValueError(f"template {template!r}: must hold {{}} where the name of the class goes, as in 'a photo of a {{}}'")
    # Not str.format: a name or a template is text, and may hold other braces.
    total = sum(normalize(encode_texts([t.replace("{}", name) for name in names]).float(), dim=1) for t in templates)
    assert isinstance(total, Tensor)
    _check_finite(total.sum(1), "class names")
    return normalize(total, dim=1)


def _rounding(width: int, dtype: torch.dtype) -> float:
    """How far two sums of the same products, added up in another order, usually differ at most, for rows of norm one."""
    return math.sqrt(width) * torch.finfo(dtype).eps


def _norms(t: Tensor) -> Tensor:
    return torch.linalg.vector_norm(t, dim=1, dtype=accumulator(t.dtype))


def _recall(ahead: Tensor) -> dict[int, float]:
    return {k: _share(ahead, k) for k in RECALL_AT}


def _share(ahead: Tensor, k: int) -> float:
    return int((ahead < k).sum()) / len(ahead)


def _median_rank(ahead: Tensor) -> float:
    ranks = ahead.sort().values + 1
    return float(ranks[(len(ranks) - 1) // 2] + ranks[len(ranks) // 2]) / 2


def _query_rows(workspace: int, k: int) -> int:
    """So many queries at a time that the answers so far take a quarter of the working memory at most."""
    return max(1, min(256, workspace // (4 * CELL_BYTES * k)))


def _nearest(rows: Tensor, documents: Tensor, k: int, workspace: int) -> Tensor:
    """The keys of the k best documents of some queries, in descending order."""
    # Documents are read as fp32, which may be a copy.
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
    """Integers that are in the order of the similarities and, among equal ones, in the reverse order of the indices.

    topk leaves open which of equal numbers it takes; keys are never equal.
    """
    # Read as an integer, an fp32 number is in order if it is positive; a negative one is after its other bits are flipped. Adding
    # zero makes -0.0 equal to 0.0.
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
    bar = own - _rounding(classes.shape[1], z.dtype) * _norms(images) * _norms(classes)[labels]
    return (z >= bar[:, None]).sum(1) - 1


def _check_matrices(a: Tensor, b: Tensor, a_name: str, b_name: str) -> None:
    for name, t in ((a_name, a), (b_name, b)):
        if t.ndim != 2 or t.shape[1] == 0 or not t.is_floating_point():
            raise ValueError(f"{name} is {t.dtype} of shape {tuple(t.shape)}: must be floating-point embeddings, (rows, width)")
    if a.shape[1] != b.shape[1] or a.device != b.device:
        raise ValueError(
            f"{a_name} has width {a.shape[1]} on {a.device} and {b_name} {b.shape[1]} on {b.device}: must be equal; embed both with"
            " the two towers of one model, and move one with .to()"
        )


def _check_pairs(x: Tensor, y: Tensor, ids: Tensor | None) -> None:
    _check_matrices(x, y, "x", "y")
    if len(x) != len(y) or x.dtype != y.dtype or len(x) == 0:
        raise ValueError(f"x has {len(x)} rows of {x.dtype} and y {len(y)} of {y.dtype}: must be pairs, at least one, of one dtype")
    if ids is not None and (ids.shape != x.shape[:1] or ids.is_floating_point() or ids.dtype == torch.bool):
        raise ValueError(f"ids is {ids.dtype} of shape {tuple(ids.shape)}: must be one integer for each of the {len(x)} pairs")


def _check_workspace(workspace: int | None) -> None:
    if workspace is not None and workspace < 1:
        raise ValueError(f"workspace={workspace!r}: must be a positive number of bytes of working memory, for example {WORKSPACE}")


def _check_finite(values: Tensor, what: str) -> None:
    """Raises where a similarity is no number: compared with it, nothing would be ahead, and a broken model would look perfect."""
    bad = values.numel() - int(torch.isfinite(values).sum())
    if bad:
        raise ValueError(
            f"{bad} of {values.numel()} {what} have embeddings that are not finite: the model has diverged, or overflows"
        )
