"""Softmax over classes that are sharded over ranks: the positive of row i is y[targets[i]]. Formula: reference.class_softmax_loss.

The rows of x travel round the ring, since there are usually far fewer of them than classes; y and its gradient stay on their rank.
Margins (CosFace, ArcFace) change the logit of the positive alone, which is never part of the sums over tiles: the tiles take the
places of the classes as ids, and leave out the pair of a row with its own class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..ring import Group, Ring
from ..tiles import backend_for
from ..tiles.contract import ComputeOptions, NeedsGrad, Pairs, Softmax, Stats, Tiles, accumulator, merge
from .autograd import LossModule, first_derivative_only, outside_autocast, outside_graphs, save, saved
from .batch import ExecutionOptions, RankSummary, SharedCall, agree, summarise
from .checks import (
    DTYPES,
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

# The least sin θ that the angular margin computes with, so that its derivative stays finite where x and its class coincide.
LEAST_SINE = 1e-3
# How far beyond 1 rounding may take a cosine.
COSINE_TOLERANCE = 0.02


class ClassSoftmaxOptions(ExecutionOptions, total=False):
    """The options of `class_softmax_loss`, which documents them, that `ClassSoftmaxLoss` stores, for type checkers."""

    margin: float
    angular_margin: float
    sample: float | None
    generator: torch.Generator | None
    label_smoothing: float
    y_from_encoder: bool


@outside_graphs
def class_softmax_loss(
    x: Tensor,
    y: Tensor,
    targets: Tensor,
    scale: Tensor | float,
    *,
    margin: float = 0.0,
    angular_margin: float = 0.0,
    sample: float | None = None,
    generator: torch.Generator | None = None,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    y_from_encoder: bool = False,
    group: Group = ...,
    equal_shards: bool = False,
    backend: str | None = None,
    workspace: int | None = None,
    precision: str = "ieee",
) -> Tensor:
    """Return the softmax cross-entropy over classes whose vectors are sharded over ranks, without storing the logits.

    It is the mean over all rows of all ranks of the cross-entropy of `scale * x @ y.T` with the class `targets[i]` of row i; y are
    the classes of all ranks, in the order of ranks. Memory is O((rows + classes) * width) per rank.

    Inputs:
        x: (M, D) embeddings of this rank, in float64, float32, bfloat16 or float16.
        y: (C, D) vectors of this rank's classes, or of its part of a corpus, with the same dtype.
        targets: (M,) integers: the index of each row's class among the classes of all ranks.
        scale: factor of the similarities: a float, or a tensor with one element, which may require a gradient.
        weights: (M,) weights of the rows in the mean. Default: equal weights.

    What is computed:
        margin: subtracted from the similarity of the row's own class (CosFace).
        angular_margin: added to the angle between the row and its own class, in radians (ArcFace): cos(θ + angular_margin), or
            cos θ - angular_margin * sin(angular_margin) where the sum would exceed π. x and y must be normalised.
        sample: fraction of this rank's classes that count in this call (partial FC): all classes that are some row's target, and
            random others. None: all classes.
        generator: draws the sample, independently on each rank. None: PyTorch's default generator.
        label_smoothing: in [0, 1], as in torch.nn.functional.cross_entropy, over the classes that count.

    How it is computed:
        y_from_encoder: whether DDP averages the gradients of what computes y (documents of a corpus). False: y is a parameter that
            this rank alone holds (class weights), and its gradient is complete. Classes that every rank holds need no group: the
            mean over a rank's own rows, group=None, is then right under DDP.
        group, equal_shards, backend, workspace, precision: as in `clip_loss`.

    Returns the loss as a float32 scalar (float64 for float64 embeddings), the same on every rank. DDP's average of the gradients of
    what computes x is exactly the gradient of this loss.

    >>> import torch, megabatch
    >>> x, classes = torch.nn.functional.normalize(torch.randn(96, 16), dim=-1).split([32, 64])
    >>> targets = torch.randint(64, (32,))
    >>> loss = megabatch.class_softmax_loss(x.requires_grad_(), classes, targets, 30.0, angular_margin=0.5)
    >>> loss.backward()
    """
    rules = ClassRules(margin, angular_margin, sample, label_smoothing, y_from_encoder)
    tiles: Tiles | None = None

    def describe(ring: Ring, waits: bool) -> tuple[RankSummary, dict[str, object]]:
        rules.check()
        _check_inputs(x, y, targets)
        check_weights(weights, x)
        check_scalar("scale", scale, x)
        check_group(x, ring)
        nonlocal tiles
        tiles = backend_for(x.device, product_dtype(x), backend)
        check_workspace(workspace)
        check_precision(precision, False, product_dtype(x))
        facts = {
            "loss": "class_softmax_loss",
            "width of the embeddings": x.shape[1],
            "dtype of the embeddings": product_dtype(x),
            "device of the embeddings": x.device.type,
            **vars(rules),
            "weights": "None" if weights is None else "given",
            "precision": precision,
        }
        return summarise(len(x), len(y), ([x], [y]), (scale,), waits=waits), facts

    device = x.device if isinstance(x, Tensor) else torch.device("cpu")
    call = agree(group, equal_shards, device, ("x", "y", "scale"), describe)
    warn_of_small_scale(call.summaries[call.ring.rank].values[0], x, y)
    dtype = product_dtype(x)
    acc = accumulator(dtype)
    assert tiles is not None
    space = tiles.default_workspace(x.device) if workspace is None else workspace
    classes = [each.documents for each in call.summaries]
    first = sum(classes[: call.ring.rank])
    targets = outside_inference(targets.detach()).to(torch.int64).contiguous()
    with torch.no_grad():
        kept = None if sample is None else _sample(targets, first, classes[call.ring.rank], sample, generator, call)
    scale = scale.to(x.device, acc).reshape(()) if isinstance(scale, Tensor) else x.new_full((), scale, dtype=acc)
    batch = ClassBatch(
        call=call,
        rules=rules,
        dtype=dtype,
        targets_M=targets,
        weights_M=None if weights is None else weights.to(acc).contiguous(),
        first=first,
        kept=kept,
        tiles=tiles,
        compute=ComputeOptions(space, precision),
    )
    if not any(call.requires_grad):
        return _forward(batch.read(x), batch.read_classes(y), scale, batch)[0]
    joins = torch.zeros((), requires_grad=True)
    loss: Tensor = _ClassSoftmaxLoss.apply(x, y, scale, joins, batch)
    return loss


class ClassSoftmaxLoss(LossModule[Tensor]):
    """`class_softmax_loss` as a Module, which stores its options; the vectors of the classes are passed with each batch.

    >>> import torch, megabatch
    >>> x, classes = torch.nn.functional.normalize(torch.randn(96, 16), dim=-1).split([32, 64])
    >>> loss = megabatch.ClassSoftmaxLoss(margin=0.35)(x, classes, torch.randint(64, (32,)), 30.0)
    """

    loss = staticmethod(class_softmax_loss)

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[ClassSoftmaxOptions]) -> None: ...


@dataclass(frozen=True)
class ClassRules:
    """The options that say what is computed."""

    margin: float
    angular_margin: float
    sample: float | None
    label_smoothing: float
    y_from_encoder: bool

    def check(self) -> None:
        check_number("margin", self.margin)
        check_number("angular_margin", self.angular_margin, low=0, high=math.pi / 2)
        check_number("label_smoothing", self.label_smoothing, low=0, high=1)
        if self.sample is not None:
            check_number("sample", self.sample, low=0, high=1)

    def with_margin(self, cosine: Tensor) -> tuple[Tensor, Tensor]:
        """Return the similarity of the positive with its margins, and its derivative in the cosine."""
        if not self.angular_margin:
            return cosine - self.margin, torch.ones_like(cosine)
        m = self.angular_margin
        squared = 1 - cosine.square()
        sine = squared.clamp(min=LEAST_SINE**2).sqrt()
        shifted = cosine * math.cos(m) - sine * math.sin(m)
        slope = math.cos(m) + torch.where(squared < LEAST_SINE**2, 0, cosine / sine) * math.sin(m)
        # Where the angle and the margin together are more than π, the cosine would grow again.
        within = cosine > -math.cos(m)
        result = torch.where(within, shifted, cosine - m * math.sin(m))
        return result - self.margin, torch.where(within, slope, 1)


class Classes(NamedTuple):
    """The classes that count in this call: their rows in this rank's y, and for each row of y its place among them (-1: none)."""

    rows_K: Tensor
    place_C: Tensor


