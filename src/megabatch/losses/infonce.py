"""InfoNCE with several directions, hard negatives, a guide and a queue, without the similarity matrix. Formula:
reference.infonce_loss.

This file holds the arguments, their checks and the autograd Function; directions.py computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor

from ..ring import Group
from .autograd import LossModule, LossResult, first_derivative_only, outside_autocast, outside_graphs, save, saved
from .batch import Diagnostics, Execution, ExecutionOptions, Inputs, LossBatch, prepare
from .checks import DTYPES, PLAIN_TENSORS, check_duplicates, check_number, check_tensor, outside_inference, product_dtype
from .clip import clip_loss
from .directions import (
    CROSS,
    DIRECTIONS,
    Direction,
    GuideRows,
    More,
    Terms,
    Versions,
    direction_products,
    directions_forward,
    finish_directions,
)
from .one_piece import is_alone, loss_in_one_piece, one_piece_of, softmax_in_one_piece

if TYPE_CHECKING:
    # torch depends on typing_extensions; typing has Unpack from Python 3.11 on.
    from typing_extensions import Unpack

PARTITIONS = ("joint", "separate", "by_anchor")
HARDNESS_ON = ("all", "hard", "in_batch")
MARGIN_KINDS = ("absolute", "relative")


@dataclass(frozen=True, eq=False)
class Guide:
    """A guide model's embeddings, which decide which negatives count (GISTEmbed, arXiv 2402.16829).

    A negative is left out if its guide similarity exceeds that of the sample's positive, g, minus a margin: `margin` if margin_kind
    is "absolute", `margin * |g|` if it is "relative".

    x, y: (M, G) and (N, G) embeddings of the rows of x and y by the guide, normalised for cosine similarities, without gradient.

    >>> import torch, megabatch
    >>> x, y, guide_x, guide_y = torch.nn.functional.normalize(torch.randn(4, 256, 64), dim=-1).unbind()
    >>> loss = megabatch.infonce_loss(x, y, 20.0, guide=megabatch.Guide(guide_x, guide_y, margin=0.1))
    """

    x: Tensor
    y: Tensor
    margin: float = 0.0
    margin_kind: str = "absolute"


class InfoNCEOptions(ExecutionOptions, total=False):
    """The options of `infonce_loss` that `InfoNCELoss` stores, for type checkers. `infonce_loss` documents them."""

    directions: Sequence[str]
    partition: str
    duplicates: str
    label_smoothing: float
    drop_above: float | Mapping[str, float] | None
    drop_ratio: float | Mapping[str, float] | None
    hardness: float
    hardness_on: str
    in_batch: bool


class InfoNCEInputs(TypedDict, total=False):
    """The optional tensors of one call of `infonce_loss`."""

    ids: Tensor | None
    weights: Tensor | None
    negatives_of: Tensor | None
    guide: Guide | None
    queue: Tensor | None


class _Arguments(InfoNCEOptions, InfoNCEInputs, total=False):
    pass


@overload
def infonce_loss(
    x: Tensor, y: Tensor, scale: Tensor | float, *, diagnostics: Literal[False] = False, **arguments: Unpack[_Arguments]
) -> Tensor: ...


@overload
def infonce_loss(
    x: Tensor, y: Tensor, scale: Tensor | float, *, diagnostics: Literal[True], **arguments: Unpack[_Arguments]
) -> tuple[Tensor, Diagnostics]: ...


@overload
def infonce_loss(
    x: Tensor, y: Tensor, scale: Tensor | float, *, diagnostics: bool, **arguments: Unpack[_Arguments]
) -> Tensor | tuple[Tensor, Diagnostics]: ...


@outside_graphs
def infonce_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    *,
    directions: Sequence[str] = ("x_to_y",),
    partition: str = "joint",
    ids: Tensor | None = None,
    duplicates: str = "mask",
    label_smoothing: float = 0.0,
    drop_above: float | Mapping[str, float] | None = None,
    drop_ratio: float | Mapping[str, float] | None = None,
    hardness: float = 0.0,
    hardness_on: str = "all",
    guide: Guide | None = None,
    in_batch: bool = True,
    negatives_of: Tensor | None = None,
    queue: Tensor | None = None,
    weights: Tensor | None = None,
    group: Group = ...,
    equal_shards: bool = False,
    backend: str | None = None,
    workspace: int | None = None,
    precision: str = "ieee",
    diagnostics: bool = False,
) -> Tensor | tuple[Tensor, Diagnostics]:
    """Return InfoNCE over one or more directions, of all rows of all ranks, without storing a similarity matrix.

    Sample i is the pair of row i of x and row i of y. Its loss is the cross-entropy of a softmax over its candidates, in which the
    pair itself is the target. Memory is O(rows * width) per rank. The formula, with all matrices, is
    `megabatch.reference.infonce_loss`.

    Inputs:
        x: (M, D) embeddings of this rank, in float64, float32, bfloat16 or float16, normalised or not.
        y: (N, D) embeddings of this rank with the same dtype, N >= M. The rows beyond the first M are hard negatives.
        scale: factor of the similarities, 1 / temperature: a float, or a tensor with one element, which may require a gradient.
            It must be equal on all ranks.
        negatives_of: (N - M,) integers: the row of x that each hard negative belongs to. Any number of them may belong to a row.
            Needed where a sample's own hard negatives are treated differently from those of others.
        ids: (N,) integers, one for each row of y; row i of x has the id of row i of y. Pairs with equal ids are no negatives.
        guide: a guide model's embeddings, which leave out false negatives in every direction.
        queue: (Q, D) embeddings of earlier steps, without a gradient: further negatives of every row of x of every rank (MoCo,
            cross-batch memory). Each rank passes its own part of the queue, of any length.
        weights: (M,) weights of the samples in the mean, none negative and not all zero. Default: equal weights.

    Which pairs count:
        directions: who is compared with whom. "x_to_y": x_i with every row of y. "y_to_x": y_i with every row of x. "x_to_x": x_i
            with every other row of x. "y_to_y": y_i with every other row of y, except the hard negatives of its own sample.
        partition: "joint": one softmax over the candidates of all directions (GTE, Qwen3-Embedding); the positive is in its
            denominator once for each of "x_to_y" and "y_to_x". "separate": one softmax for each direction, averaged; for "x_to_y"
            and "y_to_x" only, since the others do not contain the positive. "by_anchor": one softmax for the directions from x
            and one for those from y, averaged (SimCLR); each has to contain the positive.
        duplicates: what pairs with equal ids are, apart from the positive itself. "mask": left out. "positive": further positives,
            which share the target equally; for "x_to_y" and "y_to_x" only.
        label_smoothing: in [0, 1], as in torch.nn.functional.cross_entropy, over the candidates that count.
        drop_above: false-negative margin. Negatives whose similarity exceeds that of the positive by more than this are left out.
            In units of x·y, before the scale. A number for all directions, or a dict by direction. None: no margin.
        drop_ratio: relative margin: negatives whose similarity exceeds drop_ratio times that of the positive are left out, for
            example 0.95 (NV-Retriever). A number or a dict by direction. Both margins may be given.
        hardness: adds hardness * z to the logit of a negative with similarity z in "x_to_y"; z is a constant in this term, so it
            weights hard negatives more (LLaVE: 9, EmbeddingGemma: 5).
        hardness_on: which negatives. "all"; "hard": each sample's own hard negatives; "in_batch": all others.
        in_batch: False: a sample's negatives are its own hard negatives and the queue; rows of other samples are not compared.

    How it is computed: group, equal_shards, backend, workspace, precision and diagnostics are those of `clip_loss`. A guide, and
    ids together with hard negatives that are treated apart ("y_to_y", hardness_on), need the eager tiles: with backend=None they
    are used on CUDA too. Diagnostics rank x against y; the queue is not ranked.

    Returns the loss as a float32 scalar (float64 for float64 embeddings), the same on every rank. DDP's average of gradients is
    exactly the gradient of this loss.

    >>> import torch, megabatch
    >>> x, y = torch.nn.functional.normalize(torch.randn(2, 1024, 64), dim=-1).unbind()
    >>> loss = megabatch.infonce_loss(x, y, 50.0, directions=("x_to_y", "y_to_x", "x_to_x", "y_to_y"))
    """
    rules = InfoNCERules(
        _tuple(directions),
        partition,
        duplicates,
        label_smoothing,
        drop_above,
        drop_ratio,
        hardness,
        hardness_on,
        in_batch,
        diagnostics,
    )
    execution = Execution(group, equal_shards, backend, workspace, precision)
    further = FurtherInputs(negatives_of, guide, queue)
    symmetric = _symmetry_of_clip_loss(rules, x, y)
    # Of several ranks some may have further inputs, and all have to agree on one loss.
    if symmetric is not None and is_alone(group) and all(each is None for each in further):
        return clip_loss(x, y, scale, symmetric=symmetric, ids=ids, weights=weights, **vars(execution))
    return directions_loss(Inputs(x, y, {"scale": scale}, ids, weights, queue), rules, execution, further)


class InfoNCELoss(LossModule[LossResult]):
    """`infonce_loss` as a Module, which stores its options.

    >>> import torch, megabatch
    >>> x, y = torch.nn.functional.normalize(torch.randn(2, 1024, 64), dim=-1).unbind()
    >>> criterion = megabatch.InfoNCELoss(directions=("x_to_y", "y_to_x"), partition="separate")
    >>> loss = criterion(x, y, 20.0, ids=torch.arange(1024))
    """

    loss = staticmethod(infonce_loss)

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: InfoNCELoss[Tensor], *, diagnostics: Literal[False] = False, **options: Unpack[InfoNCEOptions]
        ) -> None: ...

        @overload
        def __init__(
            self: InfoNCELoss[tuple[Tensor, Diagnostics]], *, diagnostics: Literal[True], **options: Unpack[InfoNCEOptions]
        ) -> None: ...

        @overload
        def __init__(self: InfoNCELoss[Any], *, diagnostics: bool, **options: Unpack[InfoNCEOptions]) -> None: ...

        def __init__(self, **options: Any) -> None: ...


@dataclass(frozen=True)
class InfoNCERules:
    """The options of a loss over directions that say which pairs count, and how."""

    directions: tuple[str, ...]
    partition: str = "joint"
    duplicates: str = "mask"
    label_smoothing: float = 0.0
    drop_above: float | Mapping[str, float] | None = None
    drop_ratio: float | Mapping[str, float] | None = None
    hardness: float = 0.0
    hardness_on: str = "all"
    in_batch: bool = True
    diagnostics: bool = False

    loss_name: ClassVar[str] = "infonce_loss"
    same_rows: ClassVar[bool] = False

    def check(self) -> None:
        """Raise a ValueError for a wrong value, or for options that contradict each other."""
        self._check_directions()
        check_duplicates(self.duplicates)
        check_number("label_smoothing", self.label_smoothing, low=0, high=1)
        self._check_margins("drop_above", self.drop_above)
        self._check_margins("drop_ratio", self.drop_ratio)
        check_number("hardness", self.hardness)
        if self.hardness_on not in HARDNESS_ON:
            raise ValueError(f"hardness_on={self.hardness_on!r}: must be one of {', '.join(map(repr, HARDNESS_ON))}")
        if self.hardness and "x_to_y" not in self.directions:
            raise ValueError(
                f"hardness={self.hardness} without 'x_to_y' in directions={self.directions}, whose negatives it weights: add it"
            )
        if self.hardness and self.label_smoothing:
            raise ValueError(
                f"hardness={self.hardness} and label_smoothing={self.label_smoothing}: smoothing would raise the logits of the "
                "negatives that hardness weighting pushes down; use one of them"
            )
        if self.duplicates == "positive":
            self._check_further_positives()
        if not isinstance(self.in_batch, bool):
            raise ValueError(f"in_batch={self.in_batch!r}: must be True or False")
        if not self.in_batch and self.directions != ("x_to_y",):
            raise ValueError(
                f"in_batch=False and directions={self.directions}: own negatives are candidates of x alone; pass "
                "directions=('x_to_y',)"
            )
        if self.diagnostics and not set(self.directions) & set(CROSS):
            raise ValueError(
                f"diagnostics=True and directions={self.directions}: they rank x against y; add 'x_to_y' or 'y_to_x', or leave "
                "them out"
            )

    def _check_directions(self) -> None:
        known = ", ".join(map(repr, DIRECTIONS))
        if not self.directions or len(set(self.directions)) != len(self.directions) or set(self.directions) - set(DIRECTIONS):
            raise ValueError(f"directions={self.directions!r}: must be one or more of {known}, each once")
        if self.partition not in PARTITIONS:
            raise ValueError(f"partition={self.partition!r}: must be one of {', '.join(map(repr, PARTITIONS))}")
        without = [directions for directions in self.softmaxes if not set(directions) & set(CROSS)]
        if self.partition != "joint" and without:
            raise ValueError(
                f"partition={self.partition!r} with {without[0][0]!r} in directions={self.directions}, a softmax that does not "
                "contain the positive: use partition='joint', or other directions"
            )

    def _check_margins(self, name: str, margins: Any) -> None:
        if isinstance(margins, Mapping):
            unknown = sorted(set(map(str, margins)) - set(self.directions))
            if unknown:
                raise ValueError(f"{name} has a margin for {unknown[0]!r}: must be one of the directions {self.directions}")
            for direction, margin in margins.items():
                check_number(f"{name}[{direction!r}]", margin)
        elif margins is not None:
            check_number(name, margins)

    def _check_further_positives(self) -> None:
        same = sorted(set(self.directions) - set(CROSS))
        if same:
            raise ValueError(
                f"duplicates='positive' with {same[0]!r} in directions={self.directions}: the positive of a row is on the other "
                "side, so a duplicate on its own side is none; pass duplicates='mask'"
            )
        if self.hardness:
            raise ValueError(
                f"duplicates='positive' and hardness={self.hardness}: hardness weights negatives, and a duplicate would be both; "
                "pass duplicates='mask'"
            )
        if not self.in_batch:
            raise ValueError(
                "duplicates='positive' and in_batch=False: there are no other samples whose documents could be positives; pass "
                "duplicates='mask'"
            )

    @property
    def softmaxes(self) -> tuple[tuple[Direction, ...], ...]:
        """The directions of each softmax."""
        ordered = [direction for direction in DIRECTIONS if direction in self.directions]
        if self.partition == "separate":
            return tuple((direction,) for direction in ordered)
        if self.partition == "joint":
            return (tuple(ordered),)
        sides = [tuple(direction for direction in ordered if direction.startswith(side)) for side in ("x", "y")]
        return tuple(side for side in sides if side)

    @property
    def terms(self) -> Terms:
        """What the loss consists of."""
        return Terms(
            softmaxes=self.softmaxes,
            multi_positive=self.duplicates == "positive",
            label_smoothing=self.label_smoothing,
            drop_above=_by_direction(self.drop_above, self.directions),
            drop_ratio=_by_direction(self.drop_ratio, self.directions),
            hardness=self.hardness,
            hardness_on=self.hardness_on,
            in_batch=self.in_batch,
            diagnostics=self.diagnostics,
        )


# The options with which this is `clip_loss`, which takes less time on the host.
ONE_DIRECTION = InfoNCERules(("x_to_y",))
BOTH_DIRECTIONS = InfoNCERules(("x_to_y", "y_to_x"), "separate")


def _symmetry_of_clip_loss(rules: InfoNCERules, x: Tensor, y: Tensor) -> bool | None:
    """Return the option `symmetric` with which `clip_loss` is this loss, or None if it is another one."""
    if _is_equal(rules, ONE_DIRECTION):
        return False
    # In both directions, hard negatives are candidates of x only. Lists and nested tensors, which have no shape, are refused later.
    if _is_equal(rules, BOTH_DIRECTIONS) and all(type(t) in PLAIN_TENSORS and not t.is_nested for t in (x, y)):
        return True if x.shape == y.shape else None
    return None


def _is_equal(rules: InfoNCERules, others: InfoNCERules) -> bool:
    """Return whether all options are equal and of one type: a value of another type is left to `check`."""
    return all(type(a) is type(b) and a == b for a, b in zip(vars(rules).values(), vars(others).values(), strict=True))


class FurtherInputs(NamedTuple):
    """The tensors of a call that `clip_loss` does not have, as the caller passed them."""

    negatives_of: Tensor | None = None
    guide: Guide | None = None
    queue: Tensor | None = None


def directions_loss(
    inputs: Inputs, rules: InfoNCERules, execution: Execution, further: FurtherInputs
) -> Tensor | tuple[Tensor, Diagnostics]:
    """Return the loss of one call, checked and connected to autograd."""
    x, y, scale = inputs.x, inputs.y, inputs.scalars["scale"]
    batch = prepare(
        inputs,
        rules,
        execution,
        check_more=lambda: _check_further(inputs, rules, further),
        eager_only=_eager_only(inputs, rules, further),
    )
    if not rules.in_batch and further.queue is None and batch.lengths == batch.row_lengths:
        raise ValueError(
            "in_batch=False, y has no hard negatives and queue is None: nothing is compared, and the loss would be 0; pass the "
            "negatives as further rows of y, or a queue"
        )
    scale = batch.scalar(scale, x)
    terms = rules.terms
    if terms.all_pairs_alike and further.guide is None and further.queue is None:
        # With one direction hard negatives are candidates like all others; back from y they would not be.
        symmetric = len(terms.softmaxes) == 2
        call = one_piece_of(batch, x, y, scale) if len(y) == len(x) or not symmetric else None
        if call is not None:
            return loss_in_one_piece(x, y, call, softmax_in_one_piece(call, symmetric))
    more, versions = _read(batch, further)
    if batch.needs_grad is None:
        loss, diagnostics, _ = directions_forward(batch.read(x), batch.read(y), scale, batch, terms, more)
    else:
        anchor = batch.join_backward(x, y, scale)
        loss, diagnostics = _DirectionsLoss.apply(anchor, y, scale, batch, terms, more, versions)
    return loss if diagnostics is None else (loss, diagnostics)


class _DirectionsLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, scale: Tensor, batch: LossBatch, terms: Terms, more: More, versions: Versions
    ) -> tuple[Tensor, Diagnostics | None]:
        x_MD, y_ND = batch.read(x), batch.read(y)
        loss, diagnostics, state = directions_forward(x_MD, y_ND, scale, batch, terms, more)
        ctx.products = None
        if batch.ring.size == 1 and state.saved_exp is not None:
            # As in clip.py: the memory of the exponentials is free at once.
            ctx.products = direction_products(x_MD, y_ND, scale, batch, terms, more, state)
        ctx.batch, ctx.terms, ctx.more, ctx.saved, ctx.versions_of_others = batch, terms, more, state, versions
        save(ctx, x=x, y=y, scale=scale)
        return loss, diagnostics

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, y, scale = saved(ctx)
        batch: LossBatch = ctx.batch
        ctx.versions_of_others.check()
        # The first backward overwrites them; a further one through a retained graph computes them again.
        products, ctx.products = ctx.products, None
        if products is None:
            products = direction_products(batch.read(x), batch.read(y), scale, batch, ctx.terms, ctx.more, ctx.saved)
        dx, dy, dscale = finish_directions(g, x, y, scale, batch, products, ctx.saved)
        need_x, need_y, need_scale, *_ = ctx.needs_input_grad
        return dx if need_x else None, dy if need_y else None, dscale if need_scale else None, None, None, None, None


def _read(batch: LossBatch, further: FurtherInputs) -> tuple[More, Versions]:
    """Return the further inputs as the tiles read them, and their versions."""
    guide, negatives_of, queue = further.guide, *(outside_inference(t) for t in (further.negatives_of, further.queue))
    guide_x, guide_y = (None, None) if guide is None else (outside_inference(guide.x), outside_inference(guide.y))
    rows = None
    if guide is not None and guide_x is not None and guide_y is not None:
        x_MG, y_NG = (t.detach().resolve_neg().contiguous() for t in (guide_x, guide_y))
        rows = _guide_rows(x_MG, y_NG, guide, batch)
    versions = {"ids": batch.ids_N, "negatives_of": negatives_of, "queue": queue, "guide.x": guide_x, "guide.y": guide_y}
    more = More(
        None if negatives_of is None else negatives_of.to(torch.int64).contiguous(),
        rows,
        None if queue is None else batch.read(queue),
    )
    return more, Versions(**versions)


@outside_autocast
def _guide_rows(x_MG: Tensor, y_NG: Tensor, guide: Guide, batch: LossBatch) -> GuideRows:
    """Return the guide's embeddings and the similarity that negatives may have, computed as their similarities will be."""
    positive_M = batch.tiles.positives(x_MG, y_NG, batch.compute)
    margin = positive_M.abs() * guide.margin if guide.margin_kind == "relative" else guide.margin
    return GuideRows(x_MG, y_NG, positive_M - margin)


