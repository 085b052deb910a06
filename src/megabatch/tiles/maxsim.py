"""Late-interaction scores of a tile of queries and documents, and their gradients, in PyTorch operations for any device and dtype.

Legend: q_RTD are the token embeddings of R queries with T tokens each, d_CUD those of C documents with U tokens. The score of a
query and a document is z_RC = Σ_t weight_RT · max_u q_RTD·d_CUD over the document tokens that mask_CU keeps, 0 if it keeps none.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .contract import NeedsGrad, accumulator


class MaxSimTiles(Protocol):
    """The functions of late interaction for a device; a backend that is not this module implements them in its own kernels."""

    def pair_bytes(self, query_tokens: int, document_tokens: int, dtype: torch.dtype) -> int:
        """Return how much memory a query and a document take while their tile is computed."""
        ...

    def maxsim_scores(self, q_RTD: Tensor, weight_RT: Tensor, d_CUD: Tensor, mask_CU: Tensor, *, save: bool) -> tuple[Tensor, Any]:
        """Return z_RC and, if `save`, what `maxsim_grads` needs from it."""
        ...

    def maxsim_grads(
        self, q_RTD: Tensor, weight_RT: Tensor, d_CUD: Tensor, g_RC: Tensor, saved: Any, *, needs_grad: NeedsGrad
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of q and d, in their dtypes, from that of the scores. x of `needs_grad` is q, y is d."""
        ...


class Places(NamedTuple):
    """The document token with the largest similarity, for each query token and document, and which documents have tokens."""

    place_RTC: Tensor
    present_C: Tensor


def pair_bytes(query_tokens: int, document_tokens: int, dtype: torch.dtype) -> int:
    # The similarities of tokens and a copy of them while the maximum is taken; in backward, their gradient.
    return query_tokens * max(1, document_tokens) * 2 * accumulator(dtype).itemsize


def maxsim_scores(q_RTD: Tensor, weight_RT: Tensor, d_CUD: Tensor, mask_CU: Tensor, *, save: bool) -> tuple[Tensor, Places | None]:
    (R, T), (C, U) = q_RTD.shape[:2], d_CUD.shape[:2]
    z = _product(q_RTD.flatten(0, 1), d_CUD.flatten(0, 1).T).view(R, T, C, U)
    # Finite, so that a document without tokens gives no NaN; its score is zero.
    z.masked_fill_(~mask_CU, torch.finfo(z.dtype).min)
    best_RTC, place_RTC = z.max(3)
    present_C = mask_CU.any(1)
    best_RTC.masked_fill_(~present_C, 0)
    return torch.einsum("rtc,rt->rc", best_RTC, weight_RT), Places(place_RTC, present_C) if save else None


def maxsim_grads(
    q_RTD: Tensor, weight_RT: Tensor, d_CUD: Tensor, g_RC: Tensor, saved: Places, *, needs_grad: NeedsGrad
) -> tuple[Tensor | None, Tensor | None]:
    (R, T), (C, U) = q_RTD.shape[:2], d_CUD.shape[:2]
    g_RTC = (g_RC * saved.present_C)[:, None] * weight_RT[:, :, None]
    # One entry for each query token and document: the scatter writes every place at most once.
    g = q_RTD.new_zeros(R, T, C, U, dtype=_operand_dtype(q_RTD))
    g.scatter_(3, saved.place_RTC[..., None], g_RTC[..., None].to(g.dtype))
    g = g.view(R * T, C * U)
    q, d = (t.flatten(0, 1).to(g.dtype) for t in (q_RTD, d_CUD))
    dq = _product(g, d).view_as(q_RTD).to(q_RTD.dtype) if needs_grad.x else None
    dd = _product(g.T, q).view_as(d_CUD).to(d_CUD.dtype) if needs_grad.y else None
    return dq, dd


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