@dataclass(frozen=True)
class ClassBatch:
    """One call, apart from its differentiable tensors. first: the index of this rank's first class among those of all ranks."""

    call: SharedCall
    rules: ClassRules
    dtype: torch.dtype
    targets_M: Tensor
    weights_M: Tensor | None
    first: int
    kept: Classes | None
    tiles: Tiles
    compute: ComputeOptions

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(each.rows for each in self.call.summaries)

    def read(self, embeddings: Tensor) -> Tensor:
        """Return embeddings as the tiles read them."""
        return embeddings.detach().to(self.dtype).resolve_neg().contiguous()

    def read_classes(self, y: Tensor) -> Tensor:
        """Return the vectors of the classes that count."""
        return self.read(y) if self.kept is None else self.read(y.detach()[self.kept.rows_K])

    def own_classes(self, targets: Tensor, y_KD: Tensor) -> OwnClasses:
        """Return the classes of the rows with these targets, as far as they are among this rank's, and which pairs count."""
        classes = len(y_KD)
        local = targets - self.first
        if self.kept is not None:
            place_C = self.kept.place_C
            here = (local >= 0) & (local < len(place_C))
            # Without classes on this rank there is nothing to look up.
            local = (
                torch.where(here, place_C[local.clamp(0, len(place_C) - 1)], -1)
                if len(place_C)
                else local.new_full(local.shape, -1)
            )
        here_M = (local >= 0) & (local < classes)
        # Rows whose class is elsewhere are spread over all classes, since sums are slow where many rows meet.
        place_M = torch.where(here_M, local, torch.arange(len(local), device=local.device) % max(classes, 1))
        ids_N = torch.arange(classes, device=local.device)
        pairs = Pairs(ids_M=torch.where(here_M, local, -1), ids_N=ids_N, smoothed=self.rules.label_smoothing > 0)
        return OwnClasses(here_M, place_M, y_KD[place_M] if classes else y_KD.new_zeros(len(local), y_KD.shape[1]), pairs)