def _eager_only(inputs: Inputs, rules: InfoNCERules, further: FurtherInputs) -> str | None:
    """Return why the fused tiles cannot compute this call, or None."""
    if further.guide is not None:
        return "a guide's similarities are computed by the eager tiles only"
    apart = "y_to_y" in rules.directions or rules.hardness_on != "all"
    if inputs.ids is not None and further.negatives_of is not None and apart and rules.in_batch:
        return "ids together with hard negatives that a sample treats apart ('y_to_y', hardness_on) are left to the eager tiles"
    return None


def _check_further(inputs: Inputs, rules: InfoNCERules, further: FurtherInputs) -> dict[str, object]:
    """Check the inputs that `clip_loss` does not have; return what must be equal on every rank."""
    x, y = inputs.x, inputs.y
    owner, guide, queue = further
    count = len(y) - len(x)
    if owner is not None:
        check_tensor("negatives_of", owner, "integers, one for each hard negative")
        if owner.is_floating_point() or owner.is_complex() or owner.dtype == torch.bool:
            raise ValueError(f"negatives_of is {owner.dtype}: must be a tensor of integers, for example of torch.int64")
        if owner.shape != (count,):
            raise ValueError(
                f"negatives_of has shape {tuple(owner.shape)}: must be ({count},), one for each row of y beyond the first {len(x)}"
            )
        if owner.device != x.device:
            raise ValueError(f"negatives_of is on {owner.device} and x on {x.device}: must be on one device; move it with .to()")
        # Elsewhere, reading them would synchronise the device, which checks indices itself.
        if owner.device.type == "cpu" and len(owner):
            # Not all operations exist for unsigned integers.
            least, most = (int(t) for t in owner.to(torch.int64).aminmax())
            if least < 0 or most >= len(x):
                raise ValueError(f"negatives_of holds {least} to {most}: must be rows of x, 0 to {len(x) - 1}")
    elif count and (not rules.in_batch or "y_to_y" in rules.directions or (rules.hardness and rules.hardness_on != "all")):
        reason = "in_batch=False" if not rules.in_batch else "'y_to_y'" if "y_to_y" in rules.directions else "hardness_on"
        raise ValueError(
            f"y has {count} hard negatives and negatives_of is None: {reason} treats a sample's own negatives differently; pass "
            "the row of x that each belongs to, for example torch.arange(len(x)).repeat(k) for k lists of negatives in sequence"
        )
    if guide is not None:
        _check_guide(guide, x, y)
    if queue is not None:
        _check_queue(queue, inputs, rules, guide)
    return {
        "negatives_of": "None" if owner is None else "given",
        "guide": "None"
        if guide is None
        else f"margin {guide.margin} {guide.margin_kind}, {guide.x.dtype}, width {guide.x.shape[1]}",
        "queue": "None" if queue is None else "given",
    }


