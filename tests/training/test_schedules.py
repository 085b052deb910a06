"""The steps of a run against hand-worked numbers."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch import config
from megabatch.training.schedules import step_schedule


def steps_of(length=1000, **sections):
    return step_schedule(config.build(sections), length)


def test_a_budget_of_samples_is_spent_exactly_and_in_order():
    steps = steps_of(batch={"size": 300}, schedule={"samples": 1000})
    assert [(s.first, s.pairs) for s in steps] == [(0, 300), (300, 300), (600, 300), (900, 100)]


def test_epochs_count_the_samples_of_the_source():
    assert sum(s.pairs for s in steps_of(length=77, batch={"size": 10}, schedule={"epochs": 2.5})) == round(2.5 * 77)


def test_steps_are_as_many_as_asked_for():
    assert [s.pairs for s in steps_of(batch={"size": 64}, schedule={"steps": 3})] == [64, 64, 64]


def test_cosine_with_warm_up_by_hand():
    rates = [s.rate for s in steps_of(batch={"size": 10}, schedule={"steps": 6, "warmup": 2, "shape": "cosine"})]
    assert rates == pytest.approx([0.5, 1.0, 1.0, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 + math.cos(3 * math.pi / 4)) / 2])


def test_linear_falls_to_the_floor_and_constant_does_not_fall():
    linear = [s.rate for s in steps_of(batch={"size": 2}, schedule={"steps": 4, "warmup": 0, "shape": "linear", "floor": 0.2})]
    assert linear == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert {s.rate for s in steps_of(batch={"size": 2}, schedule={"steps": 4, "warmup": 0, "shape": "constant"})} == {1.0}


def test_warm_up_below_one_is_a_share_of_the_steps():
    rates = [s.rate for s in steps_of(batch={"size": 2}, schedule={"steps": 10, "warmup": 0.4, "shape": "constant"})]
    assert rates == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("steps", "warmup"), [(4, 4), (4, 100), (1, 1), (3, 0.9)])
def test_a_warm_up_as_long_as_the_run_rises_until_its_end(shape, steps, warmup):
    rates = [s.rate for s in steps_of(batch={"size": 2}, schedule={"steps": steps, "warmup": warmup, "shape": shape})]
    assert rates == pytest.approx([(step + 1) / steps for step in range(steps)])


def test_a_batch_that_doubles_stands_equally_long_at_each_size():
    batch = {"size": 80, "start": 10, "schedule": "steps", "ramp": 0.8, "lr_rule": "none"}
    sizes = [s.pairs for s in steps_of(batch=batch, schedule={"steps": 20, "warmup": 0, "shape": "constant"})]
    assert sizes == [10] * 4 + [20] * 4 + [40] * 4 + [80] * 8


def test_exponential_growth_passes_the_geometric_middle():
    batch = {"size": 400, "start": 4, "schedule": "exponential", "ramp": 1.0}
    sizes = [s.pairs for s in steps_of(batch=batch, schedule={"steps": 10})]
    assert sizes[0] == 4 and sizes[5] == 40


@pytest.mark.parametrize(("rule", "rate"), [("linear", 0.25), ("sqrt", 0.5), ("none", 1.0)])
def test_the_learning_rate_follows_the_batch(rule, rate):
    batch = {"size": 100, "start": 25, "schedule": "linear", "lr_rule": rule}
    steps = steps_of(batch=batch, schedule={"steps": 10, "warmup": 0, "shape": "constant"})
    assert steps[0].rate == pytest.approx(rate) and steps[-1].rate == pytest.approx(1.0)


def test_a_last_batch_cut_short_keeps_its_rate():
    steps = steps_of(batch={"size": 64}, schedule={"samples": 100, "warmup": 0, "shape": "constant"})
    assert [(s.pairs, s.rate) for s in steps] == [(64, 1.0), (36, 1.0)]


@given(
    size=st.integers(2, 200),
    start=st.integers(1, 200),
    kind=st.sampled_from(["linear", "exponential", "steps", "constant"]),
    ramp=st.floats(0.01, 1),
    samples=st.integers(1, 3000),
    warmup=st.floats(0, 20),
)
@settings(deadline=None)
def test_batches_grow_and_cover_the_stream_without_gaps(size, start, kind, ramp, samples, warmup):
    grows = {} if kind == "constant" else {"start": min(start, size), "ramp": ramp}
    batch = {"size": size, "schedule": kind, **grows}
    steps = steps_of(batch=batch, schedule={"samples": samples, "warmup": warmup})
    assert sum(s.pairs for s in steps) == samples
    assert all(a.first + a.pairs == b.first for a, b in itertools.pairwise(steps))
    assert all(a.pairs <= b.pairs for a, b in itertools.pairwise(steps[:-1]))
    assert all(1 <= s.pairs <= size and 0 <= s.rate <= 1 for s in steps)
