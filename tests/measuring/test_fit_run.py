"""`megabatch fit`: the largest chunk of a run, from the prediction to the figure and the file that a plan reads."""

from __future__ import annotations

import functools
import io
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from heap import mapped_blocks
from PIL import Image
from rich.console import Console
from small_towers import Bytes, prepare
from test_fit_finder import uncollecting
from torch import Tensor, nn

from megabatch import config, measurements
from megabatch.measuring.fit import fit_report
from megabatch.measuring.fit import fit_run as fitting
from megabatch.measuring.fit.memory import Limit
from megabatch.measuring.fit.report import sentences, ticks
from megabatch.reporting.terminal import print_report
from megabatch.towers.tower import BuiltTower
from megabatch.training.distributed import ranks
from megabatch.training.objective import Classification, Contrastive

# These runs name towers of the tests, which are trusted.
fit = functools.partial(fitting.fit, trust_code=True)

MIB = 2**20
ROWS = 48


class Wide(Bytes):
    """A tower that saves two MiB per row for backward and computes little."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.scale = nn.Parameter(torch.ones(MIB // 8))

    def forward(self, codes: Tensor) -> Tensor:
        found = super().forward(codes)
        wide = found[:, :1] * self.scale
        for _ in range(4):
            wide = wide * self.scale
        return found + wide.mean(1, keepdim=True)


def wide(dim: int = 8) -> BuiltTower:
    return BuiltTower(Wide(dim), prepare, "text")


class Secretive(Bytes):
    """A tower whose computation depends on values, so that it cannot be traced."""

    def forward(self, codes: Tensor) -> Tensor:
        return super().forward(codes) * (1.0 if int(codes.sum()) else 0.0)


def secretive(dim: int = 8) -> BuiltTower:
    return BuiltTower(Secretive(dim), prepare, "text")


def predicting(row: int, constant: int = 0) -> Any:
    """Return a replacement for `predictions` with so many bytes per row."""

    def predictions(*_: Any) -> Any:
        return lambda batch, chunk, keep: fitting.StepPrediction(1.0, constant + row * chunk, constant + row * chunk)

    return predictions


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Skip the report, whose figures take longer than a small fit."""
    monkeypatch.setattr(fitting, "write_report", lambda report, out: None)


@pytest.fixture
def quick(undrawn, monkeypatch) -> Iterator[None]:
    """Skip tracing and garbage collection, which take longer than the steps themselves."""
    monkeypatch.setattr(fitting, "predictions", predicting(1))
    with uncollecting():
        yield


@pytest.fixture
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"query": f"{n} and {n}", "document": f"twice {n}", "kind": str(n % 3)} for n in range(ROWS)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run_of(pairs: Path, *overrides: str, tower: str = "small_towers:text") -> config.Run:
    table = {
        "data": {"source": str(pairs), "held_out": 0.0, "x": "query", "y": "document", "label": "kind"},
        "x": {"name": tower},
        "y": {"name": "small_towers:text"},
        "loss": {"dim": 8},
        "batch": {"size": ROWS, "chunk": 8},
        "schedule": {"steps": 3},
    }
    return config.build(table, overrides)


def printed(result: measurements.Measured) -> str:
    text = io.StringIO()
    print_report(fit_report(result), Console(file=text, width=200))
    return text.getvalue()


@pytest.mark.slow
def test_the_embedded_default_end_to_end(tmp_path):
    run = config.build(config.EMBEDDED, ["batch.size=256", "data.workers=0", "schedule.steps=2"])
    result = fit(run, out=tmp_path)
    assert isinstance(result.found, measurements.Fit) and measurements.read(tmp_path / "measured.json") == result
    assert result.found.chunk == 256, "all rows fit at once on any machine that runs this"
    assert result.run == config.as_table(run) and result.device and result.date
    (trial,) = result.found.trials
    assert trial["ran"] and trial["size"] == 256 and trial["peak_bytes"] < result.found.limit_bytes
    assert trial["predicted_bytes"] == pytest.approx(trial["peak_bytes"], rel=0.25)
    with Image.open(tmp_path / "fit.png") as image:
        assert image.width > 1000 and len(image.convert("RGB").getcolors(2**20)) > 5
    said = printed(result)
    assert "chunk 256 ran" in said and "no larger one" in said and "The prediction for it was" in said
    assert 'batch.chunk=256 with batch.keep="auto"' in said


