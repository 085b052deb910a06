"""The losses of one block with the whole similarity matrix in the workspace, for small batches on a CPU. Legend: contract.py.

Value and gradients come from one computation of the matrix, 6·M·N·D operations for both losses, with few operations of PyTorch:
at some hundred rows, their number is what takes the time. A larger matrix is overwritten in place, a block of rows at a time. All
pairs count, and row i of y is the positive of row i of x.

As in the contract, sums go over the others, without the positive. t_SM is the logarithm of their odds against the positive, for
each side S (rows, and columns if the loss is symmetric): softplus(t) is the loss and sigmoid(t) = 1 - p, never as a difference.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
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
# Cells of a block of rows for each thread, which stay in its cache. A matrix of up to SMALL_CELLS is one block, a larger one
# FEWEST_BLOCKS or more.
BLOCK_CELLS, FEWEST_BLOCKS, SMALL_CELLS = 2**17, 16, 2**20


class EagerGradients(NamedTuple):
    """The gradients for an incoming gradient of one, as far as they are needed.

    dx_MD, dy_ND: in the dtype of sums. dscale, dbias: derivatives in the scale and the bias.
    """

    dx_MD: Tensor | None
    dy_ND: Tensor | None
    dscale: Tensor
    dbias: Tensor | None


def fits(shape: tuple[int, int, int], dtype: torch.dtype, compute: ComputeOptions) -> bool:
    """Return whether the workspace holds the matrix, and there is a pair to sum over."""
    rows, documents, _ = shape
    return rows > 0 and documents > 1 and rows * documents * accumulator(dtype).itemsize <= compute.workspace


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
    s_MN = z_MN.mul(scale) if kept else z_MN
    blocks = _row_blocks(s_MN)
    low, high = _range([torch.aminmax(block if kept else block.mul_(scale)) for block in blocks])
    diagonal_M = s_MN.diagonal()
    positive_M = diagonal_M.clone()
    # Its exponential of zero leaves the positive out of the sums.
    diagonal_M.fill_(-torch.inf)
    # Logits that are not numbers compare as false.
    shared = high - low <= 2 * SAFE_RANGE
    rows, columns = [], []
    if shared:
        middle = (low + high) / 2 if high > SAFE_RANGE or low < -SAFE_RANGE else 0.0
        if middle:
            positive_M.sub_(middle)
        for block in blocks:
            if middle:
                block.sub_(middle)
            rows.append(block.exp_().sum(1))
            if symmetric:
                columns.append(block.sum(0))
        total_SM = _totals(rows, columns)
        t_SM = total_SM.log().sub_(positive_M)
    else:
        peak_M1 = s_MN.amax(1, keepdim=True)
        peak_1N = s_MN.amax(0, keepdim=True) if symmetric else None
        for row_exp, column_exp in _exponentials(blocks, peak_M1, peak_1N):
            rows.append(row_exp.sum(1))
            if symmetric:
                columns.append(column_exp.sum(0))
        total_SM = _totals(rows, columns)
        peak_SM = peak_M1.t() if peak_1N is None else torch.cat((peak_M1.t(), peak_1N))
        # The difference first: at logits of 1e8, peak + log(total) would round log(total) away.
        t_SM = (peak_SM - positive_M).add_(total_SM.log())
    share = _number(1 / t_SM.numel(), t_SM.dtype)
    loss = softplus(t_SM, 1, LINEAR_FROM).sum().mul_(share)
    if needs_grad is None:
        return OnePiece(loss)
    others_SM = t_SM.sigmoid_().mul_(share)
    row_gain_M, *column_gain_N = (others_SM / total_SM).unbind()
    row_gains = _as_blocks(row_gain_M.unsqueeze(1), blocks)
    # The exponentials become the gradient with respect to the logits.
    if shared:
        for block, row_gain in zip(blocks, row_gains, strict=True):
            block.mul_(row_gain + column_gain_N[0] if symmetric else row_gain)
    else:
        exponentials = _exponentials(blocks, peak_M1, peak_1N)
        for block, row_gain, (row_exp, column_exp) in zip(blocks, row_gains, exponentials, strict=True):
            torch.mul(row_exp, row_gain, out=block)
            if symmetric:
                block.addcmul_(column_exp, column_gain_N[0])
    diagonal_M.sub_(others_SM.sum(0))
    return _gradients(loss, s_MN, z_MN if kept else None, scale, x, y, x_MD, needs_grad, compute, None)


def sigmoid_loss(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, bias: Tensor, *, needs_grad: NeedsGrad | None, compute: ComputeOptions
) -> OnePiece:
    """Return the mean over rows of the sum of -logsigmoid(label * (logit + bias)), and its gradients."""
    x, y = operand(x_MD), operand(y_ND)
    z_MN, kept = _similarities(x_MD, x, y, needs_grad, compute)
    s_MN = torch.add(bias, z_MN, alpha=scale.item()) if kept else z_MN
    blocks = _row_blocks(s_MN)
    sums, row = [], 0
    for block in blocks:
        if not kept:
            block.mul_(scale).add_(bias)
        # A positive costs softplus(-s), a negative softplus(s).
        block.diagonal(row).neg_()
        sums.append(block.exp_().log1p().sum())
        row += block.shape[0]
    loss = _total(sums)
    has_exponentials = math.isfinite(loss.item())
    share = _number(1 / x_MD.shape[0], s_MN.dtype)
    if not has_exponentials:
        # A logit is too large, or not a number.
        if not kept:
            _similarities(x_MD, x, y, needs_grad, compute, out=s_MN)
        torch.mul(z_MN, scale, out=s_MN).add_(bias)
        s_MN.diagonal().neg_()
        loss = _total([softplus(block, 1, LINEAR_FROM).sum() for block in blocks])
    loss.mul_(share)
    if needs_grad is None:
        return OnePiece(loss)
    # The exponentials become the gradient with respect to the logits.
    one = _number(1, s_MN.dtype)
    sums, row = [], 0
    for block in blocks:
        (block.div_(block + one) if has_exponentials else block.sigmoid_()).mul_(share)
        block.diagonal(row).neg_()
        sums.append(block.sum())
        row += block.shape[0]
    return _gradients(loss, s_MN, z_MN if kept else None, scale, x, y, x_MD, needs_grad, compute, _total(sums))


def _row_blocks(t_MN: Tensor) -> tuple[Tensor, ...]:
    """Return blocks of rows: all that is done with one at a time needs buffers of its size only, which stay in the caches."""
    if t_MN.numel() <= SMALL_CELLS:
        return (t_MN,)
    cells = min(BLOCK_CELLS * torch.get_num_threads(), t_MN.numel() // FEWEST_BLOCKS)
    return t_MN.split(max(1, cells // t_MN.shape[1]))


def _as_blocks(t_M1: Tensor, blocks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the rows of t that belong to each block."""
    return t_M1.split(blocks[0].shape[0]) if len(blocks) > 1 else (t_M1,)