def _check_guide(guide: Guide, x: Tensor, y: Tensor) -> None:
    if not isinstance(guide, Guide):
        raise ValueError(f"guide is a {type(guide).__name__}: must be a megabatch.Guide, for example Guide(guide_x, guide_y)")
    for name, t, like in (("guide.x", guide.x, x), ("guide.y", guide.y, y)):
        check_tensor(name, t, "embeddings of a guide model")
        if t.ndim != 2 or len(t) != len(like) or t.shape[1] == 0:
            raise ValueError(f"{name} has shape {tuple(t.shape)}: must be ({len(like)}, width), one row for each of {name[-1]}")
        if t.dtype not in DTYPES:
            raise ValueError(f"{name} is {t.dtype}: must be one of {', '.join(map(str, DTYPES))}; convert it with .float()")
        if t.device != x.device:
            raise ValueError(f"{name} is on {t.device} and x on {x.device}: must be on one device; move it with .to()")
        if t.requires_grad:
            raise ValueError(f"{name} requires a gradient: the guide gets none; pass {name}.detach()")
    if guide.x.shape[1] != guide.y.shape[1] or guide.x.dtype != guide.y.dtype:
        raise ValueError(
            f"guide.x is {guide.x.dtype} of width {guide.x.shape[1]} and guide.y {guide.y.dtype} of width {guide.y.shape[1]}: must "
            "be equal; use one guide model for both"
        )
    check_number("guide.margin", guide.margin)
    if guide.margin_kind not in MARGIN_KINDS:
        raise ValueError(f"guide.margin_kind={guide.margin_kind!r}: must be one of {', '.join(map(repr, MARGIN_KINDS))}")


