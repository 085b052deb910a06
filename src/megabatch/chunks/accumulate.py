"""Gradient accumulation for losses that are means over samples: chunk by chunk, with the gradient of the mean over the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..losses.batch import refused_while_accumulating
from ..ring import Group, Ring
from . import rows
from .cached import check_chunk
from .ddp_fsdp import explaining_single_rows, fsdp_modules, least_rows, meeting_rings, no_sync, submodules
from .oom import current_attempt
from .rng_state import ForwardState, buffers_of, current_accelerator, host_sources, states_of

# Relative difference between the loss of some rows and the mean of its halves from which on samples depend on each other: for a
# mean over samples it is rounding (a few percent in bf16), for a contrastive loss a half and more.
COUPLED = 0.2


def accumulate(
    loss: Callable[..., Tensor],
    model: nn.Module,
    chunk: int,
    *,
    count: Callable[..., Tensor | int] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    group: Group = ...,
    check: bool = True,
) -> Accumulated:
    """Return a callable with the loss's signature that runs forward and backward in chunks and returns the mean over the batch.

    loss: computes the mean loss of a batch with `model`; the tensors among its arguments are split along their first dimension.
    model: the module whose gradients are accumulated; with several processes, wrapped in DDP or sharded with fully_shard.
        Gradients are exchanged once, with the last chunk.
    chunk: rows of one forward and backward.
    count: computes the number of terms in that mean from the same arguments; None counts rows. For language models, return the
        number of tokens with a label: then the result is the mean over all tokens on all ranks.
    scaler: multiplies the loss before backward, for fp16.
    group: only for a model without such a wrapper: None for this process alone, or the ranks over which you average the
        gradients yourself afterwards.
    check: verify with a few rows, at the first call, that the loss is a mean over samples; this costs three small forwards.

    Afterwards the gradients are those of the whole batch: clip, step, average weights and advance schedules once, as after any
    backward. A contrastive loss is refused because it compares samples with each other: use `cached`.

    >>> import torch, megabatch
    >>> model = torch.nn.Linear(8, 3)
    >>> step = megabatch.accumulate(lambda x, y: torch.nn.functional.cross_entropy(model(x), y), model, chunk=16)
    >>> mean = step(torch.randn(100, 8), torch.randint(3, (100,)))
    """
    return Accumulated(loss, model, AccumulateOptions(check_chunk(chunk), count, scaler, group, check))


@dataclass(frozen=True)
class AccumulateOptions:
    """The options of `accumulate`."""

    chunk: int
    count: Callable[..., Tensor | int] | None
    scaler: torch.amp.GradScaler | None
    group: Group
    check: bool


class Accumulated:
    """The callable that `accumulate` returns. chunk: the rows of a chunk, fewer than requested if memory ran out."""

    def __init__(self, loss: Callable[..., Tensor], model: nn.Module, options: AccumulateOptions) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model is a {type(model).__name__}: must be the Module whose gradients are accumulated")
        self.chunk, self.unit = options.chunk, "chunk"
        self._loss, self._model = loss, model
        self._count = options.count or (lambda *args, **kwargs: rows.rows_of((args, kwargs)))
        self._scaler = options.scaler
        self._group = options.group
        self._needs_check = options.check

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.over(rows.split((args, kwargs), self.chunk, least_rows([self._model])))

    def over(self, pieces: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> Tensor:
        """Return the mean over separate micro-batches, each as (args, kwargs): padded to different lengths, for example."""
        pieces = list(pieces)
        ring = self._ring()
        counts = _numbers([self._count(*args, **kwargs) for args, kwargs in pieces])
        probe = self._probe(pieces)
        reports = ring.gather([sum(counts), len(pieces), probe is not None], self._device())
        total = sum(each[0] for each in reports)
        if any(each[1] == 0 for each in reports):
            raise ValueError("a rank has no micro-batch at all: pass one with 0 rows, so that it takes part in the exchange")
        if total == 0:
            raise ValueError("the batch has 0 terms to average over, on all ranks: skip the step when there is no data")
        if probe is not None and all(each[2] for each in reports):
            self._check_mean(probe)
        if meeting_rings([self._model]):
            # Ranks communicate in every forward, so all of them must run equally many.
            pieces += [rows.empty(pieces[-1])] * (max(each[1] for each in reports) - len(pieces))
            counts += [0] * (len(pieces) - len(counts))
        else:
            # A mean over 0 terms is NaN, so such pieces are skipped; a rank without any terms still takes part in the exchange.
            nonempty = [index for index, terms in enumerate(counts) if terms] or [len(pieces) - 1]
            pieces, counts = [pieces[index] for index in nonempty], [counts[index] for index in nonempty]
        return self._accumulate(pieces, [terms / total for terms in counts], ring)

    def __repr__(self) -> str:
        name = getattr(self._loss, "__name__", type(self._loss).__name__)
        return f"accumulate({name}, chunk={self.chunk})"

    def stop_keeping(self) -> bool:
        return False

    def _accumulate(self, pieces: Sequence[Any], shares: Sequence[float], ring: Ring) -> Tensor:
        mean = torch.zeros((), device=self._device())
        deferred = self._join_attempt()
        with no_sync(self._model) if deferred else nullcontext(), _DdpForwards(self._model) as forwards:
            for index, (piece, share) in enumerate(zip(pieces, shares, strict=True)):
                last = index == len(pieces) - 1
                with nullcontext() if last or deferred else no_sync(self._model), refused_while_accumulating():
                    with explaining_single_rows([self._model], piece, pieces):
                        value = _checked(self._loss(*piece[0], **piece[1]))
                    forwards.check()
                    # Wrappers average gradients over ranks.
                    weighted = value * (share * ring.size)
                    (weighted if self._scaler is None else self._scaler.scale(weighted)).backward()
                mean = mean.to(torch.promote_types(value.dtype, torch.float32))
                if share:
                    mean += value.detach() * share
        attempt = current_attempt.get()
        if attempt is not None:
            # Other ranks may have failed before this exchange.
            attempt.on_success[id(mean)] = lambda: ring.sum(mean)
            return mean
        return ring.sum(mean)

    def _join_attempt(self) -> bool:
        """Join the attempt of `retry_on_oom`, if any, and return whether it will exchange the gradients itself."""
        attempt = current_attempt.get()
        if attempt is None:
            return False
        ddp = self._model if isinstance(self._model, DistributedDataParallel) else None
        attempt.join(self, meeting_rings([self._model]), ddp)
        attempt.states.append(ForwardState([], buffers_of(submodules([self._model]))))
        return ddp is not None

    def _ring(self) -> Ring:
        if isinstance(self._model, DistributedDataParallel):
            return Ring(self._model.process_group)
        meeting = meeting_rings([self._model])
        if fsdp_modules([self._model]) and self._group is ...:
            if len(meeting) > 1:
                raise ValueError(
                    f"model is sharded over a mesh of {len(meeting)} dimensions: pass the group of all ranks that share the batch, "
                    "for example group=torch.distributed.group.WORLD"
                )
            return meeting[0] if meeting else Ring(None)
        if self._group is ... and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"model is in no wrapper that exchanges gradients, and this is one of {dist.get_world_size()} processes: wrap it "
                "in DistributedDataParallel or shard it with fully_shard, or pass group=None for this process alone"
            )
        return Ring.of(self._group)

    def _device(self) -> torch.device:
        return next((p.device for p in self._model.parameters()), torch.device("cpu"))

    def _probe(self, pieces: Sequence[Any]) -> list[Any] | None:
        """Return a few rows, and their two halves, for the check; None if there are too few rows or if the check was done."""
        if not self._needs_check or not pieces or rows.rows_of(pieces[0]) < 2:
            return None
        whole = rows.split(pieces[0], min(4, rows.rows_of(pieces[0]) // 2 * 2))[0]
        halves = rows.split(whole, rows.rows_of(whole) // 2)
        counts = _numbers([self._count(*args, **kwargs) for args, kwargs in halves])
        return [whole, *halves] if all(counts) else None

    def _check_mean(self, probe: list[Any]) -> None:
        """Raise if the loss of some rows is not the mean of the losses of their halves."""
        self._needs_check = False
        state = ForwardState([torch.device("cpu"), *current_accelerator()], [], sources=states_of(host_sources()))
        with torch.no_grad(), state.replayed(), _eval_mode(self._model), refused_while_accumulating():
            whole, *halves = (float(_checked(self._loss(*args, **kwargs))) for args, kwargs in probe)
        terms = _numbers([self._count(*args, **kwargs) for args, kwargs in probe[1:]])
        parts = sum(n * half for n, half in zip(terms, halves, strict=True)) / sum(terms)
        if not math.isclose(whole, parts, rel_tol=COUPLED):
            raise ValueError(
                f"the loss is not a mean over samples: it is {whole:.4g} for {rows.rows_of(probe[0])} rows and {parts:.4g} as the "
                "mean of their halves. If samples are compared with each other (a contrastive loss), accumulation adds no "
                "negatives: encode with cached(encoder, chunk=…) and compute the loss of all embeddings. If it averages over "
                "something other than rows, pass count=…; if it is random even in eval mode, pass check=False"
            )


class _DdpForwards(AbstractContextManager["_DdpForwards"]):
    """Checks that the loss runs the forward of the DDP model: without it, DDP exchanges nothing in backward."""

    def __init__(self, model: nn.Module) -> None:
        self._ddp = model if isinstance(model, DistributedDataParallel) and Ring(model.process_group).size > 1 else None
        self._seen = False
        self._handles: list[Any] = []

    def __enter__(self) -> _DdpForwards:
        if self._ddp is not None:
            # Hooks on both: that of the DDP model runs for a call, that of its module also for ddp.forward(…).
            self._handles = [module.register_forward_pre_hook(self._record) for module in (self._ddp, self._ddp.module)]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def check(self) -> None:
        """Raise a ValueError if the DDP model ran no forward since the last check."""
        if self._ddp is not None and not self._seen:
            raise ValueError(
                "the loss does not call the DDP model that was passed to accumulate(), so its gradients would not be exchanged "
                "and ranks would train different weights: call the DDP model in the loss, not the module inside it"
            )
        self._seen = False

    def _record(self, module: nn.Module, args: Any) -> None:
        self._seen |= module is self._ddp or DistributedDataParallel._active_ddp_module is self._ddp


def _checked(value: object) -> Tensor:
    """Return the value of the loss; raise a ValueError unless it is a tensor without dimensions."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return value
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ValueError(f"the loss returned {what}: must be one number, the mean over its samples, as a tensor without dimensions")


def _numbers(counts: Sequence[Tensor | int]) -> list[int]:
    """Return the counts as integers, with one synchronisation of the device."""
    if any(isinstance(count, Tensor) for count in counts):
        counts = torch.stack([torch.as_tensor(count) for count in counts]).tolist()
    return [int(count) for count in counts]


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Context with the model in eval mode; afterwards each of its modules has its previous mode."""
    with ExitStack() as restore:
        for module in model.modules():
            restore.callback(setattr, module, "training", module.training)
        model.eval()
        yield
