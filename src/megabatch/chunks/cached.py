"""Encoders at any batch size: the batch runs in chunks, whose activations are recomputed in backward instead of stored."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..losses.autograd import outside_graphs
from ..ring import Ring
from . import rows
from .ddp_fsdp import (
    batch_norms,
    check_exchange,
    explaining_single_rows,
    find_ddp,
    fsdp_modules,
    gathering_weights,
    least_rows,
    leaves_of,
    meeting_rings,
    modules_in,
    no_sync,
    run_once,
    submodules,
)
from .division import ByFunction, ByTokens, Divide, Division, by_rows
from .graphless import Chunks, attached
from .keep import Keep, KeepAuto, last_full
from .oom import current_attempt, is_out_of_memory, oom_warning, release
from .recompute import Differences, Repeatability, recomputed, tolerance_for
from .rng_state import (
    Buffer,
    ForwardState,
    RngSource,
    buffers_of,
    check_generators,
    current_accelerator,
    differs,
    host_sources,
    sources_in,
    states_of,
    versions_of,
)

# From this number of chunks on, a sum of their gradients in half precision deserves a warning.
MANY_CHUNKS = 16
# The stacklevel of the user's line for `_warn`, including the frames of outside_graphs.
CALLER = 7


def cached(
    encoder: Callable[..., Any],
    chunk: int | None = None,
    *,
    forward_chunk: int | None = None,
    tokens: int | None = None,
    split: Callable[..., Iterable[Any]] | None = None,
    outputs: Sequence[str] | None = None,
    keep: int | Literal["auto"] = 0,
    device: torch.device | str | None = None,
    sync: Literal["wrapper", "none"] = "wrapper",
    generators: Sequence[Any] = (),
    check: bool = True,
) -> Cached:
    """Return the encoder with the same signature and gradients, which stores the activations of one chunk at a time.

    encoder: a Module, a method of one, or a function of them. Wrapped in DDP, it exchanges gradients once per step.
        Inputs and outputs are tensors whose first dimension is the batch, in tuples, lists and dicts of any depth.
    chunk: rows that go through the encoder at once. It determines the memory, but not the result.
    forward_chunk: rows that go through the encoder at once in forward, for example 4 · chunk; None: `chunk`. Forward then records
        no graph, and a row takes the memory of a layer or two. Only for encoders that draw no random numbers and change no
        buffers in forward, and without fully_shard: a ValueError otherwise.
    tokens: for texts, tokens that go through the encoder at once, padding included. Rows are sorted by length, padding that all
        rows of a chunk share is cut off, and outputs come back in the order of the inputs. An `attention_mask` of shape (rows,
        tokens) among the inputs tells the lengths. With `chunk` too, a chunk has at most that many rows.
    split: a function that divides inputs whose first dimension is not the batch (packed texts, images of different sizes). It takes
        the arguments of the encoder and returns a list with those of each chunk: the argument itself if there is one, a tuple of
        several, a dict of keyword arguments. The outputs of the chunks are joined in that order.
    outputs: names of the outputs to keep and join, for encoders that return more than embeddings, for example
        ("image_embeds", "text_embeds") for a model that also returns the similarities of each chunk.
    keep: number of chunks whose graphs are kept instead of recomputed in backward; "auto" fills the free memory from the second
        step on.
    device: moves the inputs there one chunk at a time, for example from pinned host memory; None leaves them where they are.
    sync: who exchanges gradients between ranks. "wrapper": DDP or fully_shard; a call for which neither does raises a
        ValueError. "none": nobody; you do it yourself, or each rank keeps its own.
    generators: random number generators of the encoder to replay, in addition to those found in its attributes, closures and
        partial arguments: generators of torch, random and numpy.random, or objects with get_state() and set_state().
    check: compare a few values of every recomputed row with those of forward, and raise a RuntimeError at the end of backward
        if they differ.

    Dropout is replayed, autocast and GradScaler are respected, frozen parts stay frozen. A chunk that runs out of memory in forward
    is retried in halves; `retry_on_oom` does that for the whole step, including backward.

    >>> import torch, megabatch
    >>> tower = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    >>> encode = megabatch.cached(tower, chunk=128)
    >>> encode(torch.randn(1000, 32)).shape
    torch.Size([1000, 16])
    """
    return Cached(encoder, CacheOptions(chunk, forward_chunk, tokens, split, outputs, keep, device, sync, generators, check))


@dataclass(frozen=True)
class CacheOptions:
    """The options of `cached`."""

    chunk: int | None
    forward_chunk: int | None
    tokens: int | None
    split: Callable[..., Iterable[Any]] | None
    outputs: Sequence[str] | None
    keep: int | Literal["auto"]
    device: torch.device | str | None
    sync: Literal["wrapper", "none"]
    generators: Sequence[Any]
    check: bool


class Cached:
    """The callable that `cached` returns.

    chunk: the limit of a chunk in rows, or in tokens if `tokens` was passed; lower than requested if memory ran out.
    unit: the option that gave it. chunks: how many chunks the last call had. kept: how many of them it kept.
    """

    def __init__(self, encoder: Callable[..., Any], options: CacheOptions) -> None:
        if not callable(encoder):
            raise ValueError(f"encoder is a {type(encoder).__name__}: must be a Module or a function that encodes a batch")
        self._divide, self.chunk, self.unit = _division(options)
        self._forward_chunk = _forward_chunk(options)
        self.chunks = self.kept = 0
        self._outputs = None if options.outputs is None else _names(options.outputs)
        self._keep = _keep(options.keep)
        self._ddp = find_ddp(encoder)
        self._encoder = encoder if self._ddp is None else self._ddp.module
        self._modules = modules_in(self._encoder)
        self._device = None if options.device is None else torch.device(options.device)
        if self._ddp is not None and self._ddp.device_ids and self._device is None:
            # DDP would move the whole batch there.
            self._device = torch.device(self._ddp.device_type, self._ddp.device_ids[0])
        self._sync = _sync(options.sync, self._ddp is not None)
        self._generators, self._found_generators = check_generators(options.generators), list[RngSource]()
        self._check = options.check
        self._differences = Differences()
        self._modes: list[bool] = []
        self._stateful: list[Buffer] | None = None
        self._warned: set[str] = set()

    @outside_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._differences.judge_arrived()
        meeting = meeting_rings(self._modules)
        attempt = current_attempt.get()
        if attempt is not None:
            attempt.join(self, meeting, self._ddp)
        if self._ddp is None:
            return self._encode((args, kwargs), meeting)
        with nullcontext() if attempt is None else no_sync(self._ddp):
            return run_once(self._ddp, lambda: self._encode((args, kwargs), meeting))

    def __repr__(self) -> str:
        name = getattr(self._encoder, "__name__", type(self._encoder).__name__)
        return f"cached({name}, {self.unit}={self.chunk})"

    def stop_keeping(self) -> bool:
        return self._keep.stop()

    def _encode(self, inputs: Any, meeting: list[Ring]) -> Any:
        """Return the outputs for all rows, in smaller chunks if memory does not suffice for these."""
        self._warn_of_batch_norm()
        start = ForwardState(self._devices(inputs), self._buffers(), versions_of(self._parameters()), states_of(self._sources()))
        attempt = current_attempt.get()
        if attempt is not None:
            attempt.states.append(start)
        requested, stopped = self.chunk, False
        while True:
            try:
                division = self._divide(inputs, self.chunk, least_rows(self._modules))
                self._warn_of_rounding(len(division.pieces))
                outputs = self._run(inputs, division, start, meeting)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or meeting:
                    raise
                if self._forward_chunk is not None and self._forward_chunk > self.chunk:
                    self._warn_of_forward_chunk()
                    self._forward_chunk = None
                elif self.stop_keeping():
                    stopped = True
                elif self.chunk > 1:
                    self.chunk //= 2
                else:
                    self.chunk = requested
                    raise
            # Not in the except clause: while the exception exists, its frames hold the tensors that have to be freed.
            release()
            start.restore()
        if stopped or self.chunk < requested:
            warnings.warn(oom_warning(requested, self.chunk, stopped, self.unit), stacklevel=CALLER - 2)
        return outputs

    def _run(self, inputs: Any, division: Division, start: ForwardState, meeting: list[Ring]) -> Any:
        pieces, sizes, costs = list(division.pieces), list(division.sizes), list(division.costs)
        device, recording = self._compute_device(inputs), torch.is_grad_enabled()
        count, kept = len(pieces), self._keep.begin(device, costs) if recording else 0
        for ring in meeting:
            counts = ring.gather([count, kept], device)
            count, kept = max(each[0] for each in counts), min(each[1] for each in counts)
        self.chunks, self.kept = count, min(kept, count)
        measured = last_full(costs)
        missing = count - len(pieces)
        pieces += [division.extra] * missing
        sizes += [0] * missing
        sharded = fsdp_modules(self._modules)
        repeatability = Repeatability(self._tolerance(inputs), self._differences) if self._check and recording else None
        recomputation = self._recomputation(inputs, sharded, device, repeatability)
        discarded = range(len(division.pieces), count)
        graphless = self._graphless(inputs, count - kept, meeting, sharded) if recording else range(0)
        outputs: list[Any] = []
        states = start.sources
        for index, piece in enumerate(pieces):
            if index in graphless:
                if index == graphless.start:
                    outputs += self._without_graph(inputs, division, graphless, start, outputs[0], repeatability)
                continue
            with explaining_single_rows(self._modules, piece, pieces):
                if not recording:
                    outputs.append(self._chunk(piece, index in discarded))
                elif index < count - kept:
                    state = start if index == 0 else ForwardState(start.generators, self._stateful or (), start.weights, states)
                    outputs.append(recomputation(index, piece, state, index in discarded))
                    states = state.forward_done()
                else:
                    with self._keep.measuring(costs[index], self._known(piece)) if index == measured else nullcontext():
                        outputs.append(self._chunk(piece, index in discarded))
            if index == 0 and recording and self._ddp is None and self._sync == "wrapper":
                check_exchange(rows.tensors_of(piece), rows.tensors_of(outputs), self._modules)
            if self._stateful is None:
                self._stateful = [buffer for buffer, value in start.buffers.items() if differs(value, buffer.tensor)]
        joined_sizes = [_rows_of_outputs(out) if size is None else size for out, size in zip(outputs, sizes, strict=True)]
        joined = rows.join(outputs, joined_sizes)
        if repeatability is not None:
            repeatability.remember(joined, joined_sizes)
        return joined if division.inverse is None else rows.select(joined, division.inverse)

    def _graphless(self, inputs: Any, recomputed_chunks: int, meeting: list[Ring], sharded: list[Any]) -> range:
        """Return the indices of the chunks whose forward records no graph: those after the first that backward runs again."""
        if self._forward_chunk is None or self._forward_chunk < 2 * self.chunk or recomputed_chunks < 2:
            return range(0)
        reasons = {
            "batch normalisation in training mode": batch_norms(self._modules),
            "ranks that communicate in forward (fully_shard)": meeting or sharded,
            "inputs that need a gradient": [tensor for tensor in rows.tensors_of(inputs) if tensor.requires_grad],
        }
        for reason, found in reasons.items():
            if found:
                raise ValueError(f"forward_chunk={self._forward_chunk} does not work with {reason}: leave it out")
        return range(1, recomputed_chunks)

    def _without_graph(
        self,
        inputs: Any,
        division: Division,
        chosen: range,
        start: ForwardState,
        first: Any,
        repeatability: Repeatability | None,
    ) -> list[Any]:
        """Return the outputs of the chosen chunks, several of which go through the encoder at once. first: those of chunk 0."""
        assert self._forward_chunk is not None
        leaves = _leaves(rows.tensors_of(first))
        if any(leaf._backward_hooks for leaf in leaves):
            raise ValueError(f"forward_chunk={self._forward_chunk}: a parameter has a hook, which would run twice; leave it out")
        sizes = [size for size in division.sizes if size is not None]
        together = self._forward_chunk // self.chunk
        groups = [sum(sizes[i : min(i + together, chosen.stop)]) for i in range(chosen.start, chosen.stop, together)]
        pieces = rows.split_sizes(inputs, [sizes[0], *groups, *sizes[chosen.stop :]])[1 : 1 + len(groups)]
        with torch.no_grad():
            values = rows.join([self._chunk(piece, False) for piece in pieces], groups)
        # Under no_grad autocast has cached copies of the weights that have no gradient.
        torch.clear_autocast_cache()
        if start.changed():
            start.restore()
            raise ValueError(
                f"forward_chunk={self._forward_chunk}: the encoder draws random numbers or changes buffers in forward, so that the "
                "result would depend on it; leave it out, or turn dropout off"
            )
        versions, device = _named_versions(inputs), self._compute_device(inputs)

        def run(index: int) -> list[Tensor]:
            self._keep.record_peak(device)
            _check_inputs(versions)
            with start.replayed():
                outputs = self._chunk(division.pieces[chosen[index]], False)
            if repeatability is not None:
                repeatability.compare(chosen[index], outputs)
            return rows.tensors_of(outputs)

        of_chosen = sizes[chosen.start : chosen.stop]
        differentiable = [tensor.requires_grad for tensor in rows.tensors_of(first)]
        tensors = iter(attached(rows.tensors_of(values), differentiable, Chunks(run, _leaves, of_chosen), leaves))
        return rows.split_sizes(rows.map_tensors(values, lambda tensor: next(tensors)), of_chosen)

    def _recomputation(
        self, inputs: Any, sharded: list[Any], device: torch.device, repeatability: Repeatability | None
    ) -> Callable[[int, Any, ForwardState, bool], Any]:
        """Return the function that runs one chunk without storing its activations; backward runs it again from the same state."""
        versions = _named_versions(inputs)

        def recomputation(index: int, piece: Any, state: ForwardState, discard: bool) -> Any:
            def run(again: bool) -> Any:
                self._keep.record_peak(device)
                if not again:
                    return self._chunk(piece, discard)
                _check_inputs(versions)
                with state.replayed(), gathering_weights(sharded):
                    outputs = self._chunk(piece, discard)
                if repeatability is not None:
                    repeatability.compare(index, outputs)
                return outputs

            return recomputed(run)

        return recomputation

    def _chunk(self, piece: Any, discard: bool) -> Any:
        """Return the outputs of a chunk; with `discard`, none of their rows."""
        # Autocast caches its reduced-precision copies of the weights between chunks; their gradients would then be summed over all
        # chunks in that precision. With a copy for each chunk, they are summed in the precision of the weights.
        torch.clear_autocast_cache()
        versions = versions_of(rows.tensors_of(piece))
        # New containers: an encoder may write into a dict that it is given, and the recomputation starts from the same inputs.
        args, kwargs = rows.map_tensors(piece, self._to_device)
        outputs = self._encoder(*args, **kwargs)
        if self._outputs is not None:
            outputs = _named_outputs(outputs, self._outputs)
        if any(tensor._version != version for tensor, version in versions):
            raise ValueError(
                "the encoder changes its input in place: recomputed in backward, it would start from the changed one; let it "
                "work on a copy, for example images / 255 instead of images.div_(255)"
            )
        return rows.empty(outputs) if discard else outputs

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor if self._device is None else tensor.to(self._device, non_blocking=True)

    def _buffers(self) -> list[Buffer]:
        """Return the buffers that a forward changes; all of them until that is known for the modules' modes (train, eval)."""
        inner = submodules(self._modules)
        modes = [module.training for module in inner]
        if modes != self._modes:
            self._modes, self._stateful = modes, None
        if self._stateful is not None:
            return self._stateful
        return buffers_of(inner)

    def _sources(self) -> list[RngSource]:
        """Return the generators to replay besides those of devices. Call `_buffers` first: it detects a change of modes."""
        if self._stateful is None:
            self._found_generators = sources_in(self._encoder, submodules(self._modules))
        return [*host_sources(), *self._generators, *self._found_generators]

    def _tolerance(self, inputs: Any) -> float:
        """Return the relative difference between an output and its recomputation that rounding cannot explain."""
        tensors = (*self._parameters(), *rows.tensors_of(inputs))
        devices = {self._compute_device(inputs), *(tensor.device for tensor in tensors)}
        kinds = {device.type for device in devices if torch.amp.is_autocast_available(device.type)}
        lower = [torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)]
        return tolerance_for([*lower, *{tensor.dtype for tensor in tensors}], devices)

    def _devices(self, inputs: Any) -> list[torch.device]:
        """Return every device whose generator the encoder may draw from."""
        known = [tensor.device for tensor in (*self._parameters(), *rows.tensors_of(inputs))]
        every = dict.fromkeys([torch.device("cpu"), *current_accelerator(), self._compute_device(inputs), *known])
        return [device for device in every if device.type != "meta"]

    def _compute_device(self, inputs: Any) -> torch.device:
        tensors = (*self._parameters(), *rows.tensors_of(inputs))
        if self._device is None:
            return tensors[0].device if tensors else torch.device("cpu")
        # An empty tensor resolves "cuda" to the current device and its index.
        return torch.empty(0, device=self._device).device

    def _known(self, piece: Any) -> list[Tensor]:
        """Return the tensors that exist whether or not a chunk's graph is kept."""
        return [*self._parameters(), *rows.tensors_of(piece)]

    def _parameters(self) -> list[Tensor]:
        return [parameter for module in self._modules for parameter in module.parameters()]

    def _warn_of_batch_norm(self) -> None:
        if batch_norms(self._modules):
            self._warn(
                "batch normalisation",
                "the encoder contains batch normalisation in training mode: it normalises over each chunk "
                f"({self.unit}={self.chunk}), not over the batch, so the result depends on the chunk. Its running statistics are "
                "updated once for every chunk, not again in the recomputation. LayerNorm or GroupNorm, or batch normalisation in "
                "eval mode, do not depend on it",
            )

    def _warn_of_rounding(self, count: int) -> None:
        dtypes = {p.dtype for p in self._parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)}
        if dtypes and count >= MANY_CHUNKS and torch.is_grad_enabled():
            self._warn(
                "rounding",
                f"weights in {' and '.join(sorted(map(str, dtypes)))} have their gradients of {count} chunks summed in that "
                "precision, so the result depends on the chunk: keep the weights in float32 and use autocast, or a larger chunk",
            )

    def _warn_of_forward_chunk(self) -> None:
        self._warn(
            "forward chunk",
            f"memory did not suffice for forward_chunk={self._forward_chunk}: forward runs {self.chunk} rows at a time from now "
            "on. Pass a smaller forward_chunk to avoid the failed attempt",
        )

    def _warn(self, subject: str, sentence: str) -> None:
        """Warn once per subject, at the line that called the encoder."""
        if subject not in self._warned:
            self._warned.add(subject)
            warnings.warn(sentence, stacklevel=CALLER)


