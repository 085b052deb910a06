"""Softplus and sigmoid of a matrix of logits, from one exponential each where none overflows. Legend: contract.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .products import number

# The logarithm of the largest exponential, or product of several: fp32 ends at 88.7.
LARGEST_EXPONENT = 88.0
# A logarithm serves at most 2^MOST_HALVINGS elements. Up to so many, the logarithm of each takes less time than more operations.
MOST_HALVINGS, FEW_CELLS = 6, 2**14


def softplus_sums_(s_RC: Tensor, work_RC: Tensor, *, sigmoid: bool) -> Tensor:
    """Return Σ log(1 + exp(s)) of each row (R), accurate for any s. Overwrite the buffer, and s: with sigmoid(s), if wanted."""
    # Only on a CPU can this be read without synchronisation. A logit that is not a number compares as false.
    largest = s_RC.amax().item() if s_RC.is_cpu and s_RC.numel() else math.inf
    if not largest <= LARGEST_EXPONENT:
        sums_R = torch.clamp(s_RC, min=0, out=work_RC).sum(1)
        # At most one, so 64 factors of at most two.
        rest_RC = torch.abs(s_RC, out=work_RC).neg_().exp_()
        sums_R.add_(_log1p_sums_(rest_RC, work_RC, MOST_HALVINGS))
        if sigmoid:
            s_RC.sigmoid_()
        return sums_R
    e_RC = s_RC.exp_()
    halvings = int(math.log2(LARGEST_EXPONENT / max(1.0, math.log1p(math.exp(largest)))))
    sums_R = _log1p_sums_(e_RC, work_RC, min(halvings, MOST_HALVINGS))
    if sigmoid:
        e_RC.div_(torch.add(e_RC, number(1, e_RC.dtype), out=work_RC))
    return sums_R


def _log1p_sums_(e_RC: Tensor, work_RC: Tensor, halvings: int) -> Tensor:
    """Return Σ log1p(e) of each row, with one logarithm for up to 2^halvings elements. Overwrite the buffer, which may be e."""
    for _ in range(halvings):
        if e_RC.numel() <= FEW_CELLS:
            break
        # log1p(a) + log1p(b) = log1p(a + b + a·b), where all terms are positive.
        half = e_RC.shape[1] // 2
        left, right = e_RC[:, :half], e_RC[:, e_RC.shape[1] - half :]
        halved = work_RC[:, : e_RC.shape[1] - half]
        torch.addcmul(left, left, right, out=halved[:, :half]).add_(right)
        halved[:, half:] = e_RC[:, half : halved.shape[1]]
        e_RC = halved
    return torch.log1p(e_RC, out=work_RC[:, : e_RC.shape[1]]).sum(1)
