"""Sweeps of real trainings in worker processes: the embedded default, a run that fails, and a sweep that is killed and resumed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import PATIENCE_S
from PIL import Image

from megabatch import config, measurements
from megabatch.measuring.sweep import sweep
from megabatch.measuring.sweep import sweep_runs as results
from megabatch.measuring.sweep.report import verdict_of
from megabatch.training import run_folder

SMALL = ["x.options.width=4", "x.options.hidden=32", "y.options.width=16", "y.options.buckets=512", "loss.dim=16", "data.workers=0"]
SMALL += ["evaluate.limit=200", "batch.size=32", "batch.chunk=64", "optimizer.lr=0.01", "schedule.samples=640"]
# A tower that takes its time as long as a file says so.
TOWER = """
import os, time
from small_towers import Bytes, BuiltTower, prepare

class Slow(Bytes):
    def forward(self, codes):
        time.sleep(0.25 if os.path.exists({flag!r}) else 0)
        return super().forward(codes)

def text(dim=8):
    return BuiltTower(Slow(dim), prepare, "text")
"""
SWEEP = """
import sys
from megabatch import config
from megabatch.measuring.sweep import sweep
sweep(config.read(sys.argv[1]), batches=[8], rates=(1,), seeds=2, out=sys.argv[2], trust_code=True)
"""


def events(folder: Path, event: str) -> list[dict]:
    log = folder / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if row["event"] == event]


@pytest.mark.slow
def test_the_embedded_default_is_swept_and_a_run_that_fails_is_a_row(tmp_path):
    said = []
    run = config.build(config.EMBEDDED, SMALL)
    # No network survives the second rate.
    result = sweep(run, batches=[128], rates=(1, 5e4), seeds=1, extend=0, jobs=2, out=tmp_path, say=said.append)
    ended, failed = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    assert [(row["batch"], row["lr"]) for row in (ended, failed)] == [(128, 0.02), (128, 1000)]
    assert (ended["steps"], ended["samples"]) == (5, 640)
    assert ended["error"] is None and ended["apart"] and 80 < ended["pairs"] < 120
    assert ended["seconds"] > 0 and ended["pairs_per_s"] > 0 and 0 <= ended["quality"] <= 1 and 0 <= ended["training"] <= 1
    assert ended["loss"] > 1 and ended["gap"] == pytest.approx(ended["training"] - ended["quality"])
    # It ends at a step, or with embeddings that are not finite.
    assert failed["quality"] is None and re.search("the weights were not updated|not finite", failed["error"])
    (row,) = result.found.rows
    assert (row["lr"], row["mean"], row["edge"]) == (ended["lr"], ended["quality"], "lowest")
    assert measurements.read(tmp_path / "measured.json").found.batch == result.found.batch == 128
    assert "recall@1" in (tmp_path / "report.html").read_text()
    with Image.open(tmp_path / "sweep.png") as drawn:
        assert drawn.width > 1500
    # Each is a run that the other verbs can read, without a report.
    folder = tmp_path / "runs" / "128-0.02-0"
    assert config.read(folder / "run.toml").batch.size == 128 and not (folder / "report.html").exists()
    assert (folder / "outcome.json").exists() and run_folder.foreign(folder) == []
    assert json.loads((folder / "result.json").read_text())["evaluation"]["pairs"] == 200
    assert len(said) == 2 and re.match(r"\[2 of 2, \d+ s\] batch \d+, lr \S+, seed 0: ", said[-1])


def wait_for(process: subprocess.Popen, event: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not event():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_sweep_resumes_without_repeating_finished_runs(tmp_path, monkeypatch):
    slow, pairs, out = tmp_path / "slow", tmp_path / "pairs.jsonl", tmp_path / "out"
    (tmp_path / "slow_tower.py").write_text(TOWER.format(flag=str(slow)))
    pairs.write_text(
        "".join(json.dumps({"query": f"{'ab'[n % 2]} {n}", "positive": "-", "label": "ab"[n % 2]}) + "\n" for n in range(400))
    )
    table = {
        "data": {"source": str(pairs), "label": "label", "held_out": 0.3},
        "x": {"name": "slow_tower:text"},
        "y": {"name": "slow_tower:text"},
        "loss": {"objective": "classify", "dim": 8},
        "batch": {"size": 8, "chunk": 8},
        "optimizer": {"lr": 0.01},
        "schedule": {"steps": 60},
        "checkpoint": {"every": 5},
    }
    run = config.build(table)
    (tmp_path / "run.toml").write_text(config.as_toml(run))
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-c", SWEEP, str(tmp_path / "run.toml"), str(out)], env={**os.environ, "PYTHONPATH": path}
    )
    first, second = out / "runs" / "8-0.01-0", out / "runs" / "8-0.01-1"
    try:
        wait_for(process, (first / "outcome.json").exists)
        # The second run has not begun yet: its process is starting.
        slow.touch()
        wait_for(process, lambda: events(second, "checkpoint"))
    finally:
        process.kill()
        process.wait()
    # The worker exits with its parent: nothing is written any more.
    time.sleep(0.5)
    before = events(second, "step")
    time.sleep(0.5)
    assert events(second, "step") == before and 5 <= len(before) < 60
    assert len((out / "rows.jsonl").read_text().splitlines()) == 1 and not (second / "outcome.json").exists()
    kept = {name: (first / name).stat().st_mtime_ns for name in ("outcome.json", "log.jsonl", "result.json")}

    slow.unlink()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(results, "write_report", lambda report, out: None)
    said = []
    result = sweep(run, batches=[8], rates=(1,), seeds=2, out=out, say=said.append, trust_code=True)
    assert kept == {name: (first / name).stat().st_mtime_ns for name in kept}
    steps = events(second, "step")
    assert steps[: len(before)] == before
    again = [row["step"] for row in steps[len(before) :]]
    # From a checkpoint, not from the beginning.
    assert again == list(range(again[0], 61)) and again[0] % 5 == 1 and 6 <= again[0] <= len(before) + 1
    assert len(said) == 2 and len(result.found.rows[0]["qualities"]) == 2
    # The class is the first letter: what was learnt before and after the kill is enough to tell it.
    assert result.found.rows[0]["mean"] > 0.9
    assert verdict_of(result).headline.startswith("Take batch 8 at a learning rate of 0.01: its held-out accuracy, ")
