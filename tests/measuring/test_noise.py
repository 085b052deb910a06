"""The noise scale on problems where it is known: unbiased moments, intervals with their coverage, and batches that lose nothing."""

from __future__ import annotations

import math
import random

import pytest
import torch

from megabatch.measuring.noise.branch import Branch, judge, largest
from megabatch.training.noise.estimator import LEAST, Micro, Moments, estimate, moments, number, sentence

DIM = 40


def gaussian(seed: int, steps: int, sizes: list[int], trace: float, shares: list[float] | None = None) -> list[Moments]:
    """Steps of a problem whose samples have gradients of G plus Gaussian noise: |G|² is 1, tr(Σ) is `trace`."""
    shares = shares or [size / sum(sizes) for size in sizes]
    generator = torch.Generator().manual_seed(seed)
    truth = torch.zeros(DIM, dtype=torch.float64)
    truth[0] = 1
    # The mean of n samples has noise of 1/n of their variance.
    deviations = torch.tensor([math.sqrt(trace / DIM / size) for size in sizes], dtype=torch.float64)[:, None]
    noise = torch.randn(steps, len(sizes), DIM, generator=generator, dtype=torch.float64)
    gradients = truth + deviations * noise
    squares = gradients.square().sum(-1).tolist()
    whole = (gradients * torch.tensor(shares, dtype=torch.float64)[:, None]).sum(1).square().sum(-1).tolist()
    return [moments([Micro(*m) for m in zip(s, sizes, shares, strict=True)], w) for s, w in zip(squares, whole, strict=True)]


def test_two_micro_batches_by_hand():
    """Gradients (2, 1) and (0, 1) of 3 rows each: squares 5 and 1, mean 3; the whole is (1, 1), square 2. Between 1/3 and 1/6 lies
    1/6, so tr(Σ) = (3 − 2)·6 and |G|² = 2 − 6/6."""
    found = moments([Micro(5.0, 3, 0.5), Micro(1.0, 3, 0.5)], 2.0)
    assert found == pytest.approx(Moments(trace=6.0, signal=1.0))


def test_equal_sizes_give_the_formulas_of_the_paper():
    small, big = 8, 32
    squares, whole = [3.0, 5.0, 4.0, 7.0], 2.5
    found = moments([Micro(square, small, 1 / 4) for square in squares], whole)
    mean = sum(squares) / 4
    assert found.trace == pytest.approx((mean - whole) / (1 / small - 1 / big))
    assert found.signal == pytest.approx((big * whole - small * mean) / (big - small))


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ([16, 16, 16, 16], None),
        ([2, 30, 9, 23], None),
        ([5, 59], None),
        ([2, 30, 9, 23], [0.25] * 4),
        ([10, 20, 30], [0.6, 0.3, 0.1]),
    ],
)
def test_both_moments_are_unbiased_for_all_sizes_and_shares(sizes, shares):
    steps = gaussian(seed=1, steps=4000, sizes=sizes, trace=50.0, shares=shares)
    for values, truth in (([s.trace for s in steps], 50.0), ([s.signal for s in steps], 1.0)):
        mean = sum(values) / len(values)
        error = math.sqrt(sum((value - mean) ** 2 for value in values)) / len(values)
        assert abs(mean - truth) < 3.5 * error
        # A bias of some per cent would have shown.
        assert error < 0.05 * truth


@pytest.mark.parametrize(("trace", "steps"), [(20.0, 12), (100.0, 40), (1500.0, 60)])
def test_intervals_have_their_coverage(trace, steps):
    """The coverage is 95 %; 200 runs estimate it to 3 %, and the distribution over few steps is not quite normal."""
    found = [estimate(gaussian(seed, steps, [6, 10, 8, 8], trace)) for seed in range(200)]
    held = sum(each.low <= trace <= each.high for each in found)
    assert held >= 0.9 * 200
    finite = sorted(each.critical for each in found)
    assert finite[100] == pytest.approx(trace, rel=0.1 if trace < 1000 else 0.35)
    if trace < 1000:
        # An unbounded interval would contain the truth too.
        assert sum(each.high < 4 * trace for each in found) > 190


def test_the_ratio_is_of_means():
    found = estimate([Moments(10.0, 1.0), Moments(10.0, 3.0)])
    assert found.critical == 5.0 and (found.trace, found.signal, found.steps) == (10.0, 2.0, 2)


def test_a_gradient_below_the_noise_leaves_the_interval_open():
    found = estimate(gaussian(seed=0, steps=40, sizes=[4, 4], trace=5000.0))
    assert found.high == math.inf and 0 < found.low < 5000
    assert "without an upper end" in sentence(found.critical, found.low, found.high)
    negative = estimate([Moments(10.0 + i % 3, -0.1 + 0.2 * (i % 2 - 0.6)) for i in range(30)])
    assert negative.critical == math.inf and negative.high == math.inf
    assert "about" not in sentence(negative.critical, negative.low, negative.high)


