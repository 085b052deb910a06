"""The sigmoid contrastive loss (SigLIP) without the similarity matrix. Formula: reference.siglip_loss.

It has no normaliser: value and gradients come from one pass over the tiles, one tour of the ring, and backward only scales them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..ring import Group
from ..tiles.contract import Pairs, merge
from .autograd import (
    LossModule,
    LossResult,
    PartialGradients,
    finish,
    first_derivative_only,
    outside_autocast,
    outside_graphs,
    save,
    saved,
)
from .batch import Diagnostics, Execution, ExecutionOptions, Inputs, LossBatch, diagnose, prepare
from .checks import check_duplicates
from .one_piece import OnePieceCall, accept, loss_in_one_piece, one_piece_of, remember
from .operators import ValueAndGradients, declare, in_one_piece, is_operator_call

if TYPE_CHECKING:
    # torch depends on typing_extensions; typing has Unpack from Python 3.11 on.
    from typing_extensions import Unpack


class SigLipOptions(ExecutionOptions, total=False):
    """The options of `siglip_loss` that `SigLipLoss` stores, for type checkers. `clip_loss` documents them."""

    duplicates: str


@overload
def siglip_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    *,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    diagnostics: Literal[False] = False,
    **options: Unpack[SigLipOptions],
) -> Tensor: ...


@overload
def siglip_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    *,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    diagnostics: Literal[True],
    **options: Unpack[SigLipOptions],
) -> tuple[Tensor, Diagnostics]: ...


@overload
def siglip_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    *,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    diagnostics: bool,
    **options: Unpack[SigLipOptions],
) -> Tensor | tuple[Tensor, Diagnostics]: ...


def siglip_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    *,
    ids: Tensor | None = None,
    duplicates: str = "mask",
    weights: Tensor | None = None,
    group: Group = ...,
    equal_shards: bool = False,
    backend: str | None = None,
    workspace: int | None = None,
    precision: str = "ieee",
    diagnostics: bool = False,
) -> Tensor | tuple[Tensor, Diagnostics]:
    """Return the sigmoid contrastive loss (SigLIP) of all rows of all ranks, without storing the similarity matrix.

    It is the sum over all pairs of `-logsigmoid(label * (scale * x @ y.T + bias))`, divided by the number of rows of x. The label
    is +1 for positives (row i of x and row i of y) and -1 for negatives. Memory is O(rows * width) per rank. The formula, with the
    whole matrix, is `megabatch.reference.siglip_loss`.

    Inputs:
        x: (M, D) embeddings of this rank, in float64, float32, bfloat16 or float16, normalised or not.
        y: (N, D) embeddings of this rank with the same dtype, N >= M; the rows beyond the first M are extra negatives.
        scale: factor of the similarities, 1 / temperature: a float, or a tensor with one element, which may require a gradient.
        bias: added to the logits: a float or tensor like scale. Both must be equal on all ranks.
        ids: (N,) integers, one for each row of y; row i of x has the id of row i of y. Pairs with equal ids are no negatives.
        weights: (M,) weights of the rows of x: the result is the weighted mean over rows of the sum over their pairs.

    Which pairs count:
        duplicates: what pairs with equal ids, apart from the positive itself, are. "mask": left out. "positive": further positives,
            with the label +1.

    How it is computed: group, equal_shards, backend, workspace, precision and diagnostics are those of `clip_loss`.

    Returns the loss as a float32 scalar (float64 for float64 embeddings), the same on every rank. DDP's average of gradients is
    exactly the gradient of this loss.

    >>> import torch, megabatch
    >>> x, y = torch.nn.functional.normalize(torch.randn(2, 1024, 64), dim=-1).unbind()
    >>> loss = megabatch.siglip_loss(x.requires_grad_(), y, scale=10.0, bias=-10.0)
    >>> loss.backward()
    """
    rules, execution = (duplicates, diagnostics), (group, equal_shards, backend, workspace, precision)
    if torch.compiler.is_compiling():
        if is_operator_call(x, group, diagnostics):
            return _operator(x, y, scale, bias, ids, weights, *rules, group is None, *execution[1:], False)
        return _outside_graphs(x, y, scale, bias, ids, weights, rules, execution)
    return _siglip_loss(x, y, scale, bias, ids, weights, rules, execution)


def _siglip_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    ids: Tensor | None,
    weights: Tensor | None,
    options: tuple[str, bool],
    how: tuple[Group, bool, str | None, int | None, str],
) -> Tensor | tuple[Tensor, Diagnostics]:
    """Return the loss. options: the fields of SigLipRules; how: those of Execution."""
    usual = ids is None and weights is None and options == ("mask", False) and how[4] == "ieee"
    group, _, backend, workspace, _ = how
    found = accept(x, y, (scale, bias), group, backend, workspace) if usual else None
    if isinstance(found, OnePieceCall):
        return loss_in_one_piece(x, y, found, found.tiles.sigmoid_loss)
    rules = SigLipRules(*options)
    inputs = Inputs(x, y, {"scale": scale, "bias": bias}, ids, weights)
    batch = prepare(inputs, rules, Execution(*how)) if found is None else found
    scale, bias = batch.scalar(scale, x), batch.scalar(bias, x)
    if found is None:
        call = None if rules.diagnostics else one_piece_of(batch, x, y, scale, bias)
        if call is not None:
            return loss_in_one_piece(x, y, call, call.tiles.sigmoid_loss)
        if usual:
            remember(batch, x, y, (scale, bias), backend, workspace)
    if batch.needs_grad is None:
        loss, ranking, _ = _forward(batch.read(x), batch.read(y), scale, bias, batch, rules)
    else:
        loss, ranking = _SigLipLoss.apply(batch.join_backward(x, y, scale, bias), y, scale, bias, batch, rules)
    return loss if ranking is None else (loss, ranking)


# What torch.compile does with calls that cannot be an operator.
_outside_graphs = outside_graphs(_siglip_loss)


class SigLipLoss(LossModule[LossResult]):
    """`siglip_loss` as a Module, which stores its options.

    >>> import torch, megabatch
    >>> x, y = torch.nn.functional.normalize(torch.randn(2, 1024, 64), dim=-1).unbind()
    >>> criterion = megabatch.SigLipLoss(duplicates="positive")
    >>> loss = criterion(x, y, 10.0, -10.0, ids=torch.arange(1024))
    """

    loss = staticmethod(siglip_loss)

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: SigLipLoss[Tensor], *, diagnostics: Literal[False] = False, **options: Unpack[SigLipOptions]
        ) -> None: ...

        @overload
        def __init__(
            self: SigLipLoss[tuple[Tensor, Diagnostics]], *, diagnostics: Literal[True], **options: Unpack[SigLipOptions]
        ) -> None: ...

        @overload
        def __init__(self: SigLipLoss[Any], *, diagnostics: bool, **options: Unpack[SigLipOptions]) -> None: ...

        def __init__(self, **options: Any) -> None: ...


@dataclass(frozen=True)
class SigLipRules:
    """The options of `siglip_loss` that say which pairs count, and how."""

    duplicates: str
    diagnostics: bool

    loss_name: ClassVar[str] = "siglip_loss"
    same_rows: ClassVar[bool] = False

    def check(self) -> None:
        check_duplicates(self.duplicates)


class SigLipBlock(NamedTuple):
    """One rank's block in the ring: embeddings, ids and, for diagnostics, the similarities of the positives."""

    y_ND: Tensor
    ids_N: Tensor | None
    positive_N: Tensor | None


