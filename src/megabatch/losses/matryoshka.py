"""Matryoshka: any loss, added up over prefixes of the embeddings, with the memory of one width. Formula: reference.matryoshka_loss.

Of any loss, the gradients of each width are computed together with its value and added up before the next width, so that no graph
outlives its width. The work is that of the plain loop; backward only multiplies.

The softmax loss with its usual options in half precision on one Hopper GPU computes all widths together, for the products of the
widest (tiles/fused/matryoshka.py), if every width is a multiple of 16.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ring import Group, Ring
from ..tiles import backend_for, prefixes_for
from ..tiles.contract import NORM_EPS, PrefixTiles, accumulator
from .autograd import WITH_EACH_BATCH, LossModule, first_derivative_only, outside_autocast, outside_graphs, save, saved
from .batch import Execution, Inputs, LossBatch, prepare
from .checks import check_number, check_tensor, product_dtype
from .clip import ClipRules, clip_loss
from .infonce import infonce_loss

# Elements of embeddings whose gradients pass through the norms at once, by device: many small pieces would keep a GPU waiting.
PIECE = {"cpu": 2**20, "cuda": 2**24}


def matryoshka(
    loss: Callable[..., Any],
    dims: Sequence[int],
    dim_weights: Sequence[float] | None = None,
    *,
    normalize: bool = True,
    also: Sequence[str] = ("queue",),
) -> MatryoshkaLoss:
    """Return a loss over prefixes of the embeddings: `Σ_k dim_weights[k] * loss(x[..., :dims[k]], y[..., :dims[k]], ...)`.

    loss: any loss of megabatch or a Module of one, or any other function with the same arguments.
    dims: widths of the prefixes. Include the full width to train it too.
    dim_weights: of the widths. None: 1 for each.
    normalize: divide each prefix by its own norm. False: for losses of inner products or that normalise by themselves.
    also: names of arguments that hold embeddings of the same width without a gradient, such as a queue of earlier ones, and are
        cut too where they are passed.

    The result is called as the loss itself. Its leading tensors with rows (x and y) are cut, and everything else is passed on as it
    is. A process group is passed to the call, or stored in the Module. Value and gradients are those of the plain loop, at the
    memory of one width.

    >>> import torch, megabatch
    >>> x, y = torch.randn(2, 256, 64).unbind()
    >>> criterion = megabatch.matryoshka(megabatch.clip_loss, dims=(64, 32, 16))
    >>> loss = criterion(x.requires_grad_(), y, 20.0, symmetric=False)
    >>> loss.backward()
    """
    return MatryoshkaLoss(loss, dims, dim_weights, normalize=normalize, also=also)


class MatryoshkaLoss(nn.Module):
    """The loss that `matryoshka` returns, which documents the arguments.

    A loss that also returns diagnostics returns those of the widest prefix.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        dims: Sequence[int],
        dim_weights: Sequence[float] | None = None,
        *,
        normalize: bool = True,
        also: Sequence[str] = ("queue",),
    ) -> None:
        super().__init__()
        dims = tuple(dims)
        weights = (1.0,) * len(dims) if dim_weights is None else tuple(dim_weights)
        if not dims or any(not isinstance(d, int) or isinstance(d, bool) or d < 1 for d in dims) or len(set(dims)) < len(dims):
            raise ValueError(f"dims={dims}: must be different positive widths, for example (768, 512, 256)")
        if len(weights) != len(dims):
            raise ValueError(f"dim_weights has {len(weights)} entries and dims {len(dims)}: must be one for each width")
        for weight in weights:
            check_number("dim_weights", weight)
        self.loss = loss
        # The widest first: it says what the loss returns beside its value.
        self.widths = tuple(sorted(zip(dims, weights, strict=True), reverse=True))
        self.normalize = normalize
        self.also = tuple(also)

    def extra_repr(self) -> str:
        dims, weights = zip(*self.widths, strict=True)
        return f"dims={dims}, dim_weights={weights}, normalize={self.normalize}"

    @outside_graphs
    def forward(self, *inputs: Any, **options: Any) -> Any:
        embeddings = list(itertools.takewhile(lambda t: isinstance(t, Tensor) and t.ndim > 1, inputs))
        if not embeddings:
            raise ValueError(
                "the first argument is no tensor of embeddings with rows: matryoshka cuts the leading tensors of a loss"
            )
        for t in embeddings:
            check_tensor("an embedding", t, "embeddings")
            if t.shape[-1] < self.widths[0][0]:
                raise ValueError(
                    f"dims has {self.widths[0][0]} and the embeddings are {t.shape[-1]} wide: must be at most that wide"
                )
        together = _together(self, inputs, options) if len(embeddings) == 2 and self.normalize else None
        if together is not None:
            return together
        others = [t for t in (*inputs[len(embeddings) :], *options.values()) if isinstance(t, Tensor) and t.requires_grad]
        run = Widths(self.loss, self.widths, self.normalize, self.also, inputs, options, len(embeddings), others)
        ring = Ring.of(_group_of(self.loss, options))
        if not torch.is_grad_enabled() or (ring.size == 1 and not any(t.requires_grad for t in (*embeddings, *others))):
            value, rest, _ = run.evaluate(embeddings, others, with_gradients=False)
        else:
            # If nothing here requires a gradient, other ranks may still wait for this one in backward.
            joins = torch.zeros((), requires_grad=True)
            value, rest = _Matryoshka.apply(run, ring, *embeddings, *others, joins)
        return value if rest is None else (value, *rest)


