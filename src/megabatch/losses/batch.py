"""The batch of a loss over all ranks: its inputs are checked, the ranks agree on it, and its pairs are ranked for diagnostics.

Ranks must agree before they exchange embeddings: a difference would hang or abort the process group later. One exchange of a few
integers, of the same size whatever a rank passes, compares a digest of the arguments. Only if it shows a difference, a second
exchange carries the values themselves, so that every rank raises the same error with all of them.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypedDict
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from ..ring import Group, Ring
from ..tiles import backend_for
from ..tiles.contract import ComputeOptions, NeedsGrad, Ranking, Tiles, accumulator
from .checks import (
    PLAIN_TENSORS,
    can_read,
    check_embeddings,
    check_group,
    check_ids,
    check_inference,
    check_precision,
    check_scalar,
    check_weights,
    check_workspace,
    outside_inference,
    product_dtype,
    warn_of_small_scale,
)

# Characters of one argument that an error message shows at most.
FACT_CHARACTERS = 100
# Ranks, and different values among ranks, that an error message lists at most.
LISTED = 8
# Learnable scalars are equal up to rounding: exp() of the same parameter may differ between devices by a few ulp of fp32.
SCALAR_TOLERANCE = 1e-5
# Sent instead of a digest, which is never negative, by a rank whose input is wrong.
PROBLEM = -1

_accumulating: ContextVar[bool] = ContextVar("accumulating", default=False)
_for_graph: ContextVar[bool] = ContextVar("for_graph", default=False)
_groups: WeakSet[dist.ProcessGroup] = WeakSet()
_called_alone = False


class Inputs(NamedTuple):
    """The tensors of one call. scalars: the scale, and the bias if the loss has one, by name. queue: negatives of earlier steps.
    ids_name: what the loss calls its ids."""

    x: Tensor
    y: Tensor
    scalars: Mapping[str, Tensor | float]
    ids: Tensor | None
    weights: Tensor | None
    queue: Tensor | None = None
    ids_name: str = "ids"


class SharingOptions(TypedDict, total=False):
    """Keyword arguments of every loss, for type checkers. `clip_loss` documents them."""

    group: Group
    equal_shards: bool
    workspace: int | None


class ExecutionOptions(SharingOptions, total=False):
    """Those of the losses that have kernels."""

    backend: str | None
    precision: str


@dataclass(frozen=True)
class Execution:
    """How a loss is computed: arguments alone decide, never the environment of the process."""

    group: Group
    equal_shards: bool
    backend: str | None
    workspace: int | None
    precision: str
    int8_backward: bool = False


class Rules(Protocol):
    """The options of one loss that say which pairs count, and how. Its fields must be equal on every rank."""

    @property
    def loss_name(self) -> str:
        """The name of the function, for error messages."""

    @property
    def same_rows(self) -> bool:
        """Whether x and y must have equally many rows."""

    def check(self) -> None:
        """Raise a ValueError for a wrong value."""


@dataclass(frozen=True)
class LossBatch:
    """The batch, apart from its embeddings.

    rows: this rank's rows of x; dtype: that in which the products read the embeddings.
    ids_N, weights_M: this rank's, or None; lengths: each rank's rows of y.
    needs_grad: the gradients that some rank needs (for scale and bias alone, x's product is computed); None if no rank needs any.
    row_lengths, queue_lengths: each rank's rows of x and of the queue.
    needs_scale_grad: whether some rank's scale needs a gradient.
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
    row_lengths: tuple[int, ...] = ()
    queue_lengths: tuple[int, ...] = ()
    needs_scale_grad: bool = True

    @property
    def acc(self) -> torch.dtype:
        """The dtype of sums and gradients."""
        return accumulator(self.dtype)

    def read(self, embeddings: Tensor) -> Tensor:
        """Return the embeddings as the tiles read them: detached, contiguous and in `dtype`."""
        if embeddings.dtype == self.dtype and embeddings.is_contiguous() and not embeddings.is_neg():
            return embeddings.detach()
        # Kernels read memory as it is, so a lazy negation (a view such as torch.imag(z.conj())) has to be carried out.
        return embeddings.detach().to(self.dtype).resolve_neg().contiguous()

    def scalar(self, value: Tensor | float, x: Tensor) -> Tensor:
        """Return the scale or bias as a 0-dimensional tensor on x's device, connected to the caller's tensor in autograd."""
        if isinstance(value, Tensor):
            if value.ndim == 0 and value.dtype == self.acc and value.device == x.device:
                return value
            return value.to(x.device, self.acc).reshape(())
        return x.new_full((), value, dtype=self.acc)

    def join_backward(self, x: Tensor, *others: Tensor) -> Tensor:
        """Return x; if nothing here requires a gradient but other ranks wait for this one in backward, one that requires it."""
        if self.needs_grad is None or any(t.requires_grad for t in (x, *others)):
            return x
        return x.detach().requires_grad_()

    def totals(self, *sums: Tensor) -> tuple[Sequence[Tensor], Tensor | float]:
        """Return the sums over all ranks, and the total weight of all rows (a float if no exchange is needed)."""
        if self.ring.size == 1:
            return sums, float(self.rows) if self.weights_M is None else self._not_zero(self.weights_M.sum())
        weight = sums[0].new_full((), self.rows) if self.weights_M is None else self.weights_M.sum()
        every = self.ring.sum(torch.stack((*sums, weight)))
        return every[:-1].unbind(), self._not_zero(every[-1])

    def _not_zero(self, weight: Tensor) -> Tensor:
        """Return the total weight; raise if it is zero, where that can be read without synchronising a device."""
        if weight.is_cpu and not weight:
            raise ValueError("weights are zero in all rows of all ranks: a mean needs a positive one; skip the step")
        return weight


def prepare(
    inputs: Inputs,
    rules: Rules,
    execution: Execution,
    *,
    check_more: Callable[[], Mapping[str, object]] = dict,
    eager_only: str | None = None,
) -> LossBatch:
    """Return the batch, checked on this rank and agreed on by all; raise a ValueError on all ranks if any rank's input is wrong.

    check_more: checks the inputs that this loss alone has; returns what of them must be equal on every rank, by name.
    eager_only: why only the eager tiles can compute this loss, if so.
    """
    _check_not_accumulating()
    x, y, scalars, ids, weights = inputs[:5]
    ring = Ring.of(execution.group)
    first = _is_first_call(ring)
    # The first call on a group also checks the claim that all shards are equal.
    exchanges = ring.size > 1 and (first or not execution.equal_shards)
    problem: Exception | None = None
    try:
        rules.check()
        check_embeddings(x, y, same_rows=rules.same_rows)
        check_ids(ids, x, y, inputs.ids_name)
        if ids is None and getattr(rules, "duplicates", None) == "positive":
            raise ValueError("duplicates='positive' and ids is None: pass ids, which say which pairs are further positives")
        check_weights(weights, x)
        for name, value in scalars.items():
            check_scalar(name, value, x)
        check_group(x, ring)
        more = check_more()
        if eager_only is not None and execution.backend == "fused":
            raise ValueError(f"backend='fused': {eager_only}; pass backend=None or 'eager'")
        tiles = backend_for(x.device, product_dtype(x), execution.backend if eager_only is None else "eager")
        check_workspace(execution.workspace)
        check_precision(execution.precision, execution.int8_backward, product_dtype(x))
    except Exception as error:
        if not exchanges:
            raise
        problem = error
    if problem is not None:
        device = x.device if isinstance(x, Tensor) else torch.device("cpu")
        _agree(ring, device, RankSummary(0, 0, (), (), (), 0), {}, problem)
    summary = _summarise(inputs, waits=first or (exchanges and ring.meeting_device(x.device).type != "cpu"))
    summaries = [summary] * ring.size
    if exchanges:
        summaries = _agree(ring, x.device, summary, _facts(inputs, rules, execution, summary, more), None)
        _check_scalars_agree(scalars, summaries)
    _record_call(ring)
    if sum(each.rows for each in summaries) == 0:
        raise ValueError("x has 0 rows over all ranks: a mean needs at least one row; skip the step when there is no data")
    requires_grad = [any(flags) for flags in zip(*(each.requires_grad for each in summaries), strict=True)]
    if any(requires_grad):
        check_inference(("x", "y", *scalars), [each.inference for each in summaries])
        ids = outside_inference(ids)
    warn_of_small_scale(summary.values[0], x, y)
    dtype = product_dtype(x)
    workspace = tiles.default_workspace(x.device) if execution.workspace is None else execution.workspace
    return LossBatch(
        rows=len(x),
        dtype=dtype,
        ids_N=None if ids is None else ids.contiguous(),
        weights_M=None if weights is None else weights.to(accumulator(dtype)).resolve_neg().contiguous(),
        ring=ring,
        lengths=tuple(each.documents for each in summaries),
        tiles=tiles,
        compute=ComputeOptions(workspace, execution.precision, execution.int8_backward, is_for_graph()),
        needs_grad=NeedsGrad(requires_grad[0] or not requires_grad[1], requires_grad[1]) if any(requires_grad) else None,
        row_lengths=tuple(each.rows for each in summaries),
        queue_lengths=tuple(each.queued for each in summaries),
        needs_scale_grad=requires_grad[2],
    )


class SharedCall(NamedTuple):
    """One call of a loss on all ranks: its ring, every rank's summary, and which of the named tensors need a gradient anywhere."""

    ring: Ring
    summaries: list[RankSummary]
    requires_grad: tuple[bool, ...]


def agree(
    group: Group,
    equal_shards: bool,
    device: torch.device,
    names: Sequence[str],
    describe: Callable[[Ring, bool], tuple[RankSummary, dict[str, object]]],
) -> SharedCall:
    """Return the call, agreed on by all ranks, of a loss that checks its own inputs; `prepare` is for two matrices of embeddings.

    names: of the tensors that the summary is about, the scalars last.
    describe(ring, waits): checks this rank's inputs and returns its summary, and what must be equal on every rank by the names that
        an error message uses. `waits`: whether scalars on a device may be read.
    """
    _check_not_accumulating()
    ring = Ring.of(group)
    first = _is_first_call(ring)
    exchanges = ring.size > 1 and (first or not equal_shards)
    try:
        summary, facts = describe(ring, first or (exchanges and ring.meeting_device(device).type != "cpu"))
    except Exception as error:
        if not exchanges:
            raise
        # It raises on every rank what one of them has found.
        _agree(ring, device, RankSummary(0, 0, (), (), ()), {}, error)
        raise
    summaries = [summary] * ring.size
    if exchanges:
        facts = {**facts, "torch.is_grad_enabled()": torch.is_grad_enabled(), "equal_shards": equal_shards}
        if equal_shards:
            facts |= {"number of rows of x": summary.rows, "number of rows of y": summary.documents}
            facts |= {f"requires_grad of {', '.join(names)}": summary.requires_grad}
        facts = {name: str(value)[:FACT_CHARACTERS] for name, value in facts.items()}
        summaries = _agree(ring, device, summary, facts, None)
        _check_scalars_agree(names[len(names) - len(summary.values) :], summaries)
    _record_call(ring)
    if sum(each.rows for each in summaries) == 0:
        raise ValueError("x has 0 rows over all ranks: a mean needs at least one row; skip the step when there is no data")
    requires_grad = tuple(any(flags) for flags in zip(*(each.requires_grad for each in summaries), strict=True))
    if any(requires_grad):
        check_inference(names, [each.inference for each in summaries])
    return SharedCall(ring, summaries, requires_grad)


def summarise(
    rows: int, documents: int, tensors: Sequence[Sequence[Tensor]], scalars: Sequence[Tensor | float], *, waits: bool
) -> RankSummary:
    """Return a rank's summary for `agree`, from groups of tensors and from scalars; for `waits` see `agree`."""
    groups = [*tensors, *([value] if isinstance(value, Tensor) else [] for value in scalars)]
    return RankSummary(
        rows,
        documents,
        [torch.is_grad_enabled() and any(t.requires_grad for t in group) for group in groups],
        [any(t.is_inference() for t in group) for group in groups],
        [_value(value, waits=waits) for value in scalars],
    )


@contextmanager
def refused_while_accumulating() -> Iterator[None]:
    """Context in which the losses raise: inside `accumulate` they would compare samples within one chunk only."""
    token = _accumulating.set(True)
    try:
        yield
    finally:
        _accumulating.reset(token)


def is_accumulating() -> bool:
    """Return whether this is inside `refused_while_accumulating`."""
    return _accumulating.get()


@contextmanager
def computed_for_graph() -> Iterator[None]:
    """Context in which losses choose the kernels that are best in a CUDA graph, for a capture and for the calls before it."""
    token = _for_graph.set(True)
    try:
        yield
    finally:
        _for_graph.reset(token)


def is_for_graph() -> bool:
    """Return whether this is inside `computed_for_graph`."""
    return _for_graph.get()


def _check_not_accumulating() -> None:
    if is_accumulating():
        raise ValueError(
            "a contrastive loss inside accumulate(): every sample would be compared with its own chunk instead of the whole batch, "
            "since accumulation adds no negatives; encode with cached(encoder, chunk=…) and compute the loss of all embeddings"
        )


# --- Agreement between ranks ---


class RankSummary(NamedTuple):
    """What one rank brings to a call of a loss.

    rows, documents: the rows of its x and of its y.
    requires_grad: which of x, y and the scalars need a gradient; inference: which of them were made in inference mode.
    values: of the scalars; None for one that was not read, since reading it would synchronise the device.
    queued: the rows of its queue.
    """

    rows: int
    documents: int
    requires_grad: Sequence[bool]
    inference: Sequence[bool]
    values: Sequence[float | None]
    queued: int = 0


def _is_first_call(ring: Ring) -> bool:
    """Return whether no loss has agreed before on the ring's group (without a group: in this process).

    All ranks get the same answer, because every call of a loss on a group is a call on all of its ranks.
    """
    return not _called_alone if ring.group is None else ring.group not in _groups


def _record_call(ring: Ring) -> None:
    global _called_alone
    if ring.group is None:
        _called_alone = True
    else:
        _groups.add(ring.group)


def _summarise(inputs: Inputs, *, waits: bool) -> RankSummary:
    """Return this rank's summary.

    waits: whether scalars on a device may be read. That is so where it adds no synchronisation in later calls: in the first call,
    and in an exchange that synchronises anyway.
    """
    tensors = [t if isinstance(t, Tensor) else None for t in (inputs.x, inputs.y, *inputs.scalars.values())]
    return RankSummary(
        rows=len(inputs.x),
        documents=len(inputs.y),
        requires_grad=[torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors],
        inference=[t is not None and t.is_inference() for t in tensors],
        values=[_value(value, waits=waits) for value in inputs.scalars.values()],
        queued=0 if inputs.queue is None else len(inputs.queue),
    )


def _value(value: Tensor | float, *, waits: bool) -> float | None:
    """Return the scalar's value, or None if reading it would synchronise a device and `waits` does not allow that."""
    if not isinstance(value, Tensor):
        return float(value)
    if type(value) in PLAIN_TENSORS and (value.device.type == "cpu" or (waits and can_read(value.device))):
        return value.item()
    return None


def _facts(
    inputs: Inputs, rules: Rules, execution: Execution, summary: RankSummary, more: Mapping[str, object]
) -> dict[str, object]:
    """Return what must be equal on every rank, by the names that an error message uses."""
    facts: dict[str, object] = {
        "loss": rules.loss_name,
        "width of the embeddings": inputs.x.shape[1],
        "dtype of the embeddings": product_dtype(inputs.x),
        "device of the embeddings": inputs.x.device.type,
        **vars(rules),
        f"dtype of {inputs.ids_name}": None if inputs.ids is None else inputs.ids.dtype,
        "weights": "None" if inputs.weights is None else "given",
        "precision": execution.precision,
        "int8_backward": execution.int8_backward,
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "equal_shards": execution.equal_shards,
        **more,
    }
    if execution.equal_shards:
        facts |= {
            "number of rows of x": summary.rows,
            "number of rows of y": summary.documents,
            "number of rows of queue": summary.queued,
            "requires_grad of x, y and scalars": summary.requires_grad,
        }
    return {name: str(value)[:FACT_CHARACTERS] for name, value in facts.items()}


def _agree(
    ring: Ring, device: torch.device, summary: RankSummary, facts: dict[str, object], problem: Exception | None
) -> list[RankSummary]:
    """Return every rank's summary. Raise the same ValueError on every rank if one has a problem or if the ranks' facts differ."""
    gathered = [_decode(numbers, summary) for numbers in ring.gather(_encode(summary, facts, problem), device)]
    digests = {digest for digest, _ in gathered}
    if len(digests) > 1 or PROBLEM in digests:
        raise ValueError(_explain(ring, device, facts, problem)) from problem
    return [summary for _, summary in gathered]


def _check_scalars_agree(names: Iterable[str], summaries: Sequence[RankSummary]) -> None:
    """Raise a ValueError if the ranks passed different values of a scalar, among those that were read."""
    for index, name in enumerate(names):
        values = {rank: value for rank, summary in enumerate(summaries) if (value := summary.values[index]) is not None}
        first = next(iter(values.values()), 0.0)
        if any(not _close(value, first) for value in values.values()):
            raise ValueError(
                f"{_by_rank(name, values)}: it must have one value on every rank, since all ranks compute one loss; let DDP or "
                "FSDP hold a learnable one, or broadcast it before the first step"
            )


def _close(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=SCALAR_TOLERANCE)


def _encode(summary: RankSummary, facts: dict[str, object], problem: Exception | None) -> list[int]:
    # Two scalars and four tensors at most: every loss sends equally many numbers, so that ranks with different losses can compare.
    values = [*summary.values, None, None][:2]
    bits = [0 if value is None else struct.unpack("q", struct.pack("d", value))[0] for value in values]
    digest = PROBLEM if problem is not None else zlib.crc32(json.dumps(facts).encode())
    masks = [sum(flag << bit for bit, flag in enumerate(flags)) for flags in (summary.requires_grad, summary.inference)]
    return [digest, summary.rows, summary.documents, summary.queued, *masks, *(value is not None for value in values), *bits]


def _decode(numbers: Sequence[int], own: RankSummary) -> tuple[int, RankSummary]:
    """Return a rank's digest and summary. own: this rank's summary, which says how many tensors and scalars the loss has."""
    digest, rows, documents, queued, *masks = numbers[:6]
    scalars = numbers[6:]
    values = [
        struct.unpack("d", struct.pack("q", bits))[0] if known else None
        for known, bits in zip(scalars[:2], scalars[2:], strict=True)
    ]
    requires_grad, inference = ([bool(mask >> bit & 1) for bit in range(len(own.requires_grad))] for mask in masks)
    return digest, RankSummary(rows, documents, requires_grad, inference, values[: len(own.values)], queued)


def _explain(ring: Ring, device: torch.device, facts: dict[str, object], problem: Exception | None) -> str:
    """Return the message that every rank raises: the ranks' own errors, or the facts in which they differ."""
    text = None if problem is None else str(problem)
    if not isinstance(problem, (ValueError, type(None))):
        text = f"{type(problem).__name__}: {text}"
    reports = ring.gather_objects((text, facts), device)
    problems = {rank: text for rank, (text, _) in enumerate(reports) if text is not None}
    if problems:
        return "; ".join(f"{ranks}: {text}" for text, ranks in _grouped(problems))
    facts_by_rank = [other for _, other in reports]
    # Different losses have different options, and only ranks that claim equal shards report row counts.
    common = [name for name in facts_by_rank[0] if all(name in other for other in facts_by_rank)]
    differing = [name for name in common if len({other[name] for other in facts_by_rank}) > 1]
    sentences = [_by_rank(name, dict(enumerate(other[name] for other in facts_by_rank))) for name in differing]
    return f"{', '.join(sentences)}: must be equal on every rank of the group"


def _by_rank(name: str, values: Mapping[int, object]) -> str:
    return f"{name} is " + " and ".join(f"{value} on {ranks}" for value, ranks in _grouped(values))


def _grouped(values: Mapping[int, object]) -> list[tuple[object, str]]:
    """Return the different values, each with a text of the ranks that have it; at most LISTED of each."""
    groups: dict[object, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    texts = []
    for value, ranks in list(groups.items())[:LISTED]:
        more = f" and {len(ranks) - LISTED} more" if len(ranks) > LISTED else ""
        texts.append((value, f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:LISTED]))}{more}"))
    return texts


