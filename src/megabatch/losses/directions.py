"""Softmax losses over several directions, without a similarity matrix: which products a batch needs, their sums and gradients.

Sample i of the batch is a pair (x_i, y_i). A direction says who is compared with whom: in "x_to_y" x_i is the anchor and every y_j
a candidate, in "x_to_x" every other x_j. Each softmax of the loss goes over the candidates of one or more directions. The positive
x_i·y_i is never part of a tile's sums (tiles/contract.py), so the sums of all directions of a softmax are merged, and the positive
is added at the end.

A visit of a rank's block compares this rank's rows with it (`Contrast`). Products of x with x and of y with y are symmetric: a pair
of ranks computes theirs once, and within a rank only the part on and above the diagonal is computed (symmetric.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..tiles.contract import GuidePairs, NeedsGrad, Pairs, Ranking, Softmax, Stats, merge
from .autograd import modified, outside_autocast
from .batch import Diagnostics, LossBatch, diagnose
from .own_negatives import OwnNegatives
from .symmetric import symmetric_grads, symmetric_stats

Direction = Literal["x_to_y", "y_to_x", "x_to_x", "y_to_y"]
DIRECTIONS: tuple[Direction, ...] = ("x_to_y", "y_to_x", "x_to_x", "y_to_y")
# The directions that compare x with y, and so contain the positive.
CROSS = ("x_to_y", "y_to_x")
# Rows whose gradients are multiplied with their embeddings at once, for the gradient of the scale.
SLOPE_ROWS = 8192


@dataclass(frozen=True)
class Terms:
    """What the loss consists of; everything here must be equal on every rank.

    softmaxes: the directions of each softmax, whose losses are averaged.
    decoupled: whether the positive is left out of the denominator (DCL).
    drop_above, drop_ratio: false-negative margins by direction.
    hardness: factor of the stop-gradient similarity that is added to the logits of negatives in "x_to_y"; hardness_on: of which.
    in_batch: whether rows of other samples are negatives.
    """

    softmaxes: tuple[tuple[Direction, ...], ...]
    decoupled: bool = False
    multi_positive: bool = False
    label_smoothing: float = 0.0
    drop_above: Mapping[str, float] | None = None
    drop_ratio: Mapping[str, float] | None = None
    hardness: float = 0.0
    hardness_on: str = "all"
    in_batch: bool = True
    diagnostics: bool = False

    def place(self, direction: Direction) -> int | None:
        """Return the index of the softmax that a direction belongs to, or None."""
        return next((place for place, directions in enumerate(self.softmaxes) if direction in directions), None)

    def copies(self, place: int) -> int:
        """Return how often the positive is in the denominator of a softmax: once for each direction from one side to the other."""
        return 0 if self.decoupled else max(1, sum(direction in CROSS for direction in self.softmaxes[place]))

    @property
    def all_pairs_alike(self) -> bool:
        """Whether this is the softmax of `clip_loss`, in one direction or both, without an option that tells pairs apart."""
        plain = Terms((("x_to_y",),)), Terms((("x_to_y",), ("y_to_x",)))
        # These two say which pairs are special, if there are any.
        return replace(self, multi_positive=False, hardness_on="all") in plain

    @property
    def own_apart(self) -> bool:
        """Whether each sample's own hard negatives have logits of another kind than all other negatives."""
        return not self.in_batch or (self.hardness != 0 and self.hardness_on != "all")


class GuideRows(NamedTuple):
    """A guide model's embeddings of x and of all rows of y, and the guide similarity that negatives of each sample may have."""

    x_MG: Tensor
    y_NG: Tensor
    limit_M: Tensor


class More(NamedTuple):
    """The inputs beside x and y, as the tiles read them. owner_K: the sample that each hard negative belongs to."""

    owner_K: Tensor | None = None
    guide: GuideRows | None = None
    queue_QD: Tensor | None = None


