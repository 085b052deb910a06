"""Distillation: the student's in-batch distribution follows a teacher's, without either similarity matrix. Formulas: reference.py.

`distill_loss` compares the two softmaxes over the whole batch. Forward: one tour of the ring collects Σ exp(s), Σ exp(t) and
Σ exp(t)·s of rows and columns. Backward: a second tour computes both tiles again; the gradient is the difference of probabilities.
`margin_mse_loss` and `listwise_kl_loss` have a teacher's scores of a few documents for each query, and need no tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..ring import Group
from ..tiles import backend_for, distillation_for
from ..tiles.contract import ComputeOptions, NeedsGrad, Softmax, accumulator
from ..tiles.distill import DistillStats, DistillTiles, Operands, Scales, merge_distill
from .autograd import (
    LossModule,
    PartialGradients,
    finish,
    first_derivative_only,
    outside_autocast,
    outside_graphs,
    save,
    saved,
)
from .batch import ExecutionOptions, LossBatch, RankSummary, agree, summarise
from .checks import (
    DTYPES,
    check_embeddings,
    check_group,
    check_number,
    check_precision,
    check_scalar,
    check_tensor,
    check_weights,
    check_workspace,
    outside_inference,
    product_dtype,
    warn_of_small_scale,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..ring import Ring

DIVERGENCES = ("cross_entropy", "kl")


class DistillOptions(ExecutionOptions, total=False):
    """The options of `distill_loss` that `DistillLoss` stores, for type checkers. `distill_loss` documents them."""

    symmetric: bool
    divergence: str


@outside_graphs
def distill_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    teacher_x: Tensor,
    teacher_y: Tensor,
    teacher_scale: Tensor | float,
    *,
    symmetric: bool = True,
    divergence: str = "cross_entropy",
    weights: Tensor | None = None,
    group: Group = ...,
    equal_shards: bool = False,
    backend: str | None = None,
    workspace: int | None = None,
    precision: str = "ieee",
) -> Tensor:
    """Return how far the student's in-batch distributions are from a teacher's, over all rows of all ranks, without either matrix.

    For each row it is the cross-entropy `-Σ softmax(t) * log_softmax(s)` of the student's logits `s = scale * x @ y.T` with the
    teacher's `t = teacher_scale * teacher_x @ teacher_y.T`; the mean over rows is averaged with that over columns. This is the
    distillation term of OpenCLIP's DistillClipLoss. Memory is O(rows * width) per rank.

    Inputs:
        x, y, scale: embeddings (M, D) and (N, D) of the student and the factor of their similarities, as in `clip_loss`.
        teacher_x, teacher_y: (M, T) and (N, T) embeddings of the teacher for the same rows, of any width, without a gradient.
        teacher_scale: factor of the teacher's similarities, a float or a tensor with one element, without a gradient. It must be
            equal on all ranks.
        weights: (M,) weights of the rows in the mean. Default: equal weights.

    What is compared:
        symmetric: average the loss over rows with that over columns. False: rows only; N may then exceed M.
        divergence: "cross_entropy", or "kl", which subtracts the teacher's entropy: it is zero where both agree, and has the same
            gradient.

    How it is computed:
        group, equal_shards, backend, workspace, precision: as in `clip_loss`.

    Returns the loss as a float32 scalar (float64 for float64 embeddings), the same on every rank. DDP's average of gradients is
    exactly the gradient of this loss.

    >>> import torch, megabatch
    >>> x, y, teacher_x, teacher_y = torch.nn.functional.normalize(torch.randn(4, 256, 64), dim=-1).unbind()
    >>> loss = megabatch.distill_loss(x.requires_grad_(), y, 20.0, teacher_x, teacher_y, 50.0)
    >>> loss.backward()
    """
    rules = DistillRules(symmetric, divergence)
    both_tiles: DistillTiles | None = None
    teacher = teacher_x, teacher_y

    def describe(ring: Ring, waits: bool) -> tuple[RankSummary, dict[str, object]]:
        rules.check()
        check_embeddings(x, y, same_rows=symmetric)
        check_weights(weights, x)
        check_scalar("scale", scale, x)
        check_scalar("teacher_scale", teacher_scale, x)
        _check_teacher(x, y, *teacher, teacher_scale)
        check_group(x, ring)
        nonlocal both_tiles
        both_tiles = distillation_for(x.device, product_dtype(x), backend)
        check_workspace(workspace)
        check_precision(precision, False, product_dtype(x))
        facts = {
            "loss": "distill_loss",
            "width of the embeddings": x.shape[1],
            "dtype of the embeddings": product_dtype(x),
            "width of the teacher's embeddings": teacher_x.shape[1],
            "dtype of the teacher's embeddings": teacher_x.dtype,
            "device of the embeddings": x.device.type,
            **vars(rules),
            "weights": "None" if weights is None else "given",
            "precision": precision,
        }
        return summarise(len(x), len(y), ([x], [y]), (scale, teacher_scale), waits=waits), facts

    device = x.device if isinstance(x, Tensor) else torch.device("cpu")
    call = agree(group, equal_shards, device, ("x", "y", "scale", "teacher_scale"), describe)
    dtype = product_dtype(x)
    tiles = backend_for(x.device, dtype, backend)
    need_x, need_y, need_scale, _ = call.requires_grad
    batch = LossBatch(
        rows=len(x),
        dtype=dtype,
        ids_N=None,
        weights_M=None if weights is None else weights.to(accumulator(dtype)).resolve_neg().contiguous(),
        ring=call.ring,
        lengths=tuple(each.documents for each in call.summaries),
        tiles=tiles,
        compute=ComputeOptions(tiles.default_workspace(x.device) if workspace is None else workspace, precision),
        needs_grad=NeedsGrad(need_x or not need_y, need_y) if need_x or need_y or need_scale else None,
    )
    warn_of_small_scale(call.summaries[call.ring.rank].values[0], x, y)
    scales = Scales(batch.scalar(scale, x), batch.scalar(teacher_scale, x).detach())
    # Sums of both matrices have one dtype, so a teacher of another kind is read as the student is.
    teacher_x, teacher_y = (_read_teacher(t, batch) for t in teacher)
    assert both_tiles is not None
    if batch.needs_grad is None:
        operands = Operands(batch.read(x), batch.read(y), teacher_x, teacher_y)
        return _forward(operands.x_MD, operands, scales, batch, rules, both_tiles)[0]
    return _DistillLoss.apply(batch.join_backward(x, y, scales.student), y, *scales, teacher_x, teacher_y, batch, rules, both_tiles)


class DistillLoss(LossModule[Tensor]):
    """`distill_loss` as a Module, which stores its options.

    >>> import torch, megabatch
    >>> x, y, teacher_x, teacher_y = torch.nn.functional.normalize(torch.randn(4, 256, 64), dim=-1).unbind()
    >>> loss = megabatch.DistillLoss(divergence="kl")(x, y, 20.0, teacher_x, teacher_y, 50.0)
    """

    loss = staticmethod(distill_loss)

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[DistillOptions]) -> None: ...


@dataclass(frozen=True)
class DistillRules:
    """The options of `distill_loss` that say what is compared."""

    symmetric: bool
    divergence: str

    def check(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"divergence={self.divergence!r}: must be one of {', '.join(map(repr, DIVERGENCES))}")


class DistillBlock(NamedTuple):
    """One rank's block in the ring: the student's and the teacher's documents and, in backward, the columns' softmax of each."""

    y_ND: Tensor
    teacher_y_NT: Tensor
    columns: tuple[Softmax, Softmax] | None


class DistillSaved(NamedTuple):
    """What backward needs from forward: the student's and the teacher's softmax of rows and columns, and the factor of the mean."""

    rows: tuple[Softmax, Softmax]
    columns: tuple[Softmax, Softmax] | None
    share: Tensor | float


class _DistillLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        teacher_scale: Tensor,
        teacher_x: Tensor,
        teacher_y: Tensor,
        batch: LossBatch,
        rules: DistillRules,
        both_tiles: DistillTiles,
    ) -> Tensor:
        operands = Operands(batch.read(x), batch.read(y), teacher_x, teacher_y)
        loss, ctx.saved = _forward(operands.x_MD, operands, Scales(scale, teacher_scale), batch, rules, both_tiles)
        ctx.batch, ctx.both_tiles = batch, both_tiles
        save(ctx, x=x, y=y, scale=scale, teacher_scale=teacher_scale, teacher_x=teacher_x, teacher_y=teacher_y)
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, y, scale, teacher_scale, teacher_x, teacher_y = saved(ctx)
        batch: LossBatch = ctx.batch
        operands = Operands(batch.read(x), batch.read(y), teacher_x, teacher_y)
        products = _products(operands.x_MD, operands, Scales(scale, teacher_scale), batch, ctx.saved, ctx.both_tiles)
        # The positive is one of the pairs: nothing is added for it.
        partial = PartialGradients(products, scale.new_zeros(batch.rows), ctx.saved.share)
        dx, dy, dscale, _ = finish(g, x, y, scale, batch, partial, reuse=True)
        need_x, need_y, need_scale, *_ = ctx.needs_input_grad
        return dx if need_x else None, dy if need_y else None, dscale if need_scale else None, *[None] * 6


@outside_autocast
def _forward(
    x_MD: Tensor, operands: Operands, scales: Scales, batch: LossBatch, rules: DistillRules, both_tiles: DistillTiles
) -> tuple[Tensor, DistillSaved]:
    """Return the loss of the whole batch, and what backward needs."""
    entropy = rules.divergence == "kl"

    def visit(block: DistillBlock, owner: int) -> tuple[Any, Any]:
        pair = operands._replace(y_ND=block.y_ND, teacher_y_NT=block.teacher_y_NT)
        return both_tiles.distill_stats(x_MD, pair, scales, columns=rules.symmetric, entropy=entropy, compute=batch.compute)

    block = DistillBlock(operands.y_ND, operands.teacher_y_NT, None)
    rows, columns = batch.ring.tour(block, batch.lengths, visit, merge_distill)
    weight_M = x_MD.new_ones(batch.rows, dtype=batch.acc) if batch.weights_M is None else batch.weights_M
    loss_M = _divergence(rows)
    row_softmax, column_softmax = _softmaxes(rows, weight_M), None
    if columns is not None:
        loss_M = loss_M + _divergence(columns)
        column_softmax = _softmaxes(columns, weight_M)
    (loss,), weight = batch.totals((weight_M * loss_M).sum())
    share = 1 / (weight * (2 if rules.symmetric else 1))
    return loss * share, DistillSaved(row_softmax, column_softmax, share)


@outside_autocast
def _products(
    x_MD: Tensor, operands: Operands, scales: Scales, batch: LossBatch, saved_state: DistillSaved, both_tiles: DistillTiles
) -> list[Tensor | None]:
    """Return gx_MD and gy_ND."""
    needs_grad = batch.needs_grad
    assert needs_grad is not None

    def visit(block: DistillBlock, owner: int) -> tuple[Any, Any]:
        pair = operands._replace(y_ND=block.y_ND, teacher_y_NT=block.teacher_y_NT)
        return both_tiles.distill_grads(
            x_MD, pair, scales, saved_state.rows, block.columns, needs_grad=needs_grad, compute=batch.compute
        )

    block = DistillBlock(operands.y_ND, operands.teacher_y_NT, saved_state.columns)
    return list(batch.ring.tour(block, batch.lengths, visit, merge_distill))


def _divergence(stats: DistillStats) -> Tensor:
    """Return the cross-entropy of each row (or column), minus the teacher's entropy if its sum was collected."""
    loss = stats.peak + stats.total.log() - stats.cross / stats.teacher_total
    if stats.entropy is not None:
        loss = loss + stats.entropy / stats.teacher_total - stats.teacher_peak - stats.teacher_total.log()
    return loss


