"""Measurements as files, and plans in which they replace predictions."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_works import RUN, TOOLS

from megabatch import config, measurements
from megabatch.environment import device_name
from megabatch.measurements import Fit, Measured, Noise, Profile, Sweep
from megabatch.planning.plan import Plan
from megabatch.planning.planner import plan

ORIGIN = "measured on NVIDIA H200, 2026-11-15"
CLASSIFY = config.build(config.EMBEDDED, ["compute.precision=bf16", "loss.objective=classify"])


def planned(*results, model=RUN, gpu="H200", **asked):
    # 786,432 samples seen give a batch of 1,024.
    return plan(model, gpu=gpu, tools=TOOLS, measured=results, seen=768 * 1024, **asked)


def of(result, run=RUN, device="NVIDIA H200"):
    return Measured(result, config.as_table(run), device, "2.13.0", "2026-11-15")


KINDS = [
    Fit(96, 10**11, ({"size": 96, "ran": True, "peak_bytes": 10**10, "seconds": 0.5, "why": None},)),
    Profile(({"batch": 64, "chunk": 16, "seconds": 0.5},), 64, 64, None, "chunk", None, None, 100.0, ("a note",)),
    Noise(1200.5, 900.0, 1600.0, 256, False, ({"step": 1, "critical": 2.0},), 1024),
    Sweep(512, 1.23e-3, "samples", ({"batch": 512, "lr": 1e-3},)),
]


@pytest.mark.parametrize("result", KINDS)
def test_every_measurement_comes_back_from_its_file(result, tmp_path):
    path = measurements.write(of(result), tmp_path / "new" / "measured.json")
    assert measurements.read(path) == of(result)
    assert measurements.read(path).kind == type(result).__name__.lower()


@pytest.mark.parametrize("text", ["", "{}", '{"measured": "magic"}', '{"measured": "fit", "found": {}}', "[1]"])
def test_a_file_that_holds_no_measurement_is_named(text, tmp_path):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ValueError, match=r"file.json: holds no measurement"):
        planned(tmp_path / "file.json")
    with pytest.raises(ValueError, match="there is no such file"):
        planned(tmp_path / "nowhere.json")


def test_without_measurements_nothing_changes():
    assert planned() == plan(RUN, gpu="H200", tools=TOOLS, seen=768 * 1024)
    with pytest.raises(ValueError, match="must be a list of files"):
        plan(RUN, gpu="H200", tools=TOOLS, measured="measured.json")


@given(st.integers(1, 14), st.floats(1e-6, 1), st.sampled_from(["samples", "updates", "time"]), st.sampled_from([1, 2]))
@settings(max_examples=40, deadline=None)
def test_a_plan_takes_batch_and_rate_of_a_sweep(power, lr, same, gpus):
    result = planned(of(Sweep(gpus * 2**power, lr, same)), gpus=gpus)
    assert (result.batch, result.run.batch.size, result.run.optimizer.lr) == (gpus * 2**power, gpus * 2**power, lr)
    for name in ("batch", "learning rate"):
        assert ORIGIN in result.number(name).why and result.number(name).confidence == "measured"
    assert not any(note.startswith("Sweep the learning rate") for note in result.notes)
    assert Plan.from_json(result.as_json()) == result


def test_a_sweeps_batch_is_a_multiple_of_the_gpus():
    result = planned(of(Sweep(512, 1e-3, "samples")), gpus=3)
    assert result.batch == 513 and "from 512 to 513" in result.number("batch").why
    # The batch is nearly the sweep's, so the rate is the same to two digits.
    assert result.run.optimizer.lr == 1e-3


def test_of_a_sweep_over_other_data_only_the_rate_is_used():
    other = dataclasses.replace(RUN, data=dataclasses.replace(RUN.data, source="other.csv"))
    result = planned(of(Sweep(256, 1e-3, "samples"), other))
    assert result.batch == planned().batch == 512
    # Adam, twice the batch: about the square root, as the study measured it.
    assert result.run.optimizer.lr == pytest.approx(1e-3 * 2**0.5, rel=0.02)
    assert result.number("learning rate").confidence == "medium" and ORIGIN in result.number("learning rate").why
    assert any("'other.csv'" in note for note in result.notes)


def test_given_values_take_precedence_over_measured_ones():
    sweep = of(Sweep(256, 1e-3, "samples"))
    assert planned(sweep, batch=2048).batch == 2048
    assert planned(sweep, base_lr="5e-4@256").run.optimizer.lr == pytest.approx(5e-4)
    noise = of(Noise(100.0, 50.0, 200.0, 64, False), CLASSIFY)
    assert planned(noise, model=CLASSIFY, critical=8192).batch > planned(noise, model=CLASSIFY).batch


def point(strategy, seconds, **more):
    return {
        "batch": strategy.batch,
        "chunk": strategy.chunk,
        "keep": strategy.keep,
        "ranks": strategy.ranks,
        "seconds": seconds,
        **more,
    }


def profile(*points, against="batch"):
    return Profile(points, points[0]["batch"], points[0]["batch"], against=against)


@pytest.mark.parametrize("seconds", [0.1, 0.7, 1.2345, 3.3, 71.3])
def test_measured_steps_replace_predictions_at_their_batch_and_chunk(seconds):
    before = planned()
    row = point(before.strategy, seconds, reserved_bytes=before.peak_bytes + 10**8)
    result = planned(of(profile(row)))
    assert result.strategy == before.strategy
    assert (result.seconds_per_step, result.peak_bytes) == (seconds, before.peak_bytes + 10**8)
    assert result.run.planned == config.Planned(result.peak_bytes, seconds)
    assert sum(result.memory.values()) == result.peak_bytes
    less = planned(of(profile({**row, "reserved_bytes": before.peak_bytes // 2})))
    assert sum(less.memory.values()) == pytest.approx(less.peak_bytes, abs=10) and less.peak_bytes == before.peak_bytes // 2
    for name in ("seconds per step", "peak memory"):
        assert ORIGIN in result.number(name).why and result.number(name).confidence == "measured"
    assert sum(result.time.values()) == pytest.approx(seconds)


def test_a_profile_with_other_kernels_is_noted():
    before = planned()
    result = profile(point(before.strategy, 1.0))
    other = dataclasses.replace(RUN, compute=dataclasses.replace(RUN.compute, channels_last=False))
    note = f"The profile was {ORIGIN}, with compute.channels_last = False, but the plan has None"
    assert any(line.startswith(note) for line in planned(of(result, other)).notes)
    assert not any("kernels" in line for line in planned(of(result)).notes)


def test_elsewhere_predictions_are_scaled_by_what_was_measured_nearby():
    before = planned()
    # Twice the time and 1.1 times the memory at this batch; another factor at an eighth, which is farther from twice the batch.
    small = dataclasses.replace(before.strategy, shard=128, chunk=128)
    rows = [point(before.strategy, 2 * before.seconds_per_step, reserved_bytes=round(1.1 * before.peak_bytes)), point(small, 5.0)]
    result = planned(of(profile(*rows)))
    ways, expected = ({way.name: way for way in each.alternatives} for each in (result, before))
    assert ways["twice the batch"].seconds_per_step == pytest.approx(2 * expected["twice the batch"].seconds_per_step, rel=1e-6)
    assert ways["twice the batch"].hours == pytest.approx(2 * expected["twice the batch"].hours, rel=1e-6)
    asked = planned(of(profile(rows[0])), batch=4096)
    alone = planned(batch=4096)
    assert asked.strategy.chunk <= alone.strategy.chunk
    assert asked.number("seconds per step").confidence == "medium"
    assert "steps at batch 512" in asked.number("seconds per step").why
    assert asked.seconds_per_step == pytest.approx(2 * alone.seconds_per_step, rel=0.1)


def test_the_fastest_of_the_measured_chunks_is_taken():
    strategy, seconds = planned().strategy, {128: 1.0, 200: 0.5, 512: 2.0}
    assert strategy.chunk == 512
    rows = [point(dataclasses.replace(strategy, chunk=chunk, keep=1), seconds[chunk]) for chunk in seconds]
    result = planned(of(profile(*rows, against="chunk")))
    assert result.strategy.chunk == 200
    assert "of 3 timed chunks" in result.number("chunk").why
    assert result.number("chunk").confidence == "measured"
    # A profile over batches does not compare chunks.
    assert planned(of(profile(*rows))).strategy.chunk == 512


def test_the_chunk_of_fit_caps_the_chunk():
    result = planned(of(Fit(100, 90 * 2**30)))
    assert result.strategy.chunk == result.run.batch.chunk == 100
    assert all(part in result.number("chunk").why for part in ("100 rows", "90.0 GiB", ORIGIN))
    assert result.number("chunk").confidence == "measured"
    assert result.peak_bytes <= result.limit_bytes


def test_what_has_run_fits_whatever_was_predicted():
    # 8.6e9 bytes of the 10 GiB may be used: 64 rows by prediction, but 90 rows ran.
    assert planned(memory="10GiB").strategy.chunk == 64
    result = planned(of(Fit(90, None)), memory="10GiB")
    assert (result.strategy.chunk, result.strategy.keep) == (90, 1)
    # A strategy that has not run still has to fit by prediction.
    assert next(way.batch for way in result.alternatives if way.name == "what fits without chunks") == 64
    # At eight times the batch of fit the shard takes more memory, so the prediction decides again.
    assert planned(of(Fit(90, None)), memory="10GiB", batch=8192).strategy.chunk == 64


def test_critical_batch_that_was_measured():
    before = planned(model=CLASSIFY, priority="speed")
    assert any("is a prior" in note for note in before.notes)
    result = planned(of(Noise(200.0, 120.0, 310.0, 64, False, branch=256), CLASSIFY), model=CLASSIFY, priority="speed")
    assert result.batch <= 200 and result.batch < before.batch
    why = result.number("batch").why
    assert "1 + 200/B" in why and f"the critical batch is 200 (120 to 310), {ORIGIN}" in why
    assert result.number("batch").confidence == "measured"
    assert not any("prior" in note for note in result.notes) and any("256" in note for note in result.notes)


def test_noise_of_compared_samples_does_not_choose_a_classifiers_batch_either():
    result = planned(of(Noise(2.0, 1.0, 3.0, 64, True), CLASSIFY), model=CLASSIFY, priority="speed")
    assert result.batch == planned(model=CLASSIFY, priority="speed").batch


def test_noise_of_compared_samples_is_a_note():
    result = planned(of(Noise(200.0, 120.0, 310.0, 64, True)))
    assert result.batch == planned().batch
    assert any("batch 64" in note and "200 (120 to 310)" in note and ORIGIN in note for note in result.notes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("x.name=vit", r"x.name = 'vit', but the plan has 'cnn'"),
        ("x.options={}", r"x.options = {}"),
        ("y.locked=true", r"y.locked = True"),
        ("loss.dim=64", r"loss.dim = 64, but the plan has 128"),
        ("loss.objective=siglip", r"loss.objective = 'siglip', but the plan has 'clip'"),
    ],
)
def test_a_measurement_of_something_else_is_refused(kind, change, complaint, tmp_path):
    other = config.build(config.EMBEDDED, ["compute.precision=bf16", change])
    path = measurements.write(of(kind, other), tmp_path / "other.json")
    with pytest.raises(ValueError, match=rf"other.json: was measured with {complaint}"):
        planned(path)


def test_the_second_tower_of_a_classifier_does_not_count():
    other = dataclasses.replace(CLASSIFY, y=config.Tower("text", {"width": 8}))
    assert planned(of(Fit(100, None), other), model=CLASSIFY).strategy.chunk <= 100


def test_another_precision_is_refused_where_it_counts_and_noted_where_it_does_not():
    other = config.build(config.EMBEDDED)
    for result in KINDS[:2]:
        with pytest.raises(ValueError, match=r"compute.precision = 'fp32', but the plan has 'bf16'"):
            planned(of(result, other))
        planned(of(result, other), precision="fp32")
    for result in KINDS[2:]:
        assert any("in fp32, but the plan is in bf16" in note for note in planned(of(result, other)).notes)


def test_measurements_of_another_device_have_lower_confidence():
    before = planned()
    result = planned(of(Fit(100, None), device="NVIDIA A100-SXM4-80GB"))
    assert result.strategy == before.strategy and any("its chunk is not used" in note for note in result.notes)
    row = point(before.strategy, 3.0, predicted_seconds=2.0)
    result = planned(of(profile(row), device="NVIDIA A100-SXM4-80GB"))
    assert result.seconds_per_step == pytest.approx(1.5 * before.seconds_per_step)
    assert result.number("seconds per step").confidence == "low"
    assert any("not on H200" in note and "scaled" in note for note in result.notes)
    result = planned(of(profile(point(before.strategy, 3.0)), device="NVIDIA A100-SXM4-80GB"))
    assert result.seconds_per_step == before.seconds_per_step
    assert any("it is not used" in note for note in result.notes)


def test_on_a_cpu_measurements_must_be_of_this_machine():
    run = config.build(config.EMBEDDED)
    here, there = device_name(torch.device("cpu")), "Another CPU"
    assert planned(of(Fit(100, None), run, here), model=run, gpu="cpu").strategy.chunk == 100
    assert planned(of(Fit(100, None), run, there), model=run, gpu="cpu").strategy.chunk != 100


def test_only_profiles_may_be_given_more_than_once():
    with pytest.raises(ValueError, match="is a second measurement of fit"):
        planned(of(Fit(100, None)), of(Fit(200, None)))
    strategy = planned().strategy
    rows = [point(dataclasses.replace(strategy, chunk=chunk, keep=1), seconds) for chunk, seconds in ((128, 1.0), (256, 0.5))]
    assert planned(*(of(profile(row, against="chunk")) for row in rows)).strategy.chunk == 256
    result = planned(of(Fit(100, None)), of(Sweep(512, 1e-3, "samples")))
    assert (result.batch, result.strategy.chunk) == (512, 100)


def test_a_measurement_without_a_readable_configuration_is_refused():
    with pytest.raises(ValueError, match="custom loop"):
        planned(Measured(Fit(100, None), {}, "NVIDIA H200", "2.13.0", "2026-11-15"))
    table = json.loads(json.dumps(config.as_table(RUN))) | {"colour": "blue"}
    with pytest.raises(ValueError, match="the configuration of its run cannot be read"):
        planned(Measured(Fit(100, None), table, "NVIDIA H200", "2.13.0", "2026-11-15"))


def test_an_infinite_bound_is_written_as_strict_json(tmp_path):
    open_ended = Measured(Noise(12.0, 3.0, float("inf"), 64, False, ({"step": 1, "high": float("inf")},)), {}, "a device", "2")
    path = measurements.write(open_ended, tmp_path / "measured.json")

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    assert json.loads(path.read_text(), parse_constant=refuse)["found"]["high"] == "inf"
    assert measurements.read(path) == open_ended
