"""What is checked and agreed on before anything is computed, and what the losses then work with."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd.forward_ad import unpack_dual
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..ring import Group, Ring
from ..tiles import backend_for
from ..tiles.contract import ComputeOptions, NeedsGrad, Tiles, accumulator
from .agreement import Shard, agree, check_values, is_first_call
from .small_scale import can_wait, warn_of_small_scale

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
ID_DTYPES = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)
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
    workspace: int | None = None
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
    compute: ComputeOptions
    needs_grad: NeedsGrad | None

    @property
    def acc(self) -> torch.dtype:
        return accumulator(self.dtype)

    def read(self, embeddings: Tensor) -> Tensor:
        """The embeddings as the tiles read them."""
        # Kernels read memory as it is, so a pending negation (a view such as torch.imag(z.conj())) has to be carried out.
        return embeddings.detach().to(self.dtype).resolve_neg().contiguous()

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
    loss: str,
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
    first = is_first_call(ring)
    # The first call on a group checks the statement that all shards are equal, too.
    exchanges = ring.size > 1 and (first or not sharing.equal_shards)
    problem: ValueError | None = None
    try:
        options.check()
        _check_rows(x, y, same_rows=same_rows)
        _check_columns(x, y, ids, weights)
        for name, value in scalars.items():
            _check_scalar(name, value, x)
        _check_group(x, ring)
        tiles = backend_for(x.device, _product_dtype(x), sharing.backend)
        _check_workspace(sharing.workspace)
        _check_precision(sharing.precision, precisions, _product_dtype(x))
    except ValueError as error:
        if not exchanges:
            raise
        problem = error
    if problem is not None:
        device = x.device if isinstance(x, Tensor) else torch.device("cpu")
        agree(ring, device, Shard(0, 0, (), (), ()), {}, problem)
    grad = torch.is_grad_enabled()
    tensors = [t if isinstance(t, Tensor) else None for t in (x, y, *scalars.values())]
    # Scalars on a device are read where that adds no wait in later calls: in the first call, and in an exchange that waits anyway.
    waits = first or (exchanges and ring.meeting_device(x.device).type != "cpu")
    shard = Shard(
        rows=len(x),
        documents=len(y),
        wants=[grad and t is not None and t.requires_grad for t in tensors],
        inference=[t is not None and t.is_inference() for t in tensors],
        values=[_value(value, waits=waits) for value in scalars.values()],
    )
    shards = [shard] * ring.size
    if exchanges:
        shards = agree(ring, x.device, shard, _facts(loss, x, ids, weights, sharing, options, shard), None)
        check_values(scalars, shards)
    if sum(each.rows for each in shards) == 0:
        raise ValueError("x has 0 rows over all ranks: a mean needs at least one row; skip the step when there is no data")
    wants = [any(flags) for flags in zip(*(each.wants for each in shards), strict=True)]
    if any(wants):
        _check_inference(("x", "y", *scalars), shards)
        ids = None if ids is None else ids.clone() if ids.is_inference() else ids
    warn_of_small_scale(shard.values[0], x, y)
    dtype = _product_dtype(x)
    return Batch(
        rows=len(x),
        dtype=dtype,
        ids_N=None if ids is None else ids.contiguous(),
        weights_M=None if weights is None else weights.to(accumulator(dtype)).resolve_neg().contiguous(),
        ring=ring,
        lengths=tuple(each.documents for each in shards),
        tiles=tiles,
        compute=_compute_options(sharing, tiles.default_workspace(x.device)),
        needs_grad=NeedsGrad(wants[0] or not wants[1], wants[1]) if any(wants) else None,
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
    if batch.needs_grad is None or any(t.requires_grad for t in (x, *others)):
        return x
    return x.detach().requires_grad_()


def check_number(name: str, value: object, *, low: float = -math.inf, high: float = math.inf) -> None:
    """Raises unless value is a finite number in [low, high]."""
    try:
        valid = isinstance(value, numbers.Real) and math.isfinite(value) and low <= float(value) <= high
    except OverflowError:
        # An integer that no float holds; it has too many digits to be shown.
        raise ValueError(f"{name} has more than 308 digits: must be a finite number") from None
    if not valid:
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


def is_transformed(t: Tensor) -> bool:
    """Return whether t carries a tangent or belongs to a transform such as vmap."""
    return is_functorch_wrapped_tensor(t) or is_legacy_batchedtensor(t) or unpack_dual(t).tangent is not None


def check_tensor(name: str, t: object, meaning: str) -> None:
    """Raise unless t is a dense tensor with values of its own that no function transform has wrapped."""
    if not isinstance(t, Tensor):
        raise ValueError(f"{name} is a {type(t).__name__}: must be a tensor of {meaning}")
    if is_functorch_wrapped_tensor(t):
        raise ValueError(
            f"{name} is inside a transform of torch.func (grad, vjp, jvp, vmap, …), which the tiled losses do not support: use "
            "torch.autograd.grad or .backward() for first derivatives, and the formula in megabatch.reference for everything else"
        )
    if unpack_dual(t).tangent is not None:
        raise ValueError(
            f"{name} is a dual tensor of forward-mode AD, and the tiled losses have reverse-mode derivatives only: use "
            ".backward(), or the formula in megabatch.reference"
        )
    if t.is_nested:
        raise ValueError(
            f"{name} is a nested tensor: must be dense; pass torch.cat({name}.unbind()) or a padded one without padding"
        )
    if t.layout != torch.strided:
        raise ValueError(f"{name} has the layout {t.layout}: must be dense; pass {name}.to_dense()")
    if t.is_meta:
        raise ValueError(f"{name} is on the meta device, where tensors have no values: create it on a CPU or an accelerator")
    if type(t) not in PLAIN_TENSORS and is_traceable_wrapper_subclass(t):
        kind = type(t).__name__
        remedy = (
            f"{name}.to_local() for rows sharded over `group`, {name}.full_tensor() for one value"
            if kind == "DTensor"
            else "that one"
        )
        raise ValueError(f"{name} is a {kind}, which wraps another tensor: must be a plain tensor; pass {remedy}")


def _check_rows(x: Tensor, y: Tensor, *, same_rows: bool) -> None:
    for name, t in (("x", x), ("y", y)):
        check_tensor(name, t, "embeddings")
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
        check_tensor("ids", ids, "integers, one for each row of y")
        if ids.dtype not in ID_DTYPES:
            raise ValueError(f"ids is {ids.dtype}: must be a tensor of integers, one for each row of y, for example of torch.int64")
        if ids.shape != y.shape[:1]:
            raise ValueError(f"ids has shape {tuple(ids.shape)}: must be ({len(y)},), one for each row of y")
        if ids.device != x.device:
            raise ValueError(f"ids is on {ids.device} and x on {x.device}: must be on one device; move it with .to()")
    if weights is not None:
        check_tensor("weights", weights, "floating-point numbers, one for each row of x")
        if not weights.is_floating_point():
            raise ValueError(f"weights is {weights.dtype}: must be a floating-point tensor")
        if weights.shape != x.shape[:1]:
            raise ValueError(f"weights has shape {tuple(weights.shape)}: must be ({len(x)},), one for each row of x")
        if weights.device != x.device:
            raise ValueError(f"weights is on {weights.device} and x on {x.device}: must be on one device; move it with .to()")
        if weights.requires_grad:
            raise ValueError("weights requires a gradient: the loss has none for it; pass weights.detach()")


def _check_scalar(name: str, value: Tensor | float, x: Tensor) -> None:
    if not isinstance(value, Tensor):
        check_number(name, value)
        largest = torch.finfo(accumulator(_product_dtype(x))).max
        if abs(value) > largest:
            raise ValueError(f"{name}={value!r}: must be within ±{largest:.3g}, what logits of {x.dtype} embeddings can hold")
        return
    check_tensor(name, value, "one number")
    if value.numel() != 1 or not value.is_floating_point():
        raise ValueError(f"{name} has shape {tuple(value.shape)} and is {value.dtype}: must be one floating-point number")


def _check_group(x: Tensor, ring: Ring) -> None:
    if ring.size > 1 and x.device.type not in ring.device_types:
        raise ValueError(
            f"x is on {x.device}, and the backends of group exchange tensors on {' and '.join(ring.device_types)}: move the "
            "embeddings there, or initialise the process group with a backend for this device"
        )


def _check_inference(names: Sequence[str], shards: Sequence[Shard]) -> None:
    """Raise if a gradient is wanted and a rank's tensor cannot be saved for it."""
    for rank, shard in enumerate(shards):
        for name, inference in zip(names, shard.inference, strict=True):
            if inference:
                where = f" on rank {rank}" if len(shards) > 1 else ""
                raise ValueError(
                    f"{name}{where} was made in inference mode and cannot take part in a gradient: make it under torch.no_grad() "
                    f"instead, or pass {name}.clone()"
                )


