"""The softmax contrastive loss (InfoNCE, CLIP) without the similarity matrix. Formula: reference.clip_loss.

Forward: one tour of the ring collects the sums over the negatives, for rows and columns at once; the positives are added here.
Backward: a second tour computes the tiles again, except for those that were saved, and returns each block's gradient to its rank.
Without other ranks, forward computes the products of backward too if it has saved exponentials: their memory is free at once, and a
GPU does not wait for the host to begin backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, overload

import torch
from torch import Tensor

from ..ring import Group
from ..tiles.contract import Pairs, Softmax, merge
from .autograd import (
    LossModule,
    LossResult,
    PartialGradients,
    finish,
    first_derivative_only,
    modified,
    outside_autocast,
    outside_graphs,
    save,
    saved,
)
from .batch import Diagnostics, Execution, ExecutionOptions, Inputs, LossBatch, diagnose, prepare
from .checks import check_duplicates, check_number
from .one_piece import OnePieceCall, accept, loss_in_one_piece, one_piece_of, remember, softmax_in_one_piece
from .operators import ValueAndGradients, declare, in_one_piece, is_operator_call

if TYPE_CHECKING:
    # torch depends on typing_extensions; typing has Unpack from Python 3.11 on.
    from typing_extensions import Unpack


# The values of options 1 to 4 and of `precision` and `int8_backward` with which all pairs count alike.
USUAL_OPTIONS, USUAL_PRECISION = ("mask", 0.0, None, False), ("ieee", False)


class ClipOptions(ExecutionOptions, total=False):
    """The options of `clip_loss` that `ClipLoss` stores, for type checkers. `clip_loss` documents them."""

    symmetric: bool
    duplicates: str
    label_smoothing: float
    drop_above: float | None
    int8_backward: bool


@overload
def clip_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    *,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    diagnostics: Literal[False] = False,
    **options: Unpack[ClipOptions],
) -> Tensor: ...


@overload
def clip_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    *,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    diagnostics: Literal[True],
    **options: Unpack[ClipOptions],
) -> tuple[Tensor, Diagnostics]: ...


@overload
def clip_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    *,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    diagnostics: bool,
    **options: Unpack[ClipOptions],
) -> Tensor | tuple[Tensor, Diagnostics]: ...


def clip_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    *,
    symmetric: bool = True,
    ids: Tensor | None = None,
    duplicates: str = "mask",
    label_smoothing: float = 0.0,
    drop_above: float | None = None,
    weights: Tensor | None = None,
    group: Group = ...,
    equal_shards: bool = False,
    backend: str | None = None,
    workspace: int | None = None,
    precision: str = "ieee",
    int8_backward: bool = False,
    diagnostics: bool = False,
) -> Tensor | tuple[Tensor, Diagnostics]:
    """Return the softmax contrastive loss (InfoNCE, CLIP) of all rows of all ranks, without storing the similarity matrix.

    It is the mean cross-entropy of the logits `scale * x @ y.T`, in which the positive of row i of x is row i of y. Memory is
    O(rows * width) per rank. The formula, with the whole matrix, is `megabatch.reference.clip_loss`.

    Inputs:
        x: (M, D) embeddings of this rank, in float64, float32, bfloat16 or float16, normalised or not.
        y: (N, D) embeddings of this rank with the same dtype; N = M, or N >= M with symmetric=False.
        scale: factor of the similarities, 1 / temperature: a float, or a tensor with one element, which may require a gradient.
            It must be equal on all ranks.
        ids: (N,) integers, one for each row of y; row i of x has the id of row i of y. Pairs with equal ids are no negatives.
        weights: (M,) weights of the pairs in the mean, none negative and not all zero. Default: equal weights.

    Which pairs count:
        symmetric: average the loss over rows with that over columns. False: rows only (queries to documents); the rows of y beyond
            the first M are extra negatives.
        duplicates: what pairs with equal ids, apart from the positive itself, are. "mask": left out. "positive": further positives,
            which share the target equally.
        label_smoothing: in [0, 1], as in torch.nn.functional.cross_entropy, over the pairs that count.
        drop_above: false-negative margin. Negatives whose similarity exceeds that of the positive by more than this are left out of
            the row (or column), because they are probably false negatives. In units of x·y, before the scale. None: no margin.

    How it is computed:
        group: the ranks that share the batch: a process group or a device mesh of one dimension; None for this process alone. Ranks
            may hold different numbers of rows, even none. Required if there are several processes.
        equal_shards: claim that every rank passes the same shapes, options and scalars. This saves the exchange that compares them
            in every call after the first one on the group.
        backend: "eager" (PyTorch operations) or "fused" (Triton kernels). None: fused on CUDA if Triton can be imported.
        workspace: bytes of working memory for tiles. None: 64 MiB on a CPU; on CUDA at most a seventeenth of the device's memory,
            rounded down to a power of two (8 GiB on an H200), and 512 MiB on small devices. If the whole matrix fits (on CUDA with
            a buffer of its size), value and gradients are computed at once: by default up to 4,096 pairs in float32 on a CPU, 8,192
            on CUDA.
        precision: of the products of float32 embeddings on CUDA. "ieee": float32. "tf32": operands rounded to 10 bits.
        int8_backward: let backward recompute the similarities of bfloat16 embeddings from int8, on devices that have kernels for
            it (Hopper); large gradients are computed from the bfloat16 embeddings. Faster and slightly less exact. Elsewhere it
            changes nothing.
        diagnostics: also return the rank of each positive in the batch: the result is (loss, Diagnostics).

    Returns the loss as a float32 scalar (float64 for float64 embeddings), the same on every rank. DDP's average of gradients is
    exactly the gradient of this loss. Under autocast the embeddings are rounded as in a matrix product; logits, sums and gradients
    stay in float32. torch.compile sees the loss as one operator on a CPU and on CUDA; with diagnostics or a group it is a graph
    break.

    >>> import torch, megabatch
    >>> x, y = torch.nn.functional.normalize(torch.randn(2, 1024, 64), dim=-1).unbind()
    >>> loss = megabatch.clip_loss(x.requires_grad_(), y, scale=20.0)
    >>> loss.backward()
    >>> loss, diagnostics = megabatch.clip_loss(x, y, scale=20.0, diagnostics=True)
    >>> image_to_text, text_to_image = diagnostics.recall(k=1)
    """
    rules = (symmetric, duplicates, label_smoothing, drop_above, diagnostics)
    execution = (group, equal_shards, backend, workspace, precision, int8_backward)
    if torch.compiler.is_compiling():
        if is_operator_call(x, group, diagnostics):
            return _operator(x, y, scale, None, ids, weights, *rules, group is None, *execution[1:])
        return _outside_graphs(x, y, scale, ids, weights, rules, execution)
    return _clip_loss(x, y, scale, ids, weights, rules, execution)


def _clip_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    ids: Tensor | None,
    weights: Tensor | None,
    options: tuple[bool, str, float, float | None, bool],
    how: tuple[Group, bool, str | None, int | None, str, bool],
) -> Tensor | tuple[Tensor, Diagnostics]:
    """Return the loss. options: the fields of ClipRules; how: those of Execution."""
    usual = ids is None and weights is None and options[1:] == USUAL_OPTIONS and how[4:] == USUAL_PRECISION
    group, _, backend, workspace, *_ = how
    found = accept(x, y, (scale,), group, backend, workspace) if usual else None
    if isinstance(found, OnePieceCall):
        return loss_in_one_piece(x, y, found, softmax_in_one_piece(found, options[0]))
    rules = ClipRules(*options)
    batch = prepare(Inputs(x, y, {"scale": scale}, ids, weights), rules, Execution(*how)) if found is None else found
    scale = batch.scalar(scale, x)
    if found is None:
        call = one_piece_of(batch, x, y, scale) if rules.all_pairs_alike else None
        if call is not None:
            return loss_in_one_piece(x, y, call, softmax_in_one_piece(call, rules.symmetric))
        if usual:
            remember(batch, x, y, (scale,), backend, workspace)
    if batch.needs_grad is None:
        loss, ranking, _ = _forward(batch.read(x), batch.read(y), scale, batch, rules)
    else:
        loss, ranking = _ClipLoss.apply(batch.join_backward(x, y, scale), y, scale, batch, rules)
    return loss if ranking is None else (loss, ranking)


# What torch.compile does with calls that cannot be an operator.
_outside_graphs = outside_graphs(_clip_loss)


class ClipLoss(LossModule[LossResult]):
    """`clip_loss` as a Module, which stores its options.

    >>> import torch, megabatch
    >>> x, y = torch.nn.functional.normalize(torch.randn(2, 1024, 64), dim=-1).unbind()
    >>> criterion = megabatch.ClipLoss(label_smoothing=0.1)
    >>> loss = criterion(x, y, 20.0, ids=torch.arange(1024))
    """

    loss = staticmethod(clip_loss)

    if TYPE_CHECKING:

        @overload
        def __init__(self: ClipLoss[Tensor], *, diagnostics: Literal[False] = False, **options: Unpack[ClipOptions]) -> None: ...

        @overload
        def __init__(
            self: ClipLoss[tuple[Tensor, Diagnostics]], *, diagnostics: Literal[True], **options: Unpack[ClipOptions]
        ) -> None: ...

        @overload
        def __init__(self: ClipLoss[Any], *, diagnostics: bool, **options: Unpack[ClipOptions]) -> None: ...

        def __init__(self, **options: Any) -> None: ...


@dataclass(frozen=True)
class ClipRules:
    """The options of `clip_loss` that say which pairs count, and how."""

    symmetric: bool
    duplicates: str
    label_smoothing: float
    drop_above: float | None
    diagnostics: bool

    loss_name: ClassVar[str] = "clip_loss"

    @property
    def same_rows(self) -> bool:
        return self.symmetric

    @property
    def all_pairs_alike(self) -> bool:
        """Whether no option makes a difference between pairs; ids and weights may."""
        return not (self.label_smoothing or self.diagnostics) and self.drop_above is None

    def check(self) -> None:
        check_duplicates(self.duplicates)
        check_number("label_smoothing", self.label_smoothing, low=0, high=1)
        if self.drop_above is not None:
            check_number("drop_above", self.drop_above)


class ClipBlock(NamedTuple):
    """One rank's block in the ring: embeddings, ids, similarities of the positives and, in backward, the columns' softmax."""

    y_ND: Tensor
    ids_N: Tensor | None
    positive_N: Tensor | None
    columns: Softmax | None


@dataclass
class ClipSaved:
    """What backward needs from forward.

    rows, columns: their softmax; dpos_M: the gradient in the logits of the positives; share: the factor of the mean.
    compared_M: the similarities of the positives, if pairs are compared with them.
    saved_exp: the exponentials that the tiles have saved of this rank's own block.
    """

    rows: Softmax
    columns: Softmax | None
    dpos_M: Tensor
    share: Tensor | float
    compared_M: Tensor | None
    saved_exp: Any

    def pop(self) -> Any:
        """Return the saved exponentials in the first backward; later ones compute them again."""
        saved_exp, self.saved_exp = self.saved_exp, None
        return saved_exp


class _ClipLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, scale: Tensor, batch: LossBatch, rules: ClipRules
    ) -> tuple[Tensor, Diagnostics | None]:
        x_MD, y_ND = batch.read(x), batch.read(y)
        loss, diagnostics, state = _forward(x_MD, y_ND, scale, batch, rules)
        ctx.partial = None
        if batch.ring.size == 1 and state.saved_exp is not None:
            ctx.partial = _partial_gradients(x_MD, y_ND, scale, batch, rules, state)
        ctx.batch, ctx.rules, ctx.saved = batch, rules, state
        ctx.ids_version = None if batch.ids_N is None else batch.ids_N._version
        save(ctx, x=x, y=y, scale=scale)
        return loss, diagnostics

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, y, scale = saved(ctx)
        batch: LossBatch = ctx.batch
        if batch.ids_N is not None and batch.ids_N._version != ctx.ids_version:
            raise modified("ids")
        # The first backward overwrites them; a further one through a retained graph computes them again.
        partial, ctx.partial = ctx.partial, None
        if partial is None:
            partial = _partial_gradients(batch.read(x), batch.read(y), scale, batch, ctx.rules, ctx.saved)
        dx, dy, dscale, _ = finish(g, x, y, scale, batch, partial, reuse=True)
        need_x, need_y, need_scale, *_ = ctx.needs_input_grad
        return dx if need_x else None, dy if need_y else None, dscale if need_scale else None, None, None


@outside_autocast
def _forward(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, batch: LossBatch, rules: ClipRules
) -> tuple[Tensor, Diagnostics | None, ClipSaved]:
    """Return the loss of the whole batch, this rank's diagnostics, and what backward needs."""
    # The positives travel with the block, and have to be computed first, only if pairs are compared with them.
    compares = rules.drop_above is not None or rules.diagnostics
    compared_M = batch.tiles.positives(x_MD, y_ND, batch.compute) if compares else None
    saved_exp: Any = None

    def visit(block: ClipBlock, owner: int) -> tuple[Any, Any]:
        nonlocal saved_exp
        pairs = _pairs(block, owner, batch, rules, compared_M)
        # Only of this rank's own block, which both tours visit first: then the workspace is free again for the others.
        save_exp = pairs.is_local and batch.needs_grad is not None
        stats = batch.tiles.softmax_stats(
            x_MD, block.y_ND, scale, pairs, columns=rules.symmetric, compute=batch.compute, save_exp=save_exp
        )
        saved_exp = stats.saved_exp if save_exp else saved_exp
        return (stats.rows, stats.row_ranking), (stats.columns, stats.column_ranking)

    block = ClipBlock(y_ND, batch.ids_N, compared_M if rules.symmetric else None, None)
    (row_stats, row_ranking), (column_stats, column_ranking) = batch.ring.tour(block, batch.lengths, visit, merge)
    # Otherwise they are computed here, so that the device has work while the last results arrive.
    positive_M = batch.tiles.positives(x_MD, y_ND, batch.compute) if compared_M is None else compared_M
    loss_M, dpos_M, rows, columns = batch.tiles.normalise(
        row_stats, column_stats, positive_M, scale, batch.weights_M, rules.label_smoothing
    )
    (loss,), weight = batch.totals(loss_M.sum())
    share = 1 / (weight * (2 if rules.symmetric else 1))
    diagnostics = diagnose(positive_M, row_ranking, column_ranking) if rules.diagnostics else None
    return loss * share, diagnostics, ClipSaved(rows, columns, dpos_M, share, compared_M, saved_exp)


