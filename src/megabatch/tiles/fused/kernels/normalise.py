"""The kernel between the two passes of the softmax loss: sums over the others in, losses and softmax out.

Formula: ../../eager.py, _normalise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sums import LOG2_E, log1p


@triton.jit(do_not_specialize=["length"])
def normalise_kernel(
    row_peak, row_total, row_further, row_further_count, row_counted, row_counted_count,
    column_peak, column_total, column_further, column_further_count, column_counted, column_counted_count,
    positive, scale, weights, loss, own, out, smoothing, length, SIDES: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Losses and gradients in the positives' logits, both sides together; `out` takes (side, 4, row): see _one_side."""
    i = tl.program_id(0) * R + tl.arange(0, R)
    inside = i < length
    factor = tl.load(scale)
    z = tl.load(positive + i, mask=inside, other=0.0)
    weight = tl.full((R,), 1.0, tl.float32)
    if weights is not None:
        weight = tl.load(weights + i, mask=inside, other=0.0)
    stats = (row_peak, row_total, row_further, row_further_count, row_counted, row_counted_count)
    lost, pull = _one_side(stats, out, z, factor, weight, smoothing, i, length, R)
    if SIDES == 2:
        stats = (column_peak, column_total, column_further, column_further_count, column_counted, column_counted_count)
        column_lost, column_pull = _one_side(stats, out + 4 * length, z, factor, weight, smoothing, i, length, R)
        lost, pull = lost + column_lost, pull + column_pull
    tl.store(loss + i, lost * weight, mask=inside)
    tl.store(own + i, pull, mask=inside)


@triton.jit
def _one_side(stats, out, z, factor, weight, smoothing, i, length, R: tl.constexpr):
    """The losses of rows (or columns) and the gradients in their positives' logits; puts peak, gain, further, counted in `out`."""
    stats_peak, stats_total, further, further_count, counted, counted_count = stats
    inside = i < length
    others_peak = tl.load(stats_peak + i, mask=inside, other=0.0)
    s = factor * z
    peak = tl.maximum(others_peak, s)
    others = tl.load(stats_total + i, mask=inside, other=1.0) * tl.exp2((others_peak - peak) * LOG2_E)
    # Where the positive wins, power is one, and others alone are left. Computed, s - peak need not be zero there: the compiler puts
    # in the product that s was rounded from.
    wins = s >= others_peak
    power = tl.where(wins, 1.0, tl.exp2((s - peak) * LOG2_E))
    total = others + power
    lost = log1p(others + (power - 1.0)) + tl.where(wins, 0.0, peak - s)
    target = tl.full((R,), 1.0, tl.float32) - smoothing
    if further is not None:
        number = tl.load(further_count + i, mask=inside, other=0).to(tl.float32)
        target = target / (1.0 + number)
        lost -= factor * target * (tl.load(further + i, mask=inside, other=0.0) - number * z)
        tl.store(out + 2 * length + i, weight * target, mask=inside)
    if counted is not None:
        number = tl.load(counted_count + i, mask=inside, other=0).to(tl.float32)
        uniform = smoothing / (1.0 + number)
        lost -= factor * uniform * (tl.load(counted + i, mask=inside, other=0.0) - number * z)
        target += uniform
        tl.store(out + 3 * length + i, weight * uniform, mask=inside)
    tl.store(out + i, peak, mask=inside)
    tl.store(out + length + i, weight / total, mask=inside)
    return lost, weight * ((1.0 - target) - others / total)
