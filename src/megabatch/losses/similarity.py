"""The softmax loss over any similarity, a function of two blocks of rows. Formula: reference.similarity_loss.

Backward calls the function again, so only one tile has its scores and its autograd graph in memory at a time; a similarity of this
package whose batch is one tile keeps that tile's graph for backward instead. Blocks of y travel round the ring, and their gradients
with them; x stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..ring import Group
from ..tiles import backend_for
from ..tiles.contract import Softmax, accumulator, merge
from ..tiles.scores import Place, ScoredPairs, add_tile_, gradient_, no_sums
from .autograd import LossModule, first_derivative_only, outside_graphs, save, saved
from .batch import RankSummary, SharedCall, SharingOptions, agree, summarise
from .checks import (
    check_duplicates,
    check_group,
    check_ids,
    check_number,
    check_scalar,
    check_tensor,
    check_weights,
    check_workspace,
    outside_inference,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..ring import Ring

# What a pair of rows takes in memory while its tile is computed, if the caller does not say: several scores and their gradients.
PAIR_BYTES = 64

Similarity = Callable[[Any, Any], Tensor]


class SimilarityOptions(SharingOptions, total=False):
    """The options of `similarity_loss` that `SimilarityLoss` stores, for type checkers. `similarity_loss` documents them."""

    similarity: Similarity
    parameters: Sequence[Tensor] | None
    symmetric: bool
    duplicates: str
    label_smoothing: float
    pair_bytes: int


@outside_graphs
def similarity_loss(
    x: Any,
    y: Any,
    scale: Tensor | float,
    *,
    similarity: Similarity,
    parameters: Sequence[Tensor] | None = None,
    symmetric: bool = True,
    ids: Tensor | None = None,
    duplicates: str = "mask",
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    group: Group = ...,
    equal_shards: bool = False,
    workspace: int | None = None,
    pair_bytes: int = PAIR_BYTES,
) -> Tensor:
    """Return the softmax contrastive loss over scores of any similarity, of all rows of all ranks, without the score matrix.

    It is `clip_loss` with `similarity(x, y)` in place of `x @ y.T`. Forward and backward call the function on tiles of a few rows
    of each side, so that memory is that of one tile, its graph included, and O(rows) for the inputs and their gradients.

    Inputs:
        x, y: trees (nested tuples, lists and dicts) of tensors of this rank, each tensor with M (or N) rows as its first dimension.
            Floating-point tensors may require gradients. On all ranks y has the same structure, dtypes and further dimensions.
        scale: factor of the scores: a float, or a tensor with one element, which may require a gradient.
        ids: (N,) integers, one for each row of y; row i of x has the id of row i of y. Pairs with equal ids are no negatives.
        weights: (M,) weights of the pairs in the mean. Default: equal weights.

    What is computed:
        similarity: called as similarity(x_block, y_block) with trees of R and C rows; returns (R, C) scores, in float32 or float64
            if logits are not to be rounded. It must be deterministic: backward calls it again, under the autocast of forward.
        parameters: tensors apart from x and y that the function uses and that require gradients. None: those of a Module. Every
            rank adds the gradient of its own rows, which DDP averages as it should.
        symmetric, duplicates, label_smoothing: as in `clip_loss`.

    How it is computed:
        group, equal_shards: as in `clip_loss`.
        workspace: bytes of working memory for a tile. None: 64 MiB on a CPU, 256 MiB elsewhere.
        pair_bytes: how much of it one pair of rows takes, with intermediate results of the function and its graph. It decides
            the size of a tile.

    Returns the loss as a float32 scalar (float64 for float64 scores), the same on every rank. DDP's average of gradients is exactly
    the gradient of this loss.

    >>> import torch, megabatch
    >>> x, y = torch.randn(2, 256, 16).unbind()
    >>> loss = megabatch.similarity_loss(x.requires_grad_(), y, 1.0, similarity=lambda a, b: -torch.cdist(a, b))
    >>> loss.backward()
    """
    rules = SimilarityRules(symmetric, duplicates, label_smoothing)
    if parameters is None:
        parameters = tuple(similarity.parameters()) if isinstance(similarity, nn.Module) else ()
    inputs = ScoreInputs("similarity_loss", x, y, scale, ids, weights, tuple(p for p in parameters if p.requires_grad))
    return softmax_of_scores(inputs, similarity, rules, group, equal_shards, workspace, pair_bytes)


class SimilarityLoss(LossModule[Tensor]):
    """`similarity_loss` as a Module, which stores its options.

    >>> import torch, megabatch
    >>> criterion = megabatch.SimilarityLoss(similarity=lambda a, b: -torch.cdist(a, b))
    >>> loss = criterion(torch.randn(8, 4), torch.randn(8, 4), 1.0)
    """

    loss = staticmethod(similarity_loss)

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[SimilarityOptions]) -> None: ...


class ScoreInputs(NamedTuple):
    """The inputs of one call. loss_name: the public function, for error messages."""

    loss_name: str
    x: Any
    y: Any
    scale: Tensor | float
    ids: Tensor | None
    weights: Tensor | None
    parameters: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class SimilarityRules:
    """The options that say which pairs count, and how."""

    symmetric: bool
    duplicates: str
    label_smoothing: float

    def check(self) -> None:
        check_duplicates(self.duplicates)
        check_number("label_smoothing", self.label_smoothing, low=0, high=1)


@dataclass(frozen=True)
class ScoreBatch:
    """One call, apart from its differentiable tensors.

    acc: the dtype of sums; tile: rows and columns of a tile; y_grads: which leaves of y need a gradient on some rank.
    leaves: how many of the differentiable tensors belong to x, to y and to the parameters.
    keeps_graph: backward uses the graph of forward, because the batch is one tile.
    """

    call: SharedCall
    similarity: Similarity
    rules: SimilarityRules
    specs: tuple[TreeSpec, TreeSpec]
    leaves: tuple[int, int, int]
    rows: int
    documents: int
    ids_N: Tensor | None
    weights_M: Tensor | None
    acc: torch.dtype
    tile: tuple[int, int]
    y_grads: tuple[bool, ...]
    autocast: tuple[str, bool, torch.dtype]
    keeps_graph: bool

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(each.documents for each in self.call.summaries)

    def places(self, documents: int) -> Iterator[Place]:
        """Yield the tiles of this rank's rows and a block of so many documents."""
        height, width = self.tile
        for start in range(0, documents, width):
            for top in range(0, self.rows, height):
                yield Place(slice(top, min(top + height, self.rows)), slice(start, min(start + width, documents)))

    def pairs(self, ids_N: Tensor | None, owner: int, device: torch.device) -> ScoredPairs:
        local = owner == self.call.ring.rank
        return ScoredPairs(
            target_M=torch.arange(self.rows, device=device) if local else None,
            ids_M=None if self.ids_N is None else self.ids_N[: self.rows],
            ids_N=ids_N,
            multi_positive=self.rules.duplicates == "positive",
            smoothed=self.rules.label_smoothing > 0,
        )

    def scores(self, x_leaves: Sequence[Tensor], y_leaves: Sequence[Tensor]) -> Tensor:
        """Return similarity(x, y), checked, under the autocast of the call."""
        device_type, enabled, dtype = self.autocast
        with torch.autocast(device_type, dtype, enabled=enabled):
            z_RC = self.similarity(*(tree_unflatten(list(t), s) for t, s in zip((x_leaves, y_leaves), self.specs, strict=True)))
        shape = len(x_leaves[0]), len(y_leaves[0])
        if not isinstance(z_RC, Tensor) or z_RC.shape != shape or not z_RC.is_floating_point():
            kind = f"{tuple(z_RC.shape)} of {z_RC.dtype}" if isinstance(z_RC, Tensor) else type(z_RC).__name__
            raise ValueError(
                f"similarity returned {kind} for {shape[0]} and {shape[1]} rows: must be {shape}, floating-point scores"
            )
        return z_RC


