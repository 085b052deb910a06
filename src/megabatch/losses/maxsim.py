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
from ..tiles.contract import accumulator
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

    How it is computed: group, equal_shards and workspace are those of `similarity_loss`. Tq and Td may differ between ranks (with
    equal_shards=True, Td may not).

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

    rules = MaxSimRules(symmetric, duplicates, label_smoothing, normalize, average_tokens)
    score = MaxSim(average_tokens)
    # Wrong inputs are kept as they are until all ranks have met and can raise together.
    tokens = y.shape[1] if isinstance(y, Tensor) and y.ndim == 3 else 0
    ring = Ring.of(group)
    width = tokens
    if ring.size > 1 and not equal_shards:
        width = max(number for (number,) in ring.gather([tokens], y.device if isinstance(y, Tensor) else torch.device("cpu")))
    query: tuple[Tensor, ...] = (x,)
    document: tuple[Tensor, ...] = (y,)
    pair_bytes = 1
    try:
        check()
        query, document = ((_read(t, normalize), _mask(mask, t)) for t, mask in ((x, x_mask), (y, y_mask)))
        document = tuple(F.pad(t, (0, 0, 0, width - tokens) if t.ndim == 3 else (0, width - tokens)) for t in document)
        # The similarities of tokens and a copy of them while the maximum is taken; in backward, their gradient.
        pair_bytes = x.shape[1] * max(1, width) * 2 * accumulator(x.dtype).itemsize
    except ValueError:
        # Raised by `check` below, on all ranks together.
        pass
    inputs = ScoreInputs("maxsim_loss", query, document, scale, ids, weights)
    return softmax_of_scores(inputs, score, rules, group, equal_shards, workspace, pair_bytes, check)


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

    def __init__(self, average: bool) -> None:
        self.average = average

    def __call__(self, query: tuple[Tensor, Tensor], document: tuple[Tensor, Tensor]) -> Tensor:
        (q_RTD, q_mask_RT), (d_CUD, d_mask_CU) = query, document
        weight_RT = q_mask_RT.to(accumulator(q_RTD.dtype))
        if self.average:
            weight_RT = weight_RT / weight_RT.sum(1, keepdim=True).clamp(min=1)
        with torch.autocast(q_RTD.device.type, enabled=False):
            scores: Tensor = _MaxSimScores.apply(q_RTD, weight_RT, d_CUD, d_mask_CU)
        return scores


class _MaxSimScores(torch.autograd.Function):
    """Scores of a tile. Of the token similarities, the places of the maxima are saved, and nothing else."""

    @staticmethod
    def forward(ctx: Any, q_RTD: Tensor, weight_RT: Tensor, d_CUD: Tensor, mask_CU: Tensor) -> Tensor:
        (R, T), (C, U) = q_RTD.shape[:2], d_CUD.shape[:2]
        z = _product(q_RTD.flatten(0, 1), d_CUD.flatten(0, 1).T).view(R, T, C, U)
        # Finite, so that a document without tokens gives no NaN; its score is zero.
        z.masked_fill_(~mask_CU, torch.finfo(z.dtype).min)
        best_RTC, ctx.place_RTC = z.max(3)
        ctx.present_C = mask_CU.any(1)
        best_RTC.masked_fill_(~ctx.present_C, 0)
        ctx.save_for_backward(q_RTD, weight_RT, d_CUD)
        return torch.einsum("rtc,rt->rc", best_RTC, weight_RT)

    @staticmethod
    def backward(ctx: Any, g_RC: Tensor) -> tuple[Tensor | None, ...]:
        q_RTD, weight_RT, d_CUD = ctx.saved_tensors
        (R, T), (C, U) = q_RTD.shape[:2], d_CUD.shape[:2]
        g_RTC = (g_RC * ctx.present_C)[:, None] * weight_RT[:, :, None]
        # One entry for each query token and document: the scatter writes every place at most once.
        g = q_RTD.new_zeros(R, T, C, U, dtype=_operand_dtype(q_RTD))
        g.scatter_(3, ctx.place_RTC[..., None], g_RTC[..., None].to(g.dtype))
        g = g.view(R * T, C * U)
        q, d = (t.flatten(0, 1).to(g.dtype) for t in (q_RTD, d_CUD))
        dq = _product(g, d).view_as(q_RTD).to(q_RTD.dtype) if ctx.needs_input_grad[0] else None
        dd = _product(g.T, q).view_as(d_CUD).to(d_CUD.dtype) if ctx.needs_input_grad[2] else None
        return dq, None, dd, None


def _operand_dtype(t: Tensor) -> torch.dtype:
    """Return the dtype of a product's operands: bf16 on CUDA, whose products accumulate in fp32, otherwise that of sums.

    fp16 cannot represent a gradient that is small against the largest.
    """
    return t.dtype if t.device.type == "cuda" and t.dtype == torch.bfloat16 else accumulator(t.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in the dtype of sums, without rounding in between."""
    dtype = _operand_dtype(a)
    if dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.to(dtype) @ b.to(dtype)


def _read(t: Tensor, normalize: bool) -> Tensor:
    t = F.normalize(t.to(accumulator(t.dtype)), dim=-1) if normalize else t
    return t.to(product_dtype(t))


def _mask(mask: Tensor | None, t: Tensor) -> Tensor:
    return torch.ones(t.shape[:2], dtype=torch.bool, device=t.device) if mask is None else mask.to(t.device) != 0
