"""The benchmark of encoders: wrong gradients are not timed, rows are independent, kept rows can be drawn."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import overhead, report
from benchmarks.encoders import __main__ as encoders
from benchmarks.encoders import schemes
from benchmarks.encoders.cases import Case
from benchmarks.encoders.measure import Bench
from benchmarks.encoders.model import Batch
from benchmarks.encoders.schemes import Accumulation, Scheme, TwoPass
from benchmarks.measure import Row
from benchmarks.readme import with_tables

pytestmark = pytest.mark.slow

FIELDS = {
    "case",
    "contestant",
    "pairs",
    "chunk",
    "chunk_done",
    "keep",
    "kept",
    "seconds",
    "seconds_min",
    "seconds_max",
    "peak_allocated_mib",
    "peak_reserved_mib",
    "useful_flops",
    "hardware_flops",
    "matmul_flops_per_s",
    "useful_share",
    "hardware_share",
    "errors",
    "own_errors",
    "scale_factor",
    "machine",
}


class OnePercentOff(TwoPass):
    """All gradients are right except that of one weight."""

    def step(self, batch: Batch) -> Tensor:
        loss = super().step(batch)
        self.clip.text.projection.weight.grad *= 0.99
        return loss


class ScaleTooOften(Accumulation):
    """Returns the gradient of the scale that accumulation gives."""

    scale_is_trained = True


class NotANumber(TwoPass):
    def step(self, batch: Batch) -> Tensor:
        loss = super().step(batch)
        self.clip.image.projection.weight.grad *= torch.nan
        return loss


class OutOfMemory(Scheme):
    def step(self, batch: Batch) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


class DoesNotCompile(Scheme):
    def step(self, batch: Batch) -> Tensor:
        raise RuntimeError("no compiler\nand more")


@pytest.fixture(scope="module")
def made() -> Bench:
    return Bench("cpu", small=True)


@pytest.fixture
def bench(made: Bench) -> Bench:
    # A test may replace a scheme whose name was checked before.
    made.checked.clear()
    return made


def case(contestant: str = "two-pass", keep: int | str | None = None, **more: object) -> Case:
    return Case("contestants", contestant, pairs=6, chunk=2, keep=keep, device="cpu", **{"warm_up": 1, "runs": 1, **more})


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of one quick run's rows; its figure is beside it."""
    path = tmp_path_factory.mktemp("encoders") / "rows.jsonl"
    only = "megabatch,two-pass,OpenCLIP accumulation"
    assert encoders.main(["--quick", "--cases", "contestants", "--only", only, "--output", str(path)]) == 0
    return path


def test_a_quick_run_measures_every_contestant(out: Path) -> None:
    rows = report.read_rows(out)
    assert [(row["contestant"], row["keep"]) for row in rows] == [
        ("megabatch", 0),
        ("megabatch", 1),
        ("megabatch", "auto"),
        ("two-pass", None),
        ("OpenCLIP accumulation", None),
    ]
    for row in rows:
        assert set(row) >= FIELDS, FIELDS - set(row)
        assert row["seconds_min"] <= row["seconds"] <= row["seconds_max"] and row["hardware_share"] >= row["useful_share"] > 0
        assert row["machine"]["torch"] == torch.__version__ and row["machine"]["transformers"]
    assert rows[0]["kept"] == {"image": 0, "text": 0} and rows[1]["kept"] == {"image": 1, "text": 0}
    # Wrong by the number of chunks of the check: the known error of that scheme.
    assert [round(row["scale_factor"], 2) for row in rows] == [1, 1, 1, 1, 4]


