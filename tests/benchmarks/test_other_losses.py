"""The comparison of the other losses checks results before it reports times."""

from __future__ import annotations

import json

import pytest

import megabatch
from benchmarks import other_losses


@pytest.mark.slow
def test_every_implementation_is_compared_with_the_formula_and_a_wrong_one_of_ours_fails(tmp_path, monkeypatch, capsys):
    small = [contest._replace(sizes={"cpu": (24,)}, checked=16) for contest in other_losses.CONTESTS]
    monkeypatch.setattr(other_losses, "CONTESTS", small)
    monkeypatch.setattr(other_losses, "BUDGET_S", 0.0)
    out = tmp_path / "rows.jsonl"
    assert other_losses.main(["--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["loss"] for row in rows} == {contest.name for contest in small}
    assert all(row["gradient_error"] < 1e-3 and row["seconds"] > 0 for row in rows)
    right = megabatch.distill_loss
    monkeypatch.setattr(megabatch, "distill_loss", lambda *inputs: 1.01 * right(*inputs))
    assert other_losses.main(["--only", "distillation", "--out", str(out)]) == 1
