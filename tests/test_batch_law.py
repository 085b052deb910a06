"""The measured law of contrastive batches: where plans follow it, where they do not, and what they say beyond its range."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megabatch import batch_law
from megabatch.batch_law import Law, MeasuredLaw, NoiseRelation, WarmUpLaw
from megabatch.evidence import LEAST_PUBLISHED, Fact
from megabatch.measurements import Noise, Sweep
from megabatch.planning.choose_batch import choose_batch
from megabatch.planning.hyperparameters import KnownRate, derive_hyperparameters
from megabatch.planning.problem import problem_of
from megabatch.planning.request import Request
from megabatch.recipes import TrainingTask, advise_batch, advise_warmup, power_near

MEASURED = MeasuredLaw(
    law=Law(a=12.0, alpha=0.5, beta=0.1, steepness=1.0, aim=-1.5),
    covariance=((0.04, 0.0, 0.0), (0.0, 0.0025, 0.0), (0.0, 0.0, 0.0025)),
    deviation=0.3,
    towers=0.5,
    towers_deviation=0.1,
    samples=(250_000, 4_000_000),
    pairs=(16_000, 800_000),
    batches=(64, 32_768),
    repeats=20,
    held_back=0.95,
    rate_exponent=0.25,
    warm_up=WarmUpLaw(0.1, 0.25, 0.02, 0.3),
    noise={1024: NoiseRelation(0.5, 1024.0, 128.0, 16_384.0)},
    rows=1000,
    sources=("one", "two"),
    date="2026-01-01",
)
SMALL = TrainingTask("image-text", data=100_000, seen=1_000_000, params=5_000_000)


@pytest.fixture(autouse=True)
def law(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_law, "LAW_FILE", tmp_path / "law.json")
    batch_law.LAW_FILE.write_text(batch_law.to_json(MEASURED))


def test_a_written_law_is_read_back():
    assert batch_law.load() == MEASURED


def test_without_a_file_there_is_no_law(tmp_path, monkeypatch):
    by_law = advise_batch(SMALL)
    monkeypatch.setattr(batch_law, "LAW_FILE", tmp_path / "missing.json")
    assert batch_law.load() is None
    assert "study" in by_law.source and "study" not in advise_batch(SMALL).source


def test_within_the_measured_range_the_law_decides_with_its_interval():
    advice = advise_batch(SMALL)
    # Half of 2^12 at 1M samples and 100k pairs.
    assert advice.value == power_near(2048 * 2**-1.5) and advice.high == 2048
    low, high = MEASURED.interval(1_000_000, 100_000)
    # The standard deviations are 0.2 for the law, 0.3 for a source and 0.1 for its towers.
    assert high == pytest.approx(2048 * 2 ** (1.645 * 0.14**0.5)) and low == pytest.approx(2048**2 / high)
    assert f"{low:,.0f} to {high:,.0f}" in advice.why
    assert advice.confidence == "medium" and not advice.notes
    assert advise_batch(replace(SMALL, params=10**9)).confidence == "low"


def test_beyond_the_measured_range_the_advice_says_by_how_much():
    advice = advise_batch(replace(SMALL, seen=8_000_000))
    assert advice.confidence == "low" and "extrapolated 4×" in advice.why, "80 passes over the pairs, of 20 that were measured"
    advice = advise_batch(replace(SMALL, data=800_000, seen=8_000_000))
    assert advice.confidence == "low" and "extrapolated 2×" in advice.why
    # From the samples of published trainings on, these decide, and the law is a note.
    published = advise_batch(replace(SMALL, data=128_000_000, seen=128_000_000))
    assert "DataComp" in published.source and any("extrapolated 160×" in note for note in published.notes)
    # No batch below the smallest that was measured.
    assert advise_batch(replace(SMALL, seen=1_000)).value == MEASURED.batches[0]
    # The interval widens with the distance.
    near, far = (MEASURED.interval(seen, 100_000) for seen in (1e6, 1e9))
    assert far[1] / far[0] > near[1] / near[0]


@pytest.mark.parametrize("changed", [{"start": "pretrained"}, {"negatives": 7}, {"kind": "classifier"}, {"loss": "nt_xent"}])
def test_other_trainings_do_not_follow_the_law(changed, tmp_path, monkeypatch):
    task = replace(SMALL, **changed)
    with_law = advise_batch(task), advise_warmup(task, 256)
    monkeypatch.setattr(batch_law, "LAW_FILE", tmp_path / "missing.json")
    assert (advise_batch(task), advise_warmup(task, 256)) == with_law


@given(st.integers(1_000, 10**9), st.floats(1, 50), st.floats(1, 100))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_more_samples_never_ask_for_a_smaller_batch(data, epochs, factor):
    task = TrainingTask("image-text", data=data, seen=round(data * epochs))
    advice, longer = advise_batch(task), advise_batch(replace(task, seen=round(task.seen * factor)))
    assert 1 <= advice.low <= advice.value <= advice.high <= data
    assert longer.value >= advice.value
    batch = round(advice.value)
    assert 1 <= advise_warmup(task, batch).value <= task.steps(batch)


def test_a_known_rate_follows_the_measured_exponent_within_the_measured_batches():
    known = KnownRate(1e-3, 256, Fact("a rate", "given", "medium"))
    assert derive_hyperparameters(SMALL, 4096, known).lr == pytest.approx(2e-3)
    # 16^0.5 with an optimizer that was not measured, and beyond the measured batches.
    assert derive_hyperparameters(replace(SMALL, optimizer="lamb"), 4096, known).lr == pytest.approx(4e-3)
    assert derive_hyperparameters(SMALL, 16, replace_batch(known, 64)).lr == pytest.approx(5e-4)


def replace_batch(known, batch):
    return known._replace(batch=batch)


def test_warm_up_is_the_measured_share_within_what_was_tried():
    assert advise_warmup(SMALL, 1024).value == pytest.approx(0.1 * 977, abs=1)
    assert advise_warmup(SMALL, 64).value == pytest.approx(0.05 * 15_625, abs=1)
    assert MEASURED.warm_up.at(10**9) == 0.3 and MEASURED.warm_up.at(1) == 0.02
    longer = replace(SMALL, seen=LEAST_PUBLISHED)
    assert "share" not in advise_warmup(longer, 1024).why


def test_measured_noise_moves_the_batch_and_a_sweep_replaces_it():
    def chosen(**measured):
        calibration = {"noise": None, "sweep": None, "same_data": True, "origin": {"noise": "here", "sweep": "here"}, **measured}
        estimator = SimpleNamespace(
            parameters=5_000_000, calibration=SimpleNamespace(**calibration), task=SimpleNamespace(towers=())
        )
        request = Request("vit + text", gpu="H200", source="pairs/{0..9}.tar", data="100k", seen="1M")
        return choose_batch(problem_of(request), estimator)

    def noise(critical):
        return Noise(critical, critical / 2, critical * 2, 1024, True, ())

    plain = chosen().batch
    # The largest batch follows the square root of the critical batch, from 1,024 on, up to what was measured.
    assert chosen(noise=noise(1024.0)).batch == plain
    moved = chosen(noise=noise(1024.0 * 16))
    assert moved.batch == 4 * plain and moved.high >= moved.batch and any("Gradient noise" in note for note in moved.notes)
    assert chosen(noise=noise(1024.0 * 10**6)).batch == moved.batch
    assert chosen(noise=noise(1024.0 / 4)).batch == plain / 2
    assert chosen(noise=noise(float("inf"))).batch == plain
    swept = chosen(noise=noise(1024.0 * 16), sweep=Sweep(batch=768, lr=1e-3, same="samples", rows=()))
    assert swept.batch == 768 and swept.confidence == "measured"
