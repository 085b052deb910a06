"""Squared norms of gradients as they arise: each micro-batch's own, seen before it is added to the others, and the whole one's."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...ring import Group, Ring
from .estimator import Estimate, Micro, Moments, estimate, moments

# Steps that an estimate looks back on: enough to average, few enough for the noise to be that of now.
WINDOW = 50


class Seen(NamedTuple):
    """A micro-batch as a rank saw it: the squared norm of what it added to the gradients, its rows, its share if it was given."""

    square: float
    rows: float
    share: float | None


class NoiseScale:
    """The gradient noise scale of a training, from micro-batches and ranks that there are anyway.

    model: the module that is trained, wrapped in DDP where there are several processes. Its gradients are looked at while backward
        makes them; none is copied.
    window: steps that the estimate looks back on.
    scaler: what the loss is multiplied with before backward, for fp16.
    group: where the model is in no wrapper: None for this process alone, or the ranks over which you average gradients yourself.

    The gradient is to be a mean over the rows of the batch, and samples independent of each other: a contrastive loss is neither.

    >>> model = torch.nn.Linear(8, 1)
    >>> noise = NoiseScale(model, group=None)
    >>> for _ in range(3):
    ...     for _ in range(4):
    ...         with noise.micro_batch(rows=16):
    ...             (model(torch.randn(16, 8)).square().mean() / 4).backward()
    ...     moments = noise.step()
    ...     model.zero_grad()
    >>> noise.estimate().steps
    3
    """

    def __init__(
        self, model: nn.Module, *, window: int = WINDOW, scaler: torch.amp.GradScaler | None = None, group: Group = ...
    ) -> None:
        if window < 1:
            raise ValueError(f"window is {window}: must be at least 1 step; {WINDOW} is usual")
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if not self._parameters:
            raise ValueError("no parameter of the model learns: there is no gradient whose noise could be measured")
        if any(hasattr(p, "full_tensor") for p in self._parameters):
            raise ValueError(
                "the model is sharded (fully_shard): no rank ever holds a gradient of its own rows alone; replicate it with DDP, "
                "or compare gradients of independent batches"
            )
        self._ring = Ring(model.process_group) if isinstance(model, DistributedDataParallel) else Ring.of(group)
        self._scaler = scaler
        # Ended micro-batches with their squares on the device; the rows and share of the one that is open, and its norms so far.
        self._ended: list[tuple[Tensor, float, float | None]] = []
        self._open: tuple[float, float | None] | None = None
        self._norms: dict[int, Tensor] = {}
        self.steps: deque[Moments] = deque(maxlen=window)
        self._hooks = [p.register_hook(self._hook(place)) for place, p in enumerate(self._parameters)]

    @contextmanager
    def micro_batch(self, rows: float, share: float | None = None) -> Iterator[None]:
        """Around the backward of one micro-batch, and only one. rows: samples, or tokens, that its loss is a mean over.

        share: its weight in the gradient of the whole batch, over all ranks, where that is not its part of the rows: 1/4 for each
            of four that are divided by 4, however many rows they have.
        """
        self.open(rows, share)
        try:
            yield
        finally:
            self.close()

    def step(self, norm: float | Tensor | None = None) -> Moments | None:
        """What this step tells; None where it tells nothing: fewer than two micro-batches, or gradients that overflowed.

        Call it on all ranks after the last backward, and before the optimizer and scaler.update(). norm: of the whole gradient,
        unscaled and not yet clipped, as clip_grad_norm_ returns it; without it gradients are looked at once more, and they must
        still be as backward left them.
        """
        self.close()
        # A scaler that is disabled says 1.
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        whole = self._norm() / scale if norm is None else float(norm)
        squares = torch.stack([square for square, _, _ in self._ended]).tolist() if self._ended else []
        mine = [Seen(square, rows, share) for square, (_, rows, share) in zip(squares, self._ended, strict=True)]
        self._ended = []
        # All ranks go by the first one's norm, so that rounding cannot make them disagree.
        facts = self._gather((whole, mine))
        whole, every = facts[0][0], [micro for _, part in facts for micro in part if micro.rows]
        if len(every) < 2:
            return None
        micros = _unweighted(every, scale * self._ring.size)
        if not all(map(math.isfinite, (whole, *(micro.square for micro in micros)))):
            return None
        found = moments(micros, whole**2)
        self.steps.append(found)
        return found

    def estimate(self) -> Estimate:
        """The critical batch by the last steps, with its interval."""
        return estimate(list(self.steps))

    def forget(self) -> None:
        """Leaves out what a step that is begun anew has shown so far."""
        self._open, self._ended = None, []
        self._norms.clear()

    def open(self, rows: float, share: float | None = None) -> None:
        """Begins a micro-batch; one that was open ends. For loops in which a context has no place."""
        self.close()
        if rows < 0 or (share is not None and share <= 0):
            raise ValueError(f"rows is {rows} and share {share}: a micro-batch has rows, and a share above 0")
        self._open = (rows, share)

    def close(self) -> None:
        """Ends the micro-batch that is open; gradients that come later are nobody's."""
        if self._open is not None:
            norms = list(self._norms.values()) or [torch.zeros((), device=self._parameters[0].device)]
            # A model may lie on several devices.
            square = torch.stack([norm.to(self._parameters[0].device) for norm in norms]).square().sum()
            self._ended.append((square, *self._open))
        self._open = None
        self._norms.clear()

    def remove(self) -> None:
        """Looks at no gradient any more."""
        for hook in self._hooks:
            hook.remove()

    def state(self) -> list[list[float]]:
        """What a checkpoint needs to keep, as JSON can say it."""
        return [list(step) for step in self.steps]

    def load(self, state: Sequence[Sequence[float]]) -> None:
        self.steps.clear()
        self.steps.extend(Moments(*step) for step in state)

    def _hook(self, place: int) -> Callable[[Tensor], None]:
        """For one parameter: called by backward with the gradient that it is about to add."""

        def note(gradient: Tensor) -> None:
            if self._open is None:
                return
            if place in self._norms:
                raise ValueError(
                    "a parameter got two gradients in one micro-batch: one backward belongs into each micro_batch(); where "
                    "activations are recomputed, use_reentrant=False"
                )
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            self._norms[place] = torch.linalg.vector_norm(gradient.detach(), dtype=dtype)

        return note

    def _norm(self) -> float:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            raise ValueError("no parameter has a gradient: call step() after backward, and before zero_grad()")
        return float(torch.nn.utils.get_total_norm(gradients))

    def _gather(self, value: Any) -> list[Any]:
        if self._ring.group is None:
            return [value]
        values: list[Any] = [None] * self._ring.size
        dist.all_gather_object(values, value, group=self._ring.group)
        return values


def _unweighted(every: Sequence[Seen], factor: float) -> list[Micro]:
    """Micro-batches with the norms of their own means: what was added was multiplied by their shares, and by `factor`."""
    rows = math.fsum(micro.rows for micro in every)
    if len({micro.share is None for micro in every}) > 1:
        raise ValueError("some micro-batches of a step have a share and others have none: give it for all of them, or for none")
    shares = [micro.rows / rows if micro.share is None else micro.share for micro in every]
    return [Micro(m.square / (factor * share) ** 2, m.rows, share) for m, share in zip(every, shares, strict=True)]
