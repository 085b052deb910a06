"""The benchmark of the memory prediction: its rows, other estimates, limits, and the accuracy of the kept rows."""

from __future__ import annotations

import json
import statistics
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.memory_accuracy import __main__ as program
from benchmarks.memory_accuracy import predicting, report
from benchmarks.memory_accuracy.cases import GIB, HELD_OUT, Case, Limit, cases, limits, of_row, quick_cases
from benchmarks.memory_accuracy.predicting import fitting_row, others, predict
from benchmarks.report import read_rows

KEPT = read_rows(Path(__file__).parents[2] / "benchmarks/results/memory-cuda.jsonl")
MEASURED = [row for row in KEPT if row.get("kind") != "limit"]


def test_the_kept_rows_are_within_the_accepted_errors() -> None:
    assert len(MEASURED) >= 30 and not any("failed" in row for row in KEPT)
    assert {row["model"] for row in MEASURED} == {case.model for case in cases()} >= set(HELD_OUT)
    errors, reserved = ([abs(row[name]) for row in MEASURED] for name in ("error", "reserved_error"))
    assert max(errors) <= 0.05 and statistics.median(errors) <= 0.015 and max(reserved) <= 0.10
    held = [row for row in KEPT if row.get("kind") == "limit"]
    assert len(held) == len(list(limits()))
    assert all(
        row["ran"] and row["predicted_reserved"] <= row["limit"] and row["measured_reserved"] <= row["limit"] for row in held
    )


def test_rows_are_predicted_with_the_kernels_that_were_measured() -> None:
    older = [{name: value for name, value in row.items() if name != "as_run"} for row in MEASURED]
    assert not any(of_row(row).as_run or of_row(row).setup().fused for row in older)
    plain, as_run = (predict(Case("tiny", 1, as_run=as_run)) for as_run in (False, True))
    assert "optimizer step" in plain.phases and plain.peak_bytes > as_run.peak_bytes


@pytest.mark.slow
def test_a_kept_prediction_is_reproduced() -> None:
    pytest.importorskip("timm")
    row = next(row for row in MEASURED if row["model"] == "resnet50" and row["precision"] == "bf16")
    predicted = predict(of_row(row))
    # Versions of torch and of the models differ slightly in what they compute.
    assert predicted.peak_bytes == pytest.approx(row["measured"], rel=0.01)
    assert predicted.reserved_bytes == pytest.approx(row["measured_reserved"], rel=0.03)


def test_estimates_of_other_tools_agree_with_arithmetic() -> None:
    weights = 4 * (768 * 64 + 64 + 64 * 10 + 10)
    estimates = others(Case("tiny", 8))
    # torchinfo: 8 images, the weights, twice the outputs of both layers. The list has four members: 768, 64, 64, 10 wide.
    assert estimates["torchinfo"] == 8 * 768 * 4 + weights + 2 * 8 * (64 + 10) * 4
    assert estimates["rule_of_thumb"] == 3 * weights + 8 * (768 + 64 + 64 + 10) * 4
    assert estimates["accelerate"] == 4 * weights
    half = others(Case("tiny", 8, "bf16"))
    assert half["torchinfo"] == 8 * 768 * 4 + weights + 2 * 8 * (64 + 10) * 2
    assert half["accelerate"] == 2 * weights


class FakePrediction(NamedTuple):
    peak_bytes: int
    reserved_bytes: int


@pytest.mark.parametrize(("bytes_", "rows"), [(1000, 10), (1999, 19), (12_345, 120), (100, 1)])
def test_the_largest_size_that_fits_is_found(monkeypatch: pytest.MonkeyPatch, bytes_: int, rows: int) -> None:
    monkeypatch.setattr(predicting, "predict", lambda case: FakePrediction(90 * case.rows, 100 * case.rows))
    row = fitting_row(Limit(Case("tiny", 1), bytes_))
    # To within a sixteenth, and never beyond the limit.
    assert rows * 15 / 16 <= row["rows"] <= rows and row["predicted_reserved"] == 100 * row["rows"] <= bytes_
    assert row["kind"] == "limit" and row["limit"] == bytes_