class Samples(NamedTuple):
    """The part of a rank's block with a row for each sample. limits: of each of DIRECTIONS; softmaxes: in backward."""

    x_MD: Tensor | None
    y_MD: Tensor | None
    ids_M: Tensor | None
    positive_M: Tensor | None
    limits: tuple[Tensor | None, ...]
    guide_x_MG: Tensor | None
    guide_y_MG: Tensor | None
    guide_limit_M: Tensor | None
    softmaxes: tuple[Softmax, ...] | None


class HardNegatives(NamedTuple):
    """The part of a rank's block with a row for each hard negative."""

    y_KD: Tensor
    ids_K: Tensor | None
    guide_y_KG: Tensor | None


# The three parts of a block: samples, hard negatives, and rows of the queue. Parts that no rank needs are None.
Block = tuple[Samples, HardNegatives | None, Tensor | None]
# Rows of a product: whose they are ("own" rank's or the visited "block"'s), and which ("x", "y", "hard" or "queue").
Side = Literal["x", "y", "hard", "queue"]
RowsOf = tuple[Literal["own", "block"], Side]


class Contrast(NamedTuple):
    """One product of a visit. The rows of `a` are anchors; those of `b` are too if column_place is given.

    place, column_place: the softmax of each. symmetric: a and b are the same rows.
    """

    a: Tensor
    b: Tensor
    a_is: RowsOf
    b_is: RowsOf
    place: int
    column_place: int | None
    scale: Tensor
    pairs: Pairs
    symmetric: bool = False


@dataclass
class DirectionsSaved:
    """What backward needs from forward.

    softmaxes: of this rank's samples; dpos_M: the gradient in the logits of the positives; share: the factor of the mean.
    positive_M, limits: the similarities of the positives, and those that negatives of each sample may have in each direction.
    saved_exp: exponentials that the tiles have saved of this rank's own block.
    """

    softmaxes: tuple[Softmax, ...]
    dpos_M: Tensor
    share: Tensor | float
    positive_M: Tensor
    limits: tuple[Tensor | None, ...]
    saved_exp: Any

    def pop(self) -> Any:
        """Return the saved exponentials in the first backward; later ones compute them again."""
        saved_exp, self.saved_exp = self.saved_exp, None
        return saved_exp


class DirectionProducts(NamedTuple):
    """Gradients of x, of the positives and of the hard negatives without the positives' part; the gradient in the scale."""

    gx_MD: Tensor | None
    gy_MD: Tensor | None
    gy_KD: Tensor | None
    slope: Tensor


