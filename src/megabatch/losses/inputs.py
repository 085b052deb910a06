"""What is checked and agreed on before anything is computed, and what the losses then work with."""

from __future__ import annotations

import math
import numbers
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..ring import Group, Ring
from ..tiles import backend_for
from ..tiles.contract import Means, Tiles, Wanted, accumulator

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DUPLICATES = ("mask", "positive")
PRECISIONS = ("ieee", "tf32")
EIGHT_BITS = "int8"

_accumulating: ContextVar[bool] = ContextVar("accumulating", default=False)


@dataclass(frozen=True)
class Sharing:
    """How the work is laid out: by arguments alone, never by what the process happens to be part of."""

    group: Group = ...
    equal_shards: bool = False
    backend: str | None = None
    tile: int | None = None
    precision: str = "ieee"


class Options(Protocol):
    """What must be equal on every rank; its repr says what it is."""

    def check(self) -> None:
        """Raises a ValueError that names value, rule and remedy."""


@dataclass(frozen=True)
class Batch:
    """What is known of the batch besides its embeddings.

    rows: this rank's rows of x; dtype: in which the products read the embeddings; acc: in which everything is summed up.
    ids_N, weights_M: this rank's, or None; lengths: each rank's documents.
    wanted: the gradients that some rank needs (for scale and bias alone, x's product serves), or None if no rank needs any.
    """

    rows: int
    dtype: torch.dtype
    ids_N: Tensor | None
    weights_M: Tensor | None
    ring: Ring
    lengths: tuple[int, ...]
    tiles: Tiles
    means: Means
    wanted: Wanted | None

    @property
    def acc(self) -> torch.dtype:
        return accumulator(self.dtype)

    def read(self, embeddings: Tensor) -> Tensor:
        """The embeddings as the tiles read them."""
        return embeddings.detach().to(self.dtype).contiguous()

    def totals(self, *sums: Tensor) -> tuple[Sequence[Tensor], Tensor | float]:
        """The sums over all ranks, and the weight of all rows: a number where nobody has to be asked for it."""
        if self.ring.size == 1:
            return sums, float(self.rows) if self.weights_M is None else self.weights_M.sum()
        weight = sums[0].new_full((), self.rows) if self.weights_M is None else self.weights_M.sum()
        every = self.ring.sum(torch.stack((*sums, weight)))
        return every[:-1].unbind(), every[-1]


def prepare(
    x: Tensor,
    y: Tensor,
    scalars: dict[str, Tensor | float],
    *,
    ids: Tensor | None,
    weights: Tensor | None,
    sharing: Sharing,
    options: Options,
    same_rows: bool,
    precisions: Sequence[str] = PRECISIONS,
) -> Batch:
    """The batch, checked on this rank and agreed on between ranks; a ValueError on every rank if any rank's input is wrong."""
    _check_not_accumulating()
    ring = Ring.of(sharing.group)
    problem: ValueError | None = None
    try:
        options.check()
        _check_rows(x, y, same_rows=same_rows)
        _check_columns(x, y, ids, weights)
        for name, value in scalars.items():
            _check_scalar(name, value)
        tiles = backend_for(x.device, _product_dtype(x), sharing.backend)
        _check_tile(sharing.tile)
        _check_precision(sharing.precision, precisions, _product_dtype(x))
    except ValueError as error:
        if ring.size == 1 or sharing.equal_shards:
            raise
        problem = error
    wants = [torch.is_grad_enabled() and isinstance(t, Tensor) and t.requires_grad for t in (x, y, *scalars.values())]
    if ring.size == 1 or sharing.equal_shards:
        lengths, total_rows = (len(y),) * ring.size, len(x) * ring.size
    else:
        asked = f"{options}, ids={ids is not None}, weights={weights is not None}, gradients={torch.is_grad_enabled()}"
        lengths, total_rows, wants = _agree(ring, x, y, wants, asked, problem)
    if total_rows == 0:
        raise ValueError("x has 0 rows over all ranks: a mean needs at least one row; skip the step when there is no data")
    dtype = _product_dtype(x)
    return Batch(
        rows=len(x),
        dtype=dtype,
        ids_N=None if ids is None else ids.contiguous(),
        weights_M=None if weights is None else weights.to(accumulator(dtype)).contiguous(),
        ring=ring,
        lengths=lengths,
        tiles=tiles,
        means=_means(sharing, tiles.default_tile(x.device)),
        wanted=Wanted(wants[0] or not wants[1], wants[1]) if any(wants) else None,
    )