def _value(value: Tensor | float, *, waits: bool) -> float | None:
    """The scalar's value, or None where reading it would wait for a device and `waits` does not allow that."""
    if not isinstance(value, Tensor):
        return float(value)
    if type(value) in PLAIN_TENSORS and (value.device.type == "cpu" or (waits and can_wait(value.device))):
        return value.item()
    return None


def _facts(
    loss: str, x: Tensor, ids: Tensor | None, weights: Tensor | None, sharing: Sharing, options: Options, shard: Shard
) -> dict[str, object]:
    """What must be equal on every rank, by the names that an error gives it."""
    facts: dict[str, object] = {
        "loss": loss,
        "width of the embeddings": x.shape[1],
        "dtype of the embeddings": _product_dtype(x),
        "device of the embeddings": x.device.type,
        **vars(options),
        "dtype of ids": None if ids is None else ids.dtype,
        "weights": "None" if weights is None else "given",
        "precision": sharing.precision,
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "equal_shards": sharing.equal_shards,
    }
    if sharing.equal_shards:
        facts |= {
            "number of rows of x": shard.rows,
            "number of rows of y": shard.documents,
            "requires_grad of x, y and scalars": shard.wants,
        }
    return facts


def _check_workspace(workspace: int | None) -> None:
    if workspace is not None and (not isinstance(workspace, int) or isinstance(workspace, bool) or workspace <= 0):
        raise ValueError(f"workspace={workspace!r}: must be a positive number of bytes of working memory, for example 64 * 2**20")


