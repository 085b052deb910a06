"""Callbacks for Lightning (`lightning` or `pytorch_lightning`): find the chunk, and measure the gradient noise, also under DDP.

`ChunkFinder` has the words of Lightning's BatchSizeFinder, but leaves the batch as it is, because the batch decides what is
learned: it sets the module's `chunk`, the rows that its cached encoders take at once. `NoiseScale` estimates the critical batch
while the training runs.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import measuring
from ..chunks.ddp_fsdp import meeting_rings
from ..chunks.oom import release
from ..chunks.rows import rows_of
from ..measuring.fit import search
from ..measuring.fit.memory import limit_of
from ..measuring.fit.snapshot import Snapshot
from ..measuring.fit.trial import Trial, Trials
from ..ring import Ring
from ..training.noise.estimator import NoiseEstimate

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.parsing import lightning_hasattr, lightning_setattr
except ModuleNotFoundError:
    from pytorch_lightning import Callback
    from pytorch_lightning.utilities.parsing import lightning_hasattr, lightning_setattr


class ChunkFinder(Callback):  # type: ignore[misc]
    """Finds the largest chunk that runs, with real training steps on the first batch, and restores everything afterwards.

    mode: "power" doubles the chunk until it fails; "binsearch" then bisects. steps_per_trial: training steps at each chunk.
    init_val: the first chunk. max_trials: chunks to try at most. max_val: the largest chunk; the rows of the batch are a limit too.
    batch_arg_name: the attribute to set, of the module, its hparams or the datamodule. It holds the chunk, never the batch size.
    margin: fraction of the memory that stays free, in both modes.
    budget: bytes that a step may use; None: all of a GPU, half of the host's memory on a CPU.

    The result is a chunk that ran, the same on every rank: `optimal_chunk`. `trials` lists what was measured. Modules, optimizers,
    gradient scaler and random number generators are restored bit for bit, without a checkpoint file; nothing is logged.

    The module reads `self.chunk` in `training_step`: with `self.encode = megabatch.cached(self.tower, self.chunk)` in its
    constructor, `self.encode.chunk = self.chunk`.
    """

    MODES = ("power", "binsearch")

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "chunk",
        margin: float = 0.05,
        max_val: int = 8192,
        *,
        budget: int | None = None,
    ) -> None:
        if mode not in self.MODES:
            raise ValueError(f"mode={mode!r}: must be one of {', '.join(map(repr, self.MODES))}")
        if batch_arg_name == "batch_size":
            raise ValueError(
                "batch_arg_name='batch_size': the batch decides what is learned and stays; name the attribute that holds the rows "
                "of a chunk"
            )
        for name, value in (
            ("steps_per_trial", steps_per_trial),
            ("init_val", init_val),
            ("max_trials", max_trials),
            ("max_val", max_val),
        ):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self.optimal_chunk: int | None = None
        self.trials: list[Trial] = []
        self._mode, self._steps, self._start, self._most = mode, steps_per_trial, init_val, max_trials
        self._name, self._margin, self._cap, self._budget = batch_arg_name, margin, max_val, budget

    def setup(self, trainer: Any, pl_module: Any, stage: str | None = None) -> None:
        if stage == "fit" and not lightning_hasattr(pl_module, self._name):
            raise ValueError(
                f"neither the module, its hparams nor the datamodule has {self._name!r}: set it to the rows of a chunk, and read "
                "it in training_step"
            )
        if stage == "fit" and not pl_module.automatic_optimization:
            raise ValueError(
                "the module optimizes manually, so that its steps cannot be repeated from outside; use megabatch.find_chunk in "
                "training_step"
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # At the first batch: everything is on its device, wrapped, and restored from a checkpoint.
        if self.optimal_chunk is None and not trainer.fast_dev_run:
            self.optimal_chunk = self._search(trainer, pl_module, batch, batch_idx)
            lightning_setattr(pl_module, self._name, self.optimal_chunk)

    def _search(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> int:
        model, scaler = trainer.strategy.model, getattr(trainer.precision_plugin, "scaler", None)
        snapshot = Snapshot([model, *trainer.optimizers, *([] if scaler is None else [scaler])])
        ring = Ring(dist.group.WORLD) if trainer.world_size > 1 else Ring.of(None)
        if ring.size > 1 and meeting_rings(snapshot.modules):
            raise ValueError(
                "ranks communicate inside the step (FSDP or SyncBatchNorm), where a rank that runs out of memory stops the "
                "others: choose the chunk with megabatch.find_chunk or by hand"
            )
        limit = limit_of(snapshot.device, self._budget, self._margin, ring.size)
        rows = min(each[0] for each in ring.gather([rows_of(batch)], snapshot.device))
        step = _training_step(trainer, pl_module, batch, batch_idx)

        def run(chunk: int) -> None:
            lightning_setattr(pl_module, self._name, chunk)
            step()

        release()
        trials = Trials(run, snapshot, limit, ring, steps=self._steps)
        with _unobserved(trainer, pl_module):
            chunk = self._largest(trials, max(1, min(self._cap, rows)))
        self.trials = trials.done
        if chunk is None:
            raise ValueError(
                f"no chunk ran in {len(trials.done)} trials from {self._start} rows down: {trials.last_error or 'above the limit'}"
            )
        return chunk

    def _largest(self, trials: Trials, cap: int) -> int | None:
        def runs(size: int) -> bool:
            if len(trials.done) >= self._most:
                raise _TrialsUsedUp
            return trials(size)

        try:
            if self._mode == "power":
                return _largest_power(runs, min(self._start, cap), cap)
            chunk = search.largest_confirmed(runs, min(self._start, cap), cap=cap)
            if chunk is not None and trials.has_refusals():
                # The device reports no memory, so the margin is one of rows.
                chunk = search.largest_confirmed(
                    runs, search.with_margin(chunk, self._margin), cap=search.with_margin(chunk, self._margin)
                )
            return chunk
        except _TrialsUsedUp:
            return max((trial.size for trial in trials.done if trial.ran), default=None)


class _TrialsUsedUp(Exception):
    pass


def _largest_power(runs: Callable[[int], bool], start: int, cap: int) -> int | None:
    """Return the largest of start, 2·start, … up to cap that runs; if start does not, the first of its halves that does."""
    size = start
    if not runs(size):
        while size > 1:
            size //= 2
            if runs(size):
                return size
        return None
    while size < cap and runs(min(2 * size, cap)):
        size = min(2 * size, cap)
    return size


def _training_step(trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> Callable[[], Any]:
    """Return a function that takes one step of automatic optimization through the trainer's strategy and precision."""
    strategy, [optimizer, *_] = trainer.strategy, trainer.optimizers
    takes_index = len(inspect.signature(pl_module.training_step).parameters) > 1
    arguments = (batch, batch_idx) if takes_index else (batch,)

    def closure() -> Any:
        output = strategy.training_step(*arguments)
        loss = output if isinstance(output, Tensor) else output["loss"]
        optimizer.zero_grad()
        strategy.backward(loss / trainer.accumulate_grad_batches, optimizer)
        return loss

    return lambda: strategy.optimizer_step(optimizer, closure)


