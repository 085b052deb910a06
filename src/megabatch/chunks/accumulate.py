"""Losses that are means over samples, at any batch: chunk by chunk, with the gradient of the mean over all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..losses.inputs import refused_while_accumulating
from ..ring import Group, Ring
from . import attempt, rows
from .cached import check_chunk
from .ddp_fsdp import explaining_single_rows, fsdp_modules, least_rows, meeting_rings, no_sync, submodules
from .generators import host_sources
from .rng_state import Replay, buffers_of, current_accelerator, states_of

# Parts of a mean over samples differ by rounding (a few percent in bf16), those of a contrastive loss by half and more.
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
    """A callable with the loss's signature that runs forward and backward in chunks and returns the mean over the whole batch.

    loss: from a batch to its mean loss, through `model`; its tensors are split along their first dimension.
    model: the module whose gradients are collected, wrapped in DDP or sharded with fully_shard where there are several processes;
        gradients are exchanged once, with the last chunk.
    chunk: rows that go through at once.
    count: from the same arguments to the number of terms in that mean; None: the rows. For language models, the tokens that have a
        label: chunks with more of them weigh more, and the mean is that of all tokens on all ranks.
    scaler: multiplies the loss before backward, for fp16.
    group: where the model is in no wrapper that exchanges gradients: None for this process alone, or the ranks over which you
        average them yourself afterwards.
    check: at the first call, try on a few rows that the loss is a mean over samples; it costs two small forwards.

    Afterwards the gradients are those of the large batch: clip, step, average weights and advance schedules once, as after any
    backward. A contrastive loss is refused: its samples need each other, so use `cached`.

    >>> import torch, megabatch
    >>> model = torch.nn.Linear(8, 3)
    >>> step = megabatch.accumulate(lambda x, y: torch.nn.functional.cross_entropy(model(x), y), model, chunk=16)
    >>> mean = step(torch.randn(100, 8), torch.randint(3, (100,)))
    """
    return Accumulated(loss, model, check_chunk(chunk), count, scaler, group, check)


class Accumulated:
    """What `accumulate` returns. `chunk` may have become smaller than asked for."""

    def __init__(
        self,
        loss: Callable[..., Tensor],
        model: nn.Module,
        chunk: int,
        count: Callable[..., Tensor | int] | None,
        scaler: torch.amp.GradScaler | None,
        group: Group,
        check: bool,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model is a {type(model).__name__}: must be the Module whose gradients are collected")
        self.chunk = chunk
        self._loss, self._model = loss, model
        self._count = count or (lambda *args, **kwargs: rows.rows_of((args, kwargs)))
        self._scaler = scaler
        self._group = group
        self._unchecked = check

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.over(rows.split((args, kwargs), self.chunk, least_rows([self._model])))

    def over(self, pieces: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> Tensor:
        """The same for micro-batches that come apart already, each as (args, kwargs): padded to different lengths, for example."""
        pieces = list(pieces)
        ring = self._ring()
        counts = _numbers([self._count(*args, **kwargs) for args, kwargs in pieces])
        probe = self._probe(pieces)
        facts = ring.gather([sum(counts), len(pieces), probe is not None], self._device())
        total = sum(each[0] for each in facts)
        if any(each[1] == 0 for each in facts):
            raise ValueError("a rank has no micro-batch at all: pass it one without rows, so that it takes part in the exchange")
        if total == 0:
            raise ValueError("the batch has 0 terms to average over, on all ranks: skip the step when there is no data")
        if probe is not None and all(each[2] for each in facts):
            self._check_mean(probe)
        if meeting_rings([self._model]):
            # Ranks meet in every forward, so all of them run as many.
            pieces += [rows.empty(pieces[-1])] * (max(each[1] for each in facts) - len(pieces))
            counts += [0] * (len(pieces) - len(counts))
        else:
            # A mean over nothing is not a number; but a rank without any terms still takes part in the exchange.
            some = [index for index, terms in enumerate(counts) if terms] or [len(pieces) - 1]
            pieces, counts = [pieces[index] for index in some], [counts[index] for index in some]
        return self._accumulate(pieces, [terms / total for terms in counts], ring)

    def __repr__(self) -> str:
        name = getattr(self._loss, "__name__", type(self._loss).__name__)
        return f"accumulate({name}, chunk={self.chunk})"

    def stop_keeping(self) -> bool:
        return False

    def _accumulate(self, pieces: Sequence[Any], shares: Sequence[float], ring: Ring) -> Tensor:
        mean = torch.zeros((), device=self._device())
        deferred = self._take_part()
        with no_sync(self._model) if deferred else nullcontext(), _Forwards(self._model) as forwards:
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
        taking_part = attempt.current.get()
        if taking_part is not None:
            # Other ranks may not have come this far.
            taking_part.afterwards[id(mean)] = lambda: ring.sum(mean)
            return mean
        return ring.sum(mean)

    def _take_part(self) -> bool:
        """Whether this is an attempt that exchanges gradients itself, once every rank has them."""
        taking_part = attempt.current.get()
        if taking_part is None:
            return False
        ddp = self._model if isinstance(self._model, DistributedDataParallel) else None
        taking_part.join(self, meeting_rings([self._model]), ddp)
        taking_part.starts.append(Replay([], buffers_of(submodules([self._model]))))
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
        """A few rows whole and in halves, for the check; None if there are too few or it has been done."""
        if not self._unchecked or not pieces or rows.rows_of(pieces[0]) < 2:
            return None
        whole = rows.split(pieces[0], min(4, rows.rows_of(pieces[0]) // 2 * 2))[0]
        halves = rows.split(whole, rows.rows_of(whole) // 2)
        counts = _numbers([self._count(*args, **kwargs) for args, kwargs in halves])
        return [whole, *halves] if all(counts) else None

    def _check_mean(self, probe: list[Any]) -> None:
        """Raises if the loss of some rows is not the mean of the losses of its parts."""
        self._unchecked = False
        replay = Replay([torch.device("cpu"), *current_accelerator()], [], sources=states_of(host_sources()))
        with torch.no_grad(), replay.again(), _evaluating(self._model), refused_while_accumulating():
            whole, *halves = (float(_checked(self._loss(*args, **kwargs))) for args, kwargs in probe)
        terms = _numbers([self._count(*args, **kwargs) for args, kwargs in probe[1:]])
        parts = sum(n * half for n, half in zip(terms, halves, strict=True)) / sum(terms)
        if not math.isclose(whole, parts, rel_tol=COUPLED):
            raise ValueError(
                f"the loss is no mean over samples: it is {whole:.4g} for {rows.rows_of(probe[0])} rows and {parts:.4g} as the "
                "mean of their halves. If samples are compared with each other (a contrastive loss), accumulation adds no "
                "negatives: encode with cached(encoder, chunk=…) and take the loss of all embeddings. If it averages over "
                "something else than rows, pass count=…; if it is random also in eval mode, pass check=False"
            )


class _Forwards(AbstractContextManager["_Forwards"]):
    """Sees whether the loss runs the forward of the DDP model: without it, its backward exchanges nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._ddp = model if isinstance(model, DistributedDataParallel) and Ring(model.process_group).size > 1 else None
        self._seen = False
        self._handles: list[Any] = []

    def __enter__(self) -> _Forwards:
        if self._ddp is not None:
            # Both: the first sees a call, the second also ddp.forward(…).
            self._handles = [module.register_forward_pre_hook(self._see) for module in (self._ddp, self._ddp.module)]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def check(self) -> None:
        """Raise a ValueError if no forward of the DDP model has been seen since the last check."""
        if self._ddp is not None and not self._seen:
            raise ValueError(
                "the loss does not call the DDP model that accumulate() was given, so that its gradients would not be exchanged "
                "and ranks would train different weights: call the DDP model in the loss, not the module inside it"
            )
        self._seen = False

    def _see(self, module: nn.Module, args: Any) -> None:
        self._seen |= module is self._ddp or DistributedDataParallel._active_ddp_module is self._ddp


def _checked(value: object) -> Tensor:
    """The value of the loss, if it is one number."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return value
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ValueError(f"the loss returned {what}: must be one number, the mean over its samples, as a tensor without dimensions")


def _numbers(counts: Sequence[Tensor | int]) -> list[int]:
    """The counts as integers, with one wait for the device."""
    if any(isinstance(count, Tensor) for count in counts):
        counts = torch.stack([torch.as_tensor(count) for count in counts]).tolist()
    return [int(count) for count in counts]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, each of its modules back in its own afterwards."""
    with ExitStack() as restore:
        for module in model.modules():
            restore.callback(setattr, module, "training", module.training)
        model.eval()
        yield
