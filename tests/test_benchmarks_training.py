"""The studies of training: that they train, choose and tell what their rows say."""

from __future__ import annotations

import pytest
import torch

from benchmarks import batches, steps
from benchmarks.readme import ROOT
from benchmarks.report import read_rows


@pytest.fixture(scope="module")
def pairs():
    """Pictures of one grey and texts of one byte that belong together."""
    shades = torch.arange(100, dtype=torch.uint8)
    x = shades.view(-1, 1, 1, 1).expand(-1, 1, 32, 32).contiguous() * 2
    y = (shades.to(torch.int16) + 2).view(-1, 1).expand(-1, 80).contiguous()
    part = batches.Pairs(x, y, torch.arange(100))
    return {"training": part, "choosing": part, "reported": part}


def test_a_case_trains_on_its_samples_and_is_the_same_again(pairs):
    case = batches.Case(batch=20, lr=1e-3, seed=0, samples=100)
    row = batches.train(case, pairs, torch.device("cpu"))
    assert row["steps"] == 5 and row["pairs"] == 100 and 0 <= row["choosing_1"] <= 1
    again = batches.train(case, pairs, torch.device("cpu"))
    assert {k: v for k, v in row.items() if k != "train_seconds"} == {k: v for k, v in again.items() if k != "train_seconds"}


def test_a_stream_goes_through_every_sample_before_it_sees_one_again():
    case = batches.Case(batch=7, lr=1.0, seed=3, samples=0)
    stream = batches._stream(20, case, torch.device("cpu"))
    seen = torch.cat([next(stream) for _ in range(6)])
    assert seen[:20].sort().values.tolist() == list(range(20))
    assert seen[20:40].sort().values.tolist() == list(range(20))


def test_every_batch_is_tried_with_every_rate_and_seed_around_the_square_root_rule():
    work = batches.cases(1000, [64, 1024])
    assert len(work) == 2 * len(batches.SEEDS) * len(batches.RATE_FACTORS)
    rates = {batch: sorted({case.lr for case in work if case.batch == batch}) for batch in (64, 1024)}
    assert rates[1024][1] / rates[64][1] == pytest.approx(4, rel=0.05)


def test_the_table_of_a_study_shows_the_rate_chosen_elsewhere():
    rows = [
        {"batch": 64, "lr": lr, "seed": 0, "steps": 10, "samples": 640, "pairs": 50, "choosing_1": c, "x_to_y_1": r, "y_to_x_1": r}
        | {"cpu": "a cpu", "torch": "2", "date": "2026-01-01T00:00"}
        for lr, c, r in ((0.1, 0.2, 0.9), (0.2, 0.3, 0.5))
    ]
    assert "| 64 | 10 | 0.2 | 50.0% | 50.0% |" in batches.markdown(rows)


def test_a_step_is_measured_in_chunks():
    row = steps.measure(64, 32, "cpu")
    assert row["pairs"] == 64 and row["extra_bytes"] >= 0 and row["input_bytes"] > 64 * 1024


def test_the_kept_steps_grow_with_their_embeddings_alone():
    rows = read_rows(ROOT / "benchmarks/results/steps-cpu.jsonl")
    for chunk in {row["chunk"] for row in rows}:
        small, large = (next(row for row in rows if row["chunk"] == chunk and row["pairs"] == pairs) for pairs in (4096, 65536))
        grown, expected = (large[key] - small[key] for key in ("extra_bytes", "embedding_bytes"))
        # Beside embeddings and gradients: ids, ranks and sums, a few numbers for each pair.
        assert grown < 1.4 * expected