@dataclass(frozen=True)
class Widths:
    """One call: the loss at each width, and its arguments. cut: how many of them are cut; others: further ones with a gradient."""

    loss: Callable[..., Any]
    widths: Sequence[tuple[int, float]]
    normalize: bool
    also: Sequence[str]
    inputs: Sequence[Any]
    options: dict[str, Any]
    cut: int
    others: Sequence[Tensor]

    def evaluate(
        self, embeddings: Sequence[Tensor], others: Sequence[Tensor], *, with_gradients: bool
    ) -> tuple[Tensor, tuple[Any, ...] | None, list[Tensor | None]]:
        """Return the value, what else the loss returns, and the gradients of all tensors (None for those without)."""
        tensors = (*embeddings, *others)
        totals: list[Tensor | None] = [None] * len(tensors)
        value: Tensor | None = None
        rest = None
        for width, weight in self.widths:
            leaves = [self._prefix(t.detach()[..., :width]) for t in embeddings] + [t.detach() for t in others]
            for leaf, t in zip(leaves, tensors, strict=True):
                leaf.requires_grad_(t.requires_grad and with_gradients)
            with torch.set_grad_enabled(with_gradients):
                result = self._at_width(leaves, width)
            term, *more = result if isinstance(result, tuple) else (result,)
            if value is None:
                rest = tuple(more) if more else None
            value = weight * term.detach() if value is None else value + weight * term.detach()
            if term.requires_grad and with_gradients:
                gradients = _gradients(term, leaves)
                # The prefixes are freed before the totals are allocated.
                del leaves, term, result
                self._add(gradients, tensors, totals, width, weight)
        assert value is not None
        for index, t in enumerate(tensors):
            if with_gradients and t.requires_grad and totals[index] is None:
                totals[index] = torch.zeros_like(t, dtype=accumulator(t.dtype))
        return value, rest, totals

    def _at_width(self, leaves: Sequence[Tensor], width: int) -> Any:
        replaced = {id(t): leaf for t, leaf in zip(self.others, leaves[self.cut :], strict=True)}
        inputs = [replaced.get(id(t), t) for t in self.inputs[self.cut :]]
        options = {name: replaced.get(id(t), t) for name, t in self.options.items()}
        for name in self.also:
            if isinstance(options.get(name), Tensor):
                options[name] = self._prefix(options[name].detach()[..., :width])
        return self.loss(*leaves[: self.cut], *inputs, **options)

    def _prefix(self, t: Tensor) -> Tensor:
        """Return the embeddings of one width as the loss reads them."""
        return normalised_prefix(t) if self.normalize else t

    def _add(
        self,
        gradients: list[Tensor | None],
        tensors: Sequence[Tensor],
        totals: list[Tensor | None],
        width: int,
        weight: float,
    ) -> None:
        """Add the weighted gradients of one width to the totals."""
        for index, t in enumerate(tensors):
            gradient, gradients[index] = gradients[index], None
            if gradient is None:
                continue
            total = totals[index]
            if total is None:
                total = totals[index] = torch.zeros_like(t, dtype=accumulator(t.dtype))
            if index >= self.cut or not self.normalize:
                (total if index >= self.cut else total[..., :width]).add_(gradient, alpha=weight)
                continue
            rows = max(1, PIECE.get(t.device.type, PIECE["cpu"]) // (t[0].numel() or 1)) if len(t) else 1
            for piece, x, g in zip(*(each.split(rows) for each in (total, t.detach(), gradient)), strict=True):
                piece[..., :width].add_(_through_norm(x[..., :width].to(total.dtype), g.to(total.dtype)), alpha=weight)


def normalised_prefix(t: Tensor) -> Tensor:
    """Return embeddings divided by their norms."""
    # Norms are sums: in the dtype of sums, and the result is rounded once.
    return F.normalize(t.to(accumulator(t.dtype)), dim=-1).to(t.dtype)


def _gradients(term: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradient of each leaf, None where it has none."""
    wanted = [t for t in leaves if t.requires_grad]
    if not wanted:
        # Other ranks wait in the backward pass of this width.
        term.backward()
        return [None] * len(leaves)
    found = iter(torch.autograd.grad(term, wanted, allow_unused=True))
    return [next(found) if t.requires_grad else None for t in leaves]


def _through_norm(x: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient in x from that in x / max(|x|, NORM_EPS), as torch.nn.functional.normalize has it."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    clamped = norm.clamp_min(NORM_EPS)
    unit = x / clamped
    along = torch.linalg.vecdot(unit, gradient)[..., None].masked_fill_(norm < NORM_EPS, 0)
    return torch.addcmul(gradient, unit, along, value=-1).div_(clamped)


class _Matryoshka(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Widths, ring: Ring, *tensors: Tensor) -> tuple[Tensor, tuple[Any, ...] | None]:
        *own, _joins = tensors
        value, rest, totals = run.evaluate(own[: run.cut], own[run.cut :], with_gradients=True)
        ctx.ring, ctx.dtypes = ring, [t.dtype for t in own]
        # Saved as the inputs are, so that autograd frees them after backward.
        ctx.save_for_backward(*totals, *own)
        return value, rest

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        # Each rank has computed the gradients for a gradient of 1 on all of them; the ranks hold one loss.
        g = ctx.ring.sum(g.to(accumulator(g.dtype), copy=ctx.ring.size > 1)) / ctx.ring.size
        totals = ctx.saved_tensors[: len(ctx.dtypes)]
        results = [None if total is None else (total * g).to(dtype) for total, dtype in zip(totals, ctx.dtypes, strict=True)]
        return None, None, *results, None


# The arguments of `clip_loss` and `infonce_loss` that all widths together support. All others have to have their defaults.
TOGETHER = ("x", "y", "scale", "symmetric", "diagnostics", "group", "equal_shards", "backend", "workspace", "precision")


class PrefixCall(NamedTuple):
    """The loss of all widths together. dims: ascending; weights: theirs."""

    tiles: PrefixTiles
    dims: tuple[int, ...]
    weights: tuple[float, ...]
    symmetric: bool
    batch: LossBatch


def _together(criterion: MatryoshkaLoss, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
    """Return what the loss returns, computed for all widths together, or None if a width has to be computed by itself."""
    arguments = _softmax_arguments(criterion.loss, inputs, options)
    if arguments is None or Ring.of(arguments["group"]).size > 1:
        return None
    x, y, scale, symmetric, diagnostics = (arguments[name] for name in TOGETHER[:5])
    execution = Execution(*(arguments[name] for name in TOGETHER[5:]))
    dtype = product_dtype(x)
    # On a CPU the kernels run on request, in Triton's interpreter, for tests.
    if x.is_cuda and dtype not in (torch.bfloat16, torch.float16):
        return None
    tiles = prefixes_for(backend_for(x.device, dtype, execution.backend))
    dims, weights = zip(*reversed(criterion.widths), strict=True)
    if tiles is None or not tiles.fits(dims, x, y):
        return None
    batch = prepare(Inputs(x, y, {"scale": scale}, None, None), ClipRules(symmetric, "mask", 0.0, None, False), execution)
    call, scale = PrefixCall(tiles, dims, weights, symmetric, batch), batch.scalar(scale, x)
    loss = _prefix_loss(x, y, scale, call)[0] if batch.needs_grad is None else _Prefixes.apply(x, y, scale, call)
    if not diagnostics:
        return loss
    # Another forward pass, of the widest prefix.
    with torch.no_grad():
        prefixes = [normalised_prefix(t[:, : dims[-1]]) for t in (x, y)]
        return loss, *criterion.loss(*prefixes, *inputs[2:], **options)[1:]


def _softmax_arguments(loss: Any, inputs: Sequence[Any], options: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments TOGETHER of a call of `clip_loss`, or of `infonce_loss` from x to y, if no others are given."""
    if isinstance(loss, functools.partial):
        return None if loss.args else _softmax_arguments(loss.func, inputs, {**loss.keywords, **options})
    if isinstance(loss, LossModule):
        hooks = (loss._forward_hooks, loss._forward_pre_hooks, loss._backward_hooks, loss._backward_pre_hooks)
        changed = any(hooks) or type(loss).forward is not LossModule.forward
        if changed or not options.keys() <= set(WITH_EACH_BATCH):
            return None
        loss, options = type(loss).loss, {**options, **loss.options}
    if loss not in (clip_loss, infonce_loss):
        return None
    parameters = _parameters(loss)
    arguments = dict(zip(parameters, inputs, strict=False))
    if len(inputs) > 3 or options.keys() & arguments.keys() or not options.keys() <= parameters.keys():
        return None
    arguments |= options
    for name, value in arguments.items():
        default = parameters[name].default
        if name not in TOGETHER and value is not default and (isinstance(value, Tensor) or value != default):
            return None
    defaults = {"symmetric": loss is clip_loss, **{name: each.default for name, each in parameters.items()}}
    arguments = {name: arguments.get(name, defaults[name]) for name in TOGETHER}
    return None if arguments["scale"] is inspect.Parameter.empty else arguments


@functools.cache
def _parameters(loss: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(loss).parameters)


@outside_autocast
def _prefix_loss(x: Tensor, y: Tensor, scale: Tensor, call: PrefixCall) -> tuple[Tensor, Any]:
    """Return the loss, and what its gradients need."""
    batch = call.batch
    with torch.no_grad():
        return call.tiles.prefix_loss(
            batch.read(x), batch.read(y), scale, call.dims, call.weights, symmetric=call.symmetric, compute=batch.compute
        )


@outside_autocast
def _prefix_grads(x: Tensor, y: Tensor, scale: Tensor, call: PrefixCall, state: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    batch = call.batch
    assert batch.needs_grad is not None
    return call.tiles.prefix_grads(
        batch.read(x), batch.read(y), scale, state, g, (x.dtype, y.dtype), needs_grad=batch.needs_grad, compute=batch.compute
    )


class _Prefixes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: Tensor, call: PrefixCall) -> Tensor:
        loss, ctx.state = _prefix_loss(x, y, scale, call)
        ctx.call = call
        save(ctx, x=x, y=y, scale=scale)
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, y, scale = saved(ctx)
        gradients = _prefix_grads(x, y, scale, ctx.call, ctx.state, g)
        return *(t if need else None for t, need in zip(gradients, ctx.needs_input_grad, strict=False)), None


def _group_of(loss: Any, options: dict[str, Any]) -> Group:
    """Return the process group of a call: given to the call, to a partial function or to a Module; `...` if it is not given."""
    if "group" in options:
        group: Group = options["group"]
        return group
    if isinstance(loss, functools.partial):
        return _group_of(loss.func, loss.keywords)
    stored = getattr(loss, "options", None)
    return stored.get("group", ...) if isinstance(stored, dict) else ...