def _leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that a chunk's outputs depend on, each once: an output may itself be a leaf."""
    return list({id(leaf): leaf for leaf in leaves_of([], [tensor for tensor in outputs if tensor.requires_grad])}.values())


def _named_versions(inputs: Any) -> list[tuple[str, Tensor, int]]:
    """Return the tensors among a call's arguments with their names and versions; those made in inference mode have none."""
    return [(name, t, t._version) for name, t in rows.named_tensors(*inputs) if not t.is_inference()]


def _check_inputs(versions: Sequence[tuple[str, Tensor, int]]) -> None:
    """Raise if an input was changed in place since forward: the recomputation would start from the new values."""
    for name, tensor, version in versions:
        if tensor._version != version:
            raise RuntimeError(
                f"the input {name} of a cached encoder was modified in place between forward and backward (it is at version "
                f"{tensor._version}, expected {version}), and backward runs the encoder on it again: call backward before the "
                "buffer is reused, or pass a copy, x.clone()"
            )


def _rows_of_outputs(outputs: Any) -> int:
    """Return the rows that an encoder returned for a chunk of a split function."""
    batched = [tensor for tensor in rows.tensors_of(outputs) if tensor.ndim]
    if not batched:
        raise ValueError("the encoder returned no tensor with a batch dimension for a chunk: there is nothing to join")
    return len(batched[0])