class ScoreBlock(NamedTuple):
    """One rank's block in the ring: the leaves of y, ids and, in backward, the columns' softmax."""

    y_leaves: tuple[Tensor, ...]
    ids_N: Tensor | None
    columns: Softmax | None


class ScoreSaved(NamedTuple):
    """What backward needs from forward: softmax of rows and columns, gradient in the positives' logits, factor of the mean."""

    rows: Softmax
    columns: Softmax | None
    dpos_M: Tensor
    share: Tensor | float


def softmax_of_scores(
    inputs: ScoreInputs,
    similarity: Similarity,
    rules: SimilarityRules,
    group: Group,
    equal_shards: bool,
    workspace: int | None,
    pair_bytes: int,
    check: Callable[[], None] = lambda: None,
    *,
    own_similarity: bool = False,
) -> Tensor:
    """Return the loss. check: raises for inputs that a particular similarity refuses.

    own_similarity: it is one of this package: it has no parameters, and its graph takes no more than `pair_bytes`.
    """
    (x_leaves, x_spec), (y_leaves, y_spec) = (tree_flatten(t) for t in (inputs.x, inputs.y))
    _, _, _, scale, ids, weights, parameters = inputs

    def describe(ring: Ring, waits: bool) -> tuple[RankSummary, dict[str, object]]:
        _check_leaves("x", x_leaves)
        _check_leaves("y", y_leaves)
        check()
        rules.check()
        _check_rows(x_leaves[0], y_leaves[0], rules.symmetric)
        check_ids(ids, x_leaves[0], y_leaves[0])
        check_weights(weights, x_leaves[0])
        check_scalar("scale", scale, torch.empty(0, dtype=torch.float32))
        check_group(x_leaves[0], ring)
        check_workspace(workspace)
        if not isinstance(pair_bytes, int) or isinstance(pair_bytes, bool) or pair_bytes <= 0:
            raise ValueError(f"pair_bytes={pair_bytes!r}: must be a positive number of bytes, for example {PAIR_BYTES}")
        if torch.is_grad_enabled() and not own_similarity:
            _check_parameters(similarity, inputs)
        facts = {
            "loss": inputs.loss_name,
            "structure of y": str(y_spec),
            "shapes of y after the first dimension": [tuple(t.shape[1:]) for t in y_leaves],
            "dtypes of y": [t.dtype for t in y_leaves],
            "dtype of sums": _dtype_of_sums((*x_leaves, *y_leaves)),
            "device of y": y_leaves[0].device.type,
            **vars(rules),
            "dtype of ids": None if ids is None else ids.dtype,
            "weights": "None" if weights is None else "given",
            "number of parameters": len(parameters),
        }
        groups = ([t for t in x_leaves if t.is_floating_point()], *([t] for t in y_leaves), parameters)
        return summarise(len(x_leaves[0]), len(y_leaves[0]), groups, (scale,), waits=waits), facts

    device = x_leaves[0].device if x_leaves and isinstance(x_leaves[0], Tensor) else torch.device("cpu")
    names = ("x", *(f"y (tensor {i})" for i in range(len(y_leaves))), "parameters", "scale")
    call = agree(group, equal_shards, device, names, describe)
    x_leaves, y_leaves = ([t.contiguous() for t in leaves] for leaves in (x_leaves, y_leaves))
    acc = _dtype_of_sums((*x_leaves, *y_leaves))
    space = backend_for(device, torch.float32, "eager").default_workspace(device) if workspace is None else workspace
    cells = max(1, space // pair_bytes)
    rows, documents = len(x_leaves[0]), len(y_leaves[0])
    height = max(1, min(rows, math.isqrt(cells)))
    tile = height, max(1, min(documents, cells // height))
    batch = ScoreBatch(
        call=call,
        similarity=similarity,
        rules=rules,
        specs=(x_spec, y_spec),
        leaves=(len(x_leaves), len(y_leaves), len(parameters)),
        rows=rows,
        documents=documents,
        ids_N=None if ids is None else outside_inference(ids).contiguous(),
        weights_M=None if weights is None else weights.to(acc).contiguous(),
        acc=acc,
        tile=tile,
        y_grads=call.requires_grad[1 : 1 + len(y_leaves)],
        autocast=(device.type, torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)),
        keeps_graph=own_similarity and call.ring.size == 1 and tile == (rows, documents),
    )
    scale = scale.to(device, acc).reshape(()) if isinstance(scale, Tensor) else torch.tensor(scale, dtype=acc, device=device)
    if not any(call.requires_grad):
        return _forward(x_leaves, y_leaves, scale, batch, None)[0]
    # If nothing here requires a gradient but other ranks wait for this one in backward, the last input makes it take part.
    joins = torch.zeros((), requires_grad=True)
    return _SimilarityLoss.apply(batch, scale, *x_leaves, *y_leaves, *parameters, joins)


def _dtype_of_sums(leaves: Sequence[Tensor]) -> torch.dtype:
    floating = [accumulator(t.dtype) for t in leaves if t.is_floating_point()]
    return torch.float64 if torch.float64 in floating else torch.float32


class _SimilarityLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: ScoreBatch, scale: Tensor, *tensors: Tensor) -> Tensor:
        x_count, y_count, _ = batch.leaves
        x_leaves, y_leaves = tensors[:x_count], tensors[x_count : x_count + y_count]
        ctx.kept = OneTile(x_leaves, y_leaves, ctx.needs_input_grad[2:], batch) if batch.keeps_graph else None
        loss, ctx.saved = _forward(x_leaves, y_leaves, scale, batch, ctx.kept)
        ctx.batch = batch
        named = {f"{'x' if i < x_count else 'y'} (tensor {i})": t for i, t in enumerate(tensors[: x_count + y_count])}
        named |= {f"parameter {i}": t for i, t in enumerate(tensors[x_count + y_count : -1])}
        save(ctx, scale=scale, **named, **({} if batch.ids_N is None else {"ids": batch.ids_N}))
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        batch: ScoreBatch = ctx.batch
        scale, *tensors = saved(ctx)
        # Its graph serves once: if there is another backward, that computes the tile again.
        kept, ctx.kept = ctx.kept, None
        if kept is not None:
            dscale, results = kept.gradients(g.to(batch.acc) * ctx.saved.share, scale, ctx.saved, ctx.needs_input_grad[1])
            return None, dscale, *results, *[None] * (len(ctx.needs_input_grad) - 2 - len(results))
        x_count, y_count, parameter_count = batch.leaves
        x_leaves, y_leaves = tensors[:x_count], tensors[x_count : x_count + y_count]
        parameters = tensors[x_count + y_count : x_count + y_count + parameter_count]
        need = ctx.needs_input_grad[2:]
        x_need, parameter_need = need[:x_count], need[x_count + y_count : -1]
        sums = _gradients(x_leaves, y_leaves, parameters, scale, batch, ctx.saved, x_need, parameter_need)
        ring = batch.call.ring
        # The ranks hold one loss: its gradient takes the sum of the gradients that come in on all ranks, and the scale's is shared.
        g = ring.sum(g.to(batch.acc, copy=ring.size > 1)) * ctx.saved.share
        dscale = ring.sum(sums.slope) * (g / ring.size)
        factor = g * scale
        y_result = [t if n else None for t, n in zip(sums.y, need[x_count : x_count + y_count], strict=True)]
        results = [
            None if total is None else total.mul_(factor).to(t.dtype)
            for total, t in zip((*sums.x, *y_result, *sums.parameters), tensors, strict=False)
        ]
        return None, dscale if ctx.needs_input_grad[1] else None, *results, None


class OneTile:
    """The whole batch as one tile, whose scores and graph forward keeps for backward."""

    def __init__(self, x_leaves: Sequence[Tensor], y_leaves: Sequence[Tensor], needed: Sequence[bool], batch: ScoreBatch) -> None:
        with torch.enable_grad():
            self.leaves = [t.detach().requires_grad_(need) for t, need in zip((*x_leaves, *y_leaves), needed, strict=False)]
            self.z_RC = batch.scores(self.leaves[: len(x_leaves)], self.leaves[len(x_leaves) :])
        self.batch = batch

    def gradients(self, g: Tensor, scale: Tensor, state: ScoreSaved, need_slope: bool) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of the scale and of the leaves. g: that of the sum of losses."""
        batch = self.batch
        place = Place(slice(0, batch.rows), slice(0, batch.documents))
        scores = self.z_RC.detach().to(batch.acc)
        pairs = batch.pairs(batch.ids_N, batch.call.ring.rank, scale.device)
        g_RC = gradient_(scores.clone(), place, scale, pairs, state.rows, state.columns, state.dpos_M)
        dscale = (scores * g_RC).sum() * g if need_slope else None
        wanted = [t for t in self.leaves if t.requires_grad]
        if not wanted:
            return dscale, [None] * len(self.leaves)
        found = iter(torch.autograd.grad(self.z_RC, wanted, g_RC.mul_(g * scale).to(self.z_RC.dtype)))
        return dscale, [next(found) if t.requires_grad else None for t in self.leaves]


def _forward(
    x_leaves: Sequence[Tensor], y_leaves: Sequence[Tensor], scale: Tensor, batch: ScoreBatch, kept: OneTile | None
) -> tuple[Tensor, ScoreSaved]:
    """Return the loss of the whole batch, and what backward needs. kept: its only tile."""
    ring, rules = batch.call.ring, batch.rules
    tiles = backend_for(scale.device, torch.float32, "eager")

    def visit(block: ScoreBlock, owner: int) -> tuple[Any, Any]:
        pairs = batch.pairs(block.ids_N, owner, scale.device)
        documents = len(block.y_leaves[0])
        sums = no_sums(batch.rows, documents, scale.detach(), pairs, columns=rules.symmetric)
        for place in batch.places(documents):
            if kept is None:
                z_RC = batch.scores([t[place.rows] for t in x_leaves], [t[place.columns] for t in block.y_leaves])
            else:
                z_RC = kept.z_RC
            # A copy: the function may return a tensor that it keeps.
            add_tile_(sums, z_RC.to(batch.acc, copy=True), place, scale, pairs)
        return (sums.positive_M, sums.rows), sums.columns

    with torch.no_grad():
        block = ScoreBlock(tuple(t.detach() for t in y_leaves), batch.ids_N, None)
        (positive_M, row_stats), column_stats = ring.tour(block, batch.lengths, visit, merge)
        loss_M, dpos_M, rows, columns = tiles.normalise(
            row_stats, column_stats, positive_M, scale, batch.weights_M, rules.label_smoothing
        )
        weight = scale.new_full((), batch.rows) if batch.weights_M is None else batch.weights_M.sum()
        loss, weight = ring.sum(torch.stack((loss_M.sum(), weight))).unbind()
        share = 1 / (weight * (2 if rules.symmetric else 1))
        return loss * share, ScoreSaved(rows, columns, dpos_M, share)


class ScoreGradients(NamedTuple):
    """The gradients of this rank's x and y and of the parameters, still without a factor, and Σ g·z, the slope of the scale."""

    x: list[Tensor | None]
    y: tuple[Tensor | None, ...]
    parameters: list[Tensor | None]
    slope: Tensor


def _gradients(
    x_leaves: Sequence[Tensor],
    y_leaves: Sequence[Tensor],
    parameters: Sequence[Tensor],
    scale: Tensor,
    batch: ScoreBatch,
    state: ScoreSaved,
    x_need: Sequence[bool],
    parameter_need: Sequence[bool],
) -> ScoreGradients:
    """Compute every tile again with its graph, and add up its gradients."""
    gx, gp = _zeros(x_leaves, x_need), _zeros(parameters, parameter_need)
    slope = scale.new_zeros(())
    # Parameters of a Module are the tensors that the function reads; autograd.grad leaves their .grad alone.
    wanted = [p for p, need in zip(parameters, parameter_need, strict=True) if need]

    def visit(block: ScoreBlock, owner: int) -> tuple[None, tuple[Tensor | None, ...]]:
        nonlocal slope
        pairs = batch.pairs(block.ids_N, owner, scale.device)
        gy = _zeros(block.y_leaves, batch.y_grads)
        for place in batch.places(len(block.y_leaves[0])):
            with torch.enable_grad():
                x_RD = [t[place.rows].detach().requires_grad_(need) for t, need in zip(x_leaves, x_need, strict=True)]
                y_CD = [
                    t[place.columns].detach().requires_grad_(need) for t, need in zip(block.y_leaves, batch.y_grads, strict=True)
                ]
                z_RC = batch.scores(x_RD, y_CD)
            scores = z_RC.detach().to(batch.acc, copy=True)
            g_RC = gradient_(scores.clone(), place, scale, pairs, state.rows, block.columns, state.dpos_M)
            slope += (scores.mul_(g_RC)).sum()
            leaves = [t for t in (*x_RD, *y_CD) if t.requires_grad] + wanted
            if not z_RC.requires_grad or not leaves:
                continue
            found = iter(torch.autograd.grad(z_RC, leaves, g_RC.to(z_RC.dtype), allow_unused=True))
            _add(gx, found, place.rows)
            _add(gy, found, place.columns)
            _add(gp, found, ...)
        return None, tuple(gy)

    block = ScoreBlock(tuple(t.detach() for t in y_leaves), batch.ids_N, state.columns)
    _, gy_home = batch.call.ring.tour(block, batch.lengths, visit, merge)
    return ScoreGradients(gx, gy_home, gp, slope)


def _zeros(tensors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    pairs = zip(tensors, needed, strict=True)
    return [torch.zeros_like(t, dtype=accumulator(t.dtype)) if need else None for t, need in pairs]


def _add(totals: Sequence[Tensor | None], gradients: Iterator[Tensor | None], where: Any) -> None:
    """Add the next gradients to the totals that are needed; a tensor that the function does not use has none."""
    for total in totals:
        if total is not None:
            gradient = next(gradients)
            if gradient is not None:
                total[where] += gradient


def _check_leaves(name: str, leaves: Sequence[Any]) -> None:
    if not leaves:
        raise ValueError(f"{name} holds no tensors: must be a tensor or a tree of tensors with one row for each sample")
    for t in leaves:
        check_tensor(name, t, "rows, or a tree of such tensors")
        if t.ndim == 0 or len(t) != len(leaves[0]) or t.device != leaves[0].device:
            raise ValueError(
                f"{name} holds a tensor of shape {tuple(t.shape)} on {t.device} beside one of {tuple(leaves[0].shape)} on "
                f"{leaves[0].device}: all must have equally many rows, on one device"
            )


def _check_rows(x: Tensor, y: Tensor, symmetric: bool) -> None:
    if x.device != y.device:
        raise ValueError(f"x is on {x.device} and y on {y.device}: must be on one device; move one with .to()")
    if len(y) < len(x):
        raise ValueError(f"x has {len(x)} rows and y {len(y)}: y must hold the positive of every row of x as its first rows")
    if symmetric and len(y) != len(x):
        raise ValueError(
            f"x has {len(x)} rows and y {len(y)}: a symmetric loss needs equally many; pass symmetric=False to use the further "
            "rows of y as extra negatives"
        )


def _check_parameters(similarity: Similarity, inputs: ScoreInputs) -> None:
    """Raise if the function depends on a tensor that requires a gradient and would get none.

    The graph of one pair shows all of them; without rows there is no graph, and no gradient to lose.
    """
    with torch.enable_grad():
        (x_leaves, x_spec), (y_leaves, y_spec) = (tree_flatten(t) for t in (inputs.x, inputs.y))
        if not len(x_leaves[0]):
            return
        x, y = (tree_unflatten([t[:1].detach() for t in leaves], spec) for leaves, spec in ((x_leaves, x_spec), (y_leaves, y_spec)))
        score = similarity(x, y)
    known = {id(p) for p in inputs.parameters}
    if not isinstance(score, Tensor) or score.grad_fn is None:
        return
    # A parameter that is itself computed ends the search.
    nodes, seen = [score.grad_fn], {p.grad_fn for p in inputs.parameters if p.grad_fn is not None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            raise ValueError(
                f"similarity uses a tensor of shape {tuple(variable.shape)} that requires a gradient and is neither in x or y nor "
                "in parameters: pass it in parameters=, or detach it"
            )
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
