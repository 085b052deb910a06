"""The tile contract: what goes into one pair of blocks, what comes out, and how the results of two blocks merge.

Legend: x_MD and y_ND are one rank's rows and one block's documents, z_MN = x_MD @ y_ND.T their similarities, s_MN = scale * z_MN
their logits. A vector's suffix says whether it runs over rows (M) or columns (N). A tile knows no ranks, no means, no autograd.

The positive of a row never enters a tile's sums: a tile sums over the *others* that count, and the loss adds the M positives in
fp32. So 1 - p, which neither bf16 nor the difference of two nearly equal fp32 numbers can hold, is never a difference: it is the
share of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Which pairs of a block count, and how. The default: all of them, as negatives.

    home: y is x's own block: row i of y is the positive of row i of x, and not among the others.
    ids_M, ids_N: pairs with equal ids are no negatives: they are left out or, if `several`, further positives.
    drop_above, positive_M, positive_N: negatives whose similarity exceeds that of the row's (column's) positive by more than
        drop_above are left out of that row (column).
    smoothed: label smoothing needs plain sums over the pairs that count.
    ranked: rank each positive among all negatives, dropped ones included, so that dropping cannot flatter the rank.
    """

    is_local: bool = False
    ids_M: Tensor | None = None
    ids_N: Tensor | None = None
    multi_positive: bool = False
    drop_above: float | None = None
    positive_M: Tensor | None = None
    positive_N: Tensor | None = None
    smoothed: bool = False
    ranked: bool = False


class Ranking(NamedTuple):
    """For each row (or column): how many negatives are at least as similar as the positive, and the most similar negative."""

    ahead: Tensor
    hardest: Tensor


class Stats(NamedTuple):
    """For each row (or column), over its others: Σ exp(s) = total * exp(peak), and the sums that options ask for.

    Two numbers instead of one log-sum-exp: at logits of 1e8, which fp32 allows, peak + log(total) would round log(total) away.
    """

    peak: Tensor
    total: Tensor
    further: Tensor | None = None  # Σ z over the further positives, and their number
    further_count: Tensor | None = None
    counted: Tensor | None = None  # Σ z over all others that count, and their number
    counted_count: Tensor | None = None


class SoftmaxPass(NamedTuple):
    """Sums over the others; None where not wanted. kept: what a backend has left for `softmax_grads` to use, and use up."""

    rows: Stats
    columns: Stats | None = None
    row_ranking: Ranking | None = None
    column_ranking: Ranking | None = None
    kept: Any = None


class Softmax(NamedTuple):
    """For each row (or column), weights included: p = exp(s - peak) * gain; what every further positive and every counted pair is
    to get of the target."""

    peak: Tensor
    gain: Tensor
    further: Tensor | None = None
    counted: Tensor | None = None


class Normalised(NamedTuple):
    """Each row's weighted loss and the gradient in its positive's logit, rows and columns added up, and the softmax of each."""

    loss_M: Tensor
    dpos_M: Tensor
    rows: Softmax
    columns: Softmax | None


class SigmoidPass(NamedTuple):
    """Sums over the others: each row's loss, its slope in the bias, the gradient products, the rankings; None where not wanted."""

    value_M: Tensor
    slope_M: Tensor | None = None
    gx_MD: Tensor | None = None
    gy_ND: Tensor | None = None
    row_ranking: Ranking | None = None
    column_ranking: Ranking | None = None


class NeedsGrad(NamedTuple):
    """Which gradient products to form: gx_MD = g_MN @ y_ND and gy_ND = g_MN.T @ x_MD, with g_MN the gradient in the logits."""

    x: bool
    y: bool


class ComputeOptions(NamedTuple):
    """By what means: the working memory in bytes; how fp32 products may be rounded ("ieee": not at all, "tf32": to 10 bits); and
    whether `softmax_grads` may round bf16 embeddings to eight bits for its similarities."""

    workspace: int
    precision: str = "ieee"
    int8_similarities: bool = False


class Tiles(Protocol):
    """What a backend fulfils. Besides its working memory, all that it allocates is O((M + N) · D).

    keep: the gradients of these blocks will be asked for. Working memory may hold what they need until then.
    dpos_M: the gradients in the positives' logits, by which it can be judged what is small; without it nothing is.
    Sums and gradients are fp32, or fp64 for fp64 inputs; the scale is not yet in gx_MD and gy_ND.
    """

    def default_workspace(self, device: torch.device) -> int: ...

    def positives(self, x_MD: Tensor, y_ND: Tensor, compute: ComputeOptions) -> Tensor: ...

    def softmax_stats(
        self, x_MD: Tensor, y_ND: Tensor, scale: Tensor, pairs: Pairs, *, columns: bool, compute: ComputeOptions, keep: bool = False
    ) -> SoftmaxPass: ...

    def normalise(
        self,
        rows: Stats,
        columns: Stats | None,
        positive_M: Tensor,
        scale: Tensor,
        weights_M: Tensor | None,
        label_smoothing: float,
    ) -> Normalised: ...

    def softmax_grads(
        self,
        x_MD: Tensor,
        y_ND: Tensor,
        scale: Tensor,
        pairs: Pairs,
        rows: Softmax,
        columns: Softmax | None,
        *,
        needs_grad: NeedsGrad,
        compute: ComputeOptions,
        dpos_M: Tensor | None = None,
        kept: Any = None,
    ) -> tuple[Tensor | None, Tensor | None]: ...

    def sigmoid_sums(
        self,
        x_MD: Tensor,
        y_ND: Tensor,
        scale: Tensor,
        bias: Tensor,
        pairs: Pairs,
        weights_M: Tensor | None,
        *,
        needs_grad: NeedsGrad | None,
        compute: ComputeOptions,
    ) -> SigmoidPass: ...

    def finish(
        self, gradient: Tensor, embeddings: Tensor, partners: Tensor, dpos_M: Tensor, factor: Tensor, finished: Tensor
    ) -> Tensor: ...


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums, logits and gradients are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(a: Any, b: Any) -> Any:
    """The results of two disjoint sets of others, as one; nested tuples branch by branch, tensors added up in place of a."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, Tensor):
        return a.add_(b)
    if isinstance(a, Ranking):
        return Ranking(a.ahead + b.ahead, torch.maximum(a.hardest, b.hardest))
    if isinstance(a, Stats):
        return _merge_stats(a, b)
    return tuple(merge(s, t) for s, t in zip(a, b, strict=True))


def _merge_stats(a: Stats, b: Stats) -> Stats:
    peak = torch.maximum(a.peak, b.peak)
    # Where neither side has counted a pair both peaks are -inf, and -inf - -inf would be NaN.
    anchor = peak.masked_fill(peak == -torch.inf, 0)
    total = a.total * (a.peak - anchor).exp() + b.total * (b.peak - anchor).exp()
    return Stats(peak, total, *(None if s is None or t is None else s + t for s, t in zip(a[2:], b[2:], strict=True)))