class Visits:
    """The products of every visit, for forward and backward alike."""

    def __init__(self, scale: Tensor, batch: LossBatch, terms: Terms, more: More, own: Samples, hard: HardNegatives) -> None:
        self.scale, self.batch, self.terms, self.more = scale, batch, terms, more
        self.own, self.hard = own, hard
        self.any_hard = sum(batch.lengths) > sum(batch.row_lengths)
        hardened = terms.hardness != 0 and terms.hardness_on != "hard"
        self.row_scale = scale + terms.hardness if hardened else scale
        self.lengths = [
            (rows, documents - rows, queued)
            for rows, documents, queued in zip(batch.row_lengths, batch.lengths, batch.queue_lengths, strict=True)
        ]

    def block(self) -> Block:
        """Return this rank's block, with what other ranks need of it."""
        place, terms = self.terms.place, self.terms
        meets_y = terms.in_batch and any(place(d) is not None for d in ("x_to_y", "y_to_x", "y_to_y"))
        samples = self.own._replace(
            x_MD=None if place("x_to_x") is None else self.own.x_MD,
            y_MD=self.own.y_MD if meets_y else None,
            guide_x_MG=None if place("x_to_x") is None else self.own.guide_x_MG,
            positive_M=self.own.positive_M if terms.diagnostics else None,
        )
        hard = self.hard if self.any_hard and terms.in_batch else None
        return samples, hard, self.more.queue_QD

    def contrasts(self, block: Block, owner: int) -> Iterator[Contrast]:
        """Yield the products of this rank's rows with a block."""
        samples, hard, queue_QD = block
        own, place, is_local = self.own, self.terms.place, owner == self.batch.ring.rank
        forward, back, same_x, same_y = (place(direction) for direction in DIRECTIONS)
        assert own.x_MD is not None and own.y_MD is not None
        if samples.y_MD is not None:
            shares_scale = self.row_scale is self.scale
            if forward is not None:
                both = back if shares_scale else None
                pairs = self._pairs(own, "x", samples, "y", is_local, 0, None if both is None else 1)
                pairs = self._ranked(pairs, own, samples)
                yield Contrast(own.x_MD, samples.y_MD, ("own", "x"), ("block", "y"), forward, both, self.row_scale, pairs)
            if back is not None and (forward is None or not shares_scale):
                pairs = self._pairs(samples, "y", own, "x", is_local, 1, None)
                pairs = self._ranked(pairs, samples, own)
                yield Contrast(samples.y_MD, own.x_MD, ("block", "y"), ("own", "x"), back, None, self.scale, pairs)
        if hard is not None:
            if forward is not None:
                pairs = self._ranked(self._hard_pairs("x", hard, is_local, 0), own, None)
                yield Contrast(own.x_MD, hard.y_KD, ("own", "x"), ("block", "hard"), forward, None, self.row_scale, pairs)
            if same_y is not None:
                pairs = self._hard_pairs("y", hard, is_local, 3)
                yield Contrast(own.y_MD, hard.y_KD, ("own", "y"), ("block", "hard"), same_y, None, self.scale, pairs)
        if queue_QD is not None and forward is not None:
            pairs = Pairs(limit_M=own.limits[0], smoothed=self.terms.label_smoothing > 0)
            yield Contrast(own.x_MD, queue_QD, ("own", "x"), ("block", "queue"), forward, None, self.row_scale, pairs)
        if same_x is not None:
            yield from self._same_side(samples, owner, "x", same_x, 2)
        if same_y is not None:
            yield from self._same_side(samples, owner, "y", same_y, 3)

    def _same_side(self, samples: Samples, owner: int, side: Side, place: int, direction: int) -> Iterator[Contrast]:
        """Yield the product of x with x or of y with y: with half of the other ranks, which get the sums of their rows back."""
        hop, size = (self.batch.ring.rank - owner) % self.batch.ring.size, self.batch.ring.size
        if 2 * hop > size:
            return
        # At the opposite rank of a ring of even size, each of both ranks computes the sums of its own rows.
        mirrored = hop == 0 or 2 * hop == size
        pairs = self._pairs(self.own, side, samples, side, hop == 0, direction, None if 2 * hop == size else direction)
        a, b = (self.own.x_MD, samples.x_MD) if side == "x" else (self.own.y_MD, samples.y_MD)
        assert a is not None and b is not None
        column_place = None if mirrored else place
        yield Contrast(a, b, ("own", side), ("block", side), place, column_place, self.scale, pairs, hop == 0)

    def _pairs(
        self, a: Samples, a_side: str, b: Samples, b_side: str, is_local: bool, direction: int, column_direction: int | None
    ) -> Pairs:
        guide = None
        if a.guide_limit_M is not None:
            x_MG = a.guide_x_MG if a_side == "x" else a.guide_y_MG
            y_NG = b.guide_x_MG if b_side == "x" else b.guide_y_MG
            assert x_MG is not None and y_NG is not None
            guide = GuidePairs(x_MG, y_NG, a.guide_limit_M, None if column_direction is None else b.guide_limit_M)
        return Pairs(
            is_local=is_local,
            ids_M=a.ids_M,
            ids_N=b.ids_M,
            multi_positive=self.terms.multi_positive,
            smoothed=self.terms.label_smoothing > 0,
            limit_M=a.limits[direction],
            limit_N=None if column_direction is None else b.limits[column_direction],
            guide=guide,
        )

    def _hard_pairs(self, side: str, hard: HardNegatives, is_local: bool, direction: int) -> Pairs:
        """Return which pairs of this rank's samples and a block's hard negatives count.

        A document is not compared with the hard negatives of its own query, and where those are summed apart, x is not either.
        """
        own = self.own
        skips = is_local and (side == "y" or self.terms.own_apart)
        guide = None
        if own.guide_limit_M is not None:
            x_MG = own.guide_x_MG if side == "x" else own.guide_y_MG
            assert x_MG is not None and hard.guide_y_KG is not None
            guide = GuidePairs(x_MG, hard.guide_y_KG, own.guide_limit_M, None)
        return Pairs(
            ids_M=own.ids_M,
            ids_N=hard.ids_K,
            multi_positive=self.terms.multi_positive,
            smoothed=self.terms.label_smoothing > 0,
            limit_M=own.limits[direction],
            skip_N=self.more.owner_K if skips else None,
            guide=guide,
        )

    def _ranked(self, pairs: Pairs, a: Samples, b: Samples | None) -> Pairs:
        if not self.terms.diagnostics:
            return pairs
        return replace(pairs, ranked=True, positive_M=a.positive_M, positive_N=None if b is None else b.positive_M)