@pytest.mark.slow
@mapped_blocks()
@uncollecting()
@pytest.mark.parametrize("objective", ["clip", "classify"])
def test_a_budget_sets_the_chunk(undrawn, pairs, tmp_path, objective):
    run = run_of(pairs, f"loss.objective={objective}", tower="test_fit_run:wide")
    # The budget is the process's memory at four rows, and that of twenty further rows of two MiB. The first fit of a process
    # imports what traces the model, which takes more memory than the rows.
    for _ in range(2):
        (four,) = fit(run, cap=4, margin=0.0, out=tmp_path).found.trials
    result = fit(run, budget=four["peak_bytes"] + 40 * MIB, margin=0.0, out=tmp_path)
    found = result.found
    # Temporaries take some of the budget, and the process's other memory varies by some MiB.
    assert 10 <= found.chunk <= 34 and len(found.trials) <= 12
    assert found.limit_bytes == four["peak_bytes"] + 40 * MIB
    ran = {trial["size"] for trial in found.trials if trial["ran"]}
    failed = {trial["size"] for trial in found.trials if not trial["ran"]}
    assert found.chunk in ran and failed and min(failed) <= found.chunk * 1.1 + 1
    assert all(trial["why"] == "above the limit" for trial in found.trials if not trial["ran"])
    # The smallest, the largest and the chosen size have a prediction.
    predicted = {trial["size"]: trial for trial in found.trials if trial["predicted_bytes"]}
    assert set(predicted) == {min(ran | failed), found.chunk, max(ran | failed)}
    assert all(trial["predicted_bytes"] == pytest.approx(trial["peak_bytes"], rel=0.2) for trial in predicted.values())
    assert "did not" in printed(result)


@pytest.mark.slow
def test_a_chunk_that_only_runs_in_halves_has_not_run(quick, pairs, tmp_path):
    run = run_of(pairs, 'x.options={"limit": 20}', "batch.keep=2", tower="small_towers:greedy")
    result = fit(run, start=40, margin=0.0, out=tmp_path)
    assert result.found.chunk == 20
    assert {trial["size"]: trial["ran"] for trial in result.found.trials} == {
        trial["size"]: trial["size"] <= 20 for trial in result.found.trials
    }
    assert not list(tmp_path.glob("**/checkpoints")), "nothing of a run is written"


@pytest.mark.parametrize("objective", [Contrastive, Classification])
def test_a_trial_that_runs_out_of_memory_ends_there(quick, pairs, tmp_path, monkeypatch, objective):
    taken = []
    step = objective.step

    def limited(self, batch):
        taken.append(self.chunked[0].chunk)
        outcome = step(self, batch)
        if taken[-1] > 20:
            raise torch.OutOfMemoryError("out of memory: 20 rows are all")
        return outcome

    monkeypatch.setattr(objective, "step", limited)
    run = run_of(pairs, f"loss.objective={'clip' if objective is Contrastive else 'classify'}")
    found = fit(run, start=40, margin=0.0, out=tmp_path).found
    assert found.chunk == 20
    # A failing trial takes one step, at its chunk; trials that run take their steps at theirs.
    failed = [trial["size"] for trial in found.trials if not trial["ran"]]
    assert [chunk for chunk in taken if chunk > 20] == failed and len(failed) >= 2
    assert set(taken) == {trial["size"] for trial in found.trials}


def test_a_run_on_a_cpu_pins_nothing(pairs, tmp_path):
    run = run_of(pairs, "compute.device=cpu")
    with ranks(run.compute) as here:
        bench = fitting.FitBench(run, here, tmp_path)
    parts = bench.training.parts
    assert not parts.shuffled().pinned and not parts.in_order(parts.training).pinned and not bench.batch.x.is_pinned()
    assert replace(parts, ranks=replace(here, device=torch.device("cuda"))).shuffled().pinned


@pytest.mark.parametrize(("constant", "row", "start"), [(2**40, MIB, None), (0, 2**31, None), (0, 64 * MIB, 16), (0, MIB, 40)])
def test_where_nothing_is_predicted_to_fit_there_is_no_start(pairs, tmp_path, monkeypatch, constant, row, start):
    monkeypatch.setattr(fitting, "predictions", predicting(row, constant))
    monkeypatch.setattr(fitting, "resident_bytes", lambda: 0)
    run = run_of(pairs, "compute.device=cpu")
    with ranks(run.compute) as here:
        predicted = fitting.PredictedPeaks(run, fitting.FitBench(run, here, tmp_path))
        # The limit is a GiB, which 16 rows of 64 MiB fill; the start is exact to an eighth, and the weights are negligible.
        found = predicted.start(40, Limit(2**30, "measured"))
        assert found is None if start is None else start * 7 / 8 <= found <= start
        assert predicted.start(40, Limit(None, "raised")) is None


