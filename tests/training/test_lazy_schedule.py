"""The steps of a run are computed on access, and equal those of a complete list."""

from __future__ import annotations

import itertools
import json
import math
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megabatch import config
from megabatch.training import schedules
from megabatch.training.build import assemble
from megabatch.training.distributed import ranks
from megabatch.training.loop import Training
from megabatch.training.run_logger import RunLogger
from megabatch.training.schedules import Step, size_after, size_at, step_schedule
from megabatch.training.signals import StopSign


def listed(run, length, doubled=()):
    """Return every step in order: the definition that the lazy schedule must equal exactly."""
    pairs = listed_sizes(run.batch, run.schedule, length, doubled)
    first = list(itertools.accumulate(pairs, initial=0))
    steps = math.ceil(first[-1] / size_after(run.batch, 0)) if run.batch.schedule == "noise" else len(pairs)
    rates = listed_rates(run.schedule, first, steps)
    follow = {"linear": lambda share: share, "sqrt": math.sqrt, "none": lambda share: 1.0}[run.batch.lr_rule]
    grown = [1.0] * len(pairs) if run.batch.schedule == "constant" else [follow(size / run.batch.size) for size in pairs]
    return [Step(*step) for step in zip(first, pairs, map(math.prod, zip(rates, grown, strict=True)), strict=False)]


def listed_sizes(batch, schedule, length, doubled):
    if schedule.steps is not None:
        return [size_at(batch, step / schedule.steps) for step in range(schedule.steps)]
    budget = schedule.samples if schedule.epochs is None else round(schedule.epochs * length)
    sizes: list[int] = []
    seen = 0
    while seen < budget:
        if batch.schedule == "noise":
            size = size_after(batch, sum(step <= len(sizes) for step in doubled))
        else:
            size = size_at(batch, seen / budget)
        sizes.append(min(size, budget - seen))
        seen += sizes[-1]
    return sizes


def listed_rates(schedule, first, planned):
    steps = len(first) - 1
    warmup = min(steps, round(schedule.warmup * planned if schedule.warmup < 1 else schedule.warmup))
    begin, end = first[warmup], first[-1]
    factors = []
    for step in range(steps):
        progress = max(0.0, (first[step] - begin) / (end - begin)) if end > begin else 0.0
        rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
        fall = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress, "constant": 1.0}[schedule.shape]
        factors.append(rise * (schedule.floor + (1 - schedule.floor) * fall))
    return factors


@st.composite
def runs(draw):
    """Draw a run, the samples of its source, and the steps after which a batch that follows the noise has doubled."""
    size = draw(st.integers(2, 5000))
    kind = draw(st.sampled_from(["constant", "linear", "exponential", "steps", "noise"]))
    batch = {"size": size, "schedule": kind}
    length = draw(st.integers(1, 3000))
    lengths = [{"samples": draw(st.integers(1, 20_000))}, {"epochs": draw(st.floats(1 / length, 8.0))}]
    if kind != "constant":
        batch["start"] = min(size, draw(st.integers(1, 300)) + (kind == "noise"))
        batch["lr_rule"] = draw(st.sampled_from(["linear", "sqrt", "none"]))
    if kind in ("linear", "exponential", "steps"):
        batch["ramp"] = draw(st.floats(1e-6, 1))
    if kind == "noise" and batch["start"] < 2:
        batch |= {"size": 2, "start": 2}
    if kind != "noise":
        lengths.append({"steps": draw(st.integers(1, 2000))})
    schedule = draw(st.sampled_from(lengths)) | {
        "warmup": draw(st.floats(0, 1, exclude_max=True) | st.floats(1, 400)),
        "shape": draw(st.sampled_from(["cosine", "linear", "constant"])),
        "floor": draw(st.floats(0, 1)),
    }
    loss = {"objective": "classify" if kind == "noise" else "clip"}
    doubled = sorted(draw(st.sets(st.integers(1, 200), max_size=5))) if kind == "noise" else []
    return config.build({"batch": batch, "schedule": schedule, "loss": loss}), length, doubled


@settings(deadline=None, max_examples=60)
@given(runs())
@example((config.build({"batch": {"size": 7, "start": 7, "schedule": "linear"}, "schedule": {"samples": 7}}), 1, []))
def test_a_lazy_schedule_equals_the_list_of_all_steps(case):
    run, length, doubled = case
    lazy, whole = step_schedule(run, length, doubled), listed(run, length, doubled)
    assert list(lazy) == whole
    assert len(lazy) == len(whole) and lazy.samples == sum(step.pairs for step in whole)
    assert [lazy[number] for number in range(-len(whole), len(whole))] == whole + whole
    assert lazy.largest() == max(whole, key=lambda step: step.pairs)


