"""A forward whose graph saves nothing and is computed again in backward, and the check that both runs give the same outputs.

torch.utils.checkpoint (non-reentrant) works the same way, with more bookkeeping for every saved tensor, which is measurable where
chunks are small (benchmarks/overhead.py). This version has no early stopping and no report on mismatched tensors; it compares
outputs instead.

The check: anything that makes the second run differ (a generator that is not replayed, a weight changed without autograd's
knowledge, a counter in Python) makes the gradient wrong. A few values of every row are compared, for all chunks at once, at the end
of backward, and no tensor of the size of the batch is kept. On a GPU the host waits for the result of the first backward only:
later results are read when they have arrived, at the next call, so that the host can run ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from . import rows

# Values of each row and output that are compared.
VALUES = 16
# Devices that copy to pinned memory while the host goes on, so that a result can be waited for later.
ASYNCHRONOUS = ("cuda", "xpu")


def recomputed(run: Callable[[bool], Any]) -> Any:
    """Return run(False), without saving its tensors for backward.

    In backward, run(True) must compute the same, in every tensor that autograd saves.
    """
    return _Recomputation(run).forward()


class _Recomputation:
    def __init__(self, run: Callable[[bool], Any]) -> None:
        self.run = run
        self.shapes: list[torch.Size] = []
        self.tensors: dict[int, Tensor] = {}
        # The backward pass that the tensors belong to.
        self.task: int | None = None
        self.asked_again = False

    def forward(self) -> Any:
        with saved_tensors_hooks(self._pack, self._unpack):
            return self.run(False)

    def _pack(self, tensor: Tensor) -> int:
        self.shapes.append(tensor.shape)
        return len(self.shapes) - 1

    def _unpack(self, index: int) -> Tensor:
        task = torch._C._current_graph_task_id()
        if task != self.task or index not in self.tensors:
            # A node that reads a saved tensor more than once comes here again; then all tensors stay until the end.
            self.asked_again = task == self.task
            self.tensors = dict(enumerate(self._compute()))
            self.task = task
        return self.tensors[index] if self.asked_again else self.tensors.pop(index)

    def _compute(self) -> list[Tensor]:
        tensors: list[Tensor] = []

        def keep(tensor: Tensor) -> None:
            # Without its graph, which is not needed: autograd connects the saved tensor to the graph of the first forward.
            tensors.append(tensor.detach())

        with torch.enable_grad(), saved_tensors_hooks(keep, _never):
            self.run(True)
        if [tensor.shape for tensor in tensors] != self.shapes:
            raise RuntimeError(
                f"the encoder did something else when it was run again in backward: {len(tensors)} tensors were saved instead of "
                f"{len(self.shapes)}, or their shapes differ. What it computes must depend only on its inputs, weights, buffers "
                "and on random numbers that can be replayed; pass generators that were not found as cached(…, generators=(g,))"
            )
        return tensors


def _never(packed: Any) -> Any:
    raise AssertionError("backward never runs through the graph of a recomputation")


class PendingDifference(NamedTuple):
    """A difference that is being copied to the host. arrived: the event after the copy."""

    difference: Tensor
    arrived: torch.Event
    tolerance: float


class Differences:
    """The results of the comparisons of one cached encoder, over all of its calls."""

    def __init__(self) -> None:
        self._waited = False
        self._pending: list[PendingDifference] = []

    def judge(self, difference: Tensor, tolerance: float) -> None:
        """Raise if the difference exceeds the tolerance; on a GPU, from the second call on, leave that to `judge_arrived`."""
        if self._waited and difference.device.type in ASYNCHRONOUS:
            on_host = torch.empty_like(difference, device="cpu", pin_memory=True)
            on_host.copy_(difference, non_blocking=True)
            arrived = torch.Event(difference.device)
            arrived.record()
            self._pending.append(PendingDifference(on_host, arrived, tolerance))
            return
        self._waited = True
        _raise_if_above(float(difference), tolerance, "this backward pass")

    def judge_arrived(self) -> None:
        """Raise if a difference that has arrived by now exceeds its tolerance; do not wait for the others."""
        while self._pending and self._pending[0].arrived.query():
            pending = self._pending.pop(0)
            _raise_if_above(float(pending.difference), pending.tolerance, "an earlier backward pass")


class Repeatability:
    """Compares the outputs of the chunks of one call with those of their recomputation.

    tolerance: the largest relative difference, in the Frobenius norm over all rows, that is not an error.
    """

    def __init__(self, tolerance: float, differences: Differences) -> None:
        self.tolerance = tolerance
        self._differences = differences
        # A sample of every output, for each chunk in order.
        self._first: list[list[Tensor]] = []
        self._pairs: list[tuple[list[Tensor], list[Tensor]]] = []
        # The backward pass at whose end the pairs are compared.
        self._task: int | None = None

    def remember(self, outputs: Any, sizes: list[int]) -> None:
        """Keep a few values of the outputs of all chunks. sizes: the rows of each chunk."""
        samples = [_sample(t) for t in rows.tensors_of(outputs) if _is_compared(t)]
        # A number without dimensions is the same for every chunk.
        parts = [s.split(sizes) if len(s) == sum(sizes) else [s] * len(sizes) for s in samples]
        self._first = [list(of_chunk) for of_chunk in zip(*parts, strict=True)]

    def compare(self, chunk: int, outputs: Any) -> None:
        """Compare the recomputed outputs of a chunk with the first ones when the present backward pass ends."""
        task = torch._C._current_graph_task_id()
        if task == -1 or not self._first:
            return
        if task != self._task:
            # Pairs of an earlier backward are still here if that one failed.
            self._task, self._pairs = task, []
            torch.autograd.Variable._execution_engine.queue_callback(self._raise_if_different)
        self._pairs.append((self._first[chunk], [_sample(t) for t in rows.tensors_of(outputs) if _is_compared(t)]))

    @torch.no_grad()
    def _raise_if_different(self) -> None:
        pairs, self._pairs, self._task = self._pairs, [], None
        self._differences.judge(_relative_difference(pairs), self.tolerance)


def _raise_if_above(difference: float, tolerance: float, when: str) -> None:
    if difference > tolerance:
        raise RuntimeError(
            f"the encoder is not repeatable: run again in backward, its outputs differ by {difference:.2%} from those of "
            f"forward, so the gradients of {when} are wrong. What it computes must depend only on its inputs, weights, "
            "buffers and on random numbers that can be replayed: pass generators of its own that were not found as cached(…, "
            "generators=(g,)); replace counters and caches that change from call to call; change neither weights nor inputs "
            "(through .data or NumPy, which no version counter records) before backward. check=False turns this comparison off"
        )


def tolerance_for(dtypes: Iterable[torch.dtype], devices: Iterable[torch.device]) -> float:
    """Return the relative difference that rounding cannot explain: half of the digits of the lowest precision in use.

    A CPU repeats a forward to the bit, except for sums in another order. On accelerators TF32, half-precision kernels inside the
    encoder and atomic additions are common, so bfloat16's digits count there, whatever the dtype.
    """
    epsilons = [torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point]
    if any(device.type != "cpu" for device in devices):
        epsilons.append(torch.finfo(torch.bfloat16).eps)
    return math.sqrt(max(epsilons, default=torch.finfo(torch.float32).eps))


def _is_compared(tensor: Tensor) -> bool:
    """Return whether an output has a gradient, which depends on its values."""
    return tensor.requires_grad and tensor.is_floating_point() and not tensor.is_meta


def _sample(tensor: Tensor) -> Tensor:
    """Return up to VALUES values of every row, evenly spaced."""
    # Indexing a distributed tensor would run collectives.
    local: Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    if local.ndim != 2:
        local = local.reshape(-1, 1) if local.ndim < 2 else local.flatten(1)
    return local[:, :: max(1, -(-local.shape[1] // VALUES))].clone()


def _relative_difference(pairs: list[tuple[list[Tensor], list[Tensor]]]) -> Tensor:
    """Return the largest relative difference of any output, in the Frobenius norm over the rows of all chunks, on its device."""
    if any([t.shape for t in first] != [t.shape for t in second] for first, second in pairs):
        return torch.tensor(math.inf)
    ratios = []
    for column in zip(*(zip(first, second, strict=True) for first, second in pairs), strict=True):
        a, b = (torch.cat(side) for side in zip(*column, strict=True))
        if a.dtype != torch.float64:
            a, b = a.float(), b.float()
        # Overflows are visible in the outputs themselves.
        finite = a.isfinite() & b.isfinite()
        off, size = (torch.where(finite, t, 0).square().sum() for t in (a - b, a))
        # 0 / 0 is no difference; a positive number over 0 is one.
        ratios.append(torch.where((off > 0) & size.isfinite(), (off / size).sqrt(), 0).to(torch.float64))
    return torch.stack([ratio.to(ratios[0].device) for ratio in ratios]).max() if ratios else torch.tensor(0.0)
