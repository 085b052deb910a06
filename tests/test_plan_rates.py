"""Rates of the device at hand: that they can be true, that they come back from their file, and that a plan takes them."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from megabatch.measuring import rates
from megabatch.measuring.rates import measure_here, measure_rates
from megabatch.planning.hardware import find_machine
from megabatch.planning.planner import choose_precision
from megabatch.planning.rates import Rates, as_text, read_rates, write_rates
from megabatch.training.launch import ranks

H200 = Rates("NVIDIA H200", "cuda", 139 * 2**30, 8, {"fp32": 5e13, "bf16": 8e14}, 4e12, 5e10, 3e11, 8, "2.13.0", "2026-11-15")


def test_rates_of_this_machine_can_be_true():
    found = measure_here(seconds=0.02)
    assert found.kind == "cpu" and found.device and found.memory > 2**30
    # From a slow core to a large server.
    assert 1e8 < found.products["fp32"] < 1e14
    assert 1e8 < found.bandwidth < 1e13
    assert (found.copy, found.link, found.ranks) == (None, None, 1)
    assert "fp32" in as_text(found) and "GB/s" in as_text(found)


def test_a_precision_that_is_slow_is_measured_in_time(monkeypatch):
    # A product of which even the smallest takes longer than there is time for.
    sizes = []

    def slow(work, device, times):
        sizes.append(work().shape[0])
        return 1.0

    monkeypatch.setattr(rates, "_seconds_of", slow)
    assert rates._product(torch.device("cpu"), torch.float32, 0.25) == 2 * 64**3
    assert max(sizes) == 64


def rates_of_rank(rank, size):
    from megabatch.config import Compute

    with ranks(Compute(device="cpu")) as here:
        return measure_rates(here.device, here.group, 0.02)


def test_ranks_measure_what_they_send_each_other(world):
    for found in world.run(2, rates_of_rank):
        assert found.ranks == 2 and 1e6 < found.link < 1e12
        assert "sent by each of 2 ranks" in as_text(found)


def test_rates_come_back_from_their_file(tmp_path):
    assert read_rates(write_rates(H200, tmp_path / "new" / "rates.json")) == H200


@pytest.mark.parametrize(
    "text", ["", "{}", '{"measured": "fit"}', json.dumps({"measured": "rates", **dataclasses.asdict(H200), "bandwidth": 0})]
)
def test_a_file_without_rates_is_named(text, tmp_path):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ValueError, match=r"file.json: holds no rates .*megabatch env --measure"):
        find_machine(rates=tmp_path / "file.json")
    with pytest.raises(ValueError, match="there is no such file"):
        find_machine(rates=tmp_path / "nowhere.json")


def test_a_machine_of_measured_rates():
    machine = find_machine(rates=H200)
    assert (machine.gpus, machine.device.name, machine.device.memory) == (8, "NVIDIA H200", 139 * 2**30)
    assert machine.device.source == "measured on NVIDIA H200, 2026-11-15"
    # A step reaches 0.75 of a measured product and 0.9 of a measured copy; of a link all that was measured.
    assert machine.device.rate("bf16") == pytest.approx(0.75 * 8e14)
    assert machine.device.bandwidth * machine.device.shares.bandwidth == pytest.approx(0.9 * 4e12)
    assert machine.link == pytest.approx(3e11)
    # What was not measured is the data sheet's.
    assert machine.device.rates["tf32"] == find_machine("H200").device.rates["tf32"]
    assert find_machine("4xH200", rates=H200).gpus == 4
    assert find_machine(memory="80GiB", rates=H200).device.memory == 80 * 2**30


def test_rates_of_another_device_are_refused():
    with pytest.raises(ValueError, match="gpu is 'A100', and the rates were measured on NVIDIA H200"):
        find_machine("A100", rates=H200)


def test_a_cpu_with_a_slow_half_precision_trains_in_full():
    cpu = dataclasses.replace(H200, device="some CPU", kind="cpu", gpus=1, products={"fp32": 1e11, "bf16": 1e12}, copy=None)
    machine = find_machine(rates=cpu)
    assert machine.device.name == "cpu" and machine.device.rate("fp32") == pytest.approx(0.75e11)
    assert choose_precision(None, machine) == "fp32"
    assert choose_precision("bf16", machine) == "bf16"
