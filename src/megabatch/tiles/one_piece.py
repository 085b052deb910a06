"""The losses of one block with the whole similarity matrix in the workspace, for small batches on a CPU. Legend: contract.py.

Value and gradients come from one computation of the matrix, 6·M·N·D operations for both losses, with few operations of PyTorch:
with less than a hundred rows, their number is what takes the time. A larger matrix is overwritten in place, a block of rows at a
time; the sigmoid loss, which has no sums over columns, computes it in panels of rows. All pairs count, and row i of y is the
positive of row i of x.

As in the contract, sums go over the others, without the positive. With o the odds of the others against the positive, log1p(o) is
the loss of a row (or column) and o / (1 + o) = 1 - p, which is never computed as a difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .contract import ComputeOptions, NeedsGrad, OnePiece, accumulator
from .products import number, operand, row_blocks, slices, units
from .softplus import LARGEST_EXPONENT, softplus_sums_

# While the logits are within this distance of zero, neither an exponential nor a sum of 2^30 of them leaves the normal range of
# fp32. Others are shifted by the middle of their range.
SAFE_RANGE = 60.0
# From here on softplus(t) is t: below the rounding of fp64. PyTorch's default of 20 is right for fp32 only.
LINEAR_FROM = 40.0
# Cells of a panel of rows: few, because memory has to be mapped anew in each step, and so many that products lose nothing.
PANEL_CELLS = 2**22


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
    kept = _is_kept(y, needs_grad)
    z_MN = _similarities(x_MD, x, y, compute)
    s_MN = z_MN.mul(scale) if kept else z_MN
    blocks = row_blocks(s_MN)
    low, high = _range([torch.aminmax(block if kept else block.mul_(scale)) for block in blocks])
    diagonal_M = s_MN.diagonal()
    positive_M = z_MN.diagonal().mul(scale) if kept else diagonal_M.clone()
    # Minus infinity, whose exponential of zero leaves the positive out of the sums.
    diagonal_M.sub_(number(math.inf, s_MN.dtype))
    share = number(1 / (s_MN.shape[0] * (1 + symmetric)), s_MN.dtype)
    # Whether rows and columns can share one exponential, so that no odds overflow. Logits that are not numbers compare as false.
    shared = high - low + math.log(max(s_MN.shape)) <= LARGEST_EXPONENT
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
        power_M = positive_M.exp_()
        sides = [_side(total, power_M, share) for total in _totals(rows, columns)]
    else:
        peak_M1 = s_MN.amax(1, keepdim=True)
        peak_1N = s_MN.amax(0, keepdim=True) if symmetric else None
        for row_exp, column_exp in _exponentials(blocks, peak_M1, peak_1N):
            rows.append(row_exp.sum(1))
            if symmetric:
                columns.append(column_exp.sum(0))
        peaks = [peak_M1.squeeze(1), *([] if peak_1N is None else [peak_1N.squeeze(0)])]
        totals = _totals(rows, columns)
        sides = [_side_with_peaks(total, peak, positive_M, share) for total, peak in zip(totals, peaks, strict=True)]
    loss = sides[0].loss
    if symmetric:
        loss.add_(sides[1].loss)
    loss.mul_(share)
    if needs_grad is None:
        return OnePiece(loss)
    row_gains = _as_blocks(sides[0].gain_M.unsqueeze(1), blocks)
    # The exponentials become the gradient with respect to the logits.
    if shared:
        for block, row_gain in zip(blocks, row_gains, strict=True):
            block.mul_(row_gain + sides[1].gain_M if symmetric else row_gain)
    else:
        exponentials = _exponentials(blocks, peak_M1, peak_1N)
        for block, row_gain, (row_exp, column_exp) in zip(blocks, row_gains, exponentials, strict=True):
            torch.mul(row_exp, row_gain, out=block)
            if symmetric:
                block.addcmul_(column_exp, sides[1].gain_M)
    for side in sides:
        diagonal_M.sub_(side.others_M)
    products = PanelProducts(scale, x, y, x_MD, needs_grad, compute)
    products.add(0, x, s_MN, z_MN if kept else None)
    return OnePiece(loss, products.gradients(None))


class Side(NamedTuple):
    """The softmax over rows, or over columns.

    loss: the sum of the cross-entropies. gain_M: the factor of exponentials in the gradient. others_M: the probability of the
    others, 1 - p, as a part of the gradient. The latter two contain the mean's factor.
    """

    loss: Tensor
    gain_M: Tensor
    others_M: Tensor


def _side(total_M: Tensor, power_M: Tensor, share: Tensor) -> Side:
    """Return the softmax from the sums of the others' exponentials and from those of the positives."""
    gain_M = share / (total_M + power_M)
    return Side((total_M / power_M).log1p_().sum(), gain_M, total_M * gain_M)