def _named_outputs(outputs: Any, names: tuple[str, ...]) -> Any:
    """Return what an encoder returned with these outputs alone: a mapping of the same type, or a dict of the attributes."""
    if isinstance(outputs, Mapping):
        missing = [name for name in names if outputs.get(name) is None]
        chosen = {name: outputs[name] for name in names if name not in missing}
    else:
        missing = [name for name in names if getattr(outputs, name, None) is None]
        chosen = {name: getattr(outputs, name) for name in names if name not in missing}
    if missing:
        known = list(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise ValueError(f"outputs={names!r}: the encoder returned no {' and no '.join(missing)}, but {known}")
    # Hugging Face's outputs are mappings with an attribute for each of their fields, which are None by default.
    return type(outputs)(**chosen) if isinstance(outputs, Mapping) else chosen


def _division(options: CacheOptions) -> tuple[Divide, int, str]:
    """Return how inputs are divided, the limit of a chunk, and the name of the option that gave it."""
    if options.split is not None:
        if options.chunk is not None or options.tokens is not None:
            raise ValueError("split=… divides the inputs, so chunk and tokens have no effect: pass one of them, or split alone")
        if not callable(options.split):
            raise ValueError(
                f"split={options.split!r}: must be a function of the encoder's arguments that returns a list of chunks"
            )
        # A limit of 1 cannot be lowered if memory runs out.
        return ByFunction(options.split), 1, "split"
    if options.tokens is None:
        return by_rows, check_chunk(options.chunk), "chunk"
    if not isinstance(options.tokens, int) or isinstance(options.tokens, bool) or options.tokens < 1:
        raise ValueError(f"tokens={options.tokens!r}: must be a positive number of tokens, for example 16384")
    return ByTokens(None if options.chunk is None else check_chunk(options.chunk)), options.tokens, "tokens"


def _forward_chunk(options: CacheOptions) -> int | None:
    if options.forward_chunk is None:
        return None
    if options.chunk is None or options.tokens is not None or options.split is not None:
        raise ValueError(f"forward_chunk={options.forward_chunk!r} needs chunk=…, without tokens and split; leave it out")
    if check_chunk(options.forward_chunk, "forward_chunk") < options.chunk:
        raise ValueError(f"forward_chunk={options.forward_chunk}: must be at least chunk={options.chunk}")
    return options.forward_chunk


def _names(outputs: object) -> tuple[str, ...]:
    names = tuple(outputs) if isinstance(outputs, Sequence) and not isinstance(outputs, str) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f'outputs={outputs!r}: must be names of outputs, for example ("image_embeds", "text_embeds")')
    return names


def check_chunk(chunk: object, name: str = "chunk") -> int:
    """Return the chunk; raise a ValueError unless it is a positive number of rows."""
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise ValueError(f"{name}={chunk!r}: must be a positive number of rows, for example 256")
    return chunk


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