def _check_precision(precision: str, precisions: Sequence[str], dtype: torch.dtype) -> None:
    if precision not in precisions:
        about = f"{EIGHT_BITS!r} is for bf16, the others for fp32" if EIGHT_BITS in precisions else "it is about fp32 products only"
        raise ValueError(f"precision={precision!r}: must be one of {', '.join(map(repr, precisions))}; {about}")
    if precision == EIGHT_BITS and dtype != torch.bfloat16:
        raise ValueError(
            f"precision={precision!r} and x is {str(dtype).removeprefix('torch.')}: must be bfloat16 for it; pass x.bfloat16(), "
            "or call the loss under torch.autocast in bfloat16"
        )


def _compute_options(sharing: Sharing, default_workspace: int) -> ComputeOptions:
    workspace = default_workspace if sharing.workspace is None else sharing.workspace
    return (
        ComputeOptions(workspace, int8_similarities=True)
        if sharing.precision == EIGHT_BITS
        else ComputeOptions(workspace, sharing.precision)
    )


def _product_dtype(t: Tensor) -> torch.dtype:
    """The dtype that a matrix product would read t in: autocast is honoured, as the caller's explicit wish."""
    if t.dtype != torch.float64 and torch.is_autocast_enabled(t.device.type):
        return torch.get_autocast_dtype(t.device.type)
    return t.dtype
