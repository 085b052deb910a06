"""What an encoder is made of, how its wrappers exchange gradients, and which of them a chunk cannot run in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ..ring import Ring
from .rows import rows_of


def modules_in(call: Any) -> list[nn.Module]:
    """The modules that a callable is, belongs to or refers to: a Module, its method, a partial, a function or object with them."""
    if isinstance(call, nn.Module):
        return [call]
    if isinstance(call, functools.partial):
        parts = [call.func, *(value for value in (*call.args, *call.keywords.values()) if isinstance(value, nn.Module))]
    elif inspect.ismethod(call):
        return modules_in(call.__self__)
    elif inspect.isfunction(call):
        names = inspect.getclosurevars(call)
        seen = [*names.nonlocals.values(), *names.globals.values()]
        parts = [value for value in seen if isinstance(getattr(value, "__self__", value), nn.Module)]
    else:
        parts = [value for value in getattr(call, "__dict__", {}).values() if isinstance(value, nn.Module)]
    return [module for part in parts for module in modules_in(part)]


def submodules(modules: list[nn.Module]) -> list[nn.Module]:
    """All modules inside, each once."""
    return list({id(inner): inner for module in modules for inner in module.modules()}.values())


def find_ddp(encoder: Callable[..., Any]) -> DistributedDataParallel | None:
    """The encoder if it is wrapped in DDP; a ValueError if a wrapper hides inside it that chunks cannot go through."""
    for module in submodules(modules_in(encoder)):
        package, name = type(module).__module__.partition(".")[0], type(module).__name__
        if package == "deepspeed" or any(hasattr(p, "ds_id") for p in module.parameters(recurse=False)):
            raise ValueError(
                f"the encoder holds a {name} of DeepSpeed: its ZeRO stages take weights and gradients apart in hooks that expect "
                "one forward a step; shard with torch.distributed.fsdp.fully_shard or replicate with DDP instead"
            )
        if name == "FullyShardedDataParallel":
            raise ValueError(
                "the encoder holds a FullyShardedDataParallel (FSDP1): which ranks share its weights does not show, so they "
                "could not agree on the number of chunks; shard with torch.distributed.fsdp.fully_shard (FSDP2) instead"
            )
        if (isinstance(module, DistributedDataParallel) and module is not encoder) or _is_replicated(module):
            raise ValueError(
                "DistributedDataParallel is called inside the encoder, so once for every chunk: it would prepare to exchange "
                "gradients as often; pass the DDP model itself, cached(ddp, chunk=…), or let DDP wrap the module that calls the "
                "cached encoder"
            )
    return encoder if isinstance(encoder, DistributedDataParallel) else None


def _is_replicated(module: nn.Module) -> bool:
    """Whether the module runs DDP's forward in hooks: torch.distributed._composable.replicate."""
    return any(kind.__module__ == "torch.distributed._composable.replicate" for kind in type(module).__mro__)


def meeting_rings(modules: list[nn.Module]) -> list[Ring]:
    """The ranks that meet inside the modules' forward, so that they must run equally many chunks: shards, synchronised norms."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.tensor import DTensor

    meshes = [p.device_mesh for module in modules for p in module.parameters() if isinstance(p, DTensor)]
    groups: list[Any] = [mesh.get_group(dim) for mesh in dict.fromkeys(meshes) for dim in range(mesh.ndim)]
    norms = [module for module in submodules(modules) if isinstance(module, nn.SyncBatchNorm)]
    groups += [norm.process_group or dist.group.WORLD for norm in norms]
    return [ring for ring in map(Ring, dict.fromkeys(groups)) if ring.size > 1]


def least_rows(modules: list[nn.Module]) -> int:
    """The rows that a chunk should have: batch normalisation in training has no variance of a single value."""
    return 2 if batch_norms(modules) else 1


@contextmanager
def explaining_single_rows(modules: list[nn.Module], piece: Any, pieces: Sequence[Any]) -> Iterator[None]:
    """Around the forward of one of the pieces of a batch: says what to do where batch normalisation refuses it."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error) or not batch_norms(modules) or rows_of(piece) > 1:
            raise
        total = sum(map(rows_of, pieces))
        remedy = "pass a chunk of at least 3 rows" if total > 1 else "leave such a batch out (drop_last in a DataLoader)"
        raise ValueError(
            f"a chunk has {rows_of(piece)} of the {total} rows of its batch, and batch normalisation in training mode needs at "
            f"least 2: {remedy}, or put the normalisation in eval mode"
        ) from error


def batch_norms(modules: list[nn.Module]) -> list[nn.Module]:
    """The batch normalisations that are in training."""
    return [module for module in submodules(modules) if isinstance(module, _BatchNorm) and module.training]


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Gradients stay on this rank: nothing is exchanged in the backward passes of what runs in here."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
        return
    sharded = fsdp_modules([model])
    for module in sharded:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in sharded:
            module.set_requires_gradient_sync(True, recurse=False)


def fsdp_modules(modules: list[nn.Module]) -> list[Any]:
    """The modules that fully_shard has sharded."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in submodules(modules) if isinstance(module, FSDPModule)]


@contextmanager
def gathering_weights(sharded: list[Any]) -> Iterator[None]:
    """Forwards that run in backward, with the weights of sharded modules gathered.

    fully_shard leaves that to the module's own backward; some versions of torch then find the shards of a chunk before.
    """
    handles = [module.register_forward_pre_hook(lambda module, args: module.unshard(), prepend=True) for module in sharded]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_once(ddp: DistributedDataParallel, work: Callable[[], Any]) -> Any:
    """What `work` returns, run as DDP's one forward of this step: one preparation, one exchange of each gradient."""

    class Stand(nn.Module):
        # DDP looks up the buffers that it broadcasts before a forward, and encoders that are cached inside it the parameters.
        named_buffers = ddp.module.named_buffers
        named_parameters = ddp.module.named_parameters

        def forward(self, nothing: None) -> Any:
            return work()

    original = ddp.module
    ddp.module = Stand()
    try:
        # With device_ids, DDP does not expect a call without inputs.
        return ddp(None)
    finally:
        ddp.module = original


def exchange_gradients(ddp: DistributedDataParallel) -> None:
    """Averages over ranks the gradients that were collected under no_sync, in place and in DDP's own buckets."""
    ignored = getattr(ddp, "parameters_to_ignore", ())
    parameters = [p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    Ring(ddp.process_group).sum(used)
    run_once(ddp, lambda: _Touch.apply(*parameters)).backward()
    for p, ranks in zip(parameters, used.tolist(), strict=True):
        if ranks == 0:
            p.grad = None


class _Touch(torch.autograd.Function):
    """A zero whose gradient in every parameter is zero: its backward passes them all by and changes nothing."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return tuple(p.new_zeros(()).expand_as(p) for p in ctx.saved_tensors)