class OwnClasses(NamedTuple):
    """The own classes of rows on one rank: whether each is here, its place among this rank's (any if it is not), its vector there;
    and which pairs count."""

    here_M: Tensor
    place_M: Tensor
    y_MD: Tensor
    pairs: Pairs


class ClassBlock(NamedTuple):
    """One rank's rows in the ring and, in backward, their softmax and the gradient in the similarity of their positives."""

    x_MD: Tensor
    targets_M: Tensor
    rows: Softmax | None
    dpos_M: Tensor | None


class ClassSaved(NamedTuple):
    """What backward needs from forward.

    rows: softmax of this rank's rows; dpos_M: gradient in the similarity of their positives, without the scale.
    slope: the gradient in the scale that the margins add to Σ x · dx; share: the factor of the mean.
    """

    rows: Softmax
    dpos_M: Tensor
    slope: Tensor
    share: Tensor


class _ClassSoftmaxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor, joins: Tensor, batch: ClassBatch) -> Tensor:
        loss, ctx.saved = _forward(batch.read(x), batch.read_classes(y), scale, batch)
        ctx.batch = batch
        save(ctx, x=x, y=y, scale=scale, targets=batch.targets_M)
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, y, scale, _ = saved(ctx)
        batch: ClassBatch = ctx.batch
        state: ClassSaved = ctx.saved
        x_MD = batch.read(x)
        gx_MD, gy_KD = _products(x_MD, batch.read_classes(y), scale, batch, state)
        ring = batch.call.ring
        # The ranks hold one loss: its gradient takes the sum of the gradients that come in on all ranks, and the scale's is shared.
        g = ring.sum(g.to(scale.dtype, copy=ring.size > 1)) * state.share
        need_x, need_y, need_scale, *_ = ctx.needs_input_grad
        dx = dy = dscale = None
        if gx_MD is not None:
            slope = ring.sum(torch.linalg.vecdot(x_MD.to(gx_MD.dtype), gx_MD).sum() + state.slope)
            dscale = slope * (g / ring.size)
            dx = gx_MD.mul_(g * scale).to(x.dtype)
        if need_y and gy_KD is not None:
            # DDP does not divide the gradient of a parameter that this rank alone holds.
            factor = g * scale if batch.rules.y_from_encoder else g * scale / ring.size
            dy = gy_KD.mul_(factor).to(y.dtype)
            if batch.kept is not None:
                dy = torch.zeros_like(y).index_copy_(0, batch.kept.rows_K, dy)
        return dx if need_x else None, dy, dscale if need_scale else None, None, None