@contextmanager
def refused_while_accumulating() -> Iterator[None]:
    """A context in which the losses raise: they compare samples with each other, and there they would see one chunk of them."""
    token = _accumulating.set(True)
    try:
        yield
    finally:
        _accumulating.reset(token)


def scalar(value: Tensor | float, x: Tensor, batch: Batch) -> Tensor:
    """The scale or bias as a 0-dimensional tensor beside the embeddings; autograd finds its way back to what was given."""
    if isinstance(value, Tensor):
        return value.to(x.device, batch.acc).reshape(())
    return x.new_full((), value, dtype=batch.acc)


def join_backward(batch: Batch, x: Tensor, *others: Tensor) -> Tensor:
    """x, made to require a gradient where nothing here does but other ranks wait for this one in backward."""
    if batch.wanted is None or any(t.requires_grad for t in (x, *others)):
        return x
    return x.detach().requires_grad_()


def check_number(name: str, value: object, *, low: float = -math.inf, high: float = math.inf) -> None:
    """Raises unless value is a finite number in [low, high]."""
    if not isinstance(value, numbers.Real) or not math.isfinite(value) or not low <= float(value) <= high:
        limits = "" if math.isinf(low) else f" in [{low:g}, {high:g}]"
        raise ValueError(f"{name}={value!r}: must be a finite number{limits}")


def check_duplicates(value: object) -> None:
    """Raises unless value is one of the two treatments of equal ids."""
    if value not in DUPLICATES:
        raise ValueError(f"duplicates={value!r}: must be one of {', '.join(map(repr, DUPLICATES))}")


def _check_not_accumulating() -> None:
    if _accumulating.get():
        raise ValueError(
            "a contrastive loss inside accumulate(): every sample would be compared with its own chunk instead of the whole batch, "
            "since accumulation adds no negatives; encode with cached(encoder, chunk=…) and take the loss of all embeddings"
        )


def _check_rows(x: Tensor, y: Tensor, *, same_rows: bool) -> None:
    for name, t in (("x", x), ("y", y)):
        if not isinstance(t, Tensor):
            raise ValueError(f"{name} is a {type(t).__name__}: must be a tensor of embeddings")
        if t.ndim != 2 or t.shape[1] == 0:
            raise ValueError(f"{name} has shape {tuple(t.shape)}: must be (rows, width) with a width of at least 1")
        if t.dtype not in DTYPES:
            raise ValueError(f"{name} is {t.dtype}: must be one of {', '.join(map(str, DTYPES))}; convert it with .float()")
    if x.device != y.device:
        raise ValueError(f"x is on {x.device} and y on {y.device}: must be on one device; move one with .to()")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x has width {x.shape[1]} and y {y.shape[1]}: must be equal; project both to one embedding width")
    if x.dtype != y.dtype and _product_dtype(x) != _product_dtype(y):
        raise ValueError(f"x is {x.dtype} and y {y.dtype}: must be equal; convert one with .to()")
    if len(y) < len(x):
        raise ValueError(f"x has {len(x)} rows and y {len(y)}: y must hold the positive of every row of x as its first rows")
    if same_rows and len(y) != len(x):
        raise ValueError(
            f"x has {len(x)} rows and y {len(y)}: a symmetric loss needs as many; pass symmetric=False to use y's further rows "
            "as extra negatives"
        )