# --- Diagnostics ---


class Diagnostics(NamedTuple):
    """How each of this rank's pairs ranks in the whole batch: one entry for each row of x, detached.

    positive: similarity x·y of the pair.
    row_rank: how many of the row's negatives, over all ranks, are at least as similar as the positive: 0 is best. Ties count
        against the positive, so that a collapsed model does not look perfect. Negatives that `drop_above` leaves out are counted.
    row_hardest: similarity of the row's hardest negative (-inf if it has none).
    column_rank, column_hardest: the same for the pair's row of y against all rows of x; None for a loss of one direction.
    """

    positive: Tensor
    row_rank: Tensor
    row_hardest: Tensor
    column_rank: Tensor | None
    column_hardest: Tensor | None

    def recall(self, k: int = 1) -> tuple[Tensor, Tensor | None]:
        """Return recall@k of rows and of columns: the share whose positive is among the k most similar."""
        shares = (None if rank is None else (rank < k).float().mean() for rank in (self.row_rank, self.column_rank))
        rows, columns = shares
        assert rows is not None
        return rows, columns


def diagnose(positive_M: Tensor, rows: Ranking, columns: Ranking | None) -> Diagnostics:
    """Return the diagnostics of this rank's pairs, without the rows of y that have no row of x."""
    column = (None, None) if columns is None else (c[: len(positive_M)] for c in columns)
    return Diagnostics(positive_M, *rows, *column)