def _softmaxes(stats: DistillStats, weight: Tensor) -> tuple[Softmax, Softmax]:
    return Softmax(stats.peak, weight / stats.total), Softmax(stats.teacher_peak, weight / stats.teacher_total)


def _read_teacher(t: Tensor, batch: LossBatch) -> Tensor:
    dtype = product_dtype(t)
    return outside_inference(t.detach()).to(dtype if accumulator(dtype) == batch.acc else batch.dtype).resolve_neg().contiguous()


def _check_teacher(x: Tensor, y: Tensor, teacher_x: Tensor, teacher_y: Tensor, teacher_scale: Tensor | float) -> None:
    for name, t, student in (("teacher_x", teacher_x, x), ("teacher_y", teacher_y, y)):
        check_tensor(name, t, "embeddings")
        if t.ndim != 2 or len(t) != len(student) or t.shape[1] == 0 or t.dtype not in DTYPES:
            side = name.removeprefix("teacher_")
            raise ValueError(
                f"{name} has shape {tuple(t.shape)} and is {t.dtype}: must be ({len(student)}, width), a floating-point embedding "
                f"for each row of {side}"
            )
        if t.device != x.device:
            raise ValueError(f"{name} is on {t.device} and x on {x.device}: must be on one device; move one with .to()")
    if teacher_x.shape[1] != teacher_y.shape[1] or teacher_x.dtype != teacher_y.dtype:
        raise ValueError(
            f"teacher_x has width {teacher_x.shape[1]} and is {teacher_x.dtype}, teacher_y {teacher_y.shape[1]} and "
            f"{teacher_y.dtype}: width and dtype must be equal, since both come from one teacher"
        )
    for name, value in (("teacher_x", teacher_x), ("teacher_y", teacher_y), ("teacher_scale", teacher_scale)):
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient: the teacher has none; compute it under torch.no_grad() or detach it")