@outside_autocast
def _forward(x_MD: Tensor, y_KD: Tensor, scale: Tensor, batch: ClassBatch) -> tuple[Tensor, ClassSaved]:
    """Return the loss of the whole batch, and what backward needs."""
    ring, rules = batch.call.ring, batch.rules

    def visit(block: ClassBlock, owner: int) -> tuple[None, tuple[Tensor, Tensor, Stats]]:
        own = batch.own_classes(block.targets_M, y_KD)
        sums = batch.tiles.softmax_stats(block.x_MD, y_KD, scale.detach(), own.pairs, columns=False, compute=batch.compute)
        cosine_M = torch.where(own.here_M, batch.tiles.positives(block.x_MD, own.y_MD, batch.compute), 0)
        return None, (own.here_M.to(scale.dtype), cosine_M, sums.rows)

    block = ClassBlock(x_MD, batch.targets_M, None, None)
    _, (found_M, cosine_M, stats) = ring.tour(block, batch.lengths, visit, merge)
    positive_M, slope_M = rules.with_margin(cosine_M)
    loss_M, dpos_M, rows, _ = batch.tiles.normalise(stats, None, positive_M, scale.detach(), batch.weights_M, rules.label_smoothing)
    weight = scale.new_full((), len(x_MD)) if batch.weights_M is None else batch.weights_M.sum()
    unknown, wide = (found_M == 0).sum(), (cosine_M.abs() > 1 + COSINE_TOLERANCE).sum()
    sums = torch.stack((loss_M.sum(), weight, unknown.to(weight), wide.to(weight)))
    loss, weight, unknown, wide = ring.sum(sums).unbind()
    _check_found(unknown, wide if rules.angular_margin else torch.zeros_like(wide), batch)
    share = 1 / weight
    slope = (dpos_M * (positive_M - slope_M * cosine_M)).sum()
    return loss * share, ClassSaved(rows, dpos_M * slope_M, slope, share)


@outside_autocast
def _products(
    x_MD: Tensor, y_KD: Tensor, scale: Tensor, batch: ClassBatch, state: ClassSaved
) -> tuple[Tensor | None, Tensor | None]:
    """Return gx_MD and gy_KD, the products with the gradient in the logits."""
    need_x, need_y, need_scale = batch.call.requires_grad
    needs_grad = NeedsGrad(need_x or need_scale, need_y)
    gy_KD: Tensor | None = None

    def visit(block: ClassBlock, owner: int) -> tuple[None, Tensor | None]:
        nonlocal gy_KD
        assert block.rows is not None and block.dpos_M is not None
        own = batch.own_classes(block.targets_M, y_KD)
        gx_MD, more_KD = batch.tiles.softmax_grads(
            block.x_MD,
            y_KD,
            scale,
            own.pairs,
            block.rows,
            None,
            needs_grad=needs_grad,
            compute=batch.compute,
        )
        dpos_M1 = torch.where(own.here_M, block.dpos_M, 0)[:, None]
        if gx_MD is not None:
            gx_MD.addcmul_(dpos_M1, own.y_MD.to(gx_MD.dtype))
        if more_KD is not None and len(y_KD):
            _add_rows(more_KD, own.place_M, dpos_M1 * block.x_MD.to(more_KD.dtype))
        gy_KD = merge(gy_KD, more_KD)
        return None, gx_MD

    block = ClassBlock(x_MD, batch.targets_M, state.rows, state.dpos_M)
    _, gx_MD = batch.call.ring.tour(block, batch.lengths, visit, merge)
    return gx_MD, gy_KD


