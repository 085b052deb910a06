"""The model of the ring's cost: close to published times, and consistent with the rows from which on it says that sending hides."""

from __future__ import annotations

import pytest

from benchmarks import ring
from megabatch.costs.devices import find_device


@pytest.mark.parametrize("row", ring.PUBLISHED, ids=lambda row: f"{row.captions} captions, {row.gpus} GPUs")
def test_published_times_are_predicted_within_a_quarter(row):
    assert abs(ring.predicted(row) / row.seconds - 1) < 0.25


@pytest.mark.parametrize("loss", ring.OUR_LOSSES)
def test_sending_takes_as_long_as_computing_at_the_rows_that_hide_it(loss):
    device, link, width, ranks = find_device("H200"), 25e9, 512, 10_000
    rows = ring.rows_that_hide(loss, "H200", link)
    sent, operations = ring.OUR_LOSSES[loss]
    sending = (ranks - 1) * sent * rows * width / (link * device.efficiency.link)
    computing = operations * rows * (ranks * rows) * width / device.flops_per_second("bf16")
    assert sending == pytest.approx(computing, rel=1e-3)
