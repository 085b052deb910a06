"""What one step computes: the loss and gradients of a batch of any size, with memory set by the chunk."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import losses
from ..chunks import accumulate, cached, retry_on_oom
from ..chunks.ddp_fsdp import least_rows
from ..chunks.keep import can_read_free_bytes
from ..chunks.rows import map_tensors, rows_of, split
from ..config import Run
from ..data.duplicates import join_ids
from ..data.loader import RankBatch
from ..objectives import OBJECTIVES
from ..towers.model import Classifier, Pair
from .distributed import Ranks, autocast, shard, share
from .noise.collect import WINDOW, NoiseScale

# A step is split into at least this many micro-batches over all ranks where the noise between them is measured.
MICRO_BATCHES = 8


class Outcome(NamedTuple):
    """The result of one step.

    loss: of the whole batch. right: rows of this rank whose partner is the most similar of the batch, or whose class is predicted
    correctly. rows: all rows of this rank.
    """

    loss: Tensor
    right: Tensor
    rows: int


class Contrastive:
    """A loss over pairs: both sides are encoded in chunks, and one loss is computed over the batch of all ranks.

    `noise` stays None: samples are compared with each other, so that parts of a batch do not show the noise of its gradient.
    """

    noise = None

    def __init__(self, model: Pair, run: Run, ranks: Ranks) -> None:
        self.model = model
        self.run = run
        self.ranks = ranks
        for encoder in (model.x, model.y):
            if encoder is not None:
                shard(encoder, run.compute, ranks)
        # One tower for both sides encodes both in one call, so that its weights and gradients are exchanged once per step.
        self.encode_x = self._cached(share(model.x, run.compute, ranks))
        self.encode_y = self.encode_x if model.y is None else self._cached(share(model.y, run.compute, ranks))
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=run.compute.precision == "fp16")

    @property
    def chunked(self) -> tuple[Any, ...]:
        """The callables that run in chunks of `chunk` rows."""
        return self.encode_x, self.encode_y

    def step_with_oom_retry(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return `step`, retried with smaller chunks when memory runs out if that is possible."""
        return _with_oom_retry(self, optimizer)

    def step(self, batch: RankBatch) -> Outcome:
        """Run forward and backward."""
        rows = len(batch.keys)
        # Before anything that may run out of memory: all ranks come here, also to try again.
        ids = self._duplicates(batch)
        with autocast(self.run.compute, self.ranks.device)():
            documents = batch.y if batch.negatives is None else _joined(batch.y, batch.negatives)
            if self.model.y is None:
                x, y = self.encode_x(_joined(batch.x, documents)).split([rows, rows_of(documents)])
            else:
                y = self.encode_y(documents)
                x = self.encode_x(batch.x)
        loss, diagnostics = self._loss(x, y, batch, ids)
        self.scaler.scale(loss).backward()
        ranks = [rank for rank in (diagnostics.row_rank, diagnostics.column_rank) if rank is not None]
        right = sum((rank == 0).sum() for rank in ranks) / len(ranks)
        return Outcome(loss.detach(), torch.as_tensor(right), rows)

    @torch.no_grad()
    def embed(self, inputs: Any, side: str) -> Tensor:
        """Return the embeddings of inputs of one side ("x" or "y"), on the device."""
        with autocast(self.run.compute, self.ranks.device)():
            return (self.encode_x if side == "x" else self.encode_y)(inputs)

    def _duplicates(self, batch: RankBatch) -> Tensor | None:
        """Return the ids of this rank's rows and hard negatives, equal for duplicates on any rank. None if the loss has none."""
        if self.run.loss.duplicates == "negative" or batch.ids is None:
            return None
        assert batch.x_ids is not None
        rows = len(batch.x_ids)
        # Which rows share an image with others is known only over all ranks.
        x_ids, y_ids = zip(*self.ranks.gather((batch.x_ids, batch.ids[:rows])), strict=True)
        joined = join_ids(torch.cat(x_ids), torch.cat([*y_ids, batch.ids[rows:]]))
        first, pairs = sum(map(len, x_ids[: self.ranks.rank])), sum(map(len, x_ids))
        return torch.cat([joined[first : first + rows], joined[pairs:]])

    def _loss(self, x: Tensor, y: Tensor, batch: RankBatch, ids: Tensor | None) -> Any:
        ids = None if ids is None else ids.to(x.device)
        owners = None if batch.negatives_of is None else batch.negatives_of.to(x.device)
        return contrastive_loss(self.model, self.run, x, y, ids, owners, group=self.ranks.group, diagnostics=True)

    def _cached(self, encoder: nn.Module) -> Any:
        # "auto" is the default of a run and must work on every device; `train` logs that nothing is kept where memory is unknown.
        keep = 0 if self.run.batch.keep == "auto" and not can_read_free_bytes(self.ranks.device) else self.run.batch.keep
        return cached(encoder, self.run.batch.chunk, keep=keep, device=self.ranks.device)