@outside_autocast
def directions_forward(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, batch: LossBatch, terms: Terms, more: More
) -> tuple[Tensor, Diagnostics | None, DirectionsSaved]:
    """Return the loss of the whole batch, this rank's diagnostics, and what backward needs."""
    positive_M = batch.tiles.positives(x_MD, y_ND, batch.compute)
    limits = tuple(_limits(positive_M, terms, direction) for direction in DIRECTIONS)
    visits = _visits(x_MD, y_ND, scale, batch, terms, more, positive_M, limits, None)
    saved_exp: Any = None

    def visit(block: Block, owner: int) -> tuple[Any, Any]:
        nonlocal saved_exp
        sums: dict[str, list[Stats | None]] = {side: [None] * len(terms.softmaxes) for side in ("own", "block")}
        rankings: dict[str, Ranking | None] = {"own": None, "block": None}
        for number, c in enumerate(visits.contrasts(block, owner)):
            if c.symmetric:
                sums["own"][c.place] = merge(sums["own"][c.place], symmetric_stats(batch, c.a, c.scale, c.pairs))
                continue
            # Only of this rank's own block, which both tours visit first: then the workspace is free again for the others.
            save_exp = number == 0 and c.pairs.is_local and batch.needs_grad is not None
            stats = batch.tiles.softmax_stats(
                c.a, c.b, c.scale, c.pairs, columns=c.column_place is not None, compute=batch.compute, save_exp=save_exp
            )
            saved_exp = stats.saved_exp if save_exp else saved_exp
            anchors = c.a_is[0]
            sums[anchors][c.place] = merge(sums[anchors][c.place], stats.rows)
            if c.column_place is not None:
                sums["block"][c.column_place] = merge(sums["block"][c.column_place], stats.columns)
            if c.pairs.ranked:
                rankings[anchors] = merge(rankings[anchors], stats.row_ranking)
                if stats.column_ranking is not None:
                    rankings["block"] = merge(rankings["block"], stats.column_ranking)
        return (tuple(sums["own"]), rankings["own"]), ((tuple(sums["block"]), rankings["block"]), None, None)

    (sums, row_ranking), ((home, column_ranking), _, _) = batch.ring.tour(visits.block(), visits.lengths, visit, merge)
    stats = [merge(a, b) for a, b in zip(sums, home, strict=True)]
    own = _own_negatives(visits)
    forward = terms.place("x_to_y")
    if own is not None and forward is not None:
        stats[forward] = merge(stats[forward], own.stats())
        # Tiles rank them with all others, also where they do not sum them.
        row_ranking = own.ranking(positive_M) if terms.diagnostics and not terms.in_batch else row_ranking
    losses = [
        normalise(sides or _no_stats(positive_M, terms), positive_M, scale, batch.weights_M, terms, terms.copies(place))
        for place, sides in enumerate(stats)
    ]
    (loss,), weight = batch.totals(torch.stack([each.loss_M.sum() for each in losses]).sum())
    share = 1 / (weight * len(losses))
    diagnostics = None
    if terms.diagnostics:
        diagnostics = diagnose(positive_M, row_ranking or _no_ranking(positive_M), column_ranking)
    dpos_M = torch.stack([each.dpos_M for each in losses]).sum(0)
    softmaxes = tuple(each.softmax for each in losses)
    return loss * share, diagnostics, DirectionsSaved(softmaxes, dpos_M, share, positive_M, limits, saved_exp)


