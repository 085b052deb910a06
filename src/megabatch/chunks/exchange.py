"""Whether somebody exchanges the gradients of an encoder's parameters: DDP around the call, or fully_shard inside the encoder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .ddp_fsdp import fsdp_modules


def check_exchange(inputs: Iterable[Tensor], outputs: Iterable[Tensor], modules: list[nn.Module]) -> None:
    """Raise a ValueError if parameters that the outputs depend on would keep the gradients of this rank alone.

    inputs, outputs: the tensors of one chunk, which was run outside `cached(ddp)`. modules: those of the encoder.
    """
    # In backward a recomputed forward comes here once more (checkpointing around the encoder), after DDP's forward has ended.
    if not _several_ranks() or torch._C._current_graph_task_id() != -1:
        return
    outputs = [tensor for tensor in outputs if tensor.requires_grad]
    if not outputs:
        return
    parameters = {id(p) for module in modules for p in module.parameters() if p.requires_grad}
    active, sharded = DistributedDataParallel._active_ddp_module, fsdp_modules(modules)
    if active is not None or sharded:
        # Of what the modules do not hold, nothing is known: fully_shard puts other tensors in the parameters' places, for one.
        owners = sharded if active is None else [*sharded, active.module]
        stay = parameters - {id(p) for owner in owners for p in owner.parameters()}
        if not stay:
            return
        left = [leaf for leaf in _leaves(inputs, outputs) if id(leaf) in stay]
    else:
        left = [leaf for leaf in _leaves(inputs, outputs) if not _is_distributed(leaf)]
    if left:
        raise ValueError(_reason(left, modules, active is not None))


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _is_distributed(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor, whose gradient is complete on the ranks of its mesh."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _leaves(inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> list[Tensor]:
    """The tensors whose gradients a backward from the outputs accumulates, without the inputs and what those depend on."""
    inputs = list(inputs)
    # Nodes are compared by identity, which Python's objects for them have only as long as they are referred to.
    begin = [tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None]
    seen = set(begin)
    found: list[Tensor] = [tensor for tensor in outputs if tensor.is_leaf]
    stack: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.append(variable)
        stack.extend(following for following, _ in node.next_functions if following is not None)
    own = {id(tensor) for tensor in inputs}
    return [leaf for leaf in found if id(leaf) not in own]


def _reason(left: list[Tensor], modules: list[nn.Module], inside_ddp: bool) -> str:
    names = {id(p): name for module in modules for name, p in module.named_parameters()}
    name = next((names[id(leaf)] for leaf in left if id(leaf) in names), None)
    which = f"{len(left)} parameter{'s' * (len(left) > 1)}" + ("" if name is None else f" ({name!r}{', …' * (len(left) > 1)})")
    where = "of which the DDP model whose forward is running holds none" if inside_ddp else "outside of a DDP model's forward"
    return (
        f"the cached encoder runs on {dist.get_world_size()} ranks {where}: the gradients of {which} would not be exchanged, and "
        "ranks would train different weights. Pass the DDP model itself, cached(ddp, chunk=…), or let DDP wrap a module that calls "
        "the cached encoder in its forward. Where a trainer wraps the model, create the cached encoder afterwards, from the "
        'wrapped model. If you exchange the gradients yourself or do not want them exchanged, say cached(…, sync="none")'
    )