def _side_with_peaks(total_M: Tensor, peak_M: Tensor, positive_M: Tensor, share: Tensor) -> Side:
    """Return the softmax from the sums of exponentials relative to the largest of the others, and from the positives' logits."""
    # The difference first: at logits of 1e8, peak + log(total) would round log(total) away.
    t_M = (peak_M - positive_M).add_(total_M.log())
    loss = softplus(t_M, 1, LINEAR_FROM).sum()
    others_M = t_M.sigmoid_().mul_(share)
    return Side(loss, others_M / total_M, others_M)


def sigmoid_loss(
    x_MD: Tensor, y_ND: Tensor, scale: Tensor, bias: Tensor, *, needs_grad: NeedsGrad | None, compute: ComputeOptions
) -> OnePiece:
    """Return the mean over rows of the sum of -logsigmoid(label * (logit + bias)), and its gradients."""
    x, y = operand(x_MD), operand(y_ND)
    kept = _is_kept(y, needs_grad)
    share = number(1 / x_MD.shape[0], x.dtype)
    products = None if needs_grad is None else PanelProducts(scale, x, y, x_MD, needs_grad, compute)
    losses, slopes = [], []
    for first, x_PD, buffer in _row_panels(x, y):
        z_PN = _similarities(x_MD, x_PD, y, compute, out=buffer)
        s_PN = torch.add(bias, z_PN, alpha=scale.item()) if kept else z_PN
        blocks = row_blocks(s_PN)
        work = torch.empty_like(blocks[0]) if len(blocks) > 1 else None
        row = first
        for block in blocks:
            if not kept:
                block.mul_(scale).add_(bias)
            # A positive costs softplus(-s), a negative softplus(s).
            positives = block.diagonal(row).neg_()
            buffer_BN = None if work is None else work[: block.shape[0]]
            losses.append(softplus_sums_(block, buffer_BN, None, sigmoid=products is not None))
            if products is not None:
                # The sigmoids become the gradient with respect to the logits.
                block.mul_(share)
                positives.neg_()
                slopes.append(block.sum())
            row += block.shape[0]
        if products is not None:
            products.add(first, x_PD, s_PN, z_PN if kept else None)
    loss = _total(losses).mul_(share)
    return OnePiece(loss) if products is None else OnePiece(loss, products.gradients(_total(slopes)))


def _row_panels(x: Tensor, y: Tensor) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Return panels of rows: the first row, the rows, and memory for their similarities, which all panels share. A single one is x
    itself, without memory."""
    height = max(1, PANEL_CELLS // y.shape[0])
    if x.shape[0] <= height:
        return iter(((0, x, None),))
    buffer = x.new_empty(height, y.shape[0])
    return ((rows.start, x[rows], buffer[: rows.stop - rows.start]) for rows in slices(x.shape[0], height))


def _as_blocks(t_M1: Tensor, blocks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the rows of t that belong to each block."""
    return t_M1.split(blocks[0].shape[0]) if len(blocks) > 1 else (t_M1,)


