"""`megabatch profile`: the arithmetic of a curve by hand, a simulated clock, and small runs from end to end."""

from __future__ import annotations

import functools
import io
import json
import re

import pytest
import torch

from megabatch import config, measurements
from megabatch.measuring.predictions import StepPrediction
from megabatch.measuring.profile import curve, profile_report, profile_run
from megabatch.measuring.profile.curve import Size, judge, point
from megabatch.measuring.profile.profile_run import sizes_of, time_sizes
from megabatch.measuring.profile.quantities import Timed, median_and_spread
from megabatch.measuring.profile.report import sentences
from megabatch.measuring.profile.steps import ProfileBench
from megabatch.measuring.timing import time_steps
from megabatch.reporting.html import as_html
from megabatch.reporting.limits import limit_sentence
from megabatch.reporting.terminal import print_report
from megabatch.training.distributed import Ranks, ranks

# These runs name towers of the tests, which are trusted.
profile = functools.partial(profile_run.profile, trust_code=True)

WORDS = ["red", "green", "blue", "round", "square", "large", "small", "old", "new", "odd"]
RISING = [(64, 100.0), (128, 180.0), (256, 195.0), (512, 200.0), (1024, 190.0)]


def test_best_is_the_highest_rate_and_of_equal_ones_the_smallest():
    assert curve.best(RISING) == 512
    assert curve.best([(64, 5.0), (128, 5.0)]) == 64


def test_enough_is_the_smallest_within_five_per_cent_of_the_best():
    # 0.95 · 200 = 190: 195 at 256 is enough, 180 at 128 is not.
    assert curve.enough(RISING) == 256
    assert curve.enough([(64, 190.0), (128, 200.0)]) == 64
    assert curve.enough([(64, 189.9), (128, 200.0)]) == 128


def test_the_knee_is_where_the_curve_is_highest_above_its_chord():
    # From (64, 100) to the best, (512, 200), over three doublings: 128 is at 1/3 and 0.8 (0.47 above), 256 at 2/3 and 0.95 (0.28).
    assert curve.knee(RISING) == 128
    # A straight line has none, nor has a curve that only falls, nor one of two points.
    assert curve.knee([(64, 100.0), (128, 150.0), (256, 200.0)]) is None
    assert curve.knee([(64, 200.0), (128, 150.0), (256, 100.0)]) is None
    assert curve.knee([(64, 100.0), (128, 200.0)]) is None


def test_the_soonest_batch_by_hand():
    # (1 + C/B)(a + bB) is least at √(C·a/b): C = 4,096, a = 0.25 s, b = 1/64 s gives √(4,096 · 16) = 256.
    seconds = [(size, 0.25 + size / 64) for size in (32, 64, 128, 256, 512, 1024)]
    assert curve.soonest(seconds, 4096) == 256
    assert curve.soonest(seconds, 1) == 32


def test_median_and_spread_by_hand():
    # Sorted 1, 2, 4, 8, 9: the middle half reaches from 2 to 8.
    assert median_and_spread([8.0, 1.0, 9.0, 2.0, 4.0]) == (4.0, 3.0)
    assert median_and_spread([3.0]) == (3.0, 0.0)


def test_time_is_that_of_steps_with_the_device_waited_for():
    now = [0.0]

    def advance(seconds):
        now[0] += seconds

    # The device is busy with earlier work for 100 s, which belong to no step.
    waits = iter([100.0, 0.5, 0.5, 0.75])
    seconds = time_steps(lambda: advance(1.0), 3, wait=lambda: advance(next(waits)), clock=lambda: now[0])
    assert seconds == (1.5, 1.5, 1.75)


def steps_of(size: Size) -> Timed | None:
    """Return steps of a device that needs 0.25 s plus 1/64 s per row, and has no memory for 3,000 rows."""
    if size.batch > 3000:
        return None
    seconds = 0.25 + size.batch / 64
    return Timed((seconds, 0.9 * seconds, 1.1 * seconds), 1000 * size.batch, None, 1)


def test_a_curve_ends_where_memory_does_with_a_row_that_says_so():
    timed = time_sizes([Size(2**power, 256) for power in range(4, 14)], steps_of)
    assert [size.batch for size, _ in timed] == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    points = [point(size, steps, 1, None) for size, steps in timed]
    assert points[-1] == {"batch": 4096, "chunk": 256, "ranks": 1, "out_of_memory": True}
    found = judge(points, "batch", 4096.0, None)
    # Rates: 1 / (0.25/B + 1/64): 63.5 at 2,048; within 5 % from 60.3 on, which is B ≥ 264: 512.
    assert (found.best, found.enough, found.soonest) == (2048, 512, 256)
    assert points[0]["pairs_per_s"] == 16 / 0.5
    assert points[0]["spread"] == pytest.approx(0.025)
    with pytest.raises(ValueError, match="ran out of memory; start with smaller sizes"):
        time_sizes([Size(4096, 256)], steps_of)


