"""The comparison of Matryoshka with one width checks results before it reports times."""

from __future__ import annotations

import json

import pytest

from benchmarks import matryoshka


@pytest.mark.slow
def test_every_implementation_takes_turns_and_a_wrong_one_of_ours_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(matryoshka, "SIZES", {"cpu": (24,)})
    monkeypatch.setattr(matryoshka, "BUDGET_S", 0.0)
    monkeypatch.setattr(matryoshka, "WARM_UP_S", 0.0)
    out = tmp_path / "rows.jsonl"
    assert matryoshka.main(["--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["implementation"] for row in rows] == list(matryoshka.IMPLEMENTATIONS)
    assert all(row["seconds"] > 0 and row["turns"] == matryoshka.LEAST_TURNS for row in rows)
    assert rows[0]["ratio"] == 1 and rows[0]["error"] is None and all(row["error"] < 1e-4 for row in rows[1:])
    right = matryoshka.together
    monkeypatch.setitem(matryoshka.IMPLEMENTATIONS, matryoshka.TOGETHER, lambda *inputs: 1.01 * right(*inputs))
    assert matryoshka.main(["--out", str(out)]) == 1
