"""The rules of a plan against numbers computed by hand from their sources, and the parsing of requests and machines."""

from __future__ import annotations

import doctest
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch import evidence, recipes
from megabatch.costs.devices import DEVICES, find_device
from megabatch.costs.hardware import find_machine, parse_bytes, with_rates
from megabatch.planning import request, search
from megabatch.planning.choose_batch import CriticalBatch, advised, judge, mean_loss, soonest
from megabatch.planning.hyperparameters import GIVEN, KnownRate, derive_hyperparameters
from megabatch.planning.request import Request, parse_base, parse_count
from megabatch.recipes import TrainingTask


def task(kind="image-text", start="scratch", data=10**7, seen=3 * 10**8, **rest):
    return TrainingTask(kind, start, data=data, seen=seen, **rest)


def test_a_batch_that_leaves_few_updates_gets_a_remark():
    small = task(data=67_000, seen=2_000_000)
    assert "123 updates" in judge(small, 16_384)[0]
    # Next to nothing is learned: that is a warning whoever chose the batch.
    assert "31 updates" in recipes.warnings_for(small, 65_536)[-1] and "31 updates" not in judge(small, 65_536)[0]
    assert judge(small, 1024) == ()


def test_batches_above_the_ceiling_and_below_the_floor_get_a_remark():
    assert any("262,144" in line for line in judge(task(data=10**9, seen=10**11), 524_288))
    assert any("4,096" in line for line in judge(task(), 512))


@given(
    st.sampled_from(["image-text", "embedder", "lm", "classifier"]),
    st.sampled_from(["scratch", "pretrained", "locked"]),
    st.integers(1_000, 10**11),
    st.floats(1, 100),
)
@settings(max_examples=100, deadline=None)
def test_speed_takes_no_smaller_batch_than_accuracy_and_both_lie_in_the_interval(kind, start, data, epochs):
    asked = task(kind, start, data=data, seen=round(data * epochs))
    usual, fast = advised(asked), advised(asked, "speed")
    assert 1 <= usual.low <= usual.batch <= fast.batch <= usual.high <= data
    assert usual.updates == math.ceil(asked.seen / usual.batch)


def test_wall_clock_optimum_by_hand():
    # (1 + C/B)(a + bB) is least at B = √(C·a/b): C = 4,096, a = 0.25 s, b = 1/64 s: √(4,096 · 16) = 256.
    assert soonest(4096, lambda size: 0.25 + size / 64, most=4096) == 256
    # No fixed cost: the smallest batch; nothing but fixed cost: the largest that is allowed.
    assert soonest(4096, lambda size: size / 64, most=4096) == 1
    assert soonest(4096, lambda size: 1.0, most=4096) == 4096


@given(st.integers(16, 10**6), st.floats(1e-3, 10), st.floats(1e-6, 1e-2))
@settings(max_examples=100, deadline=None)
def test_priority_for_accuracy_never_takes_a_larger_batch_than_for_speed(critical, fixed, each):
    def seconds(size):
        return fixed + each * size

    fastest = mean_loss(CriticalBatch(critical, "a source"), seconds, 10**7, 10**6, priority="speed").batch
    smallest = mean_loss(CriticalBatch(critical, "a source"), seconds, 10**7, 10**6).batch
    assert smallest <= fastest <= critical

    def total(size):
        return evidence.steps_factor(size, critical) * seconds(size)

    assert total(smallest) <= 1.1 * total(fastest) + 1e-12


@pytest.mark.usefixtures("without_law")
@pytest.mark.parametrize(
    ("size", "optimizer", "rate"),
    # 1e-3@256, four times the batch: Adam √4, SGD 4 (arXiv 2205.10287, 1706.02677).
    [(1024, "adam", 2e-3), (1024, "sgd", 4e-3), (64, "adam", 5e-4)],
)
def test_a_given_learning_rate_follows_the_batch(size, optimizer, rate):
    result = derive_hyperparameters(task(optimizer=optimizer), size, KnownRate(1e-3, 256, GIVEN))
    assert result.lr == pytest.approx(rate)
    assert result.sweep == ()


def test_outside_the_tested_range_the_rate_is_swept():
    result = derive_hyperparameters(task(), 65_536, KnownRate(1e-3, 256, GIVEN))
    assert result.lr == pytest.approx(0.016)
    assert result.sweep == pytest.approx((0.004, 0.008, 0.016, 0.032))
    assert "sweep" in result.numbers[0].shown
    assert result.numbers[0].confidence == "low"


