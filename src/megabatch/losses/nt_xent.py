"""NT-Xent, the loss of SimCLR (arXiv 2002.05709), without the similarity matrix. Formula: reference.nt_xent_loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, overload

from torch import Tensor

from ..ring import Group
from .autograd import outside_graphs
from .batch import Diagnostics, Execution, ExecutionOptions, Inputs
from .directions import DIRECTIONS
from .infonce import FurtherInputs, InfoNCERules, directions_loss

if TYPE_CHECKING:
    # torch depends on typing_extensions; typing has Unpack from Python 3.11 on.
    from typing_extensions import Unpack


@dataclass(frozen=True)
class NTXentRules(InfoNCERules):
    """One softmax for the rows of each view, over all rows of both views but the row itself."""

    loss_name: ClassVar[str] = "nt_xent_loss"
    same_rows: ClassVar[bool] = True


class NTXentOptions(ExecutionOptions, total=False):
    """The arguments of `nt_xent_loss`, for type checkers."""

    ids: Tensor | None
    duplicates: str
    weights: Tensor | None


@overload
def nt_xent_loss(
    a: Tensor, b: Tensor, scale: Tensor | float, *, diagnostics: Literal[False] = False, **arguments: Unpack[NTXentOptions]
) -> Tensor: ...


@overload
def nt_xent_loss(
    a: Tensor, b: Tensor, scale: Tensor | float, *, diagnostics: Literal[True], **arguments: Unpack[NTXentOptions]
) -> tuple[Tensor, Diagnostics]: ...


@overload
def nt_xent_loss(
    a: Tensor, b: Tensor, scale: Tensor | float, *, diagnostics: bool, **arguments: Unpack[NTXentOptions]
) -> Tensor | tuple[Tensor, Diagnostics]: ...


@outside_graphs
def nt_xent_loss(
    a: Tensor,
    b: Tensor,
    scale: Tensor | float,
    *,
    ids: Tensor | None = None,
    duplicates: str = "mask",
    weights: Tensor | None = None,
    group: Group = ...,
    equal_shards: bool = False,
    backend: str | None = None,
    workspace: int | None = None,
    precision: str = "ieee",
    diagnostics: bool = False,
) -> Tensor | tuple[Tensor, Diagnostics]:
    """Return NT-Xent (SimCLR) of all samples of all ranks, without storing the similarity matrix.

    a and b are the embeddings of two views of the same samples. Each of the 2M rows is an anchor, whose positive is the other view
    of its sample and whose negatives are all other rows of both views, on all ranks.

    a, b: (M, D) embeddings of this rank. scale: 1 / temperature. ids: (M,) integers; views of samples with equal ids are no
    negatives of each other (duplicates: "mask" is the only treatment of them). weights: (M,) weights of the samples in the mean.
    The other arguments are those of `clip_loss`.

    >>> import torch, megabatch
    >>> a, b = torch.nn.functional.normalize(torch.randn(2, 512, 64), dim=-1).unbind()
    >>> loss = megabatch.nt_xent_loss(a, b, scale=10.0)
    """
    rules = NTXentRules(directions=DIRECTIONS, partition="by_anchor", duplicates=duplicates, diagnostics=diagnostics)
    execution = Execution(group, equal_shards, backend, workspace, precision)
    return directions_loss(Inputs(a, b, {"scale": scale}, ids, weights), rules, execution, FurtherInputs())
