"""The training benchmarks: they train, choose learning rates, and report their rows."""

from __future__ import annotations

import io

import pytest
import torch
from PIL import Image

from benchmarks import batches, steps
from benchmarks.batches import best_rates, study_figure
from benchmarks.readme import ROOT
from benchmarks.report import read_rows
from megabatch.reporting.figures import save

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pairs():
    """Pairs of an image of one grey value and a text of one byte."""
    shades = torch.arange(100, dtype=torch.uint8)
    x = shades.view(-1, 1, 1, 1).expand(-1, 1, 32, 32).contiguous() * 2
    y = (shades.to(torch.int16) + 2).view(-1, 1).expand(-1, 80).contiguous()
    part = batches.Pairs(x, y, torch.arange(100))
    return {"training": part, "choosing": part, "reported": part}


def test_a_case_trains_and_is_reproducible(pairs):
    case = batches.Case(batch=20, lr=1e-3, seed=0, samples=100)
    row = batches.train(case, pairs, torch.device("cpu"))
    assert row["steps"] == 5 and row["pairs"] == 100 and 0 <= row["choosing_1"] <= 1
    again = batches.train(case, pairs, torch.device("cpu"))
    assert {k: v for k, v in row.items() if k != "train_seconds"} == {k: v for k, v in again.items() if k != "train_seconds"}


def test_a_stream_repeats_no_sample_within_an_epoch():
    case = batches.Case(batch=7, lr=1.0, seed=3, samples=0)
    stream = batches._stream(20, case, torch.device("cpu"))
    seen = torch.cat([next(stream) for _ in range(6)])
    assert seen[:20].sort().values.tolist() == list(range(20))
    assert seen[20:40].sort().values.tolist() == list(range(20))


def test_every_batch_runs_with_every_rate_and_seed_around_the_square_root_rule():
    work = batches.cases(1000, [64, 1024])
    assert len(work) == 2 * len(batches.SEEDS) * len(batches.RATE_FACTORS)
    rates = {batch: sorted({case.lr for case in work if case.batch == batch}) for batch in (64, 1024)}
    assert rates[1024][1] / rates[64][1] == pytest.approx(4, rel=0.05)


def test_rates_beyond_the_edge_are_tried_if_the_best_rate_is_at_the_edge():
    def rows(batch, recalls):
        return [
            {"batch": batch, "lr": lr, "seed": seed, "steps": 1, "samples": 64, "x_to_y_1": r, "y_to_x_1": r}
            for lr, r in recalls.items()
            for seed in (0, 1)
        ]

    inside = rows(64, {0.1: 0.2, 0.3: 0.5, 0.9: 0.3})
    low = rows(512, {0.1: 0.5, 0.3: 0.4})
    high = rows(4096, {0.1: 0.1, 0.3: 0.4})
    given_up = rows(8, {0.1 * 3**n: n / 10 for n in range(batches.MOST_RATES)})
    found = batches.further(inside + low + high + given_up)
    assert found == [batches.Case(512, 0.033, s, 64) for s in (0, 1)] + [batches.Case(4096, 0.9, s, 64) for s in (0, 1)]


def test_a_study_resumes_after_the_rows_of_its_file(tmp_path, pairs, monkeypatch):
    monkeypatch.setattr(batches, "load", lambda run: pairs)
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(batches, "SEEDS", (0,))
    extra = []
    monkeypatch.setattr(batches, "further", lambda rows: extra)
    command = ["--device", "cpu", "--samples", "100", "--batches", "50", "--out", str(out)]
    assert batches.main(command) == 0
    first = out.read_text()
    assert len(first.splitlines()) == 3
    assert batches.main(command) == 0
    assert out.read_text() == first
    extra = [batches.Case(50, 0.5, 0, 100)]
    assert batches.main(command) == 0
    assert [line for line in out.read_text().splitlines() if line not in first] == out.read_text().splitlines()[3:]
    assert '"lr": 0.5' in out.read_text() and len(out.read_text().splitlines()) == 4


def test_the_table_shows_the_rate_chosen_on_other_pairs():
    rows = [
        {"batch": 64, "lr": lr, "seed": 0, "steps": 10, "samples": 640, "pairs": 50, "choosing_1": c, "x_to_y_1": r, "y_to_x_1": r}
        | {"cpu": "a cpu", "torch": "2", "date": "2026-01-01T00:00"}
        for lr, c, r in ((0.1, 0.2, 0.9), (0.2, 0.3, 0.5))
    ]
    assert "| 64 | 10 | 0.2 | 50.0% | 50.0% |" in batches.markdown(rows)


def test_a_step_is_measured_in_chunks():
    row = steps.measure(64, 32, "cpu")
    assert row["pairs"] == 64 and row["extra_bytes"] >= 0 and row["input_bytes"] > 64 * 1024


def test_the_memory_of_kept_steps_grows_with_the_embeddings_only():
    rows = read_rows(ROOT / "benchmarks/results/steps-cpu.jsonl")
    for chunk in {row["chunk"] for row in rows}:
        small, large = (next(row for row in rows if row["chunk"] == chunk and row["pairs"] == pairs) for pairs in (4096, 65536))
        grown, expected = (large[key] - small[key] for key in ("extra_bytes", "embedding_bytes"))
        # Besides embeddings and gradients: ids, ranks and sums, a few elements per pair.
        assert grown < 1.4 * expected


def test_the_rate_is_chosen_on_other_pairs_than_those_reported():
    rows = [
        {"batch": 64, "lr": lr, "steps": 10, "choosing_1": chosen, "x_to_y_1": shown, "y_to_x_1": shown}
        for lr, chosen, shown in ((1e-3, 0.5, 0.2), (1e-2, 0.4, 0.9))
    ]
    assert [(best.lr, best.recalls) for best in best_rates(rows)] == [(1e-3, [0.2])]


def study(batch: int, lr: float, *recalls: float | None) -> list[dict]:
    fields = {"batch": batch, "lr": lr, "samples": 2**20, "steps": 2**20 // batch}
    return [{**fields, "seed": seed, "x_to_y_1": r, "y_to_x_1": r and r + 0.1} for seed, r in enumerate(recalls)]


def test_a_batch_is_judged_by_its_best_learning_rate_including_divergence():
    rows = [*study(512, 1e-3, 0.25, 0.35), *study(512, 3e-3, 0.85, None, None), *study(64, 1e-3, 0.15)]
    small, large = best_rates(rows)
    assert (small.batch, small.steps, small.recalls) == (64, 2**14, pytest.approx([0.2]))
    assert (large.batch, large.lr, large.recalls) == (512, 1e-3, pytest.approx([0.3, 0.4]))


def test_the_study_can_be_drawn():
    png = io.BytesIO()
    save(study_figure([*study(64, 1e-3, 0.1), *study(4096, 1e-3, 0.2, 0.3)]), png)
    assert Image.open(png).width > 500
    with pytest.raises(ValueError, match="no rows"):
        study_figure([])
