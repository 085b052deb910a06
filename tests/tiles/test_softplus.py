"""Softplus and sigmoid of blocks of logits, with and without logarithms that several elements share."""

from __future__ import annotations

import pytest
import torch

from megabatch.tiles import softplus

# Logits of each row; how many elements may share a logarithm differs with the largest.
RANGES = {
    "far below": (-110.0, -40.0),
    "sigmoid loss": (-30.0, 3.0),
    "two share": (-10.0, 30.0),
    "none share": (0.0, 80.0),
    "up to the limit": (-100.0, softplus.LARGEST_EXPONENT),
    "beyond": (-100.0, 1e4),
}


def logits(low: float, high: float, rows: int = 7, columns: int = 37) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    s_RC = low + (high - low) * torch.rand(rows, columns, generator=generator, dtype=torch.float64)
    s_RC[0, 0], s_RC[-1, -1] = low, high
    return s_RC.float()


@pytest.fixture(params=[True, False], ids=["halved", "not halved"])
def halved(request, monkeypatch):
    monkeypatch.setattr(softplus, "FEW_CELLS", 0 if request.param else 1 << 30)


def exact(s_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s_RC = s_RC.double()
    return torch.nn.functional.softplus(s_RC, 1, 40.0).sum(1), s_RC.sigmoid()


@pytest.mark.parametrize("limits", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize("columns", [1, 2, 3, 37, 64])
@pytest.mark.parametrize("has_buffer", [True, False])
def test_sums_and_sigmoids_are_those_of_float64(limits, columns, has_buffer, halved):
    s_RC = logits(*limits, columns=columns)
    sums_R, sigmoid_RC = exact(s_RC)
    buffer = torch.full_like(s_RC, torch.nan) if has_buffer else None
    found_R = softplus.softplus_sums_(s_RC, buffer, 1, sigmoid=True)
    # An exponential of fp32 is off by the rounding of its argument, up to 2^7 here; below 1e-37 it is subnormal.
    eps = torch.finfo(torch.float32).eps
    assert torch.allclose(found_R.double(), sums_R, rtol=130 * eps, atol=1e-37)
    assert torch.allclose(s_RC.double(), sigmoid_RC, rtol=130 * eps, atol=1e-37)


def test_pairs_that_do_not_count_add_nothing(halved):
    s_RC = logits(-5.0, 5.0)
    expected = softplus.softplus_sums_(s_RC.clone(), torch.empty_like(s_RC), 1, sigmoid=False)
    with_more = torch.cat((s_RC, torch.full((len(s_RC), 5), -torch.inf)), 1)
    found = softplus.softplus_sums_(with_more, torch.empty_like(with_more), 1, sigmoid=True)
    assert torch.allclose(found, expected, rtol=1e-6) and not with_more[:, -5:].any()
    none = torch.full((3, 8), -torch.inf)
    assert not softplus.softplus_sums_(none, torch.empty_like(none), 1, sigmoid=True).any() and not none.any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so_in_its_own_row(value, halved):
    s_RC = logits(-5.0, 5.0)
    s_RC[2, 3] = value
    found_R = softplus.softplus_sums_(s_RC, torch.empty_like(s_RC), 1, sigmoid=True)
    assert found_R.isfinite().tolist() == [row != 2 for row in range(len(s_RC))]
    assert s_RC[2, 3].isnan() if value != value else s_RC[2, 3] == 1


def test_a_block_without_rows():
    empty = torch.empty(0, 4)
    assert softplus.softplus_sums_(empty, torch.empty_like(empty), 1, sigmoid=True).shape == (0,)
