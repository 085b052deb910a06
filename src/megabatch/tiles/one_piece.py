"""The losses of one block with the whole similarity matrix in the workspace, for small batches on a CPU. Legend: contract.py.

Value and gradients come from one computation of the matrix, 6·M·N·D operations for both losses, with few operations of PyTorch:
at some hundred rows, their number is what takes the time. All pairs count, and row i of y is the positive of row i of x.

As in the contract, sums go over the others, without the positive. t_SM is the logarithm of their odds against the positive, for
each side S (rows, and columns if the loss is symmetric): softplus(t) is the loss and sigmoid(t) = 1 - p, never as a difference.
"""

from __future__ import annotations

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
    """The gradients as far as they are needed.

    gx_MD, gy_ND: not yet multiplied with the scale. dscale, dbias: derivatives in the scale and the bias.
    """

    gx_MD: Tensor | None
    gy_ND: Tensor | None
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
    x, y, s_MN = _logits(x_MD, y_ND, scale, compute)
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
        peak_SM = peak_M1.T
        if symmetric:
            peak_1N = s_MN.amax(0, keepdim=True)
            s_MN.sub_(peak_1N).exp_()
            peak_SM = torch.cat((peak_SM, peak_1N))
        total_SM = _sums(row_exp_MN, column_exp_MN, symmetric)
        # The difference first: at logits of 1e8, peak + log(total) would round log(total) away.
        t_SM = (peak_SM - positive_M).add_(total_SM.log())
    loss = softplus(t_SM, 1, LINEAR_FROM).sum().mul_(1 / t_SM.numel())
    if needs_grad is None:
        return OnePiece(loss)
    others_SM = t_SM.sigmoid_().mul_(1 / t_SM.numel())
    row_gain_M, *column_gain_N = (others_SM / total_SM).unbind()
    if not symmetric:
        g_MN = row_exp_MN.mul_(row_gain_M.unsqueeze(1))
    elif shared:
        g_MN = row_exp_MN.mul_(row_gain_M.unsqueeze(1) + column_gain_N[0])
    else:
        g_MN = row_exp_MN.mul_(row_gain_M.unsqueeze(1)).addcmul_(column_exp_MN, column_gain_N[0])
    torch.sum(others_SM, 0, out=g_MN.diagonal()).neg_()
    return _gradients(loss, g_MN, x, y, x_MD, needs_grad, compute, None)


def sigmoid_loss(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, bias: Tensor, *, needs_grad: NeedsGrad | None, compute: ComputeOptions
) -> OnePiece:
    """Return the mean over rows of the sum of -logsigmoid(label * (logit + bias)), and its gradients."""
    x, y, s_MN = _logits(x_MD, y_ND, scale, compute)
    s_MN.add_(bias)
    # A positive costs softplus(-s), a negative softplus(s).
    diagonal_M = s_MN.diagonal()
    diagonal_M.neg_()
    share = 1 / x_MD.shape[0]
    loss = softplus(s_MN, 1, LINEAR_FROM).sum().mul_(share)
    if needs_grad is None:
        return OnePiece(loss)
    g_MN = s_MN.sigmoid_().mul_(share)
    diagonal_M.neg_()
    return _gradients(loss, g_MN, x, y, x_MD, needs_grad, compute, g_MN.sum())


def _logits(x_MD: Tensor, y_ND: Tensor, scale: Tensor, compute: ComputeOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operands of the products, and scale * x @ y.T."""
    x, y = operand(x_MD), operand(y_ND)
    with units(x_MD, compute.precision):
        z_MN = torch.mm(x, y.T)
    return x, y, z_MN.mul_(scale)


def _sums(row_exp_MN: Tensor, column_exp_MN: Tensor, symmetric: bool) -> Tensor:
    row_total_M = row_exp_MN.sum(1)
    return torch.stack((row_total_M, column_exp_MN.sum(0))) if symmetric else row_total_M[None]


def _gradients(
    loss: Tensor,
    g_MN: Tensor,
    x: Tensor,
    y: Tensor,
    x_MD: Tensor,
    needs_grad: NeedsGrad,
    compute: ComputeOptions,
    dbias: Tensor | None,
) -> OnePiece:
    """Return the loss with the products of its gradient in the logits, and the derivative in the scale from one of them."""
    # Matrix units for bf16 round the gradient. Errors of the others average out; that of a positive would not.
    apart = x_MD.dtype == torch.bfloat16
    if apart:
        dpos_M1 = g_MN.diagonal().clone().unsqueeze(1)
        g_MN.diagonal().zero_()
    gx_MD = gy_ND = None
    with units(x_MD, compute.precision):
        if needs_grad.x:
            gx_MD = torch.mm(g_MN, y)
        if needs_grad.y:
            gy_ND = torch.mm(g_MN.T, x)
    if apart:
        for gradient, partners in ((gx_MD, y), (gy_ND, x)):
            if gradient is not None:
                gradient[: len(x)].addcmul_(dpos_M1, partners[: len(x)])
    embeddings, product = (x, gx_MD) if gx_MD is not None else (y, gy_ND)
    assert product is not None
    dscale = (embeddings * product).sum()
    return OnePiece(loss, EagerGradients(gx_MD, gy_ND, dscale, dbias))


def finish(
    gradients: EagerGradients, g: Tensor | None, scale: Tensor, dtypes: tuple[torch.dtype, torch.dtype], needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, y, the scale and the bias for the gradient g of the loss; those that are not needed are None."""
    gx_MD, gy_ND, *derivatives = gradients
    # Numbers, which are multiplied faster than tensors of one element. Mostly nothing follows the loss, and its gradient is one.
    incoming = 1.0 if g is None else g.item()
    factor = incoming * scale.item()
    dx, dy = (
        product.mul_(factor).to(dtype) if need and product is not None else None
        for product, dtype, need in zip((gx_MD, gy_ND), dtypes, needs, strict=False)
    )
    dscale, dbias = (
        (derivative if incoming == 1.0 else derivative.mul_(incoming)) if need and derivative is not None else None
        for derivative, need in zip(derivatives, (*needs[2:], False), strict=False)
    )
    return dx, dy, dscale, dbias
