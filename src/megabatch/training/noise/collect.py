"""Collects squared gradient norms during backward: of each micro-batch before it is accumulated, and of the whole batch."""

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
from .estimator import Micro, Moments, NoiseEstimate, estimate, moments

# Steps that an estimate averages over: enough to reduce its variance, few enough to follow the training.
WINDOW = 50


class Seen(NamedTuple):
    """A micro-batch of one rank: the squared norm of what it added to the gradients, its rows, and its share if one was given."""

    square: float
    rows: float
    share: float | None


class NoiseScale:
    """The gradient noise scale of a training, from its micro-batches and ranks.

    model: the trained module, wrapped in DDP where there are several processes. Hooks read its gradients during backward; none is
        copied.
    window: steps that the estimate averages over.
    scaler: the GradScaler of the loss, for fp16.
    group: for a model without wrapper: None for this process alone, or the ranks over which you average gradients yourself.

    The gradient must be a mean over the rows of the batch, with independent samples. A contrastive loss is neither.

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
            raise ValueError(f"window is {window}: must be at least 1 step; the default is {WINDOW}")
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if not self._parameters:
            raise ValueError("no parameter of the model is trainable: there is no gradient whose noise could be measured")
        if any(hasattr(p, "full_tensor") for p in self._parameters):
            raise ValueError(
                "the model is sharded (fully_shard): no rank ever holds the gradient of its own rows alone; use DDP instead, "
                "or compare gradients of independent batches"
            )
        self._ring = Ring(model.process_group) if isinstance(model, DistributedDataParallel) else Ring.of(group)
        self._scaler = scaler
        # Finished micro-batches with their squared norms on the device; rows and share of the open one, and its norms so far.
        self._ended: list[tuple[Tensor, float, float | None]] = []
        self._open: tuple[float, float | None] | None = None
        self._norms: dict[int, Tensor] = {}
        self.steps: deque[Moments] = deque(maxlen=window)
        self._hooks = [p.register_hook(self._hook(place)) for place, p in enumerate(self._parameters)]

    @contextmanager
    def micro_batch(self, rows: float, share: float | None = None) -> Iterator[None]:
        """Measure the backward of exactly one micro-batch. rows: samples, or tokens, that its loss is a mean over.

        share: its weight in the gradient of the whole batch, over all ranks, if that is not its fraction of the rows: 1/4 for each
            of four losses that are divided by 4, for any number of rows.
        """
        self.open(rows, share)
        try:
            yield
        finally:
            self.close()

    def step(self, norm: float | Tensor | None = None) -> Moments | None:
        """Return the moments of this step; None if it has fewer than two micro-batches, or gradients that overflowed.

        Call it on all ranks after the last backward, and before the optimizer and scaler.update(). norm: of the whole gradient,
        unscaled and not yet clipped, as clip_grad_norm_ returns it. Without it the norm is computed from the gradients, which must
        be as backward left them.
        """
        self.close()
        # A disabled scaler returns 1.
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        whole = self._norm() / scale if norm is None else float(norm)
        squares = torch.stack([square for square, _, _ in self._ended]).tolist() if self._ended else []
        own = [Seen(square, rows, share) for square, (_, rows, share) in zip(squares, self._ended, strict=True)]
        self._ended = []
        # All ranks use the norm of the first one, so that rounding cannot make them disagree.
        gathered = self._gather((whole, own))
        whole, seen = gathered[0][0], [micro for _, part in gathered for micro in part if micro.rows]
        if len(seen) < 2:
            return None
        micros = _unweighted(seen, scale * self._ring.size)
        if not all(map(math.isfinite, (whole, *(micro.square for micro in micros)))):
            return None
        step = moments(micros, whole**2)
        self.steps.append(step)
        return step

    def estimate(self) -> NoiseEstimate:
        """Return the critical batch of the last steps, with its interval."""
        return estimate(list(self.steps))

    def forget(self) -> None:
        """Discard the measurements of a step that is started again."""
        self._open, self._ended = None, []
        self._norms.clear()

    def open(self, rows: float, share: float | None = None) -> None:
        """Begin a micro-batch, and end the open one. For loops that cannot use `micro_batch`."""
        self.close()
        if rows < 0 or (share is not None and share <= 0):
            raise ValueError(f"rows is {rows} and share {share}: rows must not be negative, and a share must be above 0")
        self._open = (rows, share)

    def close(self) -> None:
        """End the open micro-batch; later gradients are not counted."""
        if self._open is not None:
            norms = list(self._norms.values()) or [torch.zeros((), device=self._parameters[0].device)]
            # A model may be on several devices.
            square = torch.stack([norm.to(self._parameters[0].device) for norm in norms]).square().sum()
            self._ended.append((square, *self._open))
        self._open = None
        self._norms.clear()

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def state(self) -> list[list[float]]:
        """Return what a checkpoint stores, as values that JSON has."""
        return [list(step) for step in self.steps]

    def load(self, state: Sequence[Sequence[float]]) -> None:
        self.steps.clear()
        self.steps.extend(Moments(*step) for step in state)

    def _hook(self, place: int) -> Callable[[Tensor], None]:
        """Return the hook of one parameter, which backward calls with each gradient before accumulating it."""

        def record(gradient: Tensor) -> None:
            if self._open is None:
                return
            if place in self._norms:
                raise ValueError(
                    "a parameter got two gradients in one micro-batch: call backward once in each micro_batch(), and use "
                    "use_reentrant=False where activations are recomputed"
                )
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            self._norms[place] = torch.linalg.vector_norm(gradient.detach(), dtype=dtype)

        return record

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


def _unweighted(seen: Sequence[Seen], factor: float) -> list[Micro]:
    """Return micro-batches with the norms of their mean gradients: backward multiplied these by the share and by `factor`."""
    rows = math.fsum(micro.rows for micro in seen)
    if len({micro.share is None for micro in seen}) > 1:
        raise ValueError("some micro-batches of a step have a share and others have none; give it for all of them, or for none")
    shares = [micro.rows / rows if micro.share is None else micro.share for micro in seen]
    return [Micro(m.square / (factor * share) ** 2, m.rows, share) for m, share in zip(seen, shares, strict=True)]