@outside_autocast
def direction_products(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, batch: LossBatch, terms: Terms, more: More, saved_state: DirectionsSaved
) -> DirectionProducts:
    """Return the gradients of the negatives."""
    assert batch.needs_grad is not None
    visits = _visits(x_MD, y_ND, scale, batch, terms, more, saved_state.positive_M, saved_state.limits, saved_state.softmaxes)
    needs = {"x": batch.needs_grad.x, "y": batch.needs_grad.y, "hard": batch.needs_grad.y, "queue": False}
    slope = (saved_state.dpos_M * saved_state.positive_M).sum()

    def visit(block: Block, owner: int) -> tuple[Any, Any]:
        nonlocal slope
        gradients: dict[RowsOf, Tensor | None] = {}
        for number, c in enumerate(visits.contrasts(block, owner)):
            need = NeedsGrad(needs[c.a_is[1]], needs[c.b_is[1]])
            if not any(need):
                if not batch.needs_scale_grad:
                    continue
                need = NeedsGrad(True, False)
            softmaxes = {"own": saved_state.softmaxes, "block": block[0].softmaxes}
            of_a, of_b = softmaxes[c.a_is[0]], softmaxes[c.b_is[0]]
            assert of_a is not None and of_b is not None
            if c.symmetric:
                gradient = symmetric_grads(batch, c.a, c.scale, c.pairs, of_a[c.place])
                # Each logit is in this sum twice: as one of row i, and as one of column i.
                slope = slope + slope_of(c.a, gradient, batch) / 2
                gradients[c.a_is] = merge(gradients.get(c.a_is), gradient if needs[c.a_is[1]] else None)
                # Freed before that of the other side is computed.
                del gradient
                continue
            ga, gb = batch.tiles.softmax_grads(
                c.a,
                c.b,
                c.scale,
                c.pairs,
                of_a[c.place],
                None if c.column_place is None else of_b[c.column_place],
                needs_grad=need,
                compute=batch.compute,
                saved_exp=saved_state.pop() if number == 0 and c.pairs.is_local else None,
            )
            slope = slope + (slope_of(c.a, ga, batch) if ga is not None else slope_of(c.b, gb, batch))
            for rows, part in ((c.a_is, ga), (c.b_is, gb)):
                if needs[rows[1]]:
                    gradients[rows] = merge(gradients.get(rows), part)
        of_own = gradients.get(("own", "x")), gradients.get(("own", "y"))
        of_block = gradients.get(("block", "x")), gradients.get(("block", "y"))
        return of_own, (of_block, gradients.get(("block", "hard")), None)

    of_own, (home, gy_KD, _) = batch.ring.tour(visits.block(), visits.lengths, visit, merge)
    gx_MD, gy_MD = (merge(a, b) for a, b in zip(of_own, home, strict=True))
    own, forward = _own_negatives(visits), terms.place("x_to_y")
    if own is not None and forward is not None:
        gx_MD = _zeros(x_MD, batch) if gx_MD is None else gx_MD
        gy_KD = _zeros(y_ND[batch.rows :], batch) if gy_KD is None else gy_KD
        slope = slope + own.add_gradients(saved_state.softmaxes[forward], gx_MD, gy_KD)
    return DirectionProducts(gx_MD, gy_MD, gy_KD, slope)


class Finished(NamedTuple):
    """The gradients as backward returns them."""

    dx: Tensor | None
    dy: Tensor | None
    dscale: Tensor