@outside_autocast
def _partial_gradients(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, batch: LossBatch, rules: ClipRules, saved_state: ClipSaved
) -> PartialGradients:
    """Return the products of the negatives, and what is to be done with them."""
    needs_grad = batch.needs_grad
    assert needs_grad is not None

    def visit(block: ClipBlock, owner: int) -> tuple[Any, Any]:
        pairs = _pairs(block, owner, batch, rules, saved_state.compared_M)
        saved_exp = saved_state.pop() if pairs.is_local else None
        return batch.tiles.softmax_grads(
            x_MD,
            block.y_ND,
            scale,
            pairs,
            saved_state.rows,
            block.columns,
            needs_grad=needs_grad,
            compute=batch.compute,
            dpos_M=saved_state.dpos_M,
            saved_exp=saved_exp,
        )

    compared_N = saved_state.compared_M if rules.symmetric else None
    block = ClipBlock(y_ND, batch.ids_N, compared_N, saved_state.columns)
    products = batch.ring.tour(block, batch.lengths, visit, merge)
    return PartialGradients(list(products), saved_state.dpos_M, saved_state.share)


def _pairs(block: ClipBlock, owner: int, batch: LossBatch, rules: ClipRules, compared_M: Tensor | None) -> Pairs:
    return Pairs(
        is_local=owner == batch.ring.rank,
        ids_M=None if batch.ids_N is None else batch.ids_N[: batch.rows],
        ids_N=block.ids_N,
        multi_positive=rules.duplicates == "positive",
        drop_above=rules.drop_above,
        positive_M=compared_M,
        positive_N=block.positive_N,
        smoothed=rules.label_smoothing > 0,
        ranked=rules.diagnostics,
    )


def _value_and_gradients(
    x: Tensor, y: Tensor, scale: Tensor, bias: Tensor | None, batch: LossBatch, rules: ClipRules
) -> ValueAndGradients:
    assert bias is None
    call = one_piece_of(batch, x, y, scale) if rules.all_pairs_alike else None
    if call is not None:
        return in_one_piece(x, y, call, softmax_in_one_piece(call, rules.symmetric))
    x_MD, y_ND = batch.read(x), batch.read(y)
    loss, _, state = _forward(x_MD, y_ND, scale, batch, rules)
    if batch.needs_grad is None:
        return ValueAndGradients(loss, None, None, None, None)
    partial = _partial_gradients(x_MD, y_ND, scale, batch, rules, state)
    # The gradients get the dtype of the embeddings that they are finished with.
    dx, dy, dscale, _ = finish(torch.ones_like(loss), x.to(batch.acc), y.to(batch.acc), scale, batch, partial, reuse=True)
    return ValueAndGradients(loss, dx, dy, dscale, None)


_operator = declare(
    "clip_loss",
    ClipRules,
    "bool symmetric, str duplicates, float label_smoothing, float? drop_above, bool diagnostics",
    _value_and_gradients,
)
