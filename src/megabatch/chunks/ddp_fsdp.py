"""The modules of an encoder and how DDP, FSDP2 and SyncBatchNorm exchange data in them: what is supported, and what is refused.

`check_exchange` raises if neither DDP nor fully_shard would exchange the gradients of an encoder's parameters.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Return the modules that a callable is, belongs to or refers to: a Module, its method, a partial, a function or an object."""
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
    """Return the modules and all modules inside them, each once."""
    return list({id(inner): inner for module in modules for inner in module.modules()}.values())


def find_ddp(encoder: Callable[..., Any]) -> DistributedDataParallel | None:
    """Return the encoder if it is a DDP model, else None; raise a ValueError if it contains a wrapper that cannot run in chunks."""
    for module in submodules(modules_in(encoder)):
        package, name = type(module).__module__.partition(".")[0], type(module).__name__
        if package == "deepspeed":
            raise ValueError(
                f"the encoder contains a {name} of DeepSpeed, whose forward prepares the exchange of gradients and would run once "
                'for every chunk; with ZeRO-1 and -2, let the module that the engine wraps call cached(…, sync="none") encoders '
                "in its forward; otherwise shard with torch.distributed.fsdp.fully_shard or replicate with DDP"
            )
        if name == "FullyShardedDataParallel":
            raise ValueError(
                "the encoder contains a FullyShardedDataParallel (FSDP1), which does not expose the ranks that share its weights, "
                "so they could not agree on the number of chunks; shard with torch.distributed.fsdp.fully_shard (FSDP2) instead"
            )
        if (isinstance(module, DistributedDataParallel) and module is not encoder) or _is_replicated(module):
            raise ValueError(
                "DistributedDataParallel is called inside the encoder, so once for every chunk: it would prepare an exchange of "
                "gradients each time; pass the DDP model itself, cached(ddp, chunk=…), or let DDP wrap the module that calls the "
                "cached encoder"
            )
    refuse_zero_3(modules_in(encoder))
    return encoder if isinstance(encoder, DistributedDataParallel) else None


def refuse_zero_3(modules: list[nn.Module]) -> None:
    """Raise a ValueError if DeepSpeed's ZeRO-3 has split the weights."""
    if any(hasattr(p, "ds_id") for module in modules for p in module.parameters()):
        raise ValueError(
            "the weights of the encoder are split by ZeRO-3 of DeepSpeed, which gathers them in hooks that expect one forward and "
            "one backward per step; use ZeRO-1 or -2, or shard with torch.distributed.fsdp.fully_shard"
        )


def _is_replicated(module: nn.Module) -> bool:
    """Return whether the module runs DDP's forward in hooks: torch.distributed._composable.replicate."""
    return any(kind.__module__ == "torch.distributed._composable.replicate" for kind in type(module).__mro__)


def meeting_rings(modules: list[nn.Module]) -> list[Ring]:
    """Return the groups of ranks that communicate inside the modules' forward and must run equally many chunks.

    These are the meshes of sharded parameters and the groups of synchronised batch normalisations.
    """
    refuse_zero_3(modules)
    if not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.tensor import DTensor

    meshes = [p.device_mesh for module in modules for p in module.parameters() if isinstance(p, DTensor)]
    groups: list[Any] = [mesh.get_group(dim) for mesh in dict.fromkeys(meshes) for dim in range(mesh.ndim)]
    norms = [module for module in submodules(modules) if isinstance(module, nn.SyncBatchNorm)]
    groups += [norm.process_group or dist.group.WORLD for norm in norms]
    return [ring for ring in map(Ring, dict.fromkeys(groups)) if ring.size > 1]


def least_rows(modules: list[nn.Module]) -> int:
    """Return the least rows that a chunk should have: 2 with batch normalisation in training, since one value has no variance."""
    return 2 if batch_norms(modules) else 1


@contextmanager
def explaining_single_rows(modules: list[nn.Module], piece: Any, pieces: Sequence[Any]) -> Iterator[None]:
    """Context around the forward of one piece of a batch: explains the error of batch normalisation for a single row."""
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
    """Return the batch normalisations in training mode."""
    return [module for module in submodules(modules) if isinstance(module, _BatchNorm) and module.training]


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Context without an exchange of gradients: backward passes of what runs inside leave them on this rank."""
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
    """Return the modules that fully_shard has sharded."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in submodules(modules) if isinstance(module, FSDPModule)]