def _exponentials(blocks: Sequence[Tensor], peak_M1: Tensor, peak_1N: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the exponentials of each block's logits relative to the peaks of its rows, and to those of the columns, if given."""
    for block, row_peak in zip(blocks, _as_blocks(peak_M1, blocks), strict=True):
        row_exp = (block - row_peak).exp_()
        yield row_exp, row_exp if peak_1N is None else (block - peak_1N).exp_()


def _totals(rows: list[Tensor], columns: list[Tensor]) -> Tensor:
    """Return the sums over rows and, if there are any, over columns, from those of the blocks."""
    row_total_M = torch.cat(rows) if len(rows) > 1 else rows[0]
    if not columns:
        return row_total_M[None]
    return torch.stack((row_total_M, torch.stack(columns).sum(0) if len(columns) > 1 else columns[0]))


def _total(sums: list[Tensor]) -> Tensor:
    """Return the sum of those of the blocks."""
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


def _range(extremes: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Return the lowest and the highest element from those of the blocks; not a number if one of them is none."""
    lowest, highest = extremes[0]
    if len(extremes) > 1:
        lowest, highest = torch.stack([low for low, _ in extremes]).amin(), torch.stack([high for _, high in extremes]).amax()
    return lowest.item(), highest.item()


@functools.lru_cache(maxsize=256)
def _number(value: float, dtype: torch.dtype) -> Tensor:
    """Return a number as a tensor. PyTorch makes and converts one in every product with a number, which takes longer than a
    product of some thousand elements."""
    with torch.inference_mode(False):
        return torch.full((), value, dtype=dtype, device="cpu")


def _similarities(
    x_MD: Tensor, x: Tensor, y: Tensor, needs_grad: NeedsGrad | None, compute: ComputeOptions, out: Tensor | None = None
) -> tuple[Tensor, bool]:
    """Return x @ y.T, and whether it is kept for the derivative in the scale: if the matrix is smaller than the embeddings."""
    with units(x_MD, compute.precision):
        z_MN = torch.mm(x, y.t(), out=out)
    return z_MN, needs_grad is not None and y.shape[0] <= y.shape[1]


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