def test_a_limit_below_one_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicting, "predict", lambda case: FakePrediction(90, 100))
    with pytest.raises(ValueError, match="99 bytes are too few for one row of tiny"):
        fitting_row(Limit(Case("tiny", 1), 99))
    assert Limit(Case("clip-vit-b-32", 512, objective="clip", chunk=1), GIB).at(48).chunk == 48


def test_the_quick_cases_give_complete_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()

    def run_one_at_a_time(part: str, what: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return program.run_here(part, what)

    monkeypatch.setattr(program, "run_in_process", run_one_at_a_time)
    out = tmp_path / "rows.jsonl"
    assert program.main(["--quick", "--output", str(out)]) == 0
    rows = read_rows(out)
    assert [of_row(row) for row in rows] == quick_cases()
    for row in rows:
        assert row["predicted"] == sum(row["parts"].values()) and row["machine"]["torch"] == torch.__version__
        assert row["others_accelerate"] > 0 and row["measured"] is None


def canned(part: str, what: dict[str, Any]) -> dict[str, Any]:
    if part == "fit":
        return {"kind": "limit", **what["case"], "limit": what["bytes"], "predicted": GIB, "predicted_reserved": 2 * GIB}
    if part == "within":
        return {"ran": what["model"] != "gpt2", "measured": GIB, "measured_reserved": 2 * GIB}
    if part == "measure":
        machine = {"gpu": "a device", "torch": "2.0", "date": "2026-11-15T00:00:00"}
        return {"measured": 10 * GIB, "measured_reserved": 10 * GIB, "machine": machine}
    prediction = {"predicted": 9 * GIB, "predicted_reserved": 10.5 * GIB, "predict_seconds": 3.0}
    return what | prediction | {f"others_{name}": 20 * GIB for name in report.OTHERS}


def test_errors_limits_and_misses_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "run_in_process", canned)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    out = tmp_path / "rows.jsonl"
    assert program.main(["--output", str(out), "--only", "gpt2,vgg16"]) == 1, "one of them ran out of memory"
    rows = read_rows(out)
    assert rows[0]["error"] == pytest.approx(-0.1) and rows[0]["reserved_error"] == pytest.approx(0.05)
    assert out.with_suffix(".png").stat().st_size > 10_000
    assert "off by 10.00% in the median and 10.0% at worst" in capsys.readouterr().out
    table = report.markdown(rows)
    assert "| vgg16 | 32 | fp32 | 10.00 | **-10.00%** | 10.00 | +5.0% | +100% | +100% | +100% |" in table
    assert "missed by the worst peak (5.0%), the median peak (1.5%)." in table
    assert "| gpt2 | bf16 | 12.00 GiB | 1 rows | 2.00 GiB | 2.00 GiB | **out of memory** |" in report.limits_markdown(rows)


def test_kept_measurements_are_predicted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "run_in_process", canned)
    kept = tmp_path / "rows.jsonl"
    kept.write_text("".join(json.dumps(row) + "\n" for row in (MEASURED[0], KEPT[-1])))
    assert program.main(["--again", str(kept)]) == 0
    again, limit = read_rows(kept)
    assert again["predicted"] == 9 * GIB and again["measured"] == MEASURED[0]["measured"]
    assert again["error"] == pytest.approx(9 * GIB / MEASURED[0]["measured"] - 1)
    assert limit == KEPT[-1]


@pytest.mark.slow
def test_a_part_runs_in_its_own_process_which_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = asdict(quick_cases()[0])
    assert program.run_in_process("predict", tiny)["predicted"] == predict(quick_cases()[0]).peak_bytes
    monkeypatch.setattr(program.sys, "executable", "false")
    failed = program.run_in_process("predict", tiny)
    assert failed == {"failed": "predict: no message"}
    assert report.line(MEASURED[0] | failed) == "resnet50, 32 rows, fp32: failed, predict: no message"