# --- A few documents for each query ---


def margin_mse_loss(scores: Tensor, teacher_scores: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Return MarginMSE: the mean squared difference between the student's and the teacher's margins of positive over negatives.

    scores, teacher_scores: (M, 1 + k) scores of each query's documents, the positive first. A document whose teacher score is
        -inf is absent, so that queries may have different numbers of negatives.
    weights: (M,) weights of the queries. Default: equal weights of all margins.

    The scores are this rank's alone: the loss is a mean over its rows, like any other per-sample loss.

    >>> import torch, megabatch
    >>> loss = megabatch.margin_mse_loss(torch.tensor([[3.0, 1.0, 0.5]]), torch.tensor([[4.0, 1.0, 1.5]]))
    """
    _check_scores(scores, teacher_scores, weights)
    present = teacher_scores[:, 1:] > -torch.inf
    scores, teacher_scores = _wide(scores), _wide(teacher_scores)
    target = (teacher_scores[:, :1] - teacher_scores[:, 1:]).masked_fill(~present, 0)
    margin = (scores[:, :1] - scores[:, 1:]).masked_fill(~present, 0)
    squares = (margin - target).square()
    if weights is None:
        return squares.sum() / present.sum()
    weights = outside_inference(weights).to(squares.dtype)
    return (weights * squares.sum(1)).sum() / (weights * present.sum(1)).sum()


def listwise_kl_loss(scores: Tensor, teacher_scores: Tensor, *, temperature: float = 1.0, weights: Tensor | None = None) -> Tensor:
    """Return KL(teacher ‖ student) between the softmaxes over each query's documents, averaged over queries.

    scores, teacher_scores: (M, k) scores of each query's documents. A document whose teacher score is -inf is absent.
    temperature: divides both scores; the result is multiplied by its square, so that gradients do not shrink with it.
    weights: (M,) weights of the queries. Default: equal weights.

    The scores are this rank's alone: the loss is a mean over its rows, like any other per-sample loss.

    >>> import torch, megabatch
    >>> loss = megabatch.listwise_kl_loss(torch.randn(8, 4, requires_grad=True), torch.randn(8, 4))
    """
    _check_scores(scores, teacher_scores, weights)
    check_number("temperature", temperature, low=1e-6, high=1e6)
    present = teacher_scores > -torch.inf
    log_teacher = (_wide(teacher_scores) / temperature).log_softmax(1)
    log_student = (_wide(scores) / temperature).masked_fill(~present, -torch.inf).log_softmax(1)
    difference = (log_teacher - log_student.masked_fill(~present, 0)).masked_fill(~present, 0)
    loss = (log_teacher.exp() * difference).sum(1) * temperature**2
    if weights is None:
        return loss.mean()
    weights = outside_inference(weights).to(loss.dtype)
    return (weights * loss).sum() / weights.sum()


def _wide(scores: Tensor) -> Tensor:
    return scores.to(accumulator(scores.dtype))


def _check_scores(scores: Tensor, teacher_scores: Tensor, weights: Tensor | None) -> None:
    for name, t in (("scores", scores), ("teacher_scores", teacher_scores)):
        check_tensor(name, t, "scores, one row for each query")
        if t.ndim != 2 or not t.is_floating_point() or len(t) == 0 or t.shape[1] < 2:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)} and is {t.dtype}: must be floating-point scores (queries, documents) of at "
                "least one query and two documents"
            )
    if scores.shape != teacher_scores.shape:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)} and teacher_scores {tuple(teacher_scores.shape)}: must be equal; pad absent "
            "documents with a teacher score of -inf"
        )
    if teacher_scores.requires_grad and torch.is_grad_enabled():
        raise ValueError("teacher_scores requires a gradient: the teacher has none; pass teacher_scores.detach()")
    check_weights(weights, scores)