def contrastive_loss(
    model: Pair, run: Run, x: Tensor, y: Tensor, ids: Tensor | None, negatives_of: Tensor | None = None, **sharing: Any
) -> Any:
    """Return what the run's loss returns for two blocks of embeddings.

    ids: which rows are duplicates (`join_ids`). negatives_of: the row of x that each row of y beyond the first len(x) is a hard
    negative of; None if there are no such rows. sharing: `group` and `diagnostics` of the loss.
    """
    objective = OBJECTIVES[run.loss.objective]
    # An empty value is that of the loss itself.
    options = {name: value for name in objective.arguments if (value := getattr(run.loss, name)) not in (None, ())}
    arguments = sharing | {"workspace": run.compute.workspace} | options
    if run.loss.duplicates != "negative":
        assert ids is not None
        arguments |= {"ids": ids, "duplicates": run.loss.duplicates}
    if objective.one_direction:
        arguments["symmetric"] = negatives_of is None
    if objective.takes_owners:
        arguments["negatives_of"] = negatives_of
    if "in_batch" in arguments and negatives_of is None:
        # Evaluation embeds pairs without their hard negatives, which are then compared with each other.
        del arguments["in_batch"]
    logits = [model.scale(), model.bias] if objective.bias else [model.scale()]
    loss_function = getattr(losses, objective.function)
    if run.loss.dims:
        loss_function = losses.matryoshka(loss_function, run.loss.dims)
    result = loss_function(x, y, *logits, **arguments)
    if not run.loss.spread_out:
        return result
    # Of queries and their positives; hard negatives are not pushed apart.
    spread = sum(losses.spread_out_loss(side, group=sharing.get("group")) for side in (x, y[: len(x)]))
    loss, *more = result if isinstance(result, tuple) else (result,)
    loss = loss + run.loss.spread_out * spread
    return (loss, *more) if more else loss


class Classification:
    """Cross-entropy over classes: a mean over samples, so chunks are accumulated and nothing is computed twice.

    noise: measures the noise of the gradient, after `measure_noise`.
    """

    noise: NoiseScale | None = None

    def __init__(self, model: Classifier, run: Run, ranks: Ranks) -> None:
        self.model = model
        self.run = run
        self.ranks = ranks
        shard(model, run.compute, ranks)
        self._shared = share(model, run.compute, ranks)
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=run.compute.precision == "fp16")
        self._right = torch.zeros((), device=ranks.device)
        # A wrapped or sharded model knows its own process group.
        group = ... if ranks.group is not None else None
        self._accumulate = accumulate(self._mean, self._shared, run.batch.chunk, scaler=self.scaler, group=group)

    @property
    def chunked(self) -> tuple[Any, ...]:
        return (self._accumulate,)

    def step_with_oom_retry(self, optimizer: torch.optim.Optimizer) -> Any:
        return _with_oom_retry(self, optimizer)

    def measure_noise(self, window: int = WINDOW) -> NoiseScale:
        """Measure the noise of the gradient from now on, over the last `window` steps."""
        self.stop_measuring_noise()
        self.noise = NoiseScale(self._shared, window=window, scaler=self.scaler, group=self.ranks.group)
        return self.noise

    def stop_measuring_noise(self) -> None:
        """Stop measuring the noise."""
        if self.noise is not None:
            self.noise.remove()
        self.noise = None

    def step(self, batch: RankBatch) -> Outcome:
        self._right.zero_()
        rows = self._accumulate.chunk
        if self.noise is not None:
            # Discard what an attempt that ran out of memory has measured.
            self.noise.forget()
            rows = max(1, min(rows, -(-len(batch.keys) * self.ranks.size // MICRO_BATCHES)))
        loss = self._accumulate.over(split(((batch.x, batch.labels), {}), rows, least_rows([self._shared])))
        if self.noise is not None:
            self.noise.close()
        return Outcome(loss.detach(), self._right.clone(), len(batch.keys))

    @torch.no_grad()
    def classify(self, inputs: Any) -> Tensor:
        """Return the logits of inputs, computed chunk by chunk."""
        with autocast(self.run.compute, self.ranks.device)():
            pieces = split(inputs, self.run.batch.chunk)
            return torch.cat([self.model(_on(piece, self.ranks.device)) for piece in pieces])

    def _mean(self, inputs: Any, labels: Tensor) -> Tensor:
        with autocast(self.run.compute, self.ranks.device)():
            logits = self._shared(_on(inputs, self.ranks.device))
        labels = labels.to(self.ranks.device)
        # `accumulate` first tries the loss on a few rows without gradients; they are not counted.
        if torch.is_grad_enabled():
            self._right += (logits.argmax(1) == labels).sum()
            if self.noise is not None:
                self.noise.open(len(labels))
        return F.cross_entropy(logits, labels, label_smoothing=self.run.loss.label_smoothing)


def _with_oom_retry(objective: Contrastive | Classification, optimizer: torch.optim.Optimizer) -> Any:
    run, ranks = objective.run, objective.ranks
    # The other ranks would wait inside the encoders for a rank that starts over.
    meeting = ranks.group is not None and (run.compute.sharded or run.compute.sync_batchnorm)
    return objective.step if meeting else retry_on_oom(objective.step, optimizer, group=ranks.group)


def _on(tree: Any, device: torch.device) -> Any:
    return map_tensors(tree, lambda tensor: tensor.to(device, non_blocking=True))


def _joined(a: Any, b: Any) -> Any:
    """Concatenate the rows of two trees of tensors with the same structure."""
    if isinstance(a, Tensor):
        return torch.cat([a, b])
    return {key: _joined(a[key], b[key]) for key in a}
