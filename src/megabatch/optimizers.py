"""Optimizers, one record each: how a run builds them, what their state and update cost, and how their learning rate scales.

A new built-in optimizer is a record here. Everybody else reads fields of the record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LrRule = Literal["linear", "sqrt", "none"]
# Values of optimizer.name that are built in; any other names a class, as in torch.optim:NAdam.
OptimizerName = Literal["adamw", "sgd"]
# Families that the audit tells apart.
FamilyName = Literal["adam", "sgd", "lars", "lamb"]

# Defaults of a run. CLIP's β2 for vision transformers is 0.98.
LR = 1e-3
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.98)
EPS = 1e-8
MOMENTUM = 0.9
# Bytes that the update of an unknown optimizer reads and writes for each parameter: between those of SGD and AdamW.
UNKNOWN_UPDATE_BYTES = 60.0
# Options of torch.optim's classes that choose how an update is computed, or exclude the fused kernel: where one is set, it decides.
IMPLEMENTATION_OPTIONS = ("fused", "foreach", "capturable", "differentiable")


@dataclass(frozen=True)
class FamilySpec:
    """Optimizers that scale alike with the batch.

    lr_rule: how the learning rate follows the batch.
    scaling_is_studied: whether publications say how the rate and the warm-up of this family follow the batch.
    uses_beta2: whether a second moment with decay β2 scales the update, so that the warm-up follows β2; if not, it is counted in
        epochs.
    follows_gradient_scale: whether a gradient that is too large by a constant factor makes the update too large.
    largest_rule_batch: the largest batch for which the rule was shown, where there is one.
    """

    name: FamilyName
    lr_rule: LrRule
    scaling_is_studied: bool = True
    uses_beta2: bool = False
    follows_gradient_scale: bool = False
    largest_rule_batch: int | None = None


# In the order in which a name is searched for them.
FAMILIES: dict[str, FamilySpec] = {
    spec.name: spec
    for spec in (
        FamilySpec("lamb", "sqrt", scaling_is_studied=False),
        FamilySpec("lars", "sqrt", scaling_is_studied=False),
        FamilySpec("adam", "sqrt", uses_beta2=True),
        # Goyal et al., arXiv 1706.02677.
        FamilySpec("sgd", "linear", follows_gradient_scale=True, largest_rule_batch=8_192),
    )
}


@dataclass(frozen=True)
class StateSpec:
    """What an optimizer keeps between two steps, as the memory model asks for it.

    torch_class: the class in torch.optim whose step allocates the state; empty where costs.memory has a class for it.
    arguments: what the class is built with, besides the learning rate. assumption: what a prediction with it rests on.
    """

    torch_class: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    assumption: str = ""


STATES: dict[str, StateSpec] = {
    "adamw": StateSpec("AdamW"),
    "adam": StateSpec("Adam"),
    "sgd": StateSpec("SGD"),
    "sgd-momentum": StateSpec("SGD", {"momentum": MOMENTUM}),
    "adamw-8bit": StateSpec(
        assumption="8-bit state in blocks of 256 with a scale in fp32 each; tensors below 4,096 elements keep fp32 state"
        " (bitsandbytes)"
    ),
}


@dataclass(frozen=True)
class OptimizerSpec:
    """What one built-in optimizer is.

    torch_class: its class in torch.optim. keys: keys of the section [optimizer] that the class takes by the same name, besides lr
        and weight_decay, and that some other built-in optimizer does not take.
    state: its entry in STATES, as a run builds it.
    update_bytes: what lists of tensors (foreach) read and write for each parameter in all operations of one update.
    fused_update_bytes: what torch's fused kernel reads and writes: weight, gradient and state once.
    fused_on_cuda: whether a run uses that kernel on CUDA.
    """

    name: OptimizerName
    family: FamilySpec
    torch_class: str
    keys: tuple[str, ...]
    state: str
    update_bytes: float
    fused_update_bytes: float
    fused_on_cuda: bool

    @property
    def lr_rule(self) -> LrRule:
        return self.family.lr_rule

    @property
    def uses_beta2(self) -> bool:
        return self.family.uses_beta2


OPTIMIZERS: dict[str, OptimizerSpec] = {
    spec.name: spec
    for spec in (
        OptimizerSpec(
            name="adamw",
            family=FAMILIES["adam"],
            torch_class="AdamW",
            keys=("betas", "eps"),
            state="adamw",
            update_bytes=84.0,
            fused_update_bytes=28.0,
            fused_on_cuda=True,
        ),
        OptimizerSpec(
            name="sgd",
            family=FAMILIES["sgd"],
            torch_class="SGD",
            keys=("momentum",),
            state="sgd-momentum",
            update_bytes=36.0,
            fused_update_bytes=20.0,
            # Its fused kernel takes no DTensor and no parameter whose first gradient comes after those of others, and a first step
            # that a GradScaler skips leaves the momentum uninitialised.
            fused_on_cuda=False,
        ),
    )
}
DEFAULT: OptimizerName = "adamw"


def closest(name: str) -> OptimizerSpec:
    """Return the built-in optimizer of that name; AdamW for any other class, most of which are Adam's relatives.

    >>> closest("sgd").lr_rule, closest("torch.optim:NAdam").lr_rule
    ('linear', 'sqrt')
    """
    return OPTIMIZERS.get(name, OPTIMIZERS[DEFAULT])


def family_of(name: str) -> FamilyName | None:
    """Return the family that an optimizer's name in any tool tells, or None.

    >>> family_of("adamw_torch"), family_of("FusedLamb"), family_of("torch.optim:Rprop")
    ('adam', 'lamb', None)
    """
    return next((spec.name for key, spec in FAMILIES.items() if key in name.lower()), None)


def built_in_of(family: str) -> str:
    """Return the built-in optimizer of a family, or the family's own name where none is built in."""
    return next((name for name, spec in OPTIMIZERS.items() if spec.family.name == family), family)


def users_of_keys() -> dict[str, tuple[str, ...]]:
    """Return the built-in optimizers that use each key of [optimizer], for keys that not all of them use."""
    keys = dict.fromkeys(key for spec in OPTIMIZERS.values() for key in spec.keys)
    return {f"optimizer.{key}": tuple(name for name, spec in OPTIMIZERS.items() if key in spec.keys) for key in keys}


def is_fused(name: str, options: Mapping[str, Any], device: str) -> bool:
    """Return whether a run's update is one fused kernel. options: optimizer.options. device: the type of the parameters' device.

    >>> is_fused("adamw", {}, "cuda"), is_fused("adamw", {}, "cpu"), is_fused("adamw", {"foreach": True}, "cuda")
    (True, False, False)
    """
    if any(option in options for option in IMPLEMENTATION_OPTIONS):
        return options.get("fused") is True
    return device == "cuda" and name in OPTIMIZERS and OPTIMIZERS[name].fused_on_cuda


def update_bytes(name: str, *, fused: bool = False) -> float:
    """Return the bytes that one update reads and writes for each parameter that learns."""
    if name not in OPTIMIZERS:
        return UNKNOWN_UPDATE_BYTES
    return OPTIMIZERS[name].fused_update_bytes if fused else OPTIMIZERS[name].update_bytes


def rate_factor(rule: LrRule, growth: float) -> float:
    """Return the factor of the learning rate where the batch is `growth` times as large.

    >>> rate_factor("sqrt", 4.0), rate_factor("linear", 4.0), rate_factor("none", 4.0)
    (2.0, 4.0, 1.0)
    """
    if rule == "sqrt":
        return math.sqrt(growth)
    return growth if rule == "linear" else 1.0
