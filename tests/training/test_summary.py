"""What a run prints at its end."""

from __future__ import annotations

from megabatch.training.summary import sentences

RESULT = {"steps": 3, "samples": 192, "seconds": 4.0, "peak_bytes": 2**30}


def test_a_contrastive_run_ends_with_recall_beside_chance_cost_and_its_largest_step():
    recall = {"pairs": 50, "sides": ["query", "document"], "y_to_x": {"1": 0.5}, "x_to_y": {"1": 0.25}}
    steps = [{"pairs": pairs, "seconds": 2.0, "peak_bytes": None, "chunk": 8} for pairs in (64, 4096)]
    learnt, cost, large = sentences({**RESULT, "evaluation": recall, "chance": {"1": 0.02}, "flat": steps})
    assert "50.0 % of 50 held-out documents" in learnt and "25.0 % of the queries" in learnt and "2.0 %" in learnt
    assert "192 samples" in cost and "1 GiB" in cost
    assert "4,096" in large and "8 rows" in large


def test_a_run_without_held_out_data_ends_with_its_cost():
    (cost,) = sentences({**RESULT, "evaluation": None, "chance": None})
    assert "3 steps" in cost


def test_a_run_that_waits_for_its_samples_names_reading_as_the_limit():
    cost, limit = sentences({**RESULT, "evaluation": None, "chance": None, "waiting_for_data": 0.4})
    assert "40.0 %" in limit and "data.workers" in limit
    assert sentences({**RESULT, "evaluation": None, "chance": None, "waiting_for_data": 0.01}) == [cost]