@settings(deadline=None, max_examples=40)
@given(runs(), st.integers(-50, 50) | st.none(), st.integers(-50, 50) | st.none(), st.sampled_from([None, 1, 2, -1, -3]))
def test_slices_are_those_of_the_list(case, start, stop, stride):
    run, length, doubled = case
    lazy, part = step_schedule(run, length, doubled), slice(start, stop, stride)
    assert list(lazy[part]) == list(lazy)[part]
    assert len(lazy[part]) == len(list(lazy)[part])
    assert list(lazy[part][:3]) == list(lazy)[part][:3]


def test_a_step_beyond_the_last_is_an_error_as_in_a_list():
    steps = step_schedule(config.build({"schedule": {"steps": 3}}), 10)
    with pytest.raises(IndexError):
        steps[3]


LONG = {
    "steps": ({}, {"steps": 10**11}),
    "samples": ({}, {"samples": 2**63 - 1}),
    "epochs": ({}, {"epochs": 1e15}),
    "linear": ({"size": 4096, "start": 64, "schedule": "linear"}, {"steps": 10**11}),
    "exponential": ({"size": 32768, "start": 1, "schedule": "exponential"}, {"samples": 10**17}),
    "doublings": ({"size": 2**31 - 1, "start": 1, "schedule": "steps"}, {"samples": 2**63 - 1}),
}


@pytest.mark.parametrize(("batch", "schedule"), LONG.values(), ids=LONG)
def test_a_very_long_run_begins_at_once_and_covers_the_stream(batch, schedule):
    began = time.process_time()
    steps = step_schedule(config.build({"batch": batch, "schedule": schedule}), 1000)
    rising, last = steps[0], steps[-1]
    assert time.process_time() - began < 2
    assert rising.first == 0 and 0 < rising.rate < 1e-3
    assert last.first + last.pairs == steps.samples and 0 <= last.rate < 1e-9
    for number in (1, 999, len(steps) // 3, len(steps) - 2):
        before, after = steps[number], steps[number + 1]
        assert before.first + before.pairs == after.first


def test_a_ramp_through_too_many_sizes_is_refused_and_one_within_the_limit_is_not(monkeypatch):
    run = config.build({"batch": {"size": 1000, "start": 1, "schedule": "linear"}, "schedule": {"steps": 10**9}})
    monkeypatch.setattr(schedules, "MOST_PLATEAUS", 1000)
    step_schedule(run, 10)
    monkeypatch.setattr(schedules, "MOST_PLATEAUS", 999)
    with pytest.raises(ValueError, match=r"batch.start is 1 and batch.size 1000: .* 999 different sizes; .*steps"):
        step_schedule(run, 10)


@pytest.mark.parametrize("epochs", [1e-9, 0.0004])
def test_epochs_of_less_than_one_sample_are_refused(epochs):
    with pytest.raises(ValueError, match=rf"schedule.epochs is {epochs!r}: with 1,000 samples, that is less than one"):
        step_schedule(config.build({"schedule": {"epochs": epochs}}), 1000)


@pytest.mark.parametrize("epochs", [1e19, 1e38])
def test_epochs_beyond_what_64_bits_count_are_refused(epochs):
    with pytest.raises(ValueError, match=r"schedule.epochs is .*64 bits"):
        step_schedule(config.build({"schedule": {"epochs": epochs}}), 1000)


def test_a_run_of_a_hundred_billion_steps_takes_its_first_step_at_once(tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"query": f"question {i}", "positive": f"answer {i}"}) + "\n" for i in range(40)))
    table = {
        "out": str(tmp_path / "run"),
        "data": {"source": str(pairs)},
        "x": {"name": "small_towers:text"},
        "y": {"name": "small_towers:text"},
        "loss": {"dim": 8},
        "batch": {"size": 8, "chunk": 8, "keep": 0},
        "schedule": {"steps": 10**11},
        "compute": {"device": "cpu"},
        "watch": {"bar": False, "report": False},
    }
    run = config.build(table)
    (tmp_path / "run").mkdir()
    with ranks(run.compute) as here:
        training = Training(assemble(run, here), tmp_path / "run")
        with RunLogger(run, tmp_path / "run", training.samples, training.seen, silent=False) as watch, StopSign() as sign:
            training.run_steps(watch, sign, last=2)
        assert (training.number, training.seen) == (2, 16)
    steps = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["samples"] for line in steps if line["event"] == "step"] == [8, 16]
