"""The optimizer of a run: its class and parameter groups, its state as tensors, and the moving average of the weights."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Optimizer, is_torch_optimizer
from ..optimizers import OPTIMIZERS, is_fused


def build_optimizer(model: nn.Module, options: Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer of the trainable parameters; weight decay applies to matrices and convolutions only."""
    learning = [p for p in model.parameters() if p.requires_grad]
    if not learning:
        raise ValueError("no parameter is trainable: both towers are locked; unlock one (x.locked=false)")
    fused = is_fused(options.name, options.options, learning[0].device.type) and all(p.is_floating_point() for p in learning)
    groups = _groups(learning, options.weight_decay, fused=fused)
    kind = _named(options.name)
    spec = OPTIMIZERS.get(options.name)
    set_elsewhere = {"lr": options.lr} | {key: getattr(options, key) for key in (spec.keys if spec is not None else ())}
    _check_options(kind, options.options, set_elsewhere)
    arguments = set_elsewhere | ({"fused": True} if fused else {}) | dict(options.options)
    try:
        optimizer = kind(groups, **arguments)
        if kind.__module__.startswith("torch.optim."):
            _try_step(kind, learning[0].device, arguments)
    except Exception as error:
        raise _unusable_options(kind, options.options, f"{type(error).__name__}: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind_name = type(optimizer).__name__
        raise ValueError(f"optimizer.name is {options.name!r}: it returns a {kind_name}, and must return a torch.optim.Optimizer")
    return optimizer


def _groups(parameters: list[nn.Parameter], weight_decay: float, *, fused: bool) -> list[dict[str, Any]]:
    """Return the parameter groups: with and without weight decay. A fused kernel cannot mix sharded and unsharded tensors."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for decays in (True, False):
        for parameter in parameters:
            if (parameter.ndim >= 2) is decays:
                groups.setdefault((decays, fused and is_sharded(parameter)), []).append(parameter)
    return [{"params": members, "weight_decay": weight_decay if decays else 0.0} for (decays, _), members in groups.items()]


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is split over ranks (DTensor)."""
    return hasattr(tensor, "full_tensor")


def _named(name: str) -> Any:
    """Return the class of a built-in optimizer, or of "package.module:Class"."""
    if name in OPTIMIZERS:
        return getattr(torch.optim, OPTIMIZERS[name].torch_class)
    if ":" not in name:
        raise ValueError(f'optimizer.name is {name!r}: must be {", ".join(OPTIMIZERS)}, or "package.module:Class"')
    try:
        found = pkgutil.resolve_name(name)
    except Exception as error:
        raise ValueError(f"optimizer.name is {name!r}: cannot be imported ({type(error).__name__}: {error})") from error
    is_class = isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    # Names in torch.optim need no --trust-code, so they may name nothing but an optimizer class.
    if not callable(found) or (is_torch_optimizer(name) and not is_class):
        raise ValueError(f"optimizer.name is {name!r}: it does not name an optimizer class; choose one, as in torch.optim:NAdam")
    return found


def _check_options(kind: Callable[..., Any], options: Mapping[str, Any], set_elsewhere: Mapping[str, Any]) -> None:
    """Raise ValueError where an option is unknown to the class, belongs into [optimizer], or differs in type from its default."""
    try:
        parameters = inspect.signature(kind).parameters
    except (TypeError, ValueError):
        # Some callables have no signature to inspect; a wrong option then fails when they are called.
        return
    known = {name: entry.default for name, entry in list(parameters.items())[1:] if entry.kind is not entry.VAR_KEYWORD}
    takes_any = any(entry.kind is entry.VAR_KEYWORD for entry in parameters.values())
    for name, value in options.items():
        if name in set_elsewhere or name == "weight_decay":
            raise ValueError(f"optimizer.options has {name!r}: set it as optimizer.{name}")
        if name not in known and not takes_any:
            free = [each for each in known if each not in set_elsewhere and each != "weight_decay"]
            raise _unusable_options(kind, options, f"there is no {name!r}; it takes {', '.join(free) or 'none'}")
        default = known.get(name)
        # PyTorch takes any string for true, and rejects an unsuitable number only when it computes with it.
        if isinstance(default, bool) and not isinstance(value, bool):
            raise _unusable_options(kind, options, f"{name} must be true or false")
        if type(default) in (int, float) and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise _unusable_options(kind, options, f"{name} must be a number")


def _try_step(kind: Callable[..., Any], device: torch.device, arguments: Mapping[str, Any]) -> None:
    """Take two steps with a dummy parameter: some options fail no earlier, such as capturable on a CPU."""
    parameter = nn.Parameter(torch.zeros(2, 2, device=device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = kind([parameter], **arguments)
    # The second step is the first with existing state.
    for _ in range(2):
        optimizer.step()


def _unusable_options(kind: Callable[..., Any], options: Mapping[str, Any], reason: str) -> ValueError:
    name = getattr(kind, "__name__", repr(kind))
    return ValueError(f"optimizer.options is {dict(options)!r}: {name} cannot be built with it ({reason})")


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
    """Return the norm of the whole gradient over all shards, and scale the gradient down to `limit` if it is larger."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    # Foreach operations cannot mix sharded and unsharded tensors.
    sharded = [g for g in gradients if is_sharded(g)]
    whole = [g for g in gradients if not is_sharded(g)]
    norms = [torch.nn.utils.get_total_norm(part) for part in (sharded, whole) if part]
    norm = torch.stack([n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]).norm()
    if limit is not None:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
    return norm


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state by parameter name, without copies: reading a checkpoint into them restores the optimizer."""
    _fill(optimizer)
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key!r} as a {type(value).__name__}, and a checkpoint stores tensors only; "
                    "choose an optimizer whose state is tensors"
                )
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def _fill(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that the first step would create, by a step without gradient and learning rate."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()


class Average:
    """An exponential moving average of the trainable weights, updated once per step."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._means = {name: p.detach().clone() for name, p in self._weights.items()}

    def tensors(self) -> dict[str, Tensor]:
        return {f"average.{name}": mean for name, mean in self._means.items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, mean in self._means.items():
            mean.mul_(self.decay).add_(self._weights[name].detach(), alpha=1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and averages; a second call restores both."""
        for name, mean in self._means.items():
            previous = mean.clone()
            mean.copy_(self._weights[name].detach())
            self._weights[name].copy_(previous)


def count(parameters: Iterable[Any]) -> int:
    return sum(p.numel() for p in parameters)