def _check_queue(queue: Tensor, inputs: Inputs, rules: InfoNCERules, guide: Guide | None) -> None:
    x = inputs.x
    check_tensor("queue", queue, "embeddings of earlier steps")
    if queue.ndim != 2 or queue.shape[1] != x.shape[1]:
        raise ValueError(f"queue has shape {tuple(queue.shape)}: must be (rows, {x.shape[1]}), the width of x")
    if queue.dtype not in DTYPES or (queue.dtype != x.dtype and product_dtype(queue) != product_dtype(x)):
        raise ValueError(f"queue is {queue.dtype} and x {x.dtype}: must be equal; convert it with .to()")
    if queue.device != x.device:
        raise ValueError(f"queue is on {queue.device} and x on {x.device}: must be on one device; move it with .to()")
    if queue.requires_grad:
        raise ValueError("queue requires a gradient: earlier embeddings get none; pass queue.detach()")
    if "x_to_y" not in rules.directions:
        raise ValueError(f"queue with directions={rules.directions}: its rows are negatives of x; add 'x_to_y', or leave it out")
    if guide is not None:
        raise ValueError("queue and guide: the guide has no embeddings of the queue's rows; use one of them")


def _by_direction(margins: float | Mapping[str, float] | None, directions: Sequence[str]) -> Mapping[str, float] | None:
    if margins is None or isinstance(margins, Mapping):
        return margins
    return dict.fromkeys(directions, margins)


def _tuple(directions: Any) -> tuple[str, ...]:
    """Return the directions as a tuple; a single name is one direction."""
    if isinstance(directions, str):
        return (directions,)
    return tuple(directions) if isinstance(directions, Sequence) else (directions,)