def test_sizes_are_around_the_runs_batch_and_no_larger_than_the_data():
    batch = config.Batch(1024, 256)
    assert [size.batch for size in sizes_of(batch, 10**6, 1, None, None)] == [128, 256, 512, 1024, 2048, 4096]
    assert [size.batch for size in sizes_of(batch, 2000, 1, None, None)] == [128, 256, 512, 1024]
    # All ranks have equally many rows, and a chunk is no larger.
    assert sizes_of(config.Batch(24, 8), 10**6, 6, None, None)[0] == Size(6, 1)
    assert sizes_of(batch, 10**6, 1, None, [512, 64, 4096]) == [Size(1024, 64), Size(1024, 512), Size(1024, 1024)]
    assert [size.chunk for size in sizes_of(batch, 10**6, 1, None, [])] == [32, 64, 128, 256, 512, 1024]


@pytest.mark.parametrize(
    ("reading", "workers", "words"),
    [
        (50.0, 2, "bottleneck: the loader reads 50 samples/s"),
        (50.0, 0, "workers that read ahead"),
        (300.0, 0, "75 samples/s, reading included"),
    ],
)
def test_slow_reading_is_noted(reading, workers, words):
    # 100 samples/s of steps and 300 of reading, one after the other: 1 / (1/100 + 1/300) = 75.
    points = [{"batch": 100, "chunk": 10, "seconds": 1.0, "pairs_per_s": 100.0}]
    assert words in judge(points, "batch", None, reading, workers=workers).notes[0]


@pytest.mark.parametrize(("idle", "limit"), [(0.4, "host"), (0.02, "device")])
def test_the_host_or_the_device_is_named_as_the_limit_of_the_fastest_size(idle, limit):
    points = [{"batch": batch, "chunk": 10, "seconds": 1.0, "pairs_per_s": float(batch), "device_idle": share}
              for batch, share in ((100, 0.2), (200, idle))]  # fmt: skip
    (note,) = judge(points, "batch", None, 300.0, workers=1).notes
    assert note.startswith("At batch 200") and limit_sentence(0.0, idle) in note and limit in note
    # Faster devices do not help where reading is slower than steps.
    assert limit_sentence(0.0, idle) not in judge(points, "batch", None, 150.0, workers=1).notes[0]


def test_reading_that_keeps_up_has_no_note():
    points = [{"batch": 100, "chunk": 10, "seconds": 1.0, "pairs_per_s": 100.0}]
    assert judge(points, "batch", None, 300.0, workers=1).notes == ()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"query": f"{a} {b} {i}", "positive": f"{b} {a} {i}", "label": a} for i in range(3) for a in WORDS for b in WORDS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr("megabatch.measuring.profile.steps.READING_S", 0.1)