def test_ema_is_raised_to_the_power_of_the_growth():
    # arXiv 2307.13813: 0.999 ** 4 at four times the batch.
    assert derive_hyperparameters(task(), 1024, ema=(0.999, 256)).ema == pytest.approx(0.999**4)


@pytest.mark.parametrize("kind", ["image-text", "embedder", "lm", "classifier"])
@pytest.mark.parametrize("start", ["scratch", "pretrained", "locked"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_every_number_has_a_reason_and_a_source(kind, start, optimizer):
    asked = task(kind, start, params=10**8, optimizer=optimizer)
    for number in derive_hyperparameters(asked, 1024).numbers:
        assert number.why and number.source and number.confidence in ("high", "medium", "low")
    assert advised(asked).why and advised(asked).source


def test_every_fact_has_a_source():
    for fact in evidence.FACTS.values():
        assert fact.says and fact.source and fact.confidence in ("high", "medium", "low")


@pytest.mark.parametrize(("text", "size"), [("80GiB", 80 * 2**30), ("24GB", 24 * 10**9), ("1.5 TiB", 1.5 * 2**40), (1000, 1000)])
def test_memory_as_people_write_it(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["-4GiB", "0", "much", "4.4.4GB", "12 parsecs"])
def test_texts_that_are_no_memory_size(text):
    with pytest.raises(ValueError, match="memory is"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("H200", "H200"),
        ("NVIDIA H200", "H200"),
        ("a100-80gb", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("A100", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("H100 PCIe", "H100-PCIe"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("Tesla T4", "T4"),
    ],
)
def test_devices_by_the_names_that_people_and_drivers_use(name, known):
    assert find_device(name).name == known


def test_every_known_device_finds_itself_and_has_a_source():
    for device in DEVICES:
        assert find_device(device.name) is device
        assert device.source and device.memory > 7 * 2**30 and device.rates["fp32"] > 0


def test_machines_as_people_write_them():
    machine = find_machine("8xA100-80GB")
    assert (machine.gpus, machine.device.name) == (8, "A100-80GB")
    assert find_machine("H200", 4, "100GiB").device.memory == 100 * 2**30
    assert find_machine(memory="80GiB").device.source.startswith("rates of an A100, assumed")
    assert find_machine("64xA100").link < find_machine("8xA100").link
    # Large products reach 0.75 of a peak, those of a step 0.72; of a bandwidth that was not measured the shares stay.
    measured = with_rates(machine, {"bf16": 2.5e14}, host=1e-5).device
    assert measured.flops_per_second("bf16") == pytest.approx(0.96 * 2.5e14)
    assert measured.bytes_per_second("elementwise") == pytest.approx(0.8 * 2.039e12) and measured.efficiency.host_s == 1e-5


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"gpu": "H200", "gpus": 0}, "gpus is 0"),
        ({"gpu": "0xH200"}, "gpus is 0"),
        ({"gpu": "8xH200", "gpus": 4}, "the number once"),
        ({"gpu": "G80"}, "no such device is known"),
        ({"memory": "-1GiB"}, "must be above 0"),
    ],
)
def test_machines_that_do_not_exist(asked, complaint):
    with pytest.raises(ValueError, match=complaint):
        find_machine(**asked)


def test_a_device_without_bf16_says_what_it_has():
    with pytest.raises(ValueError, match="V100-32GB has fp32, fp16"):
        find_device("V100").flops_per_second("bf16")


def test_counts_and_bases_as_people_write_them():
    assert parse_count("10M", "data") == 10_000_000
    assert parse_count("1_000", "data") == parse_count("1,000", "data") == 1000
    assert parse_base("1e-3@256") == (1e-3, 256)
    for wrong in ("ten", "-5", "0"):
        with pytest.raises(ValueError, match="data is"):
            parse_count(wrong, "data")
    for wrong in ("1e-3", "@256", "x@256"):
        with pytest.raises(ValueError, match="base_lr is"):
            parse_base(wrong)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"objective": "magic"}, "objective is 'magic'"),
        ({"share": 1.2}, "share is 1.2"),
        ({"seen": "1M", "epochs": 3}, "give one of the two"),
        ({"epochs": -1}, "epochs is -1"),
    ],
)
def test_requests_that_make_no_sense(asked, complaint):
    with pytest.raises(ValueError, match=complaint):
        Request(**asked)


@pytest.mark.parametrize("module", [evidence, recipes, request, search])
def test_examples_of_docstrings_run(module):
    tried = doctest.testmod(module)
    assert tried.attempted and not tried.failed