class SigLipSaved(NamedTuple):
    """What backward needs from forward.

    gx_MD, gy_ND: the gradient products of the negatives; dpos_M: the gradient in the logits of the positives.
    slope: the gradient in the bias; share: the factor of the mean, by which all of it is still to be multiplied.
    """

    gx_MD: Tensor | None
    gy_ND: Tensor | None
    dpos_M: Tensor
    slope: Tensor
    share: Tensor | float


class _SigLipLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, scale: Tensor, bias: Tensor, batch: LossBatch, rules: SigLipRules
    ) -> tuple[Tensor, Diagnostics | None]:
        loss, diagnostics, state = _forward(batch.read(x), batch.read(y), scale, bias, batch, rules)
        assert state is not None
        products = {"gx": state.gx_MD, "gy": state.gy_ND}
        ctx.batch, ctx.saved = batch, state._replace(gx_MD=None, gy_ND=None)
        ctx.known = [t is not None for t in products.values()]
        # Saved as the inputs are, so that autograd frees them after backward.
        save(ctx, x=x, y=y, scale=scale, bias=bias, **{name: t for name, t in products.items() if t is not None})
        return loss, diagnostics

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g: Tensor, _: None) -> tuple[Tensor | None, ...]:
        x, y, scale, _bias, *products = saved(ctx)
        state: SigLipSaved = ctx.saved
        partial = PartialGradients([products.pop(0) if known else None for known in ctx.known], state.dpos_M, state.share)
        # The products are not overwritten: backward may be called again.
        dx, dy, dscale, factor = finish(g, x, y, scale, ctx.batch, partial, reuse=False)
        need_x, need_y, need_scale, need_bias, *_ = ctx.needs_input_grad
        return (
            dx if need_x else None,
            dy if need_y else None,
            dscale if need_scale else None,
            state.slope * factor if need_bias else None,
            None,
            None,
        )