@contextmanager
def gathering_weights(sharded: list[Any]) -> Iterator[None]:
    """Context for forwards that run in backward: gathers the weights of the sharded modules before each of them.

    fully_shard leaves that to the module's own backward; some versions of torch then use the shards of the chunk before.
    """
    handles = [module.register_forward_pre_hook(lambda module, args: module.unshard(), prepend=True) for module in sharded]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_once(ddp: DistributedDataParallel, work: Callable[[], Any]) -> Any:
    """Return work(), run as the only forward of DDP in this step: one preparation, one exchange of each gradient."""

    class Substitute(nn.Module):
        # DDP looks up the buffers to broadcast before a forward; cached encoders inside it look up the parameters.
        named_buffers = ddp.module.named_buffers
        named_parameters = ddp.module.named_parameters

        def forward(self, unused: None) -> Any:
            return work()

    original = ddp.module
    ddp.module = Substitute()
    try:
        # With device_ids, DDP cannot be called without inputs.
        return ddp(None)
    finally:
        ddp.module = original


def exchange_gradients(ddp: DistributedDataParallel) -> None:
    """Average over ranks the gradients that were collected under no_sync, in place and in DDP's own buckets."""
    ignored = getattr(ddp, "parameters_to_ignore", ())
    parameters = [p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    Ring(ddp.process_group).sum(used)
    run_once(ddp, lambda: _Touch.apply(*parameters)).backward()
    for p, ranks in zip(parameters, used.tolist(), strict=True):
        if ranks == 0:
            p.grad = None


class _Touch(torch.autograd.Function):
    """Returns zero with a zero gradient for every parameter: its backward triggers DDP's exchange and adds nothing."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return tuple(p.new_zeros(()).expand_as(p) for p in ctx.saved_tensors)


def check_exchange(inputs: Iterable[Tensor], outputs: Iterable[Tensor], modules: list[nn.Module]) -> None:
    """Raise a ValueError if parameters that the outputs depend on would keep the gradients of this rank alone.

    inputs, outputs: the tensors of one chunk, which was run outside `cached(ddp)`. modules: those of the encoder.
    """
    # With checkpointing around the encoder, a forward recomputed in backward comes here again after DDP's forward has ended.
    if not _has_several_ranks() or torch._C._current_graph_task_id() != -1:
        return
    outputs = [tensor for tensor in outputs if tensor.requires_grad]
    if not outputs:
        return
    parameters = {id(p) for module in modules for p in module.parameters() if p.requires_grad}
    active, sharded = DistributedDataParallel._active_ddp_module, fsdp_modules(modules)
    if active is not None or sharded:
        # Only parameters of the modules are judged: fully_shard, for example, replaces parameters by other tensors in forward.
        owners = sharded if active is None else [*sharded, active.module]
        unexchanged = parameters - {id(p) for owner in owners for p in owner.parameters()}
        if not unexchanged:
            return
        unexchanged_leaves = [leaf for leaf in leaves_of(inputs, outputs) if id(leaf) in unexchanged]
    else:
        unexchanged_leaves = [leaf for leaf in leaves_of(inputs, outputs) if not _is_dtensor(leaf)]
    if unexchanged_leaves:
        raise ValueError(_reason(unexchanged_leaves, modules, active is not None))


def _has_several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _is_dtensor(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor, whose gradient is complete on the ranks of its mesh."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def leaves_of(inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves whose gradients a backward from the outputs accumulates, except the inputs and what they depend on."""
    inputs = list(inputs)
    # Nodes are compared by identity; their Python objects must stay referenced, or a new node could get the same id.
    seen = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}
    leaves: list[Tensor] = [tensor for tensor in outputs if tensor.is_leaf]
    stack: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves.append(variable)
        stack.extend(following for following, _ in node.next_functions if following is not None)
    input_ids = {id(tensor) for tensor in inputs}
    return [leaf for leaf in leaves if id(leaf) not in input_ids]


def _reason(leaves: list[Tensor], modules: list[nn.Module], inside_ddp: bool) -> str:
    names = {id(p): name for module in modules for name, p in module.named_parameters()}
    name = next((names[id(leaf)] for leaf in leaves if id(leaf) in names), None)
    several = len(leaves) > 1
    which = f"{len(leaves)} parameter{'s' * several}" + ("" if name is None else f" ({name!r}{', …' * several})")
    where = "of which the DDP model whose forward is running holds none" if inside_ddp else "outside of a DDP model's forward"
    return (
        f"the cached encoder runs on {dist.get_world_size()} ranks {where}: the gradients of {which} would not be exchanged, and "
        "ranks would train different weights. Pass the DDP model itself, cached(ddp, chunk=…), or let DDP wrap a module that calls "
        "the cached encoder in its forward. Where a trainer wraps the model, create the cached encoder afterwards, from the "
        'wrapped model. If you exchange the gradients yourself or do not want them exchanged, pass cached(…, sync="none")'
    )