def run_of(pairs, *overrides):
    table = {
        "data": {"source": str(pairs), "window": 300},
        "x": {"name": "small_towers:text"},
        "y": {"name": "small_towers:text"},
        "loss": {"dim": 8},
        "batch": {"size": 64, "chunk": 16},
        "schedule": {"epochs": 1000},
        "compute": {"device": "cpu", "threads": 1},
    }
    return config.build(table, overrides)


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Skip the report, whose figures take longer than a small profile."""
    monkeypatch.setattr(profile_run, "write_report", lambda report, out: None)


@pytest.mark.slow
def test_the_embedded_default_from_end_to_end(tmp_path):
    run = config.build(config.EMBEDDED, ["compute.device=cpu", "compute.threads=1", "batch.size=64", "batch.chunk=32"])
    found = profile(run, batches=[32, 64, 128], steps=2, critical=100.0, out=tmp_path)
    assert measurements.read(tmp_path / "measured.json") == found
    points = found.found.points
    assert [row["batch"] for row in points] == [32, 64, 128]
    for row in points:
        assert row["pairs_per_s"] == pytest.approx(row["batch"] / row["seconds"])
        assert row["seconds"] > 0 and row["spread"] >= 0 and row["predicted_seconds"] > 0
        # The memory of tensors, as counted by the profiler.
        assert row["predicted_bytes"] == pytest.approx(row["peak_bytes"], rel=0.25)
    assert {found.found.best, found.found.enough, found.found.soonest} <= {32, 64, 128}
    assert found.found.reading_per_s > 0 and found.device and found.date
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "with a critical batch of 100" in text and "<script" not in text
    assert not re.search(r'(src|href)="(?!data:image/png)', text)


@pytest.mark.slow
def test_chunks_vary_at_the_runs_batch_and_memory_grows_with_them(undrawn, pairs, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise ValueError("what comes out depends on numbers")

    # A model that cannot be predicted is still measured.
    monkeypatch.setattr("megabatch.measuring.profile.profile_run.predictions", refuse)
    run = run_of(pairs, "batch.keep=0", "batch.size=512", "compute.workspace=262144")
    found = profile(run, chunks=[32, 512], steps=1, out=tmp_path).found
    assert found.against == "chunk"
    assert [(row["batch"], row["chunk"], row["keep"]) for row in found.points] == [(512, 32, 0), (512, 512, 0)]
    assert found.points[0]["peak_bytes"] < found.points[1]["peak_bytes"]
    assert "predicted_seconds" not in found.points[0]
    assert "No predictions: what comes out depends on numbers" in found.notes


@pytest.mark.slow
def test_a_classifier_is_profiled_too(undrawn, pairs, tmp_path):
    run = run_of(pairs, "loss.objective=classify", "data.label=label")
    found = profile(run, batches=[16, 64], steps=1, out=tmp_path).found
    assert [row["keep"] for row in found.points] == [0, 0]
    assert all(row["predicted_bytes"] > 0 for row in found.points)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["loss.objective=classify", "data.label=label"]])
def test_a_chunk_that_does_not_fit_is_none(options, pairs, tmp_path):
    # The tower has memory for 20 rows: at 32 the step would continue in halves, which is another size.
    run = run_of(pairs, "x.name=small_towers:greedy", 'x.options={"limit": 20}', *options)
    bench = ProfileBench(run, Ranks(torch.device("cpu")), tmp_path)
    assert bench.measure(Size(64, 16), 1) is not None
    assert bench.measure(Size(64, 32), 1) is None
    # The failure does not affect the next size.
    assert bench.measure(Size(64, 16), 1) is not None


def test_steps_leave_the_weights_as_they_are(pairs, tmp_path):
    bench = ProfileBench(run_of(pairs), Ranks(torch.device("cpu")), tmp_path)
    before = {name: tensor.clone() for name, tensor in bench.parts.model.state_dict().items()}
    assert bench.measure(Size(64, 16), 2) is not None
    assert all(torch.equal(before[name], tensor) for name, tensor in bench.parts.model.state_dict().items())


def measure_as_rank(rank, size, pairs, limit):
    run = run_of(pairs, "x.name=small_towers:greedy", f'x.options={{"limit": {limit if rank else 1000}}}')
    with ranks(run.compute) as here:
        bench = ProfileBench(run, here, "nowhere")
        return [bench.measure(size, 2) for size in (Size(32, 8), Size(64, 16))]


@pytest.mark.slow
def test_ranks_share_a_batch_and_agree_on_its_time_and_its_end(world, pairs):
    one, other = world.run(2, measure_as_rank, str(pairs), 1000)
    assert one[0].seconds == other[0].seconds and one[1].seconds == other[1].seconds
    # If only the second rank runs out of memory, the size fails on both.
    for found in world.run(2, measure_as_rank, str(pairs), 10):
        assert found[0] is not None and found[1] is None


def curve_of_a_gpu():
    predicted = StepPrediction(0.9, 2**30, 2 * 2**30)
    points = [
        point(Size(64, 16), Timed((1.0,), 2**30, 3 * 2**30, 2), 1, predicted),
        point(Size(128, 16), None, 1, None),
    ]
    table = config.as_table(run_of("pairs.jsonl", "x.name=<script>"))
    return measurements.Measured(judge(points, "batch", None, None), table, "<script>GPU", "2.13", "2026-11-15")


@pytest.mark.slow
def test_terminal_and_page_show_what_was_measured_and_escape_it():
    from rich.console import Console

    out, report = io.StringIO(), profile_report(curve_of_a_gpu())
    print_report(report, Console(file=out, width=120))
    assert "batch 128 ran out of memory: the curve ends there" in sentences(curve_of_a_gpu())
    assert "3 GiB" in out.getvalue() and "no memory" in out.getvalue() and "−10.0 %" in out.getvalue()
    text = as_html(report)
    assert "<script" not in text and "&lt;script&gt;GPU" in text
    assert text.count("data:image/png;base64,") == 2


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"batches": [64], "chunks": [8]}, "omit the other"),
        ({"batches": [64, 0]}, "batches has 0"),
        ({"chunks": [-8]}, "chunks has -8"),
        ({"steps": 0}, "steps is 0"),
        ({"critical": 0}, "critical is 0"),
    ],
)
def test_invalid_arguments_are_named(asked, complaint, pairs, tmp_path):
    with pytest.raises(ValueError, match=complaint):
        profile(run_of(pairs), out=tmp_path, **asked)
