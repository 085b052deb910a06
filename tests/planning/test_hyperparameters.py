"""The rules of a plan against numbers computed by hand from their sources, and the parsing of requests and machines."""

from __future__ import annotations

import doctest
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch import evidence
from megabatch.costs.devices import DEVICES, find_device
from megabatch.costs.hardware import find_machine, parse_bytes, with_rates
from megabatch.objectives import saturation_of
from megabatch.planning import choose_batch, request, search
from megabatch.planning.choose_batch import (
    CriticalBatch,
    contrastive,
    critical_batch,
    fine_tuning,
    judge,
    mean_loss,
    soonest,
    updates_needed,
)
from megabatch.planning.hyperparameters import base_recipe, derive_hyperparameters
from megabatch.planning.request import Request, parse_base, parse_count

BUDGETS = st.integers(10_000, 10**11)


def test_updates_needed_lie_between_too_few_and_enough_where_both_were_measured():
    # Own run: 488 lost six points, 1,953 none. arXiv 2303.15343, table 8: 128k (3.4k updates) lost 1.4 points, 32k (13.7k) none.
    assert 488 < updates_needed(2_000_000) < 1_953
    assert updates_needed(2_000_000) == round(math.sqrt(488 * 1_953)) == 976
    assert updates_needed(450_000_000, "locked") == round(math.sqrt(3_433 * 13_733)) == 6_866


def test_a_locked_tower_needs_half_the_updates_of_one_from_scratch():
    assert updates_needed(10**8, "locked") == pytest.approx(updates_needed(10**8) / 2, abs=1)
    assert updates_needed(10**8, "locked") < updates_needed(10**8, "pretrained") < updates_needed(10**8)


def test_768_times_1024_samples_seen_give_a_batch_of_1024():
    # 786,432 samples seen: 976 · (786,432 / 2,000,000) ** 0.488 = 619 updates; 786,432 / 619 = 1,270, nearest power of two 1,024.
    choice = contrastive(768 * 1024, 42_276)
    assert choice.batch == 1024
    assert choice.updates == 768
    assert "4,096" in choice.notes[0]


def test_negatives_cap_the_batch_where_they_stop_paying():
    # 9 B seen: table 5 of arXiv 2303.15343 is best at 32k for the sigmoid and at 98k for the softmax.
    assert contrastive(9 * 10**9, 10**9, "siglip").batch == 32_768
    assert contrastive(9 * 10**9, 10**9, "clip").batch == 98_304


def test_sixty_four_million_samples_pay_for_a_large_batch_and_four_for_less_than_the_floor():
    # 64 M: 976 · 32 ** 0.488 = 5,294 updates, 12,089 samples each: 8,192 or 16,384 by ratio, log2(12,089) = 13.56.
    assert contrastive(64 * 10**6, 10**7).batch == 16_384
    assert contrastive(10**6, 10**6).batch < evidence.FLOOR


def test_the_batch_is_never_larger_than_the_data():
    assert contrastive(10**9, 5_000).batch == 4096


@given(BUDGETS, BUDGETS, st.sampled_from(["scratch", "pretrained", "locked"]), st.sampled_from(["clip", "siglip"]))
@settings(max_examples=200, deadline=None)
def test_more_samples_never_ask_for_a_smaller_batch_and_never_for_more_than_the_data(seen, data, start, loss):
    choice = contrastive(seen, data, loss, start)
    assert 1 <= choice.batch <= min(data, saturation_of(loss))
    assert contrastive(2 * seen, data, loss, start).batch >= choice.batch
    assert choice.updates == math.ceil(seen / choice.batch)
    if choice.batch < evidence.FLOOR <= data:
        assert seen / evidence.FLOOR < evidence.FEWEST_UPDATES


def test_collisions_by_hand():
    # B²/2U: 1,000² / (2 · 50,000) = 10.
    assert evidence.collisions(1_000, 50_000) == 10


def test_a_batch_that_leaves_few_updates_gets_a_remark():
    remarks = judge(65_536, 2_000_000, 67_000, "scratch", "clip")
    assert "31 updates" in remarks[0]
    assert judge(1024, 2_000_000, 67_000, "scratch", "clip") == ()


def test_batches_above_the_ceiling_and_below_the_floor_get_a_remark():
    assert any("262,144" in line for line in judge(524_288, 10**11, 10**9, "scratch", "clip"))
    assert any("4,096" in line for line in judge(512, 300_000_000, 10_000_000, "scratch", "clip"))


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


def test_critical_batch_of_imagenet_is_goyals():
    assert critical_batch("supervised", 1_281_167) == 8192


def test_fine_tuning_is_small():
    assert fine_tuning(30_000, 10_000, pairs=False).batch == 32
    assert fine_tuning(30_000, 10_000, pairs=True).batch == 512


@pytest.mark.parametrize(
    ("size", "optimizer", "rate"),
    # 1e-3@256, four times the batch: Adam √4, SGD 4 (arXiv 2205.10287, 1706.02677).
    [(1024, "adamw", 2e-3), (1024, "sgd", 4e-3), (64, "adamw", 5e-4)],
)
def test_learning_rate_follows_the_batch(size, optimizer, rate):
    base = base_recipe("contrastive", 10**6, optimizer, (1e-3, 256))
    result = derive_hyperparameters(size, 10**6, 10**6, base)
    assert result.lr == pytest.approx(rate)
    assert result.sweep == ()


def test_outside_the_tested_range_the_rate_is_swept():
    base = base_recipe("contrastive", 10**6, "adamw", (1e-3, 256))
    result = derive_hyperparameters(65_536, 10**9, 10**8, base)
    assert result.lr == pytest.approx(0.016)
    assert result.sweep == pytest.approx((0.004, 0.008, 0.016, 0.032))
    assert "sweep" in result.numbers[0].shown
    assert result.numbers[0].confidence == "low"


def test_warm_up_is_two_over_one_minus_beta2():
    base = base_recipe("contrastive", 10**9, "adamw")
    # arXiv 1910.04209: β2 = 0.98 gives 100 steps, 0.95 (large batches, arXiv 2303.15343) gives 40.
    small, large = derive_hyperparameters(4096, 10**8, 10**7, base), derive_hyperparameters(32_768, 10**9, 10**8, base)
    assert (small.betas[1], small.warmup) == (0.98, 100)
    assert (large.betas[1], large.warmup) == (0.95, 40)
    # A short run warms up for a fifth at most.
    assert derive_hyperparameters(4096, 41_000, 10**4, base).warmup == 2


def test_ema_is_raised_to_the_power_of_the_growth():
    base = base_recipe("contrastive", 10**6, "adamw", (1e-3, 256))._replace(ema=(0.999, 256))
    # arXiv 2307.13813: 0.999 ** 4 at four times the batch.
    assert derive_hyperparameters(1024, 10**6, 10**6, base).ema == pytest.approx(0.999**4)


def test_every_number_has_a_reason_and_a_source():
    for objective in ("contrastive", "supervised", "lm", "finetune"):
        for number in derive_hyperparameters(1024, 10**6, 10**5, base_recipe(objective, 10**6, "adamw")).numbers:
            assert number.why and number.source and number.confidence in ("high", "medium", "low")
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
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
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
        assert device.source and device.memory > 10 * 2**30 and device.rates["fp32"] > 0


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


@pytest.mark.parametrize("module", [choose_batch, evidence, request, search])
def test_examples_of_docstrings_run(module):
    tried = doctest.testmod(module)
    assert tried.attempted and not tried.failed