def _exponentials(blocks: Sequence[Tensor], peak_M1: Tensor, peak_1N: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the exponentials of each block's logits relative to the peaks of its rows, and to those of the columns, if given."""
    for block, row_peak in zip(blocks, _as_blocks(peak_M1, blocks), strict=True):
        row_exp = (block - row_peak).exp_()
        yield row_exp, row_exp if peak_1N is None else (block - peak_1N).exp_()


def _totals(rows: list[Tensor], columns: list[Tensor]) -> list[Tensor]:
    """Return the sums over rows and, if there are any, over columns, from those of the blocks."""
    totals = [torch.cat(rows) if len(rows) > 1 else rows[0]]
    if columns:
        totals.append(torch.stack(columns).sum(0) if len(columns) > 1 else columns[0])
    return totals


def _total(sums: list[Tensor]) -> Tensor:
    """Return the sum of those of the blocks."""
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


def _range(extremes: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Return the lowest and the highest element from those of the blocks; not a number if one of them is none."""
    lowest, highest = extremes[0]
    if len(extremes) > 1:
        lowest, highest = torch.stack([low for low, _ in extremes]).amin(), torch.stack([high for _, high in extremes]).amax()
    return lowest.item(), highest.item()


def _is_kept(y: Tensor, needs_grad: NeedsGrad | None) -> bool:
    """Return whether the similarities are kept for the derivative in the scale: if they are fewer than the embeddings' numbers."""
    return needs_grad is not None and y.shape[0] <= y.shape[1]


def _similarities(x_MD: Tensor, x: Tensor, y: Tensor, compute: ComputeOptions, out: Tensor | None = None) -> Tensor:
    """Return x @ y.T. x_MD: the original embeddings, for their dtype."""
    with units(x_MD, compute.precision):
        return torch.mm(x, y.t(), out=out)


class PanelProducts:
    """The gradients of x and y, added up from panels of rows."""

    def __init__(self, scale: Tensor, x: Tensor, y: Tensor, x_MD: Tensor, needs_grad: NeedsGrad, compute: ComputeOptions) -> None:
        """x, y: the operands; x_MD: the original embeddings, for their dtype."""
        self.scale, self.x, self.y, self.x_MD = scale, x, y, x_MD
        self.needs_grad, self.compute = needs_grad, compute
        self.dx_MD: Tensor | None = None
        self.dy_ND: Tensor | None = None
        self.dscale: Tensor | None = None

    def add(self, first: int, x_PD: Tensor, g_PN: Tensor, z_PN: Tensor | None) -> None:
        """Add the products of the rows from `first` on, which are x itself if these are all, with the gradient in their logits.

        z_PN: the similarities, from which the derivative in the scale is computed; None if it is computed from a product. Both are
        overwritten.
        """
        if z_PN is not None:
            dscale = z_PN.mul_(g_PN).sum()
            self.dscale = dscale if self.dscale is None else self.dscale.add_(dscale)
            g_PN.mul_(self.scale)
        # Matrix units for bf16 round the gradient. Errors of the others average out; that of a positive would not.
        apart = self.x_MD.dtype == torch.bfloat16
        if apart:
            positives = g_PN.diagonal(first)
            dpos_P1 = positives.clone().unsqueeze(1)
            positives.zero_()
        dx_PD = None
        with units(self.x_MD, self.compute.precision):
            if self.needs_grad.x and x_PD is self.x:
                self.dx_MD = dx_PD = torch.mm(g_PN, self.y)
            elif self.needs_grad.x:
                self.dx_MD = torch.empty_like(self.x) if self.dx_MD is None else self.dx_MD
                dx_PD = torch.mm(g_PN, self.y, out=self.dx_MD[first : first + x_PD.shape[0]])
            if self.needs_grad.y:
                self.dy_ND = torch.mm(g_PN.t(), x_PD) if self.dy_ND is None else self.dy_ND.addmm_(g_PN.t(), x_PD)
        if apart:
            own = slice(first, first + x_PD.shape[0])
            if dx_PD is not None:
                dx_PD.addcmul_(dpos_P1, self.y[own])
            if self.dy_ND is not None:
                self.dy_ND[own].addcmul_(dpos_P1, x_PD)

    def gradients(self, dbias: Tensor | None) -> EagerGradients:
        """Return the gradients once all rows have been added."""
        dx_MD, dy_ND, dscale = self.dx_MD, self.dy_ND, self.dscale
        if dscale is None:
            embeddings, product = (self.x, dx_MD) if dx_MD is not None else (self.y, dy_ND)
            assert product is not None
            dscale = (embeddings * product).sum()
            for gradient in (dx_MD, dy_ND):
                if gradient is not None:
                    gradient.mul_(self.scale)
        return EagerGradients(dx_MD, dy_ND, dscale, dbias)


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