@outside_autocast
def finish_directions(
    g: Tensor, x: Tensor, y: Tensor, scale: Tensor, batch: LossBatch, products: DirectionProducts, saved_state: DirectionsSaved
) -> Finished:
    """Return the final gradients: add the part of the positives, and multiply by the scale, the mean's share and g."""
    # The ranks hold one loss: its gradient takes the sum of the gradients that come in on all ranks, and the scale's is shared.
    g = batch.ring.sum(g.to(batch.acc, copy=batch.ring.size > 1)) * saved_state.share
    factor, rows = g * scale, batch.rows
    assert batch.needs_grad is not None
    dx = dy = None
    if batch.needs_grad.x:
        gx_MD = _zeros(x, batch) if products.gx_MD is None else products.gx_MD
        # In place where the dtypes agree.
        dx = gx_MD if gx_MD.dtype == x.dtype else torch.empty_like(x, memory_format=torch.contiguous_format)
        batch.tiles.finish(gx_MD, batch.read(x), batch.read(y[:rows]), saved_state.dpos_M, factor, dx)
    if batch.needs_grad.y:
        gy_MD = _zeros(y[:rows], batch) if products.gy_MD is None else products.gy_MD
        in_place = gy_MD.dtype == y.dtype and rows == len(y)
        dy = gy_MD if in_place else torch.empty_like(y, memory_format=torch.contiguous_format)
        batch.tiles.finish(gy_MD, batch.read(y[:rows]), batch.read(x), saved_state.dpos_M, factor, dy[:rows])
        if products.gy_KD is None:
            dy[rows:].zero_()
        else:
            dy[rows:].copy_(products.gy_KD.mul_(factor))
    slope = batch.ring.sum(products.slope)
    return Finished(dx, dy, slope * g / batch.ring.size)


class Versions:
    """The inputs that are read again in backward but not saved by autograd, which would notice if they were modified.

    Tensors of inference mode, whose modifications are not counted, are left out: a loss with a gradient has copies of them.
    """

    def __init__(self, **inputs: Tensor | None) -> None:
        self.inputs = {name: (t, t._version) for name, t in inputs.items() if t is not None and not t.is_inference()}

    def check(self) -> None:
        """Raise an error that names an input that was modified in place."""
        for name, (t, version) in self.inputs.items():
            if t._version != version:
                raise modified(name)


class NormalisedSoftmax(NamedTuple):
    """The weighted loss of each sample in one softmax, the gradient in its positive's logit, and the softmax for the gradient."""

    loss_M: Tensor
    dpos_M: Tensor
    softmax: Softmax


def normalise(
    stats: Stats, positive_M: Tensor, scale: Tensor, weights_M: Tensor | None, terms: Terms, copies: int
) -> NormalisedSoftmax:
    """Return loss and softmax of each sample, with the positive `copies` times in the denominator."""
    weight = torch.ones_like(positive_M) if weights_M is None else weights_M
    s = scale * positive_M
    if copies:
        peak = torch.maximum(stats.peak, s)
        others = stats.total * (stats.peak - peak).exp()
        power = (s - peak).exp()
        total = others + copies * power
        # log(total), accurate also where the positive dominates and total is nearly one.
        loss = torch.log1p(others + torch.expm1(s - peak) + (copies - 1) * power) + (peak - s)
    else:
        # A sample without negatives has no loss.
        weight = weight.masked_fill(stats.peak == -torch.inf, 0)
        peak = stats.peak.masked_fill(stats.peak == -torch.inf, 0)
        total = others = torch.where(stats.total > 0, stats.total, 1)
        loss = total.log() + (peak - s)
    target, further, counted = torch.full_like(s, 1 - terms.label_smoothing), None, None
    if stats.further is not None and stats.further_count is not None:
        each = target / (copies + stats.further_count)
        further = weight * each
        loss = loss - scale * each * (stats.further - stats.further_count * positive_M)
        target = copies * each
    if stats.counted is not None and stats.counted_count is not None:
        uniform = torch.full_like(s, terms.label_smoothing) / (copies + stats.counted_count)
        counted = weight * uniform
        loss = loss - scale * uniform * (stats.counted - stats.counted_count * positive_M)
        target = target + copies * uniform
    dpos = weight * (((1 - target) - others / total) if copies else -target)
    return NormalisedSoftmax(loss * weight, dpos, Softmax(peak, weight / total, further, counted))


