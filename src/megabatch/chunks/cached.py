"""Encoders at any batch: a batch goes through in chunks, whose activations are recomputed in backward instead of kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from ..losses.autograd import outside_graphs
from ..ring import Ring
from . import attempt, rows
from .ddp_fsdp import (
    batch_norms,
    explaining_single_rows,
    find_ddp,
    fsdp_modules,
    gathering_weights,
    least_rows,
    meeting_rings,
    modules_in,
    no_sync,
    run_once,
    submodules,
)
from .exchange import check_exchange
from .generators import Source, check_generators, host_sources, sources_in
from .keep import Keep, KeepAuto
from .memory import is_out_of_memory, release
from .recompute import recomputed
from .repeatable import Differences, Repeatability, tolerance_for
from .rng_state import Buffer, Replay, buffers_of, current_accelerator, differs, states_of, versions_of

# From so many chunks on, a sum of their gradients in half precision is worth a word.
MANY = 16
# How far above a warning's helper the caller's line is, the frames of outside_graphs included.
CALLER = 7


def cached(
    encoder: Callable[..., Any],
    chunk: int,
    *,
    keep: int | Literal["auto"] = 0,
    device: torch.device | str | None = None,
    sync: Literal["wrapper", "none"] = "wrapper",
    generators: Sequence[Any] = (),
    check: bool = True,
) -> Cached:
    """The encoder, with the same signature and the same gradients, holding the activations of `chunk` rows at a time.

    encoder: a Module, a method of one, or a function of them. Wrapped in DDP, it exchanges gradients once a step.
        Inputs and outputs are tensors whose first dimension is the batch, in tuples, lists and dicts of any depth.
    chunk: rows that go through the encoder at once. Memory is set by it, the result is not.
    keep: chunks whose graphs are kept instead of recomputed in backward; "auto" fills the free memory from the second step on.
    device: where chunks go, one at a time, when the inputs stay elsewhere (in pinned host memory); None leaves them where they are.
    sync: who exchanges the gradients of several ranks. "wrapper": DDP or fully_shard; a call for which neither does raises a
        ValueError. "none": nobody here; you do it yourself, or each rank keeps its own.
    generators: random number generators of the encoder's own that have to be replayed and are not found in its attributes, closures
        and partial arguments: those of torch, random and numpy.random, or objects with get_state() and set_state().
    check: compare a few values of every recomputed row with the first ones, and raise a RuntimeError at the end of backward if the
        encoder has computed something else.

    Dropout is replayed, autocast and GradScaler are honoured, frozen parts stay frozen. A chunk that does not fit in forward is
    tried again in halves; `retry_on_oom` does that for the whole step, backward included.

    >>> import torch, megabatch
    >>> tower = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    >>> encode = megabatch.cached(tower, chunk=128)
    >>> encode(torch.randn(1000, 32)).shape
    torch.Size([1000, 16])
    """
    return Cached(encoder, chunk, keep, device, sync, generators, check)


class Cached:
    """What `cached` returns. `chunk` may have become smaller than asked for; `kept` says how many chunks the last call kept."""

    def __init__(
        self,
        encoder: Callable[..., Any],
        chunk: int,
        keep: int | Literal["auto"],
        device: torch.device | str | None,
        sync: Literal["wrapper", "none"],
        generators: Sequence[Any],
        check: bool,
    ) -> None:
        if not callable(encoder):
            raise ValueError(f"encoder is a {type(encoder).__name__}: must be a Module or a function that encodes a batch")
        self.chunk = check_chunk(chunk)
        self.kept = 0
        self._keep = _keep(keep)
        self._ddp = find_ddp(encoder)
        self._encoder = encoder if self._ddp is None else self._ddp.module
        self._modules = modules_in(self._encoder)
        self._device = None if device is None else torch.device(device)
        if self._ddp is not None and self._ddp.device_ids and device is None:
            # DDP would move the whole batch there.
            self._device = torch.device(self._ddp.device_type, self._ddp.device_ids[0])
        self._sync = _sync(sync, self._ddp is not None)
        self._generators, self._found = check_generators(generators), list[Source]()
        self._check = check
        self._differences = Differences()
        self._modes: list[bool] = []
        self._stateful: list[Buffer] | None = None
        self._warned: set[str] = set()

    @outside_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._differences.judge_arrived()
        meeting = meeting_rings(self._modules)
        taking_part = attempt.current.get()
        if taking_part is not None:
            taking_part.join(self, meeting, self._ddp)
        if self._ddp is None:
            return self._encode((args, kwargs), meeting)
        with nullcontext() if taking_part is None else no_sync(self._ddp):
            return run_once(self._ddp, lambda: self._encode((args, kwargs), meeting))

    def __repr__(self) -> str:
        name = getattr(self._encoder, "__name__", type(self._encoder).__name__)
        return f"cached({name}, chunk={self.chunk})"

    def stop_keeping(self) -> bool:
        return self._keep.stop()

    def _encode(self, inputs: Any, meeting: list[Ring]) -> Any:
        """The outputs for all rows, in smaller chunks if there is no memory for these."""
        self._warn_of_batch_norm()
        self._warn_of_rounding(rows.rows_of(inputs))
        start = Replay(self._devices(inputs), self._buffers(), versions_of(self._parameters()), states_of(self._sources()))
        taking_part = attempt.current.get()
        if taking_part is not None:
            taking_part.starts.append(start)
        asked, stopped = self.chunk, False
        while True:
            try:
                outputs = self._run(inputs, start, meeting)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or meeting:
                    raise
                if self.stop_keeping():
                    stopped = True
                elif self.chunk > 1:
                    self.chunk //= 2
                else:
                    self.chunk = asked
                    raise
            # Not in the except clause: while the exception lives, its frames hold the tensors that have to go.
            release()
            start.restore()
        if stopped or self.chunk < asked:
            warnings.warn(what_changed(asked, self.chunk, stopped), stacklevel=CALLER - 2)
        return outputs

    def _run(self, inputs: Any, start: Replay, meeting: list[Ring]) -> Any:
        pieces = rows.split(inputs, self.chunk, least_rows(self._modules))
        sizes = [rows.rows_of(piece) for piece in pieces]
        device, recording = self._compute_device(inputs), torch.is_grad_enabled()
        count, kept = len(pieces), self._keep.begin(device, sizes) if recording else 0
        for ring in meeting:
            facts = ring.gather([count, kept], device)
            count, kept = max(each[0] for each in facts), min(each[1] for each in facts)
        missing = count - len(pieces)
        pieces, sizes = pieces + [rows.empty(inputs)] * missing, sizes + [0] * missing
        self.kept = min(kept, count)
        sharded = fsdp_modules(self._modules)
        last_full = max(index for index, size in enumerate(sizes) if size == sizes[0])
        repeatability = Repeatability(self._tolerance(inputs), self._differences) if self._check and recording else None
        recomputation = self._recomputation(inputs, sharded, device, repeatability)
        outputs, states = [], start.sources
        for index, piece in enumerate(pieces):
            with explaining_single_rows(self._modules, piece, pieces):
                if not recording:
                    outputs.append(self._chunk(piece))
                elif index < count - kept:
                    replay = start if index == 0 else Replay(start.generators, self._stateful or (), start.weights, states)
                    outputs.append(recomputation(index, piece, replay))
                    states = replay.end()
                else:
                    with self._keep.keeping(sizes[index], self._known(piece)) if index == last_full else nullcontext():
                        outputs.append(self._chunk(piece))
            if index == 0 and recording and self._ddp is None and self._sync == "wrapper":
                check_exchange(rows.tensors_of(piece), rows.tensors_of(outputs), self._modules)
            if self._stateful is None:
                self._stateful = [buffer for buffer, value in start.buffers.items() if differs(value, buffer.tensor)]
        joined = rows.join(outputs, sizes)
        if repeatability is not None:
            repeatability.remember(joined, sizes)
        return joined

    def _recomputation(
        self, inputs: Any, sharded: list[Any], device: torch.device, repeatability: Repeatability | None
    ) -> Callable[[int, Any, Replay], Any]:
        """What runs one chunk of a call without keeping its activations: backward runs it again from the state it started from."""
        versions = _named_versions(inputs)

        def recomputation(index: int, piece: Any, replay: Replay) -> Any:
            def run(again: bool) -> Any:
                self._keep.look(device)
                if not again:
                    return self._chunk(piece)
                _check_inputs(versions)
                with replay.again(), gathering_weights(sharded):
                    outputs = self._chunk(piece)
                if repeatability is not None:
                    repeatability.compare(index, outputs)
                return outputs

            return recomputed(run)

        return recomputation

    def _chunk(self, piece: Any) -> Any:
        # Autocast keeps its reduced-precision copies of the weights between chunks; their gradients would then be summed up over
        # all chunks in that precision. With a copy for each chunk, they are summed up in the weights' own.
        torch.clear_autocast_cache()
        versions = versions_of(rows.tensors_of(piece))
        args, kwargs = piece if self._device is None else rows.map_tensors(piece, self._bring)
        outputs = self._encoder(*args, **kwargs)
        if any(tensor._version != version for tensor, version in versions):
            raise ValueError(
                "the encoder changes its input in place: recomputed in backward, it would start from the changed one; have it "
                "work on a copy, for example images / 255 instead of images.div_(255)"
            )
        return outputs

    def _bring(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _buffers(self) -> list[Buffer]:
        """The buffers that a forward changes; all of them until that is known for the modes (train, eval) of the modules."""
        inner = submodules(self._modules)
        modes = [module.training for module in inner]
        if modes != self._modes:
            self._modes, self._stateful = modes, None
        if self._stateful is not None:
            return self._stateful
        return buffers_of(inner)

    def _sources(self) -> list[Source]:
        """The generators to replay beside the devices' own; called after `_buffers`, which sees a change of modes."""
        if self._stateful is None:
            self._found = sources_in(self._encoder, submodules(self._modules))
        return [*host_sources(), *self._generators, *self._found]

    def _tolerance(self, inputs: Any) -> float:
        """The relative difference between an output and its recomputation that rounding cannot explain."""
        tensors = (*self._parameters(), *rows.tensors_of(inputs))
        devices = {self._compute_device(inputs), *(tensor.device for tensor in tensors)}
        kinds = {device.type for device in devices if torch.amp.is_autocast_available(device.type)}
        lower = [torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)]
        return tolerance_for([*lower, *{tensor.dtype for tensor in tensors}], devices)

    def _devices(self, inputs: Any) -> list[torch.device]:
        """Every device whose generator the encoder may draw from."""
        known = [tensor.device for tensor in (*self._parameters(), *rows.tensors_of(inputs))]
        every = dict.fromkeys([torch.device("cpu"), *current_accelerator(), self._compute_device(inputs), *known])
        return [device for device in every if device.type != "meta"]

    def _compute_device(self, inputs: Any) -> torch.device:
        tensors = (*self._parameters(), *rows.tensors_of(inputs))
        if self._device is None:
            return tensors[0].device if tensors else torch.device("cpu")
        # "cuda" is the device that is current now, with its number.
        return torch.empty(0, device=self._device).device

    def _known(self, piece: Any) -> list[Tensor]:
        """What is there whether or not a chunk's graph is kept."""
        return [*self._parameters(), *rows.tensors_of(piece)]

    def _parameters(self) -> list[Tensor]:
        return [parameter for module in self._modules for parameter in module.parameters()]

    def _warn_of_batch_norm(self) -> None:
        if batch_norms(self._modules):
            self._warn(
                "batch normalisation",
                f"the encoder holds batch normalisation in training mode: it normalises over each chunk of {self.chunk} rows, not "
                "over the batch, so the result depends on the chunk. Its running statistics are updated once for every chunk, not "
                "again when it is recomputed. LayerNorm or GroupNorm, or batch normalisation in eval mode, do not depend on it",
            )

    def _warn_of_rounding(self, total: int) -> None:
        count = -(-total // self.chunk) if torch.is_grad_enabled() else 1
        dtypes = {p.dtype for p in self._parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)}
        if dtypes and count >= MANY:
            self._warn(
                "rounding",
                f"weights in {' and '.join(sorted(map(str, dtypes)))} have their gradients of {count} chunks summed up in that "
                "precision, so the result depends on the chunk: keep the weights in float32 and use autocast, or a larger chunk",
            )

    def _warn(self, subject: str, sentence: str) -> None:
        """Says it once, at the line that called the encoder."""
        if subject not in self._warned:
            self._warned.add(subject)
            warnings.warn(sentence, stacklevel=CALLER)


