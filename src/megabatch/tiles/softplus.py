"""Softplus and sigmoid of a matrix of logits, on a CPU from one exponential each where none overflows. Legend: contract.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .products import number

# The logarithm of the largest exponential, or product of several: fp32 ends at 88.7.
LARGEST_EXPONENT = 88.0
# A logarithm serves at most 2^MOST_HALVINGS elements, and one element in a matrix of FEW_CELLS, where operations take more time.
MOST_HALVINGS, FEW_CELLS = 6, 2**16


def softplus_sums_(s_RC: Tensor, work_RC: Tensor | None, dim: int | None, *, sigmoid: bool) -> Tensor:
    """Return Σ log(1 + exp(s)) along a dimension (1 for each row, None for all), accurate for any s. Overwrite the buffer and s,
    the latter with sigmoid(s) if wanted.

    work_RC: the buffer. None: memory is allocated where it is needed.
    """
    # Only on a CPU can this be read without synchronisation. A logit that is not a number compares as false.
    largest = s_RC.amax().item() if s_RC.is_cpu and s_RC.numel() else math.inf
    if not largest <= LARGEST_EXPONENT:
        work_RC = torch.empty_like(s_RC) if work_RC is None else work_RC
        sums = torch.clamp(s_RC, min=0, out=work_RC).sum(dim)
        rest_RC = torch.abs(s_RC, out=work_RC).neg_().exp_()
        sums.add_(_log1p_(rest_RC, work_RC, 0.0).sum(dim))
        if sigmoid:
            s_RC.sigmoid_()
        return sums
    e_RC = s_RC.exp_()
    sums = _log1p_(e_RC, work_RC, largest).sum(dim)
    if sigmoid:
        e_RC.div_(torch.add(e_RC, number(1, e_RC.dtype), out=work_RC))
    return sums


def _log1p_(e_RC: Tensor, work_RC: Tensor | None, largest: float) -> Tensor:
    """Return a matrix whose sums along its rows are those of log1p(e), with a logarithm for as many elements as possible.

    largest: the logarithm of the largest e. The buffer, which may be e, is overwritten.
    """
    if e_RC.numel() > FEW_CELLS:
        work_RC = torch.empty_like(e_RC) if work_RC is None else work_RC
        # The product of n factors is at most (1 + exp(largest))^n.
        for _ in range(min(MOST_HALVINGS, int(math.log2(LARGEST_EXPONENT / max(1.0, math.log1p(math.exp(largest))))))):
            # log1p(a) + log1p(b) = log1p(a + b + a·b), where all terms are positive.
            half = e_RC.shape[1] // 2
            left, right = e_RC[:, :half], e_RC[:, e_RC.shape[1] - half :]
            halved = work_RC[:, : e_RC.shape[1] - half]
            torch.addcmul(left, left, right, out=halved[:, :half]).add_(right)
            halved[:, half:] = e_RC[:, half : halved.shape[1]]
            e_RC = halved
    return e_RC.log1p()
