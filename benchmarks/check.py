"""The exact result for a sample of rows, in float64, without a batch-by-batch matrix: every measured result is compared with it.

There are B distinct pairs; row k of the batch holds pair i(k), and pair i occurs count_i times. Repeated rows have the same
logits, so normalisers, value and gradients of a batch of any size follow from the B×B logits of the distinct pairs,
which are computed a few rows at a time:

    value and normalisers   sums over B×B logits weighted with count_i · count_j
    gradient of row k       dx = scale · (Σ_j count_j · P_ij · y_j - y_i / N), i = i(k)

P is the gradient in the logit of a pair, without the term of the positive:
(exp(s_ij - rowlse_i) + exp(s_ij - collse_j)) / 2N for clip, sigmoid(s_ij) / N for siglip.
Label smoothing e subtracts e / N² from every P and leaves (1 - e) / N of a positive's own term.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LOSSES = ("clip", "siglip")


class Pairs(NamedTuple):
    """The distinct pairs of a batch (float64, B×D) and how often each occurs."""

    x: Tensor
    y: Tensor
    counts: Tensor


class Answer(NamedTuple):
    """The exact value and gradients, and the magnitudes that errors are relative to."""

    value: float
    dx: Tensor
    dy: Tensor
    dscale: float
    dbias: float
    # Sums of the magnitudes of the terms of dscale and dbias: the sums themselves may cancel to nearly nothing.
    dscale_terms: float
    dbias_terms: float
    largest_logit: float


class Result(NamedTuple):
    """The result of an implementation: its loss and the gradients of the sampled rows; None where it computes none."""

    value: float
    dx: Tensor
    dy: Tensor
    dscale: float | None
    dbias: float | None


def answer(loss: str, pairs: Pairs, sample: Tensor, scale: float, bias: float, chunk: int = 512, smoothing: float = 0.0) -> Answer:
    """Return the exact value, and the gradients of the rows that hold the pairs `sample`, of scale and of bias.

    Two passes over the B×B logits, `chunk` rows at a time.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss is {loss!r}: must be one of {', '.join(LOSSES)}")
    if smoothing and loss != "clip":
        raise ValueError(f"smoothing is {smoothing} for {loss}: only the labels of clip can be smoothed")
    bias = bias if loss == "siglip" else 0.0
    value, row_norm, column_norm, largest = _value_pass(loss, pairs, scale, bias, chunk, smoothing)
    sums = _scalar_pass(loss, pairs, row_norm, column_norm, scale, bias, chunk, smoothing)

    x, y, counts = pairs
    total = counts.sum()
    own = (1 - smoothing) / total
    logits = scale * x[sample] @ y.T + bias
    grad = _logit_grad(loss, logits, row_norm[sample], column_norm, total, smoothing) * counts
    dx = scale * (grad @ y - own * y[sample])
    logits = scale * y[sample] @ x.T + bias
    grad = _logit_grad(loss, logits, column_norm[sample], row_norm, total, smoothing) * counts
    dy = scale * (grad @ x - own * x[sample])
    return Answer(value, dx, dy, *sums, largest)


def errors(result: Result, exact: Answer) -> dict[str, float]:
    """Return the errors of a result: of the value relative to max(1, value), of gradients relative to their largest entry.

    Gradients of scale and bias are relative to the sum of the magnitudes of their terms; those that an implementation does not
    compute are left out.
    """

    def off(given: Tensor, right: Tensor) -> float:
        return float((given.double() - right).abs().max() / right.abs().max())

    errors = {
        "value": abs(result.value - exact.value) / max(1.0, abs(exact.value)),
        "gradient": max(off(result.dx, exact.dx), off(result.dy, exact.dy)),
    }
    if result.dscale is not None:
        errors["scale"] = abs(result.dscale - exact.dscale) / exact.dscale_terms
    if result.dbias is not None:
        errors["bias"] = abs(result.dbias - exact.dbias) / exact.dbias_terms
    return errors


def tolerance(dtype: torch.dtype, dim: int, largest_logit: float) -> float:
    """Return the largest error that rounding can explain: 2 · (1 + L) · (u + √dim · u'), at most 0.2; L is the largest logit.

    u is the unit roundoff of dtype: a logit stored in it is off by up to u·L, and its exponential, hence P, by
    that factor. u' is that of the accumulator (float32, or float64 for float64): the roundings in a product of `dim`
    terms add up as a random walk, √dim. The factor 2 is a margin for later roundings. A wrong formula is far above:
    half of the negatives missing is off by 0.25, a missing direction or a factor of two by 0.5 and more.
    """
    stored = torch.finfo(dtype).eps / 2
    accumulated = min(stored, torch.finfo(torch.float32).eps / 2)
    return min(0.2, 2 * (1 + largest_logit) * (stored + dim**0.5 * accumulated))


def _value_pass(
    loss: str, pairs: Pairs, scale: float, bias: float, chunk: int, smoothing: float
) -> tuple[float, Tensor, Tensor, float]:
    x, y, counts = pairs
    log_count = counts.log()
    row_norm = torch.zeros_like(counts)
    column_norm = torch.full_like(counts, -torch.inf)
    value = largest = 0.0
    for rows in torch.arange(len(x), device=x.device).split(chunk):
        logits = scale * x[rows] @ y.T + bias
        largest = max(largest, float(logits.abs().max()))
        positives = logits[_places(rows), rows]
        value -= (1 - smoothing) * float(counts[rows] @ positives)
        if loss == "siglip":
            value += float(counts[rows] @ F.softplus(logits) @ counts)
        else:
            row_norm[rows] = (logits + log_count).logsumexp(1)
            chunk_norm = (logits + log_count[rows, None]).logsumexp(0)
            column_norm = torch.logaddexp(column_norm, chunk_norm)
            value -= smoothing * float(counts[rows] @ logits @ counts) / float(counts.sum())
    if loss == "clip":
        value += float(counts @ (row_norm + column_norm)) / 2
    return value / float(counts.sum()), row_norm, column_norm, largest


def _scalar_pass(
    loss: str, pairs: Pairs, row_norm: Tensor, column_norm: Tensor, scale: float, bias: float, chunk: int, smoothing: float
) -> tuple[float, float, float, float]:
    x, y, counts = pairs
    total = counts.sum()
    dscale = dbias = dscale_terms = dbias_terms = 0.0
    for rows in torch.arange(len(x), device=x.device).split(chunk):
        cosines = x[rows] @ y.T
        weight = _logit_grad(loss, scale * cosines + bias, row_norm[rows], column_norm, total, smoothing)
        weight = weight * counts * counts[rows, None]
        positives = (1 - smoothing) * counts[rows] * cosines[_places(rows), rows] / total
        dscale += float((weight * cosines).sum() - positives.sum())
        dscale_terms += float((weight * cosines).abs().sum() + positives.abs().sum())
        dbias += float(weight.sum() - counts[rows].sum() / total)
        dbias_terms += float(weight.sum() + counts[rows].sum() / total)
    return dscale, dbias, dscale_terms, dbias_terms


def _logit_grad(loss: str, logits: Tensor, own_norm: Tensor, other_norm: Tensor, total: Tensor, smoothing: float) -> Tensor:
    if loss == "siglip":
        return logits.sigmoid() / total
    return ((logits - own_norm[:, None]).exp() + (logits - other_norm).exp()) / (2 * total) - smoothing / total**2


def _places(rows: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device)
