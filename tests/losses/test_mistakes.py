"""Silent mistakes that were found in other implementations of these losses: each would fail a test here.

For gradients scaled by the number of ranks, hard negatives used as positives, and unequal shards, see test_ring.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import Case, embeddings, formula, ours
from heap import mapped_blocks
from world import World

import megabatch
from benchmarks.memory import peak_of

LOSSES = {
    "clip": ("clip_loss", (6.0,), {}),
    "clip, weights and smoothing": ("clip_loss", (6.0,), {"weights": torch.rand(9, dtype=torch.float64), "label_smoothing": 0.1}),
    "siglip": ("siglip_loss", (6.0, -2.0), {}),
}


@pytest.mark.parametrize("loss, scalars, options", LOSSES.values(), ids=LOSSES.keys())
def test_the_gradient_is_that_of_the_value_that_is_returned(loss, scalars, options):
    """Finite differences detect a gradient that is scaled by the batch, or that leaves out the temperature."""
    x, y = embeddings(9, width=3)
    f, step = getattr(megabatch, loss), 1e-6
    found = ours(Case(loss, x, y, scalars, options))

    def slope(argument: int, unit: torch.Tensor | float) -> torch.Tensor:
        arguments = [x, y, *scalars]
        values = []
        for sign in (1, -1):
            moved = list(arguments)
            moved[argument] = moved[argument] + sign * step * unit
            values.append(f(*moved, **options))
        return (values[0] - values[1]) / (2 * step)

    direction = torch.randn_like(x)
    assert slope(0, direction) == pytest.approx((found["x"] * direction).sum().item(), rel=1e-6)
    assert slope(1, direction) == pytest.approx((found["y"] * direction).sum().item(), rel=1e-6)
    assert slope(2, 1.0) == pytest.approx(found["scale"].item(), rel=1e-6)
    if "bias" in found:
        assert slope(3, 1.0) == pytest.approx(found["bias"].item(), rel=1e-6)


@pytest.mark.filterwarnings("ignore:scale=0 with normalised")
@pytest.mark.parametrize("options", [{"ids": torch.zeros(9, dtype=torch.int64)}, {"drop_above": -1e3}], ids=["ids", "drop_above"])
@pytest.mark.parametrize("scale", [0.0, 5.0, 1e4])
def test_masked_pairs_leave_the_temperatures_gradient_a_number(options, scale):
    """-inf times a scale, or divided by a temperature, gives NaN in the gradient of the scale. Here every negative is masked."""
    x, y = embeddings(9, width=3)
    found = ours(Case("clip_loss", x, y, (scale,), options), torch.float32)
    assert all(t.abs().max() == 0 for t in found.values())


def test_sigmoid_logits_are_scaled_before_they_are_rounded():
    x, y = embeddings(64, width=64, kind="clustered")
    case = Case("siglip_loss", x, y, (100.0, -90.0)).rounded(torch.bfloat16)
    assert ours(case, torch.bfloat16)["value"].item() == pytest.approx(formula(case)["value"].item(), rel=1e-5)
    assert formula(case, torch.bfloat16)["value"].item() != pytest.approx(formula(case)["value"].item(), rel=1e-3)


@mapped_blocks()
def ring_peaks(rank: int, size: int, rows: int, width: int) -> int:
    def step(count: int) -> None:
        x, y = (torch.randn(count, width).requires_grad_() for _ in range(2))
        megabatch.clip_loss(x, y, 0.1, group=dist.group.WORLD, workspace=2**20).backward()

    step(8)
    return peak_of(lambda: step(rows), "cpu").extra_bytes


@pytest.mark.slow
def test_memory_of_a_rank_does_not_grow_with_the_number_of_ranks():
    """Gathering all ranks' embeddings would take two more blocks for every further rank, and their gradients as much."""
    rows, width = 1200, 512
    block = rows * width * 4
    peaks = []
    # From three ranks on, a rank has all its buffers: a block in use, one being sent, one being received. New processes each time:
    # memory that an allocator has kept from earlier work would hide a part of the peak.
    for size in (3, 4):
        world = World()
        peaks.append(max(world.run(size, ring_peaks, rows, width)) / block)
        world.close()
    assert peaks[1] - peaks[0] < 1.5, peaks