@contextmanager
def _unobserved(trainer: Any, pl_module: Any) -> Iterator[None]:
    """Context in which a step calls no callback and logs nothing."""
    callbacks, log = trainer.callbacks, pl_module.__dict__.get("log")
    trainer.callbacks = []
    pl_module.log = lambda *args, **options: None
    try:
        yield
    finally:
        trainer.callbacks = callbacks
        del pl_module.log
        if log is not None:
            pl_module.log = log


class NoiseScale(Callback):  # type: ignore[misc]
    """Estimates the critical batch from the gradients of ranks and accumulated batches, and logs it as `critical_batch`.

    window: optimizer steps that the estimate averages over. log: whether to log it.

    The loss must be a mean over independent samples (supervised training, language models); a contrastive loss is not. A step
    needs at least two batches, on two ranks or by accumulate_grad_batches. `estimate()` returns the result with its interval.
    """

    def __init__(self, window: int = 50, *, log: bool = True) -> None:
        self._window, self._log = window, log
        self._noise: measuring.NoiseScale | None = None
        self._saved: list[list[float]] = []
        self._rows = self._micro_batches = 0

    def estimate(self) -> NoiseEstimate:
        """Return the critical batch of the last steps, with its interval."""
        if self._noise is None:
            raise ValueError("no training has started yet: call estimate() during or after trainer.fit")
        return self._noise.estimate()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not pl_module.automatic_optimization:
            raise ValueError("the module optimizes manually: use megabatch.NoiseScale around its backward instead")
        if trainer.world_size * trainer.accumulate_grad_batches < 2:
            warnings.warn(
                "the gradient noise cannot be measured with one batch per optimizer step: use accumulate_grad_batches=2 or more "
                "ranks",
                stacklevel=2,
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        group: Any = ... if trainer.world_size > 1 else None
        self._noise = measuring.NoiseScale(trainer.strategy.model, window=self._window, scaler=scaler, group=group)
        self._noise.load(self._saved)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._rows = rows_of(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        assert self._noise is not None
        self._micro_batches += 1
        # Lightning divides each loss by accumulate_grad_batches, DDP the gradients by the number of ranks.
        self._noise.open(self._rows, 1 / (trainer.accumulate_grad_batches * trainer.world_size))

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        assert self._noise is not None
        self._noise.close()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert self._noise is not None
        micro_batches, self._micro_batches = self._micro_batches, 0
        if micro_batches != trainer.accumulate_grad_batches:
            # The last step of an epoch may have fewer, whose shares do not add up to one.
            self._noise.forget()
            return
        # Already unscaled, not yet clipped.
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        step = self._noise.step(nn.utils.get_total_norm(gradients))
        if step is not None and self._log:
            critical = torch.tensor(self._noise.estimate().critical)
            if critical.isfinite():
                pl_module.log("critical_batch", critical, batch_size=self._rows)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._noise is not None:
            self._noise.remove()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._saved if self._noise is None else self._noise.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["steps"]
