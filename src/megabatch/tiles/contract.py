"""The tile contract: the inputs and outputs of one pair of blocks, and how the results of two blocks are merged.

Legend: x_MD holds the rows of one rank, y_ND the documents of one block. z_MN = x_MD @ y_ND.T are the similarities and
s_MN = scale * z_MN the logits. The suffix of a vector says whether it runs over rows (M) or columns (N). Tiles know nothing of
ranks, reductions or autograd.

The positive of a row is never part of the sums of a tile: a tile sums over the *other* pairs that count, and the loss adds the M
positives in fp32. So 1 - p is never computed as a difference, which neither bf16 nor the difference of two nearly equal fp32
numbers could represent: it is the probability of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

# Smaller norms of prefixes count as this one, the default of torch.nn.functional.normalize.
NORM_EPS = 1e-12


class GuidePairs(NamedTuple):
    """A second pair of blocks, of any width G, whose similarities decide which negatives count: those that exceed the row's
    (column's) limit are left out of that row (column)."""

    x_MG: Tensor
    y_NG: Tensor
    limit_M: Tensor
    limit_N: Tensor | None


@dataclass(frozen=True)
class Pairs:
    """Which pairs of a block count, and how. By default all of them count, as negatives.

    is_local: y is the block of x's own rank: row i of y is the positive of row i of x, and not one of the others.
    ids_M, ids_N: pairs with equal ids are not negatives. They are left out or, if `multi_positive`, are further positives.
    drop_above, positive_M, positive_N: negatives whose similarity exceeds that of the row's (column's) positive by more than
        drop_above are left out of that row (column).
    smoothed: label smoothing needs plain sums over the pairs that count.
    ranked: rank each positive among all negatives, dropped ones included, so that dropping cannot improve the rank.
    limit_M, limit_N: negatives whose similarity exceeds this are left out of that row (column). Not together with drop_above.
    skip_N: for each column, the row that leaves it out; -1 for none.
    guide: leaves out further negatives. Eager tiles only.
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
    limit_M: Tensor | None = None
    limit_N: Tensor | None = None
    skip_N: Tensor | None = None
    guide: GuidePairs | None = None

    @property
    def compares(self) -> bool:
        """Whether similarities decide which pairs count, so that rows and columns may count different ones."""
        return not (self.drop_above is None and self.limit_M is None and self.limit_N is None and self.guide is None)


class Ranking(NamedTuple):
    """For each row (or column): the number of negatives at least as similar as the positive, and the highest such similarity."""

    ahead: Tensor
    hardest: Tensor


class Stats(NamedTuple):
    """For each row (or column), over its others: Σ exp(s) = total * exp(peak), and the sums that options need.

    Two numbers instead of one log-sum-exp: at logits of 1e8, which fp32 allows, peak + log(total) would round log(total) away.
    """

    peak: Tensor
    total: Tensor
    further: Tensor | None = None  # Σ z over the further positives, and their number
    further_count: Tensor | None = None
    counted: Tensor | None = None  # Σ z over all others that count, and their number
    counted_count: Tensor | None = None


class SoftmaxPass(NamedTuple):
    """Sums over the others; None where not asked for. saved_exp: exponentials that `softmax_grads` may overwrite."""

    rows: Stats
    columns: Stats | None = None
    row_ranking: Ranking | None = None
    column_ranking: Ranking | None = None
    saved_exp: Any = None


class Softmax(NamedTuple):
    """For each row (or column), weights included: p = exp(s - peak) * gain, and the target of every further positive and of every
    pair that counts."""

    peak: Tensor
    gain: Tensor
    further: Tensor | None = None
    counted: Tensor | None = None


class Normalised(NamedTuple):
    """The weighted loss of each row, the gradient in its positive's logit (rows and columns added), the softmax of each side."""

    loss_M: Tensor
    dpos_M: Tensor
    rows: Softmax
    columns: Softmax | None


class SigmoidPass(NamedTuple):
    """Sums over the others: loss of each row, its derivative in the bias, gradient products, rankings; None where not asked for."""

    value_M: Tensor
    slope_M: Tensor | None = None
    gx_MD: Tensor | None = None
    gy_ND: Tensor | None = None
    row_ranking: Ranking | None = None
    column_ranking: Ranking | None = None


class NeedsGrad(NamedTuple):
    """Which gradient products to compute: gx_MD = g_MN @ y_ND and gy_ND = g_MN.T @ x_MD, with g_MN the gradient in the logits."""

    x: bool
    y: bool


class ComputeOptions(NamedTuple):
    """How to compute: the workspace in bytes, the precision of fp32 operands ("ieee": not rounded, "tf32": rounded to 10 bits),
    whether `softmax_grads` may quantise bf16 embeddings to int8 to compute the similarities again, and whether a CUDA graph will
    launch the kernels, so that their number does not matter."""

    workspace: int
    precision: str = "ieee"
    int8_similarities: bool = False
    in_graph: bool = False


class OnePiece(NamedTuple):
    """The loss of one block, and its gradients in a form that the backend's `finish` knows; None if they are not needed."""

    loss: Tensor
    gradients: Any = None


class OnePieceTiles(Protocol):
    """The functions of a backend for one block whose whole similarity matrix is in the workspace; all pairs count.

    Row i of y is the positive of row i of x.
    """

    def fits(self, shape: tuple[int, int, int], dtype: torch.dtype, compute: ComputeOptions) -> bool:
        """Return whether rows, documents and width are right for it."""
        ...

    def softmax_loss(
        self, x_MD: Tensor, y_ND: Tensor, scale: Tensor, *, needs_grad: NeedsGrad | None, compute: ComputeOptions
    ) -> OnePiece: ...

    def row_softmax_loss(
        self, x_MD: Tensor, y_ND: Tensor, scale: Tensor, *, needs_grad: NeedsGrad | None, compute: ComputeOptions
    ) -> OnePiece: ...

    def sigmoid_loss(
        self, x_MD: Tensor, y_ND: Tensor, scale: Tensor, bias: Tensor, *, needs_grad: NeedsGrad | None, compute: ComputeOptions
    ) -> OnePiece: ...

    def finish(
        self,
        gradients: Any,
        g: Tensor | None,
        scale: Tensor,
        dtypes: tuple[torch.dtype, torch.dtype],
        needs: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, y, the scale and the bias, None for those that are not needed; overwrite `gradients`.

        g: the gradient of the loss; None for one. dtypes: those of the gradients of x and y.
        """
        ...


class GraphInputs(Protocol):
    """The tensors that a CUDA graph reads, filled in one launch, which also says where the graph is to write its value."""

    def fill(self, sources: Sequence[Tensor], result: Tensor) -> None:
        """Copy the sources to the tensors, and let `deliver` write to result."""
        ...

    def deliver(self, value: Tensor) -> None:
        """As a part of the graph: write its value to the result of the last `fill`."""
        ...


class GraphGradients(Protocol):
    """The gradients that a CUDA graph writes, read in one launch."""

    def scale(self, factor: Tensor, targets: Sequence[Tensor]) -> None:
        """Write the gradients times the factor, a tensor without dimensions, to the targets."""
        ...


class PrefixTiles(Protocol):
    """The softmax loss of one block, summed over normalised prefixes of the embeddings (Matryoshka), with one product for all.

    Row i of y is the positive of row i of x; all pairs count. dims: the widths, ascending.
    """

    def fits(self, dims: tuple[int, ...], x_MD: Tensor, y_ND: Tensor) -> bool:
        """Return whether these widths can be computed together."""
        ...

    def prefix_loss(
        self,
        x_MD: Tensor,
        y_ND: Tensor,
        scale: Tensor,
        dims: tuple[int, ...],
        weights: tuple[float, ...],
        *,
        symmetric: bool,
        compute: ComputeOptions,
    ) -> tuple[Tensor, Any]:
        """Return the weighted sum of the losses of all widths, and what `prefix_grads` needs."""
        ...

    def prefix_grads(
        self,
        x_MD: Tensor,
        y_ND: Tensor,
        scale: Tensor,
        state: Any,
        g: Tensor,
        dtypes: tuple[torch.dtype, torch.dtype],
        *,
        needs_grad: NeedsGrad,
        compute: ComputeOptions,
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Return the gradients of x and y, None if not needed, and of the scale. g: that of the loss; dtypes: of the first two."""
        ...


class Tiles(Protocol):
    """The functions of a backend. Beyond the workspace, a backend allocates O((M + N) · D).

    save_exp: the gradients of these blocks will be asked for, so the workspace may hold exponentials for them until then.
    dpos_M: the gradients in the positives' logits. The int8 backward derives its error limit from them, and is not used without.
    Sums and gradients are fp32, or fp64 for fp64 inputs; gx_MD and gy_ND are not yet multiplied with the scale.
    """

    def default_workspace(self, device: torch.device) -> int: ...

    def positives(self, x_MD: Tensor, y_ND: Tensor, compute: ComputeOptions) -> Tensor: ...

    def softmax_stats(
        self,
        x_MD: Tensor,
        y_ND: Tensor,
        scale: Tensor,
        pairs: Pairs,
        *,
        columns: bool,
        compute: ComputeOptions,
        save_exp: bool = False,
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
        saved_exp: Any = None,
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
    """Return the dtype in which sums, logits and gradients are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def at(vectors: Any, where: slice) -> Any:
    """Return a slice of each vector of a record, None where there is none."""
    return type(vectors)(*(None if v is None else v[where] for v in vectors))


def merge(a: Any, b: Any) -> Any:
    """Merge the results of two disjoint sets of others: nested tuples item by item; tensors are added to `a` in place."""
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
    # A set without further positives may leave them None.
    return Stats(peak, total, *(s if t is None else t if s is None else s + t for s, t in zip(a[2:], b[2:], strict=True)))