@outside_autocast
def _forward(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, bias: Tensor, batch: LossBatch, rules: SigLipRules
) -> tuple[Tensor, Diagnostics | None, SigLipSaved | None]:
    """Return the loss of the whole batch, this rank's diagnostics and, if gradients are needed, what backward needs."""
    positive_M = batch.tiles.positives(x_MD, y_ND, batch.compute)

    def visit(block: SigLipBlock, owner: int) -> tuple[Any, Any]:
        pairs = Pairs(
            is_local=owner == batch.ring.rank,
            ids_M=None if batch.ids_N is None else batch.ids_N[: batch.rows],
            ids_N=block.ids_N,
            multi_positive=rules.duplicates == "positive",
            positive_M=positive_M,
            positive_N=block.positive_N,
            ranked=rules.diagnostics,
        )
        sums = batch.tiles.sigmoid_sums(
            x_MD, block.y_ND, scale, bias, pairs, batch.weights_M, needs_grad=batch.needs_grad, compute=batch.compute
        )
        return (sums.value_M, sums.slope_M, sums.gx_MD, sums.row_ranking), (sums.gy_ND, sums.column_ranking)

    # A row of y without a row of x has no positive to compare with; NaN compares as false with every similarity.
    extra = positive_M.new_full((len(y_ND) - len(x_MD),), torch.nan)
    block = SigLipBlock(y_ND, batch.ids_N, torch.cat((positive_M, extra)) if rules.diagnostics else None)
    (value_M, slope_M, gx_MD, row_ranking), (gy_ND, column_ranking) = batch.ring.tour(block, batch.lengths, visit, merge)
    # A positive costs softplus(-s). On a GPU the host's time for these operations counts: none for weights of one.
    negated_M = (scale * positive_M + bias).neg_()
    dpos_M = negated_M.sigmoid().neg_()
    losses = [value_M + softplus(negated_M)]
    if batch.weights_M is not None:
        dpos_M = batch.weights_M * dpos_M
        losses = [batch.weights_M * losses[0]]
    if slope_M is not None:
        losses.append((slope_M if batch.weights_M is None else batch.weights_M * slope_M) + dpos_M)
    sums = [each.sum() for each in losses]
    (loss, *slope), weight = batch.totals(*sums)
    diagnostics = diagnose(positive_M, row_ranking, column_ranking) if rules.diagnostics else None
    saved_state = SigLipSaved(gx_MD, gy_ND, dpos_M, slope[0], 1 / weight) if slope else None
    return loss / weight, diagnostics, saved_state


def _value_and_gradients(
    x: Tensor, y: Tensor, scale: Tensor, bias: Tensor | None, batch: LossBatch, rules: SigLipRules
) -> ValueAndGradients:
    assert bias is not None
    call = one_piece_of(batch, x, y, scale, bias)
    if call is not None:
        return in_one_piece(x, y, call, call.tiles.sigmoid_loss)
    loss, _, state = _forward(batch.read(x), batch.read(y), scale, bias, batch, rules)
    if state is None:
        return ValueAndGradients(loss, None, None, None, None)
    partial = PartialGradients([state.gx_MD, state.gy_ND], state.dpos_M, state.share)
    # The gradients get the dtype of the embeddings that they are finished with.
    dx, dy, dscale, factor = finish(torch.ones_like(loss), x.to(batch.acc), y.to(batch.acc), scale, batch, partial, reuse=True)
    return ValueAndGradients(loss, dx, dy, dscale, state.slope * factor)


_operator = declare("siglip_loss", SigLipRules, "str duplicates, bool diagnostics", _value_and_gradients)
