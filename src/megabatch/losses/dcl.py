"""Decoupled contrastive learning (DCL, arXiv 2110.06848), without the similarity matrix. Formula: reference.dcl_loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, overload

from torch import Tensor

from ..ring import Group
from .autograd import outside_graphs
from .batch import Diagnostics, Execution, ExecutionOptions, Inputs
from .directions import Terms
from .infonce import FurtherInputs, InfoNCERules, directions_loss

if TYPE_CHECKING:
    # torch depends on typing_extensions; typing has Unpack from Python 3.11 on.
    from typing_extensions import Unpack


@dataclass(frozen=True)
class DCLRules(InfoNCERules):
    """InfoNCE with the positive left out of the denominator."""

    loss_name: ClassVar[str] = "dcl_loss"

    def check(self) -> None:
        super().check()
        if self.duplicates != "mask":
            raise ValueError(
                f"duplicates={self.duplicates!r}: positives are not in the denominator, so each sample has one; pass 'mask'"
            )

    @property
    def terms(self) -> Terms:
        return replace(super().terms, decoupled=True)


class DCLOptions(ExecutionOptions, total=False):
    """The arguments of `dcl_loss`, for type checkers."""

    directions: Sequence[str]
    partition: str
    ids: Tensor | None
    duplicates: str
    drop_above: float | Mapping[str, float] | None
    drop_ratio: float | Mapping[str, float] | None
    negatives_of: Tensor | None
    weights: Tensor | None


@overload
def dcl_loss(
    x: Tensor, y: Tensor, scale: Tensor | float, *, diagnostics: Literal[False] = False, **arguments: Unpack[DCLOptions]
) -> Tensor: ...


@overload
def dcl_loss(
    x: Tensor, y: Tensor, scale: Tensor | float, *, diagnostics: Literal[True], **arguments: Unpack[DCLOptions]
) -> tuple[Tensor, Diagnostics]: ...


@overload
def dcl_loss(
    x: Tensor, y: Tensor, scale: Tensor | float, *, diagnostics: bool, **arguments: Unpack[DCLOptions]
) -> Tensor | tuple[Tensor, Diagnostics]: ...


@outside_graphs
def dcl_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    *,
    directions: Sequence[str] = ("x_to_y", "y_to_x"),
    partition: str = "separate",
    ids: Tensor | None = None,
    duplicates: str = "mask",
    drop_above: float | Mapping[str, float] | None = None,
    drop_ratio: float | Mapping[str, float] | None = None,
    negatives_of: Tensor | None = None,
    weights: Tensor | None = None,
    group: Group = ...,
    equal_shards: bool = False,
    backend: str | None = None,
    workspace: int | None = None,
    precision: str = "ieee",
    diagnostics: bool = False,
) -> Tensor | tuple[Tensor, Diagnostics]:
    """Return the decoupled contrastive loss (DCL) of all rows of all ranks, without storing a similarity matrix.

    It is `infonce_loss` with the positive left out of the denominator: log Σ exp(negatives) - positive, which small batches profit
    from. The loss may be below zero. A sample without negatives has no loss, and counts as zero. The arguments are those of
    `infonce_loss`.

    >>> import torch, megabatch
    >>> x, y = torch.nn.functional.normalize(torch.randn(2, 256, 64), dim=-1).unbind()
    >>> loss = megabatch.dcl_loss(x, y, scale=10.0)
    """
    chosen = (directions,) if isinstance(directions, str) else tuple(directions)
    rules = DCLRules(chosen, partition, duplicates, drop_above=drop_above, drop_ratio=drop_ratio, diagnostics=diagnostics)
    execution = Execution(group, equal_shards, backend, workspace, precision)
    return directions_loss(Inputs(x, y, {"scale": scale}, ids, weights), rules, execution, FurtherInputs(negatives_of))