def _visits(
    x_MD: Tensor,
    y_ND: Tensor,
    scale: Tensor,
    batch: LossBatch,
    terms: Terms,
    more: More,
    positive_M: Tensor,
    limits: tuple[Tensor | None, ...],
    softmaxes: tuple[Softmax, ...] | None,
) -> Visits:
    rows, ids_N, guide = batch.rows, batch.ids_N, more.guide
    own = Samples(
        x_MD,
        y_ND[:rows],
        None if ids_N is None else ids_N[:rows],
        positive_M,
        limits,
        None if guide is None else guide.x_MG,
        None if guide is None else guide.y_NG[:rows],
        None if guide is None else guide.limit_M,
        softmaxes,
    )
    hard = HardNegatives(y_ND[rows:], None if ids_N is None else ids_N[rows:], None if guide is None else guide.y_NG[rows:])
    return Visits(scale, batch, terms, more, own, hard)


def _own_negatives(visits: Visits) -> OwnNegatives | None:
    """Return each sample's own hard negatives, if they are summed apart from all others."""
    own, hard, terms, more = visits.own, visits.hard, visits.terms, visits.more
    if not terms.own_apart or more.owner_K is None:
        return None
    assert own.x_MD is not None
    is_hardened = terms.hardness != 0 and terms.hardness_on in ("all", "hard")
    counts_K = torch.ones_like(more.owner_K, dtype=torch.bool)
    found = OwnNegatives(
        own.x_MD, hard.y_KD, more.owner_K, visits.scale + terms.hardness if is_hardened else visits.scale, counts_K
    )
    if own.ids_M is not None and hard.ids_K is not None:
        counts_K &= own.ids_M[more.owner_K] != hard.ids_K
    found.rank_K = counts_K.clone()
    if own.limits[0] is not None:
        counts_K &= found.z_K <= own.limits[0][more.owner_K]
    if own.guide_limit_M is not None:
        assert own.guide_x_MG is not None and hard.guide_y_KG is not None
        guide = OwnNegatives(own.guide_x_MG, hard.guide_y_KG, more.owner_K, visits.scale, counts_K)
        counts_K &= guide.z_K <= own.guide_limit_M[more.owner_K]
    found.smoothed = terms.label_smoothing > 0
    return found


def _limits(positive_M: Tensor, terms: Terms, direction: Direction) -> Tensor | None:
    """Return the similarity above which negatives of each sample are left out in a direction."""
    above, ratio = (margins.get(direction) if margins else None for margins in (terms.drop_above, terms.drop_ratio))
    limits = [positive_M + above] if above is not None else []
    limits += [positive_M * ratio] if ratio is not None else []
    return None if not limits else limits[0] if len(limits) == 1 else torch.minimum(*limits)


def _no_stats(positive_M: Tensor, terms: Terms) -> Stats:
    zero = torch.zeros_like(positive_M)
    smoothed = (zero, zero) if terms.label_smoothing > 0 else (None, None)
    return Stats(torch.full_like(zero, -torch.inf), zero, None, None, *smoothed)


def _no_ranking(positive_M: Tensor) -> Ranking:
    return Ranking(torch.zeros_like(positive_M, dtype=torch.int64), torch.full_like(positive_M, -torch.inf))


def _zeros(t: Tensor, batch: LossBatch) -> Tensor:
    return torch.zeros_like(t, dtype=batch.acc, memory_format=torch.contiguous_format)


def slope_of(embeddings: Tensor, gradient: Tensor | None, batch: LossBatch) -> Tensor:
    """Return Σ embeddings · gradient, which is Σ g·z, if the scale needs a gradient."""
    assert gradient is not None
    slope = gradient.new_zeros(())
    if batch.needs_scale_grad:
        # Piece by piece, because a whole copy of reduced-precision embeddings would take as much memory as the gradient.
        for rows, part in zip(embeddings.split(SLOPE_ROWS), gradient.split(SLOPE_ROWS), strict=True):
            slope += (rows.to(part.dtype) * part).sum()
    return slope
