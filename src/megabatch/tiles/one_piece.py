"""The losses of one block with the whole similarity matrix in the workspace, for small batches on a CPU. Legend: contract.py.

Value and gradients come from one computation of the matrix, 6·M·N·D operations for both losses, with few operations of PyTorch:
at some hundred rows, their number is what takes the time. All pairs count, and row i of y is the positive of row i of x.

As in the contract, sums go over the others, without the positive. t_SM is the logarithm of their odds against the positive, for
each side S (rows, and columns if the loss is symmetric): softplus(t) is the loss and sigmoid(t) = 1 - p, never as a difference.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .contract import ComputeOptions, NeedsGrad, OnePiece, accumulator
from .products import operand, units

# While the logits are within this distance of their middle, neither an exponential nor a sum of 2^30 of them leaves the normal
# range of fp32, so rows and columns share one exponential.
SAFE_RANGE = 60.0
# From here on softplus(t) is t: below the rounding of fp64. PyTorch's default of 20 is right for fp32 only.
LINEAR_FROM = 40.0


class EagerGradients(NamedTuple):
    """The gradients for an incoming gradient of one, as far as they are needed.

    dx_MD, dy_ND: in the dtype of sums. dscale, dbias: derivatives in the scale and the bias.
    """

    dx_MD: Tensor | None
    dy_ND: Tensor | None
    dscale: Tensor
    dbias: Tensor | None


def fits(shape: tuple[int, int, int], dtype: torch.dtype, compute: ComputeOptions) -> bool:
    """Return whether the workspace holds the matrix and a buffer of its shape, and there is a pair to sum over."""
    rows, documents, _ = shape
    return rows > 0 and documents > 1 and 2 * rows * documents * accumulator(dtype).itemsize <= compute.workspace


def softmax_loss(x_MD: Tensor, y_ND: Tensor, scale: Tensor, *, needs_grad: NeedsGrad | None, compute: ComputeOptions) -> OnePiece:
    """Return the mean over rows and columns of the cross-entropy of the logits, and its gradients."""
    return _softmax_loss(x_MD, y_ND, scale, True, needs_grad, compute)


def row_softmax_loss(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, *, needs_grad: NeedsGrad | None, compute: ComputeOptions
) -> OnePiece:
    """Return the mean over rows alone."""
    return _softmax_loss(x_MD, y_ND, scale, False, needs_grad, compute)


def _softmax_loss(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, symmetric: bool, needs_grad: NeedsGrad | None, compute: ComputeOptions
) -> OnePiece:
    x, y = operand(x_MD), operand(y_ND)
    z_MN, kept = _similarities(x_MD, x, y, needs_grad, compute)
    s_MN = z_MN.mul(scale) if kept else z_MN.mul_(scale)
    diagonal_M = s_MN.diagonal()
    positive_M = diagonal_M.clone()
    lowest, highest = torch.aminmax(s_MN)
    low, high = lowest.item(), highest.item()
    # Logits that are not numbers compare as false.
    shared = high - low <= 2 * SAFE_RANGE
    if shared:
        if high > SAFE_RANGE or low < -SAFE_RANGE:
            middle = (low + high) / 2
            s_MN.sub_(middle)
            positive_M.sub_(middle)
        row_exp_MN = column_exp_MN = s_MN.exp_()
        # An exponential of zero leaves the positive out of the sums.
        diagonal_M.zero_()
        total_SM = _sums(row_exp_MN, column_exp_MN, symmetric)
        t_SM = total_SM.log().sub_(positive_M)
    else:
        diagonal_M.fill_(-torch.inf)
        peak_M1 = s_MN.amax(1, keepdim=True)
        row_exp_MN, column_exp_MN = (s_MN - peak_M1).exp_(), s_MN
        peak_SM = peak_M1.t()
        if symmetric:
            peak_1N = s_MN.amax(0, keepdim=True)
            s_MN.sub_(peak_1N).exp_()
            peak_SM = torch.cat((peak_SM, peak_1N))
        total_SM = _sums(row_exp_MN, column_exp_MN, symmetric)
        # The difference first: at logits of 1e8, peak + log(total) would round log(total) away.
        t_SM = (peak_SM - positive_M).add_(total_SM.log())
    share = _number(1 / t_SM.numel(), t_SM.dtype)
    loss = softplus(t_SM, 1, LINEAR_FROM).sum().mul_(share)
    if needs_grad is None:
        return OnePiece(loss)
    others_SM = t_SM.sigmoid_().mul_(share)
    row_gain_M, *column_gain_N = (others_SM / total_SM).unbind()
    row_gain_M1 = row_gain_M.unsqueeze(1)
    if not symmetric:
        g_MN = row_exp_MN.mul_(row_gain_M1)
        g_MN.diagonal().copy_(others_SM[0]).neg_()
    elif shared:
        g_MN = row_exp_MN.mul_(row_gain_M1 + column_gain_N[0])
        diagonal_M.sub_(others_SM.sum(0))
    else:
        g_MN = row_exp_MN.mul_(row_gain_M1).addcmul_(column_exp_MN, column_gain_N[0])
        g_MN.diagonal().sub_(others_SM.sum(0))
    return _gradients(loss, g_MN, z_MN if kept else None, scale, x, y, x_MD, needs_grad, compute, None)


def sigmoid_loss(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, bias: Tensor, *, needs_grad: NeedsGrad | None, compute: ComputeOptions
) -> OnePiece:
    """Return the mean over rows of the sum of -logsigmoid(label * (logit + bias)), and its gradients."""
    x, y = operand(x_MD), operand(y_ND)
    z_MN, kept = _similarities(x_MD, x, y, needs_grad, compute)
    s_MN = torch.add(bias, z_MN, alpha=scale.item()) if kept else z_MN.mul_(scale).add_(bias)
    # A positive costs softplus(-s), a negative softplus(s).
    diagonal_M = s_MN.diagonal().neg_()
    exp_MN = s_MN.exp_()
    loss = exp_MN.log1p().sum()
    has_exponentials = math.isfinite(loss.item())
    share = _number(1 / x_MD.shape[0], s_MN.dtype)
    if not has_exponentials:
        # A logit is too large, or not a number.
        if not kept:
            z_MN, _ = _similarities(x_MD, x, y, needs_grad, compute)
        torch.mul(z_MN, scale, out=s_MN).add_(bias)
        diagonal_M.neg_()
        loss = softplus(s_MN, 1, LINEAR_FROM).sum()
    loss.mul_(share)
    if needs_grad is None:
        return OnePiece(loss)
    g_MN = exp_MN.div_(exp_MN + _number(1, s_MN.dtype)) if has_exponentials else s_MN.sigmoid_()
    g_MN.mul_(share)
    diagonal_M.neg_()
    return _gradients(loss, g_MN, z_MN if kept else None, scale, x, y, x_MD, needs_grad, compute, g_MN.sum())


@functools.lru_cache(maxsize=256)
def _number(value: float, dtype: torch.dtype) -> Tensor:
    """Return a number as a tensor. PyTorch makes and converts one in every product with a number, which takes longer than a
    product of some thousand elements."""
    with torch.inference_mode(False):
        return torch.full((), value, dtype=dtype, device="cpu")


def _similarities(x_MD: Tensor, x: Tensor, y: Tensor, needs_grad: NeedsGrad | None, compute: ComputeOptions) -> tuple[Tensor, bool]:
    """Return x @ y.T, and whether it is kept for the derivative in the scale: if the matrix is smaller than the embeddings."""
    with units(x_MD, compute.precision):
        z_MN = torch.mm(x, y.t())
    return z_MN, needs_grad is not None and y.shape[0] <= y.shape[1]


def _sums(row_exp_MN: Tensor, column_exp_MN: Tensor, symmetric: bool) -> Tensor:
    row_total_M = row_exp_MN.sum(1)
    return torch.stack((row_total_M, column_exp_MN.sum(0))) if symmetric else row_total_M[None]


def _gradients(
    loss: Tensor,
    g_MN: Tensor,
    z_MN: Tensor | None,
    scale: Tensor,
    x: Tensor,
    y: Tensor,
    x_MD: Tensor,
    needs_grad: NeedsGrad,
    compute: ComputeOptions,
    dbias: Tensor | None,
) -> OnePiece:
    """Return the loss with its gradients. z_MN: the similarities, from which the derivative in the scale is computed; None if it
    is computed from a product."""
    dscale = None
    if z_MN is not None:
        dscale = z_MN.mul_(g_MN).sum()
        g_MN.mul_(scale)
    # Matrix units for bf16 round the gradient. Errors of the others average out; that of a positive would not.
    apart = x_MD.dtype == torch.bfloat16
    if apart:
        dpos_M1 = g_MN.diagonal().clone().unsqueeze(1)
        g_MN.diagonal().zero_()
    dx_MD = dy_ND = None
    with units(x_MD, compute.precision):
        if needs_grad.x:
            dx_MD = torch.mm(g_MN, y)
        if needs_grad.y:
            dy_ND = torch.mm(g_MN.t(), x)
    if apart:
        for gradient, partners in ((dx_MD, y), (dy_ND, x)):
            if gradient is not None:
                gradient[: len(x)].addcmul_(dpos_M1, partners[: len(x)])
    if dscale is None:
        embeddings, product = (x, dx_MD) if dx_MD is not None else (y, dy_ND)
        assert product is not None
        dscale = (embeddings * product).sum()
        for gradient in (dx_MD, dy_ND):
            if gradient is not None:
                gradient.mul_(scale)
    return OnePiece(loss, EagerGradients(dx_MD, dy_ND, dscale, dbias))


def finish(
    gradients: EagerGradients, g: Tensor | None, scale: Tensor, dtypes: tuple[torch.dtype, torch.dtype], needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, y, the scale and the bias for the gradient g of the loss; those that are not needed are None."""
    # Mostly nothing follows the loss, and its gradient is one.
    if g is not None and g.item() != 1:
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(g)
    dx, dy, dscale, dbias = gradients
    return (
        (dx if dx.dtype == dtypes[0] else dx.to(dtypes[0])) if needs[0] and dx is not None else None,
        (dy if dy.dtype == dtypes[1] else dy.to(dtypes[1])) if needs[1] and dy is not None else None,
        dscale if needs[2] else None,
        dbias if needs[-1] else None,
    )
