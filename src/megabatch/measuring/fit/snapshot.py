"""Snapshot and bit-exact restore of all that a step changes: weights, gradients, optimizer, generators, data position."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import TensorWeakRef

from ...chunks.ddp_fsdp import submodules
from ...chunks.rng_state import ForwardState, current_accelerator

Restore = Callable[[], Any]


class Snapshot:
    """A copy of the present state of `parts`, and of the global generators.

    parts: modules, optimizers, generators, and objects with state_dict() and load_state_dict(): gradient scalers, schedulers, data
        loaders that know their position.

    The copies are in host memory, so they take none of the device's; `bytes` is their size.
    """

    def __init__(self, parts: Iterable[Any]) -> None:
        parts = list(parts)
        self.bytes = 0
        self.modules = submodules([part for part in parts if isinstance(part, nn.Module)])
        self._restores: list[Restore] = [self._module(module) for module in self.modules]
        parameters = {id(p): p for module in self.modules for p in module.parameters(recurse=False)}
        for part in parts:
            if isinstance(part, torch.optim.Optimizer):
                parameters |= {id(p): p for group in part.param_groups for p in group["params"]}
        self.parameters = list(parameters.values())
        self._restores += [self._parameter(p) for p in self.parameters]
        self._restores += [self._part(part, index) for index, part in enumerate(parts) if not isinstance(part, nn.Module)]
        self.device = next((p.device for p in self.parameters), (current_accelerator() or [torch.device("cpu")])[0])
        devices = dict.fromkeys([torch.device("cpu"), *current_accelerator(), *(p.device for p in self.parameters)])
        self._restores += [ForwardState(devices, []).restore, *_host_generators()]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state. Tensors that existed stay the same objects; those that were created since are dropped."""
        for restore in self._restores:
            restore()

    def _part(self, part: Any, index: int) -> Restore:
        if isinstance(part, torch.optim.Optimizer):
            return self._optimizer(part)
        if isinstance(part, torch.Generator):
            generator_state = part.get_state()
            return lambda: part.set_state(generator_state)
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise ValueError(
                f"state[{index}] is a {type(part).__name__}: must be a module, an optimizer, a generator, or have state_dict() and "
                "load_state_dict(); omit it if no step changes it"
            )
        saved = copy.deepcopy(part.state_dict())

        def restore() -> None:
            if isinstance(part, torch.amp.GradScaler) and part.is_enabled():
                # A step that failed between unscale_() and update() has left its state here.
                part._per_optimizer_states.clear()
            part.load_state_dict(copy.deepcopy(saved))

        return restore

    def _module(self, module: nn.Module) -> Restore:
        training, buffers = module.training, {name: self._value(value) for name, value in module._buffers.items()}

        def restore() -> None:
            module.training = training
            module._buffers.clear()
            module._buffers.update({name: value() for name, value in buffers.items()})

        return restore

    def _parameter(self, parameter: nn.Parameter) -> Restore:
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                "a parameter of a lazy module has no shape yet, so its state cannot be copied; run one forward pass first"
            )
        value, gradient = self._value(parameter), self._gradient(parameter.grad)

        def restore() -> None:
            value()
            parameter.grad = gradient()

        return restore

    def _gradient(self, gradient: Tensor | None) -> Restore:
        """Do as `_value`, but do not keep a gradient alive that the step frees: a real step would have its memory."""
        if gradient is None or _local(gradient) is not gradient:
            return self._value(gradient)
        saved = gradient.detach().to("cpu", copy=True)
        self.bytes += saved.untyped_storage().nbytes()
        device, original = gradient.device, TensorWeakRef(gradient)

        def restore() -> Tensor:
            # Write into the same tensor if it still exists: it may be a view of a DDP bucket.
            tensor = original()
            return saved.to(device, copy=True) if tensor is None else tensor.copy_(saved)

        return restore

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> Restore:
        states = {p: {key: self._value(value) for key, value in state.items()} for p, state in optimizer.state.items()}
        groups = [{key: self._value(value) for key, value in g.items() if key != "params"} for g in optimizer.param_groups]

        def restore() -> None:
            for parameter in [p for p in optimizer.state if p not in states]:
                del optimizer.state[parameter]
            for parameter, state in states.items():
                _refill(optimizer.state[parameter], {key: value() for key, value in state.items()})
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                _refill(group, {"params": group["params"], **{key: value() for key, value in saved.items()}})

        return restore

    def _value(self, value: Any) -> Restore:
        """Return a function that restores the value: tensors at any depth are written to, everything else is copied."""
        leaves, shape = tree_flatten(value)
        saved = [self._leaf(leaf) for leaf in leaves]
        return lambda: tree_unflatten([leaf() for leaf in saved], shape)

    def _leaf(self, leaf: Any) -> Restore:
        if not isinstance(leaf, Tensor):
            copied = copy.deepcopy(leaf)
            return lambda: copy.deepcopy(copied)
        local = _local(leaf)
        saved = local.detach().to("cpu", copy=True)
        self.bytes += saved.untyped_storage().nbytes()

        def restore() -> Tensor:
            local.detach().copy_(saved)
            return leaf

        return restore


def _local(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or this rank's part of a distributed one."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _refill(table: dict[str, Any], values: dict[str, Any]) -> None:
    table.clear()
    table.update(values)


def _host_generators() -> list[Restore]:
    """Return functions that restore Python's generator, and NumPy's if the program has imported NumPy."""
    python_state = random.getstate()
    restores: list[Restore] = [lambda: random.setstate(python_state)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy_state = numpy.random.get_state()
        restores.append(lambda: numpy.random.set_state(numpy_state))
    return restores
