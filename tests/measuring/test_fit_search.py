"""The search alone, on simulated sizes: every limit, starts, caps, hints and leaks; every trial is counted."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from megabatch.measuring.fit.search import (
    extrapolated,
    in_proportion,
    largest,
    largest_confirmed,
    largest_without_failing,
    with_margin,
)

LIMITS = range(1, 301)
STARTS = (1, 3, 64, 300, 1000)


class Device:
    """Runs sizes up to a limit and records what it was asked. leak: rows by which each failure lowers the limit for good."""

    def __init__(self, limit: int, leak: int = 0) -> None:
        self.limit, self.leak = limit, leak
        self.asked: list[int] = []

    def __call__(self, size: int) -> bool:
        assert size >= 1
        self.asked.append(size)
        ran = size <= self.limit
        self.limit -= 0 if ran else self.leak
        return ran

    def ran(self, size: int) -> bool:
        return size in self.asked


@pytest.mark.parametrize("search", [largest, largest_confirmed])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("share", [None, 8])
def test_every_limit_is_found(search, start, share):
    for limit in LIMITS:
        for cap in (None, 1, 2, 50, limit, limit + 1, 299):
            device = Device(limit)
            found = search(device, start, cap=cap, stride=share and max(1, start // share))
            assert found == (limit if cap is None else min(limit, cap)), (limit, cap)
            assert device.ran(found)
            assert cap is None or max(device.asked) <= cap, "a cap holds for what is tried too"
            assert len(device.asked) <= 22 and (search is largest_confirmed or len(set(device.asked)) == len(device.asked))


@pytest.mark.parametrize("start", STARTS)
def test_where_nothing_runs_there_is_no_answer(start):
    device = Device(0)
    assert largest_confirmed(device, start) is None
    assert device.asked[-1] == 1


def test_a_good_start_needs_few_trials_and_doubling_does_not():
    near, far = Device(4100), Device(4100)
    assert largest(near, 4096, stride=16) == largest(far, 1) == 4100
    assert len(near.asked) <= 7
    assert len(far.asked) >= 20


def test_doubling_doubles():
    device = Device(300)
    largest(device, 4)
    assert device.asked[:8] == [4, 8, 16, 32, 64, 128, 256, 512]


def test_from_too_large_a_start_sizes_are_halved():
    device = Device(5)
    largest(device, 64)
    assert device.asked[:4] == [64, 32, 16, 8]


@pytest.mark.parametrize("within", [0.02, 0.1])
def test_an_inexact_result_takes_fewer_trials(within):
    exact, rough = Device(3000), Device(3000)
    found = largest(rough, 64, within=within)
    largest(exact, 64)
    assert 3000 * (1 - within) <= found <= 3000 and rough.ran(found)
    assert len(rough.asked) < len(exact.asked)


def line_through(device: Device, limit: int) -> Callable[[], int | None]:
    """Return a hint from peaks of 100 bytes plus 7 per row, for the sizes that ran."""
    return lambda: extrapolated({size: 100 + 7 * size for size in device.asked if size <= device.limit}, 100 + 7 * limit)


@pytest.mark.parametrize("start", STARTS)
def test_a_right_hint_saves_trials(start):
    for limit in LIMITS:
        device = Device(limit)
        assert largest(device, start, hint=line_through(device, limit)) == limit
    device, blind = Device(300), Device(300)
    assert largest(device, 100, hint=line_through(device, 300)) == largest(blind, 100) == 300
    assert len(device.asked) <= 6 < len(blind.asked)


def test_wrong_hints_do_no_harm():
    dice = random.Random(0)
    for limit in LIMITS:
        for hint in (lambda: dice.randint(-50, 600), lambda: 1, lambda: 10**6, lambda: None):
            device = Device(limit)
            assert largest(device, 20, cap=400, hint=hint) == min(limit, 400)
            assert max(device.asked) <= 400 and len(device.asked) < 45


@pytest.mark.parametrize("leak", [1, 5, 40])
def test_after_a_leak_the_answer_still_runs(leak):
    for limit in LIMITS:
        device = Device(limit, leak)
        found = largest_confirmed(device, 16)
        assert len(device.asked) <= 26
        if found is None:
            assert device.limit < 1
        else:
            assert found == device.asked[-1] and found >= 0.5 * device.limit - 2, "what ran, and not much less than what would"
            assert found <= device.limit, "it ran before the last failure, and would not run now"


def test_a_leak_shows_in_largest_alone():
    # Without confirmation the result is a size that no longer runs, so the test above can fail.
    device = Device(100, leak=5)
    assert largest(device, 16) > device.limit


def test_the_margin_is_subtracted_from_the_size():
    assert [with_margin(size, 0.1) for size in (1, 5, 10, 99, 100, 1000)] == [1, 4, 9, 89, 90, 900]
    assert with_margin(77, 0.0) == 77


def test_peaks_that_do_not_rise_give_no_extrapolation():
    assert extrapolated({}, 100) is extrapolated({4: 10}, 100) is extrapolated({4: 10, 8: 10}, 100) is None
    assert extrapolated({4: 14, 8: 18}, 110) == 100
    assert extrapolated({4: 400, 8: 800}, 100) == 1, "below all sizes that were seen"
    assert in_proportion({}, 100) == 1 and in_proportion({10: 50, 4: 49}, 100) == 20


@pytest.mark.parametrize("start", [1, 8, 64])
def test_without_failing_nothing_too_large_is_tried(start):
    constant, row = 1000, 7
    for limit in range(2 * start, 301):
        device = Device(limit)
        allowed = constant + row * limit

        def ceiling(device: Device = device, allowed: int = allowed) -> int:
            peaks = {size: constant + row * size for size in device.asked}
            return extrapolated(peaks, allowed) or in_proportion(peaks, allowed)

        for cap in (10**6, limit - limit // 3):
            device.asked.clear()
            found = largest_without_failing(device, start, cap, ceiling)
            assert max(device.asked) <= min(limit, cap) and device.ran(found)
            assert found >= min(cap, limit) * (1 - 1 / 32), (limit, cap)


def test_without_failing_the_size_is_halved_if_the_start_was_too_large():
    device = Device(5)
    assert largest_without_failing(device, 64, 100, lambda: 0) == 4
    assert largest_without_failing(Device(0), 64, 100, lambda: 0) is None
    # The ceiling was too high: the search returns to the size that ran and confirms it.
    device = Device(10)
    assert largest_without_failing(device, 4, 100, lambda: 40) == 8 and device.asked == [4, 8, 16, 8]