def _named_versions(inputs: Any) -> list[tuple[str, Tensor, int]]:
    """The tensors among a call's arguments with their names and versions; those made under inference mode have none."""
    return [(name, t, t._version) for name, t in rows.named_tensors(*inputs) if not t.is_inference()]


def _check_inputs(versions: Sequence[tuple[str, Tensor, int]]) -> None:
    """Raise if an input was changed in place since forward: the recomputation would start from what is there now."""
    for name, tensor, version in versions:
        if tensor._version != version:
            raise RuntimeError(
                f"the input {name} of a cached encoder was modified in place between forward and backward (it is at version "
                f"{tensor._version}, expected {version}), and backward runs the encoder on it again: call backward before the "
                "buffer is reused, or pass a copy, x.clone()"
            )


def check_chunk(chunk: object) -> int:
    """The chunk, if it is a positive number of rows."""
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise ValueError(f"chunk={chunk!r}: must be a positive number of rows, for example 256")
    return chunk


def what_changed(asked: int, chunk: int, stopped: bool) -> str:
    """The sentence for the user after memory ran out."""
    parts = ["graphs are no longer kept"] if stopped else []
    parts += [f"chunk {chunk} instead of {asked}"] if chunk < asked else []
    return (
        f"out of memory; from here on {' and '.join(parts)}. The batch and what is computed stay the same. "
        f"Pass {f'chunk={chunk}' if chunk < asked else 'a smaller keep'} to spare the failed attempt"
    )


def _sync(sync: object, wrapped: bool) -> str:
    if sync not in ("wrapper", "none"):
        raise ValueError(f'sync={sync!r}: must be "wrapper" (DDP or fully_shard exchanges gradients) or "none" (you do, or nobody)')
    if wrapped and sync == "none":
        raise ValueError('sync="none" with a DDP model, which exchanges gradients: call it under ddp.no_sync() to leave that out')
    return str(sync)


def _keep(keep: object) -> Keep:
    if keep == "auto":
        return KeepAuto()
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
        raise ValueError(f'keep={keep!r}: must be a number of chunks from 0 up, or "auto"')
    return Keep(keep)
