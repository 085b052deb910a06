"""Late interaction (ColBERT): the softmax loss over MaxSim scores of token embeddings. Formula: reference.maxsim_loss.

The score of a query and a document is Σ_t max_u q_t·d_u. A tile holds the token similarities of a few queries and documents only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ring import Group, Ring
from ..tiles import maxsim as eager_maxsim
from ..tiles import maxsim_for
from ..tiles.contract import NeedsGrad, accumulator
from ..tiles.maxsim import MaxSimTiles
from .autograd import LossModule, outside_graphs
from .batch import SharingOptions
from .checks import DTYPES, check_tensor, product_dtype
from .similarity import ScoreInputs, SimilarityRules, softmax_of_scores

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MaxSimOptions(SharingOptions, total=False):
    """The options of `maxsim_loss` that `MaxSimLoss` stores, for type checkers. `maxsim_loss` documents them."""

    normalize: bool
    average_tokens: bool
    symmetric: bool
    duplicates: str
    label_smoothing: float
    backend: str | None


@outside_graphs
def maxsim_loss(
    x: Tensor,
    y: Tensor,
    scale: Tensor | float,
    *,
    x_mask: Tensor | None = None,
    y_mask: Tensor | None = None,
    normalize: bool = False,
    average_tokens: bool = False,
    symmetric: bool = False,
    ids: Tensor | None = None,
    duplicates: str = "mask",
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    group: Group = ...,
    equal_shards: bool = False,
    backend: str | None = None,
    workspace: int | None = None,
) -> Tensor:
    """Return the softmax loss over late-interaction scores (ColBERT's MaxSim) of all queries of all ranks, without storing them.

    The score of query i and document j is `Σ_t max_u x[i, t]·y[j, u]` over the tokens that the masks keep. The positive of query i
    is document i. Neither the token similarities nor the scores of the batch are stored: memory is O(tokens * width) and one tile.

    Inputs:
        x: (M, Tq, D) token embeddings of this rank's queries, in float64, float32, bfloat16 or float16.
        y: (N, Td, D) token embeddings of its documents; N >= M, the rows beyond the first M are extra negatives.
        scale: factor of the scores, 1 / temperature: a float, or a tensor with one element, which may require a gradient.
        x_mask, y_mask: (M, Tq) and (N, Td), true or non-zero for real tokens. A padded query token adds nothing; a padded document
            token is never the maximum; a document without tokens has the score 0. None: all tokens are real.
        ids, weights: as in `clip_loss`.

    What is computed:
        normalize: divide every token embedding by its norm first.
        average_tokens: divide the score of a query by the number of its tokens.
        symmetric: also average with the loss over documents. False, the default: queries to documents only.
        duplicates, label_smoothing: as in `clip_loss`.

    How it is computed:
        group, equal_shards, workspace: as in `similarity_loss`. Tq and Td may differ between ranks (with equal_shards=True, Td may
            not).
        backend: as in `clip_loss`. The fused kernels store no similarity of tokens, only the places of a tile's maxima.

    Returns the loss as a float32 scalar (float64 for float64 embeddings), the same on every rank. DDP's average of gradients is
    exactly the gradient of this loss. Where several document tokens tie for a maximum, the gradient goes to one of them.

    >>> import torch, megabatch
    >>> queries, documents = torch.randn(16, 8, 32), torch.randn(16, 50, 32)
    >>> loss = megabatch.maxsim_loss(queries.requires_grad_(), documents, 1.0, normalize=True)
    >>> loss.backward()
    """

    def check() -> None:
        for name, t, mask in (("x", x, x_mask), ("y", y, y_mask)):
            check_tensor(name, t, "token embeddings")
            if t.ndim != 3 or 0 in t.shape[1:] or t.dtype not in DTYPES:
                raise ValueError(
                    f"{name} has shape {tuple(t.shape)} and is {t.dtype}: must be (rows, tokens, width), floating-point embeddings "
                    "of tokens"
                )
            if mask is not None and (mask.shape != t.shape[:2] or mask.requires_grad):
                raise ValueError(
                    f"{name}_mask has shape {tuple(mask.shape)} and {name} {tuple(t.shape)}: must be {tuple(t.shape[:2])}, one "
                    "entry for each token, without a gradient"
                )
        if x.shape[2] != y.shape[2] or product_dtype(x) != product_dtype(y):
            raise ValueError(
                f"x has width {x.shape[2]} and is {x.dtype}, y {y.shape[2]} and {y.dtype}: width and dtype must be equal; project "
                "or convert one"
            )
        maxsim_for(x.device, product_dtype(x), backend)

    rules = MaxSimRules(symmetric, duplicates, label_smoothing, normalize, average_tokens)
    # Wrong inputs are kept as they are until all ranks have met and can raise together.
    tokens = y.shape[1] if isinstance(y, Tensor) and y.ndim == 3 else 0
    ring = Ring.of(group)
    width = tokens
    if ring.size > 1 and not equal_shards:
        width = max(number for (number,) in ring.gather([tokens], y.device if isinstance(y, Tensor) else torch.device("cpu")))
    query: tuple[Tensor, ...] = (x,)
    document: tuple[Tensor, ...] = (y,)
    tiles: MaxSimTiles = eager_maxsim
    pair_bytes = 1
    try:
        check()
        query, document = ((_read(t, normalize), _mask(mask, t)) for t, mask in ((x, x_mask), (y, y_mask)))
        if width > tokens:
            document = tuple(F.pad(t, (0, 0, 0, width - tokens) if t.ndim == 3 else (0, width - tokens)) for t in document)
        tiles = maxsim_for(x.device, product_dtype(x), backend)
        pair_bytes = tiles.pair_bytes(x.shape[1], width, query[0].dtype)
    except ValueError:
        # Raised by `check` below, on all ranks together.
        pass
    inputs = ScoreInputs("maxsim_loss", query, document, scale, ids, weights)
    score = MaxSim(average_tokens, tiles)
    return softmax_of_scores(inputs, score, rules, group, equal_shards, workspace, pair_bytes, check, own_similarity=True)


class MaxSimLoss(LossModule[Tensor]):
    """`maxsim_loss` as a Module, which stores its options.

    >>> import torch, megabatch
    >>> queries, documents = torch.randn(16, 8, 32), torch.randn(16, 50, 32)
    >>> loss = megabatch.MaxSimLoss(normalize=True)(queries, documents, 1.0, y_mask=torch.ones(16, 50))
    """

    loss = staticmethod(maxsim_loss)

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[MaxSimOptions]) -> None: ...


@dataclass(frozen=True)
class MaxSimRules(SimilarityRules):
    """The options that say which pairs count, and how their scores are computed."""

    normalize: bool
    average_tokens: bool


class MaxSim:
    """The similarity of two blocks of (tokens, mask).

    average: whether the score is divided by the number of the query's tokens.
    """

    def __init__(self, average: bool, tiles: MaxSimTiles) -> None:
        self.average, self.tiles = average, tiles

    def __call__(self, query: tuple[Tensor, Tensor], document: tuple[Tensor, Tensor]) -> Tensor:
        (q_RTD, q_mask_RT), (d_CUD, d_mask_CU) = query, document
        weight_RT = q_mask_RT.to(accumulator(q_RTD.dtype))
        if self.average:
            weight_RT = weight_RT / weight_RT.sum(1, keepdim=True).clamp(min=1)
        with torch.autocast(q_RTD.device.type, enabled=False):
            if not (torch.is_grad_enabled() and (q_RTD.requires_grad or d_CUD.requires_grad)):
                return self.tiles.maxsim_scores(q_RTD, weight_RT, d_CUD, d_mask_CU, save=False)[0]
            scores: Tensor = _MaxSimScores.apply(self.tiles, q_RTD, weight_RT, d_CUD, d_mask_CU)
        return scores


class _MaxSimScores(torch.autograd.Function):
    """Scores of a tile. Of the token similarities, the places of the maxima are saved, and nothing else."""

    @staticmethod
    def forward(ctx: Any, tiles: MaxSimTiles, q_RTD: Tensor, weight_RT: Tensor, d_CUD: Tensor, mask_CU: Tensor) -> Tensor:
        ctx.tiles = tiles
        z_RC, ctx.places = tiles.maxsim_scores(q_RTD, weight_RT, d_CUD, mask_CU, save=True)
        ctx.save_for_backward(q_RTD, weight_RT, d_CUD)
        return z_RC

    @staticmethod
    def backward(ctx: Any, g_RC: Tensor) -> tuple[Tensor | None, ...]:
        q_RTD, weight_RT, d_CUD = ctx.saved_tensors
        needs_grad = NeedsGrad(ctx.needs_input_grad[1], ctx.needs_input_grad[3])
        # Backward may be called under autocast too.
        with torch.autocast(q_RTD.device.type, enabled=False):
            dq, dd = ctx.tiles.maxsim_grads(q_RTD, weight_RT, d_CUD, g_RC, ctx.places, needs_grad=needs_grad)
        return None, dq, None, dd, None


def _read(t: Tensor, normalize: bool) -> Tensor:
    t = F.normalize(t.to(accumulator(t.dtype)), dim=-1) if normalize else t
    return t.to(product_dtype(t))


def _mask(mask: Tensor | None, t: Tensor) -> Tensor:
    return torch.ones(t.shape[:2], dtype=torch.bool, device=t.device) if mask is None else mask.to(t.device) != 0