def _add_rows(into: Tensor, places: Tensor, rows: Tensor) -> None:
    """Add rows at their places, those of one place in a fixed order."""
    if into.device.type == "cpu":
        into.index_add_(0, places, rows)
    else:
        # Sorts the places, where index_add_ would add in any order.
        into.index_put_((places,), rows, accumulate=True)


def _sample(
    targets: Tensor, first: int, classes: int, fraction: float, generator: torch.Generator | None, call: SharedCall
) -> Classes:
    """Return this rank's classes that are the target of a row of any rank, and random others up to the fraction."""
    is_target_C = torch.zeros(classes, dtype=torch.bool, device=targets.device)

    def visit(block: Tensor, owner: int) -> tuple[None, None]:
        local = block - first
        is_target_C[local[(local >= 0) & (local < classes)]] = True
        return None, None

    call.ring.tour(targets, [each.rows for each in call.summaries], visit, merge)
    where = targets.device if generator is None else generator.device
    priority_C = torch.rand(classes, generator=generator, device=where).to(targets.device)
    # Targets first; then those with the highest of random numbers below 1.
    priority_C[is_target_C] = 2
    count = max(round(fraction * classes), int(is_target_C.sum()))
    rows_K = priority_C.topk(count).indices.sort().values
    place_C = torch.full((classes,), -1, dtype=torch.int64, device=targets.device)
    place_C[rows_K] = torch.arange(count, device=targets.device)
    return Classes(rows_K, place_C)


def _check_inputs(x: Tensor, y: Tensor, targets: Tensor) -> None:
    for name, t in (("x", x), ("y", y)):
        check_tensor(name, t, "embeddings")
        if t.ndim != 2 or t.shape[1] == 0 or t.dtype not in DTYPES:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)} and is {t.dtype}: must be (rows, width) with a width of at least 1, in one of "
                f"{', '.join(map(str, DTYPES))}"
            )
    if x.shape[1] != y.shape[1] or product_dtype(x) != product_dtype(y):
        raise ValueError(
            f"x has width {x.shape[1]} and is {x.dtype}, y {y.shape[1]} and {y.dtype}: width and dtype must be equal; project or "
            "convert one"
        )
    check_tensor("targets", targets, "integers, one for each row of x")
    if targets.is_floating_point() or targets.dtype == torch.bool or targets.shape != x.shape[:1]:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)} and is {targets.dtype}: must be ({len(x)},) integers, the class of each row "
            "of x"
        )
    if not x.device == y.device == targets.device:
        raise ValueError(f"x is on {x.device}, y on {y.device}, targets on {targets.device}: must be on one device; use .to()")


def _check_found(unknown: Tensor, wide: Tensor, batch: ClassBatch) -> None:
    """Raise, on all ranks alike, for targets that no rank has and for cosines beyond 1."""
    if unknown.device.type != "cpu":
        # The host does not wait: the device stops at the next synchronisation.
        torch._assert_async((unknown + wide) == 0)
        return
    classes = sum(each.documents for each in batch.call.summaries)
    if unknown.item():
        raise ValueError(f"targets: {int(unknown)} rows have a class outside of [0, {classes}), the classes of all ranks' y")
    if wide.item():
        raise ValueError(
            f"angular_margin={batch.rules.angular_margin}: {int(wide)} rows have a similarity beyond 1, which is no cosine; "
            "normalise x and y"
        )