def _check_columns(x: Tensor, y: Tensor, ids: Tensor | None, weights: Tensor | None) -> None:
    if ids is not None:
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ValueError(f"ids is {getattr(ids, 'dtype', type(ids))}: must be a tensor of integers, one for each row of y")
        if ids.shape != y.shape[:1]:
            raise ValueError(f"ids has shape {tuple(ids.shape)}: must be ({len(y)},), one for each row of y")
        if ids.device != x.device:
            raise ValueError(f"ids is on {ids.device} and x on {x.device}: must be on one device; move it with .to()")
    if weights is not None:
        if not isinstance(weights, Tensor) or not weights.is_floating_point():
            raise ValueError(f"weights is {getattr(weights, 'dtype', type(weights))}: must be a floating-point tensor")
        if weights.shape != x.shape[:1]:
            raise ValueError(f"weights has shape {tuple(weights.shape)}: must be ({len(x)},), one for each row of x")
        if weights.device != x.device:
            raise ValueError(f"weights is on {weights.device} and x on {x.device}: must be on one device; move it with .to()")
        if weights.requires_grad:
            raise ValueError("weights requires a gradient: the loss has none for it; pass weights.detach()")


def _check_scalar(name: str, value: Tensor | float) -> None:
    if not isinstance(value, Tensor):
        check_number(name, value)
    elif value.numel() != 1 or not value.is_floating_point():
        raise ValueError(f"{name} has shape {tuple(value.shape)} and is {value.dtype}: must be one floating-point number")


def _check_tile(tile: int | None) -> None:
    if tile is not None and (not isinstance(tile, int) or isinstance(tile, bool) or tile <= 0):
        raise ValueError(f"tile={tile!r}: must be a positive number of bytes of working memory, for example 64 * 2**20")


def _check_precision(precision: str, precisions: Sequence[str], dtype: torch.dtype) -> None:
    if precision not in precisions:
        about = f"{EIGHT_BITS!r} is for bf16, the others for fp32" if EIGHT_BITS in precisions else "it is about fp32 products only"
        raise ValueError(f"precision={precision!r}: must be one of {', '.join(map(repr, precisions))}; {about}")
    if precision == EIGHT_BITS and dtype != torch.bfloat16:
        raise ValueError(
            f"precision={precision!r} and x is {str(dtype).removeprefix('torch.')}: must be bfloat16 for it; pass x.bfloat16(), "
            "or call the loss under torch.autocast in bfloat16"
        )


def _means(sharing: Sharing, default_tile: int) -> Means:
    tile = default_tile if sharing.tile is None else sharing.tile
    return Means(tile, eight_bits=True) if sharing.precision == EIGHT_BITS else Means(tile, sharing.precision)


def _product_dtype(t: Tensor) -> torch.dtype:
    """The dtype that a matrix product would read t in: autocast is honoured, as the caller's explicit wish."""
    if t.dtype != torch.float64 and torch.is_autocast_enabled(t.device.type):
        return torch.get_autocast_dtype(t.device.type)
    return t.dtype


def _agree(
    ring: Ring, x: Tensor, y: Tensor, wants: list[bool], asked: str, problem: ValueError | None
) -> tuple[tuple[int, ...], int, list[bool]]:
    """Every rank's documents, the rows of x over all ranks and the gradients that some rank wants; or one error for all."""
    device = x.device if isinstance(x, Tensor) else torch.device("cpu")
    if problem is None:
        asked = f"{asked}, {_product_dtype(x)}"
        mine = [1, len(x), len(y), x.shape[1], zlib.crc32(asked.encode()), *wants]
    else:
        mine = [0] * (5 + len(wants))
    every = ring.gather(mine, device)
    if problem is not None:
        raise problem
    bad = [rank for rank, (fine, *_) in enumerate(every) if not fine]
    if bad:
        raise ValueError(f"the input of rank {bad} is wrong: the error raised there says how")
    widths = [facts[3] for facts in every]
    if len(set(widths)) > 1:
        raise ValueError(f"the embeddings of the ranks have widths {widths}: must be equal on every rank")
    if len({facts[4] for facts in every}) > 1:
        raise ValueError(
            f"the ranks differ in what they ask for, this one for {asked}: options, dtype, the presence of ids and weights and "
            "whether gradients are enabled must be equal on every rank"
        )
    lengths = tuple(facts[2] for facts in every)
    return lengths, sum(facts[1] for facts in every), [any(column) for column in list(zip(*every, strict=True))[5:]]