def test_a_quick_run_is_drawn_and_written_as_markdown(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert encoders.main(["--redraw", str(out)]) == 0
    assert "OpenCLIP accumulation" in capsys.readouterr().out
    lines = with_tables(f"<!-- table: {out}#contestants -->\n<!-- end -->").splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == 2 + 5
    assert lines[3].startswith("| **megabatch** | 16 | 4 | 0 | ")
    assert "4.0 times too large in OpenCLIP accumulation" in lines[-2]


@pytest.mark.parametrize("wrong", [OnePercentOff, ScaleTooOften, NotANumber])
def test_a_wrong_gradient_is_refused_and_not_timed(wrong: type[Scheme], bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(schemes.SCHEMES, "two-pass", wrong)
    row = bench.row(case())
    assert row["error"].startswith("wrong gradient") and row["right"] is False and "seconds" not in row


def test_rows_do_not_depend_on_earlier_ones(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bench.row(case())
    monkeypatch.setitem(schemes.SCHEMES, "uncached", OutOfMemory)
    failed = bench.row(case("uncached"))
    assert failed["error"] == "out of memory" and "seconds" not in failed
    bench.checked.clear()
    again = bench.row(case())
    assert again["errors"] == first["errors"] and again["loss"] == first["loss"]


def test_flops_include_recomputation(bench: Bench) -> None:
    none, some, every = (bench.row(case("megabatch", keep)) for keep in (0, 1, 3))
    plain = bench.row(case("uncached"))
    images, texts = (6 * bench.flops[tower].forward for tower in ("image", "text"))
    assert none["useful_flops"] == every["useful_flops"] == plain["useful_flops"] == plain["hardware_flops"]
    for row, again in ((none, images + texts), (some, images * 2 / 3 + texts), (every, texts)):
        assert row["hardware_flops"] - row["useful_flops"] == pytest.approx(again)


def test_flops_of_a_tower_are_those_of_its_matrix_products(bench: Bench) -> None:
    text = bench.clip.config.text_config
    width, inner, length = text.hidden_size, text.intermediate_size, text.max_position_embeddings
    products = length * (4 * width**2 + 2 * width * inner) + 2 * length**2 * width
    forward = 2 * (text.num_hidden_layers * products + width * bench.clip.config.projection_dim)
    assert bench.flops["text"].forward == forward and bench.flops["text"].both == 3 * forward


def test_a_case_that_does_not_compile_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("cpu", small=True)
    monkeypatch.setitem(schemes.SCHEMES, "megabatch", DoesNotCompile)
    assert bench.row(case("megabatch", 0, compiled=True))["skipped"] == "torch.compile: RuntimeError: no compiler"


def test_a_process_that_dies_gives_a_row_and_the_others_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = [-9, 0]
    out = tmp_path / "rows.jsonl"
    report.write_rows(out, [])

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        # The second process measures the remaining case.
        code = codes.pop(0)
        if code == 0:
            report.write_rows(out, [*report.read_rows(out), {"contestant": "the second"}])
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(encoders.subprocess, "run", run)
    encoders._run_group([case("megabatch", 0), case()], True, 1.0, out)
    rows = report.read_rows(out)
    assert rows[0]["error"] == "ended by signal 9" and rows[0]["contestant"] == "megabatch"
    assert rows[1] == {"contestant": "the second"} and not codes


def test_a_missing_package_is_named_and_other_rows_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schemes.SentenceTransformers, "package", "no_such_package")
    other: Row = {"case": "large", "contestant": "megabatch", "pairs": 4, "chunk": 2, "keep": 0, "compiled": False, "error": "x"}
    report.write_rows(tmp_path / "rows.jsonl", [other, {**other, "case": "contestants"}])
    arguments = ["--quick", "--cases", "contestants", "--only", "sentence-transformers", "--output", str(tmp_path / "rows.jsonl")]
    assert encoders.main(arguments) == 1
    shown = capsys.readouterr().out
    assert "contestants, sentence-transformers: not run, no_such_package is not installed" in shown
    assert "not measured: large, megabatch, 4 pairs, chunk 2, keep 0: x" in shown
    assert report.read_rows(tmp_path / "rows.jsonl") == [other]


@pytest.mark.parametrize(("option", "value"), [("--cases", "none"), ("--only", "nobody"), ("--redraw", "nowhere.jsonl")])
def test_invalid_arguments_are_refused_in_one_line(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        encoders.main([option, value])
    assert value in capsys.readouterr().err


def test_the_overhead_of_recomputation_is_measured_on_equal_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "STEPS", 1)
    monkeypatch.setattr(overhead, "DEPTH", 2)
    threads = torch.get_num_threads()
    try:
        overhead.main(tmp_path / "rows.jsonl")
    finally:
        torch.set_num_threads(threads)
    assert [row["way"] for row in report.read_rows(tmp_path / "rows.jsonl")] == ["megabatch", "torch.utils.checkpoint", "two-pass"]