def test_a_search_without_a_start_begins_at_the_runs_chunk(quick, pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "predictions", predicting(MIB, 2**50))
    found = fit(run_of(pairs), margin=0.0, out=tmp_path).found
    assert found.trials[0]["size"] == 8 and found.chunk == ROWS


def test_the_cap_and_the_batch_bound_what_is_tried(quick, pairs, tmp_path):
    sizes = []
    for cap in (None, 7, 1000):
        found = fit(run_of(pairs, "batch.size=40"), cap=cap, out=tmp_path).found
        sizes.append((found.chunk, max(trial["size"] for trial in found.trials)))
    assert sizes == [(40, 40), (7, 7), (40, 40)]


@uncollecting()
def test_where_nothing_can_be_predicted_the_search_begins_at_the_runs_chunk(undrawn, pairs, tmp_path):
    with pytest.warns(UserWarning, match="starting the search at batch.chunk"):
        result = fit(run_of(pairs, tower="test_fit_run:secretive"), out=tmp_path)
    assert result.found.trials[0]["size"] == 8 and result.found.chunk == ROWS
    assert all(trial["predicted_bytes"] is None for trial in result.found.trials)
    assert "predicted for it" not in printed(result)


def test_the_search_begins_where_it_is_predicted_to_end(quick, pairs, tmp_path, monkeypatch):
    # The prediction is 1 GiB plus 10 MiB per row, and the budget that of 30 rows: the first trial is near 30.
    monkeypatch.setattr(fitting, "predictions", predicting(10 * MIB, 2**30))
    monkeypatch.setattr(fitting, "resident_bytes", lambda: 0)
    found = fit(run_of(pairs), budget=2**30 + 300 * MIB, margin=0.0, out=tmp_path).found
    assert 26 <= found.trials[0]["size"] <= 30
    # The prediction is wrong: the search continues up to the cap.
    assert found.chunk == ROWS


def test_nothing_fits(quick, pairs, tmp_path):
    with pytest.raises(ValueError, match="not even one row fits: above the limit"):
        fit(run_of(pairs), budget=8 * MIB, start=2, out=tmp_path)


def test_a_step_that_goes_wrong_is_an_error_of_the_user(quick, pairs, tmp_path):
    pairs.write_text(pairs.read_text().replace("0 and 0", "X and X"))
    with pytest.raises(ValueError, match="step 1: the loss is nan"):
        fit(run_of(pairs, tower="small_towers:poisoned"), out=tmp_path)


@uncollecting()
def on_ranks(rank: int, size: int, pairs: Path, out: Path) -> Any:
    limit = 10 if rank else 1000
    run = run_of(pairs, f'x.options={{"limit": {limit}}}', tower="small_towers:greedy")
    predictions, report = mock.patch.object(fitting, "predictions", predicting(1)), mock.patch.object(fitting, "write_report")
    with warnings.catch_warnings(), predictions, report:
        warnings.simplefilter("error")
        found = fit(run, margin=0.0, out=out).found
    return found.chunk, max(trial["size"] for trial in found.trials)


@pytest.mark.slow
def test_ranks_find_the_smallest_and_one_of_them_writes(world, pairs, tmp_path):
    assert world.run(2, on_ranks, pairs, tmp_path) == [(10, ROWS // 2)] * 2
    assert measurements.read(tmp_path / "measured.json").found.chunk == 10


def test_sentences_name_failures_and_the_limit():
    trials = tuple(
        {"size": size, "ran": size <= 30, "peak_bytes": size * MIB, "seconds": 1.0, "why": None if size <= 30 else "out of memory"}
        for size in (16, 32, 24, 28, 30, 31, 30)
    )
    result = measurements.Measured(measurements.Fit(30, 31 * MIB, trials), {"loss": {"objective": "classify"}}, "a device", "2")
    assert sentences(result) == ["chunk 30 ran on a device, 31 did not; 7 trials. It took 30 MiB of 31 MiB that may be used."]
    unknown = replace(
        result, found=replace(result.found, limit_bytes=None, trials=tuple({**t, "peak_bytes": None} for t in trials))
    )
    assert sentences(unknown) == ["chunk 30 ran on a device, 31 did not; 7 trials."]
    with pytest.raises(ValueError, match="a measurement of 'sweep'"):
        fit_report(replace(result, found=measurements.Sweep(64, 0.1, "samples")))


def test_sizes_that_would_overlap_are_not_written():
    assert ticks([100], 100) == [100]
    assert ticks([64, 128, 256], 128) == [64, 128, 256]
    assert ticks([256, 288, 290, 292, 300, 512], 290) == [256, 290, 512]
