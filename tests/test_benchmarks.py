"""The benchmarks: a wrong result gets no time, the exact answer is the formula's, and kept rows can be shown again."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import check, loss, memory, peers, report
from benchmarks.measure import Case, Row, measure, needed_bytes, run_case
from megabatch import reference

MIB = 2**20


def one_direction(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.cross_entropy(scale * x @ y.T, torch.arange(len(x)))


def lost_negatives(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    half = torch.arange(len(x)) < len(x) // 2
    logits = (scale * x @ y.T).masked_fill(half[:, None] != half, -torch.inf)
    labels = torch.arange(len(x))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def constant_scale(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return reference.clip_loss(x, y, scale.detach() + 0 * scale)


def not_a_number(x: Tensor, y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return reference.clip_loss(x, y, scale) * torch.nan


def measured(batch: int, implementation: str, seconds: float, mib: float, **more: object) -> Row:
    machine = {"cpu": "a processor", "threads": 2, "torch": "2.13.0", "date": "2026-11-15T00:00:00", "memory_bytes": 2**30}
    row = {"loss": "clip", "implementation": implementation, "batch": batch, "dim": 8, "dtype": "float32", "device": "cpu"}
    times = {f"{part}_s": seconds for part in ("forward", "backward", "total")}
    return row | times | {"extra_bytes": int(mib * MIB), "errors": {"gradient": 1e-6}, "machine": machine} | more


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    too_large = measured(512, "openclip", 0, 0, skipped="needs about 9 GiB, 1 GiB are free", needed_bytes=9 * 2**30)
    too_large = {key: value for key, value in too_large.items() if not key.endswith("_s")}
    rows = [measured(256, "ours", 2.0, 4), measured(256, "openclip", 3.0, 16), measured(512, "ours", 8.0, 5), too_large]
    report.write_rows(tmp_path / "rows.jsonl", rows)
    return tmp_path / "rows.jsonl"


def test_a_case_in_its_own_process_gives_times_memory_and_errors() -> None:
    row = run_case(Case("clip", "ours", batch=256, dim=64, repeats=2))
    assert "error" not in row and row["right"] and row["runs"] == 2
    assert 0 < row["forward_min_s"] <= row["forward_s"] <= row["forward_max_s"]
    assert row["total_s"] >= row["backward_s"]
    assert 0 <= row["extra_bytes"] < 256 * MIB
    assert set(row["errors"]) == {"value", "gradient", "scale"}
    assert row["machine"]["torch"] == torch.__version__


@pytest.mark.parametrize("name", ["ours", "formula", "full matrix"])
@pytest.mark.parametrize("kind", check.LOSSES)
def test_right_implementations_pass_with_repeated_rows(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.measure.DISTINCT", 96)
    row = measure(Case(kind, name, batch=250, dim=32, repeats=0))
    assert row.get("right"), row
    assert row["distinct_pairs"] == 96 and "total_s" in row


@pytest.mark.parametrize("wrong", [one_direction, lost_negatives, constant_scale, not_a_number])
def test_a_wrong_result_is_refused_and_not_timed(wrong: peers.LossCall) -> None:
    row = measure(Case("clip", f"{__name__}:{wrong.__name__}", batch=256, dim=64))
    assert row["error"].startswith("wrong result")
    assert not any(key.endswith("_s") for key in row) and "extra_bytes" not in row


@pytest.mark.parametrize("kind", check.LOSSES)
def test_the_exact_answer_is_that_of_the_full_formula(kind: str) -> None:
    torch.manual_seed(0)
    pairs = [F.normalize(torch.randn(20, 16, dtype=torch.float64), dim=1) for _ in range(2)]
    index = torch.cat([torch.arange(20), torch.randint(20, (33,))])
    x, y = (tensor[index].requires_grad_() for tensor in pairs)
    scale, bias = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (7.0, -3.0))
    value = reference.clip_loss(x, y, scale) if kind == "clip" else reference.siglip_loss(x, y, scale, bias)
    value.backward()

    rows = torch.tensor([0, 13, 25, 50])
    counted = check.Pairs(*pairs, torch.bincount(index).double())
    exact = check.answer(kind, counted, index[rows], 7.0, -3.0, chunk=6)
    scalars = [None if leaf.grad is None else float(leaf.grad) for leaf in (scale, bias)]
    errors = check.errors(check.Result(value.item(), x.grad[rows], y.grad[rows], *scalars), exact)
    # Float64 on both sides: only its own rounding is left.
    assert max(errors.values()) < 1e-13, errors


def test_a_case_that_cannot_fit_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**20)
    case = Case("clip", "full matrix", batch=1024, dim=8)
    row = measure(case)
    assert row["skipped"].startswith("needs about") and row["needed_bytes"] >= 4 * 4 * 1024**2
    assert "total_s" not in row
    assert needed_bytes(peers.find("ours", "clip"), case) < 2**20


def test_a_process_that_dies_or_takes_too_long_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying.py").write_text("import os\ndef loss(*_): os.kill(os.getpid(), 9)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "signal 9" in run_case(Case("clip", "dying:loss", batch=16, dim=8))["error"]
    assert "stopped after" in run_case(Case("clip", "ours", batch=16, dim=8), timeout_s=0.01)["error"]


@pytest.mark.parametrize("resets", [True, False])
def test_the_peak_is_seen_after_it_is_gone(resets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not resets:
        monkeypatch.setattr(memory, "_reset_high_water_mark", lambda: False)

    def work() -> None:
        # Pages straight from the system: an allocator might hand out what it kept.
        with mmap.mmap(-1, 64 * MIB) as block:
            for page in range(0, 64 * MIB, 4096):
                block[page] = 1
            # Long enough for the sampling fallback to look.
            time.sleep(0.05)

    assert 60 * MIB < memory.peak_of(work, "cpu").extra_bytes < 80 * MIB


def test_absent_packages_are_named_and_unknown_ones_refused() -> None:
    absent = peers.Peer("none", "clip", lambda: reference.clip_loss, "no_such_package")
    assert peers.unavailable(absent, "cpu") == "no_such_package is not installed"
    with pytest.raises(ValueError, match="choose among ours, openclip"):
        peers.find("nobody", "clip")


def test_kept_rows_are_drawn_again(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert loss.main(["--redraw", str(kept)]) == 0
    assert kept.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "1.50×" in shown and "25.0%" in shown
    assert "OpenCLIP, N = 512: needs about 9 GiB" in shown


def test_kept_rows_as_markdown(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert loss.main(["--markdown", str(kept)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| loss | batch | megabatch | OpenCLIP |"
    assert lines[2] == "| clip | 256 | **2.00 s, 4.00 MiB** | 3.00 s, 16.0 MiB |"
    assert lines[3] == "| clip | 512 | **8.00 s, 5.00 MiB** | needs 9 GiB |"
