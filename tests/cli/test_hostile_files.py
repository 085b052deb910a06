"""Damaged files of measurements and other tools, or files with impossible numbers, are refused in one sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small_works import TOOLS

from megabatch import config, measurements
from megabatch.audit import audit, read_any
from megabatch.costs.hardware import find_machine, parse_bytes
from megabatch.measuring.sweep.outcome import read_outcome
from megabatch.planning.calibration import calibrate
from megabatch.planning.planner import plan
from megabatch.planning.request import Request, parse_base, parse_count

RUN = config.build(config.EMBEDDED)
CLASSIFY = config.build(config.EMBEDDED, ["loss.objective=classify"])
POINT = {"batch": 64, "chunk": 64, "keep": 0, "ranks": 1, "seconds": 0.1, "predicted_seconds": 0.1}
FOUND = {
    "fit": {"chunk": 64, "limit_bytes": 10**9, "trials": []},
    "profile": {"points": [POINT], "best": 64, "enough": 64},
    "noise": {"critical": 1000.0, "low": 900.0, "high": "inf", "batch": 64, "coupled": False},
    "sweep": {"batch": 64, "lr": 1e-3, "same": "samples"},
}
RATES = {
    **{"measured": "rates", "device": "NVIDIA H200", "kind": "cuda", "memory": 10**11, "gpus": 8, "products": {"fp32": 5e13}},
    **{"bandwidth": 4e12, "copy": 5e10, "link": 4e11, "ranks": 8, "torch": "2.8", "date": "2026-01-01", "host": 5e-6},
}
DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]


def written(path, kind: str, **changes: Any):
    rest = {"run": config.as_table(RUN), "device": "NVIDIA H100", "torch": "2.8", "date": "2026-01-01"}
    path.write_text(json.dumps({"measured": kind, "found": FOUND[kind] | changes, **rest}))
    return path


@pytest.mark.parametrize("kind", FOUND)
def test_measurements_of_every_kind_are_read(tmp_path, kind):
    calibrate([written(tmp_path / "measured.json", kind)], RUN, "fp32", find_machine("H100"))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("fit", {"chunk": None}),
        ("fit", {"chunk": 0}),
        ("fit", {"chunk": True}),
        ("fit", {"chunk": 10**400}),
        ("profile", {"points": [{**POINT, "batch": None}]}),
        ("profile", {"points": [{**POINT, "ranks": 0}]}),
        ("profile", {"points": [{**POINT, "chunk": "64"}]}),
        ("profile", {"points": [{**POINT, "keep": -1}]}),
        ("profile", {"points": [{**POINT, "seconds": "inf"}]}),
        ("profile", {"points": "many"}),
        ("profile", {"against": "size"}),
        ("noise", {"critical": "much"}),
        ("noise", {"coupled": 1}),
        ("sweep", {"lr": "nan"}),
        ("sweep", {"rows": DEEP}),
    ],
)
def test_a_measurement_that_cannot_have_been_measured_is_refused(tmp_path, kind, changes):
    with pytest.raises(ValueError):
        calibrate([written(tmp_path / "measured.json", kind, **changes)], RUN, "fp32", find_machine("H100"))


def test_noise_without_a_finite_critical_batch_does_not_choose_one(tmp_path):
    found = measurements.read(written(tmp_path / "measured.json", "noise", critical="inf")).found

    noise = measurements.Measured(found, config.as_table(CLASSIFY), "NVIDIA H100", "2.8")
    with pytest.raises(ValueError, match="no finite critical batch"):
        plan(CLASSIFY, gpu="H100", data=1000, precision="fp32", measured=[noise], tools=TOOLS)


@pytest.mark.parametrize(
    "changes",
    [
        {"device": True},
        {"gpus": "8"},
        {"gpus": 0},
        {"memory": 10**400},
        {"products": {"fp32": "fast"}},
        {"products": {}},
        {"bandwidth": 0},
        {"link": {}},
        {"host": float("inf")},
        {"copy": DEEP},
    ],
)
def test_rates_that_cannot_have_been_measured_are_refused(tmp_path, changes):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(RATES))
    assert find_machine(rates=path).gpus == 8
    path.write_text(json.dumps(RATES | changes))
    with pytest.raises(ValueError, match="holds no rates"):
        find_machine(rates=path)


@pytest.mark.parametrize(
    "record",
    [[], {"run": True, "outcome": {}}, {"run": "x", "outcome": {"quality": 1}}, {"run": {}, "outcome": {"quality": "good"}}],
)
def test_a_file_that_is_not_an_outcome_is_refused(tmp_path, record):
    (tmp_path / "outcome.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="is not the outcome of a run"):
        read_outcome(config.build(config.EMBEDDED, [f"out={tmp_path}"]))


ARGUMENTS = {"learning_rate": 1e-3, "per_device_train_batch_size": 8}
SCHEDULER = {"type": "WarmupLR", "params": 2147}


@pytest.mark.parametrize(
    ("table", "known"),
    [
        (ARGUMENTS | {"warmup_steps": float("inf")}, {}),
        (ARGUMENTS | {"learning_rate": 10**400}, {}),
        (ARGUMENTS | {"num_train_epochs": 1e300}, {"data": 10**15}),
        (ARGUMENTS, {"ranks": 2, "base_lr": 1e-320, "base_batch": 10**15}),
        ({"train_batch_size": 8, "optimizer": DEEP}, {}),
    ],
)
def test_numbers_that_no_training_has_are_refused_by_the_audit(tmp_path, table, known):
    (tmp_path / "settings.json").write_text(json.dumps(table))
    with pytest.raises(ValueError):
        audit(read_any(tmp_path / "settings.json", **known), **known)


@pytest.mark.parametrize(
    ("table", "known"),
    [
        (ARGUMENTS | {"optim": None}, {}),
        ({"train_batch_size": 8, "scheduler": SCHEDULER}, {}),
        ({"train_batch_size": 10**6, "optimizer": None}, {"objective": "siglip", "data": 10**6}),
        ({"train_batch_size": 10**5, "optimizer": {"type": "adam", "params": "x"}}, {"objective": "clip", "data": 10**7}),
    ],
)
def test_settings_of_another_shape_than_usual_are_audited(tmp_path, table, known):
    (tmp_path / "settings.json").write_text(json.dumps(table))
    for finding in audit(read_any(tmp_path / "settings.json", **known), **known):
        assert finding.why and finding.fix


@pytest.mark.parametrize(
    "parse",
    [
        lambda: parse_count("9" * 400, "data"),
        lambda: parse_count("-" + "9" * 400, "data"),
        lambda: parse_count("1e5", "data"),
        lambda: parse_base("nan@256"),
        lambda: parse_base("1e-3@" + "9" * 400),
        lambda: parse_bytes("9" * 400 + "GiB"),
        lambda: find_machine("9" * 30 + "xH100"),
        lambda: Request(epochs=float("inf")),
        lambda: Request(epochs=float("nan")),
        lambda: Request(price=-1.0),
        lambda: Request(critical=10**400),
    ],
)
def test_numbers_of_a_plan_that_would_overflow_are_refused(parse):
    with pytest.raises(ValueError):
        parse()
