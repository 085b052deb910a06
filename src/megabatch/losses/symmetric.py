"""Sums and gradients of the rows of one block compared with each other, from half of the product.

The product of a block with itself is symmetric. It is cut into pieces, and only those on and above its diagonal are computed: a
piece gives the sums and gradients of its rows and of its columns.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from ..tiles.contract import GuidePairs, NeedsGrad, Pairs, Softmax, Stats, merge
from .batch import LossBatch

# Rows of a piece, by device: enough for fast products, few against large batches.
PIECE_ROWS = {"cpu": 1024, "cuda": 16384}


def symmetric_stats(batch: LossBatch, a_MD: Tensor, scale: Tensor, pairs: Pairs) -> Stats:
    """Return the sums of each row over all other rows, from the pieces of the product on and above its diagonal."""
    pieces = _pieces(a_MD)
    sums: list[Stats | None] = [None] * len(pieces)
    for i, rows in enumerate(pieces):
        for j, columns in enumerate(pieces[i:], i):
            part = _part_of(pairs, rows, columns)
            stats = batch.tiles.softmax_stats(a_MD[rows], a_MD[columns], scale, part, columns=i != j, compute=batch.compute)
            sums[i] = merge(sums[i], stats.rows)
            if stats.columns is not None:
                sums[j] = merge(sums[j], stats.columns)
    if len(sums) == 1:
        assert sums[0] is not None
        return sums[0]
    return Stats(*(None if vectors[0] is None else torch.cat(vectors) for vectors in zip(*sums, strict=True)))  # type: ignore[arg-type]


def symmetric_grads(batch: LossBatch, a_MD: Tensor, scale: Tensor, pairs: Pairs, softmax: Softmax) -> Tensor:
    """Return the gradient of each row, as an anchor and as a candidate of all other rows."""
    pieces = _pieces(a_MD)
    if len(pieces) == 1:
        need = NeedsGrad(True, False)
        gradient, _ = batch.tiles.softmax_grads(a_MD, a_MD, scale, pairs, softmax, softmax, needs_grad=need, compute=batch.compute)
        assert gradient is not None
        return gradient
    gradient = torch.zeros_like(a_MD, dtype=batch.acc)
    for i, rows in enumerate(pieces):
        for j, columns in enumerate(pieces[i:], i):
            of_rows, of_columns = (Softmax(*(None if v is None else v[at] for v in softmax)) for at in (rows, columns))  # type: ignore[arg-type]
            ga, gb = batch.tiles.softmax_grads(
                a_MD[rows],
                a_MD[columns],
                scale,
                _part_of(pairs, rows, columns),
                of_rows,
                of_columns,
                needs_grad=NeedsGrad(True, i != j),
                compute=batch.compute,
            )
            assert ga is not None
            gradient[rows] += ga
            if gb is not None:
                gradient[columns] += gb
            # Freed before those of the next piece are allocated.
            del ga, gb
    return gradient


def _pieces(a_MD: Tensor) -> list[slice]:
    """Return slices of equal size, of up to PIECE_ROWS rows or a little more."""
    count = max(1, len(a_MD) // PIECE_ROWS.get(a_MD.device.type, PIECE_ROWS["cuda"]))
    edges = [len(a_MD) * place // count for place in range(count + 1)]
    return [slice(*edge) for edge in itertools.pairwise(edges)]


def _part_of(pairs: Pairs, rows: slice, columns: slice) -> Pairs:
    """Return which pairs of a piece count."""
    guide = pairs.guide
    if guide is not None:
        limit_N = None if guide.limit_N is None else guide.limit_N[columns]
        guide = GuidePairs(guide.x_MG[rows], guide.y_NG[columns], guide.limit_M[rows], limit_N)
    ids_M, ids_N, limit_M, limit_N = (
        None if v is None else v[at]
        for v, at in ((pairs.ids_M, rows), (pairs.ids_N, columns), (pairs.limit_M, rows), (pairs.limit_N, columns))
    )
    return replace(pairs, is_local=rows == columns, ids_M=ids_M, ids_N=ids_N, limit_M=limit_M, limit_N=limit_N, guide=guide)