def test_few_steps_say_nothing():
    steps = gaussian(seed=0, steps=LEAST, sizes=[8, 8], trace=5.0)
    assert estimate(steps[:-1])[1:3] == (0.0, math.inf)
    assert estimate(steps).low > 0
    assert "unknown" in sentence(5.0, 0.0, math.inf)


def test_steps_that_depend_on_each_other_widen_the_interval():
    """320 steps of a gradient whose norm changes every twenty steps are 16 observations, not 320."""
    draws = random.Random(0)
    runs = [[Moments(100 + draws.gauss(0, 5), level + draws.gauss(0, 0.05))] * 20 for level in [0.6, 1.4, 0.8, 1.2] * 4]
    together = [step for run in runs for step in run]
    apart = [run[i] for i in range(20) for run in runs]
    a, b = estimate(together), estimate(apart)
    assert a.critical == pytest.approx(b.critical)
    assert a.high - a.low > 3 * (b.high - b.low)


def test_without_noise_the_critical_batch_is_zero():
    assert estimate([Moments(0.0, 1.0)] * 8)[:3] == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("micros", "words"),
    [
        ([Micro(1.0, 4, 1.0)], "at least 2 are needed"),
        ([Micro(1.0, 4, 0.5), Micro(1.0, 4, 0.4)], "add up to 0.9"),
        ([Micro(1.0, 4, 0.5), Micro(1.0, 0, 0.5)], "above 0"),
    ],
)
def test_what_cannot_be_estimated_is_refused(micros, words):
    with pytest.raises(ValueError, match=words):
        moments(micros, 1.0)


def test_nothing_measured_is_refused():
    with pytest.raises(ValueError, match="at least two micro-batches"):
        estimate([])


def test_numbers_are_rounded_for_readers():
    assert [number(value) for value in (0.1234, 9.876, 64, 1234567.0)] == ["0.123", "9.88", "64", "1,230,000"]
    assert sentence(96.4, 72.9, 141.0) == "critical batch 96.4 (95 % interval 72.9 to 141)"


def planted(limit: int, spread: float, repeats: int = 3) -> dict[int, list[float]]:
    """Losses that are the same up to `limit`, and 0.05 higher for each doubling beyond it."""
    draws = random.Random(limit)
    return {
        batch: [2.0 + 0.05 * max(0.0, math.log2(batch / limit)) + draws.gauss(0, spread) for _ in range(repeats)]
        for batch in (64, 128, 256, 512, 1024)
    }


@pytest.mark.parametrize("limit", [64, 128, 256, 512, 1024])
def test_the_largest_batch_that_loses_nothing_is_the_planted_one(limit):
    assert largest(judge(planted(limit, spread=0.004), tolerance=0.01)) == limit


def test_noise_is_that_of_the_mean_difference():
    """Differences of 0.1 ± 0.1 and 0.3 ± 0.1 over two repeats: variance 0.02 each, of a mean 0.01; t of 2 degrees is 4.303."""
    found = judge({8: [1.0, 1.0], 16: [1.0, 1.2], 32: [1.2, 1.4]}, tolerance=0.0)
    assert [each.noise for each in found] == pytest.approx([0.0, 0.4303, 0.4303])
    assert [each.difference for each in found] == pytest.approx([0.0, 0.1, 0.3])
    assert [each.fine for each in found] == [True, True, True]


def test_repeats_are_compared_on_the_same_samples():
    """What the samples of a repeat change at all batches is not noise of their difference."""
    found = judge({8: [1.0, 3.0, 2.0], 16: [1.1, 3.1, 2.1]}, tolerance=0.01)
    assert found[1].noise == pytest.approx(0) and not found[1].fine


def test_a_branch_that_diverged_loses():
    found = judge({8: [1.0, 1.0], 16: [1.0, math.inf], 32: [1.0, 1.0]}, tolerance=0.01)
    assert [each.fine for each in found] == [True, False, True] and largest(found) == 8
    with pytest.raises(ValueError, match="nothing to compare with"):
        judge({8: [math.inf], 16: [1.0]}, tolerance=0.01)


def test_beyond_a_batch_that_loses_nothing_counts():
    rows = [Branch(8, 1.0, 0.0, 0.0, True), Branch(16, 1.0, 0.0, 0.0, True), Branch(32, 2.0, 1.0, 0.0, False)]
    assert largest([*rows, Branch(64, 1.0, 0.0, 0.0, True)]) == 16
