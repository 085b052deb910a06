"""Hostile input of every kind, a little in every test run (`make fuzz` runs it for long); and that the fuzzer finds mistakes."""

from __future__ import annotations

import ctypes
import random
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from fuzz.__main__ import describe
from fuzz.harness import Reached, Target, case_of, fuzz, ranges, replayed
from fuzz.targets import TARGETS, all_targets
from world import fresh_processes

pytestmark = pytest.mark.sampled(3)

INPUTS, SEED = 2000, 20
# The bytes at which the planted targets below misbehave.
BAD = 7


@pytest.mark.slow
def test_hostile_input_is_refused_with_an_error_message():
    reports = fuzz(TARGETS, INPUTS, SEED, context=fresh_processes(), find=all_targets)
    failures = [failure for report in reports.values() for failure in report.failures]
    assert not failures, "\n".join(describe(failure, SEED) for failure in failures)
    assert sum(report.inputs for report in reports.values()) == INPUTS
    for target in TARGETS:
        report = reports[target.name]
        # A target that refuses or accepts everything tests too little.
        assert report.inputs > 0 and report.outcomes["accepted"] > 0, (target.name, report.outcomes)
        assert target.name == "arguments" or report.outcomes["accepted"] < report.inputs, (target.name, report.outcomes)


def number_of(rng: random.Random) -> list[int]:
    return [rng.randrange(10) for _ in range(8)] + [BAD] * (rng.random() < 0.1)


def planted(misbehave: Any) -> Target:
    """A target that misbehaves at inputs that contain BAD twice."""

    def run(case: list[int], folder: Path) -> None:
        if case.count(BAD) >= 2:
            misbehave()
        if sum(case) % 2:
            raise ValueError("an odd sum")

    return Target("planted", number_of, run)


def bad_indices(target: Target, inputs: int) -> list[int]:
    return [index for index in range(inputs) if case_of(target, SEED, index).count(BAD) >= 2]


def raise_key_error() -> None:
    raise KeyError("missing")


def crash() -> None:
    ctypes.string_at(0)


def hang() -> None:
    time.sleep(60)


def loop() -> None:
    while True:
        pass


def hoard() -> None:
    bytearray(1 << 40)


def start_process() -> None:
    subprocess.run(["true"], check=True)


def connect() -> None:
    with socket.socket() as connection:
        connection.connect(("127.0.0.1", 9))


@pytest.mark.parametrize(
    ("misbehave", "kind"),
    [
        (raise_key_error, "KeyError"),
        (crash, "killed by SIGSEGV"),
        (loop, "longer than 0.3 s"),
        (hang, "longer than 0.3 s"),
        (hoard, "MemoryError"),
        (start_process, "Forbidden"),
        (connect, "Forbidden"),
    ],
)
def test_each_kind_of_failure_is_found_counted_and_shrunk(misbehave, kind):
    target = planted(misbehave)
    # The slow failure happens only twice.
    inputs = bad_indices(target, 100)[1] + 1 if "longer" in kind else 100
    reports = fuzz([target], inputs, SEED, limit_s=0.3, shrinking="longer" not in kind)
    (failure,) = reports["planted"].failures
    bad = bad_indices(target, inputs)
    assert len(bad) >= 2, "the seed makes too few bad inputs for this test"
    assert failure.kind == kind and failure.index == bad[0] and failure.times == len(bad)
    assert reports["planted"].inputs == inputs
    if "longer" not in kind:
        assert failure.case == repr([BAD, BAD])
    assert f"--seed {SEED} --replay 'planted/{bad[0]}'" in describe(failure, SEED)


def test_an_input_depends_only_on_its_seed_target_and_index():
    for target in TARGETS:
        # repr, because NaN is not equal to itself.
        assert repr(case_of(target, SEED, 3)) == repr(case_of(target, SEED, 3))
        different = {repr(case_of(target, SEED, index)) for index in range(5)} | {repr(case_of(target, SEED + 1, 0))}
        assert len(different) > 3, target.name
    case, outcome, failure = replayed(planted(raise_key_error), SEED, bad_indices(planted(crash), 100)[0])
    assert case.count(BAD) >= 2 and outcome == "KeyError" and failure is not None


def test_ranges_cover_every_index_once_and_shares_are_kept():
    targets = [Target(name, number_of, lambda case, folder: None, share) for name, share in (("a", 3), ("b", 1))]
    covered = sorted((number, index) for number, first, end in ranges(targets, 1001, 0) for index in range(first, end))
    assert covered == [(0, index) for index in range(751)] + [(1, index) for index in range(250)]


def test_reaching_the_work_of_a_verb_counts_as_accepted():
    def reach(case: list[int], folder: Path) -> None:
        raise Reached

    (report,) = fuzz([Target("reached", number_of, reach)], 10, SEED).values()
    assert report.outcomes == {"accepted": 10}
