"""The kernel between the two passes of the softmax loss: sums over the others in, losses and softmax out. Formula: "
"../../eager.py."""

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
    """Losses and gradients in the positives' logits, both sides together; `out` takes (side, 4, row): peak, gain, further, "
    "counted."""
    i = tl.program_id(0) * R + tl.arange(0, R)
    inside = i < length
    factor = tl.load(scale)
    z = tl.load(positive + i, mask=inside, other=0.0)
    weight = tl.full((R,), 1.0, tl.float32)
    if weights is not None:
        weight = tl.load(weights + i, mask=inside, other=0.0)
    loss_sum, own_sum = tl.zeros((R,), tl.float32), tl.zeros((R,), tl.float32)
    for side in tl.static_range(SIDES):
        if side == 0:
            others_peak, others_total = (
                tl.load(row_peak + i, mask=inside, other=0.0),
                tl.load(row_total + i, mask=inside, other=1.0),
            )
        else:
            others_peak = tl.load(column_peak + i, mask=inside, other=0.0)
            others_total = tl.load(column_total + i, mask=inside, other=1.0)
        s = factor * z
        peak = tl.maximum(others_peak, s)
        others = others_total * tl.exp2((others_peak - peak) * LOG2_E)
        power = tl.exp2((s - peak) * LOG2_E)
        total = others + power
        lost = log1p(others + (power - 1.0)) + (peak - s)
        target = tl.full((R,), 1.0, tl.float32) - smoothing
        at = out + side * 4 * length + i
        if row_further is not None:
            if side == 0:
                sum_z, number = (
                    tl.load(row_further + i, mask=inside, other=0.0),
                    tl.load(row_further_count + i, mask=inside, other=0),
                )
            else:
                sum_z = tl.load(column_further + i, mask=inside, other=0.0)
                number = tl.load(column_further_count + i, mask=inside, other=0)
            number = number.to(tl.float32)
            target = target / (1.0 + number)
            lost -= factor * target * (sum_z - number * z)
            tl.store(at + 2 * length, weight * target, mask=inside)
        if row_counted is not None:
            if side == 0:
                sum_z, number = (
                    tl.load(row_counted + i, mask=inside, other=0.0),
                    tl.load(row_counted_count + i, mask=inside, other=0),
                )
            else:
                sum_z = tl.load(column_counted + i, mask=inside, other=0.0)
                number = tl.load(column_counted_count + i, mask=inside, other=0)
            number = number.to(tl.float32)
            uniform = smoothing / (1.0 + number)
            lost -= factor * uniform * (sum_z - number * z)
            target += uniform
            tl.store(at + 3 * length, weight * uniform, mask=inside)
        loss_sum += lost
        own_sum += weight * ((1.0 - target) - others / total)
        tl.store(at, peak, mask=inside)
        tl.store(at + length, weight / total, mask=inside)
    tl.store(loss + i, loss_sum * weight, mask=inside)
    tl.store(own + i, own_sum, mask=inside)
